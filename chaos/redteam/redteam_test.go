package redteam

import (
	"bytes"
	"context"
	"flag"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/labtest"
	"github.com/skeinmesh/skein/internal/golden"
	"github.com/skeinmesh/skein/internal/marks"
)

// The catalogue covers every place and every guard, and no two attempts have the same name.
func TestCatalogue(t *testing.T) {
	names, places, guards := map[string]bool{}, map[Place]int{}, map[Guard]int{}
	for _, a := range All() {
		if key := string(a.From) + a.Name; names[key] || a.Try == nil || a.Judge == nil || a.Guard == "" {
			t.Errorf("%s: %s: a second one of this name, or not whole", a.From, a.Name)
		} else {
			names[key] = true
		}
		places[a.From]++
		guards[a.Guard]++
	}
	if len(names) < 50 {
		t.Errorf("%d attempts, at least 50 are promised", len(names))
	}
	for _, p := range []Place{Member, GossipKey, Token, Revoked, Pod, Neighbour, Stranger, PlainPeer, Overheard} {
		if places[p] == 0 {
			t.Errorf("nothing is tried from: %s", p)
		}
	}
	open := map[Guard]bool{}
	for _, h := range holes {
		for _, g := range h.guards {
			if open[g] = true; guards[g] == 0 {
				t.Errorf("hole %q opens a guard that nothing meets: %s", h.name, g)
			}
			if !slices.ContainsFunc(All(), func(a Attempt) bool { return a.Guard == g && slices.Contains(h.seen, a.Name) }) {
				t.Errorf("hole %q opens a guard that no attempt is to see: %s", h.name, g)
			}
		}
		for _, name := range h.seen {
			if !slices.ContainsFunc(All(), func(a Attempt) bool { return a.Name == name }) {
				t.Errorf("hole %q is to be seen by an attempt that there is not: %q", h.name, name)
			}
		}
	}
	for g := range guards {
		if !open[g] {
			t.Errorf("no hole shows what an attempt gains without the guard: %s", g)
		}
	}
}

// Each patch fits the sources as they are.
func TestHolesFit(t *testing.T) {
	if _, err := patched("../..", holes); err != nil {
		t.Error(err)
	}
}

func TestUnseenHolesAreTold(t *testing.T) {
	r := &Report{Outcomes: []Outcome{{Name: "a", Gained: "x"}, {Name: "b"}}}
	if errs := unseen([]hole{{name: "one", seen: []string{"a"}}, {name: "two", seen: []string{"b"}},
		{name: "three", seen: []string{"c"}}}, r); len(errs) != 2 {
		t.Errorf("%v", errs)
	}
}

