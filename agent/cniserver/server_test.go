package cniserver

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/testns"
)

const nothing = "0 leases, 0 addresses in the kernel, 0 links"

func TestLifeOfAnAttachment(t *testing.T) {
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	a := r.add("c1", pod)
	if !netip.MustParsePrefix("10.64.0.0/16").Contains(mustAddr(t, a.GetIpv4())) ||
		!netip.MustParsePrefix("fd64::/112").Contains(mustAddr(t, a.GetIpv6())) ||
		a.GetGateway4() != "169.254.1.1" || a.GetGateway6() != "fe80::1" || a.GetMtu() != 1420 || a.GetPool() != "default" ||
		a.GetHostInterface() != podnet.HostLink(podnet.Key{ContainerID: "c1", Interface: "eth0"}) || a.GetMac() == "" {
		t.Errorf("%v", a)
	}
	check := func() error {
		_, err := r.Check(t.Context(), &skeinv1.CNICheckRequest{Attachment: at("c1"), Netns: path(pod),
			Ips: []string{a.GetIpv4(), a.GetIpv6()}})
		return err
	}
	if err := check(); err != nil {
		t.Error(err)
	}
	if l, ok := r.m.Lookup(podnet.Key{ContainerID: "c1", Interface: "eth0"}); !ok || l.Namespace != "shop" ||
		l.Pod != "web-c1" || l.Network != "skein" || l.NetNS != path(pod) {
		t.Errorf("%+v", l)
	}
	for range 3 {
		r.del("c1")
		if got := r.traces(); got != nothing {
			t.Errorf("after DEL: %s", got)
		}
	}
	want(t, check(), cni.CodeUnknown)
	r.del("never-added")
	if info, err := os.Stat(filepath.Join(r.dir, SocketName)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the socket: %v, %v", info, err)
	}
	if got := strings.Join(r.done, ", "); got != "ADD 0, CHECK 0, DEL 0, DEL 0, DEL 0, CHECK 3, DEL 0" {
		t.Errorf("metrics were told: %s", got)
	}
}

// Each way in which an ADD fails leaves what was there before.
func TestAFailedAddLeavesNothing(t *testing.T) {
	r, pod := newRig(t, small("default", "10.64.0.0/30", 0),
		&skeinv1.Pool{Name: "gold", Subnets: []*skeinv1.PoolSubnet{{Ipv4: "10.65.0.0/24"}}, Namespaces: []string{"vip"}}),
		testns.New(t, "cp")
	other := testns.New(t, "co")
	testns.Link(pod, other, "taken", nil, nil)
	for _, c := range []struct {
		name string
		f    func(*skeinv1.CNIAddRequest)
		code uint32
	}{
		{"interface name taken", func(r *skeinv1.CNIAddRequest) { r.Attachment.Interface = "taken" }, cni.CodeExists},
		{"namespace vanished", func(r *skeinv1.CNIAddRequest) { r.Netns = "/run/netns/no-such" }, cni.CodeUnknown},
		{"not a namespace", func(r *skeinv1.CNIAddRequest) { r.Netns = "/etc/passwd" }, cni.CodeEnvironment},
		{"another kind of namespace", func(r *skeinv1.CNIAddRequest) { r.Netns = "/proc/self/ns/mnt" }, cni.CodeEnvironment},
		{"the host's namespace", func(q *skeinv1.CNIAddRequest) { q.Netns = path(r.net.ns) }, cni.CodeEnvironment},
		{"no container", func(r *skeinv1.CNIAddRequest) { r.Attachment.ContainerId = "" }, cni.CodeEnvironment},
		{"bad interface", func(r *skeinv1.CNIAddRequest) { r.Attachment.Interface = "../eth0" }, cni.CodeEnvironment},
		{"no address", func(r *skeinv1.CNIAddRequest) { r.Ips = []string{"ten"} }, cni.CodeConfig},
		{"two addresses of a family", func(r *skeinv1.CNIAddRequest) { r.Ips = []string{"10.64.0.1", "10.64.0.2"} },
			cni.CodeConfig},
		{"address of no pool", func(r *skeinv1.CNIAddRequest) { r.Ips = []string{"192.0.2.1"} }, cni.CodeConfig},
		{"pool that is not allowed", func(r *skeinv1.CNIAddRequest) { r.Pool = "gold" }, cni.CodeDenied},
		{"unknown pool", func(r *skeinv1.CNIAddRequest) { r.Pool = "silver" }, cni.CodeTryAgain},
		{"MTU that no link can have", func(r *skeinv1.CNIAddRequest) { r.Mtu = 1 << 30 }, cni.CodeConfig},
	} {
		q := request("c1", pod)
		c.f(q)
		_, err := r.Add(t.Context(), q)
		t.Run(c.name, func(t *testing.T) { want(t, err, c.code) })
		if got := r.traces(); got != nothing {
			t.Errorf("%s: %s", c.name, got)
		}
	}
	pod.Do(func() {
		if _, err := netlink.LinkByName("taken"); err != nil {
			t.Errorf("the interface that was there: %v", err)
		}
	})
	// What failed before did not use addresses up: all four are there.
	for i := range 4 {
		r.add(fmt.Sprint("d", i), testns.New(t, "cp"))
	}
	_, err := r.Add(t.Context(), request("d4", pod))
	want(t, err, cni.CodeExhausted)
	_, err = r.Status(t.Context(), &skeinv1.CNIStatusRequest{})
	want(t, err, cni.CodeUnavailable)
}

