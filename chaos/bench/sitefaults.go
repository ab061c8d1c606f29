package bench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/pause"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

const (
	leaderLimit = time.Second             // that traffic may stand still when a leader dies
	zombieLimit = 2500 * time.Millisecond // and when one lives and does not forward
	hardWindow  = 2500 * time.Millisecond // that traffic is watched for after a fault, at least
	// pauseWindow is as long as it takes until answers count as lost and not as late: a leader that is stopped for
	// less, again and again, is one whose host is slow, and is given more time with each.
	pauseWindow = 4 * time.Second
	// zombieBatch is how many runs are in one lab, each at another site: who was found once is kept out for longer the
	// next time.
	zombieBatch = 4
	largeEcho   = 1300 // bytes of data, which a zombie of the form large drops
	siteRuns    = 30
	siteQuick   = 3
)

// siteFault is what a leader suffers in a run.
type siteFault struct {
	name   string // as Options.Faults has it
	text   string // of the figure
	limit  time.Duration
	window time.Duration
	size   int // of echoes
	zombie string
	begin  func(ctx context.Context, f *siteField, leader string) error
}

func siteFaults() []siteFault {
	hard := func(name, text string, begin func(context.Context, *siteField, string) error) siteFault {
		return siteFault{name: name, text: text, limit: leaderLimit, window: hardWindow, begin: begin}
	}
	zombie := func(form, text string, size int) siteFault {
		return siteFault{
			name: "zombie-" + form, text: text, limit: zombieLimit, window: 2 * zombieLimit, size: size, zombie: form,
			begin: func(ctx context.Context, f *siteField, leader string) error { return f.lab.Zombie(ctx, form, leader) },
		}
	}
	paused := hard("paused", "leader of a site paused", func(_ context.Context, f *siteField, leader string) error {
		return f.lab.Pause(leader)
	})
	paused.window = pauseWindow
	return []siteFault{
		hard("killed", "leader of a site killed", func(ctx context.Context, f *siteField, leader string) error {
			return f.lab.Kill(ctx, leader)
		}),
		paused,
		hard("cut", "leader of a site cut off", func(_ context.Context, f *siteField, leader string) error {
			others := slices.DeleteFunc(slices.Clone(f.names), func(n string) bool { return n == leader })
			return f.lab.Partition([]string{leader}, others)
		}),
		zombie(lab.DropsNew, "leader lives, drops new flows", 0),
		zombie(lab.DropsDirection, "leader lives, drops one direction", 0),
		zombie(lab.DropsLarge, "leader lives, drops large packets", largeEcho),
	}
}

// Other parts of the group sites, as Options.Faults names them.
const (
	faultDrained = "drained"
	faultAdded   = "added"
	faultShare   = "share"
	faultNoVoter = "no-voters"
)

// Faults are the names that Options.Faults knows.
func Faults() []string {
	var out []string
	for _, f := range siteFaults() {
		out = append(out, f.name)
	}
	return append(out, faultDrained, faultAdded, faultShare, faultNoVoter)
}

// checkFaults refuses names that are not known.
func (o Options) checkFaults() error {
	for _, n := range o.Faults {
		if !slices.Contains(Faults(), n) {
			return fmt.Errorf("%q is not a fault of the group sites; allowed: %s", n, strings.Join(Faults(), ", "))
		}
	}
	return nil
}

func (o Options) wantsFault(name string) bool {
	return len(o.Faults) == 0 || slices.Contains(o.Faults, name)
}

func (o Options) siteRuns() int {
	if o.Runs > 0 {
		return o.Runs
	}
	return o.runs(siteRuns, siteQuick)
}

const siteHow = "four sites with two active leaders each and two more nodes; between all sites, on 12 pairs that " +
	"pass " +
	"every leader which a node is bound to, 50 echoes a second and a new TCP connection each 20 ms; "

// What is said of streams that a fault should not touch.
const (
	othersLost = "  lost by those that do not pass that leader"
	othersHow  = "the other streams of the same runs"
)

// siteGroup measures what the leaders of sites do to traffic when they die, fail, or leave.
func (b *bench) siteGroup(ctx context.Context) (out []Figure) {
	if b.opts.wantsFault(faultShare) {
		out = append(append(out, shareFigures()...), b.measure(ctx, []job{tenSites()})...)
	}
	var hard, zombies []siteFault
	for _, f := range siteFaults() {
		switch {
		case !b.opts.wantsFault(f.name):
		case f.zombie != "":
			zombies = append(zombies, f)
		default:
			hard = append(hard, f)
		}
	}
	more := slices.ContainsFunc([]string{faultDrained, faultAdded, faultNoVoter}, b.opts.wantsFault)
	if len(hard) > 0 || more {
		if err := b.inSites(ctx, func(f *siteField) error {
			out = append(out, f.inOneLab(ctx, hard)...)
			return nil
		}); err != nil {
			out = append(out, notMeasured("leaders of sites", "", err))
		}
	}
	for _, z := range zombies {
		out = append(out, b.zombies(ctx, z)...)
	}
	return out
}

