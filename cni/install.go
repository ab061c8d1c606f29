package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containernetworking/cni/pkg/utils"
	"github.com/containernetworking/cni/pkg/version"
)

// Where runtimes look when they are told nothing else.
const (
	DefaultBinDir  = "/opt/cni/bin"
	DefaultConfDir = "/etc/cni/net.d"
)

// DefaultConfFile is the configuration's name: runtimes take the first by name.
const DefaultConfFile = "10-skein.conflist"

const confFile = DefaultConfFile

// Install says what is put where.
type Install struct {
	Program string // the skein program
	BinDir  string
	ConfDir string
	File    string   // of the configuration; empty: DefaultConfFile
	Name    string   // of the network
	Socket  string   // of the agent
	Chain   []string // plugins that come after ours
	Force   bool     // replace a configuration that is another, and chain plugins that are not there
	Own     bool     // replace a configuration that says something else, if it is of this agent (Ours)
	DryRun  bool
}

// Change is one thing that Install.Run did, or found as it should be.
type Change struct {
	Path   string `json:"path"`
	Done   bool   `json:"written"`
	Detail string `json:"detail"`
}

// Report is what Install.Run did, and what stands in its way.
type Report struct {
	Changes  []Change `json:"changes"`
	Warnings []string `json:"warnings,omitempty"`
	Conf     string   `json:"configuration"`
}

// capabilities are what chained plugins take from the runtime, by type; a plugin that is not listed takes none.
var capabilities = map[string]map[string]bool{
	"portmap":   {"portMappings": true},
	"bandwidth": {"bandwidth": true},
	"tuning":    {"mac": true},
}

// Run puts plugin and configuration in place. What is there already and right is left as it is, so that a second run
// changes nothing.
func (in Install) Run(ctx context.Context) (*Report, error) {
	if err := utils.ValidateNetworkName(in.Name); err != nil {
		return nil, fmt.Errorf("--name %q is not a name of a network: it has letters, digits, dots, underscores and "+
			"hyphens, a letter or digit first", in.Name)
	}
	if !filepath.IsAbs(in.Socket) || len(in.Socket) > maxSocket {
		return nil, fmt.Errorf("socket %q: it must be a path from / of at most %d bytes: see --run-dir", in.Socket, maxSocket)
	}
	r := &Report{}
	conf, err := in.conflist(ctx, r)
	if err != nil {
		return nil, err
	}
	r.Conf = string(conf)
	path := in.conf()
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read the configuration that is there: %w", err)
	}
	same := err == nil && bytes.Equal(old, conf)
	if err == nil && !same && !in.Force && !(in.Own && in.Ours(old)) {
		return nil, fmt.Errorf("%s exists with other content: look at it, and replace it with --force", path)
	}
	if err := in.program(r); err != nil { // before the configuration: a runtime acts on that at once
		return nil, err
	}
	if err := in.write(r, path, same, 0o644, func(f *os.File) error { _, err := f.Write(conf); return err }); err != nil {
		return nil, err
	}
	return r, in.winners(r)
}

// program copies the binary. A link would be quicker, but somebody who writes into one file would change the other.
func (in Install) program(r *Report) error {
	path := filepath.Join(in.BinDir, Type)
	same, err := sameFile(in.Program, path)
	if err != nil {
		return err
	}
	return in.write(r, path, same, 0o755, func(f *os.File) error {
		src, err := os.Open(in.Program)
		if err != nil {
			return err
		}
		defer src.Close()
		_, err = io.Copy(f, src)
		return err
	})
}

// write places one file and notes it.
func (in Install) write(r *Report, path string, same bool, mode os.FileMode, fill func(*os.File) error) error {
	if info, err := os.Stat(path); same && err == nil && info.Mode().Perm() == mode {
		r.Changes = append(r.Changes, Change{path, false, "is there as it should be"})
		return nil
	}
	if in.DryRun {
		r.Changes = append(r.Changes, Change{path, false, "would be written"})
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("install: %w", err)
	}
	if err := place(path, mode, fill); err != nil {
		return fmt.Errorf("install %s: %w", path, err)
	}
	r.Changes = append(r.Changes, Change{path, true, "written"})
	return nil
}

