package kube

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
)

// mixed: containers of a virtual machine, by CNI without Kubernetes, and pods reach each other in one pool, both ways
// and in both families, each as itself; and so does the machine's host.
func (f fleet) mixed() {
	start := lab.StartPods{Nodes: []string{"vm1"}, Pods: []string{"box"}}
	if err := f.Lab.StartPods(f.Context(), 20*time.Second, start); err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() {
		stop := lab.StopPods{Nodes: []string{"vm1"}, Pods: []string{"box"}}
		if err := f.Lab.StopPods(context.Background(), stop); err != nil {
			f.Error(err)
		}
	})
	if err := f.Lab.Serve(lab.Serve{Nodes: []string{"vm1/box", "vm1"}, Port: 80}); err != nil {
		f.Fatal(err)
	}
	pods, err := f.Lab.Pods("vm1")
	if err != nil || len(pods) != 1 {
		f.Fatalf("containers of vm1: %v, %v", pods, err)
	}
	box := pods[0]
	for _, a := range box.Addresses {
		if !netip.MustParsePrefix("10.100.0.0/17").Contains(a) && !netip.MustParsePrefix("fd00:100::/113").Contains(a) {
			f.Errorf("the container has %s, which is not of the pods' pool", a)
		}
	}
	var vm []netip.Addr
	for _, family := range []string{"ipv4", "ipv6"} {
		a, err := f.Lab.Overlay("vm1", family)
		if err != nil {
			f.Fatal(err)
		}
		vm = append(vm, a)
	}
	for node, name := range behindNAT {
		ns := f.inside(node, name)
		for _, at := range f.addresses(name) {
			f.seenAs(fmt.Sprintf("vm1's container to %s", at), box.NetNS, at, 8080, "/clientip", sameFamily(at, box.Addresses))
			f.seenAs(fmt.Sprintf("vm1 to %s", at), f.host("vm1"), at, 8080, "/clientip", sameFamily(at, vm))
			own := at
			for what, to := range map[string]netip.Addr{"container": sameFamily(at, box.Addresses), "host": sameFamily(at, vm)} {
				f.seenAs(fmt.Sprintf("%s to vm1's %s at %s", name, what, to), ns, to, 80, "/", own)
			}
		}
	}
	f.addressesAgree(15 * time.Second)
}

func sameFamily(as netip.Addr, of []netip.Addr) netip.Addr {
	for _, a := range of {
		if a.Is4() == as.Is4() {
			return a
		}
	}
	return netip.Addr{}
}

// seenAs waits until a server sees a client as itself.
func (f fleet) seenAs(what, ns string, at netip.Addr, port int, path string, want netip.Addr) {
	f.Helper()
	f.await(10*time.Second, what, func() error {
		out, err := get(f.Context(), ns, at, port, path)
		if err != nil {
			return err
		}
		seen, err := clientOf(out)
		if err == nil && seen != want {
			err = fmt.Errorf("it is seen as %s, want %s", seen, want)
		}
		return err
	})
}
