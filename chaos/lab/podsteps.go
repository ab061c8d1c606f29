package lab

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

const (
	maxPods          = 1000 // that one step starts on a node
	defaultBlockBits = 5    // of a pool that does not say; DESIGN.md section 10
	defaultPrefix    = "pod"
)

// nodeOf is the node of a place: of itself, or of a pod that is written NODE/POD.
func nodeOf(place string) string {
	node, _, _ := strings.Cut(place, "/")
	return node
}

// nodesIn lists the nodes of places, each once.
func nodesIn(places []string) []string {
	var all []string
	for _, p := range places {
		all = union(all, []string{nodeOf(p)})
	}
	return all
}

// pool reads an address pool that the lab makes when it is up.
func (r *reader) pool(name string, v value) {
	p := &skeinv1.Pool{Name: r.name(v, name), BlockSizeBits: defaultBlockBits}
	before := len(r.d.errs)
	v.mapping(
		field{"subnets", func(v value) {
			v.each("subnets such as 10.100.0.0/24 or {ipv4: 10.100.0.0/24, ipv6: 'fd00:100::/120'}",
				func(_ int, v value) { p.Subnets = append(p.Subnets, subnet(v)) })
		}},
		field{"blockSizeBits", func(v value) { p.BlockSizeBits = uint32(v.integer(0, 16)) }},
		field{"cooldown", func(v value) { p.CooldownSeconds = seconds(v) }},
		field{"sticky", func(v value) { p.StickySeconds = seconds(v) }},
		field{"maxBlocksPerNode", func(v value) { p.MaxBlocksPerNode = uint32(v.integer(0, 1<<20)) }},
		field{"namespaces", func(v value) { p.Namespaces = v.texts("names of namespaces") }},
		field{"allowed", func(v value) { p.Allowed = v.texts("names of namespaces, or \"*\"") }},
		field{"quotas", func(v value) {
			p.Quotas = map[string]uint32{}
			v.entries("a mapping from namespaces to numbers of addresses", func(ns string, v value) {
				p.Quotas[ns] = uint32(v.integer(0, 1<<30))
			})
		}},
	)
	if len(p.Subnets) == 0 && len(r.d.errs) == before {
		v.fail("the key \"subnets\" is missing: a pool has at least one")
	}
	r.s.Pools = append(r.s.Pools, p)
}

func seconds(v value) uint32 {
	d := v.duration()
	if d%time.Second != 0 || d > 1000*time.Hour {
		v.fail("%s is not allowed: whole seconds, at most 1000h", d)
	}
	return uint32(d / time.Second)
}

// subnet reads one as a text of one family, or as a mapping for both. Whether it fits is the cluster's to say.
func subnet(v value) *skeinv1.PoolSubnet {
	s := &skeinv1.PoolSubnet{}
	if !v.isMapping() {
		if p := prefix(v); p.Addr().Is4() {
			s.Ipv4 = p.String()
		} else if p.IsValid() {
			s.Ipv6 = p.String()
		}
		return s
	}
	if pairs := v.pairs("ipv4 and ipv6"); len(pairs) == 1 {
		if _, err := strconv.ParseUint(v.key(pairs[0]), 16, 16); err == nil {
			v.fail("is a mapping for YAML: put an IPv6 subnet into quotes")
			return s
		}
	}
	v.mapping(
		field{"ipv4", func(v value) { s.Ipv4 = prefix(v).String() }},
		field{"ipv6", func(v value) { s.Ipv6 = prefix(v).String() }},
	)
	return s
}

func prefix(v value) netip.Prefix {
	const what = "a subnet such as 10.100.0.0/24 or fd00:100::/120"
	s := v.text(what)
	p, err := netip.ParsePrefix(s)
	if s != "" && err != nil {
		v.fail("%q is not a subnet; allowed: %s", s, what)
	}
	return p
}

