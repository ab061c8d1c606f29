package events

import (
	"fmt"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// largestAnswer bounds a remembered answer: 16 blocks of a pool with a long name, or a grant of a namespace with one,
// and the longest request ID.
const largestAnswer = 1024

// TestRememberedAnswersAreSmall changes large things many times: what the state remembers does not grow with them.
func TestRememberedAnswersAreSmall(t *testing.T) {
	w := newEgresses(t)
	long := strings.Repeat("p", MaxName)
	p := pool(long, 0, "10.70.0.0/16,fd70::/112")
	p.Quotas = map[string]uint32{}
	for i := range 1000 {
		p.Quotas[fmt.Sprintf("team-%04d-%s", i, strings.Repeat("x", 200))] = 1000
	}
	e := egress(strings.Repeat("n", MaxName)+"/"+long, "192.0.2.0/24", 1)
	for i := range 1000 {
		e.Destinations = append(e.Destinations, fmt.Sprintf("11.%d.%d.0/24", i/200, i%200))
	}
	var blocks []*skeinv1.ImportBlock
	for i := range 200 {
		blocks = append(blocks, importBlock(long, fmt.Sprintf("10.70.250.%d/32", i), "", strings.Repeat("r", MaxText)))
	}
	labels := map[string]string{}
	for i := range 20 {
		labels[fmt.Sprint("label-", i)] = strings.Repeat("v", MaxLabelText)
	}
	for i, c := range []*skeinv1.Command{
		createPool(p), setPool(long, &skeinv1.Pool{CooldownSeconds: 1}, "cooldown_seconds"), define(e),
		setEgress(e, "destinations"),
		imports(false, nil, blocks...), changeNode("b", "", labels), allocate("a", long, MaxBlocksAtOnce),
		reserve(long, "10.70.99.1/32", strings.Repeat("x", MaxText)),
		keep(long, "10.70.99.2", strings.Repeat("n", MaxNamespace), strings.Repeat("p", MaxNamespace)),
		grant("a", long, "team-0000-"+strings.Repeat("x", 200), 7), addServer(id("b")), createToken("t", 1, false),
	} {
		c.RequestId = fmt.Sprintf("%0*d", MaxText, i)
		_, first, err := w.propose(c)
		if err != nil {
			t.Fatalf("%T: %v", c.GetBody(), err)
		}
		if n := proto.Size(w.s.stored(answerKey(c))); n > largestAnswer {
			t.Errorf("the answer to %T takes %d bytes, at most %d are allowed", c.GetBody(), n, largestAnswer)
		}
		checkRetry(t, w.s, c, first)
	}
}

// TestAnswersAboutWhatIsGone: a retry that comes after the thing is gone, or is another's, still learns that its
// command was carried out, and when.
func TestAnswersAboutWhatIsGone(t *testing.T) {
	w := newEgresses(t)
	retry := func(c *skeinv1.Command, first *skeinv1.Answer) *skeinv1.Answer {
		t.Helper()
		again := w.must(c)
		if again.GetIndex() != first.GetIndex() {
			t.Fatalf("a retry of %v is answered at %d, it was carried out at %d", c, again.GetIndex(), first.GetIndex())
		}
		return again
	}
	makes, gives := withID("pool", createPool(pool("p", 4, "10.66.0.0/24"))), withID("blocks", allocate("a", "p", 2))
	made, gave := w.must(makes), w.must(gives)
	token := withID("token", createToken("t", 1, false))
	tokenMade := w.must(token)

	w.must(release("a", "p", 0))
	w.must(revokeToken("t"))
	if b := retry(gives, gave).GetBlocks(); len(b) != 2 || b[0].GetNodeId() != "" || b[0].GetIpv4() != "10.66.0.0/28" ||
		!proto.Equal(b[1], gave.GetBlocks()[1]) {
		t.Fatalf("the blocks are %v", b)
	}
	if v := retry(token, tokenMade).GetToken(); v.GetId() != tokenID("t") || v.GetUses() != 0 {
		t.Fatalf("the token is %v", v)
	}
	w.must(release("a", "p", 1))
	w.must(removePool("p"))
	w.must(createPool(pool("p", 2, "10.67.0.0/24")))
	if p := retry(makes, made).GetPool(); p.GetName() != "p" || len(p.GetSubnets()) != 0 {
		t.Fatalf("the pool is %v: another one of that name was made since", p)
	}
	joins := withID("join", today(admit("x", "1")))
	w.must(joins)
	labels := withID("labels", changeNode("x", "", map[string]string{"a": "b"}))
	labelled := w.must(labels)
	w.must(revoke(id("x")))
	if n := retry(labels, labelled).GetNode(); n.GetName() != "x" {
		t.Fatalf("the revoked node is %v", n)
	}
	if _, _, err := w.propose(joins); CodeOf(err) != PermissionDenied {
		t.Fatalf("a revoked node that joins again is answered: %v", err)
	}
}

// TestWholeAnswersStay: answers that an earlier version's leader put into the log are given as they are.
func TestWholeAnswersStay(t *testing.T) {
	w := newPools(t)
	w.must(createPool(pool("p", 4, "10.66.0.0/24")))
	was := &skeinv1.Answer{RequestId: "old", Index: w.s.Index() + 1, Pool: proto.CloneOf(w.s.Pool("p")),
		Node: proto.CloneOf(w.s.NodeByName("a"))}
	was.Pool.CooldownSeconds, was.Node.Name = 77, "once"
	e := &skeinv1.Event{Index: was.Index, Time: w.s.Time(), Schema: 1,
		Body: &skeinv1.Event_CommandAnswered{CommandAnswered: &skeinv1.CommandAnswered{Answer: was}}}
	if err := w.s.Fold(e); err != nil {
		t.Fatal(err)
	}
	if have := w.s.AnswerTo("old"); !proto.Equal(have, was) {
		t.Fatalf("have %v, want %v", have, was)
	}
}
