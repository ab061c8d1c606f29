package config_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/dataplane"
)

func load(t *testing.T, text string) (config.Config, error) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "skein.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return config.Load(file, true)
}

func TestLoad(t *testing.T) {
	c, err := load(t, "name: dc1\nsite: dc\nserver: true\nrelay: true\nports: {wireguard: 51999}\n")
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "dc1" || c.Relay != config.On || c.Server == nil || !*c.Server || c.Ports.WireGuard != 51999 ||
		c.Ports.Relay != 7443 {
		t.Fatalf("have %+v", c)
	}
}

// The ports that hosts, firewalls and documents rely on, and a time.
func TestDefaults(t *testing.T) {
	want := config.Ports{WireGuard: 51820, Stun: 3478, Relay: 7443, Control: 7946, Plain: 51821, Metrics: "127.0.0.1:9469",
		UDPRelay: "24000-28999"}
	if have := config.Default().Ports; have != want {
		t.Errorf("%+v, want %+v", have, want)
	}
	if have := config.Default().Kubernetes.RevokeAfterSeconds; have != 600 {
		t.Errorf("a member is revoked %d s after its Node has gone", have)
	}
}

// Values as Kilo's annotations have them are taken.
func TestKilosValues(t *testing.T) {
	c, err := load(t, "name: a\ninternalIP: 10.0.0.7/24\nforceEndpoint: '-'\n")
	if err != nil || c.InternalIP != "10.0.0.7" || c.ForceEndpoint != "" {
		t.Errorf("%q, %q, %v", c.InternalIP, c.ForceEndpoint, err)
	}
	if c, err = load(t, "name: a\ninternalIP: '-'\nforceEndpoint: edge.example.com:51820\n"); err != nil ||
		c.InternalIP != "" || c.ForceEndpoint != "edge.example.com:51820" {
		t.Errorf("%q, %q, %v", c.InternalIP, c.ForceEndpoint, err)
	}
}

