package ipam

import (
	"cmp"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// record is one line of the file. Only records change the core's persistent state.
type record struct {
	Op op    `json:"op"`
	At int64 `json:"at,omitempty"` // Unix ns
	Up int64 `json:"up,omitempty"` // ns since the kernel started

	Container string     `json:"c,omitempty"`
	Interface string     `json:"i,omitempty"`
	Namespace string     `json:"ns,omitempty"`
	Pod       string     `json:"pod,omitempty"`
	NetNS     string     `json:"netns,omitempty"`
	Network   string     `json:"net,omitempty"`
	Pool      string     `json:"pool,omitempty"`
	IPv4      netip.Addr `json:"v4,omitzero"`
	IPv6      netip.Addr `json:"v6,omitzero"`
	Static    bool       `json:"static,omitempty"`
	Adopted   bool       `json:"adopted,omitempty"`
	Fast      bool       `json:"fast,omitempty"`  // no pod ever had it
	Number    uint64     `json:"n,omitempty"`     // of a block
	Offset    uint32     `json:"o,omitempty"`     // in the block
	InBlock   bool       `json:"b,omitempty"`     // Number and Offset are set
	Since     int64      `json:"since,omitempty"` // Unix ns, of a past lease
	Until     int64      `json:"until,omitempty"` // likewise
	Text      string     `json:"t,omitempty"`     // reason, or boot ID
}

type op string

const (
	opBoot   op = "boot"   // the kernel's boot ID; first in a file
	opGive   op = "give"   // a lease
	opFree   op = "free"   // a lease was released
	opPast   op = "past"   // a lease that is over, with both times
	opCursor op = "cursor" // a block's last used offset
	opUse    op = "use"    // when the pool last had a lease
	opUnused op = "unused" // the pool is no longer in use
)

func (r record) key() podnet.Key { return podnet.Key{ContainerID: r.Container, Interface: r.Interface} }

func (r record) lease() Lease {
	return Lease{
		Attachment: podnet.Attachment{Key: r.key(), NetNS: r.NetNS, IPv4: r.IPv4, IPv6: r.IPv6, Namespace: r.Namespace,
			Pod: r.Pod},
		Network: r.Network, Pool: r.Pool, Static: r.Static, Adopted: r.Adopted,
		Since: time.Unix(0, cmp.Or(r.Since, r.At)),
	}
}

func giveRecord(l Lease) record {
	return record{
		Op: opGive, Container: l.Key.ContainerID, Interface: l.Key.Interface, Namespace: l.Namespace,
		Pod: l.Pod, NetNS: l.NetNS,
		Network: l.Network, Pool: l.Pool, IPv4: l.IPv4, IPv6: l.IPv6, Static: l.Static, Adopted: l.Adopted,
	}
}

// pastRecord stamps the record with the measured time, which may contradict Until if the wall clock jumped.
func pastRecord(p *past, now moment) record {
	r := giveRecord(p.lease)
	r.Op, r.Since, r.Until, r.Fast = opPast, p.lease.Since.UnixNano(), p.lease.Until.UnixNano(), p.fast
	return now.ago(p.freed).stamp(r)
}

// moment is the present by two clocks.
type moment struct {
	at time.Time
	up time.Duration // since the kernel started; 0: unknown
}

func (m moment) stamp(r record) record {
	r.At, r.Up = m.at.UnixNano(), int64(m.up)
	return r
}

// ago is the moment at an earlier time of this run.
func (m moment) ago(t time.Time) moment {
	d := max(m.at.Sub(t), 0)
	return moment{at: m.at.Round(0).Add(-d), up: max(m.up-d, 0)}
}

// since is when a record was made, by this run's clock. While the same kernel runs, its uptime counts, which never
// jumps; otherwise the wall clock, with times in the future counted as now.
func (m moment) since(r record, sameBoot bool) time.Time {
	gone := m.at.Round(0).Sub(time.Unix(0, r.At))
	if up := m.up - time.Duration(r.Up); sameBoot && m.up > 0 && r.Up > 0 && up >= 0 {
		gone = up
	}
	return m.at.Add(-max(gone, 0))
}
