package demo

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
)

// What the chapter about egresses uses of demo.yaml.
const (
	printer     = "printer"
	printerPort = 80
	outsider    = "cloud1/out"
	egressEvery = 10 * time.Millisecond
)

var homeEgress = lab.Ref{Namespace: "out", Name: "home"}

// egress shows a pod in the cloud that reaches a host at home through a gateway there, and goes on when that gateway
// dies.
func (d *demo) egress(ctx context.Context) error {
	d.Chapter("A pod in the cloud reaches a printer at home, which is not a member, through an egress; then its gateway " +
		"is killed with SIGKILL")
	if err := d.lab.Serve(lab.Serve{Nodes: []string{printer}, Port: printerPort}); err != nil {
		return err
	}
	if err := d.lab.StartPods(ctx, 10*time.Second, lab.StartPods{Nodes: []string{"cloud1"}, Pods: []string{"out"},
		Annotations: map[string]string{"skein.dev/egress." + homeEgress.Namespace: homeEgress.Name}}); err != nil {
		return err
	}
	info, err := d.lab.Node(printer)
	if err != nil {
		return err
	}
	at := netip.AddrPortFrom(info.Host.Addr, printerPort)
	var first lab.Seen
	owner := ""
	d.Verify("the printer answers", func() (string, error) {
		first, err = until(ctx, 15*time.Second, func() (lab.Seen, error) { return d.lab.Get(ctx, outsider, at) })
		if err == nil {
			owner, err = d.gatewayAt(first.Address)
		}
		return fmt.Sprintf("%s, in a network that the mesh does not route, sees %s come from %s: %s's address there",
			at.Addr(), outsider, first.Address, owner), err
	})
	if owner == "" {
		return errors.New("nobody is the gateway")
	}
	flow, err := d.lab.OpenFlow(ctx, outsider, at, "udp", egressEvery)
	if err != nil {
		return err
	}
	defer flow.Abandon()
	if err := flow.Answered(ctx, 50); err != nil {
		return err
	}
	if err := d.lab.Kill(ctx, owner); err != nil {
		return err
	}
	d.Verify("another gateway takes over", func() (string, error) {
		seen, err := until(ctx, 15*time.Second, func() (lab.Seen, error) {
			s, err := d.lab.Get(ctx, outsider, at)
			if err == nil && s.Address == first.Address {
				err = fmt.Errorf("it still comes from %s", s.Address)
			}
			return s, err
		})
		if err != nil {
			return "", err
		}
		if err := flow.Answered(ctx, flow.Count()+50); err != nil {
			return "", err
		}
		r := flow.Stop()
		now, err := d.gatewayAt(seen.Address)
		detail := fmt.Sprintf("now %s, of %s; %d of %d packets of a UDP flow lost, longest time without an answer %s",
			seen.Address, now, r.Lost(), r.Sent, r.Longest().Round(time.Millisecond))
		if err == nil && r.Longest() > egressBound {
			err = fmt.Errorf("%s; want at most %s", detail, egressBound)
		}
		return detail, err
	})
	d.Verify("the killed gateway comes back", func() (string, error) {
		if err := d.lab.Start(ctx, owner); err != nil {
			return "", err
		}
		return "it takes nothing from its successor", d.lab.WaitConverged(ctx, 30*time.Second)
	})
	return nil
}

// gatewayAt is the node at home with an address.
func (d *demo) gatewayAt(a netip.Addr) (string, error) {
	for _, n := range []string{"home1", "home2"} {
		if info, err := d.lab.Node(n); err == nil && info.Host.Addr == a {
			return n, nil
		}
	}
	return "", fmt.Errorf("%s is not a gateway's address", a)
}
