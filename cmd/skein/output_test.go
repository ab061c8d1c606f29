package main

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip/candidate"
)

func TestWrap(t *testing.T) {
	long := strings.Repeat("word ", 50)
	for name, s := range map[string]string{
		"short": "advice     nothing to say", "long": "advice     " + long, "exact": strings.Repeat("x", tableWidth),
		"one word": "advice     " + strings.Repeat("x", 2*tableWidth), "umlauts": "advice     " +
			strings.Repeat("ä ö ü ", 60),
	} {
		got := wrap(s, 11)
		if words := strings.Fields(got); strings.Join(words, " ") != strings.Join(strings.Fields(s), " ") {
			t.Errorf("%s: words were lost:\n%s", name, got)
		}
		for i, line := range strings.Split(got, "\n") {
			if utf8.RuneCountInString(line) > tableWidth && strings.Contains(strings.TrimSpace(line)[11:], " ") {
				t.Errorf("%s: line %d has more than %d columns:\n%s", name, i, tableWidth, got)
			}
			if i > 0 && !strings.HasPrefix(line, strings.Repeat(" ", 11)) {
				t.Errorf("%s: line %d is not indented:\n%s", name, i, got)
			}
		}
	}
}

// The pods' networks of another CNI have a column where there are any.
func TestNodesWithPodCIDRs(t *testing.T) {
	nodes := []*skeinv1.NodeView{{Node: &skeinv1.Node{Id: "b33ad742981917ca", Name: "home1", Ipv4: "10.4.0.5"},
		Path: "direct", Alive: true}}
	shown := func() string {
		var b bytes.Buffer
		printNodes(&b, nodes)
		return b.String()
	}
	if s := shown(); strings.Contains(s, "POD") {
		t.Errorf("a column of nothing:\n%s", s)
	}
	nodes[0].Node.PodCidrs = &skeinv1.PodCidrs{KubernetesNode: "home1", Cidrs: []string{"10.244.1.0/24",
		"fd44:0:0:1::/64"}}
	nodes = append(nodes, &skeinv1.NodeView{Node: &skeinv1.Node{Id: "7ef4fee4c02da850", Name: "dc1", Ipv4: "10.4.0.1"},
		Path: "self", Self: true})
	goldenText(t, "nodes-pod-cidrs", shown())
}

// Nodes of one site stand together; those without one, or of whom nothing has been heard, come last.
func TestNodesBySite(t *testing.T) {
	node := func(name, site string) *skeinv1.NodeView {
		n := &skeinv1.NodeView{
			Node: &skeinv1.Node{Id: "b33ad742981917ca", Name: name, Ipv4: "10.4.0.5"}, Record: &skeinv1.Record{Site: site},
			Path: "direct", Alive: true,
		}
		if site == "?" {
			n.Record = nil
		}
		return n
	}
	var b bytes.Buffer
	printNodes(&b, []*skeinv1.NodeView{
		node("a1", "home"), node("b1", ""), node("c1", "dc"), node("d1", "?"), node("e1", "home"), node("f1", "dc"),
	})
	goldenText(t, "nodes-by-site", strings.TrimSuffix(b.String(), "\n"))
}

