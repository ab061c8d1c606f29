package redteam

import (
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/pause"
)

const (
	floodFor    = 3 * time.Second
	floodAtOnce = 16
)

// flood repeats something from many goroutines. The machine is shared with the victims, so each rests a little between
// two: what is tried is what the victim does with it, not how busy a processor can be made.
func flood(name string, from Place, guard Guard, rest time.Duration,
	prepare func(context.Context, *Field) (one func(context.Context) error, done func(), err error)) Attempt {
	return Attempt{Name: name, From: from, Guard: guard, Flood: true, Judge: lost,
		Try: func(ctx context.Context, f *Field) (seen Seen, err error) {
			one, done, err := prepare(ctx, f)
			if err != nil {
				return seen, err
			}
			defer done()
			until, stop := context.WithTimeout(ctx, floodFor)
			defer stop()
			var made, refused atomic.Int64
			var last atomic.Value
			var all sync.WaitGroup
			for range floodAtOnce {
				all.Go(func() {
					for until.Err() == nil {
						if err := one(until); err != nil && until.Err() == nil {
							refused.Add(1)
							last.Store(err.Error())
						}
						made.Add(1)
						pause.For(until, rest)
					}
				})
			}
			all.Wait()
			if made.Load() == 0 {
				return seen, fmt.Errorf("nothing was sent")
			}
			if n := refused.Load(); n > 0 {
				seen.Refusal = fmt.Sprintf("%d of %d: %s", n, made.Load(), last.Load())
			}
			if err := f.greets(ctx); err != nil {
				seen.Lost = append(seen.Lost, "an honest member is not served: "+brief(err.Error()))
			}
			return seen, nil
		}}
}

func nothing() {}

// udpFlood sends datagrams from a host.
func udpFlood(name string, from Place, host string, guard Guard, to func(*Field) netip.AddrPort,
	payload func() []byte) Attempt {
	return flood(name, from, guard, 2*time.Millisecond,
		func(_ context.Context, f *Field) (func(context.Context) error, func(), error) {
			c, err := dialUDP(f.ns(host), to(f))
			if err != nil {
				return nil, nil, err
			}
			return func(context.Context) error {
				for range 4 {
					_, _ = c.Write(payload())
				}
				return nil
			}, func() { c.Close() }, nil
		})
}

func noise(n int) func() []byte {
	return func() []byte {
		b := make([]byte, n)
		_, _ = rand.Read(b) // crypto/rand.Read never fails
		return b
	}
}

