package server_test

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
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/server"
	"github.com/skeinmesh/skein/relay/wire"
)

var loopback = netip.MustParseAddr("127.0.0.1")

// A relay answers a client that asks without end at the rate that it promises.
func TestQuestionsAreFew(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	b := relaytest.StartNode(t, m, r)
	c := relaytest.DialAs(t, m, r, relaytest.NewKey(t), identity.ALPNRelay)
	began := time.Now()
	go func() {
		var all []byte
		for range 10 * server.WhereBurst {
			all = wire.AppendNode(all, wire.FrameWhere, b.ID)
		}
		_, _ = c.Write(wire.AppendToken(all, wire.FramePing, 7)) // a pong comes behind the answers
	}()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	f, n := wire.NewFrameReader(), 0
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
			if done = done || typ == wire.FramePong; typ == wire.FrameSeen {
				if node, addrs := wire.DecodeSeen(body); node != b.ID || !slices.Contains(addrs, loopback) {
					t.Fatalf("the answer is %v for %s", addrs, node)
				}
				n++
			}
		}
	}
	most := server.WhereBurst + int(time.Since(began).Seconds()*server.WherePerSecond) + 1
	if n < server.WhereBurst || n > most {
		t.Errorf("%d answers to %d questions, want %d to %d", n, 10*server.WhereBurst, server.WhereBurst, most)
	}
}

// Whoever sends to nodes that are not here has some of it handed back, and costs the others no lock for the rest.
func TestWhatIsHandedBackIsBounded(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	c := relaytest.DialAs(t, m, r, relaytest.NewKey(t), identity.ALPNRelay)
	const packets = 4 * server.RefusalsBurst
	began := time.Now()
	go func() {
		var b []byte
		for i := range packets {
			b = wire.AppendData(b[:0], identity.ID{9, byte(i >> 8), byte(i)}, wire.ChannelSignal, []byte("x"))
			if _, err := c.Write(b); err != nil {
				return
			}
		}
		_, _ = c.Write(wire.AppendToken(nil, wire.FramePing, 7))
	}()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	f, back := wire.NewFrameReader(), 0
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
			case wire.FrameGone:
				back++
			case wire.FramePong:
				done = true
			}
		}
	}
	most := server.RefusalsBurst + int(time.Since(began).Seconds()*server.RefusalsPerSecond) + 1
	if back == 0 || back > most {
		t.Errorf("%d of %d packets were handed back, want at most %d", back, packets, most)
	}
	if st := r.Server.Stats(); st.Unroutable != packets {
		t.Errorf("%d packets count as unroutable, want all %d", st.Unroutable, packets)
	}
}

// ask asks for a stream, and tells the relay's answer.
func ask(c *tls.Conn, request []byte) (wire.ReplyCode, error) {
	if err := c.SetDeadline(time.Now().Add(wire.AcceptTimeout + 2*time.Second)); err != nil {
		return 0, err
	}
	if _, err := c.Write(request); err != nil {
		return 0, err
	}
	body, err := wire.ReadFrame(c, wire.FrameReply)
	if err != nil {
		return 0, err
	}
	code, _ := wire.DecodeReply(body)
	return code, nil
}

// Connections that do not say what they are for are few for each node, and concern no other.
func TestSplicesThatSayNothingAreBounded(t *testing.T) {
	m := relaytest.NewMembers()
	r := relaytest.StartRelay(t, m)
	silent := relaytest.NewKey(t)
	var open []*tls.Conn
	for range server.MaxOpening {
		open = append(open, relaytest.DialAs(t, m, r, silent, identity.ALPNSplice))
	}
	opening := func() int { return r.Server.Opening(silent.ID()) }
	relaytest.WaitFor(t, "all that may", func() bool { return opening() == server.MaxOpening })
	over := relaytest.DialAs(t, m, r, silent, identity.ALPNSplice)
	_ = over.SetReadDeadline(time.Now().Add(wire.AcceptTimeout / 2))
	if _, err := over.Read(make([]byte, 1)); !errors.Is(err, io.EOF) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("one too many: %v, want its end", err)
	}
	other := relaytest.DialAs(t, m, r, relaytest.NewKey(t), identity.ALPNSplice)
	code, err := ask(other, wire.AppendNode(nil, wire.FrameConnect, silent.ID()))
	if code != wire.ReplyNotHere || err != nil {
		t.Errorf("another node beside it: %d, %v", code, err)
	}
	for _, c := range open {
		c.Close()
	}
	relaytest.WaitFor(t, "their end", func() bool { return opening() == 0 })
	code, err = ask(relaytest.DialAs(t, m, r, silent, identity.ALPNSplice),
		wire.AppendNode(nil, wire.FrameConnect, identity.ID{1}))
	if code != wire.ReplyNotHere || err != nil {
		t.Errorf("after their end: %d, %v", code, err)
	}
}
