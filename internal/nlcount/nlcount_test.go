package nlcount

import (
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/testenv"
)

// requests is by how many requests what f does raises the counter.
func requests(t *testing.T, f func() error) uint64 {
	t.Helper()
	before := Read()
	if err := f(); err != nil {
		t.Fatal(err)
	}
	return Read().Requests - before.Requests
}

func TestLibraryIsCounted(t *testing.T) {
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	for _, c := range []struct {
		name string
		do   func() error
		want uint64
	}{
		{"nothing, and Read takes no number for itself", func() error { Read(); Read(); return nil }, 0},
		{"a function of the package", func() error { _, err := netlink.AddrList(nil, netlink.FAMILY_ALL); return err },
			1},
		{"two of them", func() error {
			_, err := netlink.LinkByName("lo")
			if err == nil {
				_, err = netlink.LinkByIndex(1)
			}
			return err
		}, 2},
		{"a handle's method", func() error { _, err := One(h).LinkByName("lo"); return err }, 1},
		{"what is sent by hand", func() error { Sent(3); return nil }, 3},
	} {
		if got := requests(t, c.do); got != c.want {
			t.Errorf("%s: %d requests, want %d", c.name, got, c.want)
		}
	}
}

// TestSequenceWraps: the library's number has 32 bits.
func TestSequenceWraps(t *testing.T) {
	var s sequence
	s.read()
	s.last -= 10 // as if ten more had been sent since, wherever that is in the circle
	was := s.total
	if got := s.read() - was; got != 10 {
		t.Errorf("%d, want 10", got)
	}
}

func TestNotificationsAreCounted(t *testing.T) {
	before := Read().Notifications
	Heard(2)
	if got := Read().Notifications - before; got != 2 {
		t.Errorf("%d, want 2", got)
	}
}

// TestNftIsCounted makes and removes a table in one transaction.
func TestNftIsCounted(t *testing.T) {
	testenv.NeedRoot(t)
	c, err := NewNft(nftables.AsLasting())
	if err != nil {
		t.Fatal(err)
	}
	defer c.CloseLasting()
	table := &nftables.Table{Name: "skein_count", Family: nftables.TableFamilyINet}
	if got := requests(t, func() error { _, err := c.ListTablesOfFamily(table.Family); return err }); got != 1 {
		t.Errorf("a question: %d, want 1", got)
	}
	if got := requests(t, func() error {
		c.AddTable(table)
		c.AddChain(&nftables.Chain{Table: table, Name: "x"})
		c.DelTable(table)
		return c.Flush()
	}); got != 3+around {
		t.Errorf("a transaction of three: %d, want %d", got, 3+around)
	}
	if got := requests(t, c.Flush); got != 0 {
		t.Errorf("nothing queued: %d, want 0", got)
	}
}
