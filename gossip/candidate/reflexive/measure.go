package reflexive

import (
	"context"
	"crypto/rand"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
	"github.com/skeinmesh/skein/internal/sock"
)

const (
	mappingTime   = 1500 * time.Millisecond // for all servers together
	mappingGrace  = 250 * time.Millisecond  // for the rest once it is clear enough
	filteringTime = 1200 * time.Millisecond
	hairpinTime   = 400 * time.Millisecond
	sequenceTime  = 1500 * time.Millisecond
	sequences     = 2 // fresh sockets that look for a step between ports
	maxSequence   = 4 // destinations of each
)

// seen is what one server showed in the mapping phase.
type seen struct {
	server       netip.AddrPort
	observations []candidate.Observation
	other        netip.AddrPort // its alternate port, when it has one
}

// observe asks all servers in the way of one, from WireGuard's port. Those that are late are given up
// once two agree, or three have answered. The result keeps the servers' order.
func observe(ctx context.Context, servers []netip.AddrPort, one func(context.Context, netip.AddrPort) seen) []seen {
	ctx, cancel := context.WithTimeout(ctx, mappingTime)
	defer cancel()
	out := make([]seen, len(servers))
	finished := make(chan int, len(servers))
	var running sync.WaitGroup
	for i, server := range servers {
		running.Go(func() {
			out[i] = one(ctx, server)
			finished <- i
		})
	}
	answers := map[netip.AddrPort]int{}
	answered, enough := 0, false
	for range servers {
		s := out[<-finished]
		if len(s.observations) == 0 {
			continue
		}
		answered++
		answers[s.observations[0].Mapped]++
		if !enough && (answers[s.observations[0].Mapped] == 2 || answered == 3) {
			enough = true
			time.AfterFunc(mappingGrace, cancel)
		}
	}
	running.Wait()
	return out
}

// askServer asks a STUN server, and its alternate port if it has one.
func askServer(ctx context.Context, a *asker, server netip.AddrPort) seen {
	s := seen{server: server}
	r, rtt, err := a.ask(ctx, server, stunmsg.Here)
	if err != nil {
		return s
	}
	s.observations = append(s.observations, candidate.Observation{Server: server, Mapped: r.Mapped, RTT: rtt})
	if r.Other.Port() == 0 || r.Other.Port() == server.Port() {
		return s
	}
	// Only the port is used: a server behind one-to-one NAT names its inner address.
	s.other = netip.AddrPortFrom(server.Addr(), r.Other.Port())
	if r, rtt, err := a.ask(ctx, s.other, stunmsg.Here); err == nil {
		s.observations = append(s.observations, candidate.Observation{Server: s.other, Mapped: r.Mapped, RTT: rtt})
	}
	return s
}

// pingPeer asks a public peer's WireGuard port by a ping, whose answer tells the same as a STUN server's.
func (s *Step) pingPeer(ctx context.Context, at netip.AddrPort) seen {
	out := seen{server: at}
	if mapped, rtt, err := s.c.Ping(ctx, at); err == nil {
		out.observations = []candidate.Observation{{Server: at, Mapped: mapped, RTT: rtt}}
	}
	return out
}

// filterTests are the outcomes of the three tests, and whether the NAT turns packets round to its own side.
type filterTests struct {
	Tests
	hairpin bool
}

// freshSocket is a marked UDP socket that has talked to nobody yet.
type freshSocket struct {
	*asker
	conn *net.UDPConn
	done sync.WaitGroup
}

func openFresh(network string, mark uint32) (*freshSocket, error) {
	conn, err := sock.ListenUDP(network, netip.AddrPort{}, mark)
	if err != nil {
		return nil, err
	}
	f := &freshSocket{conn: conn}
	f.asker = newAsker(func(to netip.AddrPort, b []byte) error {
		_, err := conn.WriteToUDPAddrPort(b, to)
		return err
	})
	f.done.Go(func() {
		b := make([]byte, stunmsg.MaxSize)
		for {
			n, from, err := conn.ReadFromUDPAddrPort(b)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				f.deliver(from, b[:n])
			}
		}
	})
	return f, nil
}

func (f *freshSocket) close() {
	f.conn.Close()
	f.done.Wait()
}

// testFiltering asks one RFC 5780 server for answers from elsewhere: wg from WireGuard's port, and beside it a fresh
// socket. mapped is WireGuard's address outside when it is a translated one, for the hairpin test.
func testFiltering(ctx context.Context, wg *asker, mark uint32, server, mapped netip.AddrPort) filterTests {
	var t filterTests
	var running sync.WaitGroup
	running.Go(func() { t.WireGuardPort = test(ctx, wg, server, stunmsg.SilentPort) })
	running.Go(func() { testFresh(ctx, wg, mark, server, mapped, &t) })
	running.Wait()
	return t
}

