package agent

import (
	"context"
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/control"
	"github.com/skeinmesh/skein/agent/joining"
	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/agent/roster"
	"github.com/skeinmesh/skein/agent/tunnels"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/simtime"
	"github.com/skeinmesh/skein/relay/client"
	"github.com/skeinmesh/skein/relay/server"
)

func TestTunnelOverAPath(t *testing.T) {
	direct := path.Path{Kind: path.Direct, Alive: true}
	silent := direct
	silent.Silent = true
	for _, c := range []struct {
		name            string
		p               path.Path
		relays, session bool
		want            control.Tunnel
	}{
		{"direct", direct, true, true, control.Up},
		{"direct, without relays", direct, false, true, control.Up},
		{"direct, and no handshake yet", direct, true, false, control.Likely},
		{"direct, alive by the kernel alone", silent, true, true, control.Down},
		{"direct and dead", path.Path{Kind: path.Direct}, true, true, control.Down},
		{"relayed", path.Path{Kind: path.Relay, Alive: true}, true, true, control.Down},
		{"nowhere, and the relays say so", path.Path{}, true, true, control.Away},
		{"nowhere, and no relay to ask", path.Path{}, false, true, control.Down},
	} {
		have := func(lazy bool) control.Tunnel {
			return tunnelOver(c.p, lazy, func() bool { return c.relays }, func() bool { return c.session })
		}
		if have(false) != c.want {
			t.Errorf("%s: %d, want %d", c.name, have(false), c.want)
		}
		large := c.want
		if c.p.Kind != path.Direct {
			large = control.Idle
		}
		if have(true) != large {
			t.Errorf("%s, in a large mesh: %d, want %d", c.name, have(true), large)
		}
	}
}

func TestOffers(t *testing.T) {
	server, other := newHost(t, "a"), newHost(t, "b")
	w := newWorld(t, server, other)
	own, srflx := skeinv1.CandidateType_CANDIDATE_TYPE_HOST, skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX
	private := &skeinv1.Candidate{Type: own, Address: "192.168.1.7:51820"}
	public := &skeinv1.Candidate{Type: own, Address: "203.0.113.7:51820"}
	again := &skeinv1.Candidate{Type: own, Address: "203.0.113.7:51821"}
	mapped := &skeinv1.Candidate{Type: srflx, Address: "198.51.100.9:51820"}
	for _, c := range []struct {
		name   string
		who    host
		relay  string
		role   string
		forced string
		has    []*skeinv1.Candidate
		want   []string
	}{
		{"a host behind a NAT", other, config.Auto, "", "", []*skeinv1.Candidate{private, mapped}, nil},
		{"a public host", other, config.Auto, "", "", []*skeinv1.Candidate{private, public, again, mapped},
			[]string{"203.0.113.7"}},
		{"a forced endpoint", other, config.Auto, "", "home.example.net:51820", []*skeinv1.Candidate{private},
			[]string{"home.example.net"}},
		{"a relay that was asked for", other, config.On, "", "", []*skeinv1.Candidate{private, public},
			[]string{"203.0.113.7", "192.168.1.7"}},
		{"a relay and nothing else", other, config.Auto, "relay", "", []*skeinv1.Candidate{private}, []string{"192.168.1.7"}},
		{"a server of one network alone", server, config.Auto, "", "", []*skeinv1.Candidate{private, mapped},
			[]string{"192.168.1.7"}},
		{"a public server", server, config.Auto, "", "", []*skeinv1.Candidate{private, public}, []string{"203.0.113.7"}},
	} {
		a := newTestAgent(c.who, w.state)
		a.replica = newReplica(t, w)
		a.cfg.Relay, a.cfg.ForceEndpoint, a.opts.Role = c.relay, c.forced, c.role
		a.netcheck.Store(&candidate.Result{Candidates: c.has})
		if have := a.offers(); !slices.Equal(have, c.want) {
			t.Errorf("%s offers %v, want %v", c.name, have, c.want)
		}
	}
}

