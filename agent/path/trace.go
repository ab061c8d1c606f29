package path

import (
	"encoding/json"
	"net/netip"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// kindTrace is the journal's name for a Trace, which suffices to replay one decision exactly.
const kindTrace = "trace"

// traceLen bounds the inputs of one generation; a trace holds one to two generations, about two seconds of heartbeats
// in both directions.
const traceLen = 16

// Timed is an input with its time.
type Timed struct {
	At    time.Time
	Input Input
}

// Trace is a machine and the inputs that it then received. Folding the inputs reproduces the recorded decision.
type Trace struct {
	Machine Machine
	Inputs  []Timed
}

// trace collects a Trace in memory. A Machine is a value, so keeping an old one needs no deep copy; a thousand idle
// peers keep one each, and little else.
type trace struct {
	old, cur *generation
}

type generation struct {
	machine Machine
	inputs  []moment
}

// moment is a Timed; most inputs are ticks.
type moment struct {
	at    time.Time
	input *Input // nil: a tick
}

// traceFor is how long an input may matter to a reader of the trace. For a replay any machine with the inputs since
// suffices.
const traceFor = 10 * time.Second

func (t *trace) add(m Machine, now time.Time, in Input) {
	if c := t.cur; c != nil && len(c.inputs) > 0 && now.Sub(c.inputs[len(c.inputs)-1].at) > traceFor {
		t.old = nil
		c.begin(m)
	}
	if t.cur == nil || len(t.cur.inputs) >= traceLen {
		next := t.old
		if next == nil {
			next = &generation{}
		}
		next.begin(m)
		t.old, t.cur = t.cur, next
	}
	if len(t.cur.inputs) == 0 {
		t.cur.machine = m
	}
	n := moment{at: now}
	if in.Kind != InputTick {
		keep := in
		n.input = &keep
	}
	t.cur.inputs = append(t.cur.inputs, n)
}

func (g *generation) begin(m Machine) {
	clear(g.inputs)
	g.machine, g.inputs = m, g.inputs[:0]
}

// drain returns the collected trace and starts anew.
func (t *trace) drain() Trace {
	var out Trace
	for i, g := range []*generation{t.old, t.cur} {
		if g == nil || len(g.inputs) == 0 && i == 0 {
			continue
		}
		if len(out.Inputs) == 0 {
			out.Machine = g.machine
		}
		for _, n := range g.inputs {
			in := Input{Kind: InputTick}
			if n.input != nil {
				in = *n.input
			}
			out.Inputs = append(out.Inputs, Timed{n.at, in})
		}
		g.inputs = g.inputs[:0]
	}
	return out
}

// note writes an input that changes something into the journal, for human readers.
func (m *Manager) note(now time.Time, id identity.ID, in Input) {
	if m.cfg.Journal == nil {
		return
	}
	e := &skeinv1.PathInput{Kind: in.Kind.String(), RttNanos: int64(in.RTT)}
	if !id.IsZero() {
		e.Peer = id.String()
	}
	if in.Endpoint.IsValid() {
		e.Endpoint = in.Endpoint.String()
	}
	in.Endpoint, in.RTT, in.Sent = netip.AddrPort{}, 0, time.Time{}
	if b, err := json.Marshal(in); err == nil {
		e.Detail = string(b)
	}
	m.write(now, &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathInput{PathInput: e}})
}

// decided writes a path change: the input that proved or disproved it, the decision, and the trace that replays it.
func (m *Manager) decided(p *peer, before Path) {
	t := p.trace.drain()
	if m.cfg.Journal == nil {
		return
	}
	now, id, path := p.machine.Now, p.machine.Peer.String(), p.machine.Path
	input := func(in *skeinv1.PathInput) {
		in.Peer = id
		m.write(now, &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathInput{PathInput: in}})
	}
	if before.Kind == Direct && before.Alive && p.machine.Lost != "" {
		input(&skeinv1.PathInput{Kind: InputSendFailed.String(), Endpoint: before.Endpoint.String(),
			Detail: quoted(p.machine.Lost)})
	}
	if path.Kind == Direct && path.Alive && !path.Silent {
		input(&skeinv1.PathInput{Kind: InputPong.String(), Endpoint: path.Endpoint.String(), RttNanos: int64(path.RTT)})
	}
	if b, err := json.Marshal(t); err == nil {
		input(&skeinv1.PathInput{Kind: kindTrace, Detail: string(b)})
	}
	m.write(now, &skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathDecision{PathDecision: decision(p.machine.Peer,
		before, path)}})
}

// reasoned records a new reason for the same path. It needs no trace.
func (m *Manager) reasoned(p *peer, before Path) {
	if m.cfg.Journal != nil {
		m.write(p.machine.Now,
			&skeinv1.JournalEntry{Body: &skeinv1.JournalEntry_PathDecision{PathDecision: decision(p.machine.Peer, before,
				p.machine.Path)}})
	}
}

func (m *Manager) write(now time.Time, e *skeinv1.JournalEntry) {
	e.Time = now.UnixNano()
	m.cfg.Journal.Append(e)
}

func decision(peer identity.ID, from, to Path) *skeinv1.PathDecision {
	return &skeinv1.PathDecision{Peer: peer.String(), From: from.String(), To: to.String(), Rule: to.Rule,
		Reason: to.Reason}
}

func quoted(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		return ""
	}
	return string(b)
}
