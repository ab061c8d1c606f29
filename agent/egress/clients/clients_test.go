package clients

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/skeinmesh/skein/agent/egress"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/reconcile"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// space is a network namespace that only records calls.
type space struct {
	mu      sync.Mutex
	specs   []dataplane.ClientSpec
	fail    error
	slow    chan struct{} // Apply waits for it
	removed bool
	closed  bool
	flows   []int // slots that flows go by
	changed func()
}

func (s *space) Apply(spec dataplane.ClientSpec) (int, []string, error) {
	if s.slow != nil {
		<-s.slow
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.specs = append(s.specs, spec)
	return 1, nil, s.fail
}

func (s *space) Watch(changed func()) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.changed = changed
	return nil
}
func (s *space) Diff(dataplane.ClientSpec) ([]string, error) { return []string{"add rule 1900"}, nil }
func (s *space) Flows([]netip.Prefix) ([]int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.flows, s.fail
}
func (s *space) Remove() error  { s.mu.Lock(); defer s.mu.Unlock(); s.removed = true; return nil }
func (s *space) Driver() string { return "userspace" }
func (s *space) Close() error   { s.mu.Lock(); defer s.mu.Unlock(); s.closed = true; return nil }

func (s *space) last() dataplane.ClientSpec {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.specs) == 0 {
		return dataplane.ClientSpec{}
	}
	return s.specs[len(s.specs)-1]
}

// fleet is gateways, and the namespaces of one host's clients.
type fleet struct {
	t   testing.TB
	mu  sync.Mutex
	err map[identity.ID]error // instead of an answer
	not map[string]string     // keys that are refused
	say string                // why nothing is installed
	got map[pairKey]*skeinv1.SyncEgressClientsRequest
	n   int

	spaces map[string]*space
	dir    string
}

func newFleet(t testing.TB) *fleet {
	return &fleet{t: t, err: map[identity.ID]error{}, not: map[string]string{},
		got: map[pairKey]*skeinv1.SyncEgressClientsRequest{}, spaces: map[string]*space{}, dir: t.TempDir()}
}

func (f *fleet) Sync(_ context.Context, node identity.ID,
	r *skeinv1.SyncEgressClientsRequest) (*skeinv1.SyncEgressClientsResponse, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.n++
	if err := f.err[node]; err != nil {
		return nil, err
	}
	key := pairKey{Ref{Namespace: r.GetNamespace(), Name: r.GetName()}, node}
	if old := f.got[key]; old != nil && (r.GetEpoch() < old.GetEpoch() || r.GetEpoch() == old.GetEpoch() &&
		r.GetGeneration() <= old.GetGeneration()) {
		f.t.Errorf("%v after %v", r, old)
	}
	f.got[key] = r
	out := &skeinv1.SyncEgressClientsResponse{Installed: f.say == "", Reason: f.say}
	for _, c := range r.GetClients() {
		if why := f.not[c.GetKey()]; why != "" {
			out.Refused = append(out.Refused, &skeinv1.SyncEgressClientsResponse_RefusedClient{Key: c.GetKey(), Reason: why})
		}
	}
	return out, nil
}

// knows are the keys of internet/nat in the last list sent to a gateway.
func (f *fleet) knows(node identity.ID) string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var out []string
	for _, c := range f.got[pairKey{Ref{Namespace: "internet", Name: "nat"}, node}].GetClients() {
		out = append(out, c.GetKey())
	}
	return strings.Join(out, " ")
}

func (f *fleet) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fleet) calls() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.n
}

func (f *fleet) space(netns string) *space {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.spaces[netns] == nil {
		f.spaces[netns] = &space{}
	}
	return f.spaces[netns]
}

func (f *fleet) open(a *Agreed) *Clients {
	f.t.Helper()
	c, err := Open(Config{File: filepath.Join(f.dir, ClientsFile), Sender: f, Epoch: uint64(time.Now().UnixNano()),
		GatewayDir: "/run/skein/netns",
		Open:       func(netns string) (Namespace, error) { return f.space(netns), nil },
		Addresses: func(netns, link string) (netip.Addr, netip.Addr, error) {
			if _, err := os.Stat(netns); err != nil {
				return netip.Addr{}, netip.Addr{}, err
			}
			return addr("10.20.30.99"), netip.Addr{}, nil
		}})
	if err != nil {
		f.t.Fatal(err)
	}
	c.agree(a)
	return c
}