// A node asks whether it is still a member when the log has been silent for a while, and not all the time.
func TestWhenANodeInquires(t *testing.T) {
	h := newHost(t, "a")
	w := newWorld(t, h)
	replica := newReplica(t, w)
	simtime.Test(t, func(t *testing.T) {
		a := newTestAgent(h, w.state)
		a.replica = replica // it knows no other server: nobody is asked really
		var asked []time.Duration
		start := time.Now()
		a.heard.Set(start)
		for range 40 {
			before := a.loop.asked
			a.inquire(t.Context())
			if a.loop.asked != before {
				asked = append(asked, time.Since(start))
			}
			time.Sleep(time.Second)
		}
		if want := []time.Duration{5 * time.Second, 20 * time.Second, 35 * time.Second}; !slices.Equal(asked, want) {
			t.Errorf("asked after %v, want %v", asked, want)
		}
		a.loop.asked = time.Time{}
		for range 40 { // one that follows a server hears of the log once a second
			a.onHeartbeat(identity.ID{2}, &skeinv1.SubscribeResponse_Heartbeat{})
			if a.inquire(t.Context()); !a.loop.asked.IsZero() {
				t.Fatal("it asks although it has just heard of the log")
			}
			time.Sleep(time.Second)
		}
	})
}

// newGossip holds records for an agent, and reaches nobody.
func newGossip(t *testing.T, a *Agent, w *world) {
	t.Helper()
	none := nowhere{make(chan struct{})}
	var err error
	a.gossip, err = gossip.Start(gossip.Config{
		Self: a.id, Key: a.key, Roster: a.roster, Transport: none, Streams: none, Packets: make(chan gossip.Packet),
		Keys: w.state.GossipKeys(), Log: quiet(), Epoch: 1,
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.gossip.Close() })
}

// relayingAt makes a member's record say that it takes joiners at an address.
func relayingAt(t *testing.T, a *Agent, h host, address string) {
	t.Helper()
	hasRecord(t, a, h, &skeinv1.Record{Relay: &skeinv1.RelayOffer{Addresses: []string{address}}})
}

// hasRecord gives an agent a member's record; its own it publishes.
func hasRecord(t *testing.T, a *Agent, h host, r *skeinv1.Record) {
	t.Helper()
	if h.key.ID() == a.id {
		if err := a.gossip.Publish(r); err != nil {
			t.Fatal(err)
		}
		return
	}
	r.NodeId, r.Epoch, r.Seq = h.key.ID().String(), 1, 1
	s, err := gossip.Sign(h.key, r)
	if err != nil {
		t.Fatal(err)
	}
	if _, errs := a.gossip.Merge([]*skeinv1.SignedRecord{s}); len(errs) > 0 {
		t.Fatal(errs)
	}
}

// Only a server's word that a node was revoked ends the node's agent: no other answer, and nobody else's.
func TestWhoseWordExpels(t *testing.T) {
	needMark(t)
	says := func(code, reason string) func(context.Context, *tls.Conn, identity.ID) {
		return func(_ context.Context, c *tls.Conn, _ identity.ID) {
			_ = joining.ReadMessage(c, &skeinv1.JoinRequest{}, joining.MaxJoinRequest)
			_ = joining.WriteMessage(c, &skeinv1.JoinResponse{ErrorCode: code, ErrorMessage: reason})
		}
	}
	for _, c := range []struct {
		name, code string
		byAgent    bool
		revoked    bool
	}{
		{"a server says revoked", joining.CodeRevoked, false, true},
		{"a server refuses otherwise", "permission_denied", false, false},
		{"a server that has no leader", "unavailable", false, false},
		{"another member says revoked", joining.CodeRevoked, true, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			server, node, agent := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
			w := newWorld(t, server, node, agent)
			a := newTestAgent(node, w.state)
			a.replica = newReplica(t, w)
			newGossip(t, a, w)
			speaker := server
			if c.byAgent {
				speaker = agent
			}
			address := serveAdmission(t, speaker.key, roster.New(w.state), admission.Handlers{
				identity.ALPNJoin: says(c.code, "lost")})
			relayingAt(t, a, speaker, strings.Replace(address, "127.0.0.1", "localhost", 1))
			a.askServers(t.Context())
			if have := a.revokedBy.Load(); (have != nil) != c.revoked || have != nil && have.Reason != "lost" {
				t.Errorf("revoked: %v", have)
			}
		})
	}
}

