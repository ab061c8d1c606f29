package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/agent/egress/clients"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/dataplane/relaynft"
)

// Purge removes what an agent that does not run left in the kernel, and its network configuration: the same that a running one removes when `skein down --purge`
// asks it to. What is not there is no error. It refuses while an agent holds the link.
func Purge(ctx context.Context, cfg config.Config, log *slog.Logger) error {
	release, err := lockLink(cfg.Dataplane.Link)
	if err != nil {
		return err
	}
	defer release()
	var configured []string
	for _, c := range cfg.Egress.Clients {
		configured = append(configured, c.NetNS)
	}
	return errors.Join(
		relaynft.Purge(relaynft.Config{}),
		clients.Purge(filepath.Join(cfg.StateDir, clients.ClientsFile), configured, cfg.Dataplane.FoU, log),
		purgeGateways(cfg.RunDir),
		purgeCNI(cfg),
		plane.Purge(ctx, plane.Options{Link: cfg.Dataplane.Link, Driver: cfg.Dataplane.WireGuard, Log: log}),
	)
}

// purgeGateways removes the namespaces of gateways, and with them what was kept of their clients: a gateway that is made anew is
// told of its clients again.
func purgeGateways(runDir string) error {
	err := egress.Purge(filepath.Join(runDir, gatewayDir))
	if e := os.RemoveAll(filepath.Join(runDir, gatewayClients)); e != nil {
		err = errors.Join(err, fmt.Errorf("removing what gateways knew of their clients: %w", e))
	}
	return err
}