// agree is Follow with prepared contents of the state.
func (c *Clients) agree(a *Agreed) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.agreed = a
	c.replan()
}

func (f *fleet) pod(name, ipv4 string) podnet.Attachment {
	path := filepath.Join(f.dir, name)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		f.t.Fatal(err)
	}
	return podnet.Attachment{Key: podnet.Key{ContainerID: "c-" + name, Interface: "eth0"}, NetNS: path,
		Namespace: "default", Pod: name,
		IPv4: addr(ipv4)}
}

func asks(names ...string) map[string]string {
	out := map[string]string{}
	for _, n := range names {
		namespace, name, _ := strings.Cut(n, "/")
		out[cni.EgressAnnotation+namespace] = name
	}
	return out
}

func states(all []*skeinv1.EgressOfClient) string {
	var out []string
	for _, e := range all {
		out = append(out, e.GetNamespace()+"/"+e.GetName()+" "+e.GetState())
	}
	return strings.Join(out, ", ")
}

func (c *Clients) states(key string) string {
	for _, r := range c.Report() {
		if r.GetKey() == key {
			return states(r.GetEgresses())
		}
	}
	return "gone"
}

// The agent's loop follows the state after each wake-up: an unchanged state must not wake the loop, or it never
// rests.
func TestFollowingTheSameStateIsNoNews(t *testing.T) {
	news := 0
	c, err := Open(Config{File: filepath.Join(t.TempDir(), ClientsFile), Changed: func() { news++ }})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	for _, s := range []*events.State{events.NewState(), events.NewState()} {
		before := news
		c.Follow(s, dataplane.FoUPorts{})
		if news == before {
			t.Error("a new state is no news")
		}
		before = news
		c.Follow(s, dataplane.FoUPorts{})
		if news != before {
			t.Error("the same state is news")
		}
	}
}

func TestPodsLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		c := f.open(world())
		defer c.Close()
		if got := c.AddPod(t.Context(), f.pod("plain", "10.20.30.1"), map[string]string{"a": "b"}); got != nil ||
			f.calls() != 0 {
			t.Errorf("a pod that uses none: %v", got)
		}
		began := time.Now()
		web0 := f.pod("web-0", "10.20.30.40")
		added := c.AddPod(t.Context(), web0, asks("internet/nat", "nowhere/nat"))
		if got := states(added); got != "internet/nat ready, nowhere/nat unknown" || time.Since(began) > 0 {
			t.Errorf("%s after %s", got, time.Since(began))
		}
		if owner := map[string]identity.ID{"gate1": gate1,
			"gate2": gate2}[added[0].GetOwner()]; f.knows(owner) != "default/web-0" {
			t.Error("its gateway was not told before the pod runs")
		}
		synctest.Wait()
		if f.knows(gate1) != "default/web-0" || f.knows(gate2) != "default/web-0" {
			t.Error("not all gateways were told")
		}
		if s := f.space(web0.NetNS).last(); len(s.Routes) != 1 || s.Uplink != "eth0" {
			t.Errorf("%+v", s)
		}
		err := c.CheckPod(podnet.Key{ContainerID: "c-web-0", Interface: "eth0"})
		if err == nil || !strings.Contains(err.Error(), "add rule 1900") {
			t.Errorf("CHECK: %v", err)
		}
		if err := c.CheckPod(podnet.Key{ContainerID: "c-plain", Interface: "eth0"}); err != nil {
			t.Error(err)
		}
		// The unknown egress is defined, and the slots move to another owner.
		next := world()
		next.Egresses[Ref{Namespace: "nowhere", Name: "nat"}] =
			AgreedEgress{Destinations: []netip.Prefix{pfx("203.0.113.0/24")}, Gateways: []identity.ID{gate2},
				Slots: []egress.SlotState{{IPv4: addr("10.68.0.9"), Node: gate2}}}
		c.agree(next)
		synctest.Wait()
		if got := c.states("default/web-0"); got != "internet/nat ready, nowhere/nat ready" ||
			len(f.space(web0.NetNS).last().Routes) != 2 {
			t.Error(got)
		}
		// A node that is no longer a gateway is informed once.
		gone := world()
		e := gone.Egresses[Ref{Namespace: "internet", Name: "nat"}]
		e.Gateways, e.Slots = e.Gateways[1:], slices.Clone(e.Slots)
		e.Slots[0].Node = gate2
		gone.Egresses[Ref{Namespace: "internet", Name: "nat"}] = e
		c.agree(gone)
		synctest.Wait()
		if f.knows(gate1) != "" || f.knows(gate2) != "default/web-0" || c.states("default/web-0") != "internet/nat ready, "+
			"nowhere/nat unknown" {
			t.Errorf("gate1 knows %q, gate2 %q, %s", f.knows(gate1), f.knows(gate2), c.states("default/web-0"))
		}
		n := f.calls()
		time.Sleep(3*egress.SyncEvery + time.Second)
		if again := f.calls() - n; again < 2 || again > 4 {
			t.Errorf("%d words in %s", again, 3*egress.SyncEvery)
		}
		c.DelPod(t.Context(), podnet.Key{ContainerID: "c-web-0", Interface: "eth0"})
		synctest.Wait()
		if s := f.space(web0.NetNS); !s.removed || !s.closed || f.knows(gate2) != "" || c.states("default/web-0") != "gone" {
			t.Errorf("after DEL: %+v, gate2 knows %q", s, f.knows(gate2))
		}
		n = f.calls()
		time.Sleep(3 * egress.SyncEvery)
		if f.calls() != n {
			t.Error("gateways are told again and again that there is nobody")
		}
	})
}

