package takeover

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/internal/testns"
)

// coilHost is a host with what Coil leaves in the kernel and on the disk.
type coilHost struct {
	*testing.T
	ns    *testns.NS
	dir   string
	t     *Takeover
	known map[netip.Addr]bool
}

const coilConf = `{"cniVersion": "0.4.0", "name": "k8s-pod-network",
  "plugins": [{"type": "coil", "socket": "DIR/coild.sock"}]}
`

// newCoilHost has one pod whose route is where skein keeps them, and one whose route is in a table of Coil's own.
func newCoilHost(t *testing.T) *coilHost {
	h := &coilHost{T: t, ns: testns.New(t, "coil"), dir: t.TempDir(), known: map[netip.Addr]bool{}}
	h.run(`ip link set lo up
		ip link add veth1 type veth peer name peer1
		ip link set veth1 alias COIL:default:c1:eth0 up
		ip link add veth2 type veth peer name peer2
		ip link set veth2 alias COIL:default:c2:eth0 up
		ip link add mine type veth peer name peer3
		ip link set mine up
		ip rule add pref 2000 table 116
		ip rule add pref 1500 table 200
		ip -6 rule add pref 1500 table 200
		ip rule add pref 1501 from 192.0.2.1 table 200
		ip route add 10.100.0.33/32 dev veth1 table 116 proto 30
		ip route add 10.100.0.34/32 dev veth2 table 200 proto 30
		ip -6 route add fd00:100::22/128 dev veth2 table 200 proto 30
		ip route add 10.100.0.32/27 dev lo table 119 proto 30
		ip route add 10.9.0.0/27 dev lo table 119 proto 30
		ip route add 10.100.0.35/32 dev mine table 200`)
	conf := filepath.Join(h.dir, "net.d")
	if err := os.Mkdir(conf, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(h.conf(), []byte(strings.ReplaceAll(coilConf, "DIR", h.dir)), 0o640); err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(h.dir, "skein")
	if err := os.WriteFile(program, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	h.t = &Takeover{
		StateDir: h.dir, Numbers: numbers,
		Install: cni.Install{Program: program, BinDir: filepath.Join(h.dir, "bin"), ConfDir: conf, Name: "skein",
			Socket: filepath.Join(h.dir, "cni.sock")},
		Log: func(context.Context) (Log, error) {
			return Log{Node: "home1", Blocks: []netip.Prefix{own, netip.MustParsePrefix("fd00:100::20/123")}}, nil
		},
		Known: func(context.Context) (map[netip.Addr]bool, error) { return h.known, nil },
	}
	return h
}

func (h *coilHost) conf() string { return filepath.Join(h.dir, "net.d", "10-coil.conflist") }

func (h *coilHost) run(script string) (out string) {
	h.Helper()
	h.ns.Must("run a script", func() error {
		b, err := exec.Command("sh", "-ec", script).CombinedOutput()
		if out = string(b); err != nil {
			err = errors.Join(err, errors.New(out))
		}
		return err
	})
	return out
}

// state is all that a takeover may change.
func (h *coilHost) state() string {
	h.Helper()
	conf, err := os.ReadFile(h.conf())
	if err != nil {
		conf = []byte(err.Error())
	}
	return h.run("ip rule; ip -6 rule; ip route show table all; ip -6 route show table all") + string(conf)
}

func (h *coilHost) plan() (p Plan, err error) {
	h.ns.Do(func() { p, err = h.t.Plan(h.Context()) })
	return p, err
}

func (h *coilHost) takeOver() error {
	p, err := h.plan()
	if err == nil {
		h.ns.Do(func() { err = h.t.Run(h.Context(), p) })
	}
	return err
}

func (h *coilHost) undo() (err error) {
	h.ns.Do(func() { err = h.t.Undo() })
	return err
}

func (h *coilHost) knows(addresses ...string) {
	for _, a := range addresses {
		h.known[netip.MustParseAddr(a)] = true
	}
}

func TestTakeoverAndUndo(t *testing.T) {
	h := newCoilHost(t)
	before := h.state()
	h.knows("10.100.0.33", "10.100.0.34", "fd00:100::22")
	if p, err := h.plan(); err != nil || p.Nothing() {
		t.Fatalf("%+v, %v", p, err)
	}
	if h.state() != before {
		t.Error("a plan changes something")
	}
	if err := h.takeOver(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		show      string
		has, lost []string
	}{
		{"ip route show table 116", []string{"10.100.0.33 dev veth1 proto 30", "10.100.0.34 dev veth2 proto 30"}, nil},
		{"ip -6 route show table 116", []string{"fd00:100::22 dev veth2 proto 30"}, nil},
		{"ip route show table 200", []string{"10.100.0.35 dev mine"}, []string{"10.100.0.34"}},
		{"ip -6 route show table 200 2>&1 || true", nil, []string{"fd00:100::22"}},
		{"ip route show table 119", []string{"10.9.0.0/27"}, []string{"10.100.0.32/27"}},
		{"ip rule", []string{"2000:", "1501:"}, []string{"1500:"}},
		{"ip -6 rule", nil, []string{"1500:"}},
		{"ls " + filepath.Dir(h.conf()), []string{cni.DefaultConfFile}, []string{"10-coil"}},
	} {
		out := h.run(c.show)
		for _, want := range c.has {
			if !strings.Contains(out, want) {
				t.Errorf("%s lacks %q:\n%s", c.show, want, out)
			}
		}
		for _, gone := range c.lost {
			if strings.Contains(out, gone) {
				t.Errorf("%s still has %q:\n%s", c.show, gone, out)
			}
		}
	}
	if p, err := h.plan(); err != nil || !p.Nothing() {
		t.Errorf("a second run would do %q, %v", p.Lines(), err)
	}
	if err := h.undo(); err != nil {
		t.Fatal(err)
	}
	if after := h.state(); after != before {
		t.Errorf("after undo:\n%s\nbefore:\n%s", after, before)
	}
	if _, err := os.Stat(filepath.Join(h.dir, "net.d", cni.DefaultConfFile)); err == nil {
		t.Error("skein's configuration stays behind")
	}
	if info, err := os.Stat(h.conf()); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("Coil's configuration has another mode: %v, %v", info, err)
	}
	if err := h.undo(); err == nil || !strings.Contains(err.Error(), "nothing to undo") {
		t.Errorf("a second undo: %v", err)
	}
}

// While the agent does not know a pod, all stays as it is.
func TestTakeoverIsTakenBack(t *testing.T) {
	h := newCoilHost(t)
	before := h.state()
	h.knows("10.100.0.33")
	ctx, cancel := context.WithCancel(t.Context())
	h.t.Known = func(context.Context) (map[netip.Addr]bool, error) { cancel(); return h.known, nil }
	p, err := h.plan()
	if err != nil {
		t.Fatal(err)
	}
	h.ns.Do(func() { err = h.t.Run(ctx, p) })
	if err == nil || !strings.Contains(err.Error(), "10.100.0.34") || !strings.Contains(err.Error(), "all is as before") {
		t.Errorf("%v", err)
	}
	if after := h.state(); after != before {
		t.Errorf("after a run that failed:\n%s\nbefore:\n%s", after, before)
	}
}

// A pod that ends on the way is not waited for, and its routes are not missed when all is taken back.
func TestAPodEndsMeanwhile(t *testing.T) {
	h := newCoilHost(t)
	h.knows("10.100.0.33")
	h.t.Known = func(context.Context) (map[netip.Addr]bool, error) {
		out, err := exec.Command("ip", "link", "del", "veth2").CombinedOutput()
		if err != nil && !strings.Contains(string(out), "Cannot find") {
			return nil, errors.New(string(out))
		}
		return h.known, nil
	}
	if err := h.takeOver(); err != nil {
		t.Fatal(err)
	}
	if err := h.undo(); err != nil {
		t.Error(err)
	}
}

func TestTakeoverNeedsCoilStopped(t *testing.T) {
	h := newCoilHost(t)
	l, err := net.Listen("unix", filepath.Join(h.dir, "coild.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if _, err := h.plan(); err == nil || !strings.Contains(err.Error(), "stop it first") {
		t.Errorf("Coil's daemon runs, and %v", err)
	}
}