func floods() []Attempt {
	rpc := func(name string, one func(context.Context, *Field) error) Attempt {
		return flood(name, Member, Fair, 5*time.Millisecond,
			func(_ context.Context, f *Field) (func(context.Context) error, func(), error) {
				return func(ctx context.Context) error { return one(ctx, f) }, nothing, nil
			})
	}
	return []Attempt{
		rpc("flood Propose with refused commands", func(ctx context.Context, f *Field) error {
			_, err := f.mallory.cluster(relayNode).Propose(ctx,
				f.mallory.proposal(&skeinv1.Command{Body: &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: &skeinv1.ReleaseBlocks{
					Pool: "default", NodeId: f.prey.id(), Numbers: []uint64{0}}}}))
			return err
		}),
		long(rpc("flood ReadState", func(ctx context.Context, f *Field) error {
			_, err := f.mallory.cluster(relayNode).ReadState(ctx, &skeinv1.ReadStateRequest{})
			return err
		})),
		long(rpc("flood EgressReport at the gateway", func(ctx context.Context, f *Field) error {
			_, err := f.mallory.egress(gateway).EgressReport(ctx, &skeinv1.EgressReportRequest{})
			return err
		})),
		long(rpc("flood pulls of all records", func(ctx context.Context, f *Field) error {
			c, err := f.mallory.Dial(ctx, f.id(relayNode), identity.ALPNGossip)
			if err != nil {
				return err
			}
			defer c.Close()
			_, _ = c.Write([]byte{recordMagic, recordVersion})
			if err := writeRecordFrame(c, frameHave, &skeinv1.Digests{}); err != nil {
				return err
			}
			_, _ = heard(c, 100*time.Millisecond)
			return nil
		})),
		long(rpc("subscribe again and again", func(ctx context.Context, f *Field) error {
			ctx, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
			defer cancel()
			s, err := f.mallory.cluster(relayNode).Subscribe(ctx, &skeinv1.SubscribeRequest{})
			if err != nil {
				return err
			}
			s.Receive()
			return s.Close()
		})),
		long(flood("flood a member of the pair through the relay", Member, RelayLimits, time.Millisecond,
			func(ctx context.Context, f *Field) (func(context.Context) error, func(), error) {
				s, err := f.puppet.session(ctx)
				if err != nil {
					return nil, nil, err
				}
				var mu sync.Mutex
				b := frame(frameData, idBytes(f.id(victim)), []byte{channelWireGuard}, noise(1300)())
				return func(context.Context) error {
					mu.Lock()
					defer mu.Unlock()
					_, err := s.Write(b)
					return err
				}, func() { s.Close() }, nil
			})),
		long(flood("open relay sessions and read nothing", Member, RelayLimits, 20*time.Millisecond,
			func(_ context.Context, f *Field) (func(context.Context) error, func(), error) {
				return func(ctx context.Context) error {
					s, err := f.puppet.session(ctx)
					if err != nil {
						return err
					}
					defer s.Close()
					_, err = s.Write(frame(frameData, idBytes(f.puppet.key.ID()), []byte{channelWireGuard}, noise(8000)()))
					return err
				}, nothing, nil
			})),
		long(udpFlood("flood the relay's WireGuard port with noise", Stranger, stranger, Front,
			func(f *Field) netip.AddrPort { return netip.AddrPortFrom(f.address(relayNode), wgPort) }, noise(148))),
		long(udpFlood("flood the relay's WireGuard port with handshakes", Stranger, stranger, Front,
			func(f *Field) netip.AddrPort { return netip.AddrPortFrom(f.address(relayNode), wgPort) }, func() []byte {
				b := noise(148)()
				copy(b, []byte{1, 0, 0, 0})
				return b
			})),
		long(udpFlood("flood the relay's WireGuard port with forged pings", Stranger, stranger, Probes,
			func(f *Field) netip.AddrPort { return netip.AddrPortFrom(f.address(relayNode), wgPort) }, func() []byte {
				b := noise(80)()
				copy(b, []byte{0xf5, 0x73, 0x6b, 0x6e, 1, 1, 0, 80})
				return b
			})),
		long(udpFlood("flood STUN", Stranger, stranger, Stun,
			func(f *Field) netip.AddrPort { return netip.AddrPortFrom(f.address(relayNode), stunPort) },
			func() []byte { return stunRequest() })),
		flood("flood the port for joiners with handshakes", Stranger, Front, 2*time.Millisecond,
			func(_ context.Context, f *Field) (func(context.Context) error, func(), error) {
				p, err := f.newcomer(stranger)
				return func(ctx context.Context) error {
					c, err := p.front(ctx, relayNode, identity.ALPNRelay)
					if err == nil {
						c.Close()
					}
					return err
				}, nothing, err
			}),
		long(flood("guess tokens' secrets", Token, Tokens, 2*time.Millisecond,
			func(_ context.Context, f *Field) (func(context.Context) error, func(), error) {
				p, err := f.newcomer(stranger)
				if err != nil {
					return nil, nil, err
				}
				r, err := p.request(&skeinv1.JoinToken{ClusterId: f.members.GetCluster().GetId(),
					TokenId: f.members.GetTokens()[0].GetId(), Secret: noise(32)()}, "guess")
				return func(ctx context.Context) error {
					a, err := p.join(ctx, relayNode, r)
					if err == nil && a.GetErrorCode() != "" {
						err = fmt.Errorf("%s", a.GetErrorMessage())
					}
					return err
				}, nothing, err
			})),
		long(flood("hold the port for joiners with connections that say nothing", Stranger, Front, 10*time.Millisecond,
			func(_ context.Context, f *Field) (func(context.Context) error, func(), error) {
				p, err := f.newcomer(stranger)
				var mu sync.Mutex
				var held []net.Conn
				return func(ctx context.Context) error {
						c, err := p.connect(ctx, netip.AddrPortFrom(f.address(relayNode), frontPort))
						if err == nil {
							mu.Lock()
							held = append(held, c)
							mu.Unlock()
						}
						return err
					}, func() {
						for _, c := range held {
							c.Close()
						}
					}, err
			})),
	}
}
