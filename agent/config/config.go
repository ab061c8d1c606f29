// Package config is the agent's configuration: the file /etc/skein/skein.yaml, its defaults and its
// checks. A Config that Load returns is valid; it is not changed afterwards. Keys says what a changed file does to an
// agent that runs: Adopt makes the configuration that it goes over to, Changes what differs.
package config

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/addr"
	"github.com/skeinmesh/skein/internal/dnsname"
	"github.com/skeinmesh/skein/internal/strictyaml"
)

// Places that are fixed by DESIGN.md section 14.
const (
	DefaultFile     = "/etc/skein/skein.yaml"
	DefaultStateDir = "/var/lib/skein"
	DefaultRunDir   = "/run/skein"
	SocketName      = "agent.sock"
)

// Config is the file. Keys are camelCase; everything may be left out.
type Config struct {
	Name   string            `yaml:"name"`   // default: the host's name
	Site   string            `yaml:"site"`   // Kilo's location
	Server *bool             `yaml:"server"` // takes part in Raft; absent: as the cluster has it
	Relay  string            `yaml:"relay"`  // auto | true | false
	Leader bool              `yaml:"leader"` // wish to lead the site
	Labels map[string]string `yaml:"labels"`

	InternalIP          string `yaml:"internalIP"`          // the only private address that is offered
	ForceEndpoint       string `yaml:"forceEndpoint"`       // host:port
	PersistentKeepalive uint32 `yaml:"persistentKeepalive"` // seconds
	// host:port; default: the cluster's setting, else the mesh's public nodes
	StunServers   []string `yaml:"stunServers"`
	NodeAddresses []string `yaml:"nodeAddresses"` // private prefixes that peers shall route to this node
	Advertise     []string `yaml:"advertise"`     // what else peers shall route to this node: node-addresses
	// take the peers' nodeAddresses; default: the cluster's setting
	RouteNodeAddresses *bool `yaml:"routeNodeAddresses"`

	NatTraversal               NatTraversal    `yaml:"natTraversal"`
	Peers                      map[string]Peer `yaml:"peers"` // by name
	HandshakeTimeoutSeconds    uint32          `yaml:"handshakeTimeoutSeconds"`
	DirectRetryIntervalSeconds uint32          `yaml:"directRetryIntervalSeconds"`
	LazyPaths                  string          `yaml:"lazyPaths"` // auto | off

	EmptyBlockSeconds uint32 `yaml:"emptyBlockSeconds"` // of a pool, beyond the spare, before it goes back

	RelayLimits RelayLimits `yaml:"relayLimits"`

	Egress Egress `yaml:"egress"`

	Kubernetes Kubernetes `yaml:"kubernetes"`
	CNI        CNI        `yaml:"cni"`

	Ports     Ports     `yaml:"ports"`
	Dataplane Dataplane `yaml:"dataplane"`
	Overlay   Overlay   `yaml:"overlay"` // read by `skein up --init` only
	StateDir  string    `yaml:"stateDir"`
	RunDir    string    `yaml:"runDir"`
	Log       Log       `yaml:"log"`
}

// NatTraversal is named as WireKube names it.
type NatTraversal struct {
	BirthdayAttack string   `yaml:"birthdayAttack"` // enabled | disabled; read by `skein up --init` only
	Stun           string   `yaml:"stun"`           // enabled | disabled; absent: as the cluster has it
	PortGuessing   string   `yaml:"portGuessing"`   // enabled | disabled; of this host
	PortMapping    []string `yaml:"portMapping"`    // of pcp, natpmp, upnp; absent: all
	IMDS           string   `yaml:"imds"`           // auto | true | false
}

// Protocols are those by which the router is asked for a port.
func (n NatTraversal) Protocols() []string {
	if n.PortMapping == nil {
		return []string{"pcp", "natpmp", "upnp"}
	}
	return n.PortMapping
}

// Peer is what this host does differently with one peer.
type Peer struct {
	BirthdayAttack string `yaml:"birthdayAttack"` // enabled | disabled; default: the cluster's setting
}

