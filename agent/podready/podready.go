// Package podready says that pods can start on this host once they can: the container runtime is given its network
// configuration then, and not before, and that is kept in place.
package podready

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/cni"
)

// How often is looked whether pods can start, at first and where they cannot for long, for want of a pool perhaps.
const (
	servesEvery  = 100 * time.Millisecond
	servesSeldom = time.Second
	// LookEvery is how often is looked whether what was installed is still there.
	LookEvery = 10 * time.Second
)

// servedFile holds, in the run directory, the ID of the kernel's start in which this host has last been ready for pods.
const servedFile = "served"

const (
	bootIDFile = "/proc/sys/kernel/random/boot_id"
	subjectCNI = "CNI configuration"
)

// installation is what the agent puts where the container runtime looks; nil: nothing.
func installation(c config.Config) *cni.Install {
	if c.CNI.ConfDir == "" {
		return nil
	}
	return &cni.Install{
		BinDir: c.CNI.BinDir, ConfDir: c.CNI.ConfDir, File: c.CNI.ConfFile, Name: c.CNI.Network,
		Socket: filepath.Join(c.RunDir, cniserver.SocketName), Chain: c.CNI.Chain, Own: true,
	}
}

// Config is what a Readiness stands on.
type Config struct {
	RunDir string
	// Conf is the configuration, and what is closed when it is another one.
	Conf func() (*config.Config, <-chan struct{})
	// Stands is closed once the data plane is as it should be.
	Stands <-chan struct{}
	Report func(subject string, severity part.Severity, message, advice string)
	Log    *slog.Logger
}

// Readiness is whether pods can start on this host.
type Readiness struct {
	cfg    Config
	bootID string
	fresh  bool
	ready  chan struct{} // closed by once
	once   sync.Once
}

// BootID is the kernel's, of this start of the host.
func (r *Readiness) BootID() string { return r.bootID }

// FreshBoot reports whether pods have not been able to start since the host's start.
func (r *Readiness) FreshBoot() bool { return r.fresh }

// Ready is closed once pods can start.
func (r *Readiness) Ready() <-chan struct{} { return r.ready }

// Open sees whether the host has started anew since pods could last start. A configuration of before is then
// taken away until they can again: the runtime would take the host for one that is ready.
func Open(cfg Config) (*Readiness, error) {
	b, err := os.ReadFile(bootIDFile)
	if err != nil {
		return nil, fmt.Errorf("tell this start of the kernel from others: %w", err)
	}
	r := &Readiness{cfg: cfg, bootID: strings.TrimSpace(string(b)), ready: make(chan struct{})}
	last, err := os.ReadFile(filepath.Join(cfg.RunDir, servedFile))
	r.fresh = err != nil || strings.TrimSpace(string(last)) != r.bootID
	conf, _ := cfg.Conf()
	in := installation(*conf)
	if in == nil || !r.fresh {
		return r, nil
	}
	removed, err := in.Remove()
	if err != nil {
		return nil, err
	}
	if removed {
		cfg.Log.Info("the host has started anew: its network configuration comes back once pods can start",
			"file", filepath.Join(in.ConfDir, in.File))
	}
	return r, nil
}

// Run says that pods can start once they can, after the runtime was given its configuration, and keeps that in
// place. able says why none can; it is nil where this node only relays.
func (r *Readiness) Run(ctx context.Context, able func(context.Context) error, lookEvery time.Duration) {
	select {
	case <-r.cfg.Stands:
	case <-ctx.Done():
		return
	}
	var in, former *cni.Install // former is what in takes the place of, and stays until that is there
	var written string
	var present []string // plugins that may be chained, when it was written
	unable := servesEvery
	for {
		conf, changed := r.cfg.Conf()
		if next := installation(*conf); !reflect.DeepEqual(next, in) {
			if in != nil && (next == nil || next.ConfDir != in.ConfDir || next.File != in.File) {
				r.uninstall(former)
				former = in
			}
			in, written, unable = next, "", servesEvery
		}
		pause := unable
		if in == nil || able == nil {
			r.withoutInstalling(in)
			r.uninstall(former)
			former = nil
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			continue
		}
		if written != "" && in.Stands(written) && (in.Chain != nil || slices.Equal(cni.Present(in.BinDir), present)) {
			pause = lookEvery
		} else if able(ctx) == nil {
			present = cni.Present(in.BinDir)
			conf, err := r.install(ctx, in)
			if written = conf; err == nil {
				r.setReady()
				r.uninstall(former)
				former = nil
			} else {
				pause = lookEvery / 2
			}
		} else {
			unable = min(unable*5/4, servesSeldom)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-time.After(pause):
		}
	}
}

// withoutInstalling is for hosts where the container runtime is not configured by the agent, or cannot be.
func (r *Readiness) withoutInstalling(in *cni.Install) {
	if in != nil {
		r.cfg.Report(subjectCNI, part.Fails, "this host has no pods, since it only relays",
			"take cni.confDir out of its configuration")
		return
	}
	r.cfg.Report(subjectCNI, "", "", "")
	r.setReady()
}

// uninstall takes away the network configuration at a place that the configuration does not name any more; nil: none.
func (r *Readiness) uninstall(former *cni.Install) {
	if former == nil {
		return
	}
	if _, err := former.Remove(); err != nil {
		r.cfg.Log.Warn("the former network configuration stays", "file", filepath.Join(former.ConfDir, former.File),
			"error", err)
	}
}

// install puts plugin and configuration in place, and tells what is wrong with it.
func (r *Readiness) install(ctx context.Context, in *cni.Install) (conf string, err error) {
	var warnings []string
	if in.Program, err = os.Executable(); err == nil {
		now := *in
		if in.Chain == nil {
			now.Chain, warnings = cni.Found(ctx, in.BinDir)
		}
		var done *cni.Report
		if done, err = now.Run(ctx); err == nil {
			conf, warnings = done.Conf, append(warnings, done.Warnings...)
			for _, c := range done.Changes {
				if c.Done {
					r.cfg.Log.Info("written for the container runtime", "file", c.Path)
				}
			}
		}
	}
	switch {
	case ctx.Err() != nil:
	case err != nil:
		r.cfg.Report(subjectCNI, part.Fails, err.Error(), "no pod can start before it is written; see cni in docs/config.md")
	default:
		r.cfg.Report(subjectCNI, part.Warns, strings.Join(warnings, "; "), "")
	}
	return conf, errors.Join(err, ctx.Err())
}

// setReady notes that pods can start, for those who wait and for the next start of the agent.
func (r *Readiness) setReady() {
	r.once.Do(func() {
		if err := os.WriteFile(filepath.Join(r.cfg.RunDir, servedFile), []byte(r.bootID+"\n"), 0o600); err != nil {
			r.cfg.Log.Warn("the agent's next start will take the host for one that has started anew", "error", err)
		}
		close(r.ready)
	})
}

// Purge takes away the configuration that is this agent's, and the note that pods could start.
func Purge(c config.Config) error {
	err := os.Remove(filepath.Join(c.RunDir, servedFile))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if in := installation(c); in != nil {
		_, e := in.Remove()
		err = errors.Join(err, e)
	}
	return err
}