// podStep reads a start or a stop of pods.
func (r *reader) podStep(v value) Action {
	start := StartPods{}
	var nodes []string
	var begin, end *value
	count, prefix := 0, ""
	var others []string
	v.mapping(
		field{"node", func(v value) { nodes = r.who(v) }},
		field{"start", func(v value) { begin = &v }},
		field{"stop", func(v value) { end = &v }},
		field{"prefix", func(v value) {
			prefix = r.podName(v, v.text("the beginning of names"))
			others = append(others, "prefix")
		}},
		field{"namespace", func(v value) {
			start.Namespace = r.name(v, v.text("a namespace"))
			others = append(others, "namespace")
		}},
		field{"pool", func(v value) { start.Pool = v.text("the name of a pool"); others = append(others, "pool") }},
		field{"ips", func(v value) { start.IPs = addresses(v); others = append(others, "ips") }},
		field{"annotations", func(v value) {
			start.annotate(v.words("annotations"))
			others = append(others, "annotations")
		}},
		field{"egress", func(v value) { start.annotate(egressAnnotations(v)); others = append(others, "egress") }},
		field{"longest", func(v value) { start.Longest = v.duration(); others = append(others, "longest") }},
		field{"expect_error", func(v value) {
			start.Fails, start.Text = true, v.text("text of the plugin's error")
			others = append(others, "expect_error")
		}},
		field{"code", func(v value) {
			start.Fails, start.Code = true, uint(v.integer(1, 999))
			others = append(others, "code")
		}},
	)
	switch {
	case len(nodes) == 0:
		v.fail("the key \"node\" is missing: name the nodes of the pods")
	case (begin == nil) == (end == nil):
		v.fail("either starts pods (start: [a, b], or a number) or stops them (stop: [a, b], or all)")
	case end != nil && len(others) > 0:
		v.fail("%s is for pods that start, not for those that stop: leave it out", others[0])
	case end != nil:
		return r.stopPods(*end, nodes)
	}
	if begin == nil || len(nodes) == 0 {
		return start
	}
	start.Nodes = nodes
	if start.Pods, count = r.podsToStart(*begin, prefix); count == 0 && prefix != "" {
		v.fail("prefix goes with a number of pods: {start: 20, prefix: %s}", prefix)
	}
	if len(start.IPs) > 0 && (len(start.Pods) != 1 || len(nodes) != 1) {
		v.fail("ips are for one pod on one node, this step starts %d", len(start.Pods)*len(nodes))
	}
	r.note(v, start)
	return start
}

// podsToStart reads names, or how many to make up.
func (r *reader) podsToStart(v value, prefix string) (names []string, count int) {
	if _, ok := v.node.(*ast.IntegerNode); !ok {
		for _, s := range v.texts("names of pods, or a number") {
			names = append(names, r.podName(v, s))
		}
		if len(names) == 0 {
			v.fail("is empty; allowed: names of pods, or a number")
		}
		return names, 0
	}
	count = v.integer(1, maxPods)
	if prefix == "" {
		prefix = defaultPrefix
	}
	for i := range count {
		names = append(names, prefix+strconv.Itoa(i+1))
	}
	return names, count
}

func (r *reader) podName(v value, name string) string {
	if err := fabric.CheckPodName(name); err != nil {
		v.fail("%v", err)
	}
	if name == "all" {
		v.fail("\"all\" means all pods of a node: choose another name")
	}
	return r.name(v, name)
}

// note remembers which pods run after a step, so that a later one cannot name others.
func (r *reader) note(v value, s StartPods) {
	for _, n := range s.Nodes {
		for _, p := range s.Pods {
			switch {
			case slices.Contains(r.pods[n], p):
				v.fail("pod %s of node %s runs already: stop it first", p, n)
			case !s.Fails:
				r.pods[n] = append(r.pods[n], p)
			}
		}
	}
}

func (r *reader) stopPods(v value, nodes []string) Action {
	stop := StopPods{Nodes: nodes}
	if s, ok := v.node.(*ast.StringNode); !ok || s.Value != "all" {
		if stop.Pods = v.texts("names of pods, or all"); len(stop.Pods) == 0 {
			v.fail("is empty; allowed: names of pods, or all")
		}
	}
	for _, n := range nodes {
		for _, p := range stop.Pods {
			r.knownPod(v, n, p)
		}
		r.pods[n] = slices.DeleteFunc(r.pods[n], func(p string) bool {
			return stop.Pods == nil || slices.Contains(stop.Pods, p)
		})
	}
	return stop
}

func (r *reader) knownPod(v value, node, pod string) {
	if pod == "" || slices.Contains(r.pods[node], pod) {
		return
	}
	run := "none"
	if len(r.pods[node]) > 0 {
		run = strings.Join(r.pods[node], ", ")
	}
	v.fail("no pod %q runs on %s after the steps above; running: %s", pod, node, run)
}

// places reads nodes, and pods as NODE/POD, where NODE may be whatever means nodes and POD may be all.
func (r *reader) places(v value) []string {
	var all []string
	for _, s := range v.selectors() {
		nodes, pod, isPod := strings.Cut(s, "/")
		if !isPod {
			all = union(all, r.nodesOf(v, s, r.s.NodeNames()))
			continue
		}
		list := r.nodesOf(v, nodes, r.s.NodeNames())
		single := len(list) == 1 && pod != "all"
		if single {
			r.knownPod(v, list[0], pod)
		}
		var found []string
		for _, n := range list {
			for _, p := range r.pods[n] {
				if pod == "all" || p == pod {
					found = append(found, n+"/"+p)
				}
			}
		}
		if len(found) == 0 && len(list) > 0 && !single {
			v.fail("%q names no pod that runs after the steps above", s)
		}
		all = union(all, found)
	}
	return all
}

// addresses reads one of a family at most.
func addresses(v value) []netip.Addr {
	var out []netip.Addr
	for _, s := range v.texts("addresses") {
		a, err := netip.ParseAddr(s)
		if err != nil {
			v.fail("%q is not an address", s)
			continue
		}
		if slices.ContainsFunc(out, func(o netip.Addr) bool { return o.Is4() == a.Is4() }) {
			v.fail("more than one address of a family; a pod has one of each at most")
		}
		out = append(out, a)
	}
	return out
}
