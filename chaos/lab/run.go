package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/lag"
)

// RunOptions say how a scenario is run.
type RunOptions struct {
	Options
	Artifacts string // where a failed run leaves its folder; default ./lab-failures
	Keep      bool   // leave the lab up at the end
}

// Result is the outcome of a scenario.
type Result struct {
	Name      string       `json:"name"`
	OK        bool         `json:"ok"`
	Seconds   float64      `json:"seconds"`
	UpSeconds float64      `json:"up_seconds"`
	Steps     []StepResult `json:"steps"`
	Error     string       `json:"error,omitempty"`
	Artifacts string       `json:"artifacts,omitempty"`
}

// StepResult is the outcome of a step.
type StepResult struct {
	Line    int     `json:"line"`
	Text    string  `json:"text"`
	OK      bool    `json:"ok"`
	Seconds float64 `json:"seconds"`
	Error   string  `json:"error,omitempty"`
}

// Run brings a lab up, runs its steps and takes it down, whatever happens. The error is nil only when
// every step held; the Result is never nil.
func Run(ctx context.Context, spec *Spec, opts RunOptions) (*Result, error) {
	start := time.Now()
	if opts.Artifacts == "" {
		opts.Artifacts = "lab-failures"
	}
	opts.Options.Artifacts = "" // Run saves them itself, with its report
	res := &Result{Name: spec.Name, Steps: []StepResult{}}
	l, err := raise(ctx, spec, opts.Options)
	res.UpSeconds = time.Since(start).Seconds()
	if err == nil {
		l.progress("up in %s", round(time.Since(start)))
		err = l.runSteps(ctx, res)
	}
	if err != nil && l != nil {
		l.autopsy(context.WithoutCancel(ctx), res, opts.Artifacts, ctx.Err() != nil)
	}
	if l != nil && (!opts.Keep || ctx.Err() != nil) {
		err = errors.Join(err, l.Down(context.WithoutCancel(ctx)))
	}
	res.OK, res.Seconds = err == nil, time.Since(start).Seconds()
	if err != nil {
		res.Error = err.Error()
	}
	return res, err
}