// Ports are where the agent listens.
type Ports struct {
	WireGuard uint16 `yaml:"wireguard"` // UDP
	Stun      uint16 `yaml:"stun"`      // UDP, on public nodes; the port above it is used too
	Relay     uint16 `yaml:"relay"`     // TCP, on public nodes
	// RelayOutside is the port of forceEndpoint's host that is forwarded to Relay; 0: the same number.
	RelayOutside uint16 `yaml:"relayOutside"`
	Control      uint16 `yaml:"control"` // TCP and UDP, overlay addresses only
	Plain        uint16 `yaml:"plain"`   // UDP, where plain WireGuard peers are carried
	Metrics      string `yaml:"metrics"` // addr:port; "off": none
	// UDPRelay are the ports that a relay reserves for pairs of its clients, first-last, UDP.
	UDPRelay string `yaml:"udpRelay"`
}

// RelayLimits bound what a node that relays does for others.
type RelayLimits struct {
	MemoryMiB     uint32 `yaml:"memoryMiB"`     // of queues and sessions
	ClientMbit    uint32 `yaml:"clientMbit"`    // per second that one client may send; 0: no limit
	ClientPackets uint32 `yaml:"clientPackets"` // per second that one client may send; 0: no limit
	ClientStreams uint32 `yaml:"clientStreams"` // that one client may have open
	Sessions      uint32 `yaml:"sessions"`      // clients at a time
}

// Kubernetes is the cluster that this host is a node of.
type Kubernetes struct {
	// Kubeconfig is the file with the apiserver's address and the agent's own ServiceAccount; InCluster: what a pod has
	// of its ServiceAccount; empty: no Kubernetes. The file may come later than the agent.
	Kubeconfig string `yaml:"kubeconfig"`
	Node       string `yaml:"node"` // the name of this host's Node object; default: the host's name, as kubelet has it
	// RevokeAfterSeconds is how long a member's Node must be gone, and the member silent, until it is revoked; 0: never.
	// Of admin nodes.
	RevokeAfterSeconds uint32 `yaml:"revokeAfterSeconds"`
}

// CNI is where the agent puts plugin and network configuration for the container runtime, once pods can start.
type CNI struct {
	ConfDir  string   `yaml:"confDir"` // empty: neither is written
	ConfFile string   `yaml:"confFile"`
	BinDir   string   `yaml:"binDir"`
	Network  string   `yaml:"network"` // its name
	Chain    []string `yaml:"chain"`   // plugins that come after; absent: portmap and bandwidth, those that are there
}

// InCluster as a kubeconfig is the ServiceAccount of the pod that the agent runs in.
const InCluster = "in-cluster"

// Egress is what this host itself uses of egresses.
type Egress struct {
	Clients []EgressClient `yaml:"clients"`
}

// EgressClient is the host, or one of its network namespaces, that uses egresses.
type EgressClient struct {
	NetNS string `yaml:"netns"` // path; empty: the host itself
	// in the network namespace: the link with an address of the mesh; not for the host
	Interface string   `yaml:"interface"`
	Egresses  []string `yaml:"egresses"` // namespace/name, in order of precedence
}

// Dataplane chooses drivers.
type Dataplane struct {
	WireGuard string `yaml:"wireguard"` // auto | kernel | userspace
	// Instance is 0 for a host's first agent; another one has other numbers and ports where the file says nothing else.
	Instance   uint8  `yaml:"instance"`
	Link       string `yaml:"link"`
	HopLink    string `yaml:"hopLink"`
	PlainLink  string `yaml:"plainLink"`
	NftTable   string `yaml:"nftTable"`   // and the beginning of the others' names
	Mark       uint32 `yaml:"mark"`       // of what WireGuard and the agent send
	TunnelMark uint32 `yaml:"tunnelMark"` // of what enters the tunnel
	MarkMask   uint32 `yaml:"markMask"`
	Rule       int    `yaml:"rule"`       // priority of the rule that leads into the tunnel
	FirstRule  int    `yaml:"firstRule"`  // of dataplane.RuleCount priorities
	Table      int    `yaml:"table"`      // the tunnel's
	FirstTable int    `yaml:"firstTable"` // of dataplane.TableCount tables
	Relay      string `yaml:"relay"`      // auto | kernel | userspace | off: who forwards UDP for others
	FoU        string `yaml:"fou"`        // auto | kernel | userspace: who makes the tunnels of egresses
}

// Overlay is the cluster's address range.
type Overlay struct {
	IPv4 string `yaml:"ipv4"`
}