func TestNobodyDecides(t *testing.T) {
	r := newRig(t, small("default", "10.64.0.0/24", 1))
	r.add("c0", testns.New(t, "cp")) // the block has one more
	r.g.quorum(false)
	r.add("c1", testns.New(t, "cp"))
	var err error
	var i int
	for i = 2; i < 6 && err == nil; i++ { // with the spare block's
		_, err = r.Add(t.Context(), request(fmt.Sprint("c", i), testns.New(t, "cp")))
	}
	want(t, err, cni.CodeTryAgain)
	_, err = r.Status(t.Context(), &skeinv1.CNIStatusRequest{})
	want(t, err, cni.CodeUnavailable)
	r.del("c0")
	r.g.quorum(true)
	eventually(t, "another pod", func() bool {
		_, err = r.Add(t.Context(), request(fmt.Sprint("c", i), testns.New(t, "cp")))
		return err == nil
	})
}

// An attachment that is there is not made again; one whose link went with its namespace is.
func TestAddTwice(t *testing.T) {
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	a := r.add("c1", pod)
	_, err := r.Add(t.Context(), request("c1", pod))
	want(t, err, cni.CodeExists)
	if c := code(err); !strings.Contains(c.GetMessage(), a.GetIpv4()) {
		t.Errorf("%v", c)
	}
	if got := r.traces(); got != "1 leases, 2 addresses in the kernel, 1 links" {
		t.Errorf("the first one was touched: %s", got)
	}
	pod.Must("removing eth0", func() error {
		l, err := netlink.LinkByName("eth0")
		if err == nil {
			err = netlink.LinkDel(l)
		}
		return err
	})
	if b := r.add("c1", pod); b.GetIpv4() == a.GetIpv4() {
		t.Errorf("the address %s came again at once", a.GetIpv4())
	}
	if got := r.traces(); got != "1 leases, 2 addresses in the kernel, 1 links" {
		t.Errorf("after it was replaced: %s", got)
	}
}

// A runtime that goes away during its ADD leaves nothing behind, and the DEL that comes then waits for the end of it.
func TestCallerGoesAwayDuringAdd(t *testing.T) {
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	ctx, goAway := context.WithCancel(t.Context())
	reached, released := make(chan struct{}), make(chan struct{})
	r.net.afterAdd = func(podnet.Attachment) { close(reached); <-released }
	failed := make(chan error, 1)
	go func() {
		_, err := r.Add(ctx, request("c1", pod))
		failed <- err
	}()
	<-reached
	deleted := make(chan error, 1)
	go func() {
		_, err := r.Del(t.Context(), &skeinv1.CNIDelRequest{Attachment: at("c1"), Netns: path(pod)})
		deleted <- err
	}()
	eventually(t, "DEL waits for its turn", func() bool {
		r.srv.keys.mu.Lock()
		defer r.srv.keys.mu.Unlock()
		q := r.srv.keys.held[podnet.Key{ContainerID: "c1", Interface: "eth0"}]
		return q != nil && q.users == 2
	})
	select {
	case err := <-deleted:
		t.Errorf("DEL did not wait: %v", err)
	default:
	}
	r.net.afterAdd = nil
	r.add("c2", testns.New(t, "cp")) // others do not wait
	r.del("c2")
	goAway()
	if err := <-failed; err == nil {
		t.Error("ADD succeeded for nobody")
	}
	eventuallyGone(t, r, released)
	if err := <-deleted; err != nil {
		t.Error(err)
	}
	if got := r.traces(); got != nothing {
		t.Errorf("left behind: %s", got)
	}
	if len(r.srv.keys.held) != 0 {
		t.Error("locks are left")
	}
}

