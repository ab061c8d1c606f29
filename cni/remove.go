package cni

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Uninstall takes back what Install.Run put in place: the configuration first, so that runtimes start no more pods by a
// plugin that is about to go. A configuration that does not name the plugin is somebody else's and stays.
func (in Install) Uninstall() (*Report, error) {
	r := &Report{}
	path := in.conf()
	conf, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, fmt.Errorf("read the configuration that is there: %w", err)
	case !bytes.Contains(conf, []byte(`"`+Type+`"`)):
		r.Warnings = append(r.Warnings, fmt.Sprintf("%s is not skein's and stays", path))
	default:
		if err := in.remove(r, path); err != nil {
			return r, err
		}
	}
	return r, in.remove(r, filepath.Join(in.BinDir, Type))
}

func (in Install) remove(r *Report, path string) error {
	if in.DryRun {
		r.Changes = append(r.Changes, Change{path, false, "would be removed"})
		return nil
	}
	err := os.Remove(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	r.Changes = append(r.Changes, Change{path, true, "removed"})
	return nil
}
