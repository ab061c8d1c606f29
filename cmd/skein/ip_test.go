package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/imports/coil"
	"github.com/skeinmesh/skein/internal/golden"
)

// fits holds a text against the width.
func fits(t *testing.T, s string) {
	t.Helper()
	for l := range strings.Lines(s) {
		if n := utf8.RuneCountInString(strings.TrimSuffix(l, "\n")); n > tableWidth {
			t.Errorf("%d columns: %s", n, l)
		}
	}
}

func goldenText(t *testing.T, name, s string) {
	t.Helper()
	golden.Lines(t, name, strings.Split(strings.TrimSuffix(s, "\n"), "\n"))
}

func TestParseAt(t *testing.T) {
	zone := time.FixedZone("CET", 3600)
	now := time.Date(2026, 11, 21, 14, 3, 5, 0, zone)
	for in, want := range map[string]time.Time{
		"10m":                         now.Add(-10 * time.Minute),
		"1h30m":                       now.Add(-90 * time.Minute),
		"2026-11-20T12:00:00Z":        time.Date(2026, 11, 20, 12, 0, 0, 0, time.UTC),
		"2026-11-20T12:00:00.5+01:00": time.Date(2026, 11, 20, 12, 0, 0, 5e8, zone),
		"2026-11-21 14:03:05":         now,
		"2026-11-21 14:03:04.25":      now.Add(-750 * time.Millisecond),
		"14:03:05":                    now,
		"14:03:06":                    now.Add(time.Second).AddDate(0, 0, -1),
		"00:00:01":                    time.Date(2026, 11, 21, 0, 0, 1, 0, zone),
		"23:59:59.9":                  time.Date(2026, 11, 20, 23, 59, 59, 9e8, zone),
	} {
		if index, ns, err := parseAt(in, now); err != nil || index != 0 || ns != want.UnixNano() {
			t.Errorf("%s: index %d, %v, error %v; want %v", in, index, time.Unix(0, ns).In(zone), err, want)
		}
	}
	if index, ns, err := parseAt("17", now); index != 17 || ns != 0 || err != nil {
		t.Errorf("17: index %d, time %d, error %v", index, ns, err)
	}
	if index, ns, err := parseAt("", now); index != 0 || ns != 0 || err != nil {
		t.Errorf("nothing: index %d, time %d, error %v", index, ns, err)
	}
	for _, in := range []string{"0", "-1", "0s", "-5m", "17.5", "14:03", "25:00:00", "2026-11-21", "1969-01-01 00:00:00",
		"18446744073709551616", " 17"} {
		if index, ns, err := parseAt(in, now); err == nil {
			t.Errorf("%q: index %d, time %d, and no error", in, index, ns)
		}
	}
}

