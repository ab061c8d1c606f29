// Package prediction finds open ports between two NATs for paths that request it, and directs packets through the
// ports found. Package agent/path decides when, agent/birthday carries out the attempt. The data plane holds a hit as
// a port rewrite before the path learns of it.
package prediction

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"time"

	"github.com/skeinmesh/skein/agent/birthday"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// mappingsStep: the record's count of mappings is rounded up to a multiple of it, so that the record seldom changes.
const mappingsStep = 64

var rules = map[path.PredictionKind]skeinv1.PairOutcome_Rule{
	path.PredictBirthday: skeinv1.PairOutcome_BIRTHDAY, path.PredictNext: skeinv1.PairOutcome_PREDICTION,
	path.PredictBoth: skeinv1.PairOutcome_BIRTHDAY_BOTH,
}

var roles = map[path.PredictionRole]birthday.Role{path.PredictOne: birthday.One, path.PredictMany: birthday.Many,
	path.PredictTwin: birthday.Twin}

var phases = map[birthday.Phase]path.PredictionPhase{
	birthday.Began: path.PredictionBegan, birthday.Hit: path.PredictionHit, birthday.Failed: path.PredictionFailed,
	birthday.Refused: path.PredictionRefused, birthday.Silent: path.PredictionSilent,
}

// Config is what a Predictor needs. All functions may be called from any goroutine.
type Config struct {
	Self     identity.ID
	StateDir string // holds outcomes of earlier attempts
	Prober   *probe.Prober
	Port     uint16 // WireGuard's
	Mark     uint32 // of this agent's packets, so that they never enter the tunnel
	Paths    func() *path.Manager
	Settings func() *path.Settings // nil: not known yet
	Record   func() *skeinv1.Record
	Records  func() map[identity.ID]gossip.Entry
	Signal   func(identity.ID, *skeinv1.Signal) error
	// Attest and Newest are birthday.Config's.
	Attest func(context.Context, identity.ID, netip.Addr) error
	Newest func(context.Context) (netip.AddrPort, error)
	// Changed is called when the data plane's rewrites, or the record, may have changed.
	Changed func()
	Log     *slog.Logger
}

// Predictor is one host's part in port prediction. A nil Predictor predicts nothing.
type Predictor struct {
	cfg      Config
	engine   *birthday.Engine
	rewrites rewrites
}

// Open makes a Predictor and adopts the rewrites that the data plane already has.
func Open(cfg Config, have []dataplane.PortRewrite) *Predictor {
	memory, err := birthday.OpenMemory(cfg.StateDir, time.Now())
	if err != nil {
		cfg.Log.Warn("former outcomes of port prediction cannot be read; they are forgotten", "error", err)
	}
	p := &Predictor{cfg: cfg}
	p.engine = birthday.New(birthday.Config{
		Prober: cfg.Prober, Signal: cfg.Signal, Situation: p.situation, Attest: cfg.Attest, Shared: p.sharedMappings,
		Told: p.reportedOutcomes, Newest: cfg.Newest, Report: p.onEvent, Memory: memory, Mark: cfg.Mark, Log: cfg.Log,
	})
	p.rewrites.adopt(have, time.Now())
	return p
}

// Close ends attempts and the proxies, which cannot outlive this process.
func (p *Predictor) Close() {
	if p == nil {
		return
	}
	p.engine.Close()
	for at, proxy := range p.rewrites.expire(nil, time.Now().Add(rewriteRests)) {
		p.dropProxy(at, proxy)
	}
}

// Wish starts or ends an attempt, as a path requests.
func (p *Predictor) Wish(peer identity.ID, g path.Prediction) {
	if g.Kind == path.PredictNone {
		p.engine.Stop(peer)
		return
	}
	p.engine.Start(peer)
}

// TakeSignal handles a peer's signal about an attempt.
func (p *Predictor) TakeSignal(from identity.ID, s *skeinv1.Signal_Birthday) {
	if p != nil {
		p.engine.TakeSignal(from, s)
	}
}

