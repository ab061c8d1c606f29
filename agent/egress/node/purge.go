package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/skeinmesh/skein/agent/egress"
	"github.com/skeinmesh/skein/dataplane"
)

// PurgeGateways removes the namespaces of gateways and the files with their clients. Clients' hosts send their lists
// again to a new gateway.
func PurgeGateways(runDir string, n dataplane.Numbers) error {
	err := egress.Purge(filepath.Join(runDir, gatewayDir), n)
	if e := os.RemoveAll(filepath.Join(runDir, gatewayClients)); e != nil {
		err = errors.Join(err, fmt.Errorf("removing what gateways knew of their clients: %w", e))
	}
	return err
}
