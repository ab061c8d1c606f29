package cni

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	current "github.com/containernetworking/cni/pkg/types/100"
	"github.com/containernetworking/cni/pkg/version"
)

// Type is the plugin's name in a network configuration, and its file's in a directory of plugins.
const Type = "skein-cni"

// DefaultSocket is where the agent answers plugins.
const DefaultSocket = "/run/skein/cni.sock"

// Bounds of what a runtime says.
const (
	maxInput       = 4 << 20 // bytes of standard input; the longest is GC's list: about 120 bytes an attachment
	maxSocket      = 107     // bytes (sun_path in unix(7))
	maxContainerID = 64      // characters: what container runtimes use, and fits the alias of a link
	maxWanted      = 16      // addresses that may be asked for; more than two are a mistake anyway
)

// Versions are those of the specification that the plugin speaks.
func Versions() []string { return []string{"0.3.1", "0.4.0", "1.0.0", "1.1.0"} }

// config is the plugin's part of a network configuration, with what the runtime put in.
type config struct {
	types.PluginConf
	Socket        string `json:"socket"`
	IPMasq        bool   `json:"ipMasq"`
	RuntimeConfig struct {
		IPs  []string    `json:"ips"`
		Pool string      `json:"pool"`
		DNS  *runtimeDNS `json:"dns"`
		// Annotations are the pod's: containerd passes them to plugins that declare the capability.
		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			IPs  []string `json:"ips"`
			Pool string   `json:"pool"`
			// Annotations are for runtimes that know no such capability.
			Annotations map[string]string `json:"annotations"`
		} `json:"cni"`
	} `json:"args"`

	prev *current.Result // prevResult; nil: none
}

// runtimeDNS is the capability argument dns, whose names differ from the configuration's.
type runtimeDNS struct {
	Servers  []string `json:"servers"`
	Searches []string `json:"searches"`
	Options  []string `json:"options"`
}

// parseConfig reads and judges a configuration. It takes any bytes.
func parseConfig(stdin []byte) (*config, *types.Error) {
	c := &config{}
	if err := json.Unmarshal(stdin, c); err != nil {
		return nil, complaint(uint32(types.ErrDecodingFailure), "the network configuration cannot be read: "+err.Error(),
			"see docs/cni.md for the keys of type "+Type)
	}
	if c.Socket == "" {
		c.Socket = DefaultSocket
	}
	switch {
	case !filepath.IsAbs(c.Socket) || len(c.Socket) > maxSocket:
		return nil, complaint(CodeConfig, fmt.Sprintf("socket %.200q is not a path of a socket", c.Socket),
			fmt.Sprintf("it must begin with / and have at most %d bytes; left out it is %s", maxSocket, DefaultSocket))
	case c.IPAM.Type != "":
		return nil, complaint(uint32(types.ErrUnsupportedField),
			fmt.Sprintf("ipam: {type: %.100q} is not supported", c.IPAM.Type),
			"skein gives the addresses itself: take ipam out of the configuration")
	case c.IPMasq:
		return nil, complaint(uint32(types.ErrUnsupportedField), "ipMasq: true is not supported", "pod addresses are "+
			"routed as they are: take ipMasq out of the configuration")
	}
	if err := version.ParsePrevResult(&c.PluginConf); err != nil {
		return nil, complaint(uint32(types.ErrDecodingFailure), "prevResult cannot be read: "+err.Error(),
			"it must be a result of cniVersion "+c.CNIVersion)
	}
	if c.PrevResult != nil {
		var err error
		if c.prev, err = current.GetResult(c.PrevResult); err != nil {
			return nil, complaint(uint32(types.ErrDecodingFailure), "prevResult cannot be converted: "+err.Error(),
				"it must be a result of cniVersion "+c.CNIVersion)
		}
		if err := soundResult(c.prev); err != nil {
			return nil, complaint(CodeConfig, "prevResult is wrong: "+err.Error(), "it must be what the ADD before has printed")
		}
	}
	return c, nil
}

// soundResult looks for what the library does not: missing entries, and addresses of interfaces that are not listed.
func soundResult(r *current.Result) error {
	if slices.Contains(r.Interfaces, nil) || slices.Contains(r.IPs, nil) || slices.Contains(r.Routes, nil) {
		return fmt.Errorf("an entry is null")
	}
	for _, ip := range r.IPs {
		if i := ip.Interface; i != nil && (*i < 0 || *i >= len(r.Interfaces)) {
			return fmt.Errorf("%s names interface %d of %d", ip.Address.String(), *i, len(r.Interfaces))
		}
	}
	return nil
}

