package relay

import (
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
)

// meddler stands between a node and its relay and rewrites what passes towards the node, record by record.
func meddler(t *testing.T, to string, rewrite func(record []byte) []byte) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", to)
			if err != nil {
				c.Close()
				continue
			}
			go func() { _, _ = io.Copy(up, c); up.Close() }()
			go func() {
				defer c.Close()
				defer up.Close()
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
			}()
		}
	}()
	return l.Addr().String()
}

// Whoever changes, repeats or drops records on the way ends the session, and nothing of it is taken for a packet.
func TestTamperedSessionsEnd(t *testing.T) {
	for name, meddle := range map[string]func([]byte) []byte{
		"a bit flipped":   func(r []byte) []byte { r[len(r)-1] ^= 1; return r },
		"a record twice":  func(r []byte) []byte { return append(r, r...) },
		"a record lost":   func([]byte) []byte { return nil },
		"a record for it": func(r []byte) []byte { return append(r[:5:5], make([]byte, len(r)-5)...) },
	} {
		t.Run(name, func(t *testing.T) {
			m := newMembers()
			r := startRelay(t, m)
			var armed atomic.Bool
			address := meddler(t, r.address, func(record []byte) []byte {
				if record[0] == 23 && armed.CompareAndSwap(true, false) {
					return meddle(record)
				}
				return record
			})
			n, peer := newNode(t, m, newKey(t)), startNode(t, m, r)
			n.SetRelays([]Relay{{ID: r.key.ID(), Addresses: []string{address}, Key: r.key.Public()}})
			waitFor(t, "the session", func() bool { return n.connected(r.key.ID()) })
			armed.Store(true)
			if err := peer.Send(n.id, ChannelSignal, []byte("one")); err != nil {
				t.Fatal(err)
			}
			// The record after the one that was tampered with shows a loss.
			waitFor(t, "the session to end and begin anew", func() bool {
				_ = peer.Send(n.id, ChannelSignal, []byte("one"))
				s := n.Stats()[0]
				return s.Reconnects > 0 && s.Connected
			})
			for len(n.packets) > 0 {
				if p := <-n.packets; p != (got{peer.id, ChannelSignal, "one"}) {
					t.Errorf("an altered packet was delivered: %v", p)
				}
			}
			if err := peer.Send(n.id, ChannelSignal, []byte("still here")); err != nil {
				t.Fatal(err)
			}
			waitFor(t, "a packet over the new session", func() bool {
				select {
				case p := <-n.packets:
					return strings.Contains(p.b, "still here")
				default:
					_ = peer.Send(n.id, ChannelSignal, []byte("still here"))
					return false
				}
			})
		})
	}
}
