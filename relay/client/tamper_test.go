package client_test

import (
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/relaytest"
	"github.com/skeinmesh/skein/relay/wire"
)

// meddler stands between a node and its relay and rewrites what passes towards the node, record by record.
func meddler(t *testing.T, to string, rewrite func(record []byte) []byte) string {
	t.Helper()
	return relaytest.Serve(t, func(c net.Conn) {
		defer c.Close()
		up, err := net.Dial("tcp", to)
		if err != nil {
			return
		}
		defer up.Close()
		go func() { _, _ = io.Copy(up, c); up.Close() }()
		for {
			head := make([]byte, 5) // a TLS record: type 1 · version 2 · length 2
			if _, err := io.ReadFull(up, head); err != nil {
				return
			}
			body := make([]byte, int(head[3])<<8|int(head[4]))
			if _, err := io.ReadFull(up, body); err != nil {
				return
			}
			if _, err := c.Write(rewrite(append(head, body...))); err != nil {
				return
			}
		}
	}).Addr().String()
}

// Changing, repeating or dropping records on the way ends the session, and none of them is taken for a packet.
func TestTamperedSessionsEnd(t *testing.T) {
	for name, meddle := range map[string]func([]byte) []byte{
		"a bit flipped":   func(r []byte) []byte { r[len(r)-1] ^= 1; return r },
		"a record twice":  func(r []byte) []byte { return append(r, r...) },
		"a record lost":   func([]byte) []byte { return nil },
		"a record for it": func(r []byte) []byte { return append(r[:5:5], make([]byte, len(r)-5)...) },
	} {
		t.Run(name, func(t *testing.T) {
			m := relaytest.NewMembers()
			r := relaytest.StartRelay(t, m)
			var armed atomic.Bool
			address := meddler(t, r.Address, func(record []byte) []byte {
				if record[0] == 23 && armed.CompareAndSwap(true, false) {
					return meddle(record)
				}
				return record
			})
			n, peer := relaytest.NewNode(t, m, relaytest.NewKey(t)), relaytest.StartNode(t, m, r)
			n.SetRelays([]client.Relay{{ID: r.Key.ID(), Addresses: []string{address}, Key: r.Key.Public()}})
			relaytest.WaitFor(t, "the session", func() bool { return n.Connected(r.Key.ID()) })
			armed.Store(true)
			if err := peer.Send(n.ID, wire.ChannelSignal, []byte("one")); err != nil {
				t.Fatal(err)
			}
			// The record after the one that was tampered with shows a loss.
			relaytest.WaitFor(t, "the session to end and begin anew", func() bool {
				_ = peer.Send(n.ID, wire.ChannelSignal, []byte("one"))
				s := n.Stats()[0]
				return s.Reconnects > 0 && s.Connected
			})
			for len(n.Packets) > 0 {
				if p := <-n.Packets; p.From != peer.ID || p.Channel != wire.ChannelSignal || p.Payload != "one" {
					t.Errorf("an altered packet was delivered: %v", p)
				}
			}
			if err := peer.Send(n.ID, wire.ChannelSignal, []byte("still here")); err != nil {
				t.Fatal(err)
			}
			relaytest.WaitFor(t, "a packet over the new session", func() bool {
				select {
				case p := <-n.Packets:
					return strings.Contains(p.Payload, "still here")
				default:
					_ = peer.Send(n.ID, wire.ChannelSignal, []byte("still here"))
					return false
				}
			})
		})
	}
}
