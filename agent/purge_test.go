package agent

import (
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/agent/config"
)

// A purge from outside leaves alone what an agent that runs holds, also one that does not answer on the socket that was
// asked.
func TestPurgeRefusesWhileAnAgentRuns(t *testing.T) {
	cfg := config.Default()
	cfg.StateDir, cfg.RunDir, cfg.Dataplane.Link = t.TempDir(), t.TempDir(), fmt.Sprintf("skp%d", os.Getpid())
	release, err := claims.LockLink(cfg.Dataplane.Link)
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	err = Purge(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err == nil || !strings.Contains(err.Error(), "belongs to another agent that runs on this host") {
		t.Errorf("purging the link of an agent that runs: %v", err)
	}
}
