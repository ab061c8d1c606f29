package lab

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/internal/usage"
)

// Status is how a lab stands.
type Status struct {
	Name  string       `json:"name"`
	File  string       `json:"file"`
	Dir   string       `json:"dir"`
	Nodes []NodeStatus `json:"nodes"`
	Hosts []HostStatus `json:"hosts"` // without an agent
	Cuts  []Cut        `json:"cuts"`
	// Zombies live and do not pass on everything.
	Zombies []NotForwarded `json:"zombies,omitempty"`
}

// HostStatus is where a host without an agent is.
type HostStatus struct {
	Name    string `json:"name"`
	Site    string `json:"site"`
	Address string `json:"address"`
}

// NodeStatus is how a node stands.
type NodeStatus struct {
	Name      string            `json:"name"`
	Site      string            `json:"site"`
	NAT       string            `json:"nat"`
	Address   string            `json:"address"` // on the underlay
	IPv4      string            `json:"ipv4"`    // on the overlay
	IPv6      string            `json:"ipv6"`
	PID       int               `json:"pid"`
	Condition Condition         `json:"condition"` // what the lab wants
	Alive     bool              `json:"alive"`
	Phase     string            `json:"phase"` // what the agent says, or why it does not
	Server    bool              `json:"server"`
	Leader    bool              `json:"leader"`
	Index     uint64            `json:"index"`
	Paths     map[string]string `json:"paths"` // peer → direct, relay, hop, none
	Log       string            `json:"log"`
}

// Status asks every agent.
func (l *Lab) Status(ctx context.Context) Status {
	l.mu.Lock()
	s := Status{Name: l.Spec.Name, File: l.Spec.File, Dir: l.Dir, Nodes: make([]NodeStatus, len(l.agents)),
		Cuts: sortCuts(l.cuts), Zombies: sortNotForwarded(l.zombies)}
	l.mu.Unlock()
	now := l.Network()
	for _, h := range l.hosts {
		host, _ := now.Host(h.node.Name)
		s.Hosts = append(s.Hosts, HostStatus{h.node.Name, host.Site, host.Address().String()})
	}
	index := map[*agent]int{}
	for i, a := range l.agents {
		index[a] = i
	}
	_ = each(l.agents, func(a *agent) error { // what does not answer says so in its row
		s.Nodes[index[a]] = l.nodeStatus(ctx, a)
		return nil
	})
	return s
}

func (l *Lab) nodeStatus(ctx context.Context, a *agent) NodeStatus {
	rec := a.record()
	now := l.Network()
	host, _ := now.Host(a.node.host())
	site, _ := now.Site(host.Site)
	n := NodeStatus{Name: a.node.Name, Site: site.Name, NAT: string(site.NAT), Address: host.Address().String(),
		PID:       rec.Process.PID,
		Condition: rec.Condition, Alive: rec.Process.alive(), Server: a.node.Server, Log: a.logFile(),
		Paths: map[string]string{}}
	if rec.IPv4.IsValid() {
		n.IPv4 = rec.IPv4.String()
	}
	if rec.IPv6.IsValid() {
		n.IPv6 = rec.IPv6.String()
	}
	if !n.Alive {
		n.Phase = "down"
		return n
	}
	st, err := a.status(ctx)
	if err != nil {
		n.Phase = "silent"
		return n
	}
	n.Phase, n.Index, n.Leader = st.GetPhase(), st.GetIndex(), st.GetLeader() != "" && st.GetLeader() == st.GetNodeId()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	peers, err := a.client.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return n
	}
	for _, p := range peers.GetPeers() {
		n.Paths[p.GetName()] = p.GetPath()
	}
	return n
}

// Usage asks agents at the same time what they cost and do since their start. usage.Between makes rates of two answers.
// An agent that does not answer is missing, and the error says why.
func (l *Lab) Usage(ctx context.Context, nodes ...string) (map[string]*skeinv1.UsageResponse, error) {
	var mu sync.Mutex
	out := map[string]*skeinv1.UsageResponse{}
	err := eachPlace(nodes, func(name string) error {
		c, err := l.Client(name)
		if err != nil {
			return err
		}
		u, err := c.Usage(ctx, &skeinv1.UsageRequest{})
		if err != nil {
			return fmt.Errorf("node %s: ask what it uses: %w", name, err)
		}
		mu.Lock()
		defer mu.Unlock()
		out[name] = u
		return nil
	})
	return out, err
}

// LiveUsage is Usage after agents have collected their garbage, so that their heaps hold what is in use and no more.
func (l *Lab) LiveUsage(ctx context.Context, nodes ...string) (map[string]*skeinv1.UsageResponse, error) {
	err := eachPlace(nodes, func(name string) error {
		c, err := l.Client(name)
		if err != nil {
			return err
		}
		s, err := c.Profile(ctx, &skeinv1.ProfileRequest{Kind: "heap"}) // it collects first
		if err == nil {
			for s.Receive() {
			}
			err = errors.Join(s.Err(), s.Close())
		}
		if err != nil {
			return fmt.Errorf("node %s: make it collect garbage: %w", name, err)
		}
		return nil
	})
	out, uerr := l.Usage(ctx, nodes...)
	return out, errors.Join(err, uerr)
}

// Conntrack counts the connections that the kernel tracks, by network namespace: those of nodes, routers and the core.
func (l *Lab) Conntrack() (map[string]int, error) {
	all, err := fabric.Namespaces(l.Spec.Name)
	if err != nil {
		return nil, err
	}
	out := map[string]int{}
	for _, ns := range all {
		if out[ns], err = fabric.Connections(ns); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// Died tells which of the agents (none named: of all) have ended though nobody ended them, and how.
func (l *Lab) Died(nodes ...string) error {
	if len(nodes) == 0 {
		nodes = l.Spec.NodeNames()
	}
	agents, err := l.pick(nodes)
	if err != nil {
		return err
	}
	return each(agents, (*agent).died)
}

// Rates are the agents' rates between two answers of Usage. An agent that is missing in either, or was started anew
// between them, is missing, and the error says why.
func Rates(before, after map[string]*skeinv1.UsageResponse) (map[string]*skeinv1.UsageRates, error) {
	out := map[string]*skeinv1.UsageRates{}
	var errs []error
	for name, was := range before {
		is, ok := after[name]
		if !ok {
			errs = append(errs, fmt.Errorf("node %s: it did not answer the second time", name))
			continue
		}
		r, err := usage.Between(was, is)
		if err != nil {
			errs = append(errs, fmt.Errorf("node %s: %w", name, err))
			continue
		}
		out[name] = r
	}
	return out, errors.Join(errs...)
}

// peersOf describes an agent's peers, a line each.
func (l *Lab) peersOf(ctx context.Context, a *agent) []string {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	r, err := a.client.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return []string{"peers: " + err.Error()}
	}
	var lines []string
	for _, p := range r.GetPeers() {
		where := p.GetEndpoint()
		if p.GetPath() == "relay" {
			where = "over " + p.GetRelayName()
		}
		lines = append(lines, fmt.Sprintf("peer %-14s %-6s %-24s rtt %-8s %s", p.GetName(), p.GetPath(), where,
			round(time.Duration(p.GetRttNanos())), p.GetReason()))
	}
	return sortLines(lines)
}