// inOneLab measures what leaves a lab as it was. What needs the voters to be away comes last.
func (f *siteField) inOneLab(ctx context.Context, hard []siteFault) (out []Figure) {
	var others tallied
	for _, h := range hard {
		var took sample
		err := f.repeat(ctx, h, f.opts.siteRuns(), 0, &took, &others)
		out = append(out, siteFigure(h.text+": traffic again", h, &took, err))
	}
	if len(hard) > 0 {
		out = append(out, others.figure(othersLost, "0", othersHow))
	}
	if f.opts.wantsFault(faultDrained) {
		out = append(out, f.drained(ctx)...)
	}
	if f.opts.wantsFault(faultAdded) {
		out = append(out, f.added(ctx))
	}
	if f.opts.wantsFault(faultNoVoter) {
		out = append(out, f.withoutVoters(ctx)...)
	}
	f.keepMisses(ctx, f.lab, out)
	return out
}

func siteFigure(name string, h siteFault, took *sample, err error) Figure {
	if err != nil {
		return notMeasured(name, "≤ "+ms(h.limit)+" at p99", err)
	}
	return took.figure(name, 99, h.limit, siteHow+
		"of each run the longest time that a stream through the leader stood still")
}

// tallied is what streams lost in several runs.
type tallied struct {
	lost, sent, broken, open int
	detail                   []string
}

func (t *tallied) add(run string, all []siteOutcome) {
	lost, sent, broken, open := total(all)
	t.merge(tallied{lost: lost, sent: sent, broken: broken, open: open})
	for _, o := range all {
		if o.Lost() > 0 || o.broken {
			t.detail = append(t.detail, fmt.Sprintf("%s: %s %s lost %d of %d", run, o.kind, o.pair, o.Lost(), o.Sent))
		}
	}
}

func (t *tallied) merge(o tallied) {
	t.lost, t.sent, t.broken, t.open = t.lost+o.lost, t.sent+o.sent, t.broken+o.broken, t.open+o.open
	t.detail = append(t.detail, o.detail...)
}

func (t *tallied) figure(name, target, how string) Figure {
	got := fmt.Sprintf("%d of %d lost", t.lost, t.sent)
	if t.open > 0 {
		got += fmt.Sprintf(", %d of %d open connections broken", t.broken, t.open)
	}
	const most = 12
	return Figure{
		Name: name, Target: target, Got: got, How: how, Load: loadAverage(), Detail: t.detail[:min(len(t.detail), most)],
		Verdict: verdict(t.sent > 0 && t.lost == 0 && t.broken == 0),
	}
}

// repeat runs a fault so often, at each site in turn, and adds how long traffic stood still, and what others lost.
func (f *siteField) repeat(ctx context.Context, h siteFault, runs, first int, took *sample, others *tallied) error {
	f.note("sites: %s, %d runs", h.text, runs)
	for i := range runs {
		n := first + i
		site := f.sites[n%len(f.sites)]
		member := f.members(site)[n/len(f.sites)%membersEach]
		r, err := f.once(ctx, h, site, member)
		if err != nil {
			return fmt.Errorf("%s, run %d, at %s: %w", h.text, n+1, site, err)
		}
		d, which := worst(r.through)
		f.note("sites: %s, run %d: %s, %s (%s)", h.text, n+1, r.leader, ms(d), which)
		took.add(d, fmt.Sprintf("run %d, %s: %s", n+1, r.leader, which))
		others.add(fmt.Sprintf("%s, run %d, %s", h.name, n+1, r.leader), r.others)
	}
	return nil
}

// once does to the leader that a member is bound to what the fault says, under traffic, and takes it back.
func (f *siteField) once(ctx context.Context, h siteFault, site, member string) (r siteRun, err error) {
	if h.zombie == "" {
		if err := f.direct(ctx); err != nil {
			return r, err
		}
	}
	await := f.sites // what another site's leader that comes back moves is not a part of this run
	if h.zombie != "" {
		await = []string{site} // the other sites have had theirs, which are kept out for a while
	}
	for _, s := range await {
		if err := f.awaitSettled(ctx, s); err != nil {
			return r, err
		}
	}
	bound, err := f.bindings(ctx)
	if err != nil {
		return r, err
	}
	leader := bound[member]
	t, err := f.start(ctx, h.size, false)
	if err != nil {
		return r, fmt.Errorf("before the fault: %w", err)
	}
	defer func() {
		t.stop()
		err = errors.Join(err, f.lab.Heal(ctx, leader))
	}()
	if err := h.begin(ctx, f, leader); err != nil {
		return r, err
	}
	if !pause.For(ctx, h.window) {
		return r, ctx.Err()
	}
	_ = t.answered(ctx, siteBefore) // if not, the reports say for how long there was silence
	return split(t.stop(), leader, bound), nil
}

