package claims

import (
	"net"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/testns"
)

func TestAgentsOfOneNamespaceShareNoNumbers(t *testing.T) {
	ns := testns.New(t, "claims")
	hold := func(runDir string, n dataplane.Numbers) (c *Claims, err error) {
		ns.Must("hold numbers", func() error { c, err = Hold(runDir, n); return nil })
		return c, err
	}
	first, err := hold("/run/first", dataplane.DefaultNumbers())
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()
	second, err := hold("/run/second", dataplane.NumbersOf(1))
	if err != nil {
		t.Fatalf("the second instance: %v", err)
	}
	defer second.Close()
	mixed := dataplane.NumbersOf(2)
	mixed.RouteTable = 181
	_, err = hold("/run/third", mixed)
	for _, want := range []string{`run directory "/run/second"`, "routing table 181", "skein --run-dir /run/second down",
		"dataplane.instance: 2"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("a third one with the second's table: %v, want %q in it", err, want)
		}
	}
	if err != nil && strings.Contains(err.Error(), "/run/first") {
		t.Errorf("the first one has nothing to do with it: %v", err)
	}
	second.Close()
	third, err := hold("/run/third", mixed)
	if err != nil {
		t.Fatalf("after the second has ended: %v", err)
	}
	third.Close()
	other := testns.New(t, "elsewhere")
	other.Must("hold the same numbers in another namespace", func() error {
		c, err := Hold("/run/elsewhere", dataplane.DefaultNumbers())
		c.Close()
		return err
	})
}

// An agent that does not answer, frozen perhaps, has its numbers all the same.
func TestASilentAgentKeepsItsNumbers(t *testing.T) {
	ns := testns.New(t, "silent")
	ns.Must("silent agent", func() error {
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: prefix + "silent", Net: "unix"})
		if err != nil {
			return err
		}
		defer l.Close()
		c, err := Hold("/run/second", dataplane.NumbersOf(1))
		c.Close()
		if err == nil || !strings.Contains(err.Error(), "does not say which numbers it has") {
			t.Errorf("beside an agent that is silent: %v", err)
		}
		return nil
	})
}

// Anybody on the host can make a socket with an agent's name. It keeps no agent from starting unless its user could be
// one.
func TestSocketsOfStrangersAreNoClaims(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root, to be somebody else")
	}
	ns := testns.New(t, "stranger")
	ns.Must("stranger", func() error {
		const nobody = 65534
		// this thread alone
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), nobody, ^uintptr(0)); e != 0 {
			return e
		}
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: prefix + "stranger", Net: "unix"})
		if _, _, e := syscall.RawSyscall(syscall.SYS_SETRESUID, ^uintptr(0), 0, ^uintptr(0)); e != 0 {
			return e
		}
		if err != nil {
			return err
		}
		defer l.Close()
		c, err := Hold("/run/first", dataplane.DefaultNumbers())
		c.Close()
		return err
	})
}

func TestClaimantsAreReadFromTheKernelsList(t *testing.T) {
	const list = `Num       RefCount Protocol Flags    Type St Inode Path
0000000000000000: 00000002 00000000 00010000 0001 01 34901 @skein-agent-abc
0000000000000000: 00000003 00000000 00000000 0001 03 34902 @skein-agent-abc
0000000000000000: 00000002 00000000 00010000 0001 01 34903 /run/skein/agent.sock
0000000000000000: 00000002 00000000 00010000 0001 01 34904 @skein-link-skein0
0000000000000000: 00000002 00000000 00000000 0002 01 34905
0000000000000000: 00000002 00000000 00010000 0001 01 34906 @skein-agent-def
`
	if got := strings.Join(claimants([]byte(list)), " "); got != "@skein-agent-abc @skein-agent-def" {
		t.Errorf("read %q", got)
	}
}

// Tunnels of agents are not networks of the host; what others make is, whatever its kind.
func TestLinksOfAgents(t *testing.T) {
	own := dataplane.DefaultNumbers()
	own.PlainLink = "plain"
	c := &Claims{own: own}
	for name, kinds := range map[string][]string{"skein1": {"tuntap", "wireguard"}, "skeinhop2": {"sit"},
		"plain": {"tuntap"}} {
		for _, kind := range kinds {
			if !c.OfAgents(name, kind) {
				t.Errorf("%s, %s, is taken for a network of the host", name, kind)
			}
		}
	}
	if c.OfAgents("skein1", "device") || c.OfAgents("wg0", "wireguard") {
		t.Error("a network of the host is taken for an agent's")
	}
}
