package cniserver

import (
	"context"
	"errors"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/egress/clients"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testns"
)

// gateway answers as one whose data plane is quick, or not at all.
type gateway struct {
	mu    sync.Mutex
	away  bool
	knows []*skeinv1.EgressClient
}

func (g *gateway) Sync(_ context.Context, _ identity.ID,
	r *skeinv1.SyncEgressClientsRequest) (*skeinv1.SyncEgressClientsResponse, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.away {
		return nil, errors.New("it does not answer")
	}
	g.knows = r.GetClients()
	return &skeinv1.SyncEgressClientsResponse{Installed: true}, nil
}

func (g *gateway) clients() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.knows)
}

func (g *gateway) silent(away bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.away = away
}

// withEgress gives a rig an agreed egress internet/nat that its own node serves, and the manager of clients.
func withEgress(t *testing.T) (*rig, *clients.Clients, *gateway) {
	r, gw := newRig(t, dual()), &gateway{}
	id := identity.IDOf(secret("identity")).String()
	r.g.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id,
		Labels: map[string]string{"egress": "yes"}, SetLabels: true}}})
	r.g.must(&skeinv1.Command{Body: &skeinv1.Command_DefineEgress{DefineEgress: &skeinv1.DefineEgress{
		Egress: &skeinv1.Egress{
			Namespace: "internet", Name: "nat", Pool: "default", Replicas: 1, Gateways: map[string]string{"egress": "yes"},
			Destinations: []string{"0.0.0.0/0", "::/0"}}}}})
	r.g.must(&skeinv1.Command{Body: &skeinv1.Command_AssignSlot{AssignSlot: &skeinv1.AssignSlot{Namespace: "internet",
		Name: "nat", NodeId: id}}})
	c, err := clients.Open(clients.Config{File: filepath.Join(r.dir, clients.ClientsFile), Sender: gw,
		Open: clients.OpenNamespace("userspace", "", dataplane.Numbers{}, nil)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	c.Follow(r.agreed(), dataplane.FoUPorts{})
	r.egresses = c
	r.serve()
	return r, c, gw
}

func (r *rig) agreed() *events.State {
	r.g.mu.Lock()
	defer r.g.mu.Unlock()
	return r.g.state
}

func ipIn(t *testing.T, ns *testns.NS, args string) string {
	t.Helper()
	out, err := exec.Command("ip", append([]string{"-n", ns.Name}, strings.Fields(args)...)...).CombinedOutput()
	if err != nil {
		return ""
	}
	return string(out)
}

func asking(container string, ns *testns.NS, annotations map[string]string) *skeinv1.CNIAddRequest {
	a := request(container, ns)
	a.Annotations = annotations
	return a
}

// TestPodWithEgress: ADD returns when the pod's rules stand and the gateway knows it; CHECK looks at them; DEL ends
// both.
func TestPodWithEgress(t *testing.T) {
	r, c, gw := withEgress(t)
	pod := testns.New(t, "cp")
	a, err := r.Add(t.Context(), asking("c1", pod, map[string]string{cni.EgressAnnotation + "internet": "nat,later"}))
	if err != nil {
		t.Fatal(err)
	}
	if gw.clients() != 1 || !strings.Contains(ipIn(t, pod, "route show table 118"), "default dev fou4_") ||
		!strings.Contains(ipIn(t, pod, "-6 route show table 118"), "default dev fou6_") {
		t.Errorf("after ADD the gateway knows %d clients; %s%s", gw.clients(), ipIn(t, pod, "route show table 118"),
			ipIn(t, pod, "-6 route show table 118"))
	}
	report := c.Report()
	if len(report) != 1 || report[0].GetKey() != "shop/web-c1" || report[0].GetEgresses()[0].GetState() != clients.Ready ||
		report[0].GetEgresses()[1].GetState() != clients.Unknown || report[0].GetDriver() != "userspace" {
		t.Errorf("%v", report)
	}
	check := func() error {
		_, err := r.Check(t.Context(), &skeinv1.CNICheckRequest{Attachment: at("c1"), Netns: path(pod),
			Ips: []string{a.GetIpv4(), a.GetIpv6()}})
		return err
	}
	if err := check(); err != nil {
		t.Errorf("CHECK: %v", err)
	}
	ipIn(t, pod, "route replace default dev eth0 table 118 proto 12") // another's, which is not ours to take away
	eventually(t, "it is told", func() bool { return c.Report()[0].GetEgresses()[0].GetState() == clients.Waiting })
	err = check()
	if want(t, err, cni.CodeChanged); err == nil || !strings.Contains(err.Error(), "default dev fou4_") {
		t.Errorf("CHECK beside another's route: %v", err)
	}
	r.del("c1")
	if got := r.traces(); got != nothing {
		t.Errorf("after DEL: %s", got)
	}
}

func TestDelEndsClient(t *testing.T) {
	r, c, gw := withEgress(t)
	pod := testns.New(t, "cp")
	if _, err := r.Add(t.Context(),
		asking("c1", pod, map[string]string{cni.EgressAnnotationCoil + "internet": "nat"})); err != nil {
		t.Fatal(err)
	}
	r.del("c1")
	eventually(t, "the gateway hears of it", func() bool { return gw.clients() == 0 })
	if got := ipIn(t, pod, "rule") + ipIn(t, pod, "-6 rule") + ipIn(t, pod, "link"); strings.Contains(got, "lookup 11") ||
		strings.Contains(got, "fou") {
		t.Errorf("DEL has left:\n%s", got)
	}
	if len(c.Report()) != 0 {
		t.Errorf("%v", c.Report())
	}
}

// TestEgressNeverFailsAPod: a gateway that is silent, and annotations that cannot be read, cost a second at most.
func TestEgressNeverFailsAPod(t *testing.T) {
	r, c, gw := withEgress(t)
	gw.silent(true)
	silent, wrong, plain := testns.New(t, "cp"), testns.New(t, "cp"), testns.New(t, "cp")
	began := time.Now()
	if _, err := r.Add(t.Context(),
		asking("c1", silent, map[string]string{cni.EgressAnnotation + "internet": "nat"})); err != nil {
		t.Errorf("ADD with a silent gateway: %v", err)
	}
	if took := time.Since(began); took < clients.AddWait || took > clients.AddWait+3*time.Second {
		t.Errorf("it took %s", took)
	}
	if !strings.Contains(ipIn(t, silent, "route show table 118"), "default dev fou4_") {
		t.Error("packets of a pod that waits for its gateway may leave beside the tunnel")
	}
	if _, err := r.Add(t.Context(), asking("c2", wrong, map[string]string{cni.EgressAnnotation + "a": "!"})); err != nil {
		t.Errorf("ADD with a wrong annotation: %v", err)
	}
	if _, err := r.Add(t.Context(), request("c3", plain)); err != nil {
		t.Error(err)
	}
	if n := len(c.Report()); n != 2 {
		t.Errorf("%d clients: %v", n, c.Report())
	}
	gw.silent(false)
	eventually(t, "the pod is ready", func() bool { return c.Ready("shop/web-c1") })
	if _, err := r.GC(t.Context(), &skeinv1.CNIGCRequest{Network: "skein"}); err != nil || len(c.Report()) != 0 {
		t.Errorf("after GC: %v, %v", c.Report(), err)
	}
}

// TestAttachLater: a pod that runs gets an egress, and loses it again.
func TestAttachLater(t *testing.T) {
	r, c, gw := withEgress(t)
	ns := testns.New(t, "cp")
	a := r.add("c1", ns)
	p := podnet.Attachment{Key: podnet.Key{ContainerID: "c1", Interface: "eth0"}, NetNS: path(ns), Namespace: "shop",
		Pod: "web-c1", IPv4: mustAddr(t, a.GetIpv4()), IPv6: mustAddr(t, a.GetIpv6())}
	nat := []clients.Ref{{Namespace: "internet", Name: "nat"}}
	got, err := c.Attach(t.Context(), p, nat, false)
	if err != nil || len(got) != 1 || got[0].GetState() != clients.Ready || gw.clients() != 1 ||
		!strings.Contains(ipIn(t, ns, "route show table 118"), "default dev fou4_") {
		t.Errorf("%v, %v, %d clients", got, err, gw.clients())
	}
	if got, err = c.Attach(t.Context(), p, nat, true); err != nil || len(got) != 0 ||
		strings.Contains(ipIn(t, ns, "rule")+ipIn(t, ns, "link"), "proto 30") ||
		strings.Contains(ipIn(t, ns, "link"), "fou") {
		t.Errorf("%v, %v; %s", got, err, ipIn(t, ns, "rule"))
	}
	if !strings.Contains(ipIn(t, ns, "route"), "default via 169.254.1.1") {
		t.Error("the pod's own default route is gone")
	}
}
