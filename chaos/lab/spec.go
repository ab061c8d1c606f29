package lab

import (
	"cmp"
	"net/netip"
	"regexp"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/events"
)

// Spec is a lab file that has been read and checked.
type Spec struct {
	File     string // where it was read from, for messages
	Name     string
	Sites    []fabric.SiteSpec // in the file's order, like Nodes
	Nodes    []Node
	Config   map[string]any    // for every agent; a node's own goes over it
	Settings *skeinv1.Settings // the cluster's, given when it is made; nil: none
	Pools    []*skeinv1.Pool   // made when all nodes have joined, in the file's order
	Egresses []*skeinv1.Egress // likewise, after the pools
	Steps    []Step
	Source   []byte // the file itself, kept with the lab
}

// Node asks for a host with an agent.
type Node struct {
	Name   string
	Site   string
	Server bool
	Admin  bool              // it may give cluster commands, as servers may
	Leader bool              // it wishes to lead its site
	Relay  string            // auto, true, false, or "" to leave it to the agent
	Role   string            // relay: it relays and does nothing else; host: it has no agent; "" or agent: all of it
	Labels map[string]string // of the agent
	Late   bool              // it does not start with the lab, but when a step starts it
	Init   bool              // this one creates the cluster; exactly one node of a mesh has it
	Config map[string]any    // goes over what the lab writes into the agent's config file
	// the node in whose network namespace its agent runs, as another one there; "": it has one of its own
	Beside string
	Mesh   string // the mesh that its agent is in; "" is the lab's own
}

// host is the node whose network namespace it is.
func (n Node) host() string { return cmp.Or(n.Beside, n.Name) }

// role is what the node's token gives it.
func (n Node) role() events.Role {
	switch {
	case n.Server:
		return events.RoleServer
	case n.Admin:
		return events.RoleAdmin
	}
	return events.RoleAgent
}

// Step is one line of a scenario.
type Step struct {
	Line   int
	Text   string        // as written, on one line
	Within time.Duration // how long to keep trying until it holds
	Action Action
}

// Action is what a step does: one of the types below. Its nodes are those it touches, or pods on them.
type Action interface{ nodes() []string }

type (
	// Wait passes time, or waits until the agents agree.
	Wait struct {
		For       time.Duration
		Converged bool
		Nodes     []string // whose agents have to agree
	}
	// Expect states what must come true between each From and each To: nodes, or pods as NODE/POD.
	Expect struct {
		From, To []string
		Reach    *bool    // an echo through the overlay is answered
		Path     []string // any of direct, relay, hop, none
		Count    int      // echoes in a row that must all be answered
		Size     int      // bytes of data in each; 0: few
		Family   string   // ipv4, ipv6, or "" for both
		For      time.Duration
	}
	// Accounts states that all accounts of pods' addresses agree.
	Accounts struct{}
	// StartPods starts pods of these names on each node, all at once.
	StartPods struct {
		Nodes       []string
		Pods        []string
		Namespace   string            // theirs; "" for "default"
		Pool        string            // the one to ask for; "" for none
		IPs         []netip.Addr      // those to ask for, one of a family at most; only for one pod
		Annotations map[string]string // the pods'
		Longest     time.Duration     // how long the plugin may take for each; 0: until it is given up
		// Fails: the plugin refuses them all, with this code (0: any) and this text in what it says ("": any).
		Fails bool
		Code  uint
		Text  string
		// Told, if set, is told how long the plugin took for each pod, by many goroutines at once.
		Told func(pod string, took time.Duration)
	}
	// StopPods ends pods on each node.
	StopPods struct {
		Nodes []string
		Pods  []string // none: all
	}
	// Ping starts echoes through the overlay that go on during the next steps; without From it ends them.
	Ping struct {
		From, To []string
		Every    time.Duration
		Size     int           // bytes of data in each echo; 0: few
		Lost     int           // how many of each stream's echoes may be lost, -1: any number; with the end
		Longest  time.Duration // how long none may have been answered, 0: any time; with the end
	}
	// Transfer sends bytes over TCP through the overlay and waits until they have arrived.
	Transfer struct {
		From, To []string
		Bytes    int
	}
	// Serve starts an HTTP server on nodes, or in pods, that tells clients their addresses, and answers flows.
	Serve struct {
		Nodes []string
		Port  int
	}
	// Fetch asks a served port from each From, on each To.
	Fetch struct {
		From, To []string
		Port     int
		Family   string   // ipv4, ipv6, or "" for all that both ends have
		Source   []string // as whom the server shall see the client: addresses, or names of nodes; none: whoever
		OwnerOf  Ref      // likewise: as one of the owners of this egress's slots, or their source addresses
		Sources  int      // under so many different addresses of each family, at least, all clients together are seen
		Fails    bool     // it gets no answer
	}
	// Flow starts streams, or new connections one after the other, to a served port, that go on during the next steps;
	// without From it ends them.
	Flow struct {
		From, To []string
		Port     int
		Family   string        // ipv4, ipv6, or "" for IPv4 where there is one
		Proto    string        // udp, tcp or connect
		Every    time.Duration // between two numbers sent
		Lost     int           // how many of each stream's numbers may be lost, -1: any number; with the end
		Longest  time.Duration // how long none may have been answered, 0: any time; with the end
	}
	// Exec runs a command on nodes, or in pods.
	Exec struct {
		Nodes   []string
		Command []string
		Exit    int
		Output  []string // each must be found in what the command prints
		Absent  []string // none may be found
		Matches *regexp.Regexp
	}
	// Partition cuts every connection between nodes of different groups.
	Partition struct{ Groups [][]string }
	// Block cuts the direct way between nodes.
	Block struct {
		From, To []string
		Proto    string // udp, tcp, icmp, or "" for all
		Oneway   bool   // only what From sends
		Percent  int    // so many of a hundred packets, at random; 0: all
		Above    int    // only packets longer than this, in bytes with the IP header; 0: of any length
	}
	// Zombie makes nodes drop a part of what they pass on, while their agents live.
	Zombie struct {
		Nodes []string
		Drops string // new, direction or large
	}
	// SetNAT makes a site's router another kind of NAT.
	SetNAT struct {
		Site string
		NAT  fabric.NAT
	}
	// Rebind makes routers forget their mappings; new ones get other ports.
	Rebind struct{ Sites []string }
	// Move carries a node to another site, or gives it another address in its own.
	Move struct{ Node, To string }
	// Pause makes agents stand still (SIGSTOP) until they are resumed.
	Pause struct{ Nodes []string }
	// Resume lets them go on.
	Resume struct{ Nodes []string }
	// Kill ends agents with SIGKILL.
	Kill struct{ Nodes []string }
	// Stop ends agents gracefully.
	Stop struct{ Nodes []string }
	// Start starts agents that do not run.
	Start struct{ Nodes []string }
	// Heal takes faults back: all of them, or those that touch the nodes. Killed agents start again.
	Heal struct {
		All   bool
		Nodes []string
	}
	// Log prints a line.
	Log struct{ Message string }
)

