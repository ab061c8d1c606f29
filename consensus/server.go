package consensus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/lag"
)

// ServerConfig says how a server runs. Zero values of the tuning fields are the defaults in brackets.
type ServerConfig struct {
	Dir       string       // the state directory; Raft's files go into its folder raft
	ID        identity.ID  // this node
	Dialer    Dialer       // the control net
	Listener  net.Listener // authenticated streams of ALPN skein-raft; the server closes it
	Replica   *Replica     // of the same state directory; it outlives the server
	Log       *slog.Logger
	Bootstrap bool   // this server is the first of a new cluster
	Conns     *Conns // RPC connections to share [own ones]
	// Lag is how late this process woke recently: a leader that was silent meanwhile gets that much more time [it never
	// is].
	Lag *lag.Meter

	Election          time.Duration // time without a leader before an election [600 ms]; other timings follow it
	Stability         time.Duration // how long a new server must keep up before it votes [5 s]
	CareInterval      time.Duration // between two checks of the voters [1 s]
	SnapshotThreshold uint64        // log entries before the log is compacted [8,192]
	SnapshotInterval  time.Duration // between two checks of that threshold [30 s]
	TrailingEntries   uint64        // log entries kept after compaction [1,024]
	NoSync            bool          // for tests that crash no machine: no fsync of the Raft log

	Now func() time.Time // the wall clock that commands get their time from [time.Now]
	// OnLead runs in its own goroutine in each term that this server leads, after everything of earlier terms is folded.
	// Its context ends with the term. What it calls must get that context: the next term begins when it has returned.
	// [nothing]
	OnLead func(ctx context.Context, lead Lead)
}

