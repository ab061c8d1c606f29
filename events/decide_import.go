package events

import (
	"fmt"
	"net/netip"
	"strings"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// Bounds of an import.
const (
	MaxImportPools  = MaxPools
	MaxImportBlocks = 16_384
	maxConflicts    = 50  // named in a refusal
	maxPlan         = 100 // lines of the answer; a dry run gives them all
)

// importer applies an import to a scratch state, piece by piece, so that each piece is checked against those before
// it. The decision's own events come of it only if nothing conflicts.
type importer struct {
	d         *decision
	plan      []string
	conflicts []string
	refused   map[string]bool // pools that conflict
	there     int             // pieces that are as they should be
}

// importPools takes all of it or nothing.
func (d *decision) importPools(c *skeinv1.ImportPools) error {
	if p, b := len(c.GetPools()), len(c.GetBlocks()); p > MaxImportPools || b > MaxImportBlocks {
		return refuse(InvalidArgument, "an import of %d pools and %d blocks is too large: at most %d and %d are allowed at "+
			"once; split it by pool", p, b, MaxImportPools, MaxImportBlocks)
	}
	scratch := *d
	scratch.s, scratch.events, scratch.answer = d.s.Clone(), nil, &skeinv1.Answer{}
	im := &importer{d: &scratch, refused: map[string]bool{}}
	for _, p := range c.GetPools() {
		before := len(im.conflicts)
		im.pool(p)
		if len(im.conflicts) > before {
			im.refused[p.GetName()] = true
		}
	}
	for _, b := range c.GetBlocks() {
		if im.refused[b.GetPool()] && im.d.s.poolState(b.GetPool()) == nil {
			continue // the pool's conflict says it for all of its blocks
		}
		im.block(b)
	}
	if len(im.conflicts) > 0 {
		return im.refuse()
	}
	d.answer.Plan = im.lines(len(im.plan))
	if c.GetDryRun() {
		d.silent = true
		return nil
	}
	d.events = scratch.events
	d.answer.Plan = im.lines(maxPlan)
	return nil
}

func (im *importer) refuse() error {
	shown := im.conflicts[:min(len(im.conflicts), maxConflicts)]
	return refuse(FailedPrecondition, "nothing was imported, because of %d conflicts:\n- %s%s\nrepair them in the file "+
		"or here, then import it again",
		len(im.conflicts), strings.Join(shown, "\n- "), strings.Replace(more(len(im.conflicts)-len(shown)), " and", "\n-", 1))
}

// lines are the plan: a summary and up to so many lines of it.
func (im *importer) lines(limit int) []string {
	out := []string{fmt.Sprintf("%d changes, %d are there already", len(im.plan), im.there)}
	out = append(out, im.plan[:min(len(im.plan), limit)]...)
	if n := len(im.plan) - limit; n > 0 {
		out = append(out, fmt.Sprintf("and %d more", n))
	}
	return out
}

func (im *importer) conflict(err error) { im.conflicts = append(im.conflicts, err.Error()) }

// done folds what a piece emitted into the scratch state, whose index then is ahead like the events.
func (im *importer) done(at int, line string) {
	d := im.d
	for _, e := range d.events[at:] {
		if err := d.s.Fold(e); err != nil {
			im.conflict(err) // unreachable: the events follow one another
			return
		}
	}
	if len(d.events) == at {
		im.there++
		return
	}
	im.plan = append(im.plan, line)
}

// pool makes a pool, or adds the subnets that it has more than the one that is there. What else was set here stays.
func (im *importer) pool(want *skeinv1.Pool) {
	p, l, err := readPool(want)
	if err != nil {
		im.conflict(err)
		return
	}
	at := len(im.d.events)
	old := im.d.s.poolState(p.GetName())
	if old == nil {
		if err := im.d.createPool(&skeinv1.CreatePool{Pool: p}); err != nil {
			im.conflict(err)
			return
		}
		im.done(at, fmt.Sprintf("make pool %s: %s, blocks of 2^%d addresses", p.GetName(), l, l.bits))
		return
	}
	if old.layout.bits != l.bits {
		im.conflict(refuse(FailedPrecondition, "pool %s: it has blocks of 2^%d addresses here and of 2^%d there", p.GetName(),
			old.layout.bits, l.bits))
		return
	}
	for i := range min(len(l.runs), len(old.layout.runs)) {
		if l.runs[i] != old.layout.runs[i] {
			im.conflict(refuse(FailedPrecondition, "pool %s: its subnet %d is %s here and %s there", p.GetName(), i+1,
				old.layout.runs[i], l.runs[i]))
			return
		}
	}
	next := proto.CloneOf(old.pool)
	if len(p.Subnets) > len(next.Subnets) {
		next.Subnets = p.Subnets
	}
	if err := im.d.emitPoolChanged(old, next); err != nil {
		im.conflict(err)
		return
	}
	im.done(at, fmt.Sprintf("extend pool %s to %s", p.GetName(), l))
}

// String lists the subnets.
func (l *layout) String() string {
	var out []string
	for _, r := range l.runs {
		out = append(out, r.String())
	}
	return strings.Join(out, " ")
}

// block gives a block to its node, or reserves it.
func (im *importer) block(want *skeinv1.ImportBlock) {
	name := strings.Trim(want.GetIpv4()+","+want.GetIpv6(), ",")
	r, n, err := im.find(want)
	if err != nil {
		im.conflict(err)
		return
	}
	node, reason, err := im.owner(want, name)
	if err != nil {
		im.conflict(err)
		return
	}
	at, have := len(im.d.events), r.block(n)
	if have != nil && im.is(have, node, reason, want) {
		im.done(at, "")
		return
	}
	who := "reserve it " + reason
	if node != nil {
		who = "give it to node " + node.GetName()
	}
	if waits, ok := importedFor(have); have != nil && (!ok || node == nil || waits != want.GetNode()) {
		im.conflict(refuse(FailedPrecondition, "block %s of pool %s: it belongs to %s here, and the import would %s", name,
			want.GetPool(), im.d.s.ownerOf(have), who))
		return
	}
	if have == nil && r.pool.GetDraining() {
		im.conflict(refuseDraining(r.pool))
		return
	}
	if d := im.d; d.s.numbers >= MaxNumbers && !r.given(n) {
		im.conflict(d.refuseExhausted(r))
		return
	}
	if node != nil && im.d.s.blockCount(node.GetId()) >= MaxNodeBlocks {
		im.conflict(refuse(ResourceExhausted, "block %s of pool %s: node %s would have more than %d blocks", name,
			want.GetPool(), node.GetName(), MaxNodeBlocks))
		return
	}
	im.d.emitBlock(r, n, node.GetId(), reason)
	im.done(at, fmt.Sprintf("block %s of pool %s: %s", name, want.GetPool(), who))
}

// is reports whether a block is as an import wants it: the node's, or reserved. A block that is to be reserved
// for nobody may be reserved for any reason.
func (im *importer) is(have *skeinv1.Block, node *skeinv1.Node, reason string, want *skeinv1.ImportBlock) bool {
	if node != nil || have.GetNodeId() != "" {
		return have.GetNodeId() == node.GetId()
	}
	return want.GetNode() == "" || have.GetReason() == reason
}

// owner is the member that shall have a block or, if there is none, why it shall be reserved.
func (im *importer) owner(want *skeinv1.ImportBlock, name string) (*skeinv1.Node, string, error) {
	what := fmt.Sprintf("block %.80s of pool %s: ", name, want.GetPool())
	if err := checkText(what+"the reason", want.GetReason(), MaxText); err != nil {
		return nil, "", err
	}
	if want.GetNode() == "" {
		if want.GetReason() == "" {
			return nil, "imported", nil
		}
		return nil, want.GetReason(), nil
	}
	if err := checkKubeName(what+"node", want.GetNode()); err != nil {
		return nil, "", err
	}
	if n := im.d.s.NodeByName(want.GetNode()); n != nil {
		return n, "", nil
	}
	return nil, importedPrefix + want.GetNode() + importedSuffix, nil
}

// find is the block that an import means. Each family that it names must be that block's.
func (im *importer) find(want *skeinv1.ImportBlock) (*poolState, uint64, error) {
	r, err := im.d.pool(want.GetPool())
	if err != nil {
		return nil, 0, refuse(NotFound, "block %.80s: %s", strings.Trim(want.GetIpv4()+","+want.GetIpv6(), ","), err)
	}
	var found bool
	var n uint64
	for i, s := range []string{want.GetIpv4(), want.GetIpv6()} {
		if s == "" {
			continue
		}
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Addr().Is6() != (i == 1) {
			return nil, 0, refuse(InvalidArgument, "block %.80q of pool %s is not a prefix", s, want.GetPool())
		}
		at, _, ok := r.layout.find(p.Addr())
		ipv4, ipv6, _ := r.layout.block(at)
		if !ok || p != ipv4 && p != ipv6 {
			return nil, 0, refuse(InvalidArgument, "%s is not a block of pool %s, whose blocks have 2^%d addresses of %s", s,
				want.GetPool(), r.layout.bits, r.layout)
		}
		if found && n != at {
			return nil, 0, refuse(InvalidArgument, "%s and %s are not one block of pool %s", want.GetIpv4(),
				want.GetIpv6(), want.GetPool())
		}
		n, found = at, true
	}
	if !found {
		return nil, 0, refuse(InvalidArgument, "a block of pool %s has neither an IPv4 nor an IPv6 prefix", want.GetPool())
	}
	return r, n, nil
}
