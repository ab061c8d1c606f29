package kube

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

const (
	shownWithin = 20 * time.Second      // MeshNodes may take to follow an annotation
	askEvery    = 50 * time.Millisecond // between two requests of a load
)

// nodesInTwoSites: kubectl puts the Nodes into two sites and says who leads one of them, by skein's annotations and by
// Kilo's. With the topology site everything of Kubernetes goes on through the leaders. The topology's changes, both
// ways, and a leader's annotation that moves to another Node lose no packet and no connection.
//
// cp1 comes to the site dc, where hub and vm1 are, one of which leads it because it has a public address. home1 and
// cloud1 are the site edge.
func (f fleet) nodesInTwoSites() {
	f.webs()
	f.apply(service("web", object{"app": "web"}, 80))
	f.remove("service/web", "pod/web-cp1", "pod/web-home1", "pod/web-cloud1")
	f.serviceRoutes()
	f.Cleanup(f.oneSite)

	f.kubectl(nil, "annotate", "node", "cp1", "skein.dev/location=dc")
	f.kubectl(nil, "annotate", "node", "home1", "skein.dev/location=edge", "skein.dev/leader=")
	f.kubectl(nil, "annotate", "node", "cloud1", "kilo.squat.ai/location=edge")
	f.shown("SITE", map[string]string{"cp1": "dc", "home1": "edge", "cloud1": "edge"})
	f.shown("LEADER", map[string]string{"home1": "true", "cloud1": "false", "cp1": "false"})

	t := f.startTraffic()
	f.skeinOn("hub", "settings", "--topology", "site", "--leaders-per-site", "1")
	f.path("hop", "cp1", "home1", "cloud1")
	f.path("hop", "cloud1", "cp1", "hub", "vm1")
	f.path("hop", "vm1", "cloud1")
	f.hopBy("cloud1", "cp1", "home1")
	t.judge("the topology becomes site")

	f.dualStack()
	for _, node := range []string{"cp1", "cloud1"} {
		ns := f.inside(node, "web-"+node)
		for _, at := range f.clusterIPs("web") {
			f.answersOf(fmt.Sprintf("from a pod of %s to the Service at %s", node, at), webNames,
				func(ctx context.Context) (string, error) { return get(ctx, ns, at, 80, "/hostname") })
		}
	}
	f.logsExecPortForward()

	t = f.startTraffic()
	f.kubectl(nil, "annotate", "node", "cloud1", "kilo.squat.ai/leader=")
	f.kubectl(nil, "annotate", "node", "home1", "skein.dev/leader-")
	f.shown("LEADER", map[string]string{"home1": "false", "cloud1": "true", "cp1": "false"})
	f.hopBy("home1", "cp1", "cloud1")
	t.judge("another Node is annotated as the leader")

	t = f.startTraffic()
	f.skeinOn("hub", "settings", "--topology", "full", "--leaders-per-site", "0")
	for _, n := range f.Config.Nodes {
		f.path("direct relay", n, slices.DeleteFunc(slices.Clone(f.Config.Nodes), func(o string) bool { return o == n })...)
	}
	t.judge("the topology becomes full")
	f.oneSite()
	f.shown("SITE", map[string]string{"cp1": "", "home1": "", "cloud1": ""})
	f.shown("LEADER", map[string]string{"cp1": "false", "home1": "false", "cloud1": "false"})
}

// oneSite takes back what nodesInTwoSites has set, however far that came.
func (f fleet) oneSite() {
	ctx := context.Background()
	out, exit, err := f.Lab.Exec(ctx, "hub", "skein", "settings", "--topology", "full", "--leaders-per-site", "0")
	if err != nil || exit != 0 {
		f.Errorf("the topology full: exit status %d, %v: %s", exit, err, out)
	}
	if _, err := f.Cluster.Kubectl(ctx, nil, "annotate", "node", "--all", "skein.dev/location-", "skein.dev/leader-",
		"kilo.squat.ai/location-", "kilo.squat.ai/leader-"); err != nil {
		f.Error(err)
	}
}

