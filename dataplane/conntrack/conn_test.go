package conntrack_test

import (
	"errors"
	"net/netip"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane/conntrack"
	"github.com/skeinmesh/skein/internal/nfnl"
	"github.com/skeinmesh/skein/internal/nlcount"
	"github.com/skeinmesh/skein/internal/testns"
)

func addr(s string) netip.Addr { return netip.MustParseAddr(s) }

// translated is a flow of UDP whose source is translated, and of whose kind there are many.
func translated(n int) conntrack.Flow {
	port := uint16(1000 + n)
	return conntrack.Flow{
		Original: conntrack.Tuple{Proto: unix.IPPROTO_UDP, Src: addr("10.1.0.2"), Dst: addr("192.0.2.7"), SrcPort: port,
			DstPort: 53},
		Reply: conntrack.Tuple{Proto: unix.IPPROTO_UDP, Src: addr("192.0.2.7"), Dst: addr("192.0.2.99"), SrcPort: 53,
			DstPort: port + 30000},
		Status: conntrack.Confirmed | conntrack.SeenReply, Timeout: 1000, Mark: uint32(n),
	}
}

// kinds are flows of each protocol that has something of its own.
func kinds() []conntrack.Flow {
	tcp, sctp, icmp := translated(1), translated(2), translated(3)
	tcp.Original.Proto, tcp.Reply.Proto = unix.IPPROTO_TCP, unix.IPPROTO_TCP
	tcp.State, tcp.Scale = 3, [2]uint8{7, 9} // the kernel takes scales where both ends have the flag
	tcp.Flags = [2]uint8{conntrack.TCPScale | conntrack.TCPLiberal, conntrack.TCPScale | conntrack.TCPSACK}
	sctp.Original.Proto, sctp.Reply.Proto = unix.IPPROTO_SCTP, unix.IPPROTO_SCTP
	sctp.State, sctp.VTag, sctp.Zone = 4, [2]uint32{1, 1 << 31}, 9
	icmp.Original = conntrack.Tuple{Proto: unix.IPPROTO_ICMPV6, Src: addr("fd01::2"), Dst: addr("2001:db8::7"),
		SrcPort: 17, DstPort: 128 << 8}
	icmp.Reply = conntrack.Tuple{Proto: unix.IPPROTO_ICMPV6, Src: addr("2001:db8::7"), Dst: addr("2001:db8::99"),
		SrcPort: 18, DstPort: 129 << 8}
	return []conntrack.Flow{translated(0), tcp, sctp, icmp}
}

