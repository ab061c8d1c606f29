package ping

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/skeinmesh/skein/internal/testenv"
)

func TestTallyFindsBlackouts(t *testing.T) {
	start := time.Unix(100, 0)
	var tally Tally
	answered := []bool{true, true, false, false, false, true, false, true, true, false, false}
	for i, ok := range answered {
		at := start.Add(time.Duration(i) * 20 * time.Millisecond)
		n := tally.Sent(at)
		if ok {
			tally.Received(n, at.Add(time.Duration(i+1)*time.Millisecond))
		}
	}
	tally.Received(0, start.Add(time.Second)) // a duplicate
	tally.Received(99, start)                 // a stray
	end := start.Add(10 * 20 * time.Millisecond)

	got := tally.Report(end.Add(time.Minute), time.Second)
	want := Report{Sent: 11, Received: 5, Duplicates: 1, Min: time.Millisecond, Median: 6 * time.Millisecond,
		P99: 9 * time.Millisecond, Max: 9 * time.Millisecond, Silence: 66 * time.Millisecond,
		Blackouts: []Blackout{
			{Start: start.Add(40 * time.Millisecond), Duration: 60 * time.Millisecond, Lost: 3},
			{Start: start.Add(120 * time.Millisecond), Duration: 20 * time.Millisecond, Lost: 1},
			{Start: start.Add(180 * time.Millisecond), Duration: 20 * time.Millisecond, Lost: 2, Open: true},
		}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if got.Lost() != 6 || got.Longest() != 66*time.Millisecond {
		t.Errorf("lost %d, longest %v", got.Lost(), got.Longest())
	}
	early := tally.Report(end, time.Second)
	if early.Pending != 6 || early.Lost() != 0 || len(early.Blackouts) != 0 {
		t.Errorf("while answers may still come: %+v", early)
	}
}

// TestAnswersThatComeLate: what a queue held back and then delivered is not lost, and was silence all the same.
func TestAnswersThatComeLate(t *testing.T) {
	start := time.Unix(100, 0)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	var tally Tally
	tally.Received(tally.Sent(at(0)), at(3))
	for ms := 20; ms <= 800; ms += 20 {
		tally.Sent(at(ms))
	}
	for i := 1; i <= 40; i++ {
		tally.Received(i, at(801))
	}
	r := tally.Report(at(5000), time.Second)
	if r.Lost() != 0 || len(r.Blackouts) != 0 || r.Longest() != 781*time.Millisecond {
		t.Errorf("lost %d, blackouts %v, longest %s; want none, none, 781ms", r.Lost(), r.Blackouts, r.Longest())
	}
}

func TestStreamToLoopback(t *testing.T) {
	testenv.NeedRoot(t)
	for _, dst := range []string{"127.0.0.1", "::1"} {
		a := netip.MustParseAddr(dst)
		conn, err := Open(a)
		if err != nil {
			t.Fatal(err)
		}
		other, err := Open(a)
		if err != nil {
			t.Fatal(err)
		}
		o := Start(other, a, time.Millisecond, 0, 0) // its echoes must not be taken for ours
		s := Start(conn, a, time.Millisecond, 50, 3000)
		r := s.Finish()
		if r.Sent != 50 || r.Received != 50 || r.Lost() != 0 || r.Duplicates != 0 || r.Max == 0 {
			t.Errorf("%s: %+v", dst, r)
		}
		if r := o.Stop(); r.Lost() != 0 || r.Duplicates != 0 || r.Sent == 0 {
			t.Errorf("%s: the other stream: %+v", dst, r)
		}
	}
}

// FuzzDecode: no packet makes the receiver stumble.
func FuzzDecode(f *testing.F) {
	s := &Stream{dst: netip.MustParseAddr("127.0.0.1"), size: MinSize}
	f.Add(s.echo(3))
	f.Fuzz(func(t *testing.T, b []byte) {
		s.decode(b, &net.IPAddr{IP: s.dst.AsSlice()})
	})
}

// TestNothingIsMissedByAProgramThatStands has 2000 answers come while nobody reads them. A socket with the kernel's
// usual buffer keeps 256 of them, and requests that come in between take the place of some.
func TestNothingIsMissedByAProgramThatStands(t *testing.T) {
	testenv.NeedRoot(t)
	const echoes = 2000
	for _, dst := range []string{"127.0.0.1", "::1"} {
		a := netip.MustParseAddr(dst)
		conn, err := Open(a)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		s := &Stream{conn: conn, dst: a, id: 7, size: MinSize}
		for i := range echoes {
			if _, err := conn.WriteTo(s.echo(i), &net.IPAddr{IP: a.AsSlice()}); err != nil {
				t.Fatalf("echo %d to %s: %v", i, dst, err)
			}
		}
		b := make([]byte, 1<<16)
		for want := 0; want < echoes; want++ {
			if err := conn.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
				t.Fatal(err)
			}
			n, from, err := conn.ReadFrom(b)
			if err != nil {
				t.Fatalf("%d of %d answers came from %s: %v", want, echoes, dst, err)
			}
			if got, ok := s.decode(b[:n], from); !ok || got != want {
				t.Fatalf("packet %d from %s: answer %d, %t", want, dst, got, ok)
			}
		}
	}
}
