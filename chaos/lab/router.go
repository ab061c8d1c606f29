package lab

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Change is something about the network that has become another since it was built. It is one of these.
type Change struct {
	Site string     `json:"site,omitempty"`
	NAT  fabric.NAT `json:"nat,omitempty"` // the site's router is of this kind now
	// it has moved to the site; without both, its router has forgotten its mappings
	Node string `json:"node,omitempty"`
}

func (c Change) apply(p fabric.Plan) (fabric.Plan, error) {
	switch {
	case c.NAT != "":
		return p.WithNAT(c.Site, c.NAT)
	case c.Node != "":
		return p.Moved(c.Node, c.Site)
	}
	return p.Forgotten(c.Site)
}

// Network is the plan as it is now.
func (l *Lab) Network() fabric.Plan {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.now
}

// change makes a change in the plan, and do makes it in the kernel.
func (l *Lab) change(c Change, do func(before, after fabric.Plan) error) error {
	l.mu.Lock()
	before := l.now
	after, err := c.apply(before)
	if err == nil {
		err = do(before, after)
	}
	if err == nil {
		l.now, l.changes = after, append(l.changes, c)
	}
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.save()
}

// SetNAT makes a site's router another kind of NAT. To and from udp-blocked connections keep their
// mappings: something in between drops UDP from now on, or lets it pass. Else they lose them.
func (l *Lab) SetNAT(site string, kind fabric.NAT) error {
	return l.change(Change{Site: site, NAT: kind}, func(before, after fabric.Plan) error {
		was, _ := before.Site(site)
		return fabric.Retranslate(after, site, was.NAT != fabric.UDPBlocked && kind != fabric.UDPBlocked)
	})
}

// healNATs makes the routers of the nodes' sites again what the lab file says.
func (l *Lab) healNATs(nodes []string) error {
	now := l.Network()
	for _, s := range l.Spec.Sites {
		is, _ := now.Site(s.Name)
		touched := slices.ContainsFunc(nodes, func(n string) bool { h, ok := now.Host(n); return ok && h.Site == s.Name })
		if !touched || is.NAT == s.NAT {
			continue
		}
		if err := l.SetNAT(s.Name, s.NAT); err != nil {
			return err
		}
	}
	return nil
}

// Rebind makes the sites' routers forget all mappings, also those that hosts had asked for. New ones get
// other ports.
func (l *Lab) Rebind(ctx context.Context, sites ...string) error {
	for _, site := range sites {
		if err := l.change(Change{Site: site}, func(_, after fabric.Plan) error {
			return fabric.Retranslate(after, site, true)
		}); err != nil {
			return err
		}
		l.mu.Lock()
		daemon, ok := l.daemons[site]
		l.mu.Unlock()
		if !ok {
			continue
		}
		if err := daemon.signal(unix.SIGKILL); err != nil {
			return fmt.Errorf("site %s: miniupnpd: %w", site, err)
		}
		if err := daemon.wait(ctx); err != nil {
			return fmt.Errorf("site %s: miniupnpd: %w", site, err)
		}
		s, _ := l.Network().Site(site)
		if err := l.startPortmap(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

// Move carries a node to another site, or gives it another address where it is. Its agent is not told.
func (l *Lab) Move(node, site string) error {
	if _, err := l.host(node); err != nil {
		return err
	}
	return l.change(Change{Node: node, Site: site}, func(before, after fabric.Plan) error {
		return fabric.Move(before, after, node)
	})
}

// routerDir is where a site's router keeps files.
func (l *Lab) routerDir(site string) string { return filepath.Join(l.Dir, "routers", site) }

// startPortmaps starts the port-mapping daemon of each router that shall have one. They live in the
// routers' namespaces and end with them.
func (l *Lab) startPortmaps(ctx context.Context) error {
	for _, s := range l.Plan.Sites {
		if len(s.Portmap) == 0 {
			continue
		}
		if err := l.startPortmap(ctx, s); err != nil {
			return err
		}
	}
	return nil
}

func (l *Lab) startPortmap(ctx context.Context, s fabric.Site) error {
	cmd, err := fabric.StartPortmap(ctx, l.Spec.Name, s, l.routerDir(s.Name))
	if err != nil {
		return err
	}
	p, err := processOf(cmd.Process.Pid)
	if err != nil {
		_ = cmd.Process.Kill()
		return err
	}
	go func() { _ = cmd.Wait() }() // reaped whenever it ends
	l.mu.Lock()
	l.daemons[s.Name] = p
	l.mu.Unlock()
	return l.save()
}
