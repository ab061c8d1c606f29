package redteam

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/skeinmesh/skein/chaos/overlay"
)

// hole is a guard that a patch of the sources takes away.
type hole struct {
	name   string
	guards []Guard
	edits  []edit
	seen   []string // names of attempts, each of which must then gain something
}

// edit replaces a text, which the file has exactly once.
type edit struct{ File, Old, New string }

// holes are all in one binary: none of them hides another.
var holes = []hole{
	{"every member is taken for a server", []Guard{Roles, OwnOnly, Leases}, []edit{
		{"events/roles.go", "	role := s.Role(c.GetIssuer())\n	if role == \"\" {",
			"	role := max(s.Role(c.GetIssuer()), RoleServer)\n	if role == \"\" {"},
	}, []string{"create a pool", "create a token for servers", "drain another node", "release another's egress slot",
		"allocate blocks for another node"}},
	{"any member's word for a new key of a node that joins again counts", []Guard{Roles}, []edit{
		{"events/decide_node.go", "	if d.s.Role(d.c.GetIssuer()) != RoleServer {",
			"	if d.s.Role(d.c.GetIssuer()) == \"\" {"},
	}, []string{"take over another member's WireGuard key by admitting it again"}},
	{"tokens are not compared", []Guard{Tokens}, []edit{
		{"events/token.go", "	case !sameSecret(t.GetSecretHash(), hash):", "	case len(hash) == 0:"},
		{"events/token.go", "	case len(shown) != ed25519.PublicKeySize || !ed25519.Verify(",
			"	case len(shown) != ed25519.PublicKeySize || false && !ed25519.Verify("},
	}, []string{"join with a wrong secret", "join with the proof that another joiner has shown"}},
	{"the TLS port lets everybody in", []Guard{Roster}, []edit{
		{"agent/admission/listener.go", "if known, ok := l.cfg.Member(id); !ok || !known.Equal(key) {",
			"if known, ok := l.cfg.Member(id); ok && !known.Equal(key) {"},
		{"relay/server/server.go", "	if !s.cfg.Member(peer) {", "	if false && !s.cfg.Member(peer) {"},
	}, []string{"open skein-relay at a public node", "replace a victim's session by one with its ID"}},
	{"the control net lets everybody in", []Guard{Roster}, []edit{
		{"agent/control/net.go", "	if !ok || !known.Equal(key) {", "	if ok && !known.Equal(key) {"},
	}, []string{"open a control stream for RPC"}},
	{"records of who was revoked stay where they are", []Guard{Roster}, []edit{
		{"gossip/records.go", "	g.local.keep(g.roster.member)", "	g.local.keep(func(identity.ID) bool { return true })"},
	}, []string{"ask for the record of a node that was revoked"}},
	{"records' signatures are not looked at", []Guard{Signatures}, []edit{
		{"gossip/verify.go", "	if !ed25519.Verify(key, append(", "	if false && !ed25519.Verify(key, append("},
	}, []string{"write another node's record, signed by itself",
		"answer for its site with another node's record, altered",
		"answer for its site with another node's record, signed by itself"}},
	{"a site's records are for everybody", []Guard{SiteRecords}, []edit{
		{"gossip/stream.go", "		if t = siteTable; !x.near(peer) {", "		if t = siteTable; false && !x.near(peer) {"},
	}, []string{"exchange records with a site as a member of another one"}},
	{"whoever calls a node away is believed", []Guard{Away}, []edit{
		{"gossip/place.go", "	return place.anyVoice(voices[site], id, func(",
			"	return place.anyVoice(slices.Concat(slices.Collect(maps.Values(voices))...), id, func("},
		{"gossip/place.go", "		if w := p.weight(v); w > most {", "		if w := 0 * p.weight(v); w > most {"},
		{"gossip/place.go", "			there = there || says", "			there = there && says"},
	}, []string{"call a node of another site away", "call a node away as a member of its site that does not lead it",
		"call a node away as one that says it leads the node's site"}},
	{"what a node says of its site and of leading it counts as much as the log's word", []Guard{Chosen}, []edit{
		{"agent/sites/view.go", "	if n.GetSettings().GetSiteSet() {", "	if n.GetSettings().GetSiteSet() && r == nil {"},
		{"agent/sites/elect.go", "{ return n.Chosen && !n.Reluctant }", "{ return (n.Chosen || n.Wish) && !n.Reluctant }"},
	}, []string{"lead another site, by its own record alone"}},
	{"a leader passes events on to everybody, by any number of streams", []Guard{Passing}, []edit{
		{"agent/siteevents.go", "	if site, known := p.SiteOf(peer); !known || site != p.Site {",
			"	if site, known := p.SiteOf(peer); known && site == \"nowhere\" {"},
		{"consensus/pass.go", "	if before != nil {", "	if before != nil && p.open == nil {"},
		{"consensus/pass.go", "		if err := checkMember(s.cfg.Replica.State(), peer); err != nil {",
			"		if err := checkMember(s.cfg.Replica.State(), peer); err != nil && c == nil {"},
	}, []string{"subscribe at the leader of another site", "subscribe at its site's leader many times",
		"be kept in a leader's subscription that was open when it was revoked"}},
	{"next WireGuard keys are taken without a proof", []Guard{NextKeys}, []edit{
		{"agent/rekey/theirs.go", "	if !hmac.Equal(want[:], proof) {", "	if false && !hmac.Equal(want[:], proof) {"},
	}, []string{"name as its next WireGuard key one that it does not have"}},
	{"checkpoints' signatures are not looked at", []Guard{Proven}, []edit{
		{"consensus/checkpoint.go", "		!ed25519.Verify(key, checkpointText(",
			"		false && !ed25519.Verify(key, checkpointText("},
	}, []string{"pass on an event of its own making, with a checkpoint in a server's name"}},
	{"a checkpoint is for any events", []Guard{Proven}, []edit{
		{"consensus/replica.go", "	case next.Hash() != hash:", "	case false && next.Hash() != hash:"},
	}, []string{"pass on another event with a server's checkpoint"}},
	{"a leader may be as late as it likes", []Guard{Fresh}, []edit{
		{"consensus/passed.go", "	freshFor   = 7 * time.Second", "	freshFor   = 7 * time.Hour"},
		{"consensus/passed.go", "	auditSoon  = 5 * time.Second ", "	auditSoon  = 5 * time.Hour "},
		{"consensus/passed.go", "	auditEvery = time.Minute ", "	auditEvery = time.Hour "},
	}, []string{"hold events back with an old checkpoint", "pass events on later and later"}},
	{"a record may have ten times as much", []Guard{Limits}, []edit{
		{"gossip/verify.go", "	MaxRecordBytes   = 8 << 10", "	MaxRecordBytes   = 80 << 10"},
		{"gossip/verify.go", "	MaxCandidates    = 64", "	MaxCandidates    = 640"},
	}, []string{"publish 65 candidates"}},
	{"frames and requests are as long as they say", []Guard{Limits}, []edit{
		{"gossip/stream.go", "	if n > int64(limit) {", "	if n > 1<<32 {"},
		{"agent/joining/wire.go", "	MaxJoinRequest  = 64 << 10", "	MaxJoinRequest  = 4<<30 - 1"},
	}, []string{"announce a gossip frame of 4 GiB", "announce a join request of 2 GiB"}},
	{"codes of packets are not looked at", []Guard{Codes}, []edit{
		{"agent/control/net.go", "len(b) > MaxPacket+codeSize ||\n\t\t!hmac.Equal(",
			"len(b) > MaxPacket+codeSize ||\n\t\tfalse && !hmac.Equal("},
	}, []string{"hand over a signal in another's name, as a relay by its own record"}},
	{"a relay makes a new pair of ports each time that it is asked", []Guard{RelayLimits}, []edit{
		{"relay/udp/relay.go", "	p := u.byNodes[nodesOf(from.Node(), node)]",
			"	p := map[nodes]*pair{}[nodesOf(from.Node(), node)]"},
	}, []string{"reserve all of the relay's UDP ports"}},
	{"one source may take every place at the TLS port", []Guard{Front}, []edit{
		{"agent/admission/limiter.go", "	maxHandshakes  = 256 ", "	maxHandshakes  = 25600 "},
		{"agent/admission/limiter.go", "	perSource      = 64 ", "	perSource      = 6400 "},
		{"agent/admission/limiter.go", "	connectBurst   = 200", "	connectBurst   = 20000"},
	}, []string{"hold the port for joiners with more connections than one source may have"}},
	{"a member may ask as often as it likes, and for as much", []Guard{Fair}, []edit{
		{"agent/rpclimit/rpclimit.go", "	if path == skeinv1connect.ClusterServiceProposeProcedure && l.server(id) {",
			"	if path != \"\" || l.server(id) {"},
		{"events/decide_block.go", "int(min(total-uint64(held.n), MaxBlocksAtOnce))", "int(total-uint64(held.n))"},
		{"gossip/fetch.go", "	return l.AllowN(now, 1) && f.all.AllowN(now, 1)", "	return l.AllowN(now, 1) || true"},
	}, []string{"read the whole state again and again", "take all of a pool's blocks",
		"ask for a site's records again and again"}},
	{"every member hands over packets as relays do", []Guard{RelayIDs}, []edit{
		{"relay/server/far.go", "if f.s.cfg.Relay == nil || !f.s.cfg.Relay(f.from.id) || !f.s.cfg.Member(origin) {",
			"if f.s.cfg.Relay == nil {"},
	}, []string{"hand over a packet in another's name, as relays do"}},
	{"a gateway takes clients of all addresses", []Guard{Clients}, []edit{
		{"agent/egress/gateways.go",
			"	return fmt.Errorf(\"address %s is not of node %s as of index %d\", addr, n.GetName(), st.Index())",
			"	return nil"},
	}, []string{"register another node's pod as its own client"}},
	{"filter tests go anywhere", []Guard{Filters}, []edit{
		{"agent/filtertest/filtertest.go", "	if !addr.Public(to.Addr().Unmap()) || to.Port() == 0 {", "	if to.Port() == 0 {"},
	}, []string{"have a server send into a private network"}},
	{"STUN answers a hundred times as often", []Guard{Stun}, []edit{
		{"gossip/candidate/stunserver/server.go", "sourceRate, sourceBurst = 200, 400",
			"sourceRate, sourceBurst = 20000, 40000"},
	}, []string{"draw STUN answers onto a bystander"}},
	{"probes' codes are not looked at", []Guard{Probes}, []edit{
		{"agent/probe/message.go", "	if !hmac.Equal(b[signedSize:Size], c.sign(b[:signedSize])) {",
			"	if false && !hmac.Equal(b[signedSize:Size], c.sign(b[:signedSize])) {"},
	}, []string{"forge a ping of a member"}},
	{"clients take FoU from everybody", []Guard{FoU}, []edit{
		{"dataplane/egressclient/filter.go", "	if len(s.Tunnels) == 0 {", "	if len(s.Tunnels) >= 0 {"},
	}, []string{"put packets into another pod's egress tunnel by FoU", "put packets into its node's egress tunnel by FoU",
		"put packets into the host's egress tunnel by FoU"}},
	{"packets of the mesh may come by any link, from any address", []Guard{PodSources, LinkSources, PlainPort}, []edit{
		{"dataplane/nft/sources.go", "	if control != 0 {\n", "	if control >= 0 {\n		return out\n	}\n	if control != 0 {\n"},
		{"agent/control/net.go", "	return channel, b, len(b) <= MaxPacket && (n.cfg.Coded == nil || !n.cfg.Coded(from))",
			"	return channel, b, true"},
		{"agent/control/link.go", "	return err == nil && d.To.Link == int(index)", "	return err == nil && index > 0"},
	}, []string{
		"declare a member dead from the LAN, with a member's overlay address as source",
		"send with another pod's address, IPv4", "send with its node's overlay address, IPv6",
		"send into the mesh as the member next door, IPv6",
		"send into the mesh as a pod of the member next door, IPv4", "send to a service of the host as another member",
		"reach the control net",
	}},
	{"a node may bring packets of everybody", []Guard{Hops}, []edit{
		{"dataplane/hop/table.go", "	return g != nil && g.of(source)", "	return g == nil || g.of(source) || !g.of(source)"},
	}, []string{"bring a packet of another site's member as a leader, IPv4",
		"bring a packet of another site's member as a leader, IPv6", "bring a packet of a server as a leader",
		"send a packet inside another one, as leaders do"}},
	{"plain peers send from any address", []Guard{PlainOwn}, []edit{
		{"dataplane/plainwg/carrier.go", "	return s.dev.IpcSet(b.String())",
			"	return s.dev.IpcSet(b.String() + \"allowed_ip=0.0.0.0/0\\nallowed_ip=::/0\\n\")"},
	}, []string{"send with a member's overlay address, IPv4", "send with a member's overlay address, IPv6",
		"send with a pod's address"}},
	{"every server hands on commands of others", []Guard{Issuer}, []edit{
		{"consensus/service.go", "	} else if !server.votes(peer) {", "	} else if false && !server.votes(peer) {"},
	}, []string{"forward a command in a victim's name"}},
	{"request IDs belong to nobody", []Guard{RequestIDs}, []edit{
		{"events/request.go", "		kind = uint64(f.Number())", "		kind = 0 * uint64(f.Number())"},
		{"events/request.go",
			"[]string{c.GetIssuer(), c.GetRequestId(), string(c.GetAdmitNode().GetNode().GetIdentityKey())}",
			"[]string{c.GetRequestId()}"},
	}, []string{"repeat another's request ID"}},
	{"Raft takes requests of everybody", []Guard{RaftStreams}, []edit{
		{"consensus/server.go", "newInbound(s.cfg.ID, s.cfg.Listener, s.maySend, config, s.log)",
			"newInbound(s.cfg.ID, s.cfg.Listener, func(identity.ID) error { return nil }, config, s.log)"},
	}, []string{"append an entry that revokes a node, at a higher term"}},
	{"names are any text", []Guard{Names}, []edit{
		{"events/validate_pool.go",
			"case !dnsname.IsLabel(name):",
			"case !dnsname.IsLabel(name) && strings.Trim(name, \"abcdefghijklmnopqrstuvwxyz0123456789-./\") != \"\":"},
	}, []string{"an admin makes a pool that is called like a path"}},
	{"addresses get pings without an answer", []Guard{Proof}, []edit{
		{"agent/path/budget.go", "	unprovenPings = 3 ", "	unprovenPings = 250 "},
		{"agent/path/budget.go", "	unprovenPerIP = 4 ", "	unprovenPerIP = 64 "},
	}, []string{"name a bystander's ports as its own addresses, so that all members send there"}},
}

