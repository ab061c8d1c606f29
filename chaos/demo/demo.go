package demo

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/internal/pause"
)

//go:embed demo.yaml
var file []byte

// Options say how the demo runs.
type Options struct {
	Lab  lab.Options
	Out  io.Writer
	Keep bool // leave the mesh up at the end
}

// Bounds that the demo checks, from the issue it belongs to.
const (
	blackoutBound = time.Second
	commitBound   = 3 * time.Second
	egressBound   = 3 * time.Second
	pingInterval  = 20 * time.Millisecond // 50 echoes a second
)

// demo is one run.
type demo struct {
	*Show
	opts Options
	lab  *lab.Lab
}

// Run raises the mesh, goes through the chapters and takes it down. It returns ErrFailed when a check
// did not hold, or the reason why the mesh did not come up.
func Run(ctx context.Context, opts Options) (err error) {
	d := &demo{Show: NewShow(opts.Out), opts: opts}
	spec, err := lab.Parse("demo.yaml", file)
	if err != nil {
		return err
	}
	d.Chapter("A public site with three servers and relays, a home behind a port-restricted cone, a cloud behind a " +
		"symmetric NAT")
	opts.Lab.Progress = func(s string) { d.Say("  %s", s) }
	if d.lab, err = lab.Up(ctx, spec, opts.Lab); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.end()) }()
	for _, chapter := range []func(context.Context) error{
		d.formed, d.reachable, d.matrix, d.pods, d.egress, d.blocked, d.upgraded, d.leaderKilled, d.siteCut,
		d.sites, d.revoked,
	} {
		if err := chapter(ctx); err != nil {
			d.Stopped(err)
			break
		}
	}
	if !d.Summary() {
		if dir, err := d.lab.SaveArtifacts(context.Background(), "lab-failures"); err == nil {
			d.Say("logs and states of all agents are in %s", dir)
		}
		return ErrFailed
	}
	return nil
}

