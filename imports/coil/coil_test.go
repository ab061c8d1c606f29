package coil_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	"github.com/skeinmesh/skein/imports/coil"
	"github.com/skeinmesh/skein/internal/golden"
)

// lines shows an import in a line for each pool, block and note.
func lines(i *coil.Import) []string {
	var out []string
	for _, p := range i.Pools.GetPools() {
		l := fmt.Sprintf("pool %s bits=%d draining=%t namespaces=%v", p.GetName(), p.GetBlockSizeBits(), p.GetDraining(),
			p.GetNamespaces())
		for _, s := range p.GetSubnets() {
			l += fmt.Sprintf(" [%s,%s]", s.GetIpv4(), s.GetIpv6())
		}
		out = append(out, l)
	}
	for _, b := range i.Pools.GetBlocks() {
		out = append(out, fmt.Sprintf("block %s [%s,%s] node=%q reason=%q", b.GetPool(), b.GetIpv4(), b.GetIpv6(),
			b.GetNode(), b.GetReason()))
	}
	for _, e := range i.Egresses {
		out = append(out, fmt.Sprintf("egress %s/%s to %v, %d slots, port by flow %t, gateways %v", e.GetNamespace(),
			e.GetName(), e.GetDestinations(),
			e.GetReplicas(), e.GetFouSourcePortAuto(), e.GetGateways()))
	}
	return append(out, i.Notes...)
}

// Egresses come with the gateways that are named, and not at all where none are.
func TestGateways(t *testing.T) {
	data, err := os.ReadFile("testdata/kubectl.yaml")
	if err != nil {
		t.Fatal(err)
	}
	parse := func() *coil.Import {
		i, err := coil.Parse(data)
		if err != nil {
			t.Fatal(err)
		}
		return i
	}
	i := parse()
	if i.SetGateways(map[string]string{"egress": "yes"}); len(i.Egresses) != 2 ||
		i.Egresses[1].GetGateways()["egress"] != "yes" {
		t.Errorf("with gateways: %v", i.Egresses)
	}
	i = parse()
	notes := len(i.Notes)
	i.SetGateways(nil)
	if len(i.Egresses) != 0 || len(i.Notes) != notes+1 || !strings.Contains(i.Notes[notes], "domestic-egress/nat, "+
		"internet-egress/internet") || !strings.Contains(i.Notes[notes], "--gateways") {
		t.Errorf("without: %v, %q", i.Egresses, i.Notes)
	}
	only, err := coil.Parse([]byte("apiVersion: coil.cybozu.com/v2\nkind: Egress\nmetadata: {name: nat, namespace: " +
		"web}\nspec: {destinations: [10.9.0.0/16]}\n"))
	if err != nil || len(only.Egresses) != 1 || len(only.Pools.GetPools()) != 0 {
		t.Errorf("a file of egresses alone: %v, %v", only, err)
	}
}

func TestFiles(t *testing.T) {
	for _, file := range []string{"kubectl.yaml", "converter.yaml", "single.json"} {
		t.Run(file, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join("testdata", file))
			if err != nil {
				t.Fatal(err)
			}
			got, err := coil.Parse(data)
			if err != nil {
				t.Fatal(err)
			}
			golden.Lines(t, file, lines(got))
		})
	}
}

// object is an AddressPool or AddressBlock with the named lines changed, added or, with "-", taken away.
func object(kind string, change ...string) string {
	all := map[string][]string{
		"pool": {"apiVersion: coil.cybozu.com/v2", "kind: AddressPool", "metadata: {name: pool1}", "spec: {blockSizeBits: " +
			"5, subnets: [{ipv4: 10.2.0.0/16}]}"},
		"block": {"apiVersion: coil.cybozu.com/v2", "kind: AddressBlock",
			"metadata: {name: pool1-16, labels: {coil.cybozu.com/pool: pool1, coil.cybozu.com/node: node1}}", "index: 16",
			"ipv4: 10.2.2.0/27"},
	}[kind]
	for _, c := range change {
		key, _, _ := strings.Cut(c, ":")
		found := false
		for i, l := range all {
			if have, _, _ := strings.Cut(l, ":"); have == strings.TrimPrefix(key, "-") {
				found, all[i] = true, c
				if strings.HasPrefix(key, "-") {
					all[i] = ""
				}
			}
		}
		if !found {
			all = append(all, c)
		}
	}
	return strings.Join(all, "\n") + "\n"
}

