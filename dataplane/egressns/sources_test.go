package egressns

import (
	"errors"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/dataplane/nftable"
)

// A slot whose source address changes has no lease from that moment on: neither the running ticket nor one begun
// before lets packets out with the new address, and no connection continues with the former one.
func TestANewSourceEndsTheLease(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	next4 := netip.MustParseAddr("192.0.2.51")
	route(s.target, next4.String()+"/32", "192.0.2.1", "lan0")
	route(s.host, next4.String()+"/32", "", s.n.HostLink())
	c := s.socket(client4)
	s.grant(0, time.Minute)
	if got := s.seen(c, target4); got != source4.String() {
		t.Fatalf("the target sees %s, want %s", got, source4)
	}
	begun, err := s.n.Begin(0, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	other, err := s.n.Begin(1, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	// Clients send all the time, also in new connections.
	var mu sync.Mutex
	saw := map[string]int{}
	stop, done := make(chan struct{}), make(chan struct{})
	fresh := s.socket(client4)
	go func() {
		defer close(done)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			got := s.ask(fresh, target4, 5*time.Millisecond)
			mu.Lock()
			saw[got]++
			mu.Unlock()
		}
	}()
	spec := aSpec()
	spec.Complete, spec.Slots[0].Source4 = false, next4 // soon after the agent began
	s.apply(spec)
	if err := s.n.Grant(0, begun); !errors.Is(err, ErrTicket) {
		t.Errorf("a ticket of before is granted: %v", err)
	}
	if err := s.n.Grant(1, other); err != nil {
		t.Errorf("the other slot's ticket: %v", err)
	}
	s.silent("under the lease of the former address", c, target4)
	close(stop)
	<-done
	mu.Lock()
	if saw[next4.String()] > 0 {
		t.Errorf("the target saw %v before the new address was granted", saw)
	}
	mu.Unlock()
	s.grant(0, time.Minute)
	if got := s.seen(c, target4); got != next4.String() {
		t.Errorf("a connection of before leaves with %s, the slot has %s", got, next4)
	}
	// After a crash in the middle of a change, the next start finds an address that no slot uses any more, and
	// completes the change.
	left := elementOp(nftable.SetElements, MapAddress4, nftable.Element{Key: bytesOf(source4), Val: slotKey(0)})
	if _, err := s.n.table.write([]nftable.Op{left}); err != nil {
		t.Fatal(err)
	}
	s.open()
	s.apply(spec)
	s.silent("amid a change that was not finished", c, target4)
	s.grant(0, time.Minute)
	if got := s.seen(c, target4); got != next4.String() {
		t.Errorf("after a start: %s", got)
	}
	if w := s.apply(spec); w != 0 {
		t.Errorf("the same again took %d messages", w)
	}
}

// If a table that is made anew after failures changes a slot's source address, its connections are ended, too.
func TestANewSourceByANewTable(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	next4 := netip.MustParseAddr("192.0.2.51")
	route(s.target, next4.String()+"/32", "192.0.2.1", "lan0")
	route(s.host, next4.String()+"/32", "", s.n.HostLink())
	c := s.socket(client4)
	s.grant(0, time.Minute)
	if got := s.seen(c, target4); got != source4.String() {
		t.Fatalf("the target sees %s, want %s", got, source4)
	}
	spec := aSpec()
	spec.Slots[0].Source4 = next4
	s.n.fails = 2
	s.apply(spec)
	if s.n.fails != 0 || len(s.n.former) > 0 {
		t.Errorf("after %d failures connections of %v are left", s.n.fails, s.n.former)
	}
	s.grant(0, time.Minute)
	if got := s.seen(c, target4); got != next4.String() {
		t.Errorf("a connection of before leaves with %s, the slot has %s", got, next4)
	}
}

// The namespace of an earlier version is renamed and continues to forward.
func TestRename(t *testing.T) {
	s := newScene(t)
	s.apply(aSpec())
	s.grant(0, time.Minute)
	c := s.socket(client4)
	s.seen(c, target4)
	former, file := s.file, s.file+"-2"
	s.host.Must("renaming", func() error { return Rename(former, file) })
	s.file = file
	s.open()
	s.apply(aSpec())
	if files, err := Files(filepath.Dir(file)); err != nil || len(files) != 1 || files[0] != file {
		t.Errorf("there are %v, %v", files, err)
	}
	if got := s.ask(c, target4, time.Second); got != source4.String() {
		t.Errorf("by the lease of before the target sees %q", got)
	}
	s.host.Must("again", func() error { return Rename(former, file) })
	// An agent was stopped between the two steps of a rename.
	s.host.Must("both names", func() error { return bind(file, former) })
	s.host.Must("renaming again", func() error { return Rename(former, file) })
	if got := s.ask(c, target4, time.Second); got != source4.String() {
		t.Errorf("after that the target sees %q", got)
	}
	s.host.Must("another's name", func() error {
		other := file + "-other"
		ns, _, err := obtain(other)
		if err != nil {
			return err
		}
		defer ns.Close()
		if err := Rename(other, file); err == nil {
			t.Error("one namespace took the name of another")
		}
		return Remove(other)
	})
}
