package agent

import (
	"log/slog"

	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/identity"
)

// Recover makes a stopped server the only voter of its cluster; see consensus.Recover.
func Recover(cfg config.Config, log *slog.Logger) (*consensus.Recovery, error) {
	unlock, err := claims.LockState(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	key, _, err := identity.LoadOrCreate(cfg.StateDir)
	if err != nil {
		return nil, err
	}
	return consensus.Recover(cfg.StateDir, key.ID(), log)
}
