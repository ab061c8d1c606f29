package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// record is the lab's note on disk: what a later invocation needs to go on with it.
type record struct {
	Name    string                 `json:"name"`
	File    string                 `json:"file"`
	Binary  string                 `json:"binary"`
	Env     []string               `json:"env,omitempty"`
	Agents  map[string]agentRecord `json:"agents"`
	Cuts    []Cut                  `json:"cuts,omitempty"`
	Zombies []NotForwarded         `json:"zombies,omitempty"`

	Daemons map[string]process `json:"daemons,omitempty"` // of routers, by site
	Changes []Change           `json:"changes,omitempty"`
}

func recordFile(dir string) string { return filepath.Join(dir, "lab.json") }

// save writes the note, whole or not at all.
func (l *Lab) save() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := record{Name: l.Spec.Name, File: l.Spec.File, Binary: l.opts.Binary, Env: l.opts.Env,
		Agents: map[string]agentRecord{}, Cuts: sortCuts(l.cuts), Zombies: sortNotForwarded(l.zombies), Daemons: l.daemons,
		Changes: l.changes}
	for _, a := range l.agents {
		r.Agents[a.node.Name] = a.record()
	}
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return fmt.Errorf("record of lab %s: %w", l.Spec.Name, err)
	}
	tmp := recordFile(l.Dir) + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return fmt.Errorf("record of lab %s: %w", l.Spec.Name, err)
	}
	if err := os.Rename(tmp, recordFile(l.Dir)); err != nil {
		return fmt.Errorf("record of lab %s: %w", l.Spec.Name, err)
	}
	return nil
}

// Attach finds a lab that is up, perhaps brought up by another process.
func Attach(name string, opts Options) (*Lab, error) {
	if opts.Dir == "" {
		opts.Dir = DefaultDir
	}
	dir := filepath.Join(opts.Dir, name)
	b, err := os.ReadFile(recordFile(dir))
	if errors.Is(err, os.ErrNotExist) {
		left, _ := fabric.Namespaces(name)
		if len(left) > 0 {
			return nil, fmt.Errorf("lab %s is only half there (%d namespaces and no record in %s): `skein lab down %s` "+
				"removes it", name, len(left), dir, name)
		}
		return nil, fmt.Errorf("no lab named %q is up: `skein lab up FILE` brings one up, `skein lab status` lists those "+
			"there are", name)
	}
	if err != nil {
		return nil, fmt.Errorf("lab %s: %w", name, err)
	}
	var r record
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("lab %s: its record %s is damaged (%w): `skein lab down %s` clears it away", name,
			recordFile(dir), err, name)
	}
	spec, err := Load(filepath.Join(dir, "lab.yaml"))
	if err != nil {
		return nil, fmt.Errorf("lab %s: %w", name, err)
	}
	spec.File = r.File
	plan, err := spec.Plan()
	if err != nil {
		return nil, fmt.Errorf("lab %s: %w", name, err)
	}
	opts.Binary, opts.Env = r.Binary, append(r.Env, opts.Env...)
	l := newLab(spec, plan, opts)
	for _, a := range l.agents {
		a.rec = r.Agents[a.node.Name]
	}
	for _, c := range r.Cuts {
		l.cuts[c] = true
	}
	for _, z := range r.Zombies {
		l.zombies[z] = true
	}
	maps.Copy(l.daemons, r.Daemons)
	for _, c := range r.Changes {
		if l.now, err = c.apply(l.now); err != nil {
			return nil, fmt.Errorf("lab %s: its record %s: %w", name, recordFile(dir), err)
		}
	}
	l.changes = r.Changes
	return l, nil
}

// List names the labs that are up or have left something behind.
func List(dir string) ([]string, error) {
	if dir == "" {
		dir = DefaultDir
	}
	names, err := fabric.Labs()
	if err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("list labs: %w", err)
	}
	for _, e := range entries {
		if e.IsDir() && nameRule.MatchString(e.Name()) {
			names = union(names, []string{e.Name()})
		}
	}
	return sorted(names), nil
}