// shown waits until a column of `kubectl get meshnodes` says of members what it should.
func (f fleet) shown(column string, want map[string]string) {
	f.Helper()
	took := f.await(shownWithin, fmt.Sprintf("MeshNodes show %s %v", column, want), func() error {
		out, err := f.Cluster.Kubectl(f.Context(), nil, "get", "meshnodes")
		if err != nil {
			return err
		}
		have := columnOf(out, column)
		for name, value := range want {
			if v, ok := have[name]; !ok || v != value {
				return fmt.Errorf("%s has %q:\n%s", name, v, out)
			}
		}
		return nil
	})
	f.Logf("MeshNodes show %s %v after %s", column, want, took.Round(time.Millisecond))
}

// columnOf reads a column of a table that kubectl has printed, by the names in its first one. The heads tell where
// columns begin, since values may be empty.
func columnOf(table, head string) map[string]string {
	lines := strings.Split(table, "\n")
	at := strings.Index(lines[0]+" ", " "+head+" ") + 1
	if at == 0 {
		return nil
	}
	end := at + len(head)
	for end < len(lines[0]) && lines[0][end] == ' ' {
		end++
	}
	out := map[string]string{}
	for _, line := range lines[1:] {
		name, _, _ := strings.Cut(line, " ")
		out[name] = strings.TrimSpace(line[min(at, len(line)):min(end, len(line))])
	}
	return out
}

// path waits until a node reaches others by one of some kinds of path, with spaces between.
func (f fleet) path(kinds, from string, to ...string) {
	f.Helper()
	if err := f.Lab.Expect(f.Context(), 30*time.Second, lab.Expect{From: []string{from}, To: to,
		Path: strings.Fields(kinds)}); err != nil {
		f.Fatal(err)
	}
}

// hopBy waits until a node reaches another by way of a leader.
func (f fleet) hopBy(from, to, leader string) {
	f.Helper()
	f.await(20*time.Second, fmt.Sprintf("%s reaches %s by %s", from, to, leader), func() error {
		p, err := f.Lab.Path(f.Context(), from, to)
		if err == nil && (p.GetPath() != "hop" || p.GetRelayName() != leader) {
			err = fmt.Errorf("it does by %s %s: %s", p.GetPath(), p.GetRelayName(), p.GetReason())
		}
		return err
	})
}

// traffic is what pods of one site send to pods of the other: echoes, new connections, and requests on one connection.
type traffic struct {
	fleet
	echoes map[string]*ping.Stream
	loads  []*load

	connections []*connection
}

// startTraffic has web-cp1 ask the pods of the other site, in both families, until judge.
func (f fleet) startTraffic() *traffic {
	f.Helper()
	t := &traffic{fleet: f, echoes: map[string]*ping.Stream{}}
	ns := f.inside("cp1", "web-cp1")
	for _, name := range behindNAT {
		for _, at := range f.addresses(name) {
			t.echo(ns, name, at)
		}
		at := netip.AddrPortFrom(f.addresses(name)[0], 8080)
		t.loads = append(t.loads, startLoad(f.T, "new connections to "+name, askEvery, func(ctx context.Context) error {
			_, err := fetch(ctx, ns, at, "/hostname")
			return err
		}))
		t.keep(ns, name, at)
	}
	for _, l := range t.loads {
		if err := l.answers(f.Context(), 5, 10*time.Second); err != nil {
			f.Fatal(err)
		}
	}
	return t
}