// eventuallyGone lets the ADD go on when the server has seen that its caller is gone.
func eventuallyGone(t *testing.T, r *rig, released chan struct{}) {
	t.Helper()
	close(released)
	eventually(t, "ADD is undone", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return slices.Contains(r.done, "ADD 11") || slices.Contains(r.done, "ADD 0")
	})
}

// An address whose link could not be removed stays with it.
func TestTheAddressGoesAfterTheLink(t *testing.T) {
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	r.add("c1", pod)
	r.net.failDel.Store(true)
	if _, err := r.Del(t.Context(), &skeinv1.CNIDelRequest{Attachment: at("c1")}); err == nil || len(r.m.Leases()) != 1 {
		t.Errorf("%v, %s", err, r.traces())
	}
	g, err := r.GC(t.Context(), &skeinv1.CNIGCRequest{Network: "skein"})
	if err == nil || len(g.GetRemoved()) != 0 || len(r.m.Leases()) != 1 {
		t.Errorf("%v, %s", err, r.traces())
	}
	r.net.failDel.Store(false)
	r.del("c1")
	if got := r.traces(); got != nothing {
		t.Error(got)
	}
}

// A pod's namespace may vanish before its DEL.
func TestDelWithoutItsNamespace(t *testing.T) {
	r := newRig(t, dual())
	// Not through testns, whose cleanup wants its namespace to be there.
	name := fmt.Sprintf("skgone-%d", os.Getpid())
	if out, err := exec.Command("ip", "netns", "add", name).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	q := request("c1", &testns.NS{Name: name})
	_, err := r.Add(t.Context(), q)
	if out, derr := exec.Command("ip", "netns", "del", name).CombinedOutput(); derr != nil {
		t.Fatalf("%v: %s", derr, out)
	}
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Del(t.Context(), &skeinv1.CNIDelRequest{Attachment: at("c1"), Netns: q.GetNetns()}); err != nil {
		t.Error(err)
	}
	eventually(t, "everything is gone", func() bool { return r.traces() == nothing })
}

// CHECK sees each thing that something else may have changed.
func TestCheckSeesChanges(t *testing.T) {
	for name, change := range map[string]func(pod, host *testns.NS, l netlink.Link, a *skeinv1.CNIAddResponse) error{
		"route deleted in the pod": func(pod, _ *testns.NS, l netlink.Link, _ *skeinv1.CNIAddResponse) (err error) {
			pod.Do(func() {
				_, all, _ := net.ParseCIDR("0.0.0.0/0")
				err = netlink.RouteDel(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: all})
			})
			return err
		},
		"address deleted": func(pod, _ *testns.NS, l netlink.Link, a *skeinv1.CNIAddResponse) (err error) {
			pod.Do(func() {
				addr, _ := netlink.ParseAddr(a.GetIpv4() + "/32")
				err = netlink.AddrDel(l, addr)
			})
			return err
		},
		"link deleted": func(pod, _ *testns.NS, l netlink.Link, _ *skeinv1.CNIAddResponse) (err error) {
			pod.Do(func() { err = netlink.LinkDel(l) })
			return err
		},
		"route deleted on the host": func(_, host *testns.NS, _ netlink.Link, a *skeinv1.CNIAddResponse) (err error) {
			host.Do(func() {
				_, dst, _ := net.ParseCIDR(a.GetIpv4() + "/32")
				err = netlink.RouteDel(&netlink.Route{Table: 116, Dst: dst})
			})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, pod := newRig(t, dual()), testns.New(t, "cp")
			a := r.add("c1", pod)
			q := &skeinv1.CNICheckRequest{Attachment: at("c1"), Netns: path(pod), Ips: []string{a.GetIpv4(), a.GetIpv6()}}
			if _, err := r.Check(t.Context(), q); err != nil {
				t.Fatal(err)
			}
			var l netlink.Link
			pod.Must("eth0", func() (err error) { l, err = netlink.LinkByName("eth0"); return err })
			if err := change(pod, r.net.ns, l, a); err != nil {
				t.Fatal(err)
			}
			_, err := r.Check(t.Context(), q)
			want(t, err, cni.CodeChanged)
		})
	}
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	r.add("c1", pod)
	_, err := r.Check(t.Context(), &skeinv1.CNICheckRequest{Attachment: at("c1"), Netns: path(pod),
		Ips: []string{"10.64.9.9"}})
	want(t, err, cni.CodeChanged)
	_, err = r.Check(t.Context(), &skeinv1.CNICheckRequest{Attachment: at("c1"), Netns: path(pod)})
	want(t, err, cni.CodeConfig)
}

