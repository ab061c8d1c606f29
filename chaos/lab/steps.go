package lab

import (
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// How long a step keeps trying when it does not say.
const (
	defaultConverge = 60 * time.Second
	defaultExpect   = 10 * time.Second
	defaultTransfer = 10 * time.Second
)

const stepKinds = "wait, expect, pods, ping, transfer, serve, fetch, flow, exec, partition, block, zombie, nat, " +
	"rebind, move, pause, resume, kill, stop, start, heal, log"

// step reads one step: a mapping with one key that says what to do, and perhaps within.
func (r *reader) step(_ int, v value) {
	step := Step{Line: v.line(), Text: compact(v.node)}
	within := time.Duration(-1)
	var kinds []string
	before := len(r.d.errs)
	kind := func(key string, read func(value) Action) field {
		return field{key, func(v value) { kinds = append(kinds, key); step.Action = read(v) }}
	}
	var waitNodes []string
	v.mapping(
		kind("wait", r.wait), kind("expect", r.expect), kind("pods", r.podStep), kind("ping", r.ping),
		kind("transfer", r.transfer),
		kind("serve", r.serve), kind("fetch", r.fetch), kind("flow", r.flow), kind("exec", r.exec),
		kind("partition", r.partition), kind("block", r.block), kind("zombie", r.zombie),
		kind("nat", r.setNAT), kind("rebind", r.rebind), kind("move", r.move),
		kind("pause", func(v value) Action { return Pause{r.who(v)} }),
		kind("resume", func(v value) Action { return Resume{r.who(v)} }),
		kind("kill", func(v value) Action { return Kill{r.who(v)} }),
		kind("stop", func(v value) Action { return Stop{r.who(v)} }),
		kind("start", func(v value) Action { return Start{r.who(v)} }),
		kind("heal", r.heal),
		kind("log", func(v value) Action { return Log{v.text("a line of text")} }),
		field{"within", func(v value) { within = v.duration() }},
		field{"nodes", func(v value) { waitNodes = r.who(v) }},
	)
	switch {
	case len(r.d.errs) > before:
		return // more would be consequences
	case len(kinds) == 0:
		v.fail("a step needs one of the keys %s", stepKinds)
		return
	case len(kinds) > 1:
		v.fail("a step does one thing, this one has %s: make a step of each", strings.Join(kinds, " and "))
		return
	}
	r.checkPlaces(v, step.Action)
	r.applyWithin(v, &step, within, waitNodes)
	r.s.Steps = append(r.s.Steps, step)
}

// checkPlaces refuses faults of the network at nodes that have none of their own.
func (r *reader) checkPlaces(v value, a Action) {
	switch a.(type) {
	case Partition, Block, Zombie, Move:
		for _, name := range a.nodes() {
			if n, _ := r.s.Node(name); n.Beside != "" {
				v.fail("%s has no network of its own: name %s, which it is beside", name, n.Beside)
			}
		}
	}
}

// applyWithin fills in within, and refuses it and nodes where they mean nothing.
func (r *reader) applyWithin(v value, step *Step, within time.Duration, waitNodes []string) {
	wait, isWait := step.Action.(Wait)
	if waitNodes != nil {
		if !isWait || !wait.Converged {
			v.fail("the key \"nodes\" belongs to {wait: converged}")
		}
		wait.Nodes = waitNodes
		step.Action = wait
	}
	switch a := step.Action.(type) {
	case Wait:
		step.Within = defaultConverge
		if !a.Converged && within >= 0 {
			v.fail("the key \"within\" has no effect with a plain duration to wait: leave it out")
		}
	case Expect, Accounts, Fetch:
		step.Within = defaultExpect
	case Transfer:
		step.Within = defaultTransfer
	case Exec, StartPods:
		step.Within = 0
	default:
		if within >= 0 {
			v.fail("the key \"within\" belongs to wait, expect, transfer, fetch, exec and the start of pods")
		}
	}
	if within >= 0 {
		step.Within = within
	}
}

func (r *reader) wait(v value) Action {
	if s, ok := v.node.(*ast.StringNode); ok && s.Value == "converged" {
		return Wait{Converged: true, Nodes: r.s.NodeNames()}
	}
	s := v.text("a duration such as 5s, or converged")
	d, err := time.ParseDuration(s)
	if s != "" && (err != nil || d < 0) {
		v.fail("%q is not known; allowed: a duration such as 5s, or converged", s)
	}
	return Wait{For: d}
}

func (r *reader) expect(v value) Action {
	e := Expect{Count: 1}
	accounts := false
	v.mapping(
		field{"from", func(v value) { e.From = r.places(v) }},
		field{"to", func(v value) { e.To = r.places(v) }},
		field{"addresses", func(v value) { accounts = v.oneOf("agree") != "" }},
		field{"reach", func(v value) { b := v.boolean(); e.Reach = &b }},
		field{"path", func(v value) {
			for _, s := range v.texts("direct, relay, hop, none") {
				if !slices.Contains([]string{"direct", "relay", "hop", "none"}, s) {
					v.fail("%q is not a path; allowed: direct, relay, hop, none", s)
				}
				e.Path = append(e.Path, s)
			}
		}},
		field{"count", func(v value) { e.Count = v.integer(1, 10000) }},
		field{"size", func(v value) { e.Size = v.echoSize() }},
		field{"family", func(v value) { e.Family = v.oneOf("ipv4", "ipv6") }},
		field{"for", func(v value) { e.For = v.duration() }},
	)
	if accounts {
		if v.size() > 1 {
			v.fail("addresses: agree is about the whole lab: make a step of the rest")
		}
		return Accounts{}
	}
	if len(e.From) == 0 || len(e.To) == 0 {
		v.fail("needs both from and to: nodes, site:NAME, all, or pods as NODE/POD")
	}
	if e.Reach == nil && len(e.Path) == 0 {
		v.fail("expects nothing: add reach: true, reach: false, or path; or addresses: agree")
	}
	if len(e.Path) > 0 && slices.ContainsFunc(union(e.From, e.To), r.isHost) {
		v.fail("there is no path to or from a host without an agent: leave path out")
	}
	if len(e.Path) > 0 && slices.ContainsFunc(e.From, func(f string) bool {
		return slices.ContainsFunc(e.To, func(t string) bool { return f != t && nodeOf(f) == nodeOf(t) })
	}) {
		v.fail("there is no path between pods of one node, or between a node and its pod: leave path out, or these")
	}
	if !slices.ContainsFunc(e.From, func(f string) bool { return len(e.To) > 1 || !slices.Contains(e.To, f) }) &&
		len(e.From) > 0 {
		v.fail("from and to are the same")
	}
	return e
}

func (v value) echoSize() int { return v.integer(ping.MinSize, ping.MaxSize) }

func (r *reader) ping(v value) Action {
	p := Ping{Every: defaultEvery, Lost: -1}
	ends, starts := false, false
	v.mapping(
		field{"from", func(v value) { p.From, starts = r.places(v), true }},
		field{"to", func(v value) { p.To, starts = r.places(v), true }},
		field{"every", func(v value) { p.Every, starts = max(v.duration(), time.Millisecond), true }},
		field{"size", func(v value) { p.Size, starts = v.echoSize(), true }},
		field{"lost", func(v value) { p.Lost, ends = v.integer(0, 1000000), true }},
		field{"longest", func(v value) { p.Longest, ends = v.duration(), true }},
	)
	switch {
	case starts == ends:
		v.fail("either starts echoes, with from and to, or ends them and says how many may be lost: {lost: 0}, or for how " +
			"long: {longest: 1s}")
	case starts && (len(p.From) == 0 || len(p.To) == 0):
		v.fail("needs both from and to: nodes, site:NAME, all, or pods as NODE/POD")
	}
	return p
}

func (r *reader) transfer(v value) Action {
	t := Transfer{Bytes: 1 << 20}
	v.mapping(
		field{"from", func(v value) { t.From = r.places(v) }},
		field{"to", func(v value) { t.To = r.places(v) }},
		field{"bytes", func(v value) { t.Bytes = v.integer(1, 1<<30) }},
	)
	if len(t.From) == 0 || len(t.To) == 0 {
		v.fail("needs both from and to: nodes, site:NAME, all, or pods as NODE/POD")
	}
	return t
}

// siteName reads the name of a site whose router can be changed.
func (r *reader) siteName(v value) (name string, nat fabric.NAT) {
	name = v.text("the name of a site")
	for _, s := range r.s.Sites {
		if s.Name == name {
			return name, s.NAT
		}
	}
	if name != "" {
		v.fail("there is no site %q; allowed: %s", name, strings.Join(r.siteNames(), ", "))
	}
	return name, ""
}

func (r *reader) setNAT(v value) Action {
	var a SetNAT
	var now fabric.NAT
	v.mapping(
		field{"site", func(v value) { a.Site, now = r.siteName(v) }},
		field{"kind", func(v value) { a.NAT = r.nat(v) }},
	)
	switch {
	case a.Site == "" || a.NAT == "":
		v.fail("needs both site and kind")
	case now != "" && (!now.CanChange() || !a.NAT.CanChange()):
		v.fail("%s cannot become %s while the lab is up: only kinds that give all hosts one address can, and not double", now,
			a.NAT)
	}
	return a
}

func (r *reader) rebind(v value) Action {
	var a Rebind
	one := func(v value) {
		name, nat := r.siteName(v)
		if nat == fabric.None || nat == fabric.OneToOne {
			v.fail("site %s has nat: %s, which has no mappings to forget", name, nat)
		}
		a.Sites = append(a.Sites, name)
	}
	if !v.isList() {
		one(v)
		return a
	}
	v.each("names of sites", func(_ int, v value) { one(v) })
	return a
}

func (r *reader) move(v value) Action {
	var m Move
	v.mapping(
		field{"node", func(v value) {
			if list := r.whoever(v); len(list) == 1 {
				m.Node = list[0]
			} else {
				v.fail("one node moves at a time")
			}
		}},
		field{"to", func(v value) { m.To, _ = r.siteName(v) }},
	)
	if m.Node == "" || m.To == "" {
		v.fail("needs both node and to: the name of a site")
	}
	return m
}

func (r *reader) exec(v value) Action {
	var e Exec
	v.mapping(
		field{"node", func(v value) { e.Nodes = r.places(v) }},
		field{"command", func(v value) { e.Command = command(v) }},
		field{"exit", func(v value) { e.Exit = v.integer(0, 255) }},
		field{"output", func(v value) { e.Output = v.texts("text that the command prints") }},
		field{"absent", func(v value) { e.Absent = v.texts("text that the command does not print") }},
		field{"matches", func(v value) {
			re, err := regexp.Compile(v.text("a regular expression"))
			if err != nil {
				v.fail("is not a regular expression: %v", err)
			}
			e.Matches = re
		}},
	)
	if len(e.Nodes) == 0 {
		v.fail("the key \"node\" is missing: name the node that runs the command")
	}
	if len(e.Command) == 0 {
		v.fail("the key \"command\" is missing: a line for the shell, or a list of words")
	}
	return e
}

// command reads a list of words as they are, and a line for the shell.
func command(v value) []string {
	if v.isList() {
		return v.texts("a word")
	}
	if line := v.text("a line for the shell, or a list of words"); line != "" {
		return []string{"/bin/sh", "-c", line}
	}
	return nil
}

func (r *reader) partition(v value) Action {
	var p Partition
	seen := map[string]bool{}
	v.each("groups, each a list of nodes", func(_ int, v value) {
		group := r.whoever(v)
		for _, n := range group {
			if seen[n] {
				v.fail("node %q is in two groups", n)
			}
			seen[n] = true
		}
		p.Groups = append(p.Groups, group)
	})
	if len(p.Groups) == 1 { // one group: cut off from all others
		var rest []string
		for _, n := range r.s.placeNames() {
			if !seen[n] {
				rest = append(rest, n)
			}
		}
		if len(rest) == 0 {
			v.fail("the one group holds every node: nothing is cut off from it")
		}
		p.Groups = append(p.Groups, rest)
	}
	if len(p.Groups) == 0 {
		v.fail("is empty; allowed: groups such as [[a, b], [c]]")
	}
	return p
}

func (r *reader) block(v value) Action {
	var b Block
	v.mapping(
		field{"from", func(v value) { b.From = r.whoever(v) }},
		field{"to", func(v value) { b.To = r.whoever(v) }},
		field{"proto", func(v value) {
			if b.Proto = v.oneOf("all", "udp", "tcp", "icmp"); b.Proto == "all" {
				b.Proto = ""
			}
		}},
		field{"oneway", func(v value) { b.Oneway = v.boolean() }},
		field{"percent", func(v value) { b.Percent = v.integer(1, 99) }},
		field{"above", func(v value) { b.Above = v.integer(1, 65534) }},
	)
	if len(b.From) == 0 || len(b.To) == 0 {
		v.fail("needs both from and to: nodes, site:NAME, or all")
	}
	return b
}

func (r *reader) heal(v value) Action {
	if s, ok := v.node.(*ast.StringNode); ok && s.Value == "all" {
		return Heal{All: true, Nodes: r.s.HostNames()}
	}
	return Heal{Nodes: r.whoever(v)}
}

// who reads nodes with an agent: a name, site:NAME, all, or a list of these.
func (r *reader) who(v value) []string {
	all := r.nodes(v, r.s.NodeNames())
	for _, n := range all {
		if r.isHost(n) {
			v.fail("%s is a host without an agent (role: host)", n)
		}
	}
	return all
}

// whoever reads nodes, also those without an agent.
func (r *reader) whoever(v value) []string { return r.nodes(v, r.s.HostNames()) }

func (r *reader) nodes(v value, among []string) []string {
	var all []string
	for _, s := range v.selectors() {
		all = union(all, r.nodesOf(v, s, among))
	}
	return all
}

func (r *reader) isHost(name string) bool {
	n, ok := r.s.Node(nodeOf(name))
	return ok && n.Role == RoleHost
}

// nodesOf finds the nodes that one word means: by all and site:NAME only those among some, by its name any.
func (r *reader) nodesOf(v value, s string, among []string) []string {
	site, isSite := strings.CutPrefix(s, "site:")
	switch {
	case s == "":
		return nil
	case s == "all":
		return slices.Clone(among)
	case isSite:
		var members []string
		for _, n := range r.s.Nodes {
			if n.Site == site && slices.Contains(among, n.Name) {
				members = append(members, n.Name)
			}
		}
		if len(members) == 0 {
			v.fail("no node is in a site %q; sites: %s", site, strings.Join(r.siteNames(), ", "))
		}
		return members
	case !slices.Contains(r.s.HostNames(), s):
		hint := ""
		if near := nearest(s, r.s.HostNames()); near != "" {
			hint = " (did you mean \"" + near + "\"?)"
		}
		v.fail("there is no node %q%s; nodes: %s", s, hint, strings.Join(r.s.HostNames(), ", "))
		return nil
	}
	return []string{s}
}

// selectors reads the words of who. Inside brackets YAML readers may take site:NAME for a mapping; it
// means the same.
func (v value) selectors() []string {
	const what = "the name of a node, site:NAME, or all"
	if v.isList() {
		var all []string
		v.each(what, func(_ int, v value) { all = append(all, v.selectors()...) })
		return all
	}
	if v.isMapping() {
		if pairs := v.pairs(what); len(pairs) == 1 && v.key(pairs[0]) == "site" {
			return []string{"site:" + v.at("site", pairs[0].Value).text("the name of a site")}
		}
	}
	return []string{v.text(what + ", or a list")}
}

// compact writes a step on one line, for progress.
func compact(n ast.Node) string {
	line := strings.Join(strings.Fields(n.String()), " ")
	line = strings.TrimSuffix(strings.TrimPrefix(line, "{"), "}")
	if len(line) > 200 {
		line = line[:197] + "..."
	}
	return line
}
