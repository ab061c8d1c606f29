package egress

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/skeinmesh/skein/identity"
)

func TestReadingsProveThatALeaseRuns(t *testing.T) {
	const lease, ticket = time.Minute, MaxTicket
	a, b := nodeID(7), nodeID(8)
	at := func(d time.Duration) Reading { return Reading{"boot", time.Hour + d} }
	before := Readings{a: at(0), b: at(0), self: at(0)}
	for name, c := range map[string]struct {
		after Readings
		want  bool
	}{
		"one says so":                           {Readings{a: at(57 * time.Second)}, true},
		"it would run out before the ticket":    {Readings{a: at(57*time.Second + 1)}, false},
		"nobody answers":                        {Readings{}, false},
		"this machine alone":                    {Readings{self: at(time.Second)}, false},
		"this machine was suspended":            {Readings{a: at(time.Second), self: at(time.Hour)}, false},
		"one that stood still as well, one not": {Readings{a: at(time.Second), b: at(time.Hour)}, false},
		"one that was started anew, and another": {Readings{a: {"other boot", time.Second}, b: at(time.Second)},
			true},
		"one that was started anew alone":          {Readings{a: {"other boot", 2 * time.Hour}}, false},
		"one that nobody read before":              {Readings{nodeID(9): at(time.Second)}, false},
		"one whose clock runs backwards is no one": {Readings{a: at(-time.Second)}, false},
	} {
		if got := proves(self, before, c.after, ticket, lease); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// machine is a gateway that is frozen and resumed, with its kernel's tickets, beside a leader and witnesses whose
// time continues. A step is 10 ms of their time.
type machine struct {
	h       *LeaseHolder
	rand    *rand.Rand
	own     time.Duration // the machine's clock
	real    time.Duration
	tickets map[Ticket]time.Duration // by the machine's clock
	granted Ticket
	rounds  uint64
	read    time.Duration
	mail    []letter                      // on their way to the machine
	slept   map[identity.ID]time.Duration // that witnesses stood still
	free    time.Duration                 // when the leader gives the slot to others
	still   bool                          // witnesses stand still with the machine
}

// letter is an answer on its way; it waits while the machine is frozen.
type letter struct {
	at time.Duration
	do func(now time.Time)
}

const step = 10 * time.Millisecond

func (m *machine) now() time.Time { return t0.Add(m.own) }

func (m *machine) do(orders []Order) {
	for _, o := range orders {
		switch o.Kind {
		case DoGrant:
			m.granted = o.Ticket
		case DoDrop:
			m.granted = 0
		}
	}
}

func (m *machine) forwards() bool { return m.granted != 0 && m.tickets[m.granted] > m.own }

func (m *machine) begin(life time.Duration) Ticket {
	t := Ticket(m.rounds)
	m.tickets[t] = m.own + life
	return t
}

func (m *machine) send(do func(now time.Time)) {
	m.mail = append(m.mail, letter{m.real + time.Duration(m.rand.IntN(60))*time.Millisecond, do})
}

// live is one step of the machine while it runs.
func (m *machine) live(leader bool, lease time.Duration) {
	m.own += step
	now := m.now()
	var later []letter
	for _, l := range m.mail {
		if l.at <= m.real {
			l.do(now)
		} else {
			later = append(later, l)
		}
	}
	m.mail = later
	m.do(m.h.Tick(now))
	if epoch, life, _, ok := m.h.Wish(now); ok && m.own%RenewEvery == 0 {
		m.rounds++
		round := m.rounds
		m.h.Begun(round, epoch, m.begin(life), now, life)
		if leader && (m.free == 0 || m.real < m.free) {
			m.free = m.real + lease + GuardFor(lease)
			m.send(func(now time.Time) { m.do(m.h.Granted(round, epoch, now)) })
		}
	}
	epoch, life, needed := m.h.Prolong(now)
	if every := map[bool]time.Duration{true: RenewEvery, false: readEvery}[needed]; m.own-m.read < every {
		return
	}
	m.read = m.own
	m.rounds++
	round := m.rounds
	if needed {
		m.h.Prolonging(round, epoch, m.begin(life), now, life)
	}
	readings := Readings{self: {"boot", m.own}}
	for i := range 3 {
		if id := nodeID(10 + i); m.rand.IntN(4) > 0 {
			readings[id] = Reading{"boot", m.real - m.slept[id]}
		}
	}
	m.send(func(now time.Time) { m.do(m.h.Read(round, readings, now)) })
}

// story is a random sequence: a leader falls silent, and a machine is frozen at some moment and resumed later. It
// returns how long the machine forwarded after it was resumed, when the slot may have been another's, and how long
// without a leader.
func story(seed uint64, lease time.Duration, freeze, still bool) (after, alone time.Duration) {
	m := &machine{h: NewLeaseHolder(self, slotA), rand: rand.New(rand.NewPCG(seed, 11)),
		tickets: map[Ticket]time.Duration{}, slept: map[identity.ID]time.Duration{}, still: still}
	m.h.Agree(SlotState{Slot: slotA, Node: self, Epoch: 5, Lease: lease}, t0)
	silent := 5*time.Second + time.Duration(m.rand.IntN(2000))*time.Millisecond
	begin := silent + time.Duration(m.rand.Int64N(int64(lease)))
	end := begin + time.Duration(m.rand.Int64N(int64(2*lease)))
	if !freeze {
		begin, end = time.Hour, time.Hour
	}
	for ; m.real < silent+4*lease; m.real += step {
		if m.real >= begin && m.real < end {
			for i := range 3 {
				if m.still {
					m.slept[nodeID(10+i)] += step
				}
			}
			continue
		}
		m.live(m.real < silent, lease)
		if m.forwards() && m.real > silent {
			alone = m.real - silent
		}
		if m.forwards() && m.real > m.free {
			after = max(after, m.real-end)
		}
	}
	return after, alone
}

// A machine that is frozen and resumed cannot detect this from its own clocks. It forwards for the rest of a ticket,
// and gets no further one, since other machines' clocks show how late it is.
func TestAFrozenMachineForwardsForATicketAtMost(t *testing.T) {
	for _, lease := range []time.Duration{1200 * time.Millisecond, 10 * time.Second, time.Minute} {
		var worst, least time.Duration = 0, time.Hour
		for seed := range uint64(60) {
			after, _ := story(seed, lease, true, false)
			worst = max(worst, after)
			_, alone := story(seed, lease, false, false)
			least = min(least, alone)
		}
		t.Logf("lease of %s: when it is continued it forwards for up to %s; unfrozen, and without a leader, for %s or more",
			lease, worst, least)
		if most := firstTicket(lease); worst > most {
			t.Errorf("lease of %s: it forwards for %s after it is continued, at most %s are due", lease, worst, most)
		}
		// its readings are older than the lease, and the last ticket is whole
		if want := lease - 4*time.Second; least < want {
			t.Errorf("lease of %s: without a leader it forwards for %s only, want %s", lease, least, want)
		}
	}
	// If the witnesses were frozen as well, they would prolong an ended lease: so the test can detect that.
	var worst time.Duration
	for seed := range uint64(20) {
		after, _ := story(seed, time.Minute, true, true)
		worst = max(worst, after)
	}
	if worst <= 2*MaxTicket {
		t.Errorf("with witnesses that stood still, too, it forwards for %s: this test finds nothing", worst)
	}
}
