package graph

import (
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/skeinmesh/skein/internal/golden"
)

const ms = time.Millisecond

// five is a mesh with every kind of path and role, as home1 sees it.
func five() *Graph {
	sessions := []Session{{To: 0, RTT: 1200 * time.Microsecond}}
	return &Graph{Self: 2, Index: 34, Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), Nodes: []Node{
		{Name: "dc1", Address: "10.4.0.1", NAT: "no NAT", Site: "dc", SiteKnown: true,
			LogLeader: true, Voter: true, Server: true, Relays: true, Wishes: true,
			State: Direct, RTT: 2400 * time.Microsecond, Endpoint: "198.18.1.11:51820"},
		{Name: "cloud1", Address: "10.4.0.5", NAT: "symmetric", Site: "cloud", SiteKnown: true,
			State: Relay, Via: "dc1", UDP: true, RTT: 14300 * time.Microsecond,
			Endpoint: "198.18.1.11:3478", Sessions: sessions},
		{Name: "home1", Address: "10.4.0.4", NAT: "port-restricted-cone", Site: "home", SiteKnown: true,
			State: Self, Sessions: sessions},
		{Name: "home2", Address: "10.4.0.6", NAT: "port-restricted-cone", Site: "home", SiteKnown: true, Admin: true,
			State: Direct, RTT: 400 * time.Microsecond,
			Endpoint: "192.168.2.15:51820", Sessions: sessions},
		{Name: "van1", Address: "10.4.0.7", SiteKnown: true, State: Down, Unseen: true, Draining: true},
	}}
}

// many is a mesh of so many nodes in ten sites, with two relays, as the first node sees it.
func many(count int) *Graph {
	g := &Graph{Index: 1234, Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	for i := range count {
		n := Node{
			Name: fmt.Sprintf("worker-%03d.example", i), Address: fmt.Sprintf("10.4.%d.%d", i/250, i%250+1),
			NAT: "full-cone", Site: fmt.Sprintf("region-%d", i%10), SiteKnown: true,
			State: Direct, RTT: time.Duration(1+i%10*7+i%3) * ms, Endpoint: fmt.Sprintf("198.51.100.%d:51820", i%250),
		}
		for k := 1; k <= 2 && count > 2; k++ {
			n.Sessions = append(n.Sessions, Session{To: k, RTT: time.Duration(k) * ms})
		}
		switch {
		case i == 0:
			n.State, n.Endpoint, n.RTT = Self, "", 0
		case i%17 == 5:
			n.State, n.Via, n.Endpoint = Relay, g.Nodes[1+i%2].Name, ""
		case i%59 == 7:
			n.State, n.RTT, n.Unseen = Down, 0, true
		}
		switch i {
		case 1, 2:
			n.Relays, n.Voter, n.Server, n.LogLeader, n.NAT = true, true, true, i == 1, "no NAT"
			n.Sessions = []Session{{To: 3 - i, RTT: ms}}
		case 3, 14:
			n.Wishes, n.Draining = true, i == 14
		}
		g.Nodes = append(g.Nodes, n)
	}
	return g
}

// led is a mesh in which sites speak through leaders, as home3 sees it, which does not lead.
func led() *Graph {
	g := &Graph{Self: 6, Index: 34, Time: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)}
	add := func(name, site string, leads Lead, change func(*Node)) {
		n := Node{
			Name: name, Address: fmt.Sprintf("10.4.0.%d", len(g.Nodes)+1), NAT: "no NAT", Site: site, SiteKnown: true,
			Leads: leads, State: Hop, Via: "home1",
		}
		change(&n)
		g.Nodes = append(g.Nodes, n)
	}
	same := func(*Node) {}
	inside := func(n *Node) {
		n.State, n.Via, n.RTT, n.Endpoint = Direct, "", 400*time.Microsecond, "192.168.2.15:51820"
	}
	add("dc1", "dc", Leader, func(n *Node) { n.LogLeader, n.Server, n.Relays = true, true, true })
	add("dc2", "dc", Leader, same)
	add("dc3", "dc", NotLeading, func(n *Node) { n.State, n.Via = Down, "home2" }) // which is dead
	add("cloud1", "cloud", Elected, same)
	add("home1", "home", Leader, func(n *Node) { inside(n); n.Wishes = true })
	add("home2", "home", Reserve, func(n *Node) { n.State, n.Via, n.Unseen = Down, "", true })
	add("home3", "home", NotLeading, func(n *Node) { n.State, n.Via = Self, "" })
	add("van1", "van", NotLeading, func(n *Node) { n.State, n.Via, n.NoLeader, n.Wishes = Down, "", true, true })
	return g
}

