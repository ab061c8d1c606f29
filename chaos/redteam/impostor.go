package redteam

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// impostor answers streams of the control net in mallory's stead, with its key: what a node that was broken into says.
// Streams of protocols that it does not answer go to mallory's agent, which keeps the tunnel up.
type impostor struct {
	gossip func(net.Conn) // answers one stream; nil: the agent does
	rpc    http.Handler   // likewise all of them

	field *Field
	from  []string // whose streams
	l     net.Listener
	table *nftables.Table
	calls *handed
	http  *http.Server
	all   sync.WaitGroup
	mu    sync.Mutex
	conns map[net.Conn]bool // nil: closed
}

// impersonate opens the port to which the streams of some nodes are led from begin on.
func (f *Field) impersonate(from ...string) (*impostor, error) {
	i := &impostor{field: f, from: from, conns: map[net.Conn]bool{},
		calls: &handed{conns: make(chan net.Conn), done: make(chan struct{})}}
	err := fabric.In(f.mallory.ns, func() (err error) {
		i.l, err = net.Listen("tcp4", ":0")
		return err
	})
	return i, err
}

// begin leads the streams here. Those that are open stay where they are.
func (i *impostor) begin() error {
	if i.rpc != nil {
		i.http = consensus.NewHTTPServer(i.rpc, slog.New(slog.DiscardHandler))
		i.all.Go(func() { _ = i.http.Serve(consensus.PlainListener(i.calls)) })
	}
	i.all.Go(func() {
		for {
			c, err := i.l.Accept()
			if err != nil {
				return
			}
			i.all.Go(func() { i.serve(c) })
		}
	})
	port := uint16(i.l.Addr().(*net.TCPAddr).Port)
	err := fabric.In(i.field.mallory.ns, func() error {
		n, err := nftables.New()
		if err != nil {
			return err
		}
		i.table = n.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "redteam"})
		chain := n.AddChain(&nftables.Chain{Name: "led", Table: i.table, Type: nftables.ChainTypeNAT,
			Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
		for _, name := range i.from {
			n.AddRule(&nftables.Rule{Table: i.table, Chain: chain, Exprs: redirect(i.field.overlay(name, true), port)})
		}
		return n.Flush()
	})
	if err != nil {
		return fmt.Errorf("lead the streams of %v to the red team: %w", i.from, err)
	}
	return nil
}

// redirect leads a source's TCP connections to the control port to another port of this host.
func redirect(from netip.Addr, port uint16) []expr.Any {
	const reg = 1
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 12, Len: 4},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: from.AsSlice()},
		&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binary.BigEndian.AppendUint16(nil, controlPort)},
		&expr.Immediate{Register: reg, Data: binary.BigEndian.AppendUint16(nil, port)},
		&expr.Redir{RegisterProtoMin: reg},
	}
}

// serve finds out which protocol a connection is for: the first message of TLS says so in the clear.
func (i *impostor) serve(c net.Conn) {
	if !i.keep(c) {
		c.Close()
		return
	}
	defer i.drop(c)
	_ = c.SetDeadline(time.Now().Add(patience))
	head := make([]byte, 5)
	if _, err := io.ReadFull(c, head); err != nil {
		return
	}
	hello := append(head, make([]byte, binary.BigEndian.Uint16(head[3:]))...)
	if _, err := io.ReadFull(c, hello[5:]); err != nil {
		return
	}
	again := &readAgain{Conn: c, first: hello}
	switch {
	case i.rpc != nil && bytes.Contains(hello, []byte(identity.ALPNRPC)):
		if t := i.secure(again, identity.ALPNRPC); t != nil {
			i.calls.hand(t)
		}
	case i.gossip != nil && bytes.Contains(hello, []byte(identity.ALPNGossip)):
		if t := i.secure(again, identity.ALPNGossip); t != nil {
			i.gossip(t)
			t.Close()
		}
	default:
		_ = c.SetDeadline(time.Time{})
		i.handOn(again)
	}
}

func (i *impostor) secure(c net.Conn, alpn string) *tls.Conn {
	conf, err := i.field.mallory.key.ServerTLS([]string{alpn}, func(string, ed25519.PublicKey) error { return nil })
	if err != nil {
		return nil
	}
	t := tls.Server(c, conf)
	if err := t.Handshake(); err != nil {
		return nil
	}
	_ = c.SetDeadline(time.Time{})
	return t
}

// handOn joins a connection to mallory's agent.
func (i *impostor) handOn(c net.Conn) {
	own := i.field.overlay(attacker, true)
	far, err := i.field.mallory.connect(context.Background(), netip.AddrPortFrom(own, controlPort))
	if err != nil {
		return
	}
	defer far.Close()
	i.all.Go(func() {
		_, _ = io.Copy(far, c)
		far.Close()
	})
	_, _ = io.Copy(c, far)
}

func (i *impostor) keep(c net.Conn) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.conns == nil {
		return false
	}
	i.conns[c] = true
	return true
}

func (i *impostor) drop(c net.Conn) {
	c.Close()
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.conns, c)
}

func (i *impostor) close() {
	if i.table != nil {
		_ = fabric.In(i.field.mallory.ns, func() error {
			n, err := nftables.New()
			if err != nil {
				return err
			}
			n.DelTable(i.table)
			return n.Flush()
		})
	}
	i.l.Close()
	i.calls.Close()
	if i.http != nil {
		i.http.Close()
	}
	i.mu.Lock()
	for c := range i.conns {
		c.Close()
	}
	i.conns = nil
	i.mu.Unlock()
	i.all.Wait()
}

// readAgain gives what was read already once more.
type readAgain struct {
	net.Conn
	first []byte
}

func (c *readAgain) Read(b []byte) (int, error) {
	if len(c.first) == 0 {
		return c.Conn.Read(b)
	}
	n := copy(b, c.first)
	c.first = c.first[n:]
	return n, nil
}

// handed is a listener of connections that were accepted elsewhere. Whoever hands one over waits until it is closed.
type handed struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

type handedConn struct {
	*tls.Conn
	closed chan struct{}
	once   sync.Once
}

// Peer is who is at the other end.
func (c *handedConn) Peer() (id identity.ID) {
	if key, err := identity.PeerKey(c.ConnectionState()); err == nil {
		id = identity.IDOf(key)
	}
	return id
}

func (c *handedConn) Close() error {
	c.once.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func (h *handed) hand(t *tls.Conn) {
	c := &handedConn{Conn: t, closed: make(chan struct{})}
	select {
	case h.conns <- c:
		<-c.closed
	case <-h.done:
	}
}

func (h *handed) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

func (h *handed) Close() error {
	h.once.Do(func() { close(h.done) })
	return nil
}

func (h *handed) Addr() net.Addr { return &net.TCPAddr{} }

// readRecordFrame reads one frame of the record protocol.
func readRecordFrame(r io.Reader) (kind byte, body []byte, err error) {
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxAnswer {
		return 0, nil, errors.New("a frame that is too large")
	}
	body = make([]byte, n)
	_, err = io.ReadFull(r, body)
	return head[0], body, err
}
