package kube

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/internal/testenv"
)

// quorumLab has three hosts behind NATs of three kinds that all let direct paths be found, and a relay.
const quorumLab = `name: quorum
sites:
  dc:     {nat: none}
  office: {nat: restricted-cone}
  home:   {nat: port-restricted-cone}
  attic:  {nat: full-cone}
nodes:
  hub: {site: dc, server: true, relay: true}
  e1:  {site: office}
  e2:  {site: home}
  e3:  {site: attic}
config: {directRetryIntervalSeconds: 3}
`

// writesBlocked is how long nothing may be written, at a cut or without a leader, which etcd waits for a second for.
const writesBlocked = 10 * time.Second

var quorumMembers = []string{"e1", "e2", "e3"}

// quorum is an etcd of three members, each behind another NAT, that know one another by overlay addresses.
type quorum struct {
	*testing.T
	lab      *lab.Lab
	dir      string
	programs string
	members  map[string]*program
	at       map[string]netip.Addr // overlay addresses
}

// TestEtcdInThreeNATs: an etcd whose members are behind three NATs keeps its quorum when every direct path between them
// is cut, and then with two members left; an apiserver works on it.
func TestEtcdInThreeNATs(t *testing.T) {
	testenv.NeedRoot(t)
	q := raiseQuorum(t)
	if err := q.paths("direct", 60*time.Second); err != nil {
		t.Fatal(err)
	}
	for _, m := range quorumMembers {
		q.start(m)
	}
	on, err := q.lab.Node("e1")
	if err != nil {
		t.Fatal(err)
	}
	c, err := Raise(t.Context(), Config{On: on, Dir: filepath.Join(q.dir, "control-plane"), Programs: q.programs,
		Etcd: q.urls(2379)})
	if err != nil {
		t.Fatalf("%v\n%s", err, q.logs())
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	writes := q.writes()
	began := time.Now()
	if err := q.lab.Block(lab.Block{From: quorumMembers, To: quorumMembers, Proto: "udp"}); err != nil {
		t.Fatal(err)
	}
	if err := q.paths("relay", 30*time.Second); err != nil {
		t.Fatalf("%v\n%s", err, q.logs())
	}
	for _, m := range quorumMembers { // each of them reaches the quorum
		if _, err := poll(t.Context(), 10*time.Second, tryEvery, func() error { return q.put(t.Context(), m) }); err != nil {
			t.Errorf("a write at %s with all direct paths cut: %v\n%s", m, err, q.logs())
		}
	}
	t.Logf("all paths are by the relay, and each member writes, %s after the cut",
		time.Since(began).Round(time.Millisecond))
	q.judge(writes, "direct paths cut")
	if err := q.create(c, "by-relay"); err != nil {
		t.Error("the apiserver, with all direct paths cut:", err)
	}
	q.loseOne(c)
}

// paths waits until all members reach one another so.
func (q *quorum) paths(how string, within time.Duration) error {
	return q.lab.Expect(q.Context(), within, lab.Expect{From: quorumMembers, To: quorumMembers, Reach: new(true),
		Path: []string{how}})
}

// loseOne kills the member that leads, or another one where that is e1.
func (q *quorum) loseOne(c *Cluster) {
	victim := "e2"
	if q.leads("e3") {
		victim = "e3"
	}
	q.Logf("%s is killed; it leads: %v", victim, q.leads(victim))
	writes := q.writes()
	member := q.members[victim]
	if err := stop(&member, syscall.SIGKILL); err != nil {
		q.Fatal(err)
	}
	if err := q.create(c, "by-two"); err != nil {
		q.Errorf("the apiserver, with two members of three by a relay: %v\n%s", err, q.logs())
	}
	q.judge(writes, "one member killed")
	q.start(victim)
	if _, err := poll(q.Context(), 20*time.Second, tryEvery, func() error {
		return q.put(q.Context(), victim)
	}); err != nil {
		q.Errorf("%s, which was killed, does not come back: %v\n%s", victim, err, q.logs())
	}
}

// create makes a ConfigMap by the apiserver, which may have made it though it did not say so.
func (q *quorum) create(c *Cluster, name string) error {
	_, err := poll(q.Context(), 20*time.Second, tryEvery, func() error {
		out, err := c.Kubectl(q.Context(), nil, "create", "configmap", name, "--from-literal=a=b")
		if err != nil && strings.Contains(out+err.Error(), "AlreadyExists") {
			return nil
		}
		return err
	})
	return err
}

// writes begins to write at e1, and waits until that goes well.
func (q *quorum) writes() *load {
	q.Helper()
	l := startLoad(q.T, "writes at e1", 50*time.Millisecond, func(ctx context.Context) error { return q.put(ctx, "e1") })
	if err := l.answers(q.Context(), 20, 30*time.Second); err != nil {
		q.Fatalf("%v\n%s", err, q.logs())
	}
	return l
}

// judge ends it once it goes well again, and says for how long nothing could be written.
func (q *quorum) judge(l *load, after string) {
	q.Helper()
	if err := l.answers(q.Context(), 20, 30*time.Second); err != nil {
		q.Errorf("%v\n%s", err, q.logs())
	}
	_, _, longest, text := l.report()
	q.Log(after + ": " + text)
	if longest > writesBlocked {
		q.Errorf("%s; at most %s without a write are allowed", text, writesBlocked)
	}
}

func raiseQuorum(t *testing.T) *quorum {
	programs, err := Programs("../..")
	if err != nil {
		testenv.Missing(t, err.Error())
	}
	dir, err := os.MkdirTemp("", "skq") // t.TempDir is too long for a socket's path
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	binary := filepath.Join(dir, "skein")
	build := exec.Command("go", "build", "-o", binary, "../../cmd/skein")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build skein: %v\n%s", err, out)
	}
	spec, err := lab.Parse("quorum.yaml", []byte(quorumLab))
	if err != nil {
		t.Fatal(err)
	}
	spec.Name = fmt.Sprintf("q%d", os.Getpid())
	artifacts := os.Getenv("SKEIN_ARTIFACTS")
	l, err := lab.Up(t.Context(), spec, lab.Options{Dir: filepath.Join(dir, "lab"), Binary: binary, Artifacts: artifacts,
		Progress: func(s string) { t.Log(s) }})
	if err != nil {
		t.Fatal(err)
	}
	q := &quorum{T: t, lab: l, dir: dir, programs: programs, members: map[string]*program{}, at: map[string]netip.Addr{}}
	t.Cleanup(func() {
		for _, m := range q.members {
			_ = stop(&m, syscall.SIGKILL)
		}
		if t.Failed() && artifacts != "" {
			if kept, err := l.SaveArtifacts(context.Background(), artifacts); err == nil {
				t.Log("logs and states are in", kept)
			}
		}
		if err := l.Down(context.Background()); err != nil {
			t.Error(err)
		}
	})
	if err := l.WaitConverged(t.Context(), 30*time.Second); err != nil {
		t.Fatal(err)
	}
	for _, m := range quorumMembers {
		if q.at[m], err = l.Overlay(m, "ipv4"); err != nil {
			t.Fatal(err)
		}
	}
	return q
}