// manyLed is many in which the nodes of other sites are reached by way of two leaders.
func manyLed(count int) *Graph {
	g := many(count)
	for i := range g.Nodes {
		n := &g.Nodes[i]
		switch i / 10 {
		case 0, 1:
			n.Leads = Leader
		case 2:
			n.Leads = Reserve
		case 3:
			n.Leads = Elected
		}
		if n.Site != g.Nodes[g.Self].Site && n.State != Down {
			n.State, n.Via, n.Endpoint, n.RTT = Hop, g.Nodes[10*(1+i/10%2)].Name, "", 0
		}
	}
	return g
}

// past is a moment of which not all is known.
func past() *Graph {
	g := five()
	g.Past = true
	g.Notes = []string{"Members are those of the log.", "The path to van1 is not known: the journal no longer has it."}
	for i := range g.Nodes {
		n := &g.Nodes[i]
		n.RTT, n.Sessions, n.Unseen, n.LogLeader, n.Relays, n.Wishes = 0, nil, false, false, false, false
	}
	g.Nodes[4].State, g.Nodes[4].SiteKnown = Unknown, false
	return g
}

func meshes() map[string]*Graph {
	return map[string]*Graph{"five": five(), "many": many(200), "past": past(), "led": led(), "many-led": manyLed(60)}
}

func TestPictures(t *testing.T) {
	for name, g := range meshes() {
		golden.Lines(t, name+".svg", strings.Split(strings.TrimSuffix(g.SVG(), "\n"), "\n"))
		golden.Lines(t, name+".dot", strings.Split(strings.TrimSuffix(g.DOT(), "\n"), "\n"))
		svg, dot := g.SVG(), g.DOT()
		for range 5 {
			if g.SVG() != svg || g.DOT() != dot {
				t.Fatalf("%s: the same graph gives another picture", name)
			}
		}
	}
}

// element is a start or end of XML, or a text.
func elements(t *testing.T, svg string) (tags map[string]int, texts []string) {
	t.Helper()
	tags = map[string]int{}
	d := xml.NewDecoder(strings.NewReader(svg))
	d.Strict = true
	for {
		tok, err := d.Token()
		if errors.Is(err, io.EOF) {
			return tags, texts
		}
		if err != nil {
			t.Fatalf("the picture is not XML: %v", err)
		}
		switch tok := tok.(type) {
		case xml.StartElement:
			tags[tok.Name.Local]++
			for _, a := range tok.Attr {
				if strings.HasPrefix(a.Name.Local, "on") || a.Name.Local == "href" {
					t.Errorf("<%s> has the attribute %s=%q", tok.Name.Local, a.Name.Local, a.Value)
				}
			}
		case xml.CharData:
			texts = append(texts, string(tok))
		case xml.Comment, xml.Directive, xml.ProcInst:
			t.Errorf("a token of another kind: %T", tok)
		}
	}
}

