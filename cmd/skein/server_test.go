package main

import (
	"context"
	"errors"
	"strings"
	"testing"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func (f *fakeAgent) SetRole(_ context.Context, r *skeinv1.SetRoleRequest) (*skeinv1.SetRoleResponse, error) {
	return answerTo[*skeinv1.SetRoleResponse](f, r)
}

func (f *fakeAgent) Status(_ context.Context, r *skeinv1.StatusRequest) (*skeinv1.StatusResponse, error) {
	return answerTo[*skeinv1.StatusResponse](f, r)
}

func TestServerAddAndRemove(t *testing.T) {
	f := newFakeAgent(t)
	dc2 := &skeinv1.Node{Id: "aa", Name: "dc2"}
	f.lay(&skeinv1.SetRoleRequest{}, &skeinv1.SetRoleResponse{Node: dc2, Role: "server", Index: 7})
	servers := func(index uint64, s ...*skeinv1.ServerStatus) {
		f.lay(&skeinv1.StatusRequest{}, &skeinv1.StatusResponse{Index: index, Servers: s})
	}
	dc1 := &skeinv1.ServerStatus{NodeId: "bb", Name: "dc1", Voter: true, Leader: true, Reachable: true}
	voter := &skeinv1.ServerStatus{NodeId: "aa", Name: "dc2", Voter: true, Reachable: true}
	waiting := &skeinv1.ServerStatus{NodeId: "aa", Name: "dc2", Waiting: "it has not shown yet that it has the whole log"}
	for _, c := range []struct {
		name      string
		index     uint64
		servers   []*skeinv1.ServerStatus
		args      string
		out, fail string
	}{
		{"it votes", 7, []*skeinv1.ServerStatus{voter, dc1}, "server add dc2",
			"node dc2 is a server and votes, as of event 7\n", ""},
		{"it does not yet", 7, []*skeinv1.ServerStatus{waiting, dc1}, "server add dc2 --wait 1ms", "",
			"the role change of node dc2 is not complete after 1ms: it has not shown yet that it has the whole log; " +
				"event 7 stands"},
		{"this node has not heard of it", 6, []*skeinv1.ServerStatus{voter}, "server add dc2 --wait 1ms", "",
			"the role change of node dc2 is not complete after 1ms; event 7 stands"},
		{"not waited for", 0, nil, "server add dc2 --wait 0", "node dc2 is a server, as of event 7\n", ""},
		{"it is gone", 8, []*skeinv1.ServerStatus{dc1}, "server remove dc2",
			"node dc2 is not a server any more, as of event 7\n", ""},
		{"it is not gone", 8, []*skeinv1.ServerStatus{dc1, voter}, "server remove dc2 --wait 1ms", "",
			"the role change of node dc2 is not complete after 1ms: it is still a server"},
		{"list", 7, []*skeinv1.ServerStatus{waiting, dc1}, "server list",
			"NAME  VOTES  LEADS  ALIVE  WAITS\ndc1   yes    yes    yes    -\ndc2   no     no     no     it has not shown yet " +
				"that it has the whole log\n", ""},
	} {
		servers(c.index, c.servers...)
		out, _, err := f.skein(t, strings.Fields(c.args)...)
		switch {
		case c.fail == "" && (err != nil || out != c.out):
			t.Errorf("%s: it says %q (%v), want %q", c.name, out, err, c.out)
		case c.fail != "" && (err == nil || !strings.HasPrefix(err.Error(), c.fail)):
			t.Errorf("%s: the error is %v, want %q", c.name, err, c.fail)
		}
	}
	var asked []string
	for _, r := range f.asked {
		if r, ok := r.(*skeinv1.SetRoleRequest); ok && r.GetWithdraw() {
			asked = append(asked, r.GetRole())
		}
	}
	if len(asked) != 2 || asked[0] != "server" {
		t.Errorf("the role was withdrawn %d times: %v", len(asked), asked)
	}

	f.err = connect.NewError(connect.CodeFailedPrecondition, errors.New("dc1 is the cluster's only voter"))
	if _, _, err := f.skein(t, "server", "remove", "dc1"); err == nil || err.Error() != "dc1 is the cluster's only voter" {
		t.Errorf("the error is %v", err)
	}
	for _, args := range []string{"server add", "server add a b", "server remove", "server add dc2 --wait -1s",
		"server list all"} {
		before := len(f.asked)
		if _, _, err := f.skein(t, strings.Fields(args)...); !errors.As(err, new(cli.UsageError)) || len(f.asked) != before {
			t.Errorf("skein %s: %v", args, err)
		}
	}
}
