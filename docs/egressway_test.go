package docs_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/egressclient"
	"github.com/skeinmesh/skein/dataplane/egressns"
	_ "github.com/skeinmesh/skein/internal/golden" // has the flag -update
	"github.com/skeinmesh/skein/internal/marks"
	"github.com/skeinmesh/skein/internal/packetway"
)

// clientSteps are the rules of a pod's namespace for IPv4.
func clientSteps(rules []egressclient.RuleInfo) (out []packetway.Step) {
	for _, r := range rules {
		if r.Family == egressclient.IPv4 && !r.Host {
			out = append(out, packetway.Step{Where: fmt.Sprintf("rule %d", r.Priority), Text: r.Text + " (" + r.Why + ")"})
		}
	}
	return out
}

// gatewaySteps is the way through a gateway's namespace.
func gatewaySteps(way []egressns.Step) (out []packetway.Step) {
	last := ""
	for _, w := range way {
		where := strings.TrimSpace(w.Where + " " + w.Chain)
		if w.Depth > 0 {
			where = strings.Repeat("  ", w.Depth) + w.Chain
		}
		if where == last {
			where = ""
		} else {
			last = where
		}
		out = append(out, packetway.Step{Where: where, Text: w.Text})
	}
	return out
}

// gatewayHostSteps lead a packet for a slot into the gateway's network namespace.
func gatewayHostSteps(route string) []packetway.Step {
	n := dataplane.DefaultNumbers()
	return []packetway.Step{
		{Where: fmt.Sprintf("rule %d", n.EgressRule()), Text: fmt.Sprintf("from all lookup %d (ways to gateways' namespaces)",
			n.EgressTable())},
		{Where: fmt.Sprintf("table %d", n.EgressTable()), Text: route},
	}
}

// egressWay is the way of one packet out, and of its answer: pod 10.64.1.5 on one host, slot with endpoint 10.64.0.32
// and source address 192.0.2.7 on another.
func egressWay(client []egressclient.RuleInfo, through, again []egressns.Step) (out, back []packetway.Stop) {
	const inner, answer = "10.64.1.5 → 198.51.100.9", "198.51.100.9 → 10.64.1.5"
	tunnel := fmt.Sprintf("UDP, TTL %d: 10.64.1.5:%d → 10.64.0.32:%d [%s]", dataplane.FoUTTL, dataplane.FoUPort,
		dataplane.FoUPort, inner)
	tunnelBack := fmt.Sprintf("UDP, TTL %d: 10.64.0.32:%d → 10.64.1.5:%d [%s]", dataplane.FoUTTL, dataplane.FoUPort,
		dataplane.FoUPort, answer)
	here := append(clientSteps(client), packetway.Step{Where: fmt.Sprintf("table %d", dataplane.ClientWideTable),
		Text: "default dev fou4_0a400020: an IP header and UDP come before it"},
		packetway.Step{Where: fmt.Sprintf("rule %d", dataplane.ClientPrivateRule+2), Text: "the packet with its new header " +
			"goes by main, dev eth0"})
	mesh := func(to, leaves string) packetway.Stop {
		return packetway.Stop{Name: "the mesh", Steps: []packetway.Step{{Where: "skein0", Text: to}}, Leaves: leaves}
	}
	out = []packetway.Stop{
		{Name: "the pod's network namespace", Steps: here, Leaves: tunnel},
		mesh("WireGuard, by the peer whose AllowedIPs hold 10.64.0.32/32: the owner of the slot", tunnel),
		{Name: "the gateway node",
			Steps: gatewayHostSteps("10.64.0.32 dev sk… (the other end is eth0 in the gateway's namespace)"), Leaves: tunnel},
		{Name: "the gateway's network namespace, one for each egress", Steps: gatewaySteps(through),
			Leaves: "192.0.2.7 → 198.51.100.9; of a slot without an address: 169.254.101.N → 198.51.100.9"},
		{Name: "the gateway node", Steps: []packetway.Step{{Where: "its own routes", Text: "out of its uplink; " +
			"169.254.101.N is masqueraded there"}}, Leaves: "192.0.2.7 → 198.51.100.9"},
		{Name: "outside"},
	}
	return out, []packetway.Stop{
		{Name: "outside", Steps: []packetway.Step{{Where: "ARP, NDP", Text: "192.0.2.7 is at the owner, which answers for " +
			"it while its lease runs; or a router knows " +
			fmt.Sprintf("from table %d", dataplane.DefaultNumbers().ExportTable())}}, Leaves: "198.51.100.9 → 192.0.2.7"},
		{Name: "the gateway node",
			Steps: gatewayHostSteps("192.0.2.7 dev sk…"), Leaves: "198.51.100.9 → 192.0.2.7"},
		{Name: "the gateway's network namespace", Steps: gatewaySteps(again), Leaves: tunnelBack},
		mesh("WireGuard, to the node that has the pod's block", tunnelBack),
		{Name: "the pod's network namespace", Steps: []packetway.Step{
			{Where: "input -300 skein_fou", Text: fmt.Sprintf("udp dport %d iifname @skein_links ip saddr @skein_ends_ipv4 "+
				"accept, else drop: from slots' endpoints alone", dataplane.FoUPort)},
			{Where: fmt.Sprintf("UDP %d", dataplane.FoUPort), Text: "taken for a tunnel's"},
			{Where: "fou4_0a400020", Text: "takes the outer header away; fou4_any does for one of another gateway"}}},
	}
}

// TestEgressWay: the drawing is what the tables say. Written anew by -update.
func TestEgressWay(t *testing.T) {
	const document = "egress.md"
	begin := marks.Begin("go test ./docs -run TestEgressWay -update")
	out, back := egressWay(egressclient.Rules(), egressns.Way(false), egressns.Way(true))
	text := "A packet out:\n\n```text\n" + packetway.Draw(out) + "```\n\nIts answer:\n\n```text\n" +
		packetway.Draw(back) + "```\n"
	if flag.Lookup("update").Value.String() == "true" {
		if err := marks.InsertFile(document, begin, text); err != nil {
			t.Fatal(err)
		}
	}
	b, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	if have, ok := marks.Text(string(b), begin); !ok || strings.TrimPrefix(have, "\n") != text {
		t.Errorf("the drawing in %s is not what the tables say: run go test ./docs -run TestEgressWay -update", document)
	}
}