// PingReceived handles a ping of a peer. The path handles the same ping.
func (p *Predictor) PingReceived(ping probe.Ping) {
	p.engine.PingReceived(ping.Peer, ping.From)
	if r, ok := p.rewrites.heard(ping.Peer, ping.From, ping.At); ok {
		if now := p.cfg.Paths().Paths()[ping.Peer]; now.Kind != path.Direct || !now.Alive {
			// The peer's pings pass, so the few pings that this host sent were lost: repeat the hit to the path.
			p.cfg.Paths().PredictionReported(ping.Peer, ping.From, pathEvent(r.event))
		}
	}
}

// PongReceived handles a pong of a peer.
func (p *Predictor) PongReceived(peer identity.ID, from netip.AddrPort) {
	p.engine.PongReceived(peer, from)
}

// PortRewrites are the rewrites that the data plane should hold.
func (p *Predictor) PortRewrites() []dataplane.PortRewrite {
	if p == nil {
		return nil
	}
	return p.rewrites.list()
}

// Through is where WireGuard must send to reach an endpoint: the endpoint itself, or a proxy for it.
func (p *Predictor) Through(at netip.AddrPort) netip.AddrPort {
	if p == nil {
		return at
	}
	return p.rewrites.through(at)
}

// NetworkChanged reports that this host's network has changed; see rewrites.networkChanged.
func (p *Predictor) NetworkChanged() {
	if p != nil {
		p.rewrites.networkChanged()
	}
}

// Stats are the counters of the engine.
func (p *Predictor) Stats() birthday.Stats { return p.engine.Stats() }

// situation is what an attempt needs to know of a pair; an error says why there is none.
func (p *Predictor) situation(peer identity.ID) (birthday.Situation, error) {
	e, ok := p.cfg.Records()[peer]
	set := p.cfg.Settings()
	if !ok || set == nil {
		return birthday.Situation{}, errors.New("the peer's record is not known yet")
	}
	self, other := path.NodeOf(p.cfg.Record()), path.NodeOf(e.Record)
	g, why := path.PredictionFor(self, other, *set, peer)
	mine, theirs := path.Mapped4(self), path.Mapped4(other)
	switch now := p.cfg.Paths().Paths()[peer]; {
	case g.Kind == path.PredictNone && why == "":
		return birthday.Situation{}, &birthday.Refusal{Text: "as far as is known there, this pair of NATs needs no port " +
			"prediction",
			Retry: time.Second}
	case g.Kind == path.PredictNone:
		return birthday.Situation{}, errors.New(why)
	case now.Kind == path.Direct && now.Alive && !now.Silent:
		return birthday.Situation{}, &birthday.Refusal{Text: "the path is direct", Retry: time.Second}
	}
	return birthday.Situation{
		Role: roles[g.Role], Rule: rules[g.Kind], Mine: mine[0], Theirs: theirs[0], Step: self.PortStep,
		Decides: slices.Compare(p.cfg.Self[:], peer[:]) < 0,
	}, nil
}

// publicIPv4 is this host's server-reflexive IPv4 address.
func (p *Predictor) publicIPv4() netip.Addr {
	if m := path.Mapped4(path.NodeOf(p.cfg.Record())); len(m) > 0 {
		return m[0].Addr()
	}
	return netip.Addr{}
}

// sharedMappings adds up the mappings that the records of nodes behind the same public address report.
func (p *Predictor) sharedMappings() int {
	mine, n := p.publicIPv4(), 0
	for id, e := range p.cfg.Records() {
		if id != p.cfg.Self && e.Record.GetNatMappings() > 0 && behind(e.Record, mine) {
			n += int(min(e.Record.GetNatMappings(), birthday.MaxMappings))
		}
	}
	return n
}

// behind reports whether a record's node is behind a public address.
func behind(r *skeinv1.Record, at netip.Addr) bool {
	return slices.ContainsFunc(path.Mapped4(path.NodeOf(r)), func(m netip.AddrPort) bool { return m.Addr() == at })
}

// reportedOutcomes are the outcomes between two public addresses, from the records of the nodes behind them.
func (p *Predictor) reportedOutcomes(s birthday.Situation) (out []birthday.Outcome) {
	now := time.Now()
	for id, e := range p.cfg.Records() {
		for _, at := range []netip.Addr{s.Mine.Addr(), s.Theirs.Addr()} {
			if id != p.cfg.Self && len(e.Record.GetOutcomes()) > 0 && behind(e.Record, at) {
				out = append(out, birthday.Told(at, e.Record.GetOutcomes(), now)...)
			}
		}
	}
	return out
}