func (c *ServerConfig) fill() {
	set := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	set(&c.Election, 600*time.Millisecond)
	set(&c.Stability, 5*time.Second)
	set(&c.CareInterval, time.Second)
	set(&c.SnapshotInterval, 30*time.Second)
	if c.SnapshotThreshold == 0 {
		c.SnapshotThreshold = 8192
	}
	if c.TrailingEntries == 0 {
		c.TrailingEntries = 1024
	}
	if c.Conns == nil {
		c.Conns = NewConns(c.Dialer)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
}

const (
	peerTimeout  = 2 * time.Second // a Raft request to a peer; a stream that died silently costs this once
	transferWait = 2 * time.Second // how long a leader that stops waits for its successor
)

// Server is the Raft node of a server. Commands go in by Propose; what is agreed comes out in the replica.
type Server struct {
	cfg       ServerConfig
	log       *slog.Logger
	raft      *raft.Raft
	transport *serverTransport
	acks      *acks
	files     *raftFiles
	fsm       *fsm
	health    health
	clocks    clocks
	live      atomic.Bool // this process has led, or heard a leader: it saw the newest events come

	term     atomic.Pointer[term] // set while this server leads
	shutdown context.CancelFunc
	stopped  chan struct{} // closed when Raft has stopped
	running  sync.WaitGroup
	stopOnce sync.Once
	stopErr  error

	leader  leaderNews
	changes atomic.Uint64 // times that this server saw another leader than before
	led     atomic.Value  // raft.ServerID: the leader that it saw last
	commits timing
	fatal   chan struct{}
	err     atomic.Pointer[error]
}

// StartServer starts or resumes the Raft node. Damaged files are reported as ErrCorrupt.
func StartServer(cfg ServerConfig) (*Server, error) {
	cfg.fill()
	s := &Server{cfg: cfg, log: cfg.Log.With("component", "consensus"), acks: newAcks(), fatal: make(chan struct{}),
		stopped: make(chan struct{}),
		leader:  leaderNews{changed: make(chan struct{})}}
	rlog := newRaftLog(cfg.Log)
	files, err := openRaftFiles(cfg.Dir, rlog, cfg.NoSync)
	if err != nil {
		return nil, err
	}
	s.files = files
	if err := cfg.Replica.makeLazy(); err != nil {
		files.close()
		return nil, fmt.Errorf("start Raft: %w", err)
	}
	s.fsm = &fsm{replica: cfg.Replica, log: s.log, halt: s.halt}
	cache, err := raft.NewLogCache(cacheEntries, files.log)
	if err != nil {
		files.close()
		return nil, fmt.Errorf("start Raft: %w", err)
	}
	s.transport = s.newTransport(raft.NetworkTransportConfig{
		MaxPool: 3, Timeout: peerTimeout, Logger: rlog, MsgpackUseNewTimeFormat: true,
		// No pipelining: when a follower refuses an entry while another is on its way, the library's
		// pipeline (1.8.0) blocks for ever between sender and decoder; that follower then gets no more
		// entries and Shutdown hangs. Group commit leaves little for it to win.
		MaxRPCsInFlight: 1,
	})
	rc := s.raftConfig()
	rc.Logger = rlog
	if err := s.startRaft(rc, cache); err != nil {
		s.transport.Close()
		files.close()
		return nil, err
	}
	go s.transport.in.serve()
	s.raft.RegisterObserver(raft.NewObserver(nil, false, s.observe))
	ctx, cancel := context.WithCancel(context.Background())
	s.shutdown = cancel
	s.running.Add(3)
	go s.watchLeadership(ctx)
	go s.watchClocks(ctx)
	go s.watchLeader(ctx)
	return s, nil
}

func (s *Server) newTransport(config raft.NetworkTransportConfig) *serverTransport {
	in := newInbound(s.cfg.ID, s.cfg.Listener, s.maySend, config, s.log)
	out := newOutgoing(s.cfg.ID, s.cfg.Dialer, s.cfg.Replica)
	config.Stream = out
	return &serverTransport{NetworkTransport: raft.NewNetworkTransportWithConfig(&config), acks: s.acks, in: in, out: out}
}

// raftConfig derives Raft's timings from one: with 600 ms a dead leader is replaced after 0.6 to 0.8 s,
// see watchLeader. The lease is as long as the library allows, so that a machine that stalls for half a
// second does not cost a leader.
func (s *Server) raftConfig() *raft.Config {
	rc := raft.DefaultConfig()
	rc.LocalID = raft.ServerID(s.cfg.ID.String())
	rc.HeartbeatTimeout = s.cfg.Election
	rc.ElectionTimeout = s.cfg.Election
	rc.LeaderLeaseTimeout = s.cfg.Election
	rc.CommitTimeout = min(rc.CommitTimeout, s.cfg.Election/10)
	rc.ShutdownOnRemove = false
	rc.SnapshotThreshold = s.cfg.SnapshotThreshold
	rc.SnapshotInterval = s.cfg.SnapshotInterval
	rc.TrailingLogs = s.cfg.TrailingEntries
	rc.NoLegacyTelemetry = true
	return rc
}

func (s *Server) startRaft(rc *raft.Config, log raft.LogStore) error {
	trans := s.transport
	err := guard(func() (err error) {
		if s.cfg.Bootstrap {
			self := raft.Server{ID: rc.LocalID, Address: raft.ServerAddress(rc.LocalID), Suffrage: raft.Voter}
			err = raft.BootstrapCluster(rc, log, s.files.log, s.files.snaps, trans,
				raft.Configuration{Servers: []raft.Server{self}})
			if err != nil && !errors.Is(err, raft.ErrCantBootstrap) { // a resumed start is fine
				return fmt.Errorf("bootstrap Raft: %w", err)
			}
		}
		if s.raft, err = raft.NewRaft(rc, s.fsm, log, s.files.log, s.files.snaps, trans); err != nil {
			if halted := s.fsm.halted.Load(); halted != nil {
				err = *halted
			}
			return fmt.Errorf("start Raft from %s: %w", s.cfg.Dir, err)
		}
		return nil
	})
	if errors.Is(err, errPanicked) { // the log and the snapshots do not fit together
		return &fileError{path: filepath.Join(s.cfg.Dir, raftDir), problem: err.Error(), next: raftNext}
	}
	return err
}

// observe is called by Raft for every observation, in its own goroutines; it must not block.
func (s *Server) observe(o *raft.Observation) bool {
	switch d := o.Data.(type) {
	case raft.LeaderObservation:
		s.leader.notify()
		if d.LeaderID == "" {
			break
		}
		if s.led.Swap(d.LeaderID) != d.LeaderID {
			s.changes.Add(1)
		}
		if d.LeaderID != raft.ServerID(s.cfg.ID.String()) {
			s.live.Store(true)
		}
	case raft.RaftState: // comes after the state has changed; what tells of the leader comes before
		s.leader.notify()
	case raft.FailedHeartbeatObservation:
		s.health.failed(d.PeerID)
	case raft.ResumedHeartbeatObservation:
		s.health.resumed(d.PeerID)
	}
	return false
}

// leaderNews wakes waiters when there is a new leader, or when this server has begun or ceased to lead.
type leaderNews struct {
	sync.Mutex
	changed chan struct{}
}

func (n *leaderNews) notify() {
	n.Lock()
	defer n.Unlock()
	close(n.changed)
	n.changed = make(chan struct{})
}

func (n *leaderNews) wait() <-chan struct{} {
	n.Lock()
	defer n.Unlock()
	return n.changed
}

// Leader returns the server that this one takes for the leader.
func (s *Server) Leader() (identity.ID, bool) {
	_, id := s.raft.LeaderWithID()
	v, err := identity.ParseID(string(id))
	return v, err == nil
}

// IsLeader reports whether this server leads and has taken up its work.
func (s *Server) IsLeader() bool { return s.term.Load() != nil }

// LastContact is when this server last heard from a leader; now, if it leads.
func (s *Server) LastContact() time.Time {
	if s.raft.State() == raft.Leader {
		return time.Now()
	}
	return s.raft.LastContact()
}

// Propose decides and commits a command; the command's time, entropy and a missing request ID are
// filled in. The error is an *events.Error when the command was refused, ErrNotLeader when nothing
// was done, ErrUncertain when it should be retried with the same request ID, or the context's.
func (s *Server) Propose(ctx context.Context, c *skeinv1.Command) (*skeinv1.Answer, error) {
	if err := s.Err(); err != nil {
		return nil, err
	}
	t := s.term.Load()
	if t == nil {
		return nil, s.notLeader()
	}
	return t.propose(ctx, c)
}

func (s *Server) notLeader() error {
	id, ok := s.Leader()
	if !ok || id == s.cfg.ID { // the library may still name this server when its leadership has just ended
		return &NotLeaderError{}
	}
	return &NotLeaderError{Leader: id}
}

// Done is closed when the server can fold the log no further; Err says why.
func (s *Server) Done() <-chan struct{} { return s.fatal }

// Err is nil while the server works.
func (s *Server) Err() error {
	if err := s.err.Load(); err != nil {
		return *err
	}
	return nil
}

// halt is called once by the FSM.
func (s *Server) halt(err error) {
	s.err.Store(&err)
	close(s.fatal)
}

// Stats is what status and metrics show.
type Stats struct {
	State         string `json:"state"` // Follower, Candidate, Leader or Shutdown
	Leader        string `json:"leader,omitempty"`
	Term          uint64 `json:"term"`
	LogIndex      uint64 `json:"logIndex"`    // last entry of the Raft log
	CommitIndex   uint64 `json:"commitIndex"` // of the Raft log
	AppliedIndex  uint64 `json:"appliedIndex"`
	EventIndex    uint64 `json:"eventIndex"` // last event that the Raft log has reached
	SnapshotIndex uint64 `json:"snapshotIndex"`
	LastContact   string `json:"lastContact"`
	Clock         string `json:"clock"` // by the other voters' clocks: confirmed, unjudged or wrong
	// Silence is how long ago this server heard its leader; 0 if it leads, negative if it never did.
	Silence       time.Duration `json:"silence"`
	LeaderChanges uint64        `json:"leaderChanges"` // that this server saw since its start, the first one included
	// Commits are those of this server as the leader, from handing them to Raft until most voters had them and this
	// server had folded them.
	Commits Durations   `json:"commits"`
	Members []MemberRow `json:"members"`
}

// MemberRow is one server of Raft's configuration.
type MemberRow struct {
	ID      string `json:"id"`
	Voter   bool   `json:"voter"`
	Healthy bool   `json:"healthy"` // as the leader sees it; always true elsewhere
}

// Stats reads the server's counters.
func (s *Server) Stats() Stats {
	m := s.raft.Stats()
	number := func(k string) uint64 { v, _ := strconv.ParseUint(m[k], 10, 64); return v }
	out := Stats{
		State: m["state"], Term: number("term"), LogIndex: number("last_log_index"), CommitIndex: number("commit_index"),
		AppliedIndex: number("applied_index"), SnapshotIndex: number("last_snapshot_index"),
		EventIndex: s.fsm.at.Load(), LastContact: m["last_contact"], Clock: s.clockVerdict().String(),
		Silence: -1, LeaderChanges: s.changes.Load(), Commits: s.commits.read(),
	}
	if last := s.LastContact(); !last.IsZero() {
		out.Silence = max(time.Since(last), 0)
	}
	if s.raft.State() == raft.Leader {
		out.Silence = 0
	}
	if id, ok := s.Leader(); ok {
		out.Leader = id.String()
	}
	for _, v := range s.raft.GetConfiguration().Configuration().Servers {
		out.Members = append(out.Members, MemberRow{ID: string(v.ID), Voter: v.Suffrage == raft.Voter,
			Healthy: !s.health.failing(v.ID)})
	}
	return out
}

// Shutdown stops the server; a leader hands over first, if another voter is there. The replica stays open.
func (s *Server) Shutdown(ctx context.Context) error {
	s.stopOnce.Do(func() { s.stopErr = s.stop(ctx) })
	return s.stopErr
}

func (s *Server) stop(ctx context.Context) error {
	if s.IsLeader() && s.voters() > 1 {
		done := make(chan error, 1)
		go func() { done <- s.raft.LeadershipTransfer().Error() }()
		timeout, cancel := context.WithTimeout(ctx, transferWait)
		defer cancel()
		select {
		case <-done:
		case <-timeout.Done():
		}
	}
	s.shutdown()
	ended := make(chan struct{})
	go func() { s.running.Wait(); close(ended) }()
	select { // what is in flight usually ends by itself
	case <-ended:
	case <-time.After(s.cfg.Election):
	}
	err := s.raft.Shutdown().Error()
	close(s.stopped)
	<-ended
	if e := s.transport.Close(); err == nil {
		err = e
	}
	if e := s.files.close(); err == nil {
		err = e
	}
	if e := s.cfg.Replica.makeDurable(); err == nil {
		err = e
	}
	if err != nil {
		return fmt.Errorf("stop Raft: %w", err)
	}
	return nil
}

func (s *Server) voters() (n int) {
	for _, v := range s.raft.GetConfiguration().Configuration().Servers {
		if v.Suffrage == raft.Voter {
			n++
		}
	}
	return n
}
