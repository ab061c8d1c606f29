package agent

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/birthday"
	"github.com/skeinmesh/skein/agent/path"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/identity"
)

// Guessing ports: agent/path decides when, agent/birthday does it, and what is found here becomes a port rewrite of
// the data plane before anybody is told.

const (
	// that no path uses: longer than NATs keep a mapping, so that a path can come back
	rewriteRests = 3 * time.Minute
	adoptedFor   = time.Minute            // a rewrite of a former run, until its peer is known
	heardEvery   = 500 * time.Millisecond // between two hints that the peer's pings come by a rewrite
	// the record's count of mappings is rounded up to a multiple, so that it seldom changes
	mappingsStep = 64
)

var guessRules = map[path.GuessKind]skeinv1.PairOutcome_Rule{
	path.GuessBirthday: skeinv1.PairOutcome_BIRTHDAY, path.GuessPrediction: skeinv1.PairOutcome_PREDICTION,
	path.GuessBoth: skeinv1.PairOutcome_BIRTHDAY_BOTH,
}

var guessRoles = map[path.GuessRole]birthday.Role{path.GuessOne: birthday.One, path.GuessMany: birthday.Many,
	path.GuessTwin: birthday.Twin}

var guessPhases = map[birthday.Phase]path.GuessPhase{
	birthday.Began: path.GuessBegan, birthday.Hit: path.GuessHit, birthday.Failed: path.GuessFailed,
	birthday.Refused: path.GuessRefused, birthday.Silent: path.GuessSilent,
}

// openGuessing makes what guesses ports. It comes after the prober and the plane.
func (a *Agent) openGuessing(ctx context.Context) {
	memory, err := birthday.OpenMemory(a.cfg.StateDir, time.Now())
	if err != nil {
		a.log.Warn("former outcomes of guessing ports are forgotten", "error", err)
	}
	a.guess = birthday.New(birthday.Config{
		Prober: a.prober, Signal: a.sendSignal, Situation: a.situation, Attest: a.pool.Attest, Shared: a.sharedMappings,
		Told:   a.toldOutcomes,
		Newest: func(ctx context.Context) (netip.AddrPort, error) { return a.reflexive.NewestMapping(ctx) },
		Report: a.onGuess, Memory: memory, Mark: a.numbers.MarkWG, Log: a.log.With("component", "birthday"),
	})
	have, err := a.plane.Rewrites(ctx)
	if err != nil {
		a.log.Warn("port rewrites of a former run cannot be read", "error", err)
	}
	a.rewrites.adopt(have, time.Now())
}

// guessSettings fills in the paths' settings about guessing, as the cluster and this host's configuration have them.
func (a *Agent) guessSettings(set *skeinv1.Settings, s *path.Settings) {
	own := a.conf()
	s.NoGuessing = own.NatTraversal.PortGuessing == "disabled"
	s.BirthdayBoth = set.GetBirthdayAttack() == "enabled"
	for _, id := range a.roster.Members() {
		if p, ok := own.Peers[a.roster.Name(id)]; ok && p.BirthdayAttack != "" {
			if s.BirthdayPeers == nil {
				s.BirthdayPeers = map[string]bool{}
			}
			s.BirthdayPeers[id.String()] = p.BirthdayAttack == "enabled"
		}
	}
	a.settings.Store(s)
}

// situation is what is known of a pair that shall guess.
func (a *Agent) situation(peer identity.ID) (birthday.Situation, error) {
	e, ok := a.gossip.Records()[peer]
	set := a.settings.Load()
	if !ok || set == nil {
		return birthday.Situation{}, errors.New("the peer's record is not known yet")
	}
	self, other := path.NodeOf(a.ownRecord()), path.NodeOf(e.Record)
	g, why := path.GuessFor(self, other, *set, peer)
	mine, theirs := path.Mapped4(self), path.Mapped4(other)
	switch p := a.paths.Paths()[peer]; {
	case g.Kind == path.GuessNone && why == "":
		return birthday.Situation{}, &birthday.Refusal{Text: "as far as is known there, this pair of NATs needs no guessing",
			Retry: time.Second}
	case g.Kind == path.GuessNone:
		return birthday.Situation{}, errors.New(why)
	case p.Kind == path.Direct && p.Alive && !p.Silent:
		return birthday.Situation{}, &birthday.Refusal{Text: "the path is direct", Retry: time.Second}
	}
	return birthday.Situation{
		Role: guessRoles[g.Role], Rule: guessRules[g.Kind], Mine: mine[0], Theirs: theirs[0], Step: self.PortStep,
		Decides: slices.Compare(a.id[:], peer[:]) < 0,
	}, nil
}

// votes tells the servers: whoever could forge their word decides about the log already.
func (a *Agent) votes(id identity.ID) bool { return a.replica.State().Server(id).GetVoter() }

// publicIPv4 is this host's address as the internet sees it.
func (a *Agent) publicIPv4() netip.Addr {
	if m := path.Mapped4(path.NodeOf(a.ownRecord())); len(m) > 0 {
		return m[0].Addr()
	}
	return netip.Addr{}
}