func egressOf(spec string) string {
	return "apiVersion: coil.cybozu.com/v2\nkind: Egress\nmetadata: {name: nat, namespace: web}\nspec: " + spec + "\n"
}

func TestRefusals(t *testing.T) {
	const poolLabels = "metadata: {name: pool1-16, labels: {coil.cybozu.com/pool: pool1"
	pool := object("pool") + "---\n"
	for _, c := range []struct{ name, in, want string }{
		{"nothing", "", "there is no AddressPool and no AddressBlock of coil.cybozu.com/v2 in it"},
		{"only others", "apiVersion: v1\nkind: List\nitems: []\n", "there is no AddressPool"},
		{"no YAML", "a: [b\n", "line 1: "},
		{"a text", "hello\n", `document 1 (line 1), object without a name: want a mapping (key: value), have "hello"`},
		{"no kind", "apiVersion: v1\n", "apiVersion or kind is missing"},
		{"key twice", "kind: A\nkind: B\n", "line 2: "},
		{"no name", object("pool", "metadata: {}"), "document 1 (line 1), AddressPool without a name: metadata.name: it is " +
			"missing"},
		{"list in a list", "apiVersion: v1\nkind: List\nitems:\n- {apiVersion: v1, kind: List, items: []}\n",
			"document 1, item 1 (line 4), List without a name: a list within a list"},
		{"Coil v1", object("pool", "apiVersion: coil.cybozu.com/v1"), "AddressPool pool1: apiVersion: coil.cybozu.com/v1 " +
			"is not understood; only coil.cybozu.com/v2 is"},
		{"an egress without destinations", egressOf("{replicas: 1}"),
			"Egress nat: spec.destinations: there is no destination"},
		{"an egress to nowhere", egressOf("{destinations: [here]}"), `spec.destinations[0]: "here" is not a prefix`},
		{"an egress with an unknown field", egressOf("{destinations: [10.0.0.0/8], secret: 1}"), "spec.secret: this field " +
			"is not known here"},
		{"an egress with a text for a flag", egressOf("{destinations: [10.0.0.0/8], fouSourcePortAuto: 'yes'}"),
			"spec.fouSourcePortAuto: want true or false"},
		{"an egress with too few replicas", egressOf("{destinations: [10.0.0.0/8], replicas: -1}"), "spec.replicas: want a " +
			"whole number"},
		{"an egress twice", egressOf("{destinations: [10.0.0.0/8]}") + "---\n" + egressOf("{destinations: [10.0.0.0/8]}"),
			"it is there twice"},
		{"an egress of no namespace", strings.Replace(egressOf("{destinations: [10.0.0.0/8]}"), ", namespace: web", "", 1),
			"metadata.namespace: it is missing"},
		{"Coil v3 of any kind", object("pool", "apiVersion: coil.cybozu.com/v3", "kind: Egress"), "Egress pool1: " +
			"apiVersion: coil.cybozu.com/v3 is not understood"},
		{"pool twice", pool + pool,
			"document 2 (line 6), AddressPool pool1: it is there twice, first in document 1 (line 1)"},
		{"pool name with dots", object("pool", "metadata: {name: pool.one}"),
			`AddressPool pool.one: metadata.name: "pool.one" cannot be a pool's name here`},
		{"unknown field of a pool", object("pool", "spec: {blockSizeBits: 5, subnets: [{ipv4: 10.2.0.0/16}], strategy: x}"),
			"AddressPool pool1: spec.strategy: this field is not known here"},
		{"unknown field of a subnet", object("pool", "spec: {subnets: [{ipv4: 10.2.0.0/16, vrf: x}]}"),
			"spec.subnets[0].vrf: this field is not known here"},
		{"no spec", object("pool", "-spec"), "spec: want a mapping (key: value), have nothing"},
		{"no subnets", object("pool", "spec: {}"), "spec.subnets: there is no subnet"},
		{"empty subnet", object("pool", "spec: {subnets: [{}]}"), "spec.subnets[0]: it has neither ipv4 nor ipv6"},
		{"bits as a text", object("pool", "spec: {blockSizeBits: five, subnets: [{ipv4: 10.2.0.0/16}]}"),
			`spec.blockSizeBits: want a whole number, have "five"`},
		{"negative bits", object("pool", "spec: {blockSizeBits: -1, subnets: [{ipv4: 10.2.0.0/16}]}"),
			"spec.blockSizeBits: want a whole number from 0 to 127, have -1"},
		{"block larger than the subnet", object("pool", "spec: {blockSizeBits: 17, subnets: [{ipv4: 10.2.0.0/16}]}"),
			"spec.subnets[0].ipv4: 10.2.0.0/16 is smaller than one block of 2^17 addresses"},
		{"unequal sizes", object("pool", "spec: {subnets: [{ipv4: 10.2.0.0/16, ipv6: 'fd00::/64'}]}"),
			"spec.subnets[0]: 10.2.0.0/16 and fd00::/64 have different sizes: 2^16 and 2^64 addresses"},
		{"wrong family", object("pool", "spec: {subnets: [{ipv4: 'fd00::/64'}]}"), "spec.subnets[0].ipv4: fd00::/64 is of " +
			"the other family"},
		{"no prefix", object("pool", "spec: {subnets: [{ipv4: 10.2.0.0}]}"), `spec.subnets[0].ipv4: "10.2.0.0" is not a prefix`},
		{"an alias", "status: &a {ipv4: 10.2.0.0/16}\n" + object("pool", "spec: {subnets: [*a]}"), "spec.subnets[0]: want " +
			"a mapping (key: value), have an anchor, alias or tag"},
		{"block without a pool", object("block", "metadata: {name: x}"), "AddressBlock x: metadata.labels: " +
			"coil.cybozu.com/pool is missing"},
		{"block without a node", object("block", poolLabels+"}}"), "metadata.labels: it has neither coil.cybozu.com/node " +
			"nor coil.cybozu.com/reserved"},
		{"reserved: false", object("block", poolLabels+", coil.cybozu.com/reserved: 'false'}}"),
			`metadata.labels: coil.cybozu.com/reserved is "false"; only "true" is understood`},
		{"reserved, without quotes", object("block", poolLabels+", coil.cybozu.com/reserved: true}}"),
			`metadata.labels.coil.cybozu.com/reserved: want a text, have "true"`},
		{"block without an index", object("block", "-index"), "AddressBlock pool1-16: index: it is missing"},
		{"block without addresses", object("block", "-ipv4"), "AddressBlock pool1-16: it has neither ipv4 nor ipv6"},
		{"block with host bits", object("block", "ipv4: 10.2.2.1/27"), "ipv4: 10.2.2.1/27 has host bits set"},
		{"unknown field of a block", object("block", "gateway: 10.2.2.1"), "gateway: this field is not known here"},
		{"index and address differ", pool + object("block", "ipv4: 10.2.4.0/27"), "document 2 (line 6), AddressBlock " +
			"pool1-16: ipv4: it is 10.2.4.0/27, but block 16 of pool pool1 is 10.2.2.0/27"},
		{"size of another pool", pool + object("block", "ipv4: 10.2.2.0/26"), "ipv4: it is 10.2.2.0/26, but block 16 of " +
			"pool pool1 is 10.2.2.0/27"},
		{"a family too many", pool + object("block", "ipv6: 'fd00::/123'"), "ipv6: it is fd00::/123, but block 16 of pool " +
			"pool1 is none"},
		{"behind the pool's end", pool + object("block", "index: 2048", "ipv4: 10.3.0.0/27"), "index: 2048 is beyond the " +
			"last block of pool pool1"},
		{"two blocks at one place", object("block") + "---\n" + object("block", "metadata: {name: other, labels: "+
			"{coil.cybozu.com/pool: p, coil.cybozu.com/node: n}}"),
			"AddressBlock other: 10.2.2.0/27 is also that of AddressBlock pool1-16 (document 1 (line 1))"},
		{"brackets without end", strings.Repeat("[", 5000), "brackets are nested 5000 deep; at most 256 are read"},
		{"lists in one line without end", strings.Repeat("- ", 5000), "brackets are nested 5000 deep"},
		{"too large", "#" + strings.Repeat(" ", coil.MaxBytes), "the file has more than 16 MiB"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := coil.Parse([]byte(c.in))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("have %v\nwant %s", err, c.want)
			}
			if got != nil {
				t.Fatal("an import with an error")
			}
			if strings.Contains(err.Error(), "\n") {
				t.Errorf("more than one line: %s", err)
			}
		})
	}
}

