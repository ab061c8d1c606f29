package e2e

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// kernel is what `skein down --purge` must leave as it was: links, addresses, rules, routes, nft.
func kernel(t *testing.T, host string) string {
	t.Helper()
	var all bytes.Buffer
	for _, cmd := range []string{
		"ip -o link show", "ip -o addr show", "ip rule show", "ip -6 rule show", "ip route show table all",
		"ip -6 route show table all", "nft -s list ruleset",
	} {
		words := strings.Fields(cmd)
		var out, errs bytes.Buffer // apart: ip complains of any namespace on the host that goes while it looks
		c := exec.Command(words[0], words[1:]...)
		c.Stdout, c.Stderr = &out, &errs
		err := fabric.In(fabric.HostNS(labName, host), c.Start)
		if err == nil {
			err = c.Wait()
		}
		if err != nil {
			t.Fatalf("%s: %v\n%s", cmd, err, errs.String())
		}
		all.WriteString("# " + cmd + "\n" + out.String())
	}
	return all.String()
}

// on runs a command on a host, for what is not skein's.
func on(t *testing.T, host, command string) {
	t.Helper()
	out, exit, err := shared(t).Exec(t.Context(), host, "sh", "-c", command)
	if err != nil || exit != 0 {
		t.Fatalf("%s: exit status %d, %v\n%s", command, exit, err, out)
	}
}

func TestNoAgent(t *testing.T) {
	s := newSite(t, "spare", "newcomer", nil)
	want := "no agent answers on {run/agent.sock}: start one with `skein up`, or name its --run-dir"
	for _, args := range [][]string{{"status"}, {"nodes"}, {"token", "create"}, {"events"}, {"down"}} {
		s.fails(1, want, args...)
	}
	s.ok("down", "--purge") // nothing to remove is not an error
}

func TestSecondAgent(t *testing.T) {
	s := newSite(t, "spare", "alone", nil)
	p := s.running("--init")
	pid := strconv.Itoa(p.cmd.Process.Pid)
	var before string
	eventually(t, "the first agent's data plane", func() error { // it answers a moment before its first Apply
		last := before
		if before = kernel(t, "spare"); before != last || !strings.Contains(before, "inet 10.4.0.1/16") {
			return errNotYet
		}
		return nil
	})

	s.fails(1, "state directory {state} is in use by another agent (process "+pid+"): stop it with `skein down`, or "+
		"give this one its own --state-dir and --run-dir", s.upArgs()...)
	s.fails(1, "run directory {run} is in use by another agent (process "+pid+"): stop it with `skein down`, or give "+
		"this one its own --run-dir",
		s.upArgs("--init", "--state-dir", s.path("state2"))...)
	s.fails(1, "another agent runs in this network namespace with some of the same numbers: process "+pid+
		", run directory \"{run}\". Both would have "+
		"link skein0, link skeinhop0, link skeinplain0, nft table skein and 17 more. Stop that one (skein --run-dir {run} "+
		"down), or give this one "+
		"numbers of its own: dataplane.instance: 1 (docs/config.md, Numbers)",
		s.upArgs("--init", "--state-dir", s.path("state2"), "--run-dir", s.path("run2"))...)
	s.fails(1, "state directory {state} is in use by another agent (process "+pid+"): stop it with `skein down`, or "+
		"give this one its own --state-dir and --run-dir",
		"server", "recover", "--yes")

	if s.status().GetPhase() != "running" {
		t.Error("the first agent suffered")
	}
	if after := kernel(t, "spare"); after != before {
		t.Errorf("the second agents changed the kernel:\n%s", diff(before, after))
	}
}

func TestKilledAgentResumes(t *testing.T) {
	s := newSite(t, "spare", "phoenix", nil)
	first := s.running("--join", token(t))
	before := s.status()
	first.kill()
	if _, err := os.Stat(s.socket()); err != nil {
		t.Fatalf("the killed agent's socket should be there, stale: %v", err)
	}
	s.fails(1, "no agent answers on {run/agent.sock}: start one with `skein up`, or name its --run-dir", "status")

	s.running() // with neither token nor seed
	after := s.status()
	if after.GetNodeId() != before.GetNodeId() || after.GetIpv4() != before.GetIpv4() ||
		after.GetClusterId() != before.GetClusterId() {
		t.Errorf("it came back as another: before %v, after %v", before, after)
	}
	if after.GetEpoch() <= before.GetEpoch() || after.GetIndex() < before.GetIndex() {
		t.Errorf("epoch %d → %d, index %d → %d", before.GetEpoch(), after.GetEpoch(), before.GetIndex(), after.GetIndex())
	}
}