// testFresh fills in what a socket learns that has talked to this one server only.
func testFresh(ctx context.Context, wg *asker, mark uint32, server, mapped netip.AddrPort, t *filterTests) {
	fresh, err := openFresh(network(server.Addr()), mark)
	if err != nil {
		return
	}
	defer fresh.close()
	first, cancel := context.WithTimeout(ctx, filteringTime)
	defer cancel()
	base, _, err := fresh.ask(first, server, stunmsg.Here)
	if err != nil {
		return
	}
	portCtx, enough := context.WithCancel(ctx)
	defer enough()
	var running sync.WaitGroup
	running.Go(func() { t.OtherPort = test(portCtx, fresh.asker, server, stunmsg.OtherPort) })
	running.Go(func() {
		if t.OtherAddress = test(ctx, fresh.asker, server, stunmsg.OtherAddress); t.OtherAddress == Received {
			enough() // whoever lets strangers in lets their other ports in
		}
	})
	if mapped.IsValid() {
		running.Go(func() { t.hairpin = testHairpin(ctx, wg, fresh.asker, mapped, base.Mapped) })
	}
	running.Wait()
}

func test(ctx context.Context, a *asker, server netip.AddrPort, w stunmsg.Want) Answer {
	ctx, cancel := context.WithTimeout(ctx, filteringTime)
	defer cancel()
	_, _, err := a.ask(ctx, server, w)
	return answerOf(err)
}

// testHairpin sends from the fresh socket to WireGuard's outside address. WireGuard's port sends the other way
// meanwhile, so that a NAT which filters lets the packet in if it turns packets round at all.
func testHairpin(ctx context.Context, wg, fresh *asker, mapped, freshMapped netip.AddrPort) bool {
	ctx, cancel := context.WithTimeout(ctx, hairpinTime)
	defer cancel()
	var tx, back [12]byte
	_, _ = rand.Read(tx[:])
	_, _ = rand.Read(back[:])
	there, err1 := stunmsg.EncodeRequest(tx, stunmsg.Here)
	opening, err2 := stunmsg.EncodeRequest(back, stunmsg.Here)
	if err1 != nil || err2 != nil {
		return false
	}
	heard, stop := wg.listen(tx)
	defer stop()
	again := time.NewTicker(hairpinTime / 4)
	defer again.Stop()
	for {
		_ = wg.send(freshMapped, opening)
		_ = fresh.send(mapped, there)
		select {
		case <-heard:
			return true
		case <-again.C:
		case <-ctx.Done():
			return false
		}
	}
}

// followSequence has fresh sockets contact one destination after another, so that a NAT which hands out ports in order
// shows it. WireGuard's own port will not do: the NAT has mappings for it to all of them already.
func followSequence(ctx context.Context, mark uint32, servers []netip.AddrPort) [][]uint16 {
	ctx, cancel := context.WithTimeout(ctx, sequenceTime)
	defer cancel()
	servers = servers[:min(len(servers), maxSequence)]
	var out [][]uint16
	for range sequences {
		ports, err := followOne(ctx, mark, servers)
		if err != nil {
			break
		}
		out = append(out, ports)
	}
	return out
}

func followOne(ctx context.Context, mark uint32, servers []netip.AddrPort) ([]uint16, error) {
	fresh, err := openFresh(network(servers[0].Addr()), mark)
	if err != nil {
		return nil, err
	}
	defer fresh.close()
	var ports []uint16
	for _, s := range servers {
		if r, _, err := fresh.ask(ctx, s, stunmsg.Here); err == nil {
			ports = append(ports, r.Mapped.Port())
		}
	}
	return ports, ctx.Err()
}

// mapFresh returns how one server sees a fresh socket.
func mapFresh(ctx context.Context, mark uint32, server netip.AddrPort) (netip.AddrPort, error) {
	ctx, cancel := context.WithTimeout(ctx, filteringTime)
	defer cancel()
	fresh, err := openFresh(network(server.Addr()), mark)
	if err != nil {
		return netip.AddrPort{}, err
	}
	defer fresh.close()
	r, _, err := fresh.ask(ctx, server, stunmsg.Here)
	return r.Mapped, err
}

func network(a netip.Addr) string {
	if a.Is6() {
		return "udp6"
	}
	return "udp4"
}