// patched gives the sources below root with all holes in them, by path.
func patched(root string, holes []hole) (map[string][]byte, error) {
	var edits []edit
	for _, h := range holes {
		if _, err := overlay.Files(root, h.edits); err != nil { // each fits by itself, whatever another one changes
			return nil, fmt.Errorf("hole %q cannot be made: %w", h.name, err)
		}
		edits = append(edits, h.edits...)
	}
	files, err := overlay.Files(root, edits)
	if err != nil {
		return nil, fmt.Errorf("one hole closes another: %w", err)
	}
	return files, nil
}

// build makes the program with the holes in it, in dir.
func build(ctx context.Context, root, dir string, holes []hole) (binary string, err error) {
	files, err := patched(root, holes)
	if err != nil {
		return "", err
	}
	if binary, err = overlay.BuildSkein(ctx, root, dir, files); err != nil {
		return "", fmt.Errorf("with holes: %w", err)
	}
	return binary, nil
}

// Holes builds skein with every hole, below root, runs the attempts that must find them, and says which were not found.
// The report is of attempts that are expected to gain.
func Holes(ctx context.Context, root string, opts Options) (*Report, error) {
	dir, err := os.MkdirTemp("", "redteam-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	root, err = filepath.Abs(root)
	if err != nil {
		return nil, err
	}
	if opts.Lab.Binary, err = build(ctx, root, dir, holes); err != nil {
		return nil, err
	}
	opts.Names = nil
	for _, h := range holes {
		opts.Names = append(opts.Names, h.seen...)
	}
	opts.Expected = true
	r, err := Run(ctx, opts)
	if err != nil {
		return r, err
	}
	return r, errors.Join(unseen(holes, r)...)
}

// unseen lists the holes that an attempt did not find.
func unseen(holes []hole, r *Report) (errs []error) {
	for _, h := range holes {
		for _, name := range h.seen {
			found := false
			for _, o := range r.Outcomes {
				found = found || o.Name == name && o.Gained != ""
			}
			if !found {
				errs = append(errs, fmt.Errorf("hole %q (%s): %q gains nothing, so it proves nothing", h.name,
					strings.Join(texts(h.guards), ", "), name))
			}
		}
	}
	return errs
}

func texts(guards []Guard) (out []string) {
	for _, g := range guards {
		out = append(out, string(g))
	}
	return out
}