// A node whose UDP is blocked and that knows no relay hears of one that has joined since: at a server's port for
// joiners, also when that server does not relay.
func TestIsolatedNodeHearsOfRelays(t *testing.T) {
	needMark(t)
	for name, archived := range map[string]bool{"the server has the events": true,
		"the server has the state alone": false} {
		t.Run(name, func(t *testing.T) {
			server, node, late := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
			w := newWorld(t, server, node)
			a, s := newTestAgent(node, w.state), newTestAgent(server, w.state)
			a.replica, s.replica = newReplica(t, w), newReplica(t, w)
			before := w.state.Index()
			w.must(w.admission(late))
			if archived {
				if err := s.replica.Apply(&skeinv1.Batch{Base: before, Events: w.log[before:]}); err != nil {
					t.Fatal(err)
				}
			} else if err := s.replica.Reset(w.state.Proto()); err != nil {
				t.Fatal(err)
			}
			s.roster.Update(w.state)
			newGossip(t, a, w)
			newGossip(t, s, w)
			relayingAt(t, s, late, "203.0.113.9:7443")
			address := serveAdmission(t, server.key, s.roster, admission.Handlers{identity.ALPNJoin: s.serveJoin})
			hasRecord(t, a, server,
				&skeinv1.Record{JoinAddresses: []string{strings.Replace(address, "127.0.0.1", "localhost", 1)}})

			a.askServers(t.Context())
			if have := a.replica.State().Index(); have != before {
				t.Errorf("a node that reaches others was told of the log: it is at %d", have)
			}
			a.pool = client.NewPool(client.PoolConfig{Self: a.id, Key: node.key, Log: quiet()})
			t.Cleanup(func() { a.pool.Close() })
			a.askServers(t.Context())
			if have := a.replica.State().Index(); have != w.state.Index() {
				t.Errorf("the replica is at %d, want %d", have, w.state.Index())
			}
			if r := a.gossip.Records()[late.key.ID()].Record; r.GetRelay() == nil {
				t.Errorf("the relay's record is not there: %v", r)
			}
			if a.revokedBy.Load() != nil {
				t.Error("revoked")
			}
		})
	}
}

// A member that asks at the port for joiners with one old index after another has the archive read for the first alone.
// It hears of relays all the same, and another member gets the events that it asks for.
func TestOneMembersInquiriesDoNotReadTheArchiveAgainAndAgain(t *testing.T) {
	server, hostile, honest := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
	w := newWorld(t, server, hostile, honest)
	s := newTestAgent(server, w.state)
	s.replica = newReplica(t, w)
	before := w.state.Index()
	for _, name := range []string{"d", "e", "f"} { // two events each, and one batch of all
		w.must(w.admission(newHost(t, name)))
	}
	if err := s.replica.Apply(&skeinv1.Batch{Base: before, Events: w.log[before:]}); err != nil {
		t.Fatal(err)
	}
	s.roster.Update(w.state)
	newGossip(t, s, w)
	relayingAt(t, s, server, "203.0.113.9:7443")
	ask := func(who host, index uint64, right bool) *skeinv1.JoinResponse {
		t.Helper()
		hash := make([]byte, 32)
		if right {
			state, err := s.replica.At(index)
			if err != nil {
				t.Fatal(err)
			}
			h := state.Hash()
			hash = h[:]
		}
		r := s.answerInquiry(who.key.ID(), &skeinv1.JoinRequest{MemberIndex: index, MemberHash: hash})
		if r.GetErrorCode() == "" && len(r.GetRecords()) == 0 {
			t.Errorf("index %d: the answer has no record of a relay", index)
		}
		return r
	}
	if r := ask(hostile, before+1, true); r.GetNews().GetBase() != before+1 || r.GetErrorCode() != "" {
		t.Errorf("the first question: %v", r)
	}
	for index := before + 2; index < before+5; index++ {
		for _, right := range []bool{true, false} {
			if r := ask(hostile, index, right); r.GetNews() != nil || r.GetState() != nil || r.GetErrorCode() != "" {
				t.Errorf("a question too many is answered with %v", r)
			}
		}
	}
	if r := ask(hostile, before+1, false); r.GetErrorCode() == "" { // in memory
		t.Errorf("another history is answered with %v", r)
	}
	if r := ask(honest, before+3, true); r.GetNews().GetBase() != before+3 {
		t.Errorf("another member's question: %v", r)
	}
}

// Who is not a member hears nothing of the log, whatever it claims to have.
func TestStrangersHearNoNews(t *testing.T) {
	server, stranger := newHost(t, "a"), newHost(t, "x")
	w := newWorld(t, server)
	s := newTestAgent(server, w.state)
	s.replica = newReplica(t, w)
	newGossip(t, s, w)
	r := s.answerInquiry(stranger.key.ID(), &skeinv1.JoinRequest{MemberIndex: 1})
	if r.GetErrorCode() == "" || r.GetState() != nil || r.GetNews() != nil || len(r.GetRecords()) > 0 {
		t.Errorf("a stranger is told %v", r)
	}
}

