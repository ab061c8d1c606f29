package replace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func block(number int, prefixes ...string) Block {
	b := Block{Pool: "default", Number: uint64(number), Index: uint64(100 + number)}
	for _, p := range prefixes {
		b.Prefixes = append(b.Prefixes, netip.MustParsePrefix(p))
	}
	return b
}

var (
	first  = block(1, "10.64.0.32/27", "fd64::20/123")
	second = block(2, "10.64.0.64/27", "fd64::40/123")
)

// pod is one of a ReplicaSet, named by its namespace and name; its UID is its name.
func pod(name, node string, addresses ...string) Pod {
	ns, short, _ := strings.Cut(name, "/")
	p := Pod{Namespace: ns, Name: short, UID: "uid-" + short, Node: node, Ready: true,
		Controller: Controller{"ReplicaSet", "rs", "uid-rs"}}
	for _, a := range addresses {
		p.Addresses = append(p.Addresses, netip.MustParseAddr(a))
	}
	return p
}

func with(p Pod, change func(*Pod)) Pod {
	change(&p)
	return p
}

func alone(p *Pod) { p.Controller = Controller{} }

func TestDecide(t *testing.T) {
	both := []Block{second, first}
	held := first
	held.Held = "the static address 10.64.0.50 of mail/postfix-0"
	for _, c := range []struct {
		name   string
		blocks []Block
		pods   []Pod
		bare   bool
		lines  []string
		note   string
		err    string
	}{
		{name: "nothing"},
		{name: "blocks without pods", blocks: both, lines: []string{
			"release block 10.64.0.32/27,fd64::20/123 of pool default",
			"release block 10.64.0.64/27,fd64::40/123 of pool default"}},
		{name: "pods by their blocks and addresses", blocks: both,
			pods: []Pod{pod("b/z", "n1", "10.64.0.65"), pod("b/y", "n2", "10.64.0.40"), pod("a/x", "n1", "10.64.0.9"),
				pod("a/w", "n1", "fd64::21", "10.64.0.34")},
			lines: []string{"replace pod a/w (10.64.0.34 on n1) of ReplicaSet rs",
				"replace pod b/y (10.64.0.40 on n2) of ReplicaSet rs",
				"release block 10.64.0.32/27,fd64::20/123 of pool default",
				"replace pod b/z (10.64.0.65 on n1) of ReplicaSet rs",
				"release block 10.64.0.64/27,fd64::40/123 of pool default"}},
		{name: "a pod in two blocks comes with the first", blocks: both,
			pods: []Pod{pod("a/x", "n", "10.64.0.64", "fd64::3f")},
			lines: []string{"replace pod a/x (fd64::3f on n) of ReplicaSet rs",
				"release block 10.64.0.32/27,fd64::20/123 of pool default",
				"release block 10.64.0.64/27,fd64::40/123 of pool default"}},
		{name: "who has no address of its own, or none any more", blocks: []Block{first},
			pods: []Pod{with(pod("a/h", "n", "10.64.0.33"), func(p *Pod) { p.HostNetwork = true }),
				with(pod("a/s", "n", "10.64.0.33"), func(p *Pod) { p.Succeeded = true }),
				with(pod("a/f", "n", "10.64.0.33"), func(p *Pod) { p.Failed = true })},
			lines: []string{"release block 10.64.0.32/27,fd64::20/123 of pool default"}},
		{name: "a pod without a controller", blocks: []Block{first},
			pods: []Pod{pod("a/x", "n", "10.64.0.33"), with(pod("a/tool", "n", "10.64.0.34"), alone)},
			err:  "they would not come back: pod a/tool (10.64.0.34 on n). Start them anew yourself, or give --bare"},
		{name: "and with --bare", blocks: []Block{first}, bare: true,
			pods: []Pod{with(pod("a/tool", "n", "10.64.0.34"), alone)},
			lines: []string{"remove pod a/tool (10.64.0.34 on n), which has no controller",
				"release block 10.64.0.32/27,fd64::20/123 of pool default"}},
		{name: "a static pod", blocks: []Block{first}, bare: true,
			pods: []Pod{with(pod("a/dns-n", "n", "10.64.0.34"), func(p *Pod) { p.Static = true })},
			err:  "pod a/dns-n (10.64.0.34 on n). Move such a pod's file out of its kubelet's directory"},
		{name: "a block with addresses of the mesh's own", blocks: []Block{held, second},
			pods:  []Pod{pod("mail/postfix-0", "n", "10.64.0.50"), with(pod("a/tool", "n", "10.64.0.34"), alone)},
			lines: []string{"release block 10.64.0.64/27,fd64::40/123 of pool default"},
			note:  "it holds the static address 10.64.0.50 of mail/postfix-0; take that away"},
	} {
		p, err := Decide(c.blocks, c.pods, c.bare)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: error %v, want %q", c.name, err, c.err)
		}
		if err != nil {
			continue
		}
		if !slices.Equal(p.Lines(), c.lines) {
			t.Errorf("%s: it does\n%s\nwant\n%s", c.name, strings.Join(p.Lines(), "\n"), strings.Join(c.lines, "\n"))
		}
		if text := strings.Join(p.Notes, " "); !strings.Contains(text, c.note) || (text == "") != (c.note == "") {
			t.Errorf("%s: it notes %q, want %q", c.name, text, c.note)
		}
	}
}