func TestJudges(t *testing.T) {
	node := func(name string, change func(*skeinv1.Node)) *skeinv1.State {
		n := &skeinv1.Node{Id: name, Name: name, MaxSchema: 3}
		if change != nil {
			change(n)
		}
		return &skeinv1.State{Nodes: []*skeinv1.Node{n}}
	}
	slot := func(owner string, epoch uint64) *skeinv1.State {
		return &skeinv1.State{Slots: []*skeinv1.EgressSlot{{Namespace: "out", Name: "fixed", NodeId: owner, Epoch: epoch}}}
	}
	record := func(epoch, seq uint64, site string) *skeinv1.Record {
		return &skeinv1.Record{Epoch: epoch, Seq: seq, Site: site}
	}
	for name, c := range map[string]struct {
		judge  func(Seen) string
		seen   Seen
		gained bool
	}{
		"another part of the log changes": {changed("x", poolsOf),
			Seen{Before: node("prey", nil), After: node("other", nil)}, false},
		"that part changes": {changed("x", nodesOf),
			Seen{Before: node("prey", nil), After: node("other", nil)}, true},
		"the prey is as it was": {changed("x", preyOf),
			Seen{Before: node("prey", nil), After: node("prey", nil)}, false},
		"the prey is drained": {changed("x", preyOf),
			Seen{Before: node("prey", nil), After: node("prey", func(n *skeinv1.Node) { n.Draining = true })}, true},
		"the log is shorter": {disturbed,
			Seen{Before: &skeinv1.State{Index: 9}, After: &skeinv1.State{Index: 8}}, true},
		"the log goes on": {disturbed,
			Seen{Before: &skeinv1.State{Index: 9}, After: &skeinv1.State{Index: 10}}, false},
		"another leader": {disturbed,
			Seen{Before: &skeinv1.State{}, After: &skeinv1.State{}, Lost: []string{"dc1 leads no more"}}, true},
		"a forged revocation": {disturbed,
			Seen{Before: &skeinv1.State{}, After: &skeinv1.State{Revoked: []*skeinv1.RevokedNode{{Reason: "forged"}}}}, true},
		"a member more": {admitted, Seen{Before: &skeinv1.State{}, After: node("new", nil)}, true},
		"a server more": {admitted,
			Seen{Before: &skeinv1.State{}, After: &skeinv1.State{Servers: []*skeinv1.Server{{}}}}, true},
		"a stranger is told the state": {admitted,
			Seen{Before: &skeinv1.State{}, After: &skeinv1.State{}, Given: []string{"the state"}}, true},
		"a stranger is refused": {admitted,
			Seen{Before: &skeinv1.State{}, After: &skeinv1.State{}, Refusal: "no"}, false},
		"the slot stays":             {slotMoves, Seen{Before: slot("a", 1), After: slot("a", 1)}, false},
		"the slot has another epoch": {slotMoves, Seen{Before: slot("a", 1), After: slot("a", 2)}, true},
		"the slot has another owner": {slotMoves, Seen{Before: slot("a", 1), After: slot("b", 1)}, true},
		"nothing arrives":            {arrived, Seen{}, false},
		"a packet arrives":           {arrived, Seen{Arrived: []string{"10.4.0.1"}}, true},
		"as many as are allowed":     {bounded("packets"), Seen{Count: 5, Bound: 5}, false},
		"one too many":               {bounded("packets"), Seen{Count: 6, Bound: 5}, true},
		"few, and others lose":       {bounded("packets"), Seen{Count: 1, Bound: 5, Lost: []string{"x"}}, true},
		"the victim's record is forged": {forgedRecord,
			Seen{Records: []*skeinv1.Record{record(1, 1, "s"), record(2, 1, forgedSite)}}, true},
		"the victim outbids a forged record": {forgedRecord,
			Seen{Records: []*skeinv1.Record{record(1, 1, "s"), record(forgedEpoch, 3, "s")}}, true},
		"the victim's record goes back": {forgedRecord,
			Seen{Records: []*skeinv1.Record{record(2, 7, "s"), record(2, 6, "s")}}, true},
		"the victim's record goes on": {forgedRecord,
			Seen{Records: []*skeinv1.Record{record(2, 7, "s"), record(2, 8, "s")}}, false},
		"a false word is believed":         {believed, Seen{Believed: time.Millisecond}, true},
		"a member's false word is refuted": {believedLong, Seen{Believed: time.Second}, false},
		"a member's false word stays":      {believedLong, Seen{Believed: 3 * time.Second}, true},
		"the schema of a server is lower": {heldBack,
			Seen{Before: node("dc2", nil), After: node("dc2", func(n *skeinv1.Node) { n.MaxSchema = 1 })}, true},
		"the attacker's own schema is lower": {heldBack,
			Seen{Before: node(attacker, nil), After: node(attacker, func(n *skeinv1.Node) { n.MaxSchema = 1 })}, false},
		"the prey has another key": {takenOver("prey"),
			Seen{Before: node("prey", nil), After: node("prey", func(n *skeinv1.Node) { n.WireguardKey = []byte{1} })}, true},
		"the prey has other schemas": {takenOver("prey"),
			Seen{Before: node("prey", nil), After: node("prey", func(n *skeinv1.Node) { n.MaxSchema = 4 })}, true},
		"the prey is gone": {takenOver("prey"),
			Seen{Before: node("prey", nil), After: node("other", nil)}, true},
		"another member has another key": {takenOver("prey"),
			Seen{Before: node("other", nil), After: node("other", func(n *skeinv1.Node) { n.WireguardKey = []byte{1} })}, false},
		"the prey keeps key and schemas": {takenOver("prey"),
			Seen{Before: node("prey", nil), After: node("prey", func(n *skeinv1.Node) { n.Draining = true })}, false},
		"a node applies a forged revocation": {misled,
			Seen{After: &skeinv1.State{Revoked: []*skeinv1.RevokedNode{{Reason: forgedReason}}}}, true},
		"a node applies a true one": {misled,
			Seen{After: &skeinv1.State{Revoked: []*skeinv1.RevokedNode{{Reason: "red team"}}}}, false},
		"a node goes on no more":            {misled, Seen{After: &skeinv1.State{}, Lost: []string{"x"}}, true},
		"events come within twelve seconds": {heldBackEvents, Seen{Believed: 12 * time.Second}, false},
		"events come later":                 {heldBackEvents, Seen{Believed: 16 * time.Second}, true},
		"a dead member passes for alive":    {believedAlive, Seen{Believed: 3 * time.Second}, true},
		"it does until the news is there":   {believedAlive, Seen{Believed: time.Second}, false},
		"a node shows the forged record": {shownForged,
			Seen{Records: []*skeinv1.Record{{Version: forgedSite}, {}}}, true},
		"a node shows what its owner signed": {shownForged,
			Seen{Records: []*skeinv1.Record{{}, {Version: "genuine"}}}, false},
		"a leader by its own word is used": {usedAsLeader, Seen{Believed: time.Millisecond}, true},
		"a leader by its own word is not":  {usedAsLeader, Seen{}, false},
		"an admin's command fails since then": {heldBack,
			Seen{Before: node("dc2", nil), After: node("dc2", nil), Lost: []string{"x"}}, true},
	} {
		if got := c.judge(c.seen); (got != "") != c.gained {
			t.Errorf("%s: the judge says %q", name, got)
		}
	}
}