func TestWhoIsShown(t *testing.T) {
	f := newFakeAgent(t)
	block := &skeinv1.Block{Pool: "default", Number: 3, Ipv4: "10.64.0.96/27", Ipv6: "fd01:203:405:607::60/123",
		NodeId: "b33ad742981917ca", Index: 17}
	who := &skeinv1.WhoResponse{Address: "10.64.0.101", Kind: "block", Says: "It lies in block 10.64.0.96/27 of node " +
		"home1, pool default", AtIndex: 31, AtTime: 1795269600e9, NodeId: block.NodeId, Node: "home1",
		Pool: "default", Block: block,
		EventIndex: 17, EventTime: 1795269500e9, Event: "block_allocated",
		Pod: &skeinv1.Holder{Namespace: "web", Pod: "nginx-1", ContainerId: "0123456789abcdef0123456789abcdef",
			Interface: "eth0", Since: 1795269550e9, State: "used"},
		History: []string{"2026-11-21 13:58:20  event 17: block 3 of pool default goes to b33ad742981917ca",
			"2026-11-21 13:59:10  pod web/nginx-1 gets it on b33ad742981917ca, container 0123456789ab, and this line is long " +
				"enough"}}
	f.lay(&skeinv1.WhoRequest{}, who)
	commands := [][]string{{"ip", "who", "10.64.0.101"}, {"ip", "who", "10.64.0.101", "--at", "31"},
		{"explain", "address", "10.64.0.101"}}
	f.showsGolden(t, "ip-who", commands...)
	f.lay(&skeinv1.WhoRequest{}, &skeinv1.WhoResponse{Address: "10.244.1.7", Kind: "pod-cidr", NodeId: block.NodeId,
		Node: "home1", EventIndex: 21,
		EventTime: 1795269500e9, Event: "pod_cidrs_set", Says: "It lies in 10.244.1.0/24, the pod CIDR of home1 " +
			"(Kubernetes Node node1), where another CNI gives the addresses"})
	f.showsGolden(t, "ip-who-pod-cidr", []string{"ip", "who", "10.244.1.7"})
	past := proto.CloneOf(who)
	past.Pod.Until, past.Event, past.History = 1795269580e9, "", nil
	f.lay(&skeinv1.WhoRequest{}, past)
	f.showsGolden(t, "ip-who-past", commands[2])
	past.Pod, past.PodUnknown = nil, "node home1 did not report it: no path leads to it"
	f.showsGolden(t, "ip-who-unknown", commands[0])
	past.PodUnknown = ""
	f.showsGolden(t, "ip-who-no-pod", commands[0])
	f.lay(&skeinv1.WhoRequest{}, &skeinv1.WhoResponse{Address: "192.0.2.1", Kind: "unknown",
		Says: "It is in no pool, and no node's."})
	f.showsGolden(t, "ip-who-nobody", []string{"ip", "who", "192.0.2.1"})
	if _, _, err := f.skein(t, "ip", "who", "::ffff:10.64.0.5", "--at", "2026-11-21T14:03:05Z"); err != nil {
		t.Fatal(err)
	}
	for i, want := range map[int]proto.Message{0: &skeinv1.WhoRequest{Address: "10.64.0.101"},
		1: &skeinv1.WhoRequest{Address: "10.64.0.101", AtIndex: 31},
		len(f.asked) - 1: &skeinv1.WhoRequest{Address: "10.64.0.5", AtTime: time.Date(2026, 11, 21, 14, 3, 5, 0,
			time.UTC).UnixNano()}} {
		if !proto.Equal(f.asked[i], want) {
			t.Errorf("asked %v, want %v", f.asked[i], want)
		}
	}
	out, _, err := f.skein(t, "ip", "who", "192.0.2.1", "-o", "json")
	var got map[string]any
	if err != nil || json.Unmarshal([]byte(out), &got) != nil || got["kind"] != "unknown" || got["pod"] != nil {
		t.Errorf("as JSON: %v\n%s", err, out)
	}
}

func TestPodsAreShown(t *testing.T) {
	f := newFakeAgent(t)
	at := ago(threeDays)
	pods := []*skeinv1.PodView{
		{Holder: &skeinv1.Holder{Namespace: "web", Pod: "nginx-7c5ddbdf54-x2x9k",
			ContainerId: "0123456789abcdef0123456789abcdef", Interface: "eth0", Ipv4: "10.64.0.101",
			Ipv6: "fd01:203:405:607::65", Since: at, State: "used"}, Pool: "default", HostInterface: "sk0a1b2c3d4e5f"},
		{Holder: &skeinv1.Holder{ContainerId: "", Interface: "eth0", Ipv4: "10.64.0.102", Ipv6: "fd01:203:405:607::66",
			Since: at, State: "adopted"}, Pool: "default", HostInterface: "sk0a1b2c3d4e60"},
		{Holder: &skeinv1.Holder{Namespace: "web", Pod: "gone", ContainerId: "fedcba9876543210", Ipv4: "192.0.2.67",
			Since: at, Until: at, State: "resting"}, Pool: "public"},
	}
	f.lay(&skeinv1.PodsRequest{}, &skeinv1.PodsResponse{Pods: pods})
	f.showsGolden(t, "ip-list", []string{"ip", "list"})
	f.lay(&skeinv1.PodsRequest{}, &skeinv1.PodsResponse{Pods: pods[2:]})
	f.showsGolden(t, "ip-list-ipv4", []string{"ip", "list"})
	f.lay(&skeinv1.PodsRequest{}, &skeinv1.PodsResponse{})
	f.showsGolden(t, "ip-list-empty", []string{"ip", "list"})
}