// All that stands in the way is told at once, and no more of it than can be read.
func TestDecideTellsAll(t *testing.T) {
	pods := []Pod{with(pod("a/static", "n", "10.64.0.34"), func(p *Pod) { p.Static = true })}
	for i := range mostNamed + 2 {
		pods = append(pods, with(pod(fmt.Sprintf("a/p%02d", i), "n", "10.64.0.35"), alone))
	}
	_, err := Decide([]Block{first}, pods, false)
	for _, want := range []string{"a/static", "a/p00", "a/p19", " and 2 more"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not name %s", err, want)
		}
	}
	if strings.Contains(err.Error(), "a/p20") {
		t.Errorf("too many are named: %v", err)
	}
}

func TestProgress(t *testing.T) {
	old := pod("a/web-0", "n1", "10.64.0.33")
	next := with(pod("a/web-1", "n2", "10.65.0.1"), func(p *Pod) { p.UID = "new" })
	ready := func(is bool) func(*Pod) { return func(p *Pod) { p.Ready = is } }
	ended := func(p *Pod) { p.Ready, p.Succeeded = false, true }
	for _, c := range []struct {
		name  string
		kind  string
		now   []Pod
		gone  *Pod // as it was last
		done  bool
		lacks string
	}{
		{name: "the old one is there", now: []Pod{old, next}, lacks: "it was evicted, and has not ended"},
		{name: "none has come", gone: &old, lacks: "it has ended, and ReplicaSet rs has started no other pod"},
		{name: "one that was there before", gone: &old, now: []Pod{pod("a/before", "n", "10.65.0.2")},
			lacks: "it has ended, and ReplicaSet rs has started no other pod"},
		{name: "one that is not ready", gone: &old, now: []Pod{with(next, ready(false))},
			lacks: "it has ended, and pod a/web-1 of ReplicaSet rs is not ready"},
		{name: "one that is ready", gone: &old, now: []Pod{next}, done: true},
		{name: "one of another controller", gone: &old, now: []Pod{with(next, func(p *Pod) { p.Controller.UID = "x" })},
			lacks: "no other pod"},
		{name: "one of another namespace that claims the controller", gone: &old,
			now: []Pod{with(next, func(p *Pod) { p.Namespace = "evil" })}, lacks: "no other pod"},
		{name: "one that ended, of a ReplicaSet", gone: &old, now: []Pod{with(next, ended)}, lacks: "is not ready"},
		{name: "the next of a StatefulSet has the same name", kind: statefulSet, gone: &old,
			now: []Pod{with(next, func(p *Pod) { p.Name = "web-0" })}, done: true},
		{name: "another of a StatefulSet", kind: statefulSet, gone: &old, now: []Pod{next}, lacks: "no other pod"},
		{name: "the next of a DaemonSet is on the same node", kind: daemonSet, gone: &old,
			now: []Pod{with(next, func(p *Pod) { p.Node = "n1" })}, done: true},
		{name: "another of a DaemonSet", kind: daemonSet, gone: &old, now: []Pod{next}, lacks: "no other pod"},
		{name: "the next of a Job has ended already", kind: job, gone: &old, now: []Pod{with(next, ended)}, done: true},
		{name: "a Job whose pod has succeeded needs no other", kind: job, gone: ptr(with(old, ended)), done: true},
		{name: "a Deployment's whose pod has ended well does", gone: ptr(with(old, ended)), lacks: "no other pod"},
	} {
		kind := func(p Pod) Pod {
			if c.kind != "" {
				p.Controller.Kind = c.kind
			}
			return p
		}
		v := viewOf(Plan{Steps: []Step{{Block: first, Pods: []Pod{kind(old)}}}})
		for _, p := range c.now {
			v.set(kind(p))
		}
		if c.gone != nil {
			v.gone(kind(*c.gone))
		}
		at := v.progress(kind(old), map[string]bool{"uid-before": true})
		if at.done != c.done || !at.done && !strings.Contains(at.lacks(kind(old)), c.lacks) {
			t.Errorf("%s: done %t, it lacks %q", c.name, at.done, at.lacks(kind(old)))
		}
	}
}

func ptr[T any](v T) *T { return &v }

// A view keeps the pods that matter, and no others.
func TestViewKeepsLittle(t *testing.T) {
	old := pod("a/x", "n", "10.64.0.33")
	v := viewOf(Plan{Steps: []Step{{Block: first, Pods: []Pod{old}}}})
	v.set(with(pod("a/other", "n", "10.64.0.34"), func(p *Pod) { p.Controller.UID = "other" }))
	v.set(with(pod("a/bare", "n", "10.64.0.35"), alone))
	v.list(map[string]Pod{old.UID: old})
	if len(v.now) != 1 || len(v.of(old.Controller)) != 1 {
		t.Errorf("it keeps %v", v.now)
	}
	v.list(nil)
	if len(v.now) != 0 || len(v.ended) != 1 {
		t.Errorf("after a list without it: %v, %v", v.now, v.ended)
	}
}

func TestTextOfOthers(t *testing.T) {
	if got := shown("no \x1b[2Jright\r\nhere\u202e\u009b"); got != "no [2Jright here" {
		t.Errorf("%q", got)
	}
	if got := []rune(shown(strings.Repeat("ä", 1000))); len(got) != mostText+1 {
		t.Errorf("%d characters", len(got))
	}
	if got := word("web; rm -rf $(x)"); got != "webrm-rfx" {
		t.Errorf("%q", got)
	}
}