// Of files that cannot all be written none stays changed.
func TestFilesAreWrittenAllOrNone(t *testing.T) {
	dir := t.TempDir()
	values := map[string]string{}
	content := func() (out string) {
		for _, name := range []string{"a", "b", "c"} {
			b, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			out += string(b)
		}
		return out
	}
	for _, name := range []string{"a", "b", "c"} {
		values[filepath.Join(dir, name)] = "2"
		if err := os.WriteFile(filepath.Join(dir, name), []byte("1"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	here := func(do func() error) error { return do() }
	restore, err := writeFiles(here, values)
	if have := content(); err != nil || have != "222" {
		t.Fatalf("%q, %v", have, err)
	}
	if restore(); content() != "111" {
		t.Errorf("taken back, they hold %q", content())
	}
	values[filepath.Join(dir, "nowhere", "d")] = "2"
	if _, err := writeFiles(here, values); err == nil || content() != "111" {
		t.Errorf("one cannot be written: they hold %q, %v", content(), err)
	}
}

// What a server says to a request that is too large, and that it ends the stream or does not.
func TestTooLargeIsJudged(t *testing.T) {
	say := func(r *skeinv1.JoinResponse) []byte {
		var b bytes.Buffer
		if err := writeMessage(&b, r); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	i := slices.IndexFunc(All(), func(a Attempt) bool { return a.Name == "announce a join request of 2 GiB" })
	judge := All()[i].Judge
	for name, c := range map[string]struct {
		said   []byte
		stays  bool
		gained bool
	}{
		"it ends the stream": {},
		"it refuses":         {said: say(&skeinv1.JoinResponse{ErrorCode: "too_large", ErrorMessage: "no"})},
		"it waits for more":  {stays: true, gained: true},
		"it answers":         {said: say(&skeinv1.JoinResponse{Time: 1}), gained: true},
		"it refuses and gives the state": {said: say(&skeinv1.JoinResponse{ErrorCode: "x", State: &skeinv1.State{}}),
			gained: true},
		"it says what is not an answer at all": {said: []byte("HTTP/1.1 400"), gained: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				near, far := net.Pipe()
				defer near.Close()
				go func() {
					_, _ = far.Write(c.said)
					if !c.stays {
						far.Close()
					}
				}()
				var seen Seen
				seen.answer(seen.waits(near, "it"))
				if got := judge(seen); (got != "") != c.gained {
					t.Errorf("the judge says %q, the attacker was told %q", got, seen.Refusal)
				}
				far.Close()
			})
		})
	}
}

// A datagram that is sent raw is one that a kernel would take.
func TestDatagram(t *testing.T) {
	for _, ends := range [][2]string{{"10.0.0.1:4444", "10.0.0.2:9998"}, {"[fd00::1]:4444", "[fd00::2]:9998"}} {
		from, to := netip.MustParseAddrPort(ends[0]), netip.MustParseAddrPort(ends[1])
		b := datagram(from, to, []byte("red team"))
		gotFrom, gotTo, payload, ok := udpOf(b)
		if !ok || gotFrom != from || gotTo != to || string(payload) != "red team" {
			t.Errorf("%s: read back as %s to %s, %q, %v", ends, gotFrom, gotTo, payload, ok)
		}
		udp, addresses := b[len(b)-16:], slices.Concat(from.Addr().AsSlice(), to.Addr().AsSlice())
		if sum := checksum(slices.Concat(addresses, []byte{0, 17, 0, 16}, udp)); sum != 0 {
			t.Errorf("%s: the checksum is wrong by %x", ends, sum)
		}
	}
}

func example() *Report {
	cost := func(lost int) *Cost {
		return &Cost{Sent: 500, Lost: lost, Median: time.Millisecond, P99: 3 * time.Millisecond}
	}
	return &Report{At: time.Date(2026, 11, 22, 0, 0, 0, 0, time.UTC), Seconds: 12, Alone: *cost(0), Beside: *cost(1),
		Outcomes: []Outcome{
			{Name: "revoke a node", From: Member, Guard: Roles, Refusal: "it | may not\ndo this"},
			{Name: "pose as a node", From: Pod, Guard: PodSources},
			{Name: "read the state", From: Stranger, Guard: RequestIDs, Gained: "the whole state"},
			{Name: "wait", From: Token, Guard: Tokens, Invalid: "no token"},
			{Name: "flood", From: Stranger, Guard: Front, Flood: true, Before: cost(0), During: cost(24)},
			{Name: "flood more", From: Stranger, Guard: Front, Flood: true, Before: cost(0), During: cost(25)},
		}}
}

func TestReport(t *testing.T) {
	var b strings.Builder
	r := example()
	r.Markdown(&b)
	text := strings.Replace(b.String(), " processors", " of these processors", 1)
	text = strings.Replace(text, "2026-11-22, "+strconv.Itoa(runtime.NumCPU()), "2026-11-22, N", 1)
	golden.Lines(t, "report", strings.Split(strings.TrimSpace(text), "\n"))
	err := r.Err()
	if err == nil || r.Gained() != 1 {
		t.Fatalf("%d gained, %v", r.Gained(), err)
	}
	for what, want := range map[string]bool{"read the state": true, "not tried": true, "flood more": true,
		"flood: ": false, "revoke": false} {
		if strings.Contains(err.Error(), what) != want {
			t.Errorf("the error says %q: %v; want %v:\n%v", what, !want, want, err)
		}
	}
	r.Outcomes = r.Outcomes[:2]
	if err := r.Err(); err != nil {
		t.Errorf("nothing was gained: %v", err)
	}
	r.Beside.Lost = 25
	if r.Err() == nil {
		t.Error("the pair lost 5 % beside the attempts, and nobody says so")
	}
}

// The document has the table, with every attempt of the catalogue and nothing gained.
func TestDocument(t *testing.T) {
	b, err := os.ReadFile("../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	text, ok := marks.Text(string(b), Begin)
	if !ok {
		t.Fatal("docs/security.md has no place for the table: `make redteam WRITE=docs/security.md`")
	}
	for _, a := range All() {
		if !strings.Contains(text, "| "+cell(a.Name)+" | "+string(a.From)+" |") {
			t.Errorf("docs/security.md does not show: %s: %s; `make redteam WRITE=docs/security.md` writes it", a.From, a.Name)
		}
	}
}

var tryAll = flag.Bool("all", false, "try the whole catalogue, not the short form")

// The short form of `make redteam`: all that takes no time.
func TestNobodyGains(t *testing.T) {
	dir, bin := labtest.Program(t)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	defer cancel()
	progress := func(string) {} // the error names what gained: hundreds of lines before it would hide it
	if testing.Verbose() {
		progress = func(s string) { t.Log(s) }
	}
	r, err := Run(ctx, Options{Lab: lab.Options{Dir: dir, Binary: bin}, Name: "rt" + strconv.Itoa(os.Getpid()),
		Short: !*tryAll, Artifacts: os.Getenv("SKEIN_TEST_ARTIFACTS"), Progress: progress})
	if err != nil {
		t.Error(err)
	}
	if len(r.Outcomes) < 50 {
		t.Errorf("%d attempts were made, at least 50 are promised", len(r.Outcomes))
	}
}
