package fou

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/dataplane"
)

// Names of drivers.
const (
	Auto      = "auto"
	Kernel    = "kernel"
	Userspace = "userspace"
)

// Kinds of links, as the kernel calls them.
const (
	kindIPIP   = "ipip"
	kindIP6Tnl = "ip6tnl"
	kindTUN    = "tuntap"
)

// Limits of a tunnel's MTU, in bytes.
const (
	minMTU4 = 68   // RFC 791
	minMTU6 = 1280 // RFC 8200
	maxMTU  = 65535 - dataplane.FoUOverhead6
)

// device is a tunnel device as it is or shall be.
type device struct {
	Name  string
	Kind  string
	Index int // 0: is not there yet; not compared
	MTU   int // bytes; 0: whatever it has
	Up    bool
	// Any takes what no other takes. The fields of tunnel count for the others of the kernel's kinds.
	Any bool
	tunnel
}

// tunnel is what the kernel knows of a tunnel.
type tunnel struct {
	Local, Remote         netip.Addr
	SourcePort, DestPort  uint16 // 0: follows from the flow
	TTL                   uint8
	Proto                 uint8
	FoU, Checksum         bool
	PMTU                  bool // IPv4: the outer packet is never fragmented
	WithoutLimit          bool // IPv6: no encapsulation limit
	OtherTOS, OtherParent bool // something of ours is not as it was made
}

type action uint8

const (
	actionRemove action = iota + 1
	actionReplace
	actionAdd
	actionChange // what the tunnel is, in place
	actionSet    // MTU, up
)

func (a action) String() string {
	return [...]string{"", "remove", "replace", "add", "change", "set"}[a]
}

// op is one change.
type op struct {
	action
	device // as it shall be; of a removal, as it is
}

// ours tells whether a device's name is one that this package gives.
func ours(name string) bool {
	return strings.HasPrefix(name, "fou4_") || strings.HasPrefix(name, "fou6_")
}

// check says what is wrong with a Spec.
func (s Spec) check() error {
	names := map[string]netip.Addr{}
	twice := map[tunnelEnds]bool{}
	for _, t := range s.Tunnels {
		six := t.Remote.Is6()
		least := minMTU4
		if six {
			least = minMTU6
		}
		switch {
		case !t.Remote.IsValid() || !t.Local.IsValid() || t.Local.Is6() != six || t.Remote.Is4In6() || t.Local.Is4In6() ||
			t.Remote.Zone() != "":
			return fmt.Errorf("tunnel from %s to %s: both must be addresses of one family, without a zone", t.Local, t.Remote)
		case t.Remote.IsUnspecified() || t.Remote.IsMulticast() || t.Local.IsUnspecified() || t.Local.IsMulticast() ||
			t.Local == t.Remote:
			return fmt.Errorf("tunnel from %s to %s: each must be the address of one host, and not the same", t.Local, t.Remote)
		case six && !s.IPv6, !six && !s.IPv4:
			return fmt.Errorf("tunnel to %s: its address family is disabled here", t.Remote)
		case t.MTU < least || t.MTU > maxMTU:
			return fmt.Errorf("tunnel to %s: an MTU of %d bytes is not between %d and %d: raise the MTU of the network below",
				t.Remote, t.MTU, least, maxMTU)
		}
		name, end := dataplane.FoULink(t.Remote), tunnelEnds{remote: t.Remote}
		if s.Gateway {
			end.local = t.Local
		}
		if twice[end] {
			return fmt.Errorf("tunnel to %s: it is listed twice", t.Remote)
		}
		twice[end] = true
		if other, taken := names[name]; taken && other != t.Remote {
			return fmt.Errorf("tunnels to %s and %s would both be named %s: give one endpoint another address",
				other, t.Remote, name)
		}
		names[name] = t.Remote
	}
	return nil
}

// tunnelEnds are the two ends of a tunnel.
type tunnelEnds struct{ local, remote netip.Addr }

