// Package ownrecord decides when a node's own record changes, and what of it: some news cannot wait, most of it can,
// and each change is work for all who get the record.
package ownrecord

import (
	"encoding/binary"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

const (
	summaryEvery = 2 * time.Second // how often what others need not know at once may change the record
	quietForHash = 2 * time.Second // the index rests that long before its hash is published
	rttStep      = 5 * time.Millisecond
	// round-trip times that are news each second are those of a busy machine, and news is work for all
	rttEvery      = 10 * time.Second
	lateForLinks  = 100 * time.Millisecond // a process that wakes so late judges no relay
	linksStay     = 10 * time.Second       // how long the record of such a process lists a relay whose session was lost
	stateHashSize = 16
	knownHashes   = 256
)

// Clock spaces the changes of a node's record. Its zero value has published nothing.
type Clock struct {
	summary time.Time // last change of the summary
	index   uint64    // newest index seen, and since when
	since   time.Time
	rtts    time.Time            // last change of a round-trip time
	lost    map[string]time.Time // listed relays without a session, by node ID, and since when
	turnAt  time.Time            // when changes so far have had their turns
	hashes  map[uint64][]byte    // of the indexes this node has published or compared, bounded
}

// Input is what a record may follow from.
type Input struct {
	Self     identity.ID
	Old      *skeinv1.Record // what was published last
	Observed *skeinv1.Record // what others act on, as it is now; it becomes part of the next record
	State    *events.State
	Paths    map[identity.ID]path.Path
	Members  int           // that get this record, and whose records this node gets
	Late     time.Duration // that this process lately woke late
}

// Next is the record to publish, or nil if it has not changed. Where a change has to wait for its turn, wait is for how
// long.
func (c *Clock) Next(in Input, now time.Time) (next *skeinv1.Record, wait time.Duration) {
	old, next := in.Old, in.Observed
	crowd, late := unhurried(in.Members), in.Late > lateForLinks
	c.keepLinks(next, old, late, now)
	// A process that wakes late has measured itself.
	if steadyRTTs(next, old, late || !ownMoment(in.Self, c.rtts, now, max(rttEvery, crowd))) {
		c.rtts = now
	}
	if in.State.Index() != c.index {
		c.index, c.since = in.State.Index(), now
	}
	urgent := !sameObserved(old, next)
	if urgent || ownMoment(in.Self, c.summary, now, max(summaryEvery, crowd)) {
		summarise(next, in.Paths)
		if now.Sub(c.since) >= quietForHash {
			next.AppliedIndex, next.StateHash = in.State.Index(), c.HashAt(in.State)
		} else {
			next.AppliedIndex, next.StateHash = old.GetAppliedIndex(), old.GetStateHash()
		}
	} else {
		keepSummary(next, old)
	}
	next.Time = old.GetTime()
	if proto.Equal(old, next) {
		return nil, 0
	}
	if wait := c.due(old, next, now, in.Members); wait > 0 {
		return nil, wait
	}
	next.Time = now.UnixNano()
	c.summary = now
	return next, 0
}

// summarise counts the peers of each transport, and says it in one word.
func summarise(r *skeinv1.Record, paths map[identity.ID]path.Path) {
	for _, p := range paths {
		switch p.Transport() {
		case "direct":
			r.PeersDirect++
		case "relay":
			r.PeersRelay++
		}
	}
	switch {
	case r.PeersDirect > 0 && r.PeersRelay > 0:
		r.TransportMode = "mixed"
	case r.PeersDirect > 0:
		r.TransportMode = "direct"
	case r.PeersRelay > 0:
		r.TransportMode = "relay"
	}
}

func keepSummary(next, old *skeinv1.Record) {
	next.PeersDirect, next.PeersRelay, next.TransportMode = old.GetPeersDirect(), old.GetPeersRelay(),
		old.GetTransportMode()
	next.AppliedIndex, next.StateHash = old.GetAppliedIndex(), old.GetStateHash()
}

// keepLinks keeps a relay in the record that is to be published for a while after its session was lost, where no other
// is listed or this process is late: sessions come and go on a host with too much to do, and each new record makes all
// others choose anew. Whoever sends by that relay meanwhile is told by it, and goes another way.
func (c *Clock) keepLinks(next, old *skeinv1.Record, late bool, now time.Time) {
	lost := map[string]time.Time{}
	if len(next.GetRelayLinks()) == 0 || late || len(c.lost) > 0 {
		for _, l := range old.GetRelayLinks() {
			if slices.ContainsFunc(next.GetRelayLinks(), func(n *skeinv1.RelayLink) bool {
				return n.GetNodeId() == l.GetNodeId()
			}) {
				continue
			}
			since, known := c.lost[l.GetNodeId()]
			if !known {
				since = now
			}
			if now.Sub(since) < linksStay {
				lost[l.GetNodeId()] = since
				next.RelayLinks = append(next.RelayLinks, proto.CloneOf(l))
			}
		}
	}
	c.lost = lost
	slices.SortFunc(next.RelayLinks, func(x, y *skeinv1.RelayLink) int {
		return strings.Compare(x.GetNodeId(), y.GetNodeId())
	})
}

// A record is news for all who get it, so in a large mesh all of them have theirs in turns: some changes at once, such
// as a host has that moves, and then one for so long.
const (
	turnPerMember = 50 * time.Millisecond
	turnMost      = 5 * time.Second
	turnBurst     = 2
)

// unhurried is what is between two changes of a record that nobody waits for: there are as many such records as
// members that exchange theirs, and as many who get each. Two hundred of a kilobyte that change each minute would cost
// each member 7 kB a second, as they did one among 10,000; each ten minutes they cost 0.7.
func unhurried(members int) time.Duration {
	return min(time.Duration(members*members)*unhurriedPerPair, unhurriedMost)
}

const (
	unhurriedPerPair = 25 * time.Millisecond
	unhurriedMost    = 10 * time.Minute
)

// ownMoment reports whether this node may change anew what nobody waits for: it may so often, at moments of its own.
// Hosts that have started together, as after a power cut, do not all change their records at once.
func ownMoment(id identity.ID, last, now time.Time, every time.Duration) bool {
	phase := int64(binary.BigEndian.Uint64(id[:8]) % uint64(every))
	moment := func(t time.Time) int64 { return (t.UnixNano() - phase) / int64(every) }
	return last.IsZero() || moment(now) != moment(last)
}

// turn tells how long a change of the record has to wait where so many records are exchanged, zero: not, and counts it
// then.
func (c *Clock) turn(now time.Time, members int) time.Duration {
	spacing := min(turnPerMember*time.Duration(members), turnMost)
	at := c.turnAt
	if at.Before(now) {
		at = now
	}
	if wait := at.Sub(now) - turnBurst*spacing; wait > 0 {
		return wait
	}
	c.turnAt = at.Add(spacing)
	return 0
}

// due is turn for a change from one record to another. What moves the traffic of others has its turn at once: packets
// are lost until they know.
func (c *Clock) due(old, next *skeinv1.Record, now time.Time, members int) time.Duration {
	wait := c.turn(now, members)
	silent := func(a, b *skeinv1.SilentLeader) bool { return proto.Equal(a, b) }
	if old.GetLeads() != next.GetLeads() || old.GetLeaderSlot() != next.GetLeaderSlot() ||
		!slices.EqualFunc(old.GetSilentLeaders(), next.GetSilentLeaders(), silent) {
		return 0
	}
	return wait
}

// steadyRTTs gives the links of a record that is to be published their old round-trip times where the new ones are not
// so different, or where no change is due yet. It reports whether one has changed.
func steadyRTTs(next, old *skeinv1.Record, notYet bool) (changed bool) {
	for _, l := range next.GetRelayLinks() {
		i := slices.IndexFunc(old.GetRelayLinks(), func(o *skeinv1.RelayLink) bool { return o.GetNodeId() == l.GetNodeId() })
		if i < 0 {
			continue
		}
		was := old.GetRelayLinks()[i].GetRttMicros()
		d := time.Duration(int64(l.GetRttMicros())-int64(was)) * time.Microsecond
		if notYet || d.Abs() < max(rttStep, time.Duration(was)*time.Microsecond/4) {
			l.RttMicros = was
		} else {
			changed = true
		}
	}
	return changed
}

// sameObserved compares two records without their summary.
func sameObserved(a, b *skeinv1.Record) bool {
	x, y := proto.CloneOf(a), proto.CloneOf(b)
	for _, r := range []*skeinv1.Record{x, y} {
		keepSummary(r, &skeinv1.Record{})
		r.NodeId, r.Epoch, r.Seq, r.Time = "", 0, 0, 0
	}
	return proto.Equal(x, y)
}

// HashAt is the state's hash as records carry it; it is remembered so that others' can be compared.
func (c *Clock) HashAt(st *events.State) []byte {
	if h, ok := c.hashes[st.Index()]; ok {
		return h
	}
	full := st.Hash()
	if c.hashes == nil || len(c.hashes) >= knownHashes {
		c.hashes = map[uint64][]byte{}
	}
	c.hashes[st.Index()] = full[:stateHashSize]
	return full[:stateHashSize]
}

// HashThen is the hash of the state at an index, if it is remembered or the newest.
func (c *Clock) HashThen(index uint64, newest *events.State) (hash []byte, ok bool) {
	if hash, ok = c.hashes[index]; !ok && newest.Index() == index {
		return c.HashAt(newest), true
	}
	return hash, ok
}
