package kube

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/proto"
	"k8s.io/klog/v2"

	"github.com/skeinmesh/skein/agent/part"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/gossip"
	annotationtier "github.com/skeinmesh/skein/gossip/kube"
	"github.com/skeinmesh/skein/identity"
)

// Config is what the part needs.
type Config struct {
	// Kubeconfig is a file, which may come later, or config.InCluster.
	Kubeconfig string
	Node       string // this host's Node object; empty: named as the host is
	Dir        string // where the copy of what the apiserver said is kept
	// TokenOf is what a join token says of itself.
	TokenOf func(text string) (cluster, id string, err error)
	Log     *slog.Logger
}

// Part is Kubernetes for one agent.
type Part struct {
	cfg        Config
	log        *slog.Logger
	host       part.Host
	metrics    metrics
	nodes      nodes
	whole      *mirror[wholeNode] // this host's Node
	namespaces *mirror[namespace]
	pods       *mirror[pod] // of this host
	before     diskCopy     // what the apiserver had said before this agent's start
	health     health
	controller controller

	every    time.Duration // between two looks at the kubeconfig
	followed chan struct{} // a snapshot has come
	entering chan struct{} // Nodes or members are others now, for what hosts join by
	back     chan struct{} // the apiserver answers again
	snapshot atomic.Pointer[part.Snapshot]

	// Owned by Run.
	apiserver *apiserver // nil: not connected yet
	copied    *Node      // this host's Node, as the copy on disk has it
	pace      pace       // of the record
	network   pace       // of the condition about the network
	taint     pace       // of our taint
	put       string     // the record's annotation that the own Node has, as it was last seen or written
	retry     *time.Timer
	retryAt   time.Time       // when it fires; in the past: it does not run
	tried     *events.State   // with which records of strangers were tried last
	told      map[string]bool // Nodes whose record status tells a problem of
	rubbish   []Rubbish       // on the own Node
	warned    warned
	events    retry // of Events
	toldPods  map[string]pod
	save      *time.Timer // writes the copy
	saving    bool        // it runs
}

var (
	_ part.Part      = (*Part)(nil)
	_ part.PodSource = (*Part)(nil)
)

// New makes the part. It does nothing before Open.
func New(cfg Config) *Part {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Node == "" {
		name, _ := os.Hostname()
		cfg.Node = strings.ToLower(name) // as kubelet does
	}
	klog.SetSlogLogger(slog.New(quiet{cfg.Log.Handler()}))
	p := &Part{cfg: cfg, log: cfg.Log, every: configEvery,
		followed: make(chan struct{}, 1), entering: make(chan struct{}, 1), back: make(chan struct{}, 1),
		metrics: newMetrics(), told: map[string]bool{}}
	p.controller = controller{p: p, wake: make(chan struct{}, 1), again: make(chan struct{}, 1)}
	heard := p.metrics.heard.SetToCurrentTime
	p.nodes = nodes{newMirror(slimNode, heard), &holders{}}
	p.whole = newMirror(slimWhole, heard)
	p.namespaces = newMirror(slimNamespace, heard)
	p.pods = newMirror(slimPod, heard)
	return p
}

// Open wishes for this host what the copy on disk has of its Node.
func (p *Part) Open(h part.Host, r prometheus.Registerer) error {
	p.host = h
	p.health.report = func(subject, message, advice string) { h.Report(subject, part.Warns, message, advice) }
	for _, c := range p.metrics.collectors(p) {
		if err := r.Register(c); err != nil {
			return fmt.Errorf("kubernetes: %w", err)
		}
	}
	c, err := loadCopy(p.cfg.Dir)
	if err != nil {
		p.log.Warn("the copy of what the apiserver said cannot be read; it is written anew once the apiserver answers",
			"error", err)
	}
	p.before = c
	if c.Node != nil && c.Node.Name == p.cfg.Node {
		p.copied = c.Node
		p.wish(c.Node)
	}
	return nil
}

// Follow takes in a snapshot.
func (p *Part) Follow(s part.Snapshot) {
	p.snapshot.Store(&s)
	signal(p.followed)
	signal(p.controller.wake)
	signal(p.entering)
}

// Run works until ctx ends.
func (p *Part) Run(ctx context.Context) {
	p.retry, p.save = time.NewTimer(0), time.NewTimer(0)
	p.retry.Stop()
	p.save.Stop()
	defer p.retry.Stop()
	defer p.save.Stop()
	connected := make(chan *apiserver, 1)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		p.sessions(ctx, connected)
	}()
	serves := p.host.Serves()
	for {
		select {
		case <-ctx.Done():
			<-watched
			if p.saving {
				p.keep()
			}
			return
		case p.apiserver = <-connected:
			p.again()
			p.followOwnNode() // what it wants to say needs the apiserver
		case <-p.back:
			p.again()
		case <-p.nodes.changed:
			p.followOwnNode()
			p.mergeRecords()
			signal(p.controller.wake)
			signal(p.entering)
		case <-p.whole.changed:
			if own, known := p.whole.get(p.cfg.Node); known && !own.networkIsUp {
				p.network.forget()
			}
		case <-serves:
			serves = nil
		case <-p.namespaces.changed:
			p.keepSoon()
		case <-p.pods.changed:
			p.notifyPods()
			p.keepSoon()
		case <-p.save.C:
			p.keep()
		case <-p.followed:
			if s := p.snapshot.Load(); p.tried != s.State {
				p.tried = s.State
				p.mergeRecords() // of nodes that were not members before
			}
		case <-p.retry.C:
		}
		p.writeRecord(ctx)
		p.sayNetworkIsUp(ctx)
		p.writeTaint(ctx)
		p.warn(ctx)
	}
}