// linkNames gives each tunnel of a Spec its device. A client's device is named after the far end. A gateway's TUN
// device is named after the near end, and serves all clients there. A gateway's device of the kernel is named after the
// client; of a client's several tunnels each keeps the device that it has, so that none is interrupted when another
// comes or goes, and those without one are told apart by two more digits.
func linkNames(s Spec, driver string, have []device) map[tunnelEnds]string {
	names := make(map[tunnelEnds]string, len(s.Tunnels))
	switch {
	case !s.Gateway:
		for _, t := range s.Tunnels {
			names[tunnelEnds{t.Local, t.Remote}] = dataplane.FoULink(t.Remote)
		}
		return names
	case driver != Kernel:
		for _, t := range s.Tunnels {
			names[tunnelEnds{t.Local, t.Remote}] = dataplane.FoULink(t.Local)
		}
		return names
	}
	there := make(map[tunnelEnds]string, len(have))
	for _, h := range have {
		if ours(h.Name) && h.Remote.IsValid() {
			there[tunnelEnds{h.Local, h.Remote}] = h.Name
		}
	}
	taken := make(map[string]bool, len(s.Tunnels))
	for _, t := range s.Tunnels {
		if name, ok := there[tunnelEnds{t.Local, t.Remote}]; ok && !taken[name] {
			names[tunnelEnds{t.Local, t.Remote}], taken[name] = name, true
		}
	}
	for _, t := range s.Tunnels {
		if names[tunnelEnds{t.Local, t.Remote}] != "" {
			continue
		}
		name := dataplane.FoULink(t.Remote)
		for n := 0; taken[name]; n++ {
			name = fmt.Sprintf("%s%02x", dataplane.FoULink(t.Remote), n)
		}
		names[tunnelEnds{t.Local, t.Remote}], taken[name] = name, true
	}
	return names
}

// wanted lists the devices of a Spec for a driver, by name; names are those of linkNames.
func wanted(s Spec, driver string, names map[tunnelEnds]string) []device {
	var out []device
	var most [2]int // MTU by family
	shared := map[string]int{}
	for _, t := range s.Tunnels {
		i := family(t.Remote)
		most[i] = max(most[i], t.MTU)
		d := device{Name: names[tunnelEnds{t.Local, t.Remote}], Kind: kindTUN, MTU: t.MTU, Up: true}
		if driver == Kernel {
			d.Kind = [...]string{kindIPIP, kindIP6Tnl}[i]
			d.tunnel = tunnel{Local: t.Local, Remote: t.Remote, SourcePort: s.Ports.To(), DestPort: s.Ports.To(),
				TTL: dataplane.FoUTTL, Proto: protocols[i], FoU: true, Checksum: true, PMTU: i == 0, WithoutLimit: i == 1}
			if t.SourcePortAuto {
				d.SourcePort = 0
			}
		} else if s.Gateway {
			if n, known := shared[d.Name]; known {
				out[n].MTU = max(out[n].MTU, d.MTU)
				continue
			}
			shared[d.Name] = len(out)
		}
		out = append(out, d)
	}
	for i, on := range []bool{s.IPv4, s.IPv6} {
		if !on || !s.Any {
			continue
		}
		d := device{Name: anyNames[i], Kind: kindTUN, MTU: most[i], Up: true}
		if driver == Kernel {
			d.Kind, d.Any = [...]string{kindIPIP, kindIP6Tnl}[i], true
		}
		out = append(out, d)
	}
	slices.SortFunc(out, func(a, b device) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// diff lists what makes the devices that are there those that are wanted; removals come first, as a new device may need
// what an old one has.
func diff(want, have []device) []op {
	left := map[string]device{}
	for _, h := range have {
		if ours(h.Name) {
			left[h.Name] = h
		}
	}
	var out []op
	for _, w := range want {
		h, there := left[w.Name]
		delete(left, w.Name)
		w.Index = h.Index
		switch {
		case !there:
			out = append(out, op{actionAdd, w})
		case h.Kind != w.Kind || h.Any != w.Any:
			out = append(out, op{actionReplace, w})
		case h.tunnel != w.tunnel && !w.Any:
			out = append(out, op{actionChange, w})
		case w.MTU != 0 && h.MTU != w.MTU || !h.Up:
			out = append(out, op{actionSet, w})
		}
	}
	var gone []op
	for _, name := range slices.Sorted(maps.Keys(left)) {
		gone = append(gone, op{actionRemove, left[name]})
	}
	return append(gone, out...)
}

// family is 0 for IPv4 and 1 for IPv6.
func family(a netip.Addr) int { return dataplane.Bit(a.Is6()) }

var (
	anyNames  = [2]string{dataplane.FoUAny4, dataplane.FoUAny6}
	protocols = [2]uint8{4, 41} // of what is inside
	overheads = [2]int{dataplane.FoUOverhead4, dataplane.FoUOverhead6}
)