// Log says how much and how.
type Log struct {
	Level  string `yaml:"level"`  // debug | info | warn | error
	Format string `yaml:"format"` // text | json
}

// NodeAddresses is what advertise knows: the host's own private addresses.
const NodeAddresses = "node-addresses"

// Relay settings.
const (
	Auto = "auto"
	On   = "true"
	Off  = "false"
)

// Who forwards, besides Auto.
const (
	Kernel    = "kernel"
	Userspace = "userspace"
	NoUDP     = "off"
)

// Default is the configuration of a host that says nothing.
func Default() Config {
	name, _ := os.Hostname()
	name, _, _ = strings.Cut(strings.ToLower(name), ".")
	c := Config{
		Name:  name,
		Relay: Auto,
		Ports: Ports{WireGuard: 51820, Stun: 3478, Relay: 7443, Control: 7946, Plain: 51821,
			Metrics: "127.0.0.1:9469", UDPRelay: "24000-28999"},
		EmptyBlockSeconds: 300,
		RelayLimits:       RelayLimits{MemoryMiB: 256, ClientStreams: 128, Sessions: 4096},
		NatTraversal:      NatTraversal{PortGuessing: "enabled", IMDS: Auto},
		LazyPaths:         Auto,
		Dataplane:         Dataplane{WireGuard: Auto, Relay: Auto, FoU: Auto},
		Overlay:           Overlay{IPv4: "10.4.0.0/16"},
		Kubernetes:        Kubernetes{RevokeAfterSeconds: 600},
		CNI:               CNI{ConfFile: "10-skein.conflist", BinDir: "/opt/cni/bin", Network: "skein"},
		StateDir:          DefaultStateDir,
		RunDir:            DefaultRunDir,
		Log:               Log{Level: "info", Format: "text"},
	}
	c.Dataplane.setNumbers(dataplane.DefaultNumbers())
	return c
}

// Load reads a file over the defaults. A missing file is an error only when it was asked for by name.
func Load(file string, asked bool) (Config, error) {
	c := Default()
	b, err := os.ReadFile(file)
	switch {
	case errors.Is(err, fs.ErrNotExist) && !asked:
	case err != nil:
		return c, fmt.Errorf("configuration file: %w", err)
	default:
		if err := strictyaml.Unmarshal(file, b, &c); err != nil {
			return c, err
		}
		if i := c.Dataplane.Instance; i > 0 && c.checkInstance() == nil { // once more, over that instance's defaults
			c = DefaultOf(int(i))
			if err := strictyaml.Unmarshal(file, b, &c); err != nil {
				return c, err
			}
		}
	}
	if err := c.Check(); err != nil {
		var k *KeyError
		if errors.As(err, &k) {
			if line := strictyaml.Line(b, k.Key); line > 0 {
				return c, fmt.Errorf("%s:%d: %w", file, line, err)
			}
		}
		return c, fmt.Errorf("%s: %w", file, err)
	}
	return c, nil
}

// Locate is file:line: key, or file: key where the file does not have the key.
func Locate(file, key string) string {
	if b, err := os.ReadFile(file); err == nil {
		if line := strictyaml.Line(b, key); line > 0 {
			return fmt.Sprintf("%s:%d: %s", file, line, key)
		}
	}
	return file + ": " + key
}

// KeyError is a value that is not allowed.
type KeyError struct{ Key, Problem string }

func (e *KeyError) Error() string { return e.Key + ": " + e.Problem }

func wrong(key, format string, args ...any) error {
	return &KeyError{Key: key, Problem: fmt.Sprintf(format, args...)}
}

// maxSite is how long a site's name may be, in bytes, as the log and records have it.
const maxSite = 64

// orNone reads Kilo's "-".
func orNone(s string) string {
	if s == "-" {
		return ""
	}
	return s
}

