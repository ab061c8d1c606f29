package cni

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Chainable are the plugins that come after ours wherever they are there: host ports and bandwidth limits of pods.
var Chainable = []string{"portmap", "bandwidth"}

// Present are those of Chainable that are in a directory of plugins.
func Present(binDir string) (names []string) {
	for _, name := range Chainable {
		if _, err := os.Stat(filepath.Join(binDir, name)); !errors.Is(err, fs.ErrNotExist) {
			names = append(names, name)
		}
	}
	return names
}

// Found are those that are present and answer, and what is wrong with the others that are present.
func Found(ctx context.Context, binDir string) (names, warnings []string) {
	for _, name := range Present(binDir) {
		path := filepath.Join(binDir, name)
		if _, err := versionsOf(ctx, path); err != nil {
			warnings = append(warnings, fmt.Sprintf("%s is there and not chained: it does not answer: %v", path, err))
			continue
		}
		names = append(names, name)
	}
	return names, warnings
}

// conf is the path of the configuration.
func (in Install) conf() string {
	if in.File == "" {
		return filepath.Join(in.ConfDir, DefaultConfFile)
	}
	return filepath.Join(in.ConfDir, in.File)
}

// Ours tells whether a configuration is of this agent: its first plugin is ours, and asks at our socket.
func (in Install) Ours(conf []byte) bool {
	var c struct {
		Plugins []struct {
			Type   string `json:"type"`
			Socket string `json:"socket"`
		} `json:"plugins"`
	}
	if json.Unmarshal(conf, &c) != nil || len(c.Plugins) == 0 || c.Plugins[0].Type != Type {
		return false
	}
	socket := c.Plugins[0].Socket
	return socket == in.Socket || socket == "" && in.Socket == DefaultSocket
}

// Remove takes the configuration away if it is of this agent. The plugin stays: runtimes need it to take pods down.
func (in Install) Remove() (removed bool, err error) {
	b, err := os.ReadFile(in.conf())
	if errors.Is(err, fs.ErrNotExist) || err == nil && !in.Ours(b) {
		return false, nil
	}
	if err == nil {
		err = os.Remove(in.conf())
	}
	if err != nil {
		return false, fmt.Errorf("remove the network configuration: %w", err)
	}
	return true, nil
}

// Stands tells whether plugin and configuration are there as a run before has left them. It looks at their sizes only,
// so that it may be asked often.
func (in Install) Stands(conf string) bool {
	c, err := os.Stat(in.conf())
	if err != nil || c.Size() != int64(len(conf)) {
		return false
	}
	have, err := os.Stat(filepath.Join(in.BinDir, Type))
	want, err2 := os.Stat(in.Program)
	return err == nil && (err2 != nil || have.Size() == want.Size()) // the program may be being replaced
}