func open(t *testing.T, n *testns.NS) *conntrack.Conn {
	t.Helper()
	c, err := conntrack.Open(int(n.Handle))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func create(t *testing.T, c *conntrack.Conn, flows ...conntrack.Flow) {
	t.Helper()
	if refused, err := c.Create(flows); err != nil || len(refused) > 0 {
		t.Fatalf("refused %v: %v", refused, err)
	}
}

func count(t *testing.T, c *conntrack.Conn) (n int) {
	t.Helper()
	if err := c.Dump(func(*conntrack.Flow) error { n++; return nil }); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestCreatedIsFound: what was created is in the table with all that was said of it, by each of its directions.
func TestCreatedIsFound(t *testing.T) {
	c := open(t, testns.New(t, "ct"))
	want := kinds()
	create(t, c, want...)
	for _, f := range want {
		if f.Zone != 0 { // Get asks in the default zone
			continue
		}
		for _, tuple := range []conntrack.Tuple{f.Original, f.Reply} {
			got, there, err := c.Get(tuple)
			if err != nil || !there || got.Status&conntrack.SrcNAT == 0 || got.ID == 0 {
				t.Fatalf("%+v is %+v, %t: %v", tuple, got, there, err)
			}
			if got.Original != f.Original || got.Reply != f.Reply {
				t.Errorf("made %+v, found %+v", f, got)
			}
		}
	}
	found := 0
	if err := c.Dump(func(got *conntrack.Flow) error {
		i := slices.IndexFunc(want, func(f conntrack.Flow) bool { return f.Original == got.Original })
		if i < 0 {
			t.Errorf("there is %+v", got)
			return nil
		}
		f := *got
		f.ID, f.Status, f.Timeout = 0, want[i].Status, want[i].Timeout
		if f != want[i] || got.Timeout > want[i].Timeout || got.Timeout < want[i].Timeout-10 ||
			got.Status&want[i].Status != want[i].Status {
			t.Errorf("made %+v, found %+v", want[i], *got)
		}
		found++
		return nil
	}); err != nil || found != len(want) {
		t.Errorf("found %d of %d: %v", found, len(want), err)
	}
}

// TestRefusedAreNamed: in which batch they are, and whether they are the last of it, makes no difference.
func TestRefusedAreNamed(t *testing.T) {
	c := open(t, testns.New(t, "ct"))
	const n = 2*conntrack.Batch + 10
	there := []int{0, 5, conntrack.Batch - 1, conntrack.Batch, 2*conntrack.Batch - 1, n - 1}
	var flows []conntrack.Flow
	var keys []conntrack.Key
	for i := range n {
		f := translated(i)
		flows, keys = append(flows, f), append(keys, conntrack.Key{Tuple: f.Original})
		if slices.Contains(there, i) {
			create(t, c, f)
		}
	}
	before := nlcount.Read().Requests
	refused, err := c.Create(flows)
	if sent := nlcount.Read().Requests - before; err != nil || sent != n {
		t.Fatalf("%d requests counted, sent %d: %v", sent, n, err)
	}
	for i := range n {
		want := unix.Errno(0)
		if slices.Contains(there, i) {
			want = unix.EEXIST
		}
		if refused[i] != want {
			t.Errorf("%d is refused with %d, want %d", i, refused[i], want)
		}
	}
	if have := count(t, c); have != n {
		t.Errorf("there are %d of %d", have, n)
	}
	for _, want := range []unix.Errno{0, unix.ENOENT} { // and once more
		if refused, err := c.Delete(keys); err != nil || refused[0] != want || refused[n-1] != want {
			t.Errorf("deleting is refused with %v, want %d: %v", refused, want, err)
		}
	}
	if have := count(t, c); have != 0 {
		t.Errorf("%d are left", have)
	}
}

// TestDeleteMeansOne: by either direction, of one zone, and one of another ID stays.
func TestDeleteMeansOne(t *testing.T) {
	c := open(t, testns.New(t, "ct"))
	f, zoned := translated(0), translated(0)
	zoned.Zone = 9
	create(t, c, f, zoned, translated(1))
	got, _, err := c.Get(f.Original)
	if err != nil {
		t.Fatal(err)
	}
	for what, k := range map[string]conntrack.Key{
		"another ID":   {Tuple: f.Original, ID: got.ID + 1},
		"another zone": {Tuple: f.Original, Zone: 8},
		"a stranger":   {Tuple: translated(2).Original},
	} {
		if refused, err := c.Delete([]conntrack.Key{k}); err != nil || refused[0] != unix.ENOENT {
			t.Errorf("%s: %v, %v", what, refused, err)
		}
	}
	if n := count(t, c); n != 3 {
		t.Fatalf("%d of 3 are left", n)
	}
	for i, k := range []conntrack.Key{{Tuple: f.Reply}, {Tuple: zoned.Original, Zone: 9},
		{Tuple: translated(1).Original, ID: 0}} {
		if refused, err := c.Delete([]conntrack.Key{k}); err != nil || len(refused) > 0 {
			t.Errorf("%+v: %v, %v", k, refused, err)
		}
		if n := count(t, c); n != 2-i {
			t.Errorf("after %+v there are %d", k, n)
		}
	}
	if _, there, err := c.Get(f.Original); there || err != nil {
		t.Errorf("a deleted one: %t, %v", there, err)
	}
}

// TestErrorsEnd: of who looks at entries, and of a namespace that is not there.
func TestErrorsEnd(t *testing.T) {
	c := open(t, testns.New(t, "ct"))
	create(t, c, kinds()...)
	stop, n := errors.New("enough"), 0
	if err := c.Dump(func(*conntrack.Flow) error { n++; return stop }); !errors.Is(err, stop) || n != 1 {
		t.Errorf("%d entries: %v", n, err)
	}
	if _, err := conntrack.OpenPath("/run/netns/skein-nowhere"); err == nil {
		t.Error("opened a namespace that is not there")
	}
}

// FuzzDecode: what is read from anything is written, and read again, to the same.
func FuzzDecode(f *testing.F) {
	for _, k := range kinds() {
		var w nfnl.Writer
		k.Encode(&w)
		f.Add(w.B)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		was := conntrack.Decode(b)
		var w nfnl.Writer
		was.Encode(&w)
		if got := conntrack.Decode(w.B); got.Mark != was.Mark || got.Zone != was.Zone || got.Status != was.Status ||
			got.Timeout != was.Timeout {
			t.Fatalf("%+v became %+v", was, got)
		}
	})
}
