package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/skeinmesh/skein/internal/wholefile"
)

// copyFile is the copy of what the apiserver last said, as far as this host goes by it.
const copyFile = "kubernetes.json"

// diskCopy is the file's content.
type diskCopy struct {
	Node       *Node                `json:"node,omitempty"` // this host's
	Namespaces map[string]namespace `json:"namespaces,omitempty"`
	Pods       map[string]pod       `json:"pods,omitempty"` // this host's, by namespace/name
}

// loadCopy reads the copy. One that is not there is empty; one that cannot be read costs nothing but news, and is
// told.
func loadCopy(dir string) (diskCopy, error) {
	var c diskCopy
	path := filepath.Join(dir, copyFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &c)
	}
	if err != nil {
		return diskCopy{}, fmt.Errorf("copy of what the apiserver said, %s: %w", path, err)
	}
	return c, nil
}

func saveCopy(dir string, c diskCopy) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return wholefile.Replace(filepath.Join(dir, copyFile), b)
}