// again has everything tried at once that has failed.
func (p *Part) again() {
	p.pace.again()
	p.network.again()
	p.taint.again()
	p.events.succeed()
	signal(p.controller.again)
}

// followOwnNode follows this host's Node. While there is none, what it last said holds.
func (p *Part) followOwnNode() {
	own := p.nodes.get(p.cfg.Node)
	if n, synced := p.nodes.count(); own == nil {
		if synced && p.copied == nil {
			p.host.Report(subjectNode, part.Warns, fmt.Sprintf("there is no Node %s among the %d of the cluster", p.cfg.Node, n),
				"kubelet makes it when it registers this host; if the Node is called otherwise, set kubernetes.node")
		}
		return
	}
	p.host.Report(subjectNode, "", "", "")
	if p.copied == nil || p.copied.UID != own.UID {
		p.put = ""
		p.pace.forget()
	}
	p.rubbish = p.wish(own)
	if p.copied == nil || !p.copied.same(own) {
		p.keepSoon()
	}
	p.copied = own
	if !own.hasRecord {
		p.pace.forget()
	}
}

// saveAfter gathers changes for one write of the copy.
const saveAfter = time.Second

func (p *Part) keepSoon() {
	if !p.saving {
		p.saving = true
		p.save.Reset(saveAfter)
	}
}

// keep writes the copy. Of what the apiserver has not told since the start it keeps what was there.
func (p *Part) keep() {
	p.saving = false
	c := diskCopy{Node: p.copied, Namespaces: p.namespaces.snapshot(), Pods: p.pods.snapshot()}
	if c.Namespaces == nil {
		c.Namespaces = p.before.Namespaces
	}
	if c.Pods == nil {
		c.Pods = p.before.Pods
	}
	if err := saveCopy(p.cfg.Dir, c); err != nil {
		p.log.Warn("the copy of what the apiserver said cannot be written; until the apiserver answers, the next start "+
			"has only the copy before", "error", err)
	}
}

const subjectNode = "kubernetes: node"

// wish takes a Node's annotations to the agent.
func (p *Part) wish(n *Node) []Rubbish {
	w, bad := wishesOf(n.Annotations, n.Labels)
	w.KubernetesNode = n.Name
	p.host.Wish(w)
	return bad
}

// mergeRecords merges what the annotations of Nodes hold.
func (p *Part) mergeRecords() {
	s := p.snapshot.Load()
	if s == nil {
		return // the agent does not run yet
	}
	isMember := func(id identity.ID) bool { return s.State.Node(id) != nil }
	p.nodes.eachNewRecord(isMember, func(n *Node, value string) (of identity.ID, done bool) {
		node := n.Name
		of, err := p.merge(node, value)
		if node == p.cfg.Node {
			if err == nil {
				p.nodes.holders.set(n, of)
			}
			p.checkOwnRecord(value)
			return of, true
		}
		if errors.Is(err, gossip.ErrUnknownNode) {
			p.metrics.records.WithLabelValues("unknown").Inc()
			return of, false // it may have joined a moment ago
		}
		subject := "kubernetes: record of Node " + node
		switch {
		case err != nil:
			p.metrics.records.WithLabelValues("refused").Inc()
			p.told[node] = true
			p.host.Report(subject, part.Warns, err.Error(),
				"that node's agent restores its own record; if this stays, another program writes to that Node's annotations")
		default:
			p.nodes.holders.set(n, of)
			p.metrics.records.WithLabelValues("taken").Inc()
			if p.told[node] {
				delete(p.told, node)
				p.host.Report(subject, "", "", "")
			}
		}
		return of, true
	})
	for node := range p.told {
		if p.nodes.get(node) == nil {
			delete(p.told, node)
			p.host.Report("kubernetes: record of Node "+node, "", "", "")
		}
	}
}

// merge takes in the record of one Node's annotation, and returns whose it says it is, also where it is refused.
func (p *Part) merge(node, value string) (id identity.ID, err error) {
	s, err := annotationtier.Decode(value)
	if err != nil {
		return id, err
	}
	r, err := unsigned(s)
	if err != nil {
		return id, err
	}
	if r.GetKubernetesNode() != node {
		return id, fmt.Errorf("annotation %s holds a record of a node that says it is %s", annotationtier.Annotation,
			nodeText(r.GetKubernetesNode()))
	}
	if id, err = identity.ParseID(r.GetNodeId()); err != nil {
		return id, err
	}
	return id, errors.Join(p.host.Merge([]*skeinv1.SignedRecord{s})...)
}