func (d *demo) end() error {
	if d.opts.Keep {
		d.Say("\nKEEP=1: the mesh stays up. Look around:\n  skein lab status\n  skein lab exec home1 -- skein peers\n  " +
			"skein lab exec home1 -- skein explain peer cloud1\n  skein lab exec home1/web -- ip addr\n  skein lab exec dc1 " +
			"-- skein events --follow\nand take it down with\n  skein lab down demo")
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	return d.lab.Down(ctx)
}

func (d *demo) formed(ctx context.Context) error {
	d.Verify("cluster formed", func() (string, error) {
		if err := d.lab.WaitConverged(ctx, 30*time.Second); err != nil {
			return "", err
		}
		return "7 agents hold the same state and the same records", nil
	})
	d.Verify("three voters", func() (string, error) {
		s, err := until(ctx, 40*time.Second, func() (*skeinv1.StatusResponse, error) {
			s, err := d.status(ctx, "dc1")
			if err != nil {
				return nil, err
			}
			voters := 0
			for _, v := range s.GetServers() {
				if v.GetVoter() {
					voters++
				}
			}
			if voters != 3 {
				return nil, fmt.Errorf("%d of 3 servers vote", voters)
			}
			return s, nil
		})
		return "leader " + s.GetLeaderName() + "; the servers that joined were promoted when they had kept up", err
	})
	return nil
}

func (d *demo) reachable(ctx context.Context) error {
	d.Chapter("Every pair, over IPv4 and IPv6")
	names := d.lab.Spec.NodeNames()
	d.Verify("every pair reachable", func() (string, error) {
		yes := true
		err := d.lab.Expect(ctx, 20*time.Second, lab.Expect{From: names, To: names, Reach: &yes, Count: 1})
		return fmt.Sprintf("%d ordered pairs answered inside the tunnel, both families", len(names)*(len(names)-1)), err
	})
	return nil
}

func (d *demo) matrix(ctx context.Context) error {
	d.Chapter("The paths, as each row's agent sees them, with the round-trip time")
	names := d.lab.Spec.NodeNames()
	d.Verify("every pair direct, through two kinds of NAT", func() (string, error) {
		table, err := until(ctx, 30*time.Second, func() (string, error) { return d.paths(ctx, names) })
		d.Say("%s", table)
		return "all are direct; home and cloud, behind a port-restricted and a symmetric NAT, have met by port " +
			"prediction", err
	})
	return nil
}

func (d *demo) paths(ctx context.Context, names []string) (string, error) {
	var b strings.Builder
	fmt.Fprintf(&b, "  %8s", "")
	for _, n := range names {
		fmt.Fprintf(&b, "%13s", n)
	}
	var wrong []string
	for _, from := range names {
		fmt.Fprintf(&b, "\n  %8s", from)
		peers, err := d.peers(ctx, from)
		if err != nil {
			return "", err
		}
		for _, to := range names {
			p := peers[to]
			cell := "."
			if from != to {
				cell = fmt.Sprintf("%s %.1fms", p.GetPath(), float64(p.GetRttNanos())/1e6)
				if p.GetPath() != "direct" {
					wrong = append(wrong, fmt.Sprintf("%s to %s is %s, want direct", from, to, p.GetPath()))
				}
			}
			fmt.Fprintf(&b, "%13s", cell)
		}
	}
	if len(wrong) > 0 {
		return b.String(), errors.New(strings.Join(wrong, "; "))
	}
	return b.String(), nil
}

func (d *demo) pods(ctx context.Context) error {
	d.Chapter("A pod on every node, started by the CNI plugin")
	names := d.lab.Spec.NodeNames()
	began := time.Now()
	if err := d.lab.StartPods(ctx, 10*time.Second, lab.StartPods{Nodes: names, Pods: []string{"web"}}); err != nil {
		return err
	}
	took := time.Since(began)
	var pods []string
	for _, n := range names {
		list, err := d.lab.Pods(n)
		if err != nil {
			return err
		}
		for _, p := range list {
			pods = append(pods, p.Place())
			d.Say("  %10s  %s", p.Place(), addressText(p.Addresses))
		}
	}
	yes := true
	d.Verify("pods reach each other", func() (string, error) {
		err := d.lab.Expect(ctx, 20*time.Second, lab.Expect{From: pods, To: pods, Reach: &yes, Count: 1})
		return fmt.Sprintf("%d ordered pairs of pods on all sites, both families; %d pods were started in %.2fs",
			len(pods)*(len(pods)-1), len(pods), took.Seconds()), err
	})
	d.Verify("the accounts of addresses agree", func() (string, error) {
		return "agents, kernels and namespaces: none twice, each in a block of its node",
			d.lab.AddressesAgree(ctx, 20*time.Second)
	})
	return nil
}

// addressText puts the IPv4 address, which comes first, into a column.
func addressText(addrs []netip.Addr) string {
	text := ""
	for _, a := range addrs {
		if a.Is4() {
			text += fmt.Sprintf("%-14s  ", a)
		} else {
			text += a.String()
		}
	}
	return strings.TrimSpace(text)
}

func (d *demo) blocked(ctx context.Context) error {
	d.Chapter("The direct path between home1 and dc2 is blocked, while home1 pings dc2 50 times a second")
	stream, err := d.lab.PingNode("home1", "dc2", pingInterval, 0)
	if err != nil {
		return err
	}
	if err := stream.Answered(ctx, 50); err != nil {
		return err
	}
	if err := d.lab.Block(lab.Block{From: []string{"home1"}, To: []string{"dc2"}, Proto: "udp"}); err != nil {
		return err
	}
	d.Verify("traffic goes on over a relay", func() (string, error) {
		if err := d.lab.Expect(ctx, 5*time.Second, lab.Expect{From: []string{"home1"}, To: []string{"dc2"},
			Path: []string{"relay"}}); err != nil {
			return "", err
		}
		before := stream.Report().Received
		if err := stream.Answered(ctx, before+50); err != nil {
			return "", err
		}
		r := stream.Stop()
		out := r.Longest()
		detail := fmt.Sprintf("%d of %d echoes lost, longest gap %s", r.Lost(), r.Sent, out.Round(time.Millisecond))
		if out > blackoutBound {
			return "", fmt.Errorf("%s; want at most %s", detail, blackoutBound)
		}
		return detail, nil
	})
	return nil
}

func (d *demo) upgraded(ctx context.Context) error {
	d.Chapter("The block is lifted under a running ping: the relayed pair turns direct again")
	stream, err := d.lab.PingNode("home1", "dc2", pingInterval, 0)
	if err != nil {
		return err
	}
	if err := stream.Answered(ctx, 25); err != nil {
		return err
	}
	lifted := time.Now()
	if err := d.lab.Heal(ctx); err != nil {
		return err
	}
	d.Verify("relay to direct without a lost packet", func() (string, error) {
		want := lab.Expect{From: []string{"home1"}, To: []string{"dc2"}, Path: []string{"direct"}}
		if err := d.lab.Expect(ctx, 90*time.Second, want); err != nil {
			return "", err
		}
		took := time.Since(lifted)
		back := lab.Expect{From: []string{"dc2"}, To: []string{"home1"}, Path: []string{"direct"}}
		if err := d.lab.Expect(ctx, 10*time.Second, back); err != nil {
			return "", err
		}
		before := stream.Report().Received
		if err := stream.Answered(ctx, before+50); err != nil {
			return "", err
		}
		r := stream.Stop()
		if r.Lost() > 0 {
			return "", fmt.Errorf("%d of %d echoes were lost in the switch", r.Lost(), r.Sent)
		}
		return fmt.Sprintf("direct %.1fs after the block was lifted, %d echoes, 0 lost", took.Seconds(), r.Sent), nil
	})
	return nil
}

func (d *demo) leaderKilled(ctx context.Context) error {
	s, err := d.status(ctx, "home1")
	if err != nil {
		return err
	}
	leader := s.GetLeaderName()
	d.Chapter("The Raft leader " + leader + " is killed with SIGKILL")
	if err := d.lab.Kill(ctx, leader); err != nil {
		return err
	}
	killed := time.Now()
	d.Verify("a command is committed after", func() (string, error) {
		c, err := d.lab.Client("home1")
		if err != nil {
			return "", err
		}
		if _, err := c.CreateToken(ctx, &skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(time.Hour),
			Label: "after the leader"}); err != nil {
			return "", err
		}
		took := time.Since(killed)
		s, err := until(ctx, 10*time.Second, func() (*skeinv1.StatusResponse, error) {
			s, err := d.status(ctx, "home1")
			if err == nil && (s.GetLeader() == "" || s.GetLeaderName() == leader) {
				err = errors.New("home1 has not heard of the new leader")
			}
			return s, err
		})
		if err != nil {
			return "", err
		}
		detail := fmt.Sprintf("%.2fs after the kill, asked for on home1; the new leader is %s", took.Seconds(),
			s.GetLeaderName())
		if took > commitBound {
			return "", fmt.Errorf("%s; want at most %s", detail, commitBound)
		}
		return detail, nil
	})
	d.Verify("the killed server comes back", func() (string, error) {
		if err := d.lab.Start(ctx, leader); err != nil {
			return "", err
		}
		return "it resumed from its disk, without token or seed", d.lab.WaitConverged(ctx, 30*time.Second)
	})
	return nil
}

