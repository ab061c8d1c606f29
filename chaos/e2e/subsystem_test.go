package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// ownTable makes an nft table that belongs to one process alone, for as long as that lives.
func ownTable(t *testing.T, host, name string) (release func()) {
	t.Helper()
	c := exec.Command("nft", "-i")
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := fabric.In(fabric.HostNS(labName, host), c.Start); err != nil {
		t.Fatal(err)
	}
	release = func() { // the kernel deletes the table with its owner
		in.Close()
		_ = c.Wait() // again: it has ended
	}
	t.Cleanup(release)
	if _, err := io.WriteString(in, "add table inet "+name+" { flags owner; }\n"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the table has its owner", func() error {
		if !strings.Contains(kernel(t, host), "table inet "+name) {
			return errNotYet
		}
		return nil
	})
	return release
}

// echoed sends echoes from a host until one is answered.
func echoed(t *testing.T, host, to string, within time.Duration) {
	t.Helper()
	dst := netip.MustParseAddr(to)
	var socket net.PacketConn
	err := fabric.In(fabric.HostNS(labName, host), func() (err error) {
		socket, err = ping.Open(dst)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	echoes := ping.Start(socket, dst, 200*time.Millisecond, 0, ping.MinSize)
	defer echoes.Stop()
	ctx, cancel := context.WithTimeout(t.Context(), within)
	defer cancel()
	if err := echoes.Answered(ctx, 1); err != nil {
		t.Fatal(err)
	}
}

// TestOneSubsystemFails: another program owns the nft table's name (NFT_TABLE_F_OWNER), so that the agent cannot have
// it. WireGuard and routes go on, peers are met directly, and the table is taken as soon as it is free.
func TestOneSubsystemFails(t *testing.T) {
	s := newSite(t, "spare", "hindered", nil)
	release := ownTable(t, "spare", "skein")
	s.running("--join", token(t))

	problem := func() string {
		for _, p := range s.status().GetProblems() {
			if strings.HasPrefix(p.GetSubject(), "data plane") {
				return p.GetSubject() + " " + p.GetSeverity()
			}
		}
		return ""
	}
	eventually(t, "the failing subsystem is named, and no other", func() error {
		if have, want := problem(), "data plane: nft error"; have != want {
			return fmt.Errorf("problem %q, want %q", have, want)
		}
		return nil
	})
	eventually(t, "the others go on", func() error {
		r, err := s.clients.Peers(t.Context(), &skeinv1.PeersRequest{})
		if err != nil {
			return err
		}
		for _, p := range r.GetPeers() {
			if p.GetName() == "seed" && p.GetPath() == "direct" && p.GetAlive() {
				return nil
			}
		}
		return fmt.Errorf("seed is no direct peer: %v", r.GetPeers())
	})

	release()
	eventually(t, "the table is taken when it is free", func() error {
		if have := problem(); have != "" {
			return fmt.Errorf("still a problem: %s", have)
		}
		return nil
	})
	// WireGuard tries a handshake again after 5 s: one may have been lost before the table was there.
	echoed(t, "spare", "10.4.0.1", 7*time.Second)
	s.ok("down", "--purge")
	onSeed(t, "node", "revoke", "hindered")
}