// url is where a member listens.
func (q *quorum) url(member string, port uint16) string {
	return "http://" + netip.AddrPortFrom(q.at[member], port).String()
}

// urls are those of all members, with commas.
func (q *quorum) urls(port uint16) string {
	var out []string
	for _, m := range quorumMembers {
		out = append(out, q.url(m, port))
	}
	return strings.Join(out, ",")
}

func (q *quorum) logFile(member string) string { return filepath.Join(q.dir, member+".log") }

// start starts a member, again after it was killed.
func (q *quorum) start(member string) {
	q.Helper()
	on, err := q.lab.Node(member)
	if err != nil {
		q.Fatal(err)
	}
	log, err := os.OpenFile(q.logFile(member), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		q.Fatal(err)
	}
	defer log.Close()
	var all []string
	for _, m := range quorumMembers {
		all = append(all, m+"="+q.url(m, 2380))
	}
	p := exec.Command(filepath.Join(q.programs, "etcd"), "--name", member,
		"--data-dir", filepath.Join(q.dir, member+".etcd"), "--unsafe-no-fsync", "--logger", "zap", "--log-level", "warn",
		"--initial-cluster", strings.Join(all, ","),
		"--listen-peer-urls", q.url(member, 2380), "--initial-advertise-peer-urls", q.url(member, 2380),
		"--listen-client-urls", q.url(member, 2379), "--advertise-client-urls", q.url(member, 2379))
	p.Stdout, p.Stderr, p.Dir = log, log, q.dir
	if err := fabric.In(on.Namespace, p.Start); err != nil {
		q.Fatal(err)
	}
	q.members[member] = watch(p)
}

// put writes at a member, from its own host.
func (q *quorum) put(ctx context.Context, member string) error {
	_, err := q.ask(ctx, member, "kv/put", fmt.Sprintf(`{"key":%q,"value":%q}`,
		base64.StdEncoding.EncodeToString([]byte("skein-test")), base64.StdEncoding.EncodeToString([]byte(member))))
	return err
}

func (q *quorum) ask(ctx context.Context, member, what, body string) (string, error) {
	on, err := q.lab.Node(member)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	return call(ctx, on.Namespace, "POST", q.url(member, 2379)+"/v3/"+what, body)
}

// leads tells whether a member leads, by its own word.
func (q *quorum) leads(member string) bool {
	text, err := q.ask(q.Context(), member, "maintenance/status", "{}")
	var s struct {
		Header struct {
			MemberID string `json:"member_id"`
		}
		Leader string
	}
	if err == nil {
		err = json.Unmarshal([]byte(text), &s)
	}
	if err != nil {
		q.Errorf("status of %s: %v", member, err)
	}
	return s.Leader != "" && s.Leader == s.Header.MemberID
}

// logs are the ends of the members' logs.
func (q *quorum) logs() string {
	var out strings.Builder
	for _, m := range quorumMembers {
		fmt.Fprintf(&out, "the end of %s's log:\n%s\n", m, tailOf(q.logFile(m)))
	}
	return out.String()
}