// InRecord adds to this node's record what other nodes need to know of its attempts.
func (p *Predictor) InRecord(r *skeinv1.Record) {
	if p == nil {
		return
	}
	r.NatMappings = uint32((p.engine.Mappings() + mappingsStep - 1) / mappingsStep * mappingsStep)
	if m := path.Mapped4(path.NodeOf(r)); len(m) > 0 {
		r.Outcomes = p.engine.Brief(m[0].Addr())
	}
}

// onEvent handles the progress or outcome of an attempt. A hit at one of many sockets is announced only once
// WireGuard's packets leave through that socket's port: the peer would switch earlier, and lose what it sends.
func (p *Predictor) onEvent(peer identity.ID, e birthday.Event) {
	if e.Phase == birthday.Hit && e.Local != 0 {
		old := p.rewrites.add(rewrite{PortRewrite: dataplane.PortRewrite{Local: e.Local, Remote: e.Remote}, peer: peer,
			used: time.Now(), event: e})
		if old != nil {
			p.dropProxy(e.Remote, old)
		}
		p.cfg.Changed()
		return
	}
	p.report(peer, e)
}

func pathEvent(e birthday.Event) path.PredictionEvent {
	return path.PredictionEvent{Phase: phases[e.Phase], Text: e.Text, Retry: e.Retry, Probes: e.Probes,
		Sockets: e.Sockets, Took: e.Took}
}

func (p *Predictor) report(peer identity.ID, e birthday.Event) {
	if e.Phase != birthday.Began {
		p.cfg.Log.Info("port prediction", "peer", peer, "outcome", e.Text, "probes", e.Probes, "sockets",
			e.Sockets, "took", e.Took)
	}
	p.cfg.Paths().PredictionReported(peer, e.Remote, pathEvent(e))
	p.cfg.Changed() // the record's count of mappings may have changed
}

// Held is called when the data plane holds the given rewrites.
func (p *Predictor) Held(held []dataplane.PortRewrite) {
	if p == nil {
		return
	}
	for _, r := range p.rewrites.news(held) {
		p.report(r.peer, r.event)
		p.engine.Settle(r.peer)
	}
}

// Proxy carries the packets of rewrites in this process when nftables has failed.
func (p *Predictor) Proxy(ctx context.Context, wanted []dataplane.PortRewrite) {
	if p == nil {
		return
	}
	for _, r := range p.rewrites.news(wanted) {
		p.engine.Settle(r.peer) // closes the socket, whose port the proxy takes over
		go func() {
			wg := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), p.cfg.Port)
			proxy, err := birthday.OpenProxy(ctx, r.Local, r.Remote, wg, p.cfg.Mark,
				func(from netip.AddrPort, b []byte, at time.Time) {
					p.cfg.Prober.Handle(from, netip.Addr{}, b, at)
				})
			if err != nil {
				p.cfg.Log.Warn("a predicted port cannot be used", "peer", r.peer, "error", err)
				return
			}
			p.cfg.Prober.SetDetour(r.Remote, proxy)
			if !p.rewrites.proxied(r.Remote, proxy) {
				p.dropProxy(r.Remote, proxy)
				return
			}
			p.report(r.peer, r.event)
		}()
	}
}

func (p *Predictor) dropProxy(at netip.AddrPort, proxy *birthday.Proxy) {
	p.cfg.Prober.SetDetour(at, nil)
	proxy.Close()
}

// Follow drops rewrites that no path uses, and announces adopted ones to the paths of the peers whose records name
// them.
func (p *Predictor) Follow(records map[identity.ID]*skeinv1.Record, now time.Time) {
	if p == nil {
		return
	}
	for at, proxy := range p.rewrites.expire(p.cfg.Paths().Paths(), now) {
		p.dropProxy(at, proxy)
	}
	for _, at := range p.rewrites.strays() {
		for id, r := range records {
			if slices.ContainsFunc(path.NodeOf(r).Candidates, func(c path.Candidate) bool { return c.Addr == at }) {
				p.rewrites.claim(at, id, birthday.Event{Phase: birthday.Hit, Remote: at, Text: "The port rewrite of a former run " +
					"of this agent was adopted."})
			}
		}
	}
}
