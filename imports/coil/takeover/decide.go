package takeover

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/skeinmesh/skein/dataplane"
)

// Host is what Coil has left on a host.
type Host struct {
	Daemon string // the socket at which Coil's daemon answers; empty: it does not run
	Pods   []Pod
	Rules  []Rule  // that lead to tables with routes to Coil's pods, but for the agent's and the kernel's own
	Blocks []Route // of blocks, in the table from which both export them
	Confs  []Conf
}

// Pod is a pod that Coil has made and that runs.
type Pod struct {
	Link, Container string
	Routes          []Route // to its addresses
}

// Route leads to an address of a pod, or to a block.
type Route struct {
	Table    int          `json:"table"`
	Dst      netip.Prefix `json:"dst"`
	Link     string       `json:"link"`
	Type     int          `json:"type"` // RTN_UNICAST and so on
	Protocol int          `json:"protocol"`
	Scope    int          `json:"scope"`
	Metric   int          `json:"metric"`
}

func (r Route) String() string { return fmt.Sprintf("%s dev %s in table %d", r.Dst, r.Link, r.Table) }

// Rule is a policy rule that leads everything into a table.
type Rule struct {
	IPv6     bool `json:"ipv6"`
	Priority int  `json:"priority"`
	Table    int  `json:"table"`
}

func (r Rule) String() string {
	family := "IPv4"
	if r.IPv6 {
		family = "IPv6"
	}
	return fmt.Sprintf("%s rule %d to table %d", family, r.Priority, r.Table)
}

// Conf is a network configuration that names Coil's plugin.
type Conf struct {
	File    string   `json:"file"`
	Content []byte   `json:"content"`
	Mode    uint32   `json:"mode"`
	Chain   []string `json:"-"` // the plugins behind Coil's
	Socket  string   `json:"-"` // of Coil's daemon, where it is named
}

// Log is what was agreed about the host.
type Log struct {
	Node             string // the member's name
	Blocks, Reserved []netip.Prefix
}

// Plan is what is to be done, in the order of its fields.
type Plan struct {
	Add          []Route // to pods, into the agent's table
	Known        []netip.Addr
	Chain        []string // plugins behind skein's
	Confs        []Conf   // that go
	RemoveRoutes []Route
	RemoveRules  []Rule
	Notes        []string
}

// Nothing reports whether the host is as it shall be.
func (p Plan) Nothing() bool {
	return len(p.Add)+len(p.Confs)+len(p.RemoveRoutes)+len(p.RemoveRules) == 0
}

// Lines say what the plan does, a line each.
func (p Plan) Lines() (out []string) {
	say := func(format string, a ...any) { out = append(out, fmt.Sprintf(format, a...)) }
	for _, r := range p.Add {
		say("add the route %s", r)
	}
	if n := len(p.Known); n > 0 && !p.Nothing() {
		say("wait until the agent knows Coil's pods (addresses: %d)", n)
	}
	if len(p.Confs) > 0 {
		say("put skein's network configuration in place%s", behind(p.Chain))
	}
	for _, c := range p.Confs {
		say("remove %s", c.File)
	}
	for _, r := range p.RemoveRoutes {
		say("remove the route %s", r)
	}
	for _, r := range p.RemoveRules {
		say("remove the %s", r)
	}
	return out
}

func behind(chain []string) string {
	if len(chain) == 0 {
		return ""
	}
	return ", with " + strings.Join(chain, " and ") + " behind its plugin"
}

// Decide says what is to be done, or everything that stands in its way.
func Decide(h Host, l Log, n dataplane.Numbers) (Plan, error) {
	var p Plan
	var errs []error
	if h.Daemon != "" {
		errs = append(errs, fmt.Errorf("Coil's daemon answers at %s: stop it first, so that no pod and no block changes "+
			"hands meanwhile: kubectl -n kube-system delete deployment/coil-controller daemonset/coild", h.Daemon))
	}
	for _, pod := range h.Pods {
		errs = append(errs, p.adoptPod(pod, l, n))
	}
	slices.SortFunc(p.Known, netip.Addr.Compare)
	p.Known = slices.Compact(p.Known)
	p.RemoveRules = h.Rules
	for _, r := range h.Blocks {
		if covers(l.Blocks, r.Dst) {
			p.RemoveRoutes = append(p.RemoveRoutes, r)
		}
	}
	p.Confs = h.Confs
	for _, c := range h.Confs {
		if p.Chain != nil && !slices.Equal(p.Chain, c.Chain) {
			errs = append(errs, fmt.Errorf("%s and %s have different plugins behind Coil's: remove the one that no runtime uses",
				h.Confs[0].File, c.File))
			break
		}
		p.Chain = append([]string{}, c.Chain...)
	}
	return p, errors.Join(errs...)
}

// adoptPod has the agent lead to a pod's addresses.
func (p *Plan) adoptPod(pod Pod, l Log, n dataplane.Numbers) error {
	there := map[netip.Prefix]bool{}
	for _, r := range pod.Routes {
		if r.Table == n.PodTable() {
			there[r.Dst] = true
		}
	}
	for _, r := range pod.Routes {
		switch {
		case covers(l.Blocks, r.Dst):
			p.Known = append(p.Known, r.Dst.Addr())
		case covers(l.Reserved, r.Dst):
			p.Notes = append(p.Notes, fmt.Sprintf("%s of container %.12s lies in a reserved block: other hosts do not reach "+
				"it through the mesh; replace the pod, then release the block", r.Dst.Addr(), pod.Container))
		default:
			return fmt.Errorf("%s of container %.12s (link %s) lies in no block that the log has for node %s: import Coil's "+
				"pools and blocks first: skein import coil FILE", r.Dst.Addr(), pod.Container, pod.Link, l.Node)
		}
		if r.Table == n.PodTable() {
			continue
		}
		if !there[r.Dst] {
			there[r.Dst] = true
			add := r
			add.Table, add.Protocol = n.PodTable(), dataplane.RouteProtocol
			p.Add = append(p.Add, add)
		}
		p.RemoveRoutes = append(p.RemoveRoutes, r)
	}
	return nil
}

func covers(blocks []netip.Prefix, p netip.Prefix) bool {
	return slices.ContainsFunc(blocks, func(b netip.Prefix) bool { return b.Bits() <= p.Bits() && b.Contains(p.Addr()) })
}