// many writes a pool with n blocks as kubectl does.
func many(n int) []byte {
	var b bytes.Buffer
	b.WriteString("apiVersion: v1\nkind: List\nitems:\n- apiVersion: coil.cybozu.com/v2\n  kind: AddressPool\n  " +
		"metadata:\n    name: default\n" +
		"  spec:\n    blockSizeBits: 5\n    subnets:\n    - ipv4: 10.64.0.0/13\n      ipv6: fd01:203:405:607::/109\n")
	for i := range n {
		fmt.Fprintf(&b, `- apiVersion: coil.cybozu.com/v2
  index: %d
  ipv4: 10.%d.%d.%d/27
  ipv6: fd01:203:405:607:0:0:%x:%x/123
  kind: AddressBlock
  metadata:
    creationTimestamp: "2024-02-01T07:14:00Z"
    finalizers:
    - coil.cybozu.com
    labels:
      coil.cybozu.com/node: node%d
      coil.cybozu.com/pool: default
    name: default-%d
    ownerReferences:
    - apiVersion: coil.cybozu.com/v2
      blockOwnerDeletion: true
      controller: true
      kind: AddressPool
      name: default
      uid: d9607e19-f88f-11e6-a518-42010a800195
    resourceVersion: "88400"
    uid: 6e6d9a0c-8b3e-4f7d-8f0b-9a3f1b6a7c11
`, i, 64+i>>11, i>>3&255, i&7*32, i>>11, i<<5&0xffff, i%500, i)
	}
	return b.Bytes()
}