// bindings is the leader that each member sends through; "": none.
func (f *siteField) bindings(ctx context.Context) (map[string]string, error) {
	out := map[string]string{}
	for _, s := range f.sites {
		for _, m := range f.members(s) {
			if err := f.until(ctx, siteSettled, func() (err error) {
				out[m], err = f.boundTo(ctx, m)
				return err
			}); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// zombies measures a form of leader that lives and does not forward, in a new lab for every few runs.
func (b *bench) zombies(ctx context.Context, z siteFault) []Figure {
	var took sample
	var others tallied
	var err error
	for left, first := b.opts.siteRuns(), 0; left > 0 && err == nil; {
		runs := min(left, zombieBatch)
		err = b.inSites(ctx, func(f *siteField) error {
			var batch sample
			var beside tallied
			err := f.repeat(ctx, z, runs, first, &batch, &beside)
			f.keepMisses(ctx, f.lab, []Figure{siteFigure(z.text, z, &batch, err), beside.figure(othersLost, "0", othersHow)})
			took.took, took.what = append(took.took, batch.took...), append(took.what, batch.what...)
			others.merge(beside)
			return err
		})
		left, first = left-runs, first+runs
	}
	fig := siteFigure(z.text+": traffic again", z, &took, err)
	fig.How += "; what this form drops are new connections, what goes to the leader's own site, or echoes of 1,300 bytes"
	return []Figure{fig, others.figure(othersLost, "0", othersHow)}
}

// drained drains leaders under traffic with open connections.
func (f *siteField) drained(ctx context.Context) []Figure {
	const name, target = "leader of a site drained: lost", "0 of 10,000, 0 connections broken"
	var all tallied
	var pause sample
	runs := f.opts.siteRuns()
	f.note("sites: %d drains", runs)
	for i := range runs {
		site := f.sites[i%len(f.sites)]
		out, err := f.drainOnce(ctx, site, f.members(site)[i/len(f.sites)%membersEach])
		if err != nil {
			return []Figure{notMeasured(name, target, fmt.Errorf("drain %d, at %s: %w", i+1, site, err))}
		}
		run := fmt.Sprintf("drain %d, at %s", i+1, site)
		all.add(run, out)
		d, which := worst(out)
		pause.add(d, run+": "+which)
	}
	fig := all.figure(name, target, siteHow+"and on each pair a connection that stays open, with 50 numbers a second; "+
		"`skein node drain` of the leader, and `--undo` after it; echoes, new connections and numbers of all runs together")
	if all.sent < 10000 {
		fig.Verdict = Partly
	}
	return []Figure{fig, {
		Name: "  longest time without an answer", Got: pause.text(99), Load: loadAverage(),
		How: "of any stream in each of these runs",
	}}
}

func (f *siteField) drainOnce(ctx context.Context, site, member string) (out []siteOutcome, err error) {
	if err := f.awaitSettled(ctx, site); err != nil {
		return nil, err
	}
	leader, err := f.boundTo(ctx, member)
	if err != nil {
		return nil, err
	}
	c, err := f.lab.Client(f.lab.Spec.Initialiser().Name)
	if err != nil {
		return nil, err
	}
	t, err := f.start(ctx, 0, true)
	if err != nil {
		return nil, err
	}
	defer func() { t.stop() }()
	if _, err := c.DrainNode(ctx, &skeinv1.DrainNodeRequest{Node: leader}); err != nil {
		return nil, err
	}
	if err := f.leaves(ctx, member, leader); err != nil {
		return nil, err
	}
	if err := t.answered(ctx, 2*siteBefore); err != nil {
		f.note("sites: after the drain of %s: %v", leader, err) // the account tells it
	}
	if _, err := c.DrainNode(ctx, &skeinv1.DrainNodeRequest{Node: leader, Undo: true}); err != nil {
		return nil, err
	}
	if err := f.awaitSettled(ctx, site); err != nil {
		return nil, err
	}
	_ = t.answered(ctx, siteBefore) // the account tells what was lost
	return t.stop(), nil
}

// leaves returns when a member sends through another leader.
func (f *siteField) leaves(ctx context.Context, member, leader string) error {
	return f.until(ctx, siteSettled, func() error {
		now, err := f.boundTo(ctx, member)
		if err == nil && now == leader {
			err = fmt.Errorf("%s still sends through %s", member, leader)
		}
		return err
	})
}

// added starts leaders that were dead under traffic: one more of them than before.
func (f *siteField) added(ctx context.Context) Figure {
	const name = "leader of a site added: lost"
	var all tallied
	runs := f.opts.siteRuns()
	f.note("sites: %d leaders added", runs)
	for i := range runs {
		site := f.sites[i%len(f.sites)]
		out, err := f.addOnce(ctx, site, f.members(site)[i/len(f.sites)%membersEach])
		if err != nil {
			return notMeasured(name, "0", fmt.Errorf("run %d, at %s: %w", i+1, site, err))
		}
		lost, sent, _, _ := total(out)
		d, which := worst(out)
		f.note("sites: leader added, run %d, at %s: %d of %d lost, %s (%s)", i+1, site, lost, sent, ms(d), which)
		all.add(fmt.Sprintf("run %d, at %s", i+1, site), out)
	}
	return all.figure(name, "0", siteHow+
		"the agent of one of a site's two leaders starts, and leads again; all streams, also of those that move to it")
}

func (f *siteField) addOnce(ctx context.Context, site, member string) (out []siteOutcome, err error) {
	if err := f.awaitSettled(ctx, site); err != nil {
		return nil, err
	}
	leader, err := f.boundTo(ctx, member)
	if err != nil {
		return nil, err
	}
	_, run, err := f.seen(ctx, member, leader)
	if err != nil {
		return nil, err
	}
	if err := f.lab.Kill(ctx, leader); err != nil {
		return nil, err
	}
	// That the dead one is passed over has to be seen everywhere: what traffic loses by the death is another figure.
	if err := f.leaves(ctx, member, leader); err != nil {
		return nil, err
	}
	yes := true
	var members []string
	for _, s := range f.sites {
		members = append(members, f.members(s)...)
	}
	reach := lab.Expect{From: members, To: members, Reach: &yes, Count: siteBefore, Family: "ipv4"}
	if err := f.lab.Expect(ctx, siteSettled, reach); err != nil {
		return nil, err
	}
	t, err := f.start(ctx, 0, false)
	if err != nil {
		return nil, err
	}
	defer func() { t.stop() }()
	if err := f.lab.Start(ctx, leader); err != nil {
		return nil, err
	}
	if err := f.leadsAgain(ctx, leader, run); err != nil {
		return nil, err
	}
	if err := f.awaitSettled(ctx, site); err != nil {
		return nil, err
	}
	_ = t.answered(ctx, 2*siteBefore) // the account tells what was lost
	return t.stop(), nil
}

// leadsAgain returns when all members see a leader lead by the word of a later run than the given one. That it leads by
// what it said before is seen right after its start, and is over before it says so again.
func (f *siteField) leadsAgain(ctx context.Context, leader string, run uint64) error {
	return f.untilEvery(ctx, 200*time.Millisecond, siteSettled, func() error {
		for _, s := range f.sites {
			for _, m := range f.members(s) {
				leads, now, err := f.seen(ctx, m, leader)
				if err != nil {
					return err
				}
				if leads != "leader" || now <= run {
					return fmt.Errorf("%s sees %s as %q, by a record of run %d; before it was in run %d",
						m, leader, leads, now, run)
				}
			}
		}
		return nil
	})
}

// seen is what a member sees a node be in its site, and the run that the node's record is of.
func (f *siteField) seen(ctx context.Context, member, node string) (leads string, run uint64, err error) {
	c, err := f.lab.Client(member)
	if err != nil {
		return "", 0, err
	}
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	nodes, err := c.Nodes(ctx, &skeinv1.NodesRequest{})
	if err != nil {
		return "", 0, fmt.Errorf("ask %s for the nodes: %w", member, err)
	}
	for _, n := range nodes.GetNodes() {
		if n.GetNode().GetName() == node {
			return n.GetSiteLeads(), n.GetRecord().GetEpoch(), nil
		}
	}
	return "", 0, fmt.Errorf("%s does not know %s", member, node)
}

// withoutVoters kills all servers, and then measures the hard faults again in turns.
func (f *siteField) withoutVoters(ctx context.Context) (out []Figure) {
	var voters []string
	for _, n := range f.lab.Spec.Nodes {
		if n.Server {
			voters = append(voters, n.Name)
		}
	}
	const name = "all voters away: leader killed, paused, cut off: traffic again"
	hard := slices.DeleteFunc(siteFaults(), func(h siteFault) bool { return h.zombie != "" })
	var took sample
	var others tallied
	err := f.lab.Kill(ctx, voters...)
	for i := 0; i < f.opts.siteRuns() && err == nil; i++ {
		err = f.repeat(ctx, hard[i%len(hard)], 1, i, &took, &others)
	}
	for _, s := range f.sites {
		if err == nil {
			err = f.awaitSettled(ctx, s)
		}
	}
	err = errors.Join(err, f.lab.Start(ctx, voters...))
	out = append(out, siteFigure(name, hard[0], &took, err))
	if err == nil {
		out = append(out, others.figure(othersLost, "0", othersHow))
	}
	return out
}