// Check says what is wrong with the values, as a *KeyError.
func (c *Config) Check() error {
	if !dnsname.IsLabel(c.Name) {
		return wrong("name", "%q is not a host label; allowed: 1 to 63 of a-z, 0-9 and -, with no - at either end", c.Name)
	}
	for _, one := range []struct{ key, have, allowed string }{
		{"relay", c.Relay, "auto true false"},
		{"dataplane.wireguard", c.Dataplane.WireGuard, "auto kernel userspace"},
		{"dataplane.fou", c.Dataplane.FoU, "auto kernel userspace"},
		{"dataplane.relay", c.Dataplane.Relay, "auto kernel userspace off"},
		{"natTraversal.imds", c.NatTraversal.IMDS, "auto true false"},
		{"natTraversal.birthdayAttack", c.NatTraversal.BirthdayAttack, " enabled disabled"},
		{"natTraversal.stun", c.NatTraversal.Stun, " enabled disabled"},
		{"natTraversal.portGuessing", c.NatTraversal.PortGuessing, "enabled disabled"},
		{"lazyPaths", c.LazyPaths, "auto off"},
		{"log.level", c.Log.Level, "debug info warn error"},
		{"log.format", c.Log.Format, "text json"},
	} {
		if !slices.Contains(strings.Split(one.allowed, " "), one.have) {
			return wrong(one.key, "%q is not allowed; allowed: %s", one.have, strings.Join(strings.Fields(one.allowed), ", "))
		}
	}
	for name, p := range c.Peers {
		if !dnsname.IsLabel(name) {
			return wrong("peers", "%q is not a node's name; allowed: 1 to 63 of a-z, 0-9 and -, with no - at either end",
				name)
		}
		if !slices.Contains([]string{"", "enabled", "disabled"}, p.BirthdayAttack) {
			return wrong("peers."+name+".birthdayAttack", "%q is not allowed; allowed: enabled, disabled", p.BirthdayAttack)
		}
	}
	if err := c.checkNumbers(); err != nil {
		return err
	}
	if err := c.checkPorts(); err != nil {
		return err
	}
	if err := c.checkRelayLimits(); err != nil {
		return err
	}
	if err := c.checkAddresses(); err != nil {
		return err
	}
	if err := c.checkEgress(); err != nil {
		return err
	}
	if err := c.checkKubernetes(); err != nil {
		return err
	}
	if err := c.checkCNI(); err != nil {
		return err
	}
	return c.checkTimes()
}

// cniName is what the CNI specification takes for the name of a network.
var cniName = regexp.MustCompile(`^[a-zA-Z0-9][a-zA-Z0-9_.-]*$`)

func (c *Config) checkCNI() error {
	n := c.CNI
	for _, d := range []struct{ key, path string }{{"cni.confDir", n.ConfDir}, {"cni.binDir", n.BinDir}} {
		if !filepath.IsAbs(d.path) && (d.path != "" || d.key == "cni.binDir") {
			return wrong(d.key, "%q: want a path that begins with /", d.path)
		}
	}
	if n.ConfFile != filepath.Base(n.ConfFile) || filepath.Ext(n.ConfFile) != ".conflist" {
		return wrong("cni.confFile", "%q: want the name of a file that ends in .conflist, without a directory", n.ConfFile)
	}
	if !cniName.MatchString(n.Network) {
		return wrong("cni.network", "%q is not a network name; want letters, digits, dots, underscores and hyphens, "+
			"beginning with a letter or digit", n.Network)
	}
	for _, p := range n.Chain {
		if !cniName.MatchString(p) || p == "skein-cni" {
			return wrong("cni.chain", "%q cannot be chained after skein-cni; want the name of another plugin, such "+
				"as portmap", p)
		}
	}
	return nil
}

func (c *Config) checkKubernetes() error {
	k := c.Kubernetes
	if k.Kubeconfig != "" && k.Kubeconfig != InCluster && !filepath.IsAbs(k.Kubeconfig) {
		return wrong("kubernetes.kubeconfig", "%q: want a path that begins with /, or %s", k.Kubeconfig, InCluster)
	}
	if k.Node != "" && !dnsname.IsName(k.Node) {
		return wrong("kubernetes.node", "%q is not a Node's name; allowed: 1 to 253 of a-z, 0-9, - and ., with neither - "+
			"nor . at either end", k.Node)
	}
	if k.Node != "" && k.Kubeconfig == "" {
		return wrong("kubernetes.node", "it is set, but kubernetes.kubeconfig is not: set both of them, or neither")
	}
	return nil
}

