package kube

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
)

// poolsOfPods: a Namespace's annotation chooses the pool of its real pods.
func (f fleet) poolsOfPods() {
	f.apply(object{"apiVersion": "v1", "kind": "Namespace",
		"metadata": object{"name": "special", "annotations": object{"skein.dev/pool": "special"}}})
	p := pod("special", "cloud1", "pause")
	with(p, "metadata.namespace", "special")
	f.apply(p)
	f.remove("namespace/special")
	f.kubectl(nil, "-n", "special", "wait", "--for=condition=Ready", "--timeout=60s", "pod/special")
	has := f.listed("{.status.podIPs[*].ip}", "-n", "special", "pod", "special")
	v4, v6 := netip.MustParsePrefix("10.100.128.0/24"), netip.MustParsePrefix("fd00:100::8000/120")
	if !v4.Contains(has[0]) || !v6.Contains(has[1]) {
		f.Errorf("a pod of the annotated Namespace has %v", has)
	}
	if has := f.addresses("web-cloud1"); !netip.MustParsePrefix("10.100.0.0/17").Contains(has[0]) {
		f.Errorf("a pod of another Namespace has %v", has)
	}
}

// serveOutside starts a server on a host that is not a member, on the gateway's network.
func (f fleet) serveOutside() netip.Addr {
	f.Helper()
	if err := f.Lab.Serve(lab.Serve{Nodes: []string{"target"}, Port: 80}); err != nil {
		f.Fatal(err)
	}
	at, ok := f.Lab.Network().Host("target")
	if !ok {
		f.Fatal("there is no host outside")
	}
	return at.Addr
}

// leaves waits until a pod reaches a server outside as the gateway's NAT, or does not reach it.
func (f fleet) leaves(node, name string, at netip.Addr, want bool) time.Duration {
	f.Helper()
	var gateway netip.Addr
	for _, s := range f.Lab.Network().Sites {
		if s.Name == "office" { // of the gateway, cp1
			gateway = s.Outside
		}
	}
	ns := f.inside(node, name)
	return f.await(15*time.Second, fmt.Sprintf("pod %s reaches the outside: %v", name, want), func() error {
		out, err := getWithin(f.Context(), 500*time.Millisecond, ns, at, 80, "/")
		switch {
		case !want && err == nil:
			return fmt.Errorf("it was seen outside: %s", out)
		case want && err == nil && !strings.Contains(out, `"`+gateway.String()+`"`):
			return fmt.Errorf("it was seen as %s, want %s", out, gateway)
		case want:
			return err
		}
		return nil
	})
}

// egressesOfPods: a pod's annotation lets it leave through the gateway, from its start or while it runs.
func (f fleet) egressesOfPods() {
	at := f.serveOutside()
	f.apply(with(web("leaves", "home1"), "metadata.annotations", object{"skein.dev/egress.out": "nat"}),
		web("stays", "home1"))
	f.remove("pod/leaves", "pod/stays")
	f.ready("leaves", "stays")
	f.leaves("home1", "leaves", at, true)
	f.leaves("home1", "stays", at, false)
	f.kubectl(nil, "annotate", "pod", "stays", "skein.dev/egress.out=nat")
	in := f.leaves("home1", "stays", at, true)
	f.kubectl(nil, "annotate", "pod", "stays", "skein.dev/egress.out-")
	out := f.leaves("home1", "stays", at, false)
	f.leaves("home1", "leaves", at, true)
	f.Logf("a running pod leaves %s after its annotation, and no longer %s after that has gone",
		in.Round(time.Millisecond), out.Round(time.Millisecond))
}

// egressThatIsNot: a pod starts with an egress that nobody has made, the problem is told, and it ends when it is made.
func (f fleet) egressThatIsNot() {
	f.apply(with(web("hopes", "cloud1"), "metadata.annotations", object{"skein.dev/egress.out": "nowhere"}))
	f.remove("pod/hopes")
	f.ready("hopes")
	f.await(10*time.Second, "the problem is told", func() error {
		out, _, err := f.Lab.Exec(f.Context(), "cloud1", "skein", "egress", "show", "out/nowhere")
		if err == nil && !strings.Contains(out, "waiting: default/hopes for out/nowhere") {
			err = errors.New(out)
		}
		return err
	})
}

const crowd = 80

// eightyPods: as many pods at once on one node get addresses of their own, run, and leave nothing behind (Coil's
// cke-tools#368: some of 80 pods at once never got an address).
func (f fleet) eightyPods() {
	p := pod("crowd", "cloud1", "pause")
	with(p, "metadata", object{"labels": object{"app": "crowd"}})
	with(p, "spec.containers.image", pauseImage)
	with(p, "spec.terminationGracePeriodSeconds", 1) // without one a Pod is gone before kubelet has begun to end it
	delete(p["spec"].(object)["containers"].([]object)[0], "args")
	delete(p, "apiVersion")
	delete(p, "kind")
	f.apply(object{"apiVersion": "apps/v1", "kind": "Deployment",
		"metadata": object{"name": "crowd", "namespace": "default"},
		"spec":     object{"replicas": crowd, "selector": object{"matchLabels": object{"app": "crowd"}}, "template": p}})
	f.remove("deployment/crowd")
	took := f.await(2*time.Minute, "all pods run", func() error { // 120 s is Coil's own bound for a burst of 80
		_, err := f.Cluster.Kubectl(f.Context(), nil, "rollout", "status", "--timeout=30s", "deployment/crowd")
		return err
	})
	f.Logf("%d pods run %s after they were asked for", crowd, took.Round(100*time.Millisecond))
	seen := map[string]bool{}
	for a := range strings.FieldsSeq(f.kubectl(nil, "get", "pods", "-l", "app=crowd", "-o",
		"jsonpath={.items[*].status.podIPs[*].ip}")) {
		seen[a] = true
	}
	if len(seen) != 2*crowd {
		f.Errorf("%d pods have %d different addresses, want %d", crowd, len(seen), 2*crowd)
	}
	f.addressesAgree(15 * time.Second)
	f.kubectl(nil, "delete", "deployment", "crowd")
	f.await(2*time.Minute, "all pods are gone", func() error {
		_, err := f.Cluster.Kubectl(f.Context(), nil, "wait", "--for=delete", "--timeout=30s", "pod", "-l", "app=crowd")
		return err
	})
	f.addressesAgree(15 * time.Second)
}