// sharedMappings counts what the nodes behind the same public address say that they use.
func (a *Agent) sharedMappings() int {
	mine, n := a.publicIPv4(), 0
	for id, e := range a.gossip.Records() {
		if id != a.id && e.Record.GetNatMappings() > 0 && behind(e.Record, mine) {
			n += int(min(e.Record.GetNatMappings(), birthday.MaxMappings))
		}
	}
	return n
}

// behind tells whether a record's node is behind a public address.
func behind(r *skeinv1.Record, at netip.Addr) bool {
	return slices.ContainsFunc(path.Mapped4(path.NodeOf(r)), func(m netip.AddrPort) bool { return m.Addr() == at })
}

// toldOutcomes are the outcomes between two public addresses that the nodes behind them tell of.
func (a *Agent) toldOutcomes(s birthday.Situation) (out []birthday.Outcome) {
	now := time.Now()
	for id, e := range a.gossip.Records() {
		for _, at := range []netip.Addr{s.Mine.Addr(), s.Theirs.Addr()} {
			if id != a.id && len(e.Record.GetOutcomes()) > 0 && behind(e.Record, at) {
				out = append(out, birthday.Told(at, e.Record.GetOutcomes(), now)...)
			}
		}
	}
	return out
}

// guessedRecord adds to this node's record what others need to know of its guessing.
func (a *Agent) guessedRecord(r *skeinv1.Record) {
	if a.guess == nil {
		return
	}
	r.NatMappings = uint32((a.guess.Mappings() + mappingsStep - 1) / mappingsStep * mappingsStep)
	if m := path.Mapped4(path.NodeOf(r)); len(m) > 0 {
		r.Outcomes = a.guess.Brief(m[0].Addr())
	}
}

// onGuess takes what became of an attempt. What was found at one of many sockets is told when WireGuard's packets go
// through it, and not before: the peer would switch, and lose what it sends.
func (a *Agent) onGuess(peer identity.ID, e birthday.Event) {
	if e.Phase == birthday.Hit && e.Local != 0 {
		old := a.rewrites.add(rewrite{PortRewrite: dataplane.PortRewrite{Local: e.Local, Remote: e.Remote}, peer: peer,
			used: time.Now(), event: e})
		if old != nil {
			a.dropProxy(e.Remote, old)
		}
		a.wakeUp()
		return
	}
	a.tellGuess(peer, e)
}

func guessEvent(e birthday.Event) path.GuessEvent {
	return path.GuessEvent{Phase: guessPhases[e.Phase], Text: e.Text, Retry: e.Retry, Probes: e.Probes,
		Sockets: e.Sockets, Took: e.Took}
}

func (a *Agent) tellGuess(peer identity.ID, e birthday.Event) {
	if e.Phase != birthday.Began {
		a.log.Info("guessing ports", "peer", peer, "outcome", e.Text, "probes", e.Probes, "sockets",
			e.Sockets, "took", e.Took)
	}
	a.paths.Guessed(peer, e.Remote, guessEvent(e))
	a.wakeUp() // the record's count of mappings
}

// rewritten is called when the data plane holds these rewrites.
func (a *Agent) rewritten(held []dataplane.PortRewrite) {
	for _, r := range a.rewrites.news(held) {
		a.tellGuess(r.peer, r.event)
		a.guess.Settle(r.peer)
	}
}

// proxyRewrites does in this process what the kernel cannot: nftables has failed.
func (a *Agent) proxyRewrites(ctx context.Context, wanted []dataplane.PortRewrite) {
	for _, r := range a.rewrites.news(wanted) {
		a.guess.Settle(r.peer) // closes the socket, whose port the proxy takes over
		go func() {
			wg := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), a.cfg.Ports.WireGuard)
			p, err := birthday.OpenProxy(ctx, r.Local, r.Remote, wg, a.numbers.MarkWG,
				func(from netip.AddrPort, b []byte, at time.Time) {
					a.prober.Handle(from, netip.Addr{}, b, at)
				})
			if err != nil {
				a.log.Warn("a port that was found by guessing cannot be used", "peer", r.peer, "error", err)
				return
			}
			a.prober.SetDetour(r.Remote, p)
			if !a.rewrites.proxied(r.Remote, p) {
				a.dropProxy(r.Remote, p)
				return
			}
			a.tellGuess(r.peer, r.event)
		}()
	}
}

func (a *Agent) dropProxy(at netip.AddrPort, p *birthday.Proxy) {
	a.prober.SetDetour(at, nil)
	p.Close()
}

// closeProxies ends what only this process keeps alive.
func (a *Agent) closeProxies() {
	for at, p := range a.rewrites.expire(nil, time.Now().Add(rewriteRests)) {
		a.dropProxy(at, p)
	}
}