func (c *Config) checkPorts() error {
	seen := map[string]string{}
	for _, p := range []struct {
		key, proto string
		port       uint16
	}{
		{"ports.wireguard", "udp", c.Ports.WireGuard},
		{"ports.stun", "udp", c.Ports.Stun},
		{"ports.relay", "tcp", c.Ports.Relay},
		{"ports.control", "tcp", c.Ports.Control},
		{"ports.control", "udp", c.Ports.Control},
		{"ports.plain", "udp", c.Ports.Plain},
	} {
		if p.port == 0 {
			return wrong(p.key, "0 is not allowed; want 1 to 65535")
		}
		id := p.proto + strconv.Itoa(int(p.port))
		if other, ok := seen[id]; ok {
			return wrong(p.key, "port %d/%s is taken by %s", p.port, p.proto, other)
		}
		seen[id] = p.key
	}
	if err := c.checkUDPRelay(); err != nil {
		return err
	}
	if c.Ports.Stun == 65535 {
		return wrong("ports.stun", "65535 leaves no room for the alternate port, which is the next one; want 1 to 65534")
	}
	if c.Ports.Metrics != "off" {
		if _, err := netip.ParseAddrPort(c.Ports.Metrics); err != nil {
			return wrong("ports.metrics", "%q: want ADDRESS:PORT, such as 127.0.0.1:9469, or off", c.Ports.Metrics)
		}
	}
	return nil
}

// UDPRelayRange is UDPRelay in numbers.
func (p Ports) UDPRelayRange() (first, last uint16, err error) {
	a, b, ok := strings.Cut(p.UDPRelay, "-")
	x, err1 := strconv.ParseUint(strings.TrimSpace(a), 10, 16)
	y, err2 := strconv.ParseUint(strings.TrimSpace(b), 10, 16)
	if !ok || err1 != nil || err2 != nil || x == 0 || y <= x {
		return 0, 0, wrong("ports.udpRelay", "%q: want first-last, such as 24000-28999, with room for two ports at least",
			p.UDPRelay)
	}
	return uint16(x), uint16(y), nil
}

func (c *Config) checkUDPRelay() error {
	first, last, err := c.Ports.UDPRelayRange()
	if err != nil {
		return err
	}
	for key, port := range map[string]uint16{"ports.wireguard": c.Ports.WireGuard, "ports.stun": c.Ports.Stun,
		"ports.control": c.Ports.Control} {
		if port >= first && port <= last {
			return wrong("ports.udpRelay", "%s contains port %d of %s; choose a range without it",
				c.Ports.UDPRelay, port, key)
		}
	}
	return nil
}

func (c *Config) checkAddresses() error {
	if len(c.Site) > maxSite || !utf8.ValidString(c.Site) ||
		strings.ContainsFunc(c.Site, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return wrong("site", "%.80q is not a site's name; allowed: at most %d bytes of printable characters",
			c.Site, maxSite)
	}
	internal, err := addr.Internal(c.InternalIP)
	if err != nil {
		return wrong("internalIP", "%s", err)
	}
	if c.InternalIP = ""; internal.IsValid() {
		c.InternalIP = internal.String()
	}
	if c.ForceEndpoint = orNone(c.ForceEndpoint); c.ForceEndpoint != "" && !hostPort(c.ForceEndpoint) {
		return wrong("forceEndpoint", "%q: want host:port, such as edge.example.com:51820", c.ForceEndpoint)
	}
	for _, p := range c.NatTraversal.PortMapping {
		if !slices.Contains(NatTraversal{}.Protocols(), p) {
			return wrong("natTraversal.portMapping", "%q is not allowed; allowed: pcp, natpmp, upnp, or an empty list for none",
				p)
		}
	}
	for _, s := range c.StunServers {
		if !hostPort(s) {
			return wrong("stunServers", "%q: want host:port, such as stun.example.net:3478", s)
		}
	}
	for _, a := range c.NodeAddresses {
		p, err := netip.ParsePrefix(a)
		if err != nil || p.Masked() != p {
			return wrong("nodeAddresses", "%q: want a prefix without host bits, such as 192.168.7.0/24", a)
		}
		if !addr.Private(p) {
			return wrong("nodeAddresses", "%s is not private; peers route only private prefixes to a node: %s", p,
				addr.PrivateText)
		}
	}
	for _, what := range c.Advertise {
		if what != NodeAddresses {
			return wrong("advertise", "%q is not allowed; allowed: %s, or an empty list for nothing", what, NodeAddresses)
		}
	}
	p, err := netip.ParsePrefix(c.Overlay.IPv4)
	if err != nil || !p.Addr().Is4() || p.Masked() != p || p.Bits() > 28 {
		return wrong("overlay.ipv4", "%q: want an IPv4 prefix of /28 or larger without host bits, such as 10.4.0.0/16",
			c.Overlay.IPv4)
	}
	return nil
}