func TestLoadRefuses(t *testing.T) {
	for _, c := range []struct{ name, in, want string }{
		{"unknown key", "name: a\nsit: b\n",
			`skein.yaml:2: unknown key "sit"; allowed here: advertise, cni, dataplane, directRetry`},
		{"unknown nested key", "name: a\nports: {wg: 1}\n",
			`unknown key "ports.wg"; allowed here: control, metrics, plain, relay, relayOutside, stun, udpRelay, wireguard`},
		{"wrong type", "name: a\nports: {relay: fast}\n", `skein.yaml:2: ports.relay: want a whole number`},
		{"bad name", "name: A_b\n", `name: "A_b" is not a host label`},
		{"bad relay", "name: a\nrelay: maybe\n", `relay: "maybe" is not allowed; allowed: auto, true, false`},
		{"same port twice", "name: a\nports: {relay: 7946}\n", `port 7946/tcp is taken by ports.relay`},
		{"port 0", "name: a\nports: {stun: 0}\n", `ports.stun: 0 is not allowed`},
		{"bad endpoint", "name: a\nforceEndpoint: nowhere\n", `"nowhere": want host:port`},
		{"long site", "name: a\nsite: " + strings.Repeat("s", 300) + "\n",
			`is not a site's name; allowed: at most 64 bytes of printable characters`},
		{"site with control characters", "name: a\nsite: \"a\\e[31m\"\n", `site: "a\x1b[31m" is not a site's name`},
		{"bad internal address", "name: a\ninternalIP: 10.0.0.256\n", `"10.0.0.256" is not an IP address: want one of the host`},
		{"advertise", "name: a\nadvertise: [pods]\n", `advertise: "pods" is not allowed; allowed: node-addresses`},
		{"port mapping", "name: a\nnatTraversal: {portMapping: [pcp, ssdp]}\n",
			`natTraversal.portMapping: "ssdp" is not allowed; allowed: pcp, natpmp, upnp`},
		{"metadata", "name: a\nnatTraversal: {imds: maybe}\n",
			`natTraversal.imds: "maybe" is not allowed; allowed: auto, true, false`},
		{"host bits", "name: a\noverlay: {ipv4: 10.4.1.0/16}\n", `overlay.ipv4`},
		{"tiny overlay", "name: a\noverlay: {ipv4: 10.4.1.0/30}\n", `overlay.ipv4`},
		{"FoU driver", "dataplane: {fou: fast}\n", `dataplane.fou: "fast" is not allowed; allowed: auto, kernel, userspace`},
		{"egress without names", "egress: {clients: [{netns: \"\"}]}\n",
			`egress.clients: the host itself (netns: "") names no egress`},
		{"egress of no namespace", "egress: {clients: [{egresses: [nat]}]}\n", `"nat" is not an egress's name; want namespace/name`},
		{"egress twice", "egress: {clients: [{egresses: [a/b, a/b]}]}\n", `egress "a/b" is named twice`},
		{"host twice", "egress: {clients: [{egresses: [a/b]}, {egresses: [a/c]}]}\n",
			`has two entries; name all its egresses in one`},
		{"relative netns", "egress: {clients: [{netns: blue, interface: eth0, egresses: [a/b]}]}\n",
			`netns "blue": want a path from /`},
		{"netns without interface", "egress: {clients: [{netns: /run/netns/blue, egresses: [a/b]}]}\n",
			`/run/netns/blue: interface "" is not an interface name`},
		{"interface of the host", "egress: {clients: [{interface: eth0, egresses: [a/b]}]}\n",
			`interface "eth0": leave it out for the host itself`},
		{"relative directory", "name: a\ncni: {confDir: net.d}\n", `cni.confDir: "net.d": want a path that begins with /`},
		{"no directory of plugins", "name: a\ncni: {binDir: ''}\n", `cni.binDir: "": want a path that begins with /`},
		{"file elsewhere", "name: a\ncni: {confFile: ../x.conflist}\n",
			`cni.confFile: "../x.conflist": want the name of a file`},
		{"file of another kind", "name: a\ncni: {confFile: x.yaml}\n", `want the name of a file that ends in .conflist`},
		{"network", "name: a\ncni: {network: a b}\n", `cni.network: "a b" is not a network name`},
		{"chained itself", "name: a\ncni: {chain: [portmap, skein-cni]}\n", `cni.chain: "skein-cni" cannot be chained after skein-cni`},
		{"link name", "name: a\ndataplane: {link: a-name-that-is-too-long}\n", `dataplane.link`},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := load(t, c.in)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("have %v, want %s", err, c.want)
			}
		})
	}
}