// autopsy keeps what can be learned from a failed run. One that the user broke off teaches nothing.
func (l *Lab) autopsy(ctx context.Context, res *Result, base string, broken bool) {
	if broken {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	dir, err := l.SaveArtifacts(ctx, base)
	if err != nil {
		l.progress("artifacts: %v", err)
	}
	if dir != "" {
		res.Artifacts = dir
		l.progress("logs, states and kernel tables are in %s", dir)
	}
}

// RunSteps runs a Spec's steps on a lab that is up.
func (l *Lab) RunSteps(ctx context.Context) (*Result, error) {
	res := &Result{Name: l.Spec.Name, Steps: []StepResult{}}
	start := time.Now()
	err := l.runSteps(ctx, res)
	res.OK, res.Seconds = err == nil, time.Since(start).Seconds()
	if err != nil {
		res.Error = err.Error()
	}
	return res, err
}

func (l *Lab) runSteps(ctx context.Context, res *Result) error {
	defer func() {
		for _, p := range l.pings {
			p.stream.Stop()
		}
		l.pings = nil
		l.endFlows()
	}()
	first, longest := l.machine(), time.Duration(0)
	for i, step := range l.Spec.Steps {
		before, stopped := l.machine(), lag.Stood(20*time.Millisecond)
		err := l.runStep(ctx, step)
		took, stood := time.Since(before.at), stopped()
		longest = max(longest, stood)
		r := StepResult{Line: step.Line, Text: step.Text, OK: err == nil, Seconds: took.Seconds()}
		mark := "ok  "
		if err != nil {
			mark, r.Error = "FAIL", err.Error()
		}
		res.Steps = append(res.Steps, r)
		l.progress("%s %2d/%d %s (%s)", mark, i+1, len(l.Spec.Steps), step.Text, round(took))
		if err != nil {
			now := l.machine()
			err = fmt.Errorf("%s:%d: step %d (%s): %w\nwhile it ran: %s\nwith the steps before: %s", l.Spec.File,
				step.Line, i+1, step.Text, err, before.until(now, stood), first.until(now, longest))
			if ctx.Err() == nil {
				l.progress("%s", r.Error)
				l.opinions(ctx, step.Action, err)
			}
			return err
		}
	}
	return nil
}

func (l *Lab) runStep(ctx context.Context, s Step) error {
	switch a := s.Action.(type) {
	case Wait:
		if a.Converged {
			return l.WaitConverged(ctx, s.Within, a.Nodes...)
		}
		if !pause.For(ctx, a.For) {
			return ctx.Err()
		}
		return nil
	case Expect:
		return l.Expect(ctx, s.Within, a)
	case Accounts:
		return l.AddressesAgree(ctx, s.Within)
	case StartPods:
		return l.StartPods(ctx, s.Within, a)
	case StopPods:
		return l.StopPods(ctx, a)
	case Ping:
		if len(a.From) == 0 {
			return l.EndPings(a.Lost, a.Longest)
		}
		return l.StartPings(ctx, a)
	case Transfer:
		return l.Transfer(ctx, s.Within, a)
	case Serve:
		return l.Serve(a)
	case Fetch:
		return l.Fetch(ctx, s.Within, a)
	case Flow:
		if len(a.From) == 0 {
			return l.EndFlows(a.Lost, a.Longest)
		}
		return l.StartFlows(ctx, a)
	case Exec:
		return l.runExec(ctx, s.Within, a)
	case Partition:
		return l.Partition(a.Groups...)
	case Block:
		return l.Block(a)
	case Zombie:
		return l.Zombie(ctx, a.Drops, a.Nodes...)
	case SetNAT:
		return l.SetNAT(a.Site, a.NAT)
	case Rebind:
		return l.Rebind(ctx, a.Sites...)
	case Move:
		return l.Move(a.Node, a.To)
	case Pause:
		return l.Pause(a.Nodes...)
	case Resume:
		return l.Resume(a.Nodes...)
	case Kill:
		return l.Kill(ctx, a.Nodes...)
	case Stop:
		return l.Stop(ctx, a.Nodes...)
	case Start:
		return l.Start(ctx, a.Nodes...)
	case Heal:
		return l.Heal(ctx, a.Nodes...)
	case Log:
		l.progress("%s", a.Message)
		return nil
	}
	return fmt.Errorf("a step of the kind %T cannot be run", s.Action)
}

// opinions prints what every agent thinks that the failure involves: those of the pairs that fail, or
// else those that the step names.
func (l *Lab) opinions(ctx context.Context, a Action, err error) {
	const mostPairs, mostNodes = 3, 6
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	pairs := pairsIn(err)
	pairs = pairs[:min(len(pairs), mostPairs)]
	nodes := l.withAgent(nodesIn(a.nodes()))
	if len(pairs) > 0 {
		nodes = nil
		for _, p := range pairs {
			nodes = union(nodes, l.withAgent(nodesIn([]string{p.from, p.to})))
		}
	}
	for _, n := range nodes[:min(len(nodes), mostNodes)] {
		l.progress("%s", l.opinion(ctx, n))
	}
	for _, p := range pairs {
		if from, to := nodeOf(p.from), nodeOf(p.to); from != to && len(l.withAgent([]string{from, to})) == 2 {
			l.progress("%s", l.explain(ctx, from, to))
		}
	}
}

// Opinion is what an agent says of itself and its peers, or why it says nothing.
func (l *Lab) Opinion(ctx context.Context, node string) string { return l.opinion(ctx, node) }

// opinion is one agent's view of itself and its peers.
func (l *Lab) opinion(ctx context.Context, node string) string {
	a, err := l.agent(node)
	if err != nil {
		return err.Error()
	}
	var b strings.Builder
	rec := a.record()
	fmt.Fprintf(&b, "%s (%s, process %d):\n", node, rec.Condition, rec.Process.PID)
	if err := a.died(); err != nil {
		fmt.Fprintf(&b, "    %v\n", err)
	}
	st, err := a.status(ctx)
	if err != nil {
		fmt.Fprintf(&b, "    does not answer: %v\n%s", err, a.logTail())
		return b.String()
	}
	fmt.Fprintf(&b, "    %s, index %d, state %.12s, records %.12s, leader %q, NAT %s, peers %d direct %d relay %d down",
		st.GetPhase(), st.GetIndex(), st.GetStateHash(), st.GetRecordsHash(), st.GetLeaderName(),
		candidate.NATName(st.GetNatType()), st.GetPeersDirect(), st.GetPeersRelay(), st.GetPeersDown())
	for _, p := range st.GetProblems() {
		fmt.Fprintf(&b, "\n    problem: %s: %s (%s)", p.GetSubject(), p.GetMessage(), p.GetAdvice())
	}
	for _, p := range l.peersOf(ctx, a) {
		b.WriteString("\n    " + p)
	}
	return b.String()
}

func (l *Lab) explain(ctx context.Context, from, to string) string {
	out, exit, err := l.Exec(ctx, from, "skein", "explain", "peer", to)
	if err != nil || exit != 0 {
		return fmt.Sprintf("%s cannot explain its peer %s: exit status %d, %v: %s", from, to, exit, err,
			strings.TrimSpace(out))
	}
	return fmt.Sprintf("%s about its peer %s:\n    %s", from, to, strings.ReplaceAll(strings.TrimSpace(out),
		"\n", "\n    "))
}

// sortLines puts lines in order.
func sortLines(lines []string) []string { slices.Sort(lines); return lines }