func TestAddressesAreKept(t *testing.T) {
	f := newFakeAgent(t)
	kept := proto.CloneOf(keptIP)
	kept.Since = ago(threeDays)
	free := &skeinv1.StaticAddress{Pool: "public", Ipv4: "192.0.2.70", Namespace: "ingress", Pod: "haproxy-0",
		Since: kept.Since, Index: 25}
	f.lay(&skeinv1.ReserveAddressRequest{}, &skeinv1.StaticResponse{Address: kept, Index: 21})
	f.lay(&skeinv1.ReleaseAddressRequest{}, &skeinv1.StaticResponse{Address: kept, Index: 22})
	f.lay(&skeinv1.StaticsRequest{}, &skeinv1.StaticsResponse{Addresses: []*skeinv1.StaticAddress{kept, free}})
	f.showsGolden(t, "ip-reserve", []string{"ip", "reserve", "10.64.3.5", "--for", "mail/postfix-0"},
		[]string{"ip", "reserved"}, []string{"ip", "release", "10.64.3.5", "--force"})
	for i, want := range []proto.Message{&skeinv1.ReserveAddressRequest{Address: "10.64.3.5", Namespace: "mail",
		Pod: "postfix-0"}, &skeinv1.StaticsRequest{}, &skeinv1.ReleaseAddressRequest{Address: "10.64.3.5", Force: true}} {
		if !proto.Equal(f.asked[i], want) {
			t.Errorf("asked %v, want %v", f.asked[i], want)
		}
	}
	f.lay(&skeinv1.StaticsRequest{}, &skeinv1.StaticsResponse{})
	f.showsGolden(t, "ip-reserved-empty", []string{"ip", "reserved"})
}

func TestImport(t *testing.T) {
	f, dir := newFakeAgent(t), t.TempDir()
	coilFile := string(readFile(t, "testdata/coil.yaml"))
	for name, text := range map[string]string{"bad.yaml": strings.Replace(coilFile, "index: 3", "index: 4", 1),
		"large.yaml": "#" + strings.Repeat("x", coil.MaxBytes)} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	plan := []string{"2 changes, 0 are there already", "make pool default: 10.64.0.0/16, blocks of 2^5 addresses",
		"block 10.64.0.96/27 of pool default: give it to node node1"}
	rename := []string{"--node", "node1.example.com=node1"}
	f.lay(&skeinv1.ImportRequest{}, &skeinv1.ImportResponse{Plan: plan, Changed: true, Index: 40})
	f.testImportOfEgresses(t, plan, rename)
	f.asked = nil
	f.lay(&skeinv1.ImportRequest{}, &skeinv1.ImportResponse{Plan: plan, Changed: true, Index: 40})
	f.showsGolden(t, "import", append([]string{"import", "coil", "testdata/coil.yaml", "--dry-run"}, rename...),
		append([]string{"import", "coil", "testdata/coil.yaml"}, rename...))
	f.lay(&skeinv1.ImportRequest{}, &skeinv1.ImportResponse{Plan: []string{"0 changes, 2 are there already"}, Index: 40})
	f.showsGolden(t, "import-again", append([]string{"import", "coil", "testdata/coil.yaml"}, rename...))
	want := &skeinv1.ImportPools{Pools: []*skeinv1.Pool{{Name: "default", BlockSizeBits: 5,
		Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.64.0.0/16"}}}},
		Blocks: []*skeinv1.ImportBlock{{Pool: "default", Ipv4: "10.64.0.96/27", Node: "node1"}}, DryRun: true}
	if !proto.Equal(f.asked[0], &skeinv1.ImportRequest{Import: want}) {
		t.Errorf("asked %v\nwant %v", f.asked[0], want)
	}
	if want.DryRun = false; !proto.Equal(f.asked[1], &skeinv1.ImportRequest{Import: want}) {
		t.Errorf("asked %v\nwant %v", f.asked[1], want)
	}
	asked := len(f.asked)
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"nowhere.yaml"}, "open nowhere.yaml: no such file or directory"},
		{[]string{filepath.Join(dir, "bad.yaml")}, "bad.yaml: document 2 (line 6), AddressBlock default-3: ipv4: it is " +
			"10.64.0.96/27, but block 4 of pool default is 10.64.0.128/27"},
		{[]string{filepath.Join(dir, "large.yaml")}, "large.yaml: the file has more than 16 MiB"},
		{[]string{"testdata/coil.yaml", "--node", "node1=node1"}, "coil.yaml: --node node1=node1: no block in the " +
			"file belongs to a node named node1: correct the name"},
		{[]string{"-"}, "standard input: there is no AddressPool"},
	} {
		if _, _, err := f.skein(t, append([]string{"import", "coil"}, c.args...)...); err == nil ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("skein import coil %v: %v\nwant %s", c.args, err, c.want)
		}
	}
	if len(f.asked) != asked {
		t.Error("the agent was asked with a bad file")
	}
}