func TestEventLinesFitAndHideKeys(t *testing.T) {
	key := bytes.Repeat([]byte{0xab}, 32)
	node := &skeinv1.Node{Id: "b33ad742981917ca", Name: "home1", IdentityKey: key, WireguardKey: key, Ipv4: "10.4.0.5",
		Ipv6: "fd65:229d:4b83:0:b33a:d742:9819:17ca", Labels: map[string]string{"rack": "7"}}
	for _, c := range []struct {
		event *skeinv1.Event
		want  string
	}{
		{&skeinv1.Event{Body: &skeinv1.Event_NodeAdmitted{NodeAdmitted: &skeinv1.NodeAdmitted{Node: node}}},
			"node_admitted     id=b33ad742981917ca name=home1 ipv4=10.4.0.5"},
		{&skeinv1.Event{Body: &skeinv1.Event_CommandAnswered{CommandAnswered: &skeinv1.CommandAnswered{
			Answer: &skeinv1.Answer{RequestId: "536eec87c1fcabbc", Node: node}}}}, "command_answered  request 536eec87"},
		{&skeinv1.Event{Body: &skeinv1.Event_ServerPromoted{ServerPromoted: &skeinv1.ServerPromoted{NodeId: node.Id}}},
			"server_promoted   node_id=home1"},
		{&skeinv1.Event{Body: &skeinv1.Event_PodCidrsSet{PodCidrsSet: &skeinv1.PodCidrsSet{NodeId: node.Id,
			PodCidrs: &skeinv1.PodCidrs{KubernetesNode: "n1", Cidrs: []string{"10.244.1.0/24"}}}}},
			"pod_cidrs_set     node_id=home1"},
		{&skeinv1.Event{}, "(unknown to this version)"},
		{&skeinv1.Event{Issuer: node.Id,
			Body: &skeinv1.Event_ServerPromoted{ServerPromoted: &skeinv1.ServerPromoted{NodeId: node.Id}}},
			"server_promoted   node_id=home1  by home1"},
		{&skeinv1.Event{Issuer: node.Id, RequestId: "536eec87c1fcabbc",
			Body: &skeinv1.Event_CommandAnswered{CommandAnswered: &skeinv1.CommandAnswered{
				Answer: &skeinv1.Answer{RequestId: "0"}}}},
			"command_answered  request 536eec87  by home1"},
		{&skeinv1.Event{Issuer: node.Id, Body: &skeinv1.Event_NodeRevoked{NodeRevoked: &skeinv1.NodeRevoked{NodeId: node.Id,
			Reason: strings.Repeat("long ", 40)}}}, "…  by home1"},
	} {
		got := eventLine(c.event, strings.NewReplacer(node.Id, node.Name))
		if !strings.Contains(got, c.want) {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
		if utf8.RuneCountInString(got) > tableWidth || strings.Contains(got, "q6ur") {
			t.Errorf("too wide, or shows a key: %s", got)
		}
	}
}

// What -o json prints can be read by a program that does not know protobuf: every field is there, also the
// empty ones, and the same message gives the same bytes.
func TestJSONIsStable(t *testing.T) {
	var first string
	for range 20 {
		var b bytes.Buffer
		if err := printProto(&b, &skeinv1.StatusResponse{Name: "dc1", Index: 7,
			NatType: skeinv1.NatType_NAT_TYPE_SYMMETRIC}); err != nil {
			t.Fatal(err)
		}
		if first == "" {
			first = b.String()
		}
		if b.String() != first {
			t.Fatalf("another form of the same message:\n%s\n%s", first, b.String())
		}
	}
	var got map[string]any
	if err := json.Unmarshal([]byte(first), &got); err != nil {
		t.Fatal(err)
	}
	for k, want := range map[string]any{"name": "dc1", "index": "7", "natType": "NAT_TYPE_SYMMETRIC", "leaderName": "",
		"voter": false} {
		if got[k] != want {
			t.Errorf("%s is %v, want %v", k, got[k], want)
		}
	}
	if p, ok := got["problems"].([]any); !ok || len(p) != 0 {
		t.Errorf("problems is %v, want an empty list", got["problems"])
	}
}

func TestWordsForNumbers(t *testing.T) {
	for have, want := range map[string]string{
		size(0): "0B", size(1023): "1023B", size(1024): "1.0KiB", size(1536): "1.5KiB", size(5 << 30): "5.0GiB",
		size(1<<64 - 1): "16.0EiB",
		short(0):        "0s", short(1500 * time.Microsecond): "1.5ms", short(12 * time.Second): "12s",
		short(61 * time.Second): "1m1s", short(59*time.Minute + 59*time.Second): "59m59s",
		short(90 * time.Minute): "1h30m", short(47*time.Hour + 59*time.Minute): "47h59m", short(49 * time.Hour): "2d",
		short(-time.Minute): "-1m0s",
		rtt(0):              "-", rtt(12_345_678): "12.3ms", since(0): "never",
		candidate.NATName(skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE): "port-restricted-cone",
		labelsText(nil): "-", labelsText(map[string]string{"c": "3", "a": "1", "b": "2", "d": "4"}): "a=1 b=2 c=3 d=4",
	} {
		if have != want {
			t.Errorf("have %q, want %q", have, want)
		}
	}
}

// Every look at an event shows the same line.
func TestEventLinesAreStable(t *testing.T) {
	e := &skeinv1.Event{Body: &skeinv1.Event_NodeChanged{NodeChanged: &skeinv1.NodeChanged{Node: &skeinv1.Node{Name: "a",
		Labels: map[string]string{"d": "4", "b": "2", "a": "1", "c": "3"}}}}}
	for range 20 {
		if have := eventLine(e, strings.NewReplacer()); !strings.HasSuffix(have,
			"labels.a=1 labels.b=2 labels.c=3 labels.d=4") {
			t.Fatal(have)
		}
	}
}

func TestPeersFitIntoTheWidth(t *testing.T) {
	var b bytes.Buffer
	printPeers(&b, []*skeinv1.PeerView{{
		Name: "web-frontend-17", Path: "direct", Alive: true, Endpoint: "[2001:db8:1:2:3:4:5:6]:51820", RttNanos: 123456789,
		RxBytes: 900 << 30, TxBytes: 900 << 30, Rule: "port-restricted-symmetric", Reason: strings.Repeat("why ", 40),
	}})
	for line := range strings.Lines(b.String()) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(line, "\n")); n > tableWidth {
			t.Errorf("%d columns: %s", n, line)
		}
	}
}