// wanted says which addresses are asked for: the capability, else args, else CNI_ARGS, as CONVENTIONS.md has it.
func (c *config) wanted(a podArgs) ([]string, *types.Error) {
	from, ask := "runtimeConfig.ips", c.RuntimeConfig.IPs
	if len(ask) == 0 {
		from, ask = "args.cni.ips", c.Args.CNI.IPs
	}
	if len(ask) == 0 {
		from, ask = "IP in CNI_ARGS", a.ips
	}
	if len(ask) > maxWanted {
		return nil, complaint(CodeConfig, fmt.Sprintf("%s: %d addresses are asked for", from, len(ask)),
			"ask for one IPv4 and one IPv6 address at most")
	}
	var out []string
	families := map[bool]string{}
	for _, s := range ask {
		ip, err := parseIP(s)
		if err != nil {
			return nil, complaint(CodeConfig, fmt.Sprintf("%s: %.100q is not an address", from, s), "write it as 10.1.2.3 or "+
				"2001:db8::3; a prefix length may follow and is not looked at")
		}
		if other, ok := families[ip.Is4()]; ok && other != ip.String() {
			return nil, complaint(CodeConfig, fmt.Sprintf("%s: both %s and %s are asked for", from, other, ip),
				"ask for one IPv4 and one IPv6 address at most")
		} else if !ok {
			families[ip.Is4()] = ip.String()
			out = append(out, ip.String())
		}
	}
	return out, nil
}

// parseIP takes an address, with a prefix length or without.
func parseIP(s string) (netip.Addr, error) {
	s = strings.TrimSpace(s)
	if p, err := netip.ParsePrefix(s); err == nil {
		return p.Addr().Unmap(), nil
	}
	a, err := netip.ParseAddr(s)
	if err == nil && a.Zone() != "" {
		err = fmt.Errorf("%s has a zone", s)
	}
	return a.Unmap(), err
}

// pool is the pool that is asked for by name; empty: none.
func (c *config) pool() string {
	if p := c.RuntimeConfig.Pool; p != "" {
		return p
	}
	return c.Args.CNI.Pool
}

// annotations are the pod's about egresses: the capability's, and args' where that names no such key.
func (c *config) annotations() map[string]string {
	all := maps.Clone(c.Args.CNI.Annotations)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, c.RuntimeConfig.Annotations)
	return EgressAnnotations(all)
}

// dns is what the result says of name servers: what was given, the runtime's word before the file's.
func (c *config) dns() types.DNS {
	d := c.DNS
	if r := c.RuntimeConfig.DNS; r != nil {
		d.Nameservers, d.Search, d.Options = r.Servers, r.Searches, r.Options
	}
	if d.IsEmpty() && c.prev != nil {
		return c.prev.DNS
	}
	return d
}

// socketOf finds the socket for a DEL, which must not fail for a configuration that became wrong since. Empty: unknown.
func socketOf(stdin []byte) string {
	var c struct {
		Socket string `json:"socket"`
	}
	switch err := json.Unmarshal(stdin, &c); {
	case err == nil && c.Socket == "":
		return DefaultSocket
	case err != nil || !filepath.IsAbs(c.Socket) || len(c.Socket) > maxSocket:
		return ""
	}
	return c.Socket
}

// stillValid reads GC's list. An empty list, and null, say that nothing is valid; a list that is missing (cnitool
// passes none) says nothing, and to take it for an empty one would cut every pod off.
func stillValid(stdin []byte) (list []types.GCAttachment, listed bool, e *types.Error) {
	var keys struct {
		List json.RawMessage `json:"cni.dev/valid-attachments"`
		Old  json.RawMessage `json:"cni.dev/attachments"` // as a draft of the specification had it
	}
	err := json.Unmarshal(stdin, &keys)
	if keys.List == nil {
		keys.List = keys.Old
	}
	if err == nil && keys.List == nil {
		return nil, false, nil
	}
	if err == nil {
		err = json.Unmarshal(keys.List, &list)
	}
	if err != nil {
		return nil, false, complaint(uint32(types.ErrDecodingFailure), "cni.dev/valid-attachments cannot be read: "+
			err.Error(), "it is a list of {containerID, ifname}")
	}
	return list, true, nil
}