// followRewrites drops rewrites that nobody uses, and tells paths of those that a former run left.
func (a *Agent) followRewrites(now time.Time) {
	if a.guess == nil {
		return
	}
	for at, p := range a.rewrites.expire(a.currentPaths(), now) {
		a.dropProxy(at, p)
	}
	for _, at := range a.rewrites.strays() {
		for id, r := range a.loop.records {
			if slices.ContainsFunc(path.NodeOf(r).Candidates, func(c path.Candidate) bool { return c.Addr == at }) {
				a.rewrites.claim(at, id, birthday.Event{Phase: birthday.Hit, Remote: at, Text: "The port rewrite of a former run " +
					"of this agent was adopted."})
			}
		}
	}
}

// guessPorts does what a path wishes.
func (a *Agent) guessPorts(peer identity.ID, g path.Guess) {
	if g.Kind == path.GuessNone {
		a.guess.Stop(peer)
		return
	}
	a.guess.Start(peer)
}

// rewrites are the port rewrites that the data plane shall hold. It is safe for concurrent use.
type rewrites struct {
	mu  sync.Mutex
	all map[netip.AddrPort]*rewrite
}

type rewrite struct {
	dataplane.PortRewrite
	peer   identity.ID // zero: of a former run, and not known yet
	used   time.Time   // last time a path used it
	event  birthday.Event
	told   bool
	pinged time.Time       // last time the peer's ping was passed on
	proxy  *birthday.Proxy // instead of a rule in the kernel
	doubt  bool            // this host's network has changed since: its NAT may be another
}

func (w *rewrites) adopt(have []dataplane.PortRewrite, now time.Time) {
	for _, r := range have {
		w.add(rewrite{PortRewrite: r, used: now, told: true})
	}
}

// add takes a rewrite in the place of an older one to the same address, and gives that one's proxy.
func (w *rewrites) add(r rewrite) (old *birthday.Proxy) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[netip.AddrPort]*rewrite{}
	}
	if o := w.all[r.Remote]; o != nil {
		old = o.proxy
	}
	w.all[r.Remote] = &r
	return old
}

// list is what the data plane shall hold.
func (w *rewrites) list() []dataplane.PortRewrite {
	w.mu.Lock()
	defer w.mu.Unlock()
	var out []dataplane.PortRewrite
	for _, r := range w.all {
		if r.proxy == nil {
			out = append(out, r.PortRewrite)
		}
	}
	return out
}

// proxied notes that a proxy does what a rewrite should; false if nobody wants it any more.
func (w *rewrites) proxied(at netip.AddrPort, p *birthday.Proxy) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.all[at]
	if ok {
		r.proxy = p
	}
	return ok
}

// through is where WireGuard sends for an endpoint: to a proxy, or there.
func (w *rewrites) through(at netip.AddrPort) netip.AddrPort {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r, ok := w.all[at]; ok && r.proxy != nil {
		return r.proxy.Endpoint()
	}
	return at
}

// news are those of a Spec that were not told yet; now they are. One that was found while the Spec was being applied is
// not among them: its peer's packets would still leave by WireGuard's own port.
func (w *rewrites) news(spec []dataplane.PortRewrite) (out []rewrite) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.all {
		if !r.told && slices.Contains(spec, r.PortRewrite) {
			r.told = true
			out = append(out, *r)
		}
	}
	return out
}

// heard gives the rewrite by which a peer's ping came, once in a while.
func (w *rewrites) heard(peer identity.ID, from netip.AddrPort, now time.Time) (rewrite, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	r, ok := w.all[from]
	if !ok || !r.told || r.peer != peer || now.Sub(r.pinged) < heardEvery {
		return rewrite{}, false
	}
	r.pinged = now
	return *r, true
}

// strays are the addresses of adopted rewrites whose peer is not known yet.
func (w *rewrites) strays() (out []netip.AddrPort) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for at, r := range w.all {
		if r.peer.IsZero() {
			out = append(out, at)
		}
	}
	return out
}

// claim says whose an adopted rewrite is.
func (w *rewrites) claim(at netip.AddrPort, peer identity.ID, e birthday.Event) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if r, ok := w.all[at]; ok {
		r.peer, r.event, r.told = peer, e, false
	}
}

// doubt has each rewrite dropped as soon as no path that lives uses it: this host's network has changed, and behind
// another NAT a rewrite would only have the peer hear from a port that it does not know.
func (w *rewrites) doubt() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, r := range w.all {
		r.doubt = true
	}
}

// expire drops what no path has used for long, and gives the proxies that are not needed any more.
func (w *rewrites) expire(paths map[identity.ID]path.Path, now time.Time) map[netip.AddrPort]*birthday.Proxy {
	w.mu.Lock()
	defer w.mu.Unlock()
	ended := map[netip.AddrPort]*birthday.Proxy{}
	alive := map[*rewrite]bool{}
	for _, p := range paths {
		if p.Kind == path.Direct {
			if r, ok := w.all[p.Endpoint]; ok {
				r.used, alive[r] = now, p.Alive
			}
		}
	}
	for at, r := range w.all {
		rest := rewriteRests
		if r.peer.IsZero() {
			rest = adoptedFor
		}
		if r.doubt && !alive[r] {
			rest = 0
		}
		if now.Sub(r.used) >= rest {
			delete(w.all, at)
			if r.proxy != nil {
				ended[at] = r.proxy
			}
		}
	}
	return ended
}