// What is left of a member that was thrown out: nothing.
func TestDroppedPeerIsForgotten(t *testing.T) {
	self, gone, stays := newHost(t, "a"), newHost(t, "b"), newHost(t, "c")
	w := newWorld(t, self, gone, stays)
	a := newTestAgent(self, w.state)
	a.pool = client.NewPool(client.PoolConfig{Self: a.id, Key: self.key, Log: quiet()})
	t.Cleanup(func() { a.pool.Close() })
	a.proxies = client.NewProxies(a.pool, func() netip.AddrPort { return netip.MustParseAddrPort("127.0.0.1:9") },
		client.ProxyOptions{})
	a.prober = probe.NewProber(probe.ProberConfig{Self: a.id, Epoch: 1, Socket: unplugged{}})
	a.paths = path.NewManager(path.Config{Self: a.id, Prober: pinger{a}, Log: quiet()})
	t.Cleanup(a.paths.Close)
	a.relay = server.New(server.Config{Self: a.id, Log: quiet(), Member: func(identity.ID) bool { return true }})
	t.Cleanup(func() { a.relay.Close() })
	var err error
	if a.control, err = control.New(control.Config{Key: self.key, Roster: a.roster, Relay: a.pool, Tunnel: a.tunnel,
		PacketKey: a.packetKey, OnPacket: a.onPacket, Log: quiet()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.control.Close)
	address := serveAdmission(t, self.key, a.roster, admission.Handlers{
		identity.ALPNRelay: func(_ context.Context, c *tls.Conn, peer identity.ID) { a.relay.HandleSession(c, peer) }})
	open := map[string][]net.Conn{}
	a.loop.records, a.loop.unprobed = map[identity.ID]*skeinv1.Record{}, map[identity.ID]roster.Member{}
	for name, h := range map[string]host{"gone": gone, "stays": stays} {
		id := h.key.ID()
		a.loop.records[id], a.loop.unprobed[id] = &skeinv1.Record{}, roster.Member{}
		a.prober.SetPeer(id, [32]byte{7})
		a.paths.SetPeer(id, a.loop.records[id])
		if !a.proxies.Endpoint(id).IsValid() {
			t.Fatal("no proxy")
		}
		open[name] = []net.Conn{session(t, h, address), stream(t, a, h)}
	}
	before := a.proxies.Endpoint(gone.key.ID())
	havePaths(t, a, 2)

	a.dropMember(gone.key.ID())
	ends := func(c net.Conn, within time.Duration) bool {
		_ = c.SetReadDeadline(time.Now().Add(within))
		_, err := io.Copy(io.Discard, c)
		var timeout net.Error
		return !errors.As(err, &timeout) || !timeout.Timeout()
	}
	for i, what := range []string{"relay session", "stream"} {
		if !ends(open["gone"][i], farewell+2*time.Second) {
			t.Errorf("its %s is still open", what)
		}
		if ends(open["stays"][i], 50*time.Millisecond) {
			t.Errorf("another member's %s ended", what)
		}
	}
	if len(a.loop.records) != 1 || len(a.loop.unprobed) != 1 {
		t.Errorf("%d records and %d keys are remembered, want those of one peer", len(a.loop.records), len(a.loop.unprobed))
	}
	if a.proxies.Endpoint(gone.key.ID()) == before {
		t.Error("its proxy is still there")
	}
	for name, c := range map[string]struct {
		who  host
		want error
	}{"the member": {gone, probe.ErrUnknownPeer}, "another": {stays, nil}} {
		if _, err := a.prober.SendPing(c.who.key.ID(), netip.MustParseAddrPort("198.51.100.1:51820")); !errors.Is(err,
			c.want) {
			t.Errorf("%s is pinged: %v, want %v", name, err, c.want)
		}
	}
	havePaths(t, a, 1)
	if _, ok := a.paths.Paths()[stays.key.ID()]; !ok {
		t.Error("the wrong peer's path is gone")
	}
}

// havePaths waits until the path manager looks after so many peers.
func havePaths(t *testing.T, a *Agent, want int) {
	t.Helper()
	limit := time.After(10 * time.Second)
	for len(a.paths.Paths()) != want {
		select {
		case <-a.paths.Changed():
		case <-limit:
			t.Fatalf("%d paths are kept, want %d", len(a.paths.Paths()), want)
		}
	}
}

// unplugged is a host whose packets go nowhere.
type unplugged struct{}

func (unplugged) SendFrom(netip.Addr, netip.AddrPort, []byte) error { return nil }

// session is a client's connection to the relay, open and said hello to.
func session(t *testing.T, h host, address string) net.Conn {
	t.Helper()
	conf, err := h.key.ClientTLS(identity.ALPNRelay, func(ed25519.PublicKey) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	c, err := tls.Dial("tcp", address, conf)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := io.ReadFull(c, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	return c
}

// stream is a member's stream of the control net that the agent has taken.
func stream(t *testing.T, a *Agent, h host) net.Conn {
	t.Helper()
	conf, err := h.key.ClientTLS(identity.ALPNRPC, func(ed25519.PublicKey) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	a.control.TakeStream(far, h.key.ID())
	c := tls.Client(near, conf)
	if err := c.HandshakeContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	taken, err := a.control.Listen(identity.ALPNRPC).Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { taken.Close() })
	t.Cleanup(func() { near.Close() }) // before, or TLS's farewell waits for a reader
	return c
}

// A seed that answers for another cluster than the token's is not believed, and nothing is kept of it.
func TestJoinAnswerOfAnotherCluster(t *testing.T) {
	needMark(t)
	h := newHost(t, "new")
	for _, c := range []struct {
		cluster string
		ok      bool
	}{{testCluster, true}, {strings.Repeat("f", 32), false}} {
		w := newWorld(t, newHost(t, "a"))
		state := w.state.Proto()
		state.Cluster.Id = c.cluster
		seed, _ := seedThat(t, func(int32, *skeinv1.JoinRequest) *skeinv1.JoinResponse {
			return &skeinv1.JoinResponse{State: state}
		})
		token := testToken()
		token.Seeds = []*skeinv1.JoinToken_Seed{seed}
		a := newTestAgent(h, w.state)
		a.cfg.StateDir = t.TempDir()
		var err error
		if a.opts.Token, err = admission.EncodeToken(token); err != nil {
			t.Fatal(err)
		}
		if a.replica, err = consensus.OpenReplica(a.cfg.StateDir, quiet()); err != nil {
			t.Fatal(err)
		}
		_, _, err = a.enter(t.Context())
		if (err == nil) != c.ok || (a.replica.State().Index() > 0) != c.ok {
			t.Errorf("cluster %s: %v, the replica is at %d", c.cluster, err, a.replica.State().Index())
		}
		a.replica.Close()
	}
}

// An agent at rest makes a round each five seconds; one that is busy, or has something to try again, each second; and
// one that hears nothing of the log looks when it is time to ask.
func TestNextTick(t *testing.T) {
	now := time.Now()
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for _, c := range []struct {
		name                           string
		happened, retry, reopen, heard time.Time
		want                           time.Duration
	}{
		{"at rest", ago(time.Minute), time.Time{}, time.Time{}, now, tickRest},
		{"something happened", ago(9 * time.Second), time.Time{}, time.Time{}, now, tickEvery},
		{"the kernel refused something", ago(time.Minute), ago(time.Second), time.Time{}, now, tickEvery},
		{"a port is taken", ago(time.Minute), time.Time{}, now.Add(reopenEvery), now, tickEvery},
		{"nothing heard for three seconds", ago(time.Minute), time.Time{}, time.Time{}, ago(3 * time.Second),
			silence - 3*time.Second},
		{"nothing heard for an hour", ago(time.Minute), time.Time{}, time.Time{}, ago(time.Hour), tickEvery},
	} {
		a := &Agent{}
		a.loop.happened, a.loop.retry, a.loop.reopen = c.happened, c.retry, c.reopen
		a.heard.Set(c.heard)
		if got := a.nextTick(now); got != c.want {
			t.Errorf("%s: the next round is in %s, want %s", c.name, got, c.want)
		}
	}
	a := &Agent{}
	a.heard.Set(now)
	a.loop.happened = ago(time.Minute)
	a.loop.roamed = tunnels.Roaming{{1}: {Last: ago(time.Second)}, {2}: {}}
	if got := a.nextTick(now); got != tickEvery {
		t.Errorf("a peer was put back a second ago: the next round is in %s, want %s", got, tickEvery)
	}
}