// Calico #5044: garbage collection must not touch what is healthy, nor what other networks have.
func TestGCRemovesOnlyWhatIsNotListed(t *testing.T) {
	r := newRig(t, dual())
	pods := map[string]*testns.NS{}
	for _, c := range []string{"keep", "leak", "other"} {
		pods[c] = testns.New(t, "cp")
		q := request(c, pods[c])
		if c == "other" {
			q.Network = "second"
		}
		if _, err := r.Add(t.Context(), q); err != nil {
			t.Fatal(err)
		}
	}
	g, err := r.GC(t.Context(), &skeinv1.CNIGCRequest{Network: "skein", Valid: []*skeinv1.CNIAttachment{at("keep"),
		at("unknown")}})
	if err != nil || len(g.GetRemoved()) != 1 || g.GetRemoved()[0].GetContainerId() != "leak" {
		t.Errorf("%v, %v", g, err)
	}
	if got := r.traces(); got != "2 leases, 4 addresses in the kernel, 2 links" {
		t.Error(got)
	}
	for _, network := range []string{"", "third"} {
		if g, err := r.GC(t.Context(), &skeinv1.CNIGCRequest{Network: network}); err != nil || len(g.GetRemoved()) != 0 {
			t.Errorf("network %q: %v, %v", network, g, err)
		}
	}
}