// echo starts echoes from a pod to another.
func (t *traffic) echo(ns, name string, at netip.Addr) {
	t.Helper()
	var conn net.PacketConn
	if err := fabric.In(ns, func() (err error) {
		conn, err = ping.Open(at)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	s := ping.Start(conn, at, 20*time.Millisecond, 0, 0)
	t.Cleanup(func() { s.Stop() })
	t.echoes[fmt.Sprintf("echoes to %s at %s", name, at)] = s
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := s.Answered(ctx, 1); err != nil {
		t.Fatalf("no echo of %s at %s: %v", name, at, err)
	}
}

// connection asks over and over by one TCP connection, the next request when the last one is answered.
type connection struct {
	name     string
	stop     context.CancelFunc
	ended    chan struct{}
	answered atomic.Int64
	failed   error // once it has ended
}

// keep opens one, and uses it until the test ends, or judge. It is no http.Client, which opens another one and asks
// again when a connection breaks, and gives up one whose request took it more than 50 ms to write on a busy machine.
func (t *traffic) keep(ns, name string, at netip.AddrPort) {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	c := &connection{name: "one connection to " + name, stop: stop, ended: make(chan struct{})}
	conn, err := dialer(ns)(ctx, "tcp", at.String())
	if err != nil {
		stop()
		t.Fatalf("%s: %v", c.name, err)
	}
	t.Cleanup(c.end)
	t.connections = append(t.connections, c)
	context.AfterFunc(ctx, func() { conn.Close() })
	go func() {
		defer close(c.ended)
		defer stop()
		ticker := time.NewTicker(askEvery)
		defer ticker.Stop()
		for from := bufio.NewReader(conn); ctx.Err() == nil; {
			if err := askBy(conn, from, at); err != nil {
				if ctx.Err() == nil {
					c.failed = err
				}
				return
			}
			c.answered.Add(1)
			select {
			case <-ctx.Done():
			case <-ticker.C:
			}
		}
	}()
}

// askBy is one request by a connection, and its whole answer.
func askBy(conn net.Conn, from *bufio.Reader, at netip.AddrPort) error {
	if err := conn.SetDeadline(time.Now().Add(2 * requestTimeout)); err != nil {
		return err
	}
	if _, err := fmt.Fprintf(conn, "GET /hostname HTTP/1.1\r\nHost: %s\r\n\r\n", at); err != nil {
		return err
	}
	resp, err := http.ReadResponse(from, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || resp.Close {
		return fmt.Errorf("the answer is %s, and closes the connection: %v", resp.Status, resp.Close)
	}
	_, err = io.Copy(io.Discard, resp.Body)
	return err
}

func (c *connection) end() {
	c.stop()
	<-c.ended
}

// judge lets the traffic go on for a while after what was done, ends it, and fails if anything of it was lost.
func (t *traffic) judge(after string) {
	t.Helper()
	for _, l := range t.loads {
		if err := l.answers(t.Context(), 40, 10*time.Second); err != nil { // two seconds
			t.Errorf("%s: %v", after, err)
		}
	}
	var lost []error
	for what, s := range t.echoes {
		r := s.Stop()
		t.Logf("%s: %s: %d of %d lost, longest time without an answer %s", after, what, r.Lost(), r.Sent,
			r.Longest().Round(time.Millisecond))
		for _, b := range r.Blackouts {
			lost = append(lost, fmt.Errorf("%s: %d of %d lost, of them %d from %s on", what, r.Lost(), r.Sent, b.Lost,
				b.Start.UTC().Format("15:04:05.000")))
		}
	}
	for _, l := range t.loads {
		asked, answered, _, text := l.report()
		t.Logf("%s: %s", after, text)
		if answered < asked {
			lost = append(lost, errors.New(text))
		}
	}
	for _, c := range t.connections {
		c.end()
		t.Logf("%s: %s: %d requests answered", after, c.name, c.answered.Load())
		if c.failed != nil {
			lost = append(lost, fmt.Errorf("%s broke after %d requests: %w", c.name, c.answered.Load(), c.failed))
		}
	}
	if err := errors.Join(lost...); err != nil {
		t.Errorf("%s: %v", after, err)
	}
}

func TestColumnOf(t *testing.T) {
	const table = "NAME    NAT              SITE   LEADER   AGE\n" +
		"cp1     restricted-cone         false    5s\n" +
		"home1   symmetric        edge   true     5s"
	for head, want := range map[string][2]string{"SITE": {"", "edge"}, "LEADER": {"false", "true"}, "AGE": {"5s", "5s"}} {
		if have := columnOf(table, head); have["cp1"] != want[0] || have["home1"] != want[1] {
			t.Errorf("%s: %v, want %v", head, have, want)
		}
	}
	if have := columnOf(table, "ROLE"); have != nil {
		t.Errorf("a column that is not there: %v", have)
	}
}