func (d *demo) siteCut(ctx context.Context) error {
	d.Chapter("The home site is cut off from the world")
	home, away := []string{"home1", "home2"}, []string{"dc1", "dc2", "dc3", "cloud1", "cloud2"}
	if err := d.lab.Partition(home, away); err != nil {
		return err
	}
	yes, no := true, false
	d.Verify("the cut is real", func() (string, error) {
		return "home1 does not reach dc1", d.lab.Expect(ctx, 10*time.Second, lab.Expect{From: home[:1], To: away[:1],
			Reach: &no, Family: "ipv4"})
	})
	d.Verify("inside, it goes on", func() (string, error) {
		return "home1 and home2 reach each other", d.lab.Expect(ctx, 5*time.Second, lab.Expect{From: home, To: home,
			Reach: &yes, Count: 5})
	})
	d.Verify("outside, it goes on", func() (string, error) {
		return "the others reach each other", d.lab.Expect(ctx, 10*time.Second, lab.Expect{From: away, To: away, Reach: &yes,
			Count: 1, Family: "ipv4"})
	})
	healed := time.Now()
	if err := d.lab.Heal(ctx); err != nil {
		return err
	}
	d.Verify("healed", func() (string, error) {
		names := d.lab.Spec.NodeNames()
		if err := d.lab.Expect(ctx, 30*time.Second, lab.Expect{From: names, To: names, Reach: &yes, Count: 1,
			Family: "ipv4"}); err != nil {
			return "", err
		}
		reach := time.Since(healed)
		err := d.lab.WaitConverged(ctx, 60*time.Second)
		return fmt.Sprintf("every pair reachable %.1fs after, same state and records %.1fs after", reach.Seconds(),
			time.Since(healed).Seconds()), err
	})
	return nil
}