// TestGCWithoutAList: cnitool calls GC without one. What runs stays; what has neither namespace nor link is taken back.
func TestGCWithoutAList(t *testing.T) {
	r := newRig(t, dual())
	r.add("runs", testns.New(t, "cp"))
	t.Run("a pod that goes away", func(t *testing.T) { r.add("gone", testns.New(t, "cp")) }) // its namespace ends with it
	var removed []string
	// the kernel takes the link away a little later
	for deadline := time.Now().Add(10 * time.Second); len(removed) == 0 && time.Now().Before(deadline); {
		g, err := r.GC(t.Context(), &skeinv1.CNIGCRequest{Network: "skein", Unlisted: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range g.GetRemoved() {
			removed = append(removed, a.GetContainerId())
		}
	}
	if !slices.Equal(removed, []string{"gone"}) {
		t.Errorf("removed: %q", removed)
	}
	if got := r.traces(); got != "1 leases, 2 addresses in the kernel, 1 links" {
		t.Error(got)
	}
}

// What the plugin did while the agent was away is caught up with, at its start and before the next ADD.
func TestNotesOfThePlugin(t *testing.T) {
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	notes, key := filepath.Join(r.dir, "cni-deleted"), podnet.Key{ContainerID: "c1", Interface: "eth0"}
	away := func() {
		t.Helper()
		if err := r.net.do(func() error { return podnet.Del(path(pod), key) }); err != nil {
			t.Fatal(err)
		}
		if err := cni.WriteNote(notes, cni.Note{Key: key, NetNS: path(pod)}); err != nil {
			t.Fatal(err)
		}
	}
	r.add("c1", pod)
	away()
	r.serve()
	if got := r.traces(); got != nothing || cni.HasNote(notes, key) {
		t.Errorf("after the start: %s", got)
	}
	r.add("c1", pod)
	away()
	r.add("c1", pod)
	if got := r.traces(); got != "1 leases, 2 addresses in the kernel, 1 links" || cni.HasNote(notes, key) {
		t.Errorf("after the next ADD: %s", got)
	}
	if err := r.srv.ReadNotes(t.Context()); err != nil || r.traces() == nothing {
		t.Errorf("an old note took a new pod away: %v", err)
	}
	away()
	if _, err := r.GC(t.Context(), &skeinv1.CNIGCRequest{Network: "skein",
		Valid: []*skeinv1.CNIAttachment{at("c1")}}); err != nil || r.traces() != nothing {
		t.Errorf("after GC: %s, %v", r.traces(), err)
	}
}

// A pod that starts right after its agent waits for the data plane, and is not refused.
func TestAPodWaitsForAnAgentThatHasJustStarted(t *testing.T) {
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	r.ready = make(chan struct{})
	r.serve()
	time.AfterFunc(100*time.Millisecond, func() { close(r.ready) })
	r.add("c1", pod)
	select {
	case <-r.ready:
	default:
		t.Error("the pod did not wait")
	}
	r.del("c1")
}

// Runtimes that do not ask for STATUS are refused where it would say 50.
func TestNoPodStartsWhereStatusIs50(t *testing.T) {
	r, pod := newRig(t, dual()), testns.New(t, "cp")
	r.limits = Condition{NoAdd: "the data plane has not come up"}
	_, err := r.Status(t.Context(), &skeinv1.CNIStatusRequest{})
	want(t, err, cni.CodeUnavailable)
	_, err = r.Add(t.Context(), request("c1", pod))
	want(t, err, cni.CodeUnavailable)
	if got := r.traces(); got != nothing {
		t.Error(got)
	}
	r.limits = Condition{Limited: "one peer cannot be configured"} // what is broken then is not this pod's
	r.add("c1", pod)
	r.limits = Condition{NoAdd: "again"}
	r.del("c1")
}

func TestJudge(t *testing.T) {
	exhausted := &ipam.Error{Code: ipam.Exhausted, Message: "pool default is used up", Advice: "extend it"}
	for _, c := range []struct {
		name      string
		condition Condition
		rights    error
		addresses error
		code      uint32
	}{
		{"all is well", Condition{}, nil, nil, 0},
		{"nothing free", Condition{}, nil, exhausted, cni.CodeUnavailable},
		{"not joined", Condition{NoAdd: "the agent has not joined"}, nil, nil, cni.CodeUnavailable},
		{"no rights", Condition{}, lacking(0), nil, cni.CodeUnavailable},
		{"no tunnel", Condition{Limited: "link skein0 is gone"}, nil, nil, cni.CodeLimited},
		{"no tunnel, and nothing free", Condition{Limited: "link skein0 is gone"}, nil, exhausted, cni.CodeLimited},
	} {
		err := judge(c.condition, c.rights, c.addresses)
		if (err == nil) != (c.code == 0) {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if err != nil {
			want(t, asConnect(asCNI(err)), c.code)
		}
	}
	if lacking(^uint32(0)) != nil || !strings.Contains(fmt.Sprint(lacking(1<<12)), "CAP_SYS_ADMIN") {
		t.Error("capabilities are judged wrongly")
	}
}

// A hundred pods at once (Coil #368: 80 pods stalled behind one mutex), with no more threads than allowed in the
// kernel.
func TestManyAtOnce(t *testing.T) {
	r := newRig(t, dual())
	const pods = 100
	spaces := make([]*testns.NS, pods)
	for i := range spaces {
		spaces[i] = testns.New(t, "cm")
	}
	var mu sync.Mutex
	seen := map[string]bool{}
	var wg sync.WaitGroup
	began := time.Now()
	for i := range pods {
		wg.Go(func() {
			a, err := r.Add(t.Context(), request(fmt.Sprint("c", i), spaces[i]))
			mu.Lock()
			defer mu.Unlock()
			if err != nil || seen[a.GetIpv4()] || seen[a.GetIpv6()] {
				t.Errorf("pod %d: %v, %v", i, a, err)
			}
			seen[a.GetIpv4()], seen[a.GetIpv6()] = true, true
		})
	}
	wg.Wait()
	t.Logf("%d ADDs at once took %s", pods, time.Since(began))
	for i := range pods {
		wg.Go(func() {
			if _, err := r.Del(t.Context(), &skeinv1.CNIDelRequest{Attachment: at(fmt.Sprint("c", i))}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := r.traces(); got != nothing {
		t.Error(got)
	}
}

func TestThreadsAreBounded(t *testing.T) {
	s := New(Config{Threads: 2})
	var mu sync.Mutex
	now, most := 0, 0
	step := make(chan struct{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			s.kernel(t.Context(), func() error {
				mu.Lock()
				now++
				most = max(most, now)
				mu.Unlock()
				<-step
				mu.Lock()
				now--
				mu.Unlock()
				return nil
			})
		})
	}
	eventually(t, "two run", func() bool { mu.Lock(); defer mu.Unlock(); return now == 2 })
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.kernel(ctx, func() error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("who gave up went on: %v", err)
	}
	close(step)
	wg.Wait()
	if most != 2 {
		t.Errorf("%d at a time", most)
	}
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: it did not come true", what)
		}
	}
}

// A request that comes before the server serves waits for it, as one does that comes while an agent starts.
func TestRequestsWaitForTheServer(t *testing.T) {
	socket := filepath.Join(t.TempDir(), SocketName)
	l, err := Listen(socket)
	if err != nil {
		t.Fatal(err)
	}
	client := skeinv1connect.NewCNIServiceClient(&http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", socket)
		},
	}}, "http://skein")
	answered := make(chan error, 1)
	go func() {
		_, err := client.Status(t.Context(), &skeinv1.CNIStatusRequest{})
		answered <- err
	}()
	c, err := net.Dial("unix", socket) // whoever comes now is not refused
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	r := newRig(t, dual())
	t.Cleanup(r.srv.Serve(t.Context(), l))
	if err := <-answered; err != nil {
		t.Errorf("the request that came first: %v", err)
	}
}
