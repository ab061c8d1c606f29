package bench

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

//go:embed relayudp.yaml
var relayUDPLab []byte

// relayUDP measures a pair whose packets pass a relay's reserved ports.
func (b *bench) relayUDP(ctx context.Context) (out []Figure) {
	const what = "a pair by UDP through a relay"
	l, down, err := b.raise(ctx, relayUDPLab)
	if err != nil {
		return []Figure{notMeasured(what, "", err)}
	}
	defer func() {
		if err := down(); err != nil {
			out = append(out, notMeasured("taking the lab down", "", err))
		}
	}()
	f := &udpField{field: &field{bench: b, lab: l, names: l.Spec.NodeNames()}}
	for _, relay := range []string{"relay1", "relay2"} {
		if _, exit, err := l.Exec(ctx, relay, "sh", "-c", "echo 1 >/proc/sys/net/ipv4/ip_forward"); err != nil || exit != 0 {
			return []Figure{notMeasured(what, "", fmt.Errorf("let %s forward: exit status %d, %w", relay, exit, err))}
		}
	}
	if err := l.WaitConverged(ctx, formedWithin); err != nil {
		return []Figure{notMeasured(what, "", err)}
	}
	for _, part := range []func(context.Context) ([]Figure, error){f.blocked, f.relayCut, f.agentKilled} {
		figures, err := part(ctx)
		if err != nil {
			return append(out, f.failed(ctx, fmt.Errorf("%s: %w", what, err))...)
		}
		out = append(out, figures...)
	}
	return out
}

// udpField is the lab with its one pair.
type udpField struct{ *field }

// pair takes turns, since a path that dies again and again is left alone for ever longer.
func (f *udpField) pair(i int) pair {
	return pair{fmt.Sprintf("east%d", i%3+1), fmt.Sprintf("west%d", i/3%2+1)}
}

// flowing starts echoes and waits until both ends send by UDP through a relay. It names that of the first.
func (f *udpField) flowing(ctx context.Context, p pair) (s *ping.Stream, relay string, err error) {
	if s, err = f.lab.PingNode(p.from, p.to, pingEvery, 0); err != nil {
		return nil, "", err
	}
	err = f.until(ctx, 2*formedWithin, func() error {
		for _, p := range []pair{{p.to, p.from}, p} {
			v, err := f.lab.Path(ctx, p.from, p.to)
			if err != nil {
				return err
			}
			if v.GetDetail() != "udp" || !v.GetAlive() {
				return fmt.Errorf("%s: path %s %s (%s)", p, v.GetPath(), v.GetDetail(), v.GetReason())
			}
			relay = v.GetRelayName()
		}
		return nil
	})
	s.Stop()
	if err != nil {
		return nil, "", err
	}
	// Echoes of the way there are not measured.
	if s, err = f.lab.PingNode(p.from, p.to, pingEvery, 0); err != nil {
		return nil, "", err
	}
	wait, cancel := context.WithTimeout(ctx, cutPatient)
	defer cancel()
	if err = s.Answered(wait, 25); err != nil {
		s.Stop()
	}
	return s, relay, err
}

// disturb does something to the relay in use, and tells what the echoes made of it.
func (f *udpField) disturb(ctx context.Context, p pair, do func(relay string) error) (ping.Report, error) {
	s, relay, err := f.flowing(ctx, p)
	if err != nil {
		return ping.Report{}, err
	}
	before := s.Report().Received
	if err := do(relay); err != nil {
		s.Stop()
		return ping.Report{}, err
	}
	wait, cancel := context.WithTimeout(ctx, cutPatient)
	_ = s.Answered(wait, before+75) // if not, the report says for how long there was silence
	cancel()
	r := s.Stop()
	return r, f.lab.Heal(ctx)
}

// blocked cuts UDP between one end and the relay: the session has to do.
func (f *udpField) blocked(ctx context.Context) ([]Figure, error) {
	var all sample
	runs := f.opts.runs(30, 6)
	f.note("UDP to the relay blocked: %d", runs)
	for i := range runs {
		p := f.pair(i)
		end, oneway := []string{p.from, p.to}[i%2], i%3 == 2
		r, err := f.disturb(ctx, p, func(relay string) error {
			return f.lab.Block(lab.Block{From: []string{end}, To: []string{"relay1", "relay2"}, Proto: "udp", Oneway: oneway})
		})
		if err != nil {
			return nil, err
		}
		all.add(r.Longest(), fmt.Sprintf("%s, oneway %t", end, oneway))
	}
	return []Figure{all.figure("UDP to the relays blocked: traffic again, in a session", 99, time.Second,
		"two symmetric NATs, ping 50/s by UDP through a relay's reserved ports; UDP between one end and both relays is "+
			"cut, every third time in one direction only; longest time without an answer")}, nil
}

// relayCut takes the relay's host off the net.
func (f *udpField) relayCut(ctx context.Context) ([]Figure, error) {
	var all sample
	runs := f.opts.runs(12, 3)
	f.note("relay's host cut: %d", runs)
	for i := range runs {
		p := f.pair(i)
		r, err := f.disturb(ctx, p, func(relay string) error {
			return f.lab.Partition([]string{relay}, []string{p.from, p.to})
		})
		if err != nil {
			return nil, err
		}
		all.add(r.Longest(), "cut")
	}
	return []Figure{all.figure("the relay's host gone: traffic again, over another", 99, 2*time.Second,
		"the same pair; everything between both ends and the relay that carries them is cut")}, nil
}

// agentKilled ends the relay's process: its kernel goes on.
func (f *udpField) agentKilled(ctx context.Context) ([]Figure, error) {
	runs, lost, sent := f.opts.runs(6, 2), 0, 0
	f.note("relay's agent killed: %d", runs)
	for i := range runs {
		r, err := f.disturb(ctx, f.pair(i), func(relay string) error { return f.lab.Kill(ctx, relay) })
		if err != nil {
			return nil, err
		}
		lost, sent = lost+r.Lost(), sent+r.Received+r.Lost()
	}
	return []Figure{{
		Name: "the relay's agent killed: echoes lost", Target: "0", Got: fmt.Sprintf("%d of %d", lost, sent),
		Verdict: verdict(lost == 0), Load: loadAverage(),
		How: fmt.Sprintf("the same pair; kill -9 of the relay's agent, 75 echoes after it, then it is started again, %d "+
			"times: the kernel goes on forwarding", runs),
	}}, nil
}