func (a Wait) nodes() []string      { return a.Nodes }
func (a Expect) nodes() []string    { return union(a.From, a.To) }
func (e Exec) nodes() []string      { return e.Nodes }
func (p Partition) nodes() []string { return union(p.Groups...) }
func (b Block) nodes() []string     { return union(b.From, b.To) }
func (p Ping) nodes() []string      { return union(p.From, p.To) }
func (a Accounts) nodes() []string  { return nil }
func (s StartPods) nodes() []string { return s.Nodes }
func (s StopPods) nodes() []string  { return s.Nodes }
func (t Transfer) nodes() []string  { return union(t.From, t.To) }
func (s Serve) nodes() []string     { return s.Nodes }
func (f Fetch) nodes() []string     { return union(f.From, f.To) }
func (f Flow) nodes() []string      { return union(f.From, f.To) }
func (m Move) nodes() []string      { return []string{m.Node} }
func (z Zombie) nodes() []string    { return z.Nodes }
func (a SetNAT) nodes() []string    { return nil }
func (a Rebind) nodes() []string    { return nil }
func (a Pause) nodes() []string     { return a.Nodes }
func (a Resume) nodes() []string    { return a.Nodes }
func (a Kill) nodes() []string      { return a.Nodes }
func (a Stop) nodes() []string      { return a.Nodes }
func (a Start) nodes() []string     { return a.Nodes }
func (a Heal) nodes() []string      { return a.Nodes }
func (a Log) nodes() []string       { return nil }

func union(lists ...[]string) []string {
	var all []string
	for _, l := range lists {
		for _, n := range l {
			if !slices.Contains(all, n) {
				all = append(all, n)
			}
		}
	}
	return all
}

// Initialiser is the node that creates the cluster of the lab's own mesh.
func (s *Spec) Initialiser() Node { return s.initialiser("") }

func (s *Spec) initialiser(mesh string) Node {
	for _, n := range s.Nodes {
		if n.Init && n.Mesh == mesh {
			return n
		}
	}
	return Node{}
}

// meshes are the names of all meshes, the lab's own first.
func (s *Spec) meshes() []string {
	out := []string{""}
	for _, n := range s.Nodes {
		if !slices.Contains(out, n.Mesh) {
			out = append(out, n.Mesh)
		}
	}
	return out
}

// Node finds a node by name.
func (s *Spec) Node(name string) (Node, bool) {
	for _, n := range s.Nodes {
		if n.Name == name {
			return n, true
		}
	}
	return Node{}, false
}

// RoleHost is the role of a node without an agent.
const RoleHost = "host"

// NodeNames lists the nodes that have an agent, in the file's order.
func (s *Spec) NodeNames() []string { return s.names(func(n Node) bool { return n.Role != RoleHost }) }

// HostNames lists all nodes, also those without an agent.
func (s *Spec) HostNames() []string { return s.names(func(Node) bool { return true }) }

// placeNames lists the nodes that have a place in the network of their own.
func (s *Spec) placeNames() []string { return s.names(func(n Node) bool { return n.Beside == "" }) }

func (s *Spec) names(which func(Node) bool) []string {
	names := make([]string, 0, len(s.Nodes))
	for _, n := range s.Nodes {
		if which(n) {
			names = append(names, n.Name)
		}
	}
	return names
}

// Plan numbers the lab's network.
func (s *Spec) Plan() (fabric.Plan, error) {
	var hosts []fabric.HostSpec
	for _, n := range s.Nodes {
		if n.Beside == "" {
			hosts = append(hosts, fabric.HostSpec{Name: n.Name, Site: n.Site})
		}
	}
	return fabric.NewPlan(s.Name, s.Sites, hosts)
}
