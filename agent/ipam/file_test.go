package ipam

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

func TestRestartsKeepEverything(t *testing.T) {
	h := newHand()
	g := newAgreement(t, h.now)
	p := poolOf("default", 3, "10.64.0.0/16", "fd02::/112")
	p.CooldownSeconds = 600
	g.pool(p)
	r := g.start("a")
	one, two := r.assign("one"), r.assign("two")
	r.Release(one.Key, "")
	h.add(5 * time.Minute)
	if notes := r.restart(found(two)...); notes != nil {
		t.Fatal(notes)
	}
	if have := r.Leases(); len(have) != 1 || have[0] != two {
		t.Fatalf("there are %+v, want %+v", have, two)
	}
	if l := r.assign("three"); l.IPv4.String() != "10.64.0.2" { // after the last one
		t.Fatalf("the next is %s", l.IPv4)
	}
	if who := r.Holders(one.IPv6); len(who) != 1 || who[0].Pod != "one" || !who[0].Until.Equal(start) {
		t.Fatalf("holders: %+v", who)
	}
	for range 5 {
		r.assign("more")
	}
	r.restart()
	h.add(5*time.Minute - 1)
	if p := r.Pools()["default"]; p != (LocalPool{Blocks: 1, Used: 7, Resting: 1}) {
		t.Fatalf("the pool: %+v", p)
	}
	h.add(1)
	if l := r.assign("last"); l.IPv4 != one.IPv4 {
		t.Fatalf("the last is %s", l.IPv4)
	}
}

// TestClockJumps: while the kernel runs, rests have the right length whatever the wall clock does.
func TestClockJumps(t *testing.T) {
	for _, jump := range []time.Duration{-24 * time.Hour, 24 * time.Hour} {
		h, up := newHand(), time.Hour
		g := newAgreement(t, newHand().now)
		p := poolOf("default", 0, "10.64.0.0/32", "")
		p.CooldownSeconds = 600
		g.pool(p)
		r := g.start("a", func(c *Config) { c.Now, c.Uptime = h.now, func() time.Duration { return up } })
		r.Release(r.assign("p").Key, "")
		h.add(jump)
		r.restart()
		pass := func(d time.Duration) { h.add(d); up += d }
		pass(599 * time.Second)
		r.restart()
		if l, err := r.try("q"); err == nil {
			t.Fatalf("after a jump of %s it got %s a second too early", jump, l.IPv4)
		}
		pass(time.Second)
		r.assign("q")
	}
}

func TestAnotherBoot(t *testing.T) {
	h := newHand()
	g := newAgreement(t, h.now)
	p := poolOf("default", 3, "10.64.0.0/16", "")
	p.CooldownSeconds = 60
	g.pool(p)
	r := g.start("a")
	l := r.assign("p")
	r.cfg.BootID = "boot 2"
	if notes := r.restart(); len(notes) != 1 || !strings.Contains(notes[0], "the kernel was started anew: the 1 pods") {
		t.Fatalf("notes: %q", notes)
	}
	if n := r.assign("q"); len(r.Leases()) != 1 || n.IPv4 == l.IPv4 {
		t.Fatalf("leases: %v", r.Leases())
	}
}