// TestWhatOthersChangeIsAppliedAgain, shortly after the kernel's notification; a failure is reported and retried
// until it succeeds.
func TestWhatOthersChangeIsAppliedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		c := f.open(world())
		defer c.Close()
		web := f.pod("web-0", "10.20.30.40")
		c.AddPod(t.Context(), web, asks("internet/nat"))
		time.Sleep(time.Minute)
		s := f.space(web.NetNS)
		applied := func() int { s.mu.Lock(); defer s.mu.Unlock(); return len(s.specs) }
		before := applied()
		s.changed()
		s.changed()
		time.Sleep(time.Second)
		if n := applied() - before; n != 1 {
			t.Errorf("a change led to %d looks, want 1", n)
		}
		s.mu.Lock()
		s.fail = errors.New("no such device")
		s.mu.Unlock()
		s.changed()
		time.Sleep(time.Second)
		if got := c.states("default/web-0"); got != "internet/nat waiting" {
			t.Errorf("while it fails: %s", got)
		}
		s.mu.Lock()
		s.fail = nil
		s.mu.Unlock()
		time.Sleep(reconcile.Default.RetryLast)
		if got := c.states("default/web-0"); got != "internet/nat ready" {
			t.Errorf("when it works again: %s", got)
		}
		before = applied()
		time.Sleep(resync - time.Minute)
		if n := applied() - before; n > 1 {
			t.Errorf("%d looks while nothing changed", n)
		}
	})
}

// TestANamespaceThatCannotBeOpenedIsTriedAgain until it can.
func TestANamespaceThatCannotBeOpenedIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		c := f.open(world())
		defer c.Close()
		broken, open := errors.New("too many open files"), c.cfg.Open
		c.cfg.Open = func(netns string) (Namespace, error) {
			f.mu.Lock()
			err := broken
			f.mu.Unlock()
			if err != nil {
				return nil, err
			}
			return open(netns)
		}
		if got := states(c.AddPod(t.Context(), f.pod("web-0", "10.20.30.40"), asks("internet/nat"))); got !=
			"internet/nat waiting" {
			t.Errorf("while it cannot be opened: %s", got)
		}
		f.set(func() { broken = nil })
		time.Sleep(reconcile.Default.RetryLast)
		if got := c.states("default/web-0"); got != "internet/nat ready" {
			t.Errorf("when it can: %s", got)
		}
	})
}

func TestGatewaysThatDoNotAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		f.err[gate1], f.err[gate2] = errors.New("no route to it"), errors.New("no route to it")
		c := f.open(world())
		defer c.Close()
		began := time.Now()
		got := c.AddPod(t.Context(), f.pod("web-0", "10.20.30.40"), asks("internet/nat"))
		if states(got) != "internet/nat waiting" || time.Since(began) != AddWait || !strings.Contains(got[0].GetReason(),
			"no route to it") {
			t.Errorf("%v after %s", got, time.Since(began))
		}
		time.Sleep(time.Minute)
		if n := f.calls(); n > 40 {
			t.Errorf("%d tries in a minute", n)
		}
		f.set(func() { clear(f.err); f.say = "its table is being made" })
		time.Sleep(egress.SyncEvery)
		if r := c.Report()[0].GetEgresses()[0]; r.GetState() != Waiting || !strings.Contains(r.GetReason(),
			"its table is being made") {
			t.Errorf("%v", r)
		}
		f.set(func() { f.say = ""; f.not["default/web-0"] = "10.20.30.40 is not of your blocks" })
		time.Sleep(egress.SyncEvery)
		if r := c.Report()[0].GetEgresses()[0]; r.GetState() != Refused || !strings.Contains(r.GetReason(),
			"not of your blocks") || c.Ready("default/web-0") {
			t.Errorf("%v", r)
		}
		f.set(func() { clear(f.not) })
		time.Sleep(egress.SyncEvery)
		if !c.Ready("default/web-0") {
			t.Errorf("%v", c.Report())
		}
		// A pod whose slot has no owner does not wait for one.
		began = time.Now()
		if got := states(c.AddPod(t.Context(), f.pod("web-9", "10.20.30.49"), asks("dc/nat"))); got != "dc/nat waiting" ||
			time.Since(began) != 0 {
			t.Errorf("%s after %s", got, time.Since(began))
		}
		// The kernel refuses: the failure is reported, and the pod runs.
		f.space(filepath.Join(f.dir, "web-8")).fail = errors.New("the kernel says no")
		got = c.AddPod(t.Context(), f.pod("web-8", "10.20.30.48"), asks("internet/nat"))
		if states(got) != "internet/nat waiting" || !strings.Contains(got[0].GetReason(), "the kernel says no") {
			t.Errorf("%v", got)
		}
	})
}

func TestOneSlowNamespace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		c := f.open(world())
		defer c.Close()
		slow, quick := f.pod("slow", "10.20.30.1"), f.pod("quick", "10.20.30.2")
		release := make(chan struct{})
		f.space(slow.NetNS).slow = release
		var added sync.WaitGroup
		added.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
			defer cancel()
			if got := states(c.AddPod(ctx, slow, asks("internet/nat"))); got != "internet/nat ready" {
				t.Errorf("the slow one: %s", got)
			}
		})
		synctest.Wait()
		began := time.Now()
		if got := states(c.AddPod(t.Context(), quick, asks("internet/nat"))); got != "internet/nat ready" ||
			time.Since(began) != 0 {
			t.Errorf("%s after %s", got, time.Since(began))
		}
		time.Sleep(10 * time.Second) // ADD waits for the kernel: nothing may leave beside the tunnel
		close(release)
		added.Wait()
	})
}

func TestRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		c := f.open(world())
		web0, web1 := f.pod("web-0", "10.20.30.40"), f.pod("web-1", "10.20.30.41")
		c.AddPod(t.Context(), web0, asks("internet/nat"))
		c.AddPod(t.Context(), web1, asks("internet/nat"))
		if got, err := c.Attach(t.Context(), web0, []Ref{{Namespace: "dc", Name: "nat"}}, false); err != nil ||
			states(got) != "internet/nat ready, dc/nat waiting" {
			t.Errorf("attach: %s, %v", states(got), err)
		}
		file := filepath.Join(f.dir, ClientsFile)
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%v, %v", info, err)
		}
		c.Close()
		if f.space(web0.NetNS).removed {
			t.Error("an agent that ends has taken the tunnels down")
		}
		os.Remove(web1.NetNS)
		time.Sleep(time.Second)
		c = f.open(nil)
		synctest.Wait()
		n := len(f.space(web0.NetNS).specs)
		if got := c.states("default/web-0"); got != "internet/nat waiting, dc/nat waiting" {
			t.Errorf("before the state is known: %s", got)
		}
		c.agree(world())
		synctest.Wait()
		if got := c.states("default/web-0"); got != "internet/nat ready, dc/nat waiting" ||
			len(f.space(web0.NetNS).specs) != n+1 || c.states("default/web-1") != "gone" {
			t.Errorf("after the start: %s, %d specs, web-1 %s", got, len(f.space(web0.NetNS).specs), c.states("default/web-1"))
		}
		if f.knows(gate2) != "default/web-0" {
			t.Errorf("gate2 knows %q", f.knows(gate2))
		}
		os.Remove(web0.NetNS) // and now it goes away without a word
		time.Sleep(egress.SyncEvery + time.Second)
		if c.states("default/web-0") != "gone" || f.knows(gate2) != "" {
			t.Errorf("%s, gate2 knows %q", c.states("default/web-0"), f.knows(gate2))
		}
		c.Close()
		// All clients disappeared while the agent was stopped: gateways are still informed.
		c = f.open(world())
		c.AddPod(t.Context(), f.pod("web-2", "10.20.30.42"), asks("internet/nat"))
		c.Close()
		os.Remove(filepath.Join(f.dir, "web-2"))
		time.Sleep(time.Second)
		c = f.open(world())
		synctest.Wait()
		if f.knows(gate1)+f.knows(gate2) != "" {
			t.Errorf("gateways know %q and %q", f.knows(gate1), f.knows(gate2))
		}
		c.Close()
		if err := os.WriteFile(file, []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		if c, err := Open(Config{File: file, Sender: f}); err == nil || !strings.Contains(err.Error(), ".broken") {
			t.Errorf("a broken file: %v", err)
		} else {
			c.Close()
		}
	})
}

func TestAttachAndDetach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		c := f.open(world())
		defer c.Close()
		p := f.pod("web-0", "10.20.30.40")
		nat := Ref{Namespace: "internet", Name: "nat"}
		if got, err := c.Attach(t.Context(), p, []Ref{nat}, false); err != nil || states(got) != "internet/nat ready" {
			t.Errorf("%s, %v", states(got), err)
		}
		if _, err := c.Attach(t.Context(), p, []Ref{{Namespace: "six", Name: "nat"}}, true); !errors.Is(err, ErrNotAttached) {
			t.Errorf("detaching what is not: %v", err)
		}
		if got, err := c.Attach(t.Context(), p, []Ref{nat}, true); err != nil || len(got) != 0 || !f.space(p.NetNS).removed {
			t.Errorf("%v, %v", got, err)
		}
		c.AddPod(t.Context(), p, asks("internet/nat"))
		if _, err := c.Attach(t.Context(), p, []Ref{nat}, true); !errors.Is(err, ErrNotAttached) ||
			!strings.Contains(err.Error(), "annotations") {
			t.Errorf("detaching what its annotations name: %v", err)
		}
		var many []Ref
		for i := range MaxEgresses {
			many = append(many, Ref{Namespace: "a", Name: fmt.Sprint("b", i)})
		}
		if _, err := c.Attach(t.Context(), p, many, false); err == nil {
			t.Error("more than allowed")
		}
		second := podnet.Attachment{NetNS: p.NetNS, IPv4: addr("10.20.30.77"),
			Key: podnet.Key{ContainerID: "c-web-0", Interface: "net1"}}
		if got := c.AddPod(t.Context(), second, asks("dc/nat")); states(got) != "dc/nat refused" ||
			!strings.Contains(got[0].GetReason(), "same network namespace") {
			t.Errorf("a second interface: %v", got)
		}
		if got := c.AddPod(t.Context(), f.pod("web-7", "10.20.30.47"),
			map[string]string{cni.EgressAnnotation + "a": "!"}); len(got) != 1 || got[0].GetState() != Refused ||
			!strings.Contains(got[0].GetReason(), "not a name") {
			t.Errorf("an annotation that cannot be read: %v", got)
		}
	})
}

