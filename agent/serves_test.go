package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/pods"
	"github.com/skeinmesh/skein/internal/testenv"
)

// served is an allocator that has addresses, or has not.
type served struct {
	*ipam.Manager
	without atomic.Bool
	server  *cniserver.Server
}

func (s *served) Ready() error {
	if s.without.Load() {
		return errors.New("no pool")
	}
	return nil
}

func servesAgent(t *testing.T, dir string) (*Agent, *served) {
	t.Helper()
	c := config.Default()
	c.RunDir, c.CNI.ConfDir, c.CNI.BinDir = filepath.Join(dir, "run"), filepath.Join(dir, "net.d"),
		filepath.Join(dir, "bin")
	if err := os.MkdirAll(c.RunDir, 0o700); err != nil {
		t.Fatal(err)
	}
	a := &Agent{
		log:        slog.New(slog.DiscardHandler),
		settingUp:  settingUp{cfg: c},
		kernelSide: kernelSide{planeStands: make(chan struct{})},
		workloads:  workloads{serves: make(chan struct{})},
		telling:    telling{problems: newProblems()},
	}
	if err := a.openServes(); err != nil {
		t.Fatal(err)
	}
	s := &served{}
	s.server = cniserver.New(cniserver.Config{Allocator: s, Condition: pods.Condition(a.planeStands, a.applied.Load)})
	return a, s
}

// eventually waits until something is so.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 20s", what)
		}
		select {
		case <-t.Context().Done():
		case <-time.After(5 * time.Millisecond):
		}
	}
}

func (a *Agent) doesServe() bool {
	select {
	case <-a.serves:
		return true
	default:
		return false
	}
}

// The runtime's configuration is the last thing that comes, and goes when the host starts anew.
func TestTheConfigurationComesLast(t *testing.T) {
	testenv.NeedRoot(t) // rights that pods need
	dir := t.TempDir()
	a, addresses := servesAgent(t, dir)
	conf := filepath.Join(dir, "net.d", "10-skein.conflist")
	there := func() bool { _, err := os.Stat(conf); return err == nil }
	if !a.freshBoot {
		t.Error("a host without a trace of pods is not taken for one that has started anew")
	}
	addresses.without.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.serveForPods(ctx, addresses.server.Able, 20*time.Millisecond) }()
	close(a.planeStands)
	eventually(t, "the plane stands", func() bool {
		return strings.Contains(addresses.server.Able(t.Context()).Error(), "data plane is not as it should be")
	})
	a.applied.Store(true)
	eventually(t, "no pool", func() bool {
		return strings.Contains(addresses.server.Able(t.Context()).Error(), "no pool")
	})
	if there() || a.doesServe() {
		t.Error("pods are told to come while they cannot start")
	}
	addresses.without.Store(false)
	eventually(t, "it serves", a.doesServe)
	if !there() {
		t.Error("it serves without a configuration")
	}
	if _, err := os.Stat(filepath.Join(dir, "bin", "skein-cni")); err != nil {
		t.Error(err)
	}
	plugin := "#!/bin/sh\necho '{\"cniVersion\":\"1.0.0\",\"supportedVersions\":[\"1.0.0\"]}'\n"
	if err := os.WriteFile(filepath.Join(dir, "bin", "portmap"), []byte(plugin), 0o755); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a plugin that comes later is chained", func() bool {
		b, err := os.ReadFile(conf)
		return err == nil && strings.Contains(string(b), "portmap")
	})
	if err := os.Remove(conf); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what somebody has removed is there again", there)
	stop()
	<-ended
	if !there() {
		t.Error("the configuration went with the agent, and with it the network of pods that the runtime starts again")
	}
	if a, _ := servesAgent(t, dir); a.freshBoot || !there() {
		t.Errorf("after a restart of the agent: fresh %v, configuration %v", a.freshBoot, there())
	}
	if err := os.Remove(filepath.Join(dir, "run", "served")); err != nil { // as a restart of the host does
		t.Fatal(err)
	}
	if a, _ := servesAgent(t, dir); !a.freshBoot || there() {
		t.Errorf("after a restart of the host: fresh %v, configuration %v", a.freshBoot, there())
	}
}

// Another's configuration is left alone, and told; without the key nothing is written.
func TestWhoseConfigurationIsThere(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	a, s := servesAgent(t, dir)
	conf := filepath.Join(dir, "net.d", "10-skein.conflist")
	if err := os.MkdirAll(filepath.Dir(conf), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(conf, []byte(`{"plugins":[{"type":"bridge"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	close(a.planeStands)
	a.applied.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	go a.serveForPods(ctx, s.server.Able, 20*time.Millisecond)
	eventually(t, "it is told", func() bool { return len(a.problems.list()) == 1 })
	stop()
	if p := a.problems.list()[0]; !strings.Contains(p.GetMessage(), "says something else") || a.doesServe() {
		t.Errorf("%v, serves %v", p, a.doesServe())
	}
	if err := purgeCNI(a.cfg); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(conf); err != nil || !strings.Contains(string(b), "bridge") {
		t.Errorf("another's: %s, %v", b, err)
	}
	dir = t.TempDir()
	a, s = servesAgent(t, dir)
	a.cfg.CNI.ConfDir = ""
	close(a.planeStands)
	ctx, stop = context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.serveForPods(ctx, s.server.Able, time.Hour) }()
	eventually(t, "it serves", a.doesServe)
	stop()
	<-ended
	if files, _ := os.ReadDir(filepath.Join(dir, "net.d")); len(files) > 0 || !a.doesServe() {
		t.Errorf("without the key: %v, serves %v", files, a.doesServe())
	}
	note := filepath.Join(a.cfg.RunDir, servedFile)
	if _, err := os.Stat(note); err != nil {
		t.Error(err)
	}
	for range 2 { // the second finds nothing
		if err := purgeCNI(a.cfg); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(note); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the note stays after a purge: %v", err)
	}
}
