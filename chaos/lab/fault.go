package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Cut is one fault: what From sends does not arrive at To.
type Cut struct {
	From    string `json:"from"`
	To      string `json:"to"`
	Proto   string `json:"proto,omitempty"`   // udp, tcp, icmp; "": everything
	Percent int    `json:"percent,omitempty"` // of a hundred packets, at random; 0: all
	Above   int    `json:"above,omitempty"`   // only packets longer than this, in bytes; 0: of any length
}

func sortCuts(cuts map[Cut]bool) []Cut {
	return slices.SortedFunc(maps.Keys(cuts), func(a, b Cut) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To), cmp.Compare(a.Proto, b.Proto),
			cmp.Compare(a.Above, b.Above), cmp.Compare(a.Percent, b.Percent))
	})
}

func (p Partition) cuts() []Cut {
	var out []Cut
	for i, group := range p.Groups {
		for j, other := range p.Groups {
			if i == j {
				continue
			}
			out = append(out, between(group, other, Cut{})...)
		}
	}
	return out
}

func (b Block) cuts() []Cut {
	like := Cut{Proto: b.Proto, Percent: b.Percent, Above: b.Above}
	out := between(b.From, b.To, like)
	if !b.Oneway {
		out = append(out, between(b.To, b.From, like)...)
	}
	return out
}

func between(from, to []string, like Cut) []Cut {
	var out []Cut
	for _, f := range from {
		for _, t := range to {
			if f != t {
				like.From, like.To = f, t
				out = append(out, like)
			}
		}
	}
	return out
}

// healed tells which cuts touch none of the nodes.
func healed(cuts map[Cut]bool, nodes []string) map[Cut]bool {
	left := map[Cut]bool{}
	for c := range cuts {
		if !slices.Contains(nodes, c.From) && !slices.Contains(nodes, c.To) {
			left[c] = true
		}
	}
	return left
}

var protoNumbers = map[string][]uint8{
	"": {0}, "udp": {unix.IPPROTO_UDP}, "tcp": {unix.IPPROTO_TCP}, "icmp": {unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6},
}

// drops translates cuts for each receiver.
func drops(plan fabric.Plan, cuts map[Cut]bool) map[string][]fabric.Drop {
	out := map[string][]fabric.Drop{}
	for _, c := range sortCuts(cuts) {
		from, _ := plan.Host(c.From)
		for _, p := range protoNumbers[c.Proto] {
			out[c.To] = append(out[c.To], fabric.Drop{From: from.Number, Proto: p, Percent: c.Percent, Above: c.Above})
		}
	}
	return out
}

// measured tells whether the length of what a node sends matters to a fault.
func measured(cuts map[Cut]bool, from string) bool {
	for c := range cuts {
		if c.From == from && c.Above != 0 {
			return true
		}
	}
	return false
}

// setCuts makes the faults those of want, touching only the hosts whose faults change. All of these change together: a
// transaction of nftables waits for a grace period of the kernel, which for one host after the other would make a cut
// begin here some hundred milliseconds sooner than there.
func (l *Lab) setCuts(change func(map[Cut]bool) map[Cut]bool) error {
	if err := l.changeCuts(change); err != nil {
		return err
	}
	return l.save()
}

func (l *Lab) changeCuts(change func(map[Cut]bool) map[Cut]bool) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	want := change(maps.Clone(l.cuts))
	before, after := drops(l.Plan, l.cuts), drops(l.Plan, want)
	set := func(host string) error {
		if !slices.Equal(before[host], after[host]) {
			if err := fabric.SetDrops(l.Spec.Name, host, after[host]); err != nil {
				return err
			}
		}
		if single := measured(want, host); single != measured(l.cuts, host) {
			return fabric.Segment(l.Spec.Name, host, single)
		}
		return nil
	}
	errs := make([]error, len(l.Plan.Hosts))
	var setting sync.WaitGroup
	for i, h := range l.Plan.Hosts {
		setting.Go(func() { errs[i] = set(h.Name) })
	}
	setting.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	l.cuts = want
	return nil
}