func TestTablesFit(t *testing.T) {
	long := strings.Repeat("n", 63)
	for name, rows := range map[string][][]string{
		"short names": {{"office", "office1", "8e878f4fdb9830f5", "10.4.0.3", "port-restricted-cone", "leader+relay",
			"direct", "yes", "2.9"}},
		"a long name": {{"office", long, "8e878f4fdb9830f5", "10.4.255.254", "port-restricted-cone", "leader+relay", "direct",
			"yes", "12.345"}},
		"two long": {{long, long, "8e878f4fdb9830f5", "10.4.255.254", "port-restricted-cone", "leader+relay", "direct",
			"yes", "12.345"}},
	} {
		t.Run(name, func(t *testing.T) {
			tab := table{head: []string{"SITE", "NAME", "ID", "IPV4", "NAT", "ROLE", "PATH", "ALIVE", "RECORD"}, rows: rows}
			var out strings.Builder
			tab.print(&out)
			for l := range strings.Lines(out.String()) {
				if n := utf8.RuneCountInString(strings.TrimSuffix(l, "\n")); n > tableWidth {
					t.Errorf("%d characters: %s", n, l)
				}
			}
			for _, whole := range []string{"8e878f4fdb9830f5", "10.4.", "direct", "yes"} {
				if !strings.Contains(out.String(), whole) {
					t.Errorf("%q is cut:\n%s", whole, out.String())
				}
			}
		})
	}
}

// Servers that do not vote yet are named with the reason, uncut; those that vote are not.
func TestStatusNamesServersWithoutAVote(t *testing.T) {
	why := "leader dc1 lets it vote when it has kept up with the log for some seconds; skein status there tells how far " +
		"it is"
	var b bytes.Buffer
	printStatus(&b, &skeinv1.StatusResponse{Name: "dc1", Servers: []*skeinv1.ServerStatus{{Name: "dc1", Voter: true},
		{Name: "dc2", Waiting: why}}})
	if want := "\nserver     dc2 does not vote yet: " + why + "\n"; !strings.Contains(b.String(), want) ||
		strings.Contains(b.String(), "dc1 does not") {
		t.Errorf("status does not have the line %q:\n%s", want, b.String())
	}
}
