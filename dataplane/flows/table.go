package flows

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/conntrack"
)

var errForeign = errors.New("not a flow whose source alone is translated")

// entryOf converts a flow of the kernel's table. If it cannot be moved, invalid is set.
func entryOf(f *conntrack.Flow) entry {
	o, reply := f.Original, f.Reply
	e := entry{proto: o.Proto, timeout: min(f.Timeout, maxTimeout), mark: f.Mark, zone: f.Zone,
		src: o.Src, dst: o.Dst, srcPort: o.SrcPort, dstPort: o.DstPort, nat: reply.Dst, natPort: reply.DstPort,
		state: f.State, scale: f.Scale, flags: [2]uint8{f.Flags[0] & tcpFlags, f.Flags[1] & tcpFlags}, vtag: f.VTag}
	if e.icmp() {
		e.natPort = reply.SrcPort
	}
	if f.Status&conntrack.SeenReply != 0 {
		e.status |= seenReply
	}
	if f.Status&conntrack.Assured != 0 {
		e.status |= assured
	}
	if f.Status&(conntrack.DstNAT|conntrack.Dying) != 0 || o.OwnZone || reply.OwnZone || reply.Src != o.Dst ||
		reply.Proto != o.Proto || !e.icmp() && reply.SrcPort != o.DstPort {
		e.invalid = errForeign
	}
	return e
}

// flow converts the entry for the kernel's table: liberal about windows.
func (e *entry) flow() conntrack.Flow {
	f := conntrack.Flow{
		Original: conntrack.Tuple{Proto: e.proto, Src: e.src, Dst: e.dst, SrcPort: e.srcPort, DstPort: e.dstPort},
		Reply:    conntrack.Tuple{Proto: e.proto, Src: e.dst, Dst: e.nat, SrcPort: e.dstPort, DstPort: e.natPort},
		Status:   conntrack.Confirmed, Timeout: e.timeout, Mark: e.mark, Zone: e.zone, State: e.state, Scale: e.scale,
		Flags: [2]uint8{e.flags[0] | conntrack.TCPLiberal, e.flags[1] | conntrack.TCPLiberal}, VTag: e.vtag}
	if e.icmp() {
		answer, _ := e.answer()
		f.Reply.SrcPort, f.Reply.DstPort = e.natPort, answer
	}
	if e.status&seenReply != 0 {
		f.Status |= conntrack.SeenReply
	}
	if e.status&assured != 0 {
		f.Status |= conntrack.Assured
	}
	return f
}

// load writes entries. If the kernel refuses one because a flow with one of its directions exists, that flow is
// deleted first. It returns the number written, and the first failure.
func load(t *conntrack.Conn, entries []entry) (loaded int, first error) {
	note := func(e *entry, errno unix.Errno) {
		if first == nil {
			first = fmt.Errorf("writing the flow of protocol %d from %s to %s, translated to %s, to the connection table: %w",
				e.proto, netip.AddrPortFrom(e.src, e.srcPort), netip.AddrPortFrom(e.dst, e.dstPort),
				netip.AddrPortFrom(e.nat, e.natPort), errno)
		}
	}
	create := func(entries []entry) (inTheWay []entry, err error) {
		flows := make([]conntrack.Flow, len(entries))
		for i := range entries {
			flows[i] = entries[i].flow()
		}
		refused, err := t.Create(flows)
		if err != nil {
			return nil, fmt.Errorf("writing flows to the connection table: %w", err)
		}
		loaded += len(entries) - len(refused)
		for i := range entries {
			switch errno := refused[i]; errno {
			case 0:
			case unix.EEXIST:
				inTheWay = append(inTheWay, entries[i])
			default:
				note(&entries[i], errno)
			}
		}
		return inTheWay, nil
	}
	for part := range slices.Chunk(entries, conntrack.Batch) {
		again, err := create(part)
		if err == nil && len(again) > 0 {
			if _, err = t.Delete(keys(again)); err != nil {
				return loaded, fmt.Errorf("making room in the connection table: %w", err)
			}
			if again, err = create(again); len(again) > 0 {
				note(&again[0], unix.EEXIST)
			}
		}
		if err != nil {
			return loaded, err
		}
	}
	return loaded, first
}

// keys identify the entries' flows, and other flows with the same reply direction.
func keys(entries []entry) (out []conntrack.Key) {
	for i := range entries {
		f := entries[i].flow()
		out = append(out, conntrack.Key{Tuple: f.Original, Zone: f.Zone}, conntrack.Key{Tuple: f.Reply, Zone: f.Zone})
	}
	return out
}
