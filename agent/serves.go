package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/cni"
)

// How often is looked whether pods can start, at first and where they cannot for long, for want of a pool perhaps; and
// whether what was installed is still there.
const (
	servesEvery    = 100 * time.Millisecond
	servesSeldom   = time.Second
	installedEvery = 10 * time.Second
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

// openServes sees whether the host has started anew since pods could last start. A configuration of before is then
// taken away until they can again: the runtime would take the host for one that is ready.
func (a *Agent) openServes() error {
	b, err := os.ReadFile(bootIDFile)
	if err != nil {
		return fmt.Errorf("tell this start of the kernel from others: %w", err)
	}
	a.bootID = strings.TrimSpace(string(b))
	last, err := os.ReadFile(filepath.Join(a.cfg.RunDir, servedFile))
	a.freshBoot = err != nil || strings.TrimSpace(string(last)) != a.bootID
	in := installation(*a.conf())
	if in == nil || !a.freshBoot {
		return nil
	}
	removed, err := in.Remove()
	if err != nil {
		return err
	}
	if removed {
		a.log.Info("the host has started anew: its network configuration comes back once pods can start",
			"file", filepath.Join(in.ConfDir, in.File))
	}
	return nil
}

// serveForPods says that pods can start once they can, after the runtime was given its configuration, and keeps that in
// place. able says why none can; it is nil where this node only relays.
func (a *Agent) serveForPods(ctx context.Context, able func(context.Context) error, lookEvery time.Duration) {
	select {
	case <-a.planeStands:
	case <-ctx.Done():
		return
	}
	var in, former *cni.Install // former is what in takes the place of, and stays until that is there
	var written string
	var present []string // plugins that may be chained, when it was written
	unable := servesEvery
	for {
		conf, changed := a.confChanged()
		if next := installation(*conf); !reflect.DeepEqual(next, in) {
			if in != nil && (next == nil || next.ConfDir != in.ConfDir || next.File != in.File) {
				a.uninstall(former)
				former = in
			}
			in, written, unable = next, "", servesEvery
		}
		pause := unable
		if in == nil || able == nil {
			a.serveWithoutInstalling(in)
			a.uninstall(former)
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
			conf, err := a.install(ctx, in)
			if written = conf; err == nil {
				a.servesNow()
				a.uninstall(former)
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

// serveWithoutInstalling is for hosts where the container runtime is not configured by the agent, or cannot be.
func (a *Agent) serveWithoutInstalling(in *cni.Install) {
	if in != nil {
		a.report(subjectCNI, failure, "this host has no pods, since it only relays",
			"take cni.confDir out of its configuration")
		return
	}
	a.report(subjectCNI, "", "", "")
	a.servesNow()
}

// uninstall takes away the network configuration at a place that the configuration does not name any more; nil: none.
func (a *Agent) uninstall(former *cni.Install) {
	if former == nil {
		return
	}
	if _, err := former.Remove(); err != nil {
		a.log.Warn("the former network configuration stays", "file", filepath.Join(former.ConfDir, former.File), "error", err)
	}
}

// install puts plugin and configuration in place, and tells what is wrong with it.
func (a *Agent) install(ctx context.Context, in *cni.Install) (conf string, err error) {
	var warnings []string
	if in.Program, err = os.Executable(); err == nil {
		now := *in
		if in.Chain == nil {
			now.Chain, warnings = cni.Found(ctx, in.BinDir)
		}
		var r *cni.Report
		if r, err = now.Run(ctx); err == nil {
			conf, warnings = r.Conf, append(warnings, r.Warnings...)
			for _, c := range r.Changes {
				if c.Done {
					a.log.Info("written for the container runtime", "file", c.Path)
				}
			}
		}
	}
	switch {
	case ctx.Err() != nil:
	case err != nil:
		a.report(subjectCNI, failure, err.Error(), "no pod can start before it is written; see cni in docs/config.md")
	default:
		a.report(subjectCNI, warning, strings.Join(warnings, "; "), "")
	}
	return conf, errors.Join(err, ctx.Err())
}

// servesNow notes that pods can start, for those who wait and for the next start of the agent.
func (a *Agent) servesNow() {
	a.servesOnce.Do(func() {
		if err := os.WriteFile(filepath.Join(a.cfg.RunDir, servedFile), []byte(a.bootID+"\n"), 0o600); err != nil {
			a.log.Warn("the agent's next start will take the host for one that has started anew", "error", err)
		}
		close(a.serves)
	})
}

// purgeCNI takes away the configuration that is this agent's, and the note that pods could start.
func purgeCNI(c config.Config) error {
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