func nodeText(name string) string {
	if name == "" {
		return "no Node"
	}
	return fmt.Sprintf("Node %.253q", name)
}

// unsigned reads a record without verifying it.
func unsigned(s *skeinv1.SignedRecord) (*skeinv1.Record, error) {
	r := &skeinv1.Record{}
	if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(s.GetRecord(), r); err != nil {
		return nil, fmt.Errorf("annotation %s: %w", annotationtier.Annotation, err)
	}
	return r, nil
}

// checkOwnRecord sees whether this host's annotation is as it was written. One that somebody has changed is written
// again.
func (p *Part) checkOwnRecord(value string) {
	if value == p.put {
		return
	}
	p.put = value
	s, err := annotationtier.Decode(value)
	if err != nil {
		p.pace.forget()
		return
	}
	own := p.snapshot.Load().Records[p.snapshot.Load().Self]
	if r, err := unsigned(s); err == nil && own.Record != nil && r.GetNodeId() == own.Record.GetNodeId() &&
		len(p.host.Merge([]*skeinv1.SignedRecord{s})) == 0 {
		p.pace.found(annotationtier.Content(r))
		return
	}
	p.pace.forget()
}

const writeTimeout = 15 * time.Second

// writeRecord writes this node's record to its Node when that is due, and else sees to it that it is looked at then.
func (p *Part) writeRecord(ctx context.Context) {
	s := p.snapshot.Load()
	if s == nil || p.apiserver == nil {
		return
	}
	own := p.nodes.get(p.cfg.Node)
	e, ok := s.Records[s.Self]
	if own == nil || !ok || e.Record.GetKubernetesNode() != own.Name {
		return
	}
	now := time.Now()
	content := annotationtier.Content(e.Record)
	wait, due := p.pace.next(content, now)
	switch {
	case !due:
		return
	case wait > 0:
		p.look(wait)
		return
	}
	value, err := annotationtier.Encode(e.Signed)
	if err == nil {
		inner, cancel := context.WithTimeout(ctx, writeTimeout)
		err = p.apiserver.annotate(inner, own, annotationtier.Annotation, value)
		cancel()
	}
	if ctx.Err() != nil {
		return
	}
	p.metrics.wrote("record", err)
	p.health.result("write the record to Node "+own.Name, "patch", "nodes", err)
	if err != nil {
		p.pace.fail(now, retryAfter(err))
		if wait, due := p.pace.next(content, now); due {
			p.look(wait)
		}
		return
	}
	p.put = value
	p.pace.wrote(content, now)
}

// look has what is due looked at again after a while, or sooner if something else asks for that.
func (p *Part) look(wait time.Duration) {
	if at := time.Now().Add(wait); !p.retryAt.After(time.Now()) || at.Before(p.retryAt) {
		p.retryAt = at
		p.retry.Reset(wait)
	}
}

// warn makes Events on this host's Node about annotations that cannot be used, once for each such value.
func (p *Part) warn(ctx context.Context) {
	own := p.copied
	if own == nil || p.apiserver == nil {
		return
	}
	for _, r := range p.rubbish {
		key := own.UID + "\x00" + r.Name + "\x00" + r.Problem
		if !p.warned.first(key) {
			continue
		}
		if wait := p.events.wait(time.Now()); wait > 0 {
			p.warned.forget(key)
			p.look(wait)
			return
		}
		p.log.Warn("an annotation of this host's Node cannot be used", "annotation", r.Name, "problem", r.Problem)
		inner, cancel := context.WithTimeout(ctx, writeTimeout)
		err := p.apiserver.event(inner, own, "InvalidAnnotation", fmt.Sprintf("%s is ignored: %s", r.Name, r.Problem))
		cancel()
		p.metrics.wrote("event", err)
		if ctx.Err() != nil {
			return
		}
		p.health.result("make an Event", "create", "events", err)
		if err != nil {
			p.warned.forget(key)
			p.events.fail(time.Now(), retryAfter(err))
			p.look(p.events.wait(time.Now()))
			return
		}
		p.events.succeed()
	}
}

// warned remembers what Events were made about, so that each is made once.
type warned map[string]bool

const maxEvents = 1000

func (e *warned) first(key string) bool {
	if *e == nil || len(*e) >= maxEvents {
		*e = warned{}
	}
	if (*e)[key] {
		return false
	}
	(*e)[key] = true
	return true
}

func (e *warned) forget(key string) { delete(*e, key) }

// quiet logs what Kubernetes' libraries say as details: what matters of it this package tells itself.
type quiet struct{ slog.Handler }

func (q quiet) Handle(ctx context.Context, r slog.Record) error {
	r.Level = slog.LevelDebug
	return q.Handler.Handle(ctx, r)
}
func (q quiet) Enabled(ctx context.Context, _ slog.Level) bool {
	return q.Handler.Enabled(ctx, slog.LevelDebug)
}
func (q quiet) WithAttrs(a []slog.Attr) slog.Handler { return quiet{q.Handler.WithAttrs(a)} }
func (q quiet) WithGroup(name string) slog.Handler   { return quiet{q.Handler.WithGroup(name)} }