func TestPortMappingCanBeSwitchedOff(t *testing.T) {
	for in, want := range map[string]string{"name: a\n": "pcp natpmp upnp", "natTraversal: {portMapping: []}\n": "",
		"natTraversal: {portMapping: [upnp]}\n": "upnp"} {
		c, err := load(t, in)
		if got := strings.Join(c.NatTraversal.Protocols(), " "); err != nil || got != want {
			t.Errorf("%q: %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestEgressClients(t *testing.T) {
	c, err := load(t, "egress:\n  clients:\n  - egresses: [internet/nat]\n  - {netns: /run/netns/blue, interface: eth0, "+
		"egresses: [dc/nat, internet/nat]}\ndataplane: {fou: userspace}\n")
	if err != nil || len(c.Egress.Clients) != 2 || c.Egress.Clients[1].Egresses[1] != "internet/nat" ||
		c.Dataplane.FoU != config.Userspace {
		t.Errorf("%+v, %v", c.Egress, err)
	}
}

func TestMissingFile(t *testing.T) {
	missing := filepath.Join(t.TempDir(), "none.yaml")
	if _, err := config.Load(missing, true); err == nil {
		t.Fatal("a file that was asked for and is not there must be an error")
	}
	if _, err := config.Load(missing, false); err != nil {
		t.Fatal(err)
	}
}

func FuzzLoad(f *testing.F) {
	f.Add("name: a\nports: {wireguard: 1}\n")
	f.Fuzz(func(t *testing.T, text string) { _, _ = load(t, text) })
}

// dataplane.instance moves numbers and ports; single keys come before it, wherever they stand.
func TestNumbers(t *testing.T) {
	for _, c := range []struct {
		name, file string
		want       dataplane.Numbers
		wireguard  uint16
		metrics    string
	}{
		{"none", "name: a\n", dataplane.DefaultNumbers(), 51820, "127.0.0.1:9469"},
		{"instance", "name: a\ndataplane: {instance: 1}\n", dataplane.NumbersOf(1), 51830, "127.0.0.1:9479"},
		{"single keys", "name: a\nports: {wireguard: 4500}\ndataplane: {link: mesh0, table: 77, mark: 0x800000, " +
			"tunnelMark: 0x1000000, markMask: 0x1800000, instance: 2, nftTable: mesh}\n",
			func() dataplane.Numbers {
				n := dataplane.NumbersOf(2).WithNftTable("mesh")
				n.Link, n.RouteTable, n.MarkWG, n.MarkRoute, n.MarkMask = "mesh0", 77, 0x800000, 0x1000000, 0x1800000
				return n
			}(), 4500, "127.0.0.1:9489"},
		{"blocks", "name: a\ndataplane: {rule: 9000, firstRule: 8000, firstTable: 200, hopLink: h0, plainLink: p0}\n",
			func() dataplane.Numbers {
				n := dataplane.DefaultNumbers()
				n.RulePriority, n.FirstRule, n.FirstTable, n.HopLink, n.PlainLink = 9000, 8000, 200, "h0", "p0"
				return n
			}(), 51820, "127.0.0.1:9469"},
	} {
		cfg, err := load(t, c.file)
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if got := cfg.Dataplane.Numbers(); got != c.want || cfg.Ports.WireGuard != c.wireguard ||
			cfg.Ports.Metrics != c.metrics {
			t.Errorf("%s: %+v, ports %+v", c.name, got, cfg.Ports)
		}
	}
	for file, want := range map[string]string{
		"name: a\ndataplane: {instance: 3}\n": "skein.yaml:2: dataplane.instance: 3 is not allowed; want 0 to 2",
		"name: a\ndataplane:\n  table: 254\n": "skein.yaml:3: dataplane.table: 254 cannot be used; want 1 " +
			"to 252",
		"name: a\ndataplane: {instance: 1, mark: 0x20}\n": "skein.yaml:2: dataplane.mark: 0x20 has bits outside of the " +
			"mask 0x18",
		"name: a\ndataplane:\n  nftTable: my-table\n": `skein.yaml:3: dataplane.nftTable: "my-table" is not a name of an nft table`,
		"name: a\ndataplane:\n  firstRule: 32400\n": "skein.yaml:3: dataplane.firstRule: 32400: 306 priorities " +
			"begin there",
		"name: a\ndataplane:\n  tunnelMark: 32\n": "skein.yaml:3: dataplane.tunnelMark: 0x20 is also the mark of packets " +
			"that do not enter the tunnel",
		"name: a\ndataplane:\n  plainLink: skein0\n":       `skein.yaml:3: dataplane.plainLink: "skein0" is also the name of WireGuard's link`,
		"name: a\ndataplane: {instance: 1, mask: 0x600}\n": `unknown key "dataplane.mask"`,
	} {
		if _, err := load(t, file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", file, err, want)
		}
	}
}

// Every instance is a configuration that an agent takes.
func TestInstances(t *testing.T) {
	ports := map[uint16]int{}
	for i := range dataplane.MaxInstance + 1 {
		c := config.DefaultOf(i)
		c.Name = "a"
		if err := c.Check(); err != nil {
			t.Errorf("instance %d: %v", i, err)
		}
		for _, p := range []uint16{c.Ports.WireGuard, c.Ports.Stun, c.Ports.Stun + 1, c.Ports.Relay, c.Ports.Plain} {
			if other, taken := ports[p]; taken {
				t.Errorf("instances %d and %d have port %d", other, i, p)
			}
			ports[p] = i
		}
	}
}
