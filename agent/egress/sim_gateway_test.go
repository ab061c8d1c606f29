package egress

import (
	"context"
	"errors"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// simGateway is a node with its kernel; a restart replaces its agent.
type simGateway struct {
	w      *world
	id     identity.ID
	name   string
	drift  float64 // of the kernel's clock
	up     bool
	slots  map[Slot]*model
	next   Ticket
	agent  *agent
	health skeinv1.GatewayState_Health
}

// model is the kernel's part of one slot.
type model struct {
	tickets map[Ticket]time.Time // until
	begun   map[Ticket]time.Duration
	granted Ticket
	newest  Ticket
}

func (g *simGateway) forwards(s Slot, now time.Time) bool {
	m := g.slots[s]
	return g.up && m != nil && m.tickets[m.granted].After(now)
}

// agent is one life of a gateway's agent.
type agent struct {
	*process
	g           *simGateway
	leaseClient *LeaseClient
	stop        context.CancelFunc
	index       uint64
}

func (w *world) startAgent(g *simGateway) {
	a := &agent{process: &process{w: w, name: g.name, drift: g.drift}, g: g}
	ctx, cancel := context.WithCancel(w.ctx)
	a.stop = cancel
	a.leaseClient = NewLeaseClient(LeaseClientConfig{Self: g.id, Kernel: a, Leader: a, Peers: a, Now: a.now, Log: w.log,
		Gateways: a.states,
		Tell:     func(s Slot, text string) { w.mu.Lock(); w.say("%s: %s", g.name, text); w.mu.Unlock() }})
	g.agent = a
	go a.leaseClient.Run(ctx)
	go a.follow(ctx)
}

// follow takes the agreed state from whichever server can be reached.
func (a *agent) follow(ctx context.Context) {
	for ctx.Err() == nil {
		time.Sleep(10 * time.Millisecond)
		a.gate()
		a.w.mu.Lock()
		s := a.w.servers[a.w.rand.IntN(len(a.w.servers))]
		a.w.send(a.process, s.process, func() {
			a.w.mu.Lock()
			defer a.w.mu.Unlock()
			view := s.view
			a.w.send(s.process, a.process, func() { a.see(view) })
		})
		a.w.mu.Unlock()
	}
}

func (a *agent) see(v View) {
	a.w.mu.Lock()
	newer := v.Index > a.index
	if newer {
		a.index = v.Index
	}
	a.w.mu.Unlock()
	if newer {
		var slots []SlotState
		for _, s := range v.Slots {
			slots = append(slots, StateOf(nil, s))
		}
		a.leaseClient.Agree(slots)
	}
}

func (a *agent) states() (out []*skeinv1.GatewayState) {
	a.w.mu.Lock()
	defer a.w.mu.Unlock()
	for _, s := range a.w.slots {
		if s.Number == 0 {
			out = append(out, &skeinv1.GatewayState{Namespace: s.Namespace, Name: s.Name, Ready: true, Health: a.g.health})
		}
	}
	return out
}

var errDead = errors.New("the process is dead")

// kernel runs one kernel operation, between two steps of the process.
func (a *agent) kernel(s Slot, f func(m *model, now time.Time)) error {
	a.stumble()
	a.w.mu.Lock()
	if a.dead || a.g.agent != a {
		a.w.mu.Unlock()
		return errDead
	}
	m := a.g.slots[s]
	if m == nil {
		m = &model{tickets: map[Ticket]time.Time{}, begun: map[Ticket]time.Duration{}}
		a.g.slots[s] = m
	}
	f(m, time.Now())
	a.w.mu.Unlock()
	a.stumble()
	return nil
}

func (a *agent) Begin(s Slot, _ uint64, lease time.Duration) (t Ticket, err error) {
	lease = time.Duration(float64(lease) * (1 - a.g.drift))
	err = a.kernel(s, func(m *model, now time.Time) {
		a.g.next++
		t, m.newest = a.g.next, a.g.next
		m.begun[t] = lease
		if a.w.mutation != "ticket begun after the answer" {
			m.tickets[t] = now.Add(lease)
		}
	})
	return t, err
}

func (a *agent) Grant(s Slot, t Ticket) error {
	return a.kernel(s, func(m *model, now time.Time) {
		switch a.w.mutation {
		case "ticket begun after the answer":
			if _, once := m.tickets[t]; !once {
				m.tickets[t] = now.Add(m.begun[t])
			}
		case "answer grants another round's ticket":
			t = m.newest
			if !m.tickets[t].After(now) {
				m.tickets[t] = now.Add(m.begun[t])
			}
		}
		m.granted = t
		a.w.observe(s, a.g, now)
		for old, until := range m.tickets {
			if now.Sub(until) > time.Minute {
				delete(m.tickets, old)
				delete(m.begun, old)
			}
		}
	})
}

func (a *agent) Drop(s Slot) error {
	drop := func(m *model, _ time.Time) { m.granted = 0; clear(m.tickets) }
	if a.w.mutation == "release said before the drop" {
		time.AfterFunc(400*time.Millisecond, func() { a.w.mu.Lock(); defer a.w.mu.Unlock(); drop(a.g.slots[s], time.Now()) })
		return a.kernel(s, func(*model, time.Time) {})
	}
	return a.kernel(s, drop)
}

func (a *agent) Hold(s Slot, on bool) error { return a.kernel(s, func(*model, time.Time) {}) }

// observe checks whether another gateway forwards now. Only a grant starts forwarding. Called with the lock held.
func (w *world) observe(s Slot, by *simGateway, now time.Time) {
	if !by.forwards(s, now) {
		return
	}
	for _, o := range w.gateways {
		if o != by && o.forwards(s, now) {
			w.say("TWO OWNERS of %s: %s and %s", s, by.name, o.name)
			w.two = append(w.two, w.journal[len(w.journal)-1])
		}
	}
}

// RenewLeases asks all servers; the first that leads answers.
func (a *agent) RenewLeases(ctx context.Context, q *skeinv1.RenewLeasesRequest) (*skeinv1.RenewLeasesResponse, error) {
	a.stumble()
	answers := make(chan *skeinv1.RenewLeasesResponse, 16)
	a.w.mu.Lock()
	for _, s := range a.w.servers {
		a.w.send(a.process, s.process, func() {
			a.w.mu.Lock()
			k := s.slotController
			a.w.mu.Unlock()
			if k == nil {
				return
			}
			ctx, cancel := context.WithTimeout(a.w.ctx, 2*time.Second)
			defer cancel()
			r, err := k.RenewLeases(ctx, a.g.id, q)
			if err != nil {
				return
			}
			a.w.mu.Lock()
			defer a.w.mu.Unlock()
			a.w.send(s.process, a.process, func() {
				select {
				case answers <- r:
				default:
				}
			})
		})
	}
	a.w.mu.Unlock()
	select {
	case r := <-answers:
		a.stumble()
		return r, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (a *agent) HandOver(ctx context.Context, s Slot, epoch uint64, to identity.ID) error {
	a.stumble()
	done := make(chan struct{}, 2)
	a.w.mu.Lock()
	for _, g := range a.w.gateways {
		if g.id == to {
			b := g.agent
			a.w.send(a.process, b.process, func() {
				b.leaseClient.TakeOver(s, epoch, true)
				a.w.mu.Lock()
				defer a.w.mu.Unlock()
				a.w.send(b.process, a.process, func() {
					select {
					case done <- struct{}{}:
					default:
					}
				})
			})
		}
	}
	a.w.mu.Unlock()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
