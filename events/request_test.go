package events

import (
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func from(issuer string, c *skeinv1.Command) *skeinv1.Command {
	c.Issuer = issuer
	return c
}

// A request ID says which intent of one issuer a command repeats. Of anybody else, or with another kind of command, it
// is another command: a request ID that was seen in the log gets nobody the answer to it.
func TestRequestIDsBelongToIssuerAndKind(t *testing.T) {
	w := newCluster(t)
	w.must(admit("b", "1"))
	first := w.must(from(id("a"), withID("r", createToken("2", 1, false))))
	if again := w.must(from(id("a"), withID("r", createToken("2", 1, false)))); !proto.Equal(again, first) ||
		again.GetRequestId() != "r" {
		t.Errorf("the issuer's own retry is answered %v, want %v", again, first)
	}
	evs, a, err := w.propose(from(id("b"), withID("r", createToken("3", 1, false))))
	if err != nil || a.GetToken().GetId() != tokenID("3") || len(evs) != 2 {
		t.Errorf("another's command with the same request ID gives %v %v %v", briefs(evs), a, err)
	}
	evs, a, err = w.propose(from(id("a"), withID("r", rotateKey("a", "another key"))))
	if err != nil || a.GetNode().GetName() != "a" || len(evs) != 2 {
		t.Errorf("another command of the issuer with the same request ID gives %v %v %v", briefs(evs), a, err)
	}
	for _, a := range w.s.Proto().GetAnswers() {
		if strings.Contains(a.String(), `request_id:"r"`) {
			t.Errorf("the state shows a request ID: %v", a)
		}
	}
}

// An admission that was answered once is answered again to the same joiner alone, and only while what it shows is good.
func TestRememberedAdmissionIsNotForOthers(t *testing.T) {
	w := newCluster(t)
	w.must(from(id("a"), withID("r", admit("b", "1"))))
	joiner := func(name string, change ...func(*skeinv1.AdmitNode)) *skeinv1.Command {
		return from(id("a"), withID("r", admit(name, "1", change...)))
	}
	w.refused(joiner("x", func(c *skeinv1.AdmitNode) { c.TokenSecretHash = key("secret", "wrong") }), PermissionDenied,
		"is wrong or was revoked")
	w.refused(joiner("b", func(c *skeinv1.AdmitNode) { c.TokenSecretHash = key("secret", "wrong") }), PermissionDenied,
		"is wrong or was revoked")
	w.refused(joiner("b", func(c *skeinv1.AdmitNode) { c.ClusterId = strings.Repeat("1", 32) }), PermissionDenied,
		"is for cluster")
	if a := w.must(joiner("x")); a.GetNode().GetName() != "x" {
		t.Errorf("another joiner with the same request ID is answered %v", a)
	}
	w.must(revoke(id("b")))
	w.refused(joiner("b"), PermissionDenied, "was revoked")
}

// What a leader of an earlier version remembered under the request ID itself is nobody's: it is decided again.
func TestAnswersUnderTheRequestIDItselfAreNotFound(t *testing.T) {
	w := newCluster(t)
	evs, _, err := w.propose(from(id("a"), withID("r", createToken("2", 1, false))))
	if err != nil {
		t.Fatal(err)
	}
	old := newCluster(t)
	for _, e := range evs {
		if err := old.s.Fold(asWritten(e)); err != nil {
			t.Fatal(err)
		}
	}
	if old.s.AnswerTo("r") == nil {
		t.Fatal("the earlier version's answer is not in the state: the test proves nothing")
	}
	evs, a, err := old.propose(from(id("a"), withID("r", createToken("2", 1, false))))
	if err != nil || len(evs) != 1 || a.GetToken().GetId() != tokenID("2") {
		t.Errorf("it gives %v %v %v", briefs(evs), a, err)
	}
}

// Every event says who asked for it, and a version that does not know that folds it to the same state.
func TestEventsNameTheirIssuer(t *testing.T) {
	w := newCluster(t)
	evs, _, err := w.propose(from(id("a"), withID("r", admit("b", "1", asServer))))
	if err != nil || len(evs) == 0 {
		t.Fatal(err)
	}
	replayed := newCluster(t).s
	for _, e := range evs {
		if e.GetIssuer() != id("a") {
			t.Errorf("%v names no issuer", e)
		}
		e = proto.CloneOf(e)
		e.Issuer = ""
		e.ProtoReflect().SetUnknown([]byte{6<<3 | 2, 1, 'a'}) // as a version without the field has it
		if err := replayed.Fold(e); err != nil {
			t.Fatalf("a version that does not know the issuer: %v", err)
		}
	}
	checkSame(t, "without issuers", w.s, replayed)
}

// asWritten is an event as versions before roles decided it: they named an answer by the request ID.
func asWritten(e *skeinv1.Event) *skeinv1.Event {
	e = proto.CloneOf(e)
	if a := e.GetCommandAnswered().GetAnswer(); a != nil {
		a.RequestId = e.GetRequestId()
	}
	return e
}