// hostile are names that would like to be more than names.
var hostile = []string{
	`"><script>alert(1)</script>`, `</text></svg><svg onload="x">`, "a\nb\r\tc\x00\x1b[31m", `x"]; evil [label="y`,
	`back\slash\`, `\N \G \l \"`, "&lt;b&gt; &amp; &#60;", "]]><!-- -->", strings.Repeat("long", 75),
	strings.Repeat("宽", 100), strings.Repeat("e\u0301", 150), "\u202egnp.exe\u2066", "\xff\xfe not UTF-8",
	"\ufffe\uffff\ufdd0", "<table><tr><td>x", "-->",
	"'single' `back`", "}", "/* c */ // d", "\u2028line\u2029",
}

// TestHostileNames: no name changes what a picture consists of, wherever it stands.
func TestHostileNames(t *testing.T) {
	for _, mesh := range []func() *Graph{five, past, led, func() *Graph { return many(60) }} {
		plain := mesh()
		for _, bad := range append(hostile, strings.Join(hostile, "")) {
			g := mesh()
			for i := range g.Nodes {
				n := &g.Nodes[i]
				n.Name, n.Address, n.NAT = fmt.Sprint(bad, n.Name), n.Address+bad, n.NAT+bad
				if n.Site != "" {
					n.Site = bad + n.Site
				}
				if n.Endpoint != "" {
					n.Endpoint += bad
				}
				if n.Via != "" {
					n.Via = bad + n.Via
				}
			}
			for i := range g.Notes {
				g.Notes[i] += " " + bad
			}
			svg := g.SVG()
			tags, texts := elements(t, svg)
			want, _ := elements(t, plain.SVG())
			delete(tags, "text") // a long note has more lines
			delete(want, "text")
			delete(want, "g")
			for tag, n := range want {
				if tags[tag] != n {
					t.Errorf("with %.60q: %d <%s>, without %d", bad, tags[tag], tag, n)
				}
			}
			for tag := range tags {
				if want[tag] == 0 && tag != "g" {
					t.Errorf("with %.60q: a new element <%s>", bad, tag)
				}
			}
			for _, s := range texts {
				if len(s) > 2000 && !strings.Contains(s, "font:") {
					t.Errorf("with %.60q: a text of %d bytes", bad, len(s))
				}
			}
			if a, b := statements(t, plain.DOT()), statements(t, g.DOT()); a != b {
				t.Errorf("with %.60q: another DOT:\n%s\nwithout:\n%s", bad, b, a)
			}
			if strings.ContainsFunc(svg+g.DOT(), func(r rune) bool { return r != '\n' && !unicode.IsPrint(r) }) {
				t.Errorf("with %.60q: control characters are left", bad)
			}
		}
	}
}

// statements is DOT with every quoted string replaced by one mark, read as Graphviz' scanner reads it: a
// backslash takes the next character with it only if that is a quote or a backslash.
func statements(t *testing.T, dot string) string {
	t.Helper()
	var out strings.Builder
	in := false
	for i := 0; i < len(dot); i++ {
		switch c := dot[i]; {
		case in && c == '\\' && i+1 < len(dot) && (dot[i+1] == '"' || dot[i+1] == '\\'):
			i++
		case c == '"':
			in = !in
			if !in {
				out.WriteByte('Q')
			}
		case in && c == '\n':
			t.Fatal("a line break within a string")
		case !in:
			out.WriteByte(c)
		}
	}
	if in {
		t.Fatal("a string does not end")
	}
	return out.String()
}

// TestGraphvizReadsIt runs the real program where there is one.
func TestGraphvizReadsIt(t *testing.T) {
	dot, err := exec.LookPath("dot")
	if err != nil {
		t.Skip("Graphviz is not installed")
	}
	all := meshes()
	for i, bad := range hostile {
		g := five()
		for k := range g.Nodes {
			g.Nodes[k].Name, g.Nodes[k].Site = bad, bad
		}
		all[fmt.Sprint("hostile", i)] = g
	}
	for name, g := range all {
		cmd := exec.Command(dot, "-Tplain")
		cmd.Stdin = strings.NewReader(g.DOT())
		out, err := cmd.CombinedOutput()
		if err != nil || strings.Contains(string(out), "Warning") || strings.Contains(string(out), "Error") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
		if n := strings.Count("\n"+string(out), "\nnode "); n != len(g.Nodes) {
			t.Errorf("%s: Graphviz sees %d nodes of %d", name, n, len(g.Nodes))
		}
	}
}

