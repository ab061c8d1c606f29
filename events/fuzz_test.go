package events

import (
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// FuzzFold folds whatever decodes: nothing panics, and the state that comes of it is sound, which
// means that its snapshot can be read again and has the same hash.
func FuzzFold(f *testing.F) {
	w := newCluster(f)
	w.must(withID("r", admit("b", "1", asServer)))
	w.must(revoke(id("b")))
	for _, log := range [][]*skeinv1.Event{w.log, w.log[:3], nil, poolHistory(f).log, egressHistory(f).log,
		rangeHistory(f).log} {
		b, err := proto.Marshal(&skeinv1.Batch{Events: log})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{0x12, 0x02, 0x08, 0x01})
	f.Fuzz(func(t *testing.T, b []byte) {
		batch := &skeinv1.Batch{}
		if proto.Unmarshal(b, batch) != nil {
			return
		}
		s, again := NewState(), NewState()
		for i, e := range batch.GetEvents() {
			e.Index = uint64(i + 1) // whatever the base is
			if s.Fold(e) != nil {
				break
			}
			if err := again.Fold(proto.CloneOf(e)); err != nil {
				t.Fatal(err)
			}
			again = again.Clone()
		}
		checkSame(t, "folded twice", s, again)
		checkSame(t, "snapshot", s, mustFromProto(t, s))
		checkPools(t, s)
		checkRanges(t, s)
		checkEgresses(t, s)
		Diff(NewState(), s)
	})
}

// FuzzFromProto: a snapshot is refused, or it is a state that can be written and read again.
func FuzzFromProto(f *testing.F) {
	w := newCluster(f)
	w.must(withID("r", admit("b", "1", asServer)))
	w.must(admit("c", "1"))
	w.must(revoke(id("b")))
	for _, s := range []*State{w.s, NewState(), poolHistory(f).s, egressHistory(f).s, rangeHistory(f).s} {
		b, err := proto.Marshal(s.Proto())
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		p := &skeinv1.State{}
		if proto.Unmarshal(b, p) != nil {
			return
		}
		s, err := FromProto(p)
		if err != nil {
			return
		}
		checkSame(t, "again", s, mustFromProto(t, s))
		checkPools(t, s)
		checkRanges(t, s)
		checkEgresses(t, s)
		c := &skeinv1.Command{Time: 1, Entropy: entropy(1), Body: admit("x", "1").Body}
		if _, _, err := Decide(s, c); err != nil && CodeOf(err) == "" {
			t.Fatal(err)
		}
	})
}

// FuzzDecide: any command is refused with a code, or its events fold and keep the invariants.
func FuzzDecide(f *testing.F) {
	w := newPools(f)
	p := pool("p", 2, "10.64.0.0/28,fd02::/124")
	p.Quotas = map[string]uint32{"web": 5}
	w.must(createPool(p))
	w.must(allocate("a", "p", 1))
	w.must(keep("p", "10.64.0.5", "web", "x"))
	e := egress("web/out", "192.0.2.0/24", 1)
	e.Pool = "p"
	w.must(define(e))
	slot := w.assign("web/out", 0, "b").GetEpoch()
	two := proto.CloneOf(e)
	two.Name, two.Addresses = "two", egress("web/two", "", 1, "10.64.0.13").Addresses
	for _, c := range []*skeinv1.Command{
		createCluster("10.4.0.0/16", "a"), createToken("2", 1, true), revokeToken("1"), admit("c", "1"),
		changeNode("b", "c", map[string]string{"k": "v"}),
		revoke(id("b")), rotateKey("b", "new"), addServer(id("b")), promote(id("b")), removeServer(id("a")), rotateGossip(),
		changeSettings(&skeinv1.Settings{BirthdayAttack: "enabled"}, "birthday_attack"),
		createPool(pool("q", 4, "10.65.0.0/26")), extendPool("p", "10.66.0.0/28,fd03::/124"), drainPool("p"), removePool("p"),
		allocate("b", "p", 2),
		reserve("p", "10.64.0.8", "mine"), release("a", "p", 0), keep("p", "10.64.0.6", "web", "y"),
		claim("b", "p", "10.64.0.5", "web", "x"),
		giveUp("b", "p", "10.64.0.5"), unkeep("p", "10.64.0.5", true), grant("a", "p", "web", 3),
		imports(false, []*skeinv1.Pool{pool("q", 4, "10.65.0.0/26")}, importBlock("q", "10.65.0.0/28", "a", ""),
			importBlock("q", "10.65.0.16/28", "x", "")),
		define(two), setEgress(egress("web/out", "::/0", 2), "destinations", "replicas"), removeEgress("web/out"),
		assign("web/out", 0, "a", slot),
		releaseSlot("web/out", 0, slot), drainNode("b", true),
	} {
		c.Time, c.Entropy, c.RequestId = w.now.UnixNano(), entropy(1), "r"
		b, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c := &skeinv1.Command{}
		if proto.Unmarshal(b, c) != nil {
			return
		}
		s := w.s.Clone()
		evs, _, err := Decide(s, c)
		if err != nil && CodeOf(err) == "" {
			t.Fatalf("refused without a code: %v", err)
		}
		if _, err := proto.Marshal(&skeinv1.Batch{Events: evs}); err != nil {
			t.Fatalf("the events cannot be written: %v", err)
		}
		for _, e := range evs {
			if err := s.Fold(e); err != nil {
				t.Fatal(err)
			}
		}
		checkInvariants(t, s)
		checkVoters(t, s)
		checkSame(t, "snapshot", s, mustFromProto(t, s))
	})
}