func (d *demo) revoked(ctx context.Context) error {
	d.Chapter("cloud2 is revoked, by a command on home1")
	c, err := d.lab.Client("home1")
	if err != nil {
		return err
	}
	if _, err := c.RevokeNode(ctx, &skeinv1.RevokeNodeRequest{Node: "cloud2", Reason: "the demo"}); err != nil {
		return err
	}
	began := time.Now()
	d.Verify("gone everywhere", func() (string, error) {
		others := slices.DeleteFunc(d.lab.Spec.NodeNames(), func(n string) bool { return n == "cloud2" })
		_, err := until(ctx, 10*time.Second, func() (struct{}, error) {
			for _, n := range others {
				peers, err := d.peers(ctx, n)
				if err != nil {
					return struct{}{}, err
				}
				if _, ok := peers["cloud2"]; ok {
					return struct{}{}, fmt.Errorf("%s still has cloud2 as a peer", n)
				}
			}
			return struct{}{}, nil
		})
		if err != nil {
			return "", err
		}
		took := time.Since(began)
		no := false
		err = d.lab.Expect(ctx, 10*time.Second, lab.Expect{From: others[:1], To: []string{"cloud2"}, Reach: &no,
			Family: "ipv4"})
		return fmt.Sprintf("no agent has it as a peer %.2fs after, and nothing reaches it", took.Seconds()), err
	})
	return nil
}

func (d *demo) status(ctx context.Context, node string) (*skeinv1.StatusResponse, error) {
	c, err := d.lab.Client(node)
	if err != nil {
		return nil, err
	}
	return c.Status(ctx, &skeinv1.StatusRequest{})
}

func (d *demo) peers(ctx context.Context, node string) (map[string]*skeinv1.PeerView, error) {
	c, err := d.lab.Client(node)
	if err != nil {
		return nil, err
	}
	r, err := c.Peers(ctx, &skeinv1.PeersRequest{})
	if err != nil {
		return nil, fmt.Errorf("peers of %s: %w", node, err)
	}
	out := map[string]*skeinv1.PeerView{}
	for _, p := range r.GetPeers() {
		out[p.GetName()] = p
	}
	return out, nil
}

// until calls f until it gives no error, or a time has passed; then it returns the last outcome.
func until[T any](ctx context.Context, within time.Duration, f func() (T, error)) (v T, err error) {
	err = pause.Until(ctx, within, 100*time.Millisecond, func() (err error) {
		v, err = f()
		return err
	})
	return v, err
}