var (
	viewBoxRE = regexp.MustCompile(`viewBox="0 0 (\d+) (\d+)"`)
	rectRE    = regexp.MustCompile(`<rect class="(?:card|site)[^>]*? x="(\d+)" y="(\d+)" width="(\d+)" height="(\d+)"`)
)

// TestNothingOverlaps: cards and chips lie within the picture and beside each other, whatever the size of the mesh.
func TestNothingOverlaps(t *testing.T) {
	graphs := []*Graph{five(), past(), led(), manyLed(60)}
	for _, n := range []int{1, 2, 3, 7, detailedMost, detailedMost + 1, 60, 200, 1000} {
		graphs = append(graphs, many(n))
	}
	for _, g := range graphs {
		svg := g.SVG()
		var w, h int
		if m := viewBoxRE.FindStringSubmatch(svg); m == nil {
			t.Fatal("there is no viewBox")
		} else if _, err := fmt.Sscan(m[1], &w); err != nil {
			t.Fatal(err)
		} else if _, err := fmt.Sscan(m[2], &h); err != nil {
			t.Fatal(err)
		}
		type rect struct{ x, y, w, h int }
		var cards []rect
		for _, m := range rectRE.FindAllStringSubmatch(svg, -1) {
			var r rect
			if _, err := fmt.Sscan(m[1], &r.x); err != nil {
				t.Fatal(err)
			}
			fmt.Sscan(m[2]+" "+m[3]+" "+m[4], &r.y, &r.w, &r.h)
			if r.x < 0 || r.y < 0 || r.x+r.w > w || r.y+r.h > h {
				t.Errorf("%d nodes: %+v lies outside of %dx%d", len(g.Nodes), r, w, h)
			}
			if strings.Contains(m[0], `class="card`) {
				cards = append(cards, r)
			}
		}
		if least := len(g.Nodes); len(cards) < least {
			t.Errorf("%d cards for %d nodes", len(cards), least)
		}
		for i, a := range cards {
			for _, b := range cards[:i] {
				if a.x < b.x+b.w && b.x < a.x+a.w && a.y < b.y+b.h && b.y < a.y+a.h {
					t.Fatalf("%d nodes: %+v covers %+v", len(g.Nodes), a, b)
				}
			}
		}
	}
}

// TestEveryPathIsLabelled: a small mesh has a labelled line for every peer; a large one a line for each site and
// state, whose numbers add up to all peers.
func TestEveryPathIsLabelled(t *testing.T) {
	svg := five().SVG()
	for _, want := range []string{
		"direct 2.4 ms", "relay dc1 (udp) 14.3 ms", "direct 0.4 ms", ">down<", "198.18.1.11:51820",
		"not seen by gossip", "log leader, relay, leader wish", "site home", "no site", "dc1 1.2 ms",
	} {
		if !strings.Contains(svg, want) {
			t.Errorf("the picture of five does not have %q", want)
		}
	}
	g := many(200)
	sum := 0
	for _, s := range g.sites() {
		for _, b := range g.bundles(s.nodes) {
			sum += b.count
			inSVG := strings.Contains(g.SVG(), ">"+xmlText(b.label())+"<")
			if !inSVG || !strings.Contains(g.DOT(), dotText(b.label(), s.title())) {
				t.Errorf("no line says %q", b.label())
			}
		}
	}
	if sum != 199 {
		t.Errorf("the lines stand for %d peers", sum)
	}
	if n := strings.Count(g.SVG(), `class="w `); n > 40 {
		t.Errorf("%d lines for ten sites", n)
	}
}