// TestTornLine: a line that kill -9 left incomplete was never acknowledged.
func TestTornLine(t *testing.T) {
	g := newAgreement(t, newHand().now)
	g.pool(poolOf("default", 3, "10.64.0.0/16", ""))
	r := g.start("a")
	r.assign("p")
	whole, err := os.ReadFile(r.cfg.File)
	if err != nil {
		t.Fatal(err)
	}
	r.assign("q")
	more, err := os.ReadFile(r.cfg.File)
	if err != nil {
		t.Fatal(err)
	}
	for n := len(whole); n <= len(more); n++ {
		path := filepath.Join(t.TempDir(), "ipam.db")
		if err := os.WriteFile(path, more[:n], 0o600); err != nil {
			t.Fatal(err)
		}
		c := newCore(r.self)
		f := newFile(path)
		notes, err := restore(c, f, "boot 1", moment{at: start})
		want := 1
		if n == len(more) {
			want = 2
		}
		if err != nil || notes != nil || len(c.leases) != want {
			t.Fatalf("of %d bytes %d: %d leases, %v, %v", len(more), n, len(c.leases), notes, err)
		}
		if err := f.close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDamagedFile: a damaged file is renamed, and the kernel's addresses restore everything.
func TestDamagedFile(t *testing.T) {
	g := newAgreement(t, newHand().now)
	g.pool(poolOf("default", 3, "10.64.0.0/16", "fd02::/112"))
	r := g.start("a")
	for range 5 {
		r.assign("p")
	}
	want := r.Leases()
	b, err := os.ReadFile(r.cfg.File)
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(r.cfg.File, b, 0o600); err != nil {
		t.Fatal(err)
	}
	notes := r.restart(found(want...)...)
	if len(notes) != 1 || !strings.Contains(notes[0], "is now called ipam.db.damaged") {
		t.Fatalf("notes: %q", notes)
	}
	if aside, err := os.ReadFile(r.cfg.File + ".damaged"); err != nil || !bytes.Equal(aside, b) {
		t.Fatalf("what was put aside differs: %v", err)
	}
	have := r.Leases()
	if len(have) != len(want) {
		t.Fatalf("%d leases of %d", len(have), len(want))
	}
	for i := range have {
		h, w := have[i], want[i]
		// their CNI networks are unknown, so no list of valid attachments concerns them
		if h.Key != w.Key || h.IPv4 != w.IPv4 || h.IPv6 != w.IPv6 || h.Pod != w.Pod || h.Pool != w.Pool || h.Adopted ||
			h.Network != "" {
			t.Fatalf("%+v became %+v", w, h)
		}
	}
}

// TestUnwritable: an address that cannot be recorded is not assigned.
func TestUnwritable(t *testing.T) {
	g := newAgreement(t, newHand().now)
	g.pool(poolOf("default", 3, "10.64.0.0/16", ""))
	r := g.start("a")
	l := r.assign("p")
	r.file.f.Close()
	if _, err := r.try("q"); !codeIs(err, Unavailable) || !strings.Contains(err.Error(), "could not be written down") {
		t.Fatalf("given all the same: %v", err)
	}
	if err := r.Ready(); !codeIs(err, Unavailable) || len(r.Problems()) != 1 {
		t.Fatalf("ready: %v; problems: %v", err, r.Problems())
	}
	if _, held := r.Release(l.Key, ""); !held || len(r.Leases()) != 0 {
		t.Fatal("it could not be given back")
	}
}

// TestCompact: compaction keeps the file short and its content the same.
func TestCompact(t *testing.T) {
	h := newHand()
	g := newAgreement(t, h.now)
	g.pool(poolOf("default", 3, "10.64.0.0/16", ""))
	r := g.start("a")
	r.assign("stays")
	for range 3 * compactAfter {
		r.Release(r.assign("p").Key, "")
		h.add(time.Minute)
	}
	before := r.Leases()
	r.round()
	r.wg.Wait()
	if n := r.file.records; n > maxPast*2 {
		t.Fatalf("the file has %d records", n)
	}
	last := r.assign("last")
	r.restart()
	if have := r.Leases(); !slices.Equal(have, append(before, last)) &&
		!slices.Equal(have, append([]Lease{last}, before...)) {
		t.Fatalf("leases: %v, before: %v and %v", have, before, last)
	}
}

func TestNothingBeforeTheStart(t *testing.T) {
	m, _, err := Open(Config{Self: nodeID("a"), File: filepath.Join(t.TempDir(), "ipam.db"), Propose: nil})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	req := requestOf("c", "")
	if _, err := m.Assign(t.Context(), req); !codeIs(err, Unavailable) || !strings.Contains(err.Error(),
		"which blocks are this node's") {
		t.Fatalf("without a state: %v", err)
	}
	g := newAgreement(t, newHand().now)
	m.Follow(g.state)
	if _, err := m.Assign(t.Context(), req); !codeIs(err, Unavailable) || !strings.Contains(err.Error(),
		"which addresses the kernel has") {
		t.Fatalf("without the kernel: %v", err)
	}
	m.Adopt(nil)
	if _, err := m.Assign(t.Context(), req); !codeIs(err, Unavailable) || !strings.Contains(err.Error(),
		"skein pool create default") {
		t.Fatalf("without a pool: %v", err)
	}
}

func FuzzReadRecords(f *testing.F) {
	file := newFile(filepath.Join(f.TempDir(), "ipam.db"))
	if err := file.rewrite([]record{{Op: opBoot, Text: "boot"}, benchRecord(1),
		{Op: opFree, Container: "x", Interface: "eth0"}}); err != nil {
		f.Fatal(err)
	}
	b, err := os.ReadFile(file.path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add(b[:len(b)-7])
	f.Add([]byte("00000000 {}\n"))
	path := filepath.Join(f.TempDir(), "fuzz.db")
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		records, err := readRecords(path)
		if err != nil {
			return
		}
		c := newCore("self")
		for _, r := range records {
			c.apply(r, start)
		}
	})
}

// TestTheLastAddressIsRemembered: the next pod gets the address after the last one assigned, even if the agent has
// restarted since and lower addresses have rested for long.
func TestTheLastAddressIsRemembered(t *testing.T) {
	h := newHand()
	g := newAgreement(t, h.now)
	g.pool(poolOf("default", 3, "10.64.0.0/16", ""))
	r := g.start("a")
	one, two, three := r.assign("one"), r.assign("two"), r.assign("three")
	r.Release(one.Key, "")
	h.add(time.Hour)
	if notes := r.restart(append(found(two), found(three)...)...); notes != nil {
		t.Fatal(notes)
	}
	if l := r.assign("next"); l.IPv4.String() != "10.64.0.3" {
		t.Errorf("the next is %s", l.IPv4)
	}
}
