package podready

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/cniserver"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/ipam"
	"github.com/skeinmesh/skein/agent/part"
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

// host is what the tests change: whether the data plane stands, and what is reported.
type host struct {
	*Readiness
	conf    config.Config
	stands  chan struct{}
	applied atomic.Bool
	mu      sync.Mutex
	problem string // the newest
}

func (h *host) problems() string {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.problem
}

func newHost(t *testing.T, dir string, change func(*config.Config)) (*host, *served) {
	t.Helper()
	c := config.Default()
	c.RunDir, c.CNI.ConfDir, c.CNI.BinDir = filepath.Join(dir, "run"), filepath.Join(dir, "net.d"),
		filepath.Join(dir, "bin")
	if change != nil {
		change(&c)
	}
	if err := os.MkdirAll(c.RunDir, 0o700); err != nil {
		t.Fatal(err)
	}
	h := &host{conf: c, stands: make(chan struct{})}
	var err error
	h.Readiness, err = Open(Config{RunDir: c.RunDir, Stands: h.stands, Log: slog.New(slog.DiscardHandler),
		Conf: func() (*config.Config, <-chan struct{}) { return &h.conf, nil },
		Report: func(_ string, _ part.Severity, message, _ string) {
			h.mu.Lock()
			defer h.mu.Unlock()
			h.problem = message
		}})
	if err != nil {
		t.Fatal(err)
	}
	s := &served{}
	s.server = cniserver.New(cniserver.Config{Allocator: s, Condition: pods.Condition(h.stands, h.applied.Load)})
	return h, s
}

func (h *host) serves() bool {
	select {
	case <-h.Ready():
		return true
	default:
		return false
	}
}

// The runtime's configuration is the last thing that comes, and goes when the host starts anew.
func TestTheConfigurationComesLast(t *testing.T) {
	testenv.NeedRoot(t) // rights that pods need
	dir := t.TempDir()
	a, addresses := newHost(t, dir, nil)
	conf := filepath.Join(dir, "net.d", "10-skein.conflist")
	there := func() bool { _, err := os.Stat(conf); return err == nil }
	if !a.FreshBoot() {
		t.Error("a host without a trace of pods is not taken for one that has started anew")
	}
	addresses.without.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.Run(ctx, addresses.server.Able, 20*time.Millisecond) }()
	close(a.stands)
	testenv.Eventually(t, "the plane stands", func() bool {
		return strings.Contains(addresses.server.Able(t.Context()).Error(), "data plane is not as it should be")
	})
	a.applied.Store(true)
	testenv.Eventually(t, "no pool", func() bool {
		return strings.Contains(addresses.server.Able(t.Context()).Error(), "no pool")
	})
	if there() || a.serves() {
		t.Error("pods are told to come while they cannot start")
	}
	addresses.without.Store(false)
	testenv.Eventually(t, "it serves", a.serves)
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
	testenv.Eventually(t, "a plugin that comes later is chained", func() bool {
		b, err := os.ReadFile(conf)
		return err == nil && strings.Contains(string(b), "portmap")
	})
	if err := os.Remove(conf); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, "what somebody has removed is there again", there)
	stop()
	<-ended
	if !there() {
		t.Error("the configuration went with the agent, and with it the network of pods that the runtime starts again")
	}
	if a, _ := newHost(t, dir, nil); a.FreshBoot() || !there() {
		t.Errorf("after a restart of the agent: fresh %v, configuration %v", a.FreshBoot(), there())
	}
	if err := os.Remove(filepath.Join(dir, "run", "served")); err != nil { // as a restart of the host does
		t.Fatal(err)
	}
	if a, _ := newHost(t, dir, nil); !a.FreshBoot() || there() {
		t.Errorf("after a restart of the host: fresh %v, configuration %v", a.FreshBoot(), there())
	}
}

// Another's configuration is left alone, and told; without the key nothing is written.
func TestWhoseConfigurationIsThere(t *testing.T) {
	testenv.NeedRoot(t)
	dir := t.TempDir()
	a, s := newHost(t, dir, nil)
	conf := filepath.Join(dir, "net.d", "10-skein.conflist")
	if err := os.MkdirAll(filepath.Dir(conf), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(conf, []byte(`{"plugins":[{"type":"bridge"}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	close(a.stands)
	a.applied.Store(true)
	ctx, stop := context.WithCancel(t.Context())
	go a.Run(ctx, s.server.Able, 20*time.Millisecond)
	testenv.Eventually(t, "it is told", func() bool { return a.problems() != "" })
	stop()
	if p := a.problems(); !strings.Contains(p, "exists with other content") || a.serves() {
		t.Errorf("%q, serves %v", p, a.serves())
	}
	if err := Purge(a.conf); err != nil {
		t.Error(err)
	}
	if b, err := os.ReadFile(conf); err != nil || !strings.Contains(string(b), "bridge") {
		t.Errorf("another's: %s, %v", b, err)
	}
	dir = t.TempDir()
	a, s = newHost(t, dir, func(c *config.Config) { c.CNI.ConfDir = "" })
	close(a.stands)
	ctx, stop = context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); a.Run(ctx, s.server.Able, time.Hour) }()
	testenv.Eventually(t, "it serves", a.serves)
	stop()
	<-ended
	if files, _ := os.ReadDir(filepath.Join(dir, "net.d")); len(files) > 0 || !a.serves() {
		t.Errorf("without the key: %v, serves %v", files, a.serves())
	}
	note := filepath.Join(a.conf.RunDir, servedFile)
	if _, err := os.Stat(note); err != nil {
		t.Error(err)
	}
	for range 2 { // the second finds nothing
		if err := Purge(a.conf); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(note); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the note stays after a purge: %v", err)
	}
}