// TestLeadersAndHops: the picture says who leads each site and by which leader a node is reached; a hop is not a path
// that is down, and the legend explains only what is there.
func TestLeadersAndHops(t *testing.T) {
	svg, dot := led().SVG(), led().DOT()
	for _, want := range []string{
		"hop by home1", "site leader, log leader, relay", "reserve leader", "elected leader", "down, hop by home2",
		"down, no leader",
		"site leader · leader wish",
	} {
		if !strings.Contains(svg, want) || !strings.Contains(dot, want) {
			t.Errorf("a picture does not say %q", want)
		}
	}
	for class, want := range map[string]int{ // one more each is in the legend
		"w hop": 4, "w down": 4, "w direct": 2, "fhop": 4, "l lleader": 4, "l": 2, "l lelected": 2,
	} {
		if n := strings.Count(svg, `<path class="`+class+`"`); n != want {
			t.Errorf("%d signs of class %q, want %d", n, class, want)
		}
	}
	if n := strings.Count(dot, `label="hop by home1", color="#8957e5", style=dashed`); n != 3 {
		t.Errorf("DOT has %d hops", n)
	}
	large := manyLed(60)
	svg, dot = large.SVG(), large.DOT()
	for _, want := range []string{
		">6 hop by worker-010.ex… +1<", ">leads its site<", ">reserve (backup) leader of its site<",
	} {
		if !strings.Contains(svg, want) {
			t.Errorf("the large picture does not have %q", want)
		}
	}
	if n := strings.Count(svg, `<path class="l lleader"`); n != 2 {
		t.Errorf("%d stars on the card of the asked node and in the legend", n)
	}
	if n := strings.Count(svg, `<path class="w hop"`); n != 10 || strings.Count(dot, " hop by ") < 9 {
		t.Errorf("%d bundles of hops to nine other sites and one in the legend", n)
	}
	for _, g := range []*Graph{five(), many(60)} {
		for _, s := range []string{"passes packets on", "leads its site", `class="l`} {
			if strings.Contains(g.SVG()+g.DOT(), s) {
				t.Errorf("a mesh without leaders has %q", s)
			}
		}
	}
}

// TestStrangeMeshes: the asked node may be no member, or the only one, and there may be nobody.
func TestStrangeMeshes(t *testing.T) {
	outside := five()
	outside.Self, outside.Nodes[2].State = -1, Unknown
	alone := &Graph{Nodes: []Node{{Name: "only", SiteKnown: true, State: Self}}}
	for name, g := range map[string]*Graph{"outside": outside, "alone": alone, "nobody": {Self: -1}} {
		tags, _ := elements(t, g.SVG())
		if statements(t, g.DOT()); tags["svg"] != 1 {
			t.Errorf("%s: %v", name, tags)
		}
	}
}

func TestFold(t *testing.T) {
	for want, c := range map[string]struct {
		s    string
		most int
	}{
		"a b|c": {"a b c", 3}, "": {"", 9}, "abcd…": {"abcdefgh", 5}, "宽…|x": {"宽宽宽 x", 3},
	} {
		if got := strings.Join(fold(c.s, c.most), "|"); got != want {
			t.Errorf("%q in %d columns is %q, want %q", c.s, c.most, got, want)
		}
	}
}

// TestShow writes the pictures where somebody wants to look at them: SKEIN_PICTURES=DIR go test -run Show
func TestShow(t *testing.T) {
	dir := os.Getenv("SKEIN_PICTURES")
	if dir == "" {
		t.Skip("SKEIN_PICTURES names no directory")
	}
	all := meshes()
	all["twenty-four"], all["thousand"] = many(24), many(1000)
	for name, g := range all {
		for end, text := range map[string]string{".svg": g.SVG(), ".dot": g.DOT()} {
			if err := os.WriteFile(filepath.Join(dir, name+end), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
	}
}
