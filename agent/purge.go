package agent

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"

	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/egress/clients"
	"github.com/skeinmesh/skein/agent/egress/node"
	"github.com/skeinmesh/skein/agent/podready"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/dataplane/relaynft"
)

// Purge removes what an agent that does not run left in the kernel, and its network configuration: the same that a
// running one removes when `skein down --purge` asks it to. What is not there is no error. It refuses while an agent
// holds any of the names and numbers of this configuration.
func Purge(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	n := cfg.Dataplane.Numbers()
	held, release, err := claims.LockNumbers(cfg)
	if err != nil {
		return err
	}
	defer release()
	var configured []string
	for _, c := range cfg.Egress.Clients {
		configured = append(configured, c.NetNS)
	}
	errs := []error{
		relaynft.Purge(relaynft.Config{Numbers: n}),
		clients.Purge(filepath.Join(cfg.StateDir, clients.ClientsFile), configured, cfg.Dataplane.FoU, n, log),
		node.PurgeGateways(cfg.RunDir, n),
		podready.Purge(cfg),
		plane.Purge(ctx, plane.Options{Numbers: n, Driver: cfg.Dataplane.WireGuard, Log: log}),
	}
	return errors.Join(append(errs, purgeFormer(ctx, cfg, held, log))...)
}

// purgeFormer removes what the agent has left under numbers that it had before, unless another agent has them now.
func purgeFormer(ctx context.Context, cfg config.Config, held *claims.Claims, log *slog.Logger) error {
	now := cfg.Dataplane.Numbers()
	note, err := readNumbers(cfg.StateDir, false, now)
	if err != nil {
		return err
	}
	left := note.next(now).Left
	if len(left) == 0 {
		return nil
	}
	others, err := held.Others()
	if err != nil {
		return err
	}
	var errs []error
	for _, former := range left {
		if takenBy(former, others) == nil {
			errs = append(errs, relaynft.Purge(relaynft.Config{Numbers: former}), node.PurgeGateways(cfg.RunDir, former),
				plane.Purge(ctx, plane.Options{Numbers: former, Driver: cfg.Dataplane.WireGuard, Log: log}))
		}
	}
	return errors.Join(errs...)
}