func (l *Lab) addCuts(more []Cut) error {
	for _, c := range more {
		for _, n := range []string{c.From, c.To} {
			if _, err := l.host(n); err != nil {
				return err
			}
		}
		if _, ok := protoNumbers[c.Proto]; !ok {
			return fmt.Errorf("protocol %q is not known; allowed: udp, tcp, icmp, or none for all", c.Proto)
		}
	}
	return l.setCuts(func(cuts map[Cut]bool) map[Cut]bool {
		for _, c := range more {
			cuts[c] = true
		}
		return cuts
	})
}

// Partition cuts everything between nodes of different groups; nodes in no group are not touched.
func (l *Lab) Partition(groups ...[]string) error { return l.addCuts(Partition{groups}.cuts()) }

// Block cuts the direct way between nodes.
func (l *Lab) Block(b Block) error { return l.addCuts(b.cuts()) }

// Heal takes back the faults that touch the nodes, or with none named all faults: also what their sites' routers were
// made. Zombies pass everything on again. It resumes and starts the agents among them that were paused or killed.
// Agents that were stopped stay so, and nodes that moved stay where they are: that was not a fault.
func (l *Lab) Heal(ctx context.Context, nodes ...string) error {
	if len(nodes) == 0 {
		nodes = l.Spec.HostNames()
	}
	if err := l.healNATs(nodes); err != nil {
		return err
	}
	agents, err := l.pick(l.withAgent(nodes))
	if err != nil {
		return err
	}
	if err := l.setCuts(func(cuts map[Cut]bool) map[Cut]bool { return healed(cuts, nodes) }); err != nil {
		return err
	}
	if err := l.forwardAgain(nodes); err != nil {
		return err
	}
	var killed, paused []string
	for _, a := range agents {
		switch a.record().Condition {
		case Killed:
			killed = append(killed, a.node.Name)
		case Paused:
			paused = append(paused, a.node.Name)
		}
	}
	return errors.Join(l.Resume(paused...), l.Start(ctx, killed...))
}

// withAgent leaves out the nodes that have none.
func (l *Lab) withAgent(nodes []string) []string {
	return slices.DeleteFunc(slices.Clone(nodes), func(n string) bool {
		return slices.ContainsFunc(l.hosts, func(h *agent) bool { return h.node.Name == n })
	})
}

// Pause makes agents stand still until they are resumed: they hold what they have and answer nothing.
func (l *Lab) Pause(nodes ...string) error { return l.signal(nodes, unix.SIGSTOP, Running, Paused) }

// Resume lets paused agents go on.
func (l *Lab) Resume(nodes ...string) error { return l.signal(nodes, unix.SIGCONT, Paused, Running) }

func (l *Lab) signal(nodes []string, sig unix.Signal, from, to Condition) error {
	if len(nodes) == 0 {
		return nil
	}
	agents, err := l.pick(nodes)
	if err != nil {
		return err
	}
	for _, a := range agents {
		if err := a.turn(sig, from, to); err != nil {
			return err
		}
	}
	return l.save()
}

// Kill ends agents with SIGKILL.
func (l *Lab) Kill(ctx context.Context, nodes ...string) error {
	return l.end(ctx, nodes, unix.SIGKILL, Killed)
}

// Stop ends agents gracefully, with SIGTERM.
func (l *Lab) Stop(ctx context.Context, nodes ...string) error {
	return l.end(ctx, nodes, unix.SIGTERM, Stopped)
}

func (l *Lab) end(ctx context.Context, nodes []string, sig unix.Signal, then Condition) error {
	agents, err := l.pick(nodes)
	if err != nil {
		return err
	}
	err = each(agents, func(a *agent) error { return a.end(ctx, sig, then) })
	if serr := l.save(); err == nil {
		err = serr
	}
	return err
}

// Start starts agents again and waits until they answer. One that had been a member resumes from its
// state; one that had not yet joined tries again. For one that was late it waits until it is a member.
func (l *Lab) Start(ctx context.Context, nodes ...string) error {
	agents, err := l.pick(nodes)
	if err != nil {
		return err
	}
	return each(agents, func(a *agent) error {
		var extra []string
		late := a.record().Condition == Never
		switch {
		case a.record().Joined:
		case a.node.Init:
			extra = []string{"--init"}
		default:
			extra = []string{"--join-file", l.tokenFile(a.node)}
		}
		if err := l.launch(a, extra...); err != nil {
			return err
		}
		return a.ready(ctx, late)
	})
}
