package e2e

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func TestRevoke(t *testing.T) {
	l := shared(t)
	voters := func() error {
		client, err := l.Client("seed")
		if err != nil {
			return err
		}
		st, err := client.Status(t.Context(), &skeinv1.StatusRequest{})
		if err != nil {
			return err
		}
		n := 0
		for _, s := range st.GetServers() {
			if s.GetVoter() {
				n++
			}
		}
		if n != 3 {
			return errNotYet
		}
		return nil
	}
	eventually(t, "three servers vote", voters)

	seed := func(args ...string) (string, int) {
		out, exit, err := l.Exec(t.Context(), "seed", append([]string{"skein"}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(out), exit
	}
	out, exit := seed("node", "revoke", "nobody-here")
	if want := "skein: no member is called \"nobody-here\"; see `skein nodes`"; out != want || exit != 1 {
		t.Errorf("exit status %d, %s\nwant %s", exit, out, want)
	}
	out, exit = seed("node", "revoke", "third")
	if want := "skein: without third two voters would be left, and the cluster would stand still when either fails: add " +
		"another server first, or repeat it with --force"; out != want || exit != 1 {
		t.Errorf("exit status %d, %s\nwant %s", exit, out, want)
	}
	onSeed(t, "node", "revoke", "third", "--force", "--reason", "retired")
	if nodes := onSeed(t, "nodes"); strings.Contains(nodes, "third") {
		t.Errorf("the revoked server is still a member:\n%s", nodes)
	}
}

func TestRevokedAgent(t *testing.T) {
	s := newSite(t, "spare", "stolen", nil)
	before := kernel(t, "spare")
	p := s.running("--join", token(t))
	eventually(t, "it follows the log", func() error {
		if s.status().GetPeersDirect()+s.status().GetPeersRelay() == 0 {
			return errNotYet
		}
		return nil
	})
	var met time.Time
	eventually(t, "the seed has a path to it", func() error {
		g := graphOnSeed(t)
		if way := pathTo(g, "stolen"); way != "direct" && way != "relay" {
			return errNotYet
		}
		met = time.Unix(0, g.GetTime())
		return nil
	})
	onSeed(t, "node", "revoke", "stolen", "--reason", "lost laptop")
	if exit := p.ends(); exit != 1 {
		t.Errorf("exit status %d", exit)
	}
	s.complains(p.log.String(), "this node was revoked (lost laptop): its links are removed; move {state} away to get a "+
		"new identity, and join with a new token")
	if after := kernel(t, "spare"); after != before {
		t.Errorf("the revoked node's kernel differs from what it was:\n%s", diff(before, after))
	}
	// The picture of now has it no more, the one of then still has, with its path of then.
	for _, format := range []string{"dot", "svg"} {
		if now := onSeed(t, "graph", "-o", format); strings.Contains(now, "stolen") || !strings.Contains(now, "seed") {
			t.Errorf("the picture of now:\n%s", now)
		}
		if then := onSeed(t, "graph", "-o", format, "--at", met.Format(time.RFC3339Nano)); !strings.Contains(then, "stolen") {
			t.Errorf("the picture of then:\n%s", then)
		}
	}
	then := graphOnSeed(t, "--at", met.Format(time.RFC3339Nano))
	if way := pathTo(then, "stolen"); !then.GetPast() || way != "direct" && way != "relay" {
		t.Errorf("then the path was %q: %v", way, then.GetNotes())
	}
	// Whether or not the log still reached it, a start says the same.
	const again = "this node was revoked (lost laptop): …move {state} away to get a new identity, and join with a new " +
		"token"
	s.fails(1, again, s.upArgs()...)
}

// graphOnSeed is what the seed draws.
func graphOnSeed(t *testing.T, args ...string) *skeinv1.GraphResponse {
	t.Helper()
	g := &skeinv1.GraphResponse{}
	if err := protojson.Unmarshal([]byte(onSeed(t, append([]string{"graph", "-o", "json"}, args...)...)), g); err != nil {
		t.Fatal(err)
	}
	return g
}

// pathTo is the path to a member in a graph, empty if it has none of that name.
func pathTo(g *skeinv1.GraphResponse, name string) string {
	for _, n := range g.GetNodes() {
		if n.GetNode().GetName() == name {
			return n.GetPath()
		}
	}
	return ""
}
