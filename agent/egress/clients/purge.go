package clients

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"

	"github.com/skeinmesh/skein/dataplane"
)

// Purge removes the rules, routes and devices of clients while no agent runs: of the clients in the file and of
// configured network namespaces, where "" is the host's own. A namespace that no longer exists needs nothing.
func Purge(file string, configured []string, driver string, numbers dataplane.Numbers, log *slog.Logger) error {
	spaces := map[string]bool{}
	var errs []error
	b, err := os.ReadFile(file)
	if err == nil {
		var f clientsFile
		f, err = decodeClients(b)
		for _, row := range f.Pods {
			if !gone(row.NetNS, row.Inode) {
				spaces[row.NetNS] = true
			}
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, fmt.Errorf("%s cannot be read: %w: what clients of egresses have in their network namespaces "+
			"stays there", file, err))
	}
	for _, path := range configured {
		if path == "" || !gone(path, inode{}) {
			spaces[path] = true
		}
	}
	open := OpenNamespace(driver, "", numbers, log)
	for path := range spaces {
		ns, err := open(path)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		errs = append(errs, ns.Remove(), ns.Close())
	}
	return errors.Join(errs...)
}