func TestConfigured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		c := f.open(world())
		defer c.Close()
		blue := filepath.Join(f.dir, "blue")
		nat := []Ref{{Namespace: "internet", Name: "nat"}}
		all := []Configured{
			{IPv4: addr("10.4.0.1"), Uplink: "skein0", MTU: 1420, Egresses: nat},
			{NetNS: blue, Uplink: "eth0", Egresses: nat},
			{NetNS: "/run/skein/netns/x", Uplink: "eth0", Egresses: nat},
		}
		c.Configure(all)
		synctest.Wait()
		if got := c.states("10.4.0.1"); got != "internet/nat ready" || !f.space("").last().Host ||
			f.space("").last().MTU != 1420 {
			t.Errorf("the host: %s, %+v", got, f.space("").last())
		}
		var rest []string
		for _, r := range c.Report() {
			if r.GetNetns() != "" {
				rest = append(rest, r.GetNetns()+" "+r.GetEgresses()[0].GetState())
			}
		}
		slices.Sort(rest)
		if got := strings.Join(rest, ", "); !strings.Contains(got, "x refused") || !strings.Contains(got, "blue waiting") {
			t.Error(got)
		}
		if err := os.WriteFile(blue, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		time.Sleep(egress.SyncEvery + time.Second)
		if got := c.states("10.20.30.99"); got != "internet/nat ready" || f.space(blue).last().Uplink != "eth0" ||
			f.space(blue).last().Host {
			t.Errorf("the namespace: %s", got)
		}
		c.Configure(all[:1])
		synctest.Wait()
		if !f.space(blue).removed || c.states("10.4.0.1") != "internet/nat ready" {
			t.Error("a client that is in the configuration no more goes on")
		}
	})
}

func FuzzDecodeClients(f *testing.F) {
	f.Add([]byte(`{"version":1,"told":[{"Namespace":"a","Name":"b"}],"pods":[{"container":"c","interface":"eth0","netns":"/n","ipv4":"10.0.0.1","ipv6":"","annotated":[{"Namespace":"a","Name":"b"}]}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		file, err := decodeClients(b)
		for _, p := range file.Pods {
			if err == nil && (p.ContainerID == "" || !filepath.IsAbs(p.NetNS)) {
				t.Errorf("%+v", p)
			}
		}
	})
}

// TestFlowsStayOverAStart: an agent that was stopped while an egress got more slots keeps flows on the slot by which
// they began, and forgets that slot when the kernel has no flows by it any more.
func TestFlowsStayOverAStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t)
		nat := Ref{Namespace: "internet", Name: "nat"}
		one, two := world(), world()
		e := one.Egresses[nat]
		e.Slots = e.Slots[:1]
		one.Egresses[nat] = e
		name := "web-0"
		for i := 0; events.SlotFor("default/"+name, 2) != 1; i++ {
			name = fmt.Sprintf("web-%d", i)
		}
		p := f.pod(name, "10.20.30.40")
		c := f.open(one)
		c.AddPod(t.Context(), p, asks("internet/nat"))
		f.space(p.NetNS).flows = []int{0}
		c.Close()
		time.Sleep(time.Second) // the start time distinguishes agents

		c = f.open(two)
		defer func() { c.Close() }()
		also := func() string {
			f.mu.Lock()
			defer f.mu.Unlock()
			got := f.got[pairKey{nat, gate1}].GetClients()
			if len(got) != 1 {
				return fmt.Sprint(got)
			}
			return fmt.Sprint(got[0].GetSlot(), got[0].GetAlso())
		}
		synctest.Wait()
		if s := f.space(p.NetNS).last(); len(s.Flows) != 1 || s.Flows[0].Slot != 0 || also() != "1 [0]" {
			t.Fatalf("after a start: %+v, gateways know %s", s.Flows, also())
		}
		time.Sleep(3 * egress.SyncEvery)
		synctest.Wait()
		if s := f.space(p.NetNS).last(); len(s.Flows) != 1 || also() != "1 [0]" {
			t.Errorf("with flows by slot 0: %+v, gateways know %s", s.Flows, also())
		}
		f.space(p.NetNS).set(nil)
		time.Sleep(2 * egress.SyncEvery)
		synctest.Wait()
		if s := f.space(p.NetNS).last(); len(s.Flows) != 0 || also() != "1 []" {
			t.Errorf("without: %+v, gateways know %s", s.Flows, also())
		}
	})
}

func (s *space) set(flows []int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.flows = flows
}