// testImportOfEgresses: with gateways they are defined, once; one that is another already is told, and a dry run
// changes nothing.
func (f *fakeAgent) testImportOfEgresses(t *testing.T, plan, rename []string) {
	t.Helper()
	f.lay(&skeinv1.ImportRequest{}, &skeinv1.ImportResponse{Plan: plan, Changed: true, Index: 40})
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{})
	f.lay(&skeinv1.CreateEgressRequest{}, &skeinv1.EgressResponse{Index: 43, Warnings: []string{"no member has the " +
		"labels egress=yes yet"}})
	command := append([]string{"import", "coil", "testdata/coil.yaml", "--gateways", "egress=yes"}, rename...)
	f.showsGolden(t, "import-egress", append(command, "--dry-run"), command)
	var made []*skeinv1.Egress
	for _, r := range f.asked {
		if c, ok := r.(*skeinv1.CreateEgressRequest); ok {
			made = append(made, c.GetEgress())
		}
	}
	want := &skeinv1.Egress{Namespace: "internet-egress", Name: "internet", Destinations: []string{"0.0.0.0/0"},
		Gateways: map[string]string{"egress": "yes"}, Replicas: 2}
	if len(made) != 1 || !proto.Equal(made[0], want) {
		t.Errorf("the egresses %v were made, want %v once", made, want)
	}
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{Egresses: []*skeinv1.EgressSummary{{Egress: want}}})
	f.lay(&skeinv1.ImportRequest{}, &skeinv1.ImportResponse{Plan: []string{"0 changes, 2 are there already"}, Index: 43})
	if out, _, err := f.skein(t, command...); err != nil || !strings.Contains(out, "nothing changes") {
		t.Errorf("again: %v\n%s", err, out)
	}
	other := proto.CloneOf(want)
	other.Replicas = 3
	f.lay(&skeinv1.EgressesRequest{}, &skeinv1.EgressesResponse{Egresses: []*skeinv1.EgressSummary{{Egress: other}}})
	if _, _, err := f.skein(t, command...); err == nil || !strings.Contains(err.Error(),
		"egress internet-egress/internet already exists with other settings") {
		t.Errorf("another one: %v", err)
	}
}

// What is understood of Kilo is shown without an agent.
func TestImportKilo(t *testing.T) {
	f := newFakeAgent(t)
	f.showsGolden(t, "import-kilo", []string{"import", "kilo", "testdata/kilo.yaml"})
	if len(f.asked) > 0 {
		t.Errorf("the agent was asked %v", f.asked)
	}
	out, _, err := f.skein(t, "import", "kilo", "testdata/kilo.yaml", "-o", "json")
	var r struct {
		Nodes []struct {
			Name     string
			Problems []string
		}
	}
	if err != nil || json.Unmarshal([]byte(out), &r) != nil || len(r.Nodes) != 2 || len(r.Nodes[0].Problems) != 2 ||
		strings.Contains(out, "c2VjcmV0") {
		t.Errorf("JSON: %v\n%s", err, out)
	}
	if _, _, err := f.skein(t, "import", "kilo", "testdata/coil.yaml"); err == nil || !strings.Contains(err.Error(),
		"coil.yaml: there is no Node and no Peer of Kilo in it") {
		t.Errorf("another file: %v", err)
	}
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