// isEgress tells whether s is namespace/name of an egress.
func isEgress(s string) bool {
	namespace, name, _ := strings.Cut(s, "/")
	return len(namespace) <= dnsname.MostLabel && dnsname.IsName(namespace) && dnsname.IsName(name)
}

func (c *Config) checkEgress() error {
	const key, mostClients, mostEgresses = "egress.clients", 256, 64
	if len(c.Egress.Clients) > mostClients {
		return wrong(key, "%d clients; want %d at most", len(c.Egress.Clients), mostClients)
	}
	seen := map[string]bool{}
	for _, e := range c.Egress.Clients {
		who := "the host itself (netns: \"\")"
		if e.NetNS != "" {
			who = e.NetNS
		}
		switch {
		case e.NetNS != "" && (!filepath.IsAbs(e.NetNS) || filepath.Clean(e.NetNS) != e.NetNS):
			return wrong(key, "netns %q: want a path from /, such as /run/netns/blue, or \"\" for the host itself", e.NetNS)
		case seen[e.NetNS]:
			return wrong(key, "%s has two entries; name all its egresses in one", who)
		case e.NetNS == "" && e.Interface != "":
			return wrong(key, "interface %q: leave it out for the host itself, whose tunnels use dataplane.link", e.Interface)
		case e.NetNS != "" && !dataplane.ValidLink(e.Interface):
			return wrong(key, "%s: interface %q is not an interface name; want the link that has an address of the mesh, "+
				"1 to 15 characters without / : or blanks", who, e.Interface)
		case len(e.Egresses) == 0:
			return wrong(key, "%s names no egress; want at least one, as namespace/name", who)
		case len(e.Egresses) > mostEgresses:
			return wrong(key, "%s names %d egresses; want %d at most", who, len(e.Egresses), mostEgresses)
		}
		seen[e.NetNS] = true
		for i, name := range e.Egresses {
			if !isEgress(name) {
				return wrong(key, "%s: %q is not an egress's name; want namespace/name, as `skein egress list` shows it",
					who, name)
			}
			if slices.Contains(e.Egresses[:i], name) {
				return wrong(key, "%s: egress %q is named twice; name it once", who, name)
			}
		}
	}
	return nil
}

func hostPort(s string) bool {
	host, port, err := net.SplitHostPort(s)
	n, perr := strconv.ParseUint(port, 10, 16)
	return err == nil && perr == nil && host != "" && n > 0
}

func (c *Config) checkRelayLimits() error {
	l := c.RelayLimits
	for _, t := range []struct {
		key               string
		have, least, most uint32
	}{
		{"memoryMiB", l.MemoryMiB, 16, 1 << 20},
		{"clientMbit", l.ClientMbit, 0, 1 << 20},
		{"clientPackets", l.ClientPackets, 0, 1 << 30},
		{"clientStreams", l.ClientStreams, 1, 65535},
		{"sessions", l.Sessions, 1, 1 << 20},
	} {
		if t.have < t.least || t.have > t.most {
			return wrong("relayLimits."+t.key, "%d is not allowed; want %d to %d", t.have, t.least, t.most)
		}
	}
	if l.ClientPackets > 0 && l.ClientPackets < 100 {
		return wrong("relayLimits.clientPackets", "%d is not allowed; want 0 (no limit) or at least 100: fewer would not "+
			"carry a node's own gossip", l.ClientPackets)
	}
	return nil
}

func (c *Config) checkTimes() error {
	for _, t := range []struct {
		key        string
		have, most uint32
	}{
		{"directRetryIntervalSeconds", c.DirectRetryIntervalSeconds, 86400},
		{"handshakeTimeoutSeconds", c.HandshakeTimeoutSeconds, 3600},
		{"persistentKeepalive", c.PersistentKeepalive, 3600},
		{"emptyBlockSeconds", c.EmptyBlockSeconds, 86400},
	} {
		if t.have > t.most {
			return wrong(t.key, "%d is not allowed; want at most %d seconds", t.have, t.most)
		}
	}
	return nil
}
