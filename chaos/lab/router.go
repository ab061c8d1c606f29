package lab

import (
	"context"
	"path/filepath"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

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