// sameFile compares contents; a second one that is not there differs.
func sameFile(a, b string) (bool, error) {
	fa, err := os.Open(a)
	if err != nil {
		return false, fmt.Errorf("the skein program: %w", err)
	}
	defer fa.Close()
	fb, err := os.Open(b)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("the plugin that is there: %w", err)
	}
	defer fb.Close()
	ia, err := fa.Stat()
	ib, err2 := fb.Stat()
	if err := errors.Join(err, err2); err != nil || ia.Size() != ib.Size() {
		return false, err
	}
	bufA, bufB := make([]byte, 1<<16), make([]byte, 1<<16)
	for {
		n, errA := io.ReadFull(fa, bufA)
		m, errB := io.ReadFull(fb, bufB)
		if !bytes.Equal(bufA[:n], bufB[:m]) {
			return false, nil
		}
		end := errors.Is(errA, io.EOF) || errors.Is(errA, io.ErrUnexpectedEOF)
		if end || errA != nil || errB != nil {
			if end {
				errA, errB = nil, nil
			}
			return end, errors.Join(errA, errB)
		}
	}
}

// conflist is the network configuration. Its cniVersion is one that every runtime in use knows; cniVersions lets newer
// ones choose a newer one, as far as the chained plugins go along.
func (in Install) conflist(ctx context.Context, r *Report) ([]byte, error) {
	ours := map[string]any{"type": Type, "capabilities": map[string]bool{"ips": true, "pool": true, PodAnnotations: true}}
	if in.Socket != DefaultSocket {
		ours["socket"] = in.Socket
	}
	plugins := []map[string]any{ours}
	versions := Versions()
	for _, name := range in.Chain {
		if name == "" || name == Type || strings.ContainsAny(name, "/\\") {
			return nil, fmt.Errorf("--chain: %q is not a plugin that can come after %s", name, Type)
		}
		speaks, err := versionsOf(ctx, filepath.Join(in.BinDir, name))
		if err != nil && !in.Force {
			return nil, fmt.Errorf("--chain %s: %w: install the reference plugins (Debian: containernetworking-plugins) "+
				"there, leave it out, or go on with --force", name, err)
		}
		if err != nil {
			r.Warnings = append(r.Warnings, fmt.Sprintf("%s is chained, but does not answer: %v. Until it is there no pod can "+
				"start", name, err))
		} else {
			versions = slices.DeleteFunc(versions, func(v string) bool { return !slices.Contains(speaks, v) })
		}
		p := map[string]any{"type": name}
		if c := capabilities[name]; c != nil {
			p["capabilities"] = c
		}
		plugins = append(plugins, p)
	}
	if len(versions) == 0 {
		return nil, fmt.Errorf("--chain %s: they and %s have no version of the CNI specification in common: install newer "+
			"ones", strings.Join(in.Chain, ","), Type)
	}
	base := versions[len(versions)-1]
	if slices.Contains(versions, "1.0.0") {
		base = "1.0.0"
	}
	b, err := json.MarshalIndent(struct {
		Version  string           `json:"cniVersion"`
		Versions []string         `json:"cniVersions"`
		Name     string           `json:"name"`
		Plugins  []map[string]any `json:"plugins"`
	}{base, versions, in.Name, plugins}, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("the network configuration: %w", err)
	}
	return append(b, '\n'), nil
}

// versionsOf asks a plugin which versions it speaks.
func versionsOf(ctx context.Context, program string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, program)
	cmd.Env = []string{"CNI_COMMAND=VERSION", "CNI_PATH=" + filepath.Dir(program)}
	cmd.Stdin = strings.NewReader(`{"cniVersion":"1.0.0"}`)
	cmd.WaitDelay = time.Second
	out, err := cmd.Output()
	if err != nil {
		return nil, err
	}
	info, err := (&version.PluginDecoder{}).Decode(out)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", program, err)
	}
	return info.SupportedVersions(), nil
}

// winners warns of configurations that a runtime would take instead of ours.
func (in Install) winners(r *Report) error {
	entries, err := os.ReadDir(in.ConfDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("look for other configurations: %w", err)
	}
	for _, e := range entries { // in order of name
		if e.Name() < filepath.Base(in.conf()) && !e.IsDir() && slices.Contains([]string{".conf", ".conflist", ".json"},
			filepath.Ext(e.Name())) {
			r.Warnings = append(r.Warnings, fmt.Sprintf("%s comes before %s by name: runtimes use it instead. Remove or "+
				"rename it",
				filepath.Join(in.ConfDir, e.Name()), filepath.Base(in.conf())))
		}
	}
	return nil
}