func TestDownPurge(t *testing.T) {
	s := newSite(t, "spare", "tidy", nil)
	on(t, "spare", `ip link add other0 type veth peer name other1 && ip link set other1 up && ip link set other0 up &&
		ip addr add 172.31.0.1/24 dev other0 && ip rule add pref 32499 fwmark 0x40/0x60 lookup 181 && ip route add 172.30.0.0/16 dev other0 table 181 &&
		ip -6 rule add pref 2100 lookup 181 && nft 'add table inet other; add chain inet other c { type filter hook prerouting priority 0; }; add rule inet other c meta mark 0x20 counter'`)
	t.Cleanup(func() {
		out, _, _ := theLab.Exec(context.Background(), "spare", "sh", "-c",
			`ip link del other0; ip rule del pref 32499; ip -6 rule del pref 2100; nft delete table inet other`)
		if out != "" {
			t.Log(out)
		}
	})
	before := kernel(t, "spare")
	for _, how := range []struct {
		name string
		stop func(*testing.T, *site, *proc)
	}{
		{"running", func(t *testing.T, s *site, p *proc) { s.ok("down", "--purge") }},
		{"killed", func(t *testing.T, s *site, p *proc) {
			p.kill()
			s.ok("down", "--purge")
		}},
		{"down first", func(t *testing.T, s *site, p *proc) {
			s.ok("down")
			s.ok("down", "--purge")
		}},
		{"terminated", func(t *testing.T, s *site, p *proc) {
			_ = p.cmd.Process.Signal(syscall.SIGTERM)
			if exit := p.ends(); exit != 0 {
				t.Errorf("exit status %d", exit)
			}
			s.ok("down", "--purge")
		}},
	} {
		t.Run(how.name, func(t *testing.T) {
			s := s.in(t)
			args := []string{}
			if how.name == "running" {
				args = append(args, "--init")
			}
			p := s.running(args...)
			if kernel(t, "spare") == before {
				t.Fatal("a running agent shows nowhere in the kernel: this test looks at the wrong things")
			}
			how.stop(t, s, p)
			p.ends()
			if after := kernel(t, "spare"); after != before {
				t.Errorf("what was there before and what is left differ:\n%s", diff(before, after))
			}
			if _, err := os.Stat(s.socket()); err == nil && how.name != "killed" {
				t.Error("the socket is left")
			}
			if _, err := os.Stat(s.state("identity.pem")); err != nil {
				t.Errorf("the identity must stay: %v", err)
			}
		})
	}
}

func diff(before, after string) string {
	var b strings.Builder
	have := map[string]bool{}
	for _, l := range strings.Split(after, "\n") {
		have[l] = true
	}
	was := map[string]bool{}
	for _, l := range strings.Split(before, "\n") {
		was[l] = true
		if !have[l] {
			b.WriteString("- " + l + "\n")
		}
	}
	for _, l := range strings.Split(after, "\n") {
		if !was[l] {
			b.WriteString("+ " + l + "\n")
		}
	}
	return b.String()
}

func TestForeignNodeAddress(t *testing.T) {
	// The lab's `peer` asks its peers to route a part of the overlay to it. (A public prefix is refused
	// when its own configuration is read, and again by gossip and by the projection of every peer.)
	client, err := shared(t).Client("seed")
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the seed says what it refuses", func() error {
		st, err := client.Status(t.Context(), &skeinv1.StatusRequest{})
		if err != nil {
			return err
		}
		for _, p := range st.GetProblems() {
			if p.GetSubject() == "peers' requests" {
				if !strings.Contains(p.GetMessage(), "peer: ") || !strings.Contains(p.GetMessage(), "10.4.0.0/24") {
					t.Errorf("the problem is told as %q", p.GetMessage())
				}
				return nil
			}
		}
		return errNotYet
	})
	plan := onSeed(t, "plan")
	if strings.Contains(plan, "10.4.0.0/24") {
		t.Errorf("the overlay's prefix came into the plan:\n%s", plan)
	}
	eventually(t, "the private prefix beside it is routed", func() error {
		if !strings.Contains(onSeed(t, "plan"), "192.168.77.0/24") {
			return errNotYet
		}
		return nil
	})
}
