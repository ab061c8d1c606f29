package relay

import (
	"crypto/tls"
	"errors"
	"io"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

// A relay answers a client that asks without end at the rate that it promises.
func TestQuestionsAreFew(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	b := startNode(t, m, r)
	c := dialAs(t, m, r, newKey(t), identity.ALPNRelay)
	began := time.Now()
	go func() {
		var all []byte
		for range 10 * WhereBurst {
			all = AppendNode(all, FrameWhere, b.id)
		}
		_, _ = c.Write(AppendToken(all, FramePing, 7)) // a pong comes behind the answers
	}()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	f, n := NewFrameReader(), 0
	for done := false; !done; {
		if _, err := f.Fill(c); err != nil {
			t.Fatal(err)
		}
		for {
			typ, body, ok, err := f.Next()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			if done = done || typ == FramePong; typ == FrameSeen {
				if node, addrs := DecodeSeen(body); node != b.id || !slices.Contains(addrs, netip.MustParseAddr("127.0.0.1")) {
					t.Fatalf("the answer is %v for %s", addrs, node)
				}
				n++
			}
		}
	}
	most := WhereBurst + int(time.Since(began).Seconds()*WherePerSecond) + 1
	if n < WhereBurst || n > most {
		t.Errorf("%d answers to %d questions, want %d to %d", n, 10*WhereBurst, WhereBurst, most)
	}
}

// Whoever sends to nodes that are not here has some of it handed back, and costs the others no lock for the rest.
func TestWhatIsHandedBackIsBounded(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	c := dialAs(t, m, r, newKey(t), identity.ALPNRelay)
	const packets = 4 * RefusalsBurst
	began := time.Now()
	go func() {
		var b []byte
		for i := range packets {
			b = AppendData(b[:0], identity.ID{9, byte(i >> 8), byte(i)}, ChannelSignal, []byte("x"))
			if _, err := c.Write(b); err != nil {
				return
			}
		}
		_, _ = c.Write(AppendToken(nil, FramePing, 7))
	}()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	f, back := NewFrameReader(), 0
	for done := false; !done; {
		if _, err := f.Fill(c); err != nil {
			t.Fatal(err)
		}
		for {
			typ, _, ok, err := f.Next()
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			switch typ {
			case FrameGone:
				back++
			case FramePong:
				done = true
			}
		}
	}
	most := RefusalsBurst + int(time.Since(began).Seconds()*RefusalsPerSecond) + 1
	if back == 0 || back > most {
		t.Errorf("%d of %d packets were handed back, want at most %d", back, packets, most)
	}
	if st := r.server.Stats(); st.Unroutable != packets {
		t.Errorf("%d packets count as unroutable, want all %d", st.Unroutable, packets)
	}
}

// askFor asks for a stream, and tells the relay's answer.
func askFor(c *tls.Conn, request []byte) (ReplyCode, error) {
	if err := c.SetDeadline(time.Now().Add(AcceptTimeout + 2*time.Second)); err != nil {
		return 0, err
	}
	if _, err := c.Write(request); err != nil {
		return 0, err
	}
	body, err := ReadFrame(c, FrameReply)
	if err != nil {
		return 0, err
	}
	code, _ := DecodeReply(body)
	return code, nil
}

// Connections that do not say what they are for are few for each node, and concern no other.
func TestSplicesThatSayNothingAreBounded(t *testing.T) {
	m := newMembers()
	r := startRelay(t, m)
	silent := newKey(t)
	var open []*tls.Conn
	for range MaxOpening {
		open = append(open, dialAs(t, m, r, silent, identity.ALPNSplice))
	}
	opening := func() int { return r.server.Opening(silent.ID()) }
	waitFor(t, "all that may", func() bool { return opening() == MaxOpening })
	over := dialAs(t, m, r, silent, identity.ALPNSplice)
	_ = over.SetReadDeadline(time.Now().Add(AcceptTimeout / 2))
	if _, err := over.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one too many: %v, want its end", err)
	}
	other := dialAs(t, m, r, newKey(t), identity.ALPNSplice)
	if code, err := askFor(other, AppendNode(nil, FrameConnect, silent.ID())); code != ReplyNotHere || err != nil {
		t.Errorf("another node beside it: %d, %v", code, err)
	}
	for _, c := range open {
		c.Close()
	}
	waitFor(t, "their end", func() bool { return opening() == 0 })
	if code, err := askFor(dialAs(t, m, r, silent, identity.ALPNSplice),
		AppendNode(nil, FrameConnect, identity.ID{1})); code != ReplyNotHere || err != nil {
		t.Errorf("after their end: %d, %v", code, err)
	}
}