// One block too many is refused, whatever the others are.
func TestTooManyBlocks(t *testing.T) {
	var b strings.Builder
	b.WriteString("apiVersion: v1\nkind: List\nitems:\n")
	for i := range coil.MaxBlocks + 1 {
		fmt.Fprintf(&b, "- {apiVersion: coil.cybozu.com/v2, kind: AddressBlock, metadata: {name: b%d, labels: "+
			"{coil.cybozu.com/pool: p, coil.cybozu.com/node: n}}, index: %d, ipv4: 10.0.%d.%d/32}\n", i, i, i>>8, i&255)
	}
	if _, err := coil.Parse([]byte(b.String())); err == nil || !strings.Contains(err.Error(), "AddressBlock b16384: "+
		"there are more than 16384 blocks") {
		t.Errorf("one block too many: %v", err)
	}
}

// The order of the objects, and whether they come as a list or as documents, changes nothing.
func TestOrderMakesNoDifference(t *testing.T) {
	pool, block := object("pool"), object("block")
	other := object("block", "metadata: {name: pool1-3, labels: {coil.cybozu.com/pool: pool1, coil.cybozu.com/node: "+
		"node2}}", "index: 3", "ipv4: 10.2.0.96/27")
	item := func(s string) string { return "- " + strings.ReplaceAll(strings.TrimSpace(s), "\n", "\n  ") + "\n" }
	var first *coil.Import
	for i, in := range []string{
		pool + "---\n" + block + "---\n" + other, other + "---\n" + block + "---\n" + pool,
		"apiVersion: v1\nkind: List\nitems:\n" + item(block) + item(pool) + item(other),
		"apiVersion: v1\nkind: List\nitems:\n" + item(other) + "---\n" + pool + "---\n" + block,
	} {
		got, err := coil.Parse([]byte(in))
		if err != nil {
			t.Fatalf("%d: %v\n%s", i, err, in)
		}
		if first == nil {
			first = got
		}
		if !proto.Equal(first.Pools, got.Pools) {
			t.Errorf("%d: have %v\nwant %v", i, got.Pools, first.Pools)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, file := range []string{"kubectl.yaml", "converter.yaml", "single.json"} {
		data, err := os.ReadFile(filepath.Join("testdata", file))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(object("pool") + "---\n" + object("block")))
	f.Add([]byte("? [a]\n: b\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := coil.Parse(data)
		if err != nil {
			return
		}
		b, err := coil.Parse(data)
		if err != nil || !proto.Equal(a.Pools, b.Pools) {
			t.Fatalf("read twice: %v\n%v\n%v", err, a.Pools, b.Pools)
		}
		if len(a.Pools.GetPools())+len(a.Pools.GetBlocks()) == 0 {
			t.Fatal("nothing was read, and no error")
		}
		for _, k := range a.Pools.GetBlocks() {
			if (k.GetNode() == "") == (k.GetReason() == "") {
				t.Fatalf("block %v is neither owned nor reserved, or both", k)
			}
		}
	})
}

// What Parse reserves is known again by its reason; what others reserve is not.
func TestWasReserved(t *testing.T) {
	for reason, want := range map[string]bool{
		"as Coil did": true, "as Coil did, for node1": true, "": false, "imported": false, "as Coil did it": false,
		"for node node1 (imported)": false, "egress internet/nat": false, "static addresses": false,
		"old load balancers": false,
	} {
		if coil.WasReserved(reason) != want {
			t.Errorf("%q: %t", reason, !want)
		}
	}
}
