package fabric

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/vishvananda/netlink"
)

// linkPatience is how long the kernel may take to bring a link up: a second on an idle machine.
const linkPatience = 30 * time.Second

// ready waits until every link carries packets. The kernel brings a veth's carrier and a bridge's ports up
// some time after it was told to, and drops what is sent before.
func ready(ctx context.Context, p Plan) error {
	ctx, cancel := context.WithTimeout(ctx, linkPatience)
	defer cancel()
	all := []string{Core(p.Lab)}
	for _, s := range p.Sites {
		all = append(all, Router(p.Lab, s.Name))
	}
	for _, h := range p.Hosts {
		all = append(all, HostNS(p.Lab, h.Name))
	}
	for _, ns := range all {
		if err := on(ns, func(h *netlink.Handle) error { return linksUp(ctx, h) }); err != nil {
			return err
		}
	}
	return nil
}

func linksUp(ctx context.Context, h *netlink.Handle) error {
	for {
		links, err := h.LinkList()
		if err != nil && !errors.Is(err, netlink.ErrDumpInterrupted) {
			return fmt.Errorf("list links: %w", err)
		}
		waits, masters := "", map[int]bool{} // a bridge without ports stays down
		if err != nil {
			waits = "of a list that was changed while it was read"
		}
		for _, l := range links {
			masters[l.Attrs().MasterIndex] = true
		}
		for _, l := range links {
			if a := l.Attrs(); a.OperState != netlink.OperUp && (l.Type() == "veth" || masters[a.Index]) {
				waits = a.Name
			}
		}
		if waits == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("link %s does not come up: %w", waits, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}
