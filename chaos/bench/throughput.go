package bench

import (
	"context"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/dataplane"
)

//go:embed pair.yaml
var pairLab []byte

// throughput measures what userspace WireGuard carries between two hosts, beside the wireguard-go program
// that nobody changed: on the same two hosts, in turns.
func (b *bench) throughput(ctx context.Context) []Figure {
	const name, target = "userspace WireGuard between two namespaces", "≥ 95 % of plain wireguard-go"
	ours, plain, err := b.measureThroughput(ctx)
	if err != nil {
		return []Figure{notMeasured(name, target, err)}
	}
	compare := func(of func(carried) float64) (a, b, ratio float64, spread string) {
		var as, bs, ratios []float64
		for i := range ours {
			as, bs, ratios = append(as, of(ours[i])), append(bs, of(plain[i])), append(ratios, of(ours[i])/of(plain[i]))
		}
		return median(as), median(bs), median(ratios), fmt.Sprintf("(n=%d, %.0f–%.0f %%)", len(ratios),
			100*slices.Min(ratios), 100*slices.Max(ratios))
	}
	rate, plainRate, ratio, spread := compare(func(c carried) float64 { return c.rate / 1e9 })
	work, plainWork, workRatio, workSpread := compare(func(c carried) float64 { return c.rate / c.cpu / 1e9 })
	return []Figure{
		{Name: name, Target: target, Load: loadAverage(), Verdict: verdict(ratio >= 0.95),
			Got: fmt.Sprintf("%.0f %%: %.2f beside %.2f Gb/s %s", 100*ratio, rate, plainRate, spread),
			How: "iperf3, one TCP stream, real agents' tunnel and the wireguard-go program in the same namespaces in turns, " +
				"with the same MTU and outside addresses of the same family; median of the ratios of neighbouring runs"},
		{Name: "  the same by processor time of both ends", Load: loadAverage(),
			Got: fmt.Sprintf("%.0f %%: %.2f beside %.2f Gb/s per core %s", 100*workRatio, work, plainWork, workSpread),
			How: "of the agents and of wireguard-go, during the same runs; does not depend on what else this machine does"},
	}
}

func median(v []float64) float64 {
	v = slices.Sorted(slices.Values(v))
	return v[len(v)/2]
}

// carried is what one run gave.
type carried struct {
	rate float64 // bits per second
	cpu  float64 // cores that both ends' processes took
}

func (b *bench) measureThroughput(ctx context.Context) (ours, plain []carried, err error) {
	if _, err := exec.LookPath("iperf3"); err != nil {
		return nil, nil, fmt.Errorf("%w: install Debian's package iperf3 (.ci/setup bench does)", err)
	}
	l, down, err := b.raise(ctx, pairLab)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, down()) }()
	yes, both := true, l.Spec.NodeNames()
	if err := l.Expect(ctx, 30*time.Second, lab.Expect{From: both, To: both, Path: []string{"direct"},
		Reach: &yes}); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(ctx) // ends the plain tunnel before the lab goes
	defer cancel()
	p, err := b.layPlain(ctx, l)
	if err != nil {
		return nil, nil, fmt.Errorf("plain wireguard-go: %w", err)
	}
	defer func() { cancel(); p.wait() }()
	overlay, err := l.Overlay("dc2", "ipv4")
	if err != nil {
		return nil, nil, err
	}
	agents, err := pids(l)
	if err != nil {
		return nil, nil, err
	}
	const seconds = 2 // short ones, and many: single runs differ by a tenth and more on a machine that does other work too
	for n := range b.opts.runs(24, 4) {
		// a b, b a, a b …: what changes slowly on this machine is then the same for both
		for turn := range 2 {
			to, list, pids := overlay, &ours, agents
			if (n+turn)%2 == 1 {
				to, list, pids = plainAddr(1), &plain, p.pids
			}
			before, begin := cpuTime(pids), time.Now()
			rate, err := iperf(ctx, l, to, seconds)
			if err != nil {
				return nil, nil, err
			}
			*list = append(*list, carried{rate: rate, cpu: (cpuTime(pids) - before).Seconds() / time.Since(begin).Seconds()})
		}
		b.note("throughput: %.2f Gb/s beside plain %.2f", ours[n].rate/1e9, plain[n].rate/1e9)
	}
	return ours, plain, nil
}

func pids(l *lab.Lab) (out []int, err error) {
	for _, n := range l.Spec.NodeNames() {
		info, err := l.Node(n)
		if err != nil {
			return nil, err
		}
		out = append(out, info.PID)
	}
	return out, nil
}

// cpuTime is what processes have used until now; one that is gone counts nothing.
func cpuTime(pids []int) (sum time.Duration) {
	for _, pid := range pids {
		if used, err := lab.ProcessorTime(pid); err == nil {
			sum += used
		}
	}
	return sum
}

// iperf sends to dc2 from dc1 and returns what arrived, in bits per second.
func iperf(ctx context.Context, l *lab.Lab, to netip.Addr, seconds int) (float64, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Duration(seconds+20)*time.Second)
	defer cancel()
	served := make(chan error, 1)
	go func() {
		out, exit, err := l.Exec(ctx, "dc2", "iperf3", "-s", "-1", "-B", to.String())
		if err == nil && exit != 0 {
			err = fmt.Errorf("iperf3 -s: exit status %d: %s", exit, out)
		}
		served <- err
	}()
	for {
		out, exit, err := l.Exec(ctx, "dc1", "iperf3", "-c", to.String(), "-J", "-t", fmt.Sprint(seconds), "-O", "1")
		var r struct {
			Error string
			End   struct {
				Received struct {
					Rate float64 `json:"bits_per_second"`
				} `json:"sum_received"`
			}
		}
		if err == nil {
			err = json.Unmarshal([]byte(out), &r)
		}
		switch {
		case err == nil && exit == 0 && r.End.Received.Rate > 0:
			return r.End.Received.Rate, <-served
		case ctx.Err() == nil && strings.Contains(r.Error, "refused"): // the server is not there yet
			select {
			case err := <-served:
				return 0, fmt.Errorf("iperf3 on dc2 ended: %w", err)
			case <-time.After(lookAgain):
				continue
			}
		}
		return 0, fmt.Errorf("iperf3 to %s: exit status %d, %q, %w", to, exit, r.Error, errors.Join(err, ctx.Err()))
	}
}

// plainTunnel is two wireguard-go processes.
type plainTunnel struct {
	pids  []int
	ended []chan error
}

// wait is for after they were told to end; how they did says nothing.
func (p *plainTunnel) wait() {
	for _, c := range p.ended {
		<-c
	}
}

const plainPort = 51999

func plainLink(i int) string     { return fmt.Sprintf("skplain%d", i) }
func plainAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, 2, byte(1 + i)}) }

// layPlain builds the wireguard-go program of the version in go.mod, and lays a tunnel with it between the
// lab's two hosts.
func (b *bench) layPlain(ctx context.Context, l *lab.Lab) (*plainTunnel, error) {
	program := filepath.Join(l.Dir, "wireguard-go")
	build := exec.CommandContext(ctx, "go", "build", "-trimpath", "-o", program, "golang.zx2c4.com/wireguard")
	build.Dir, build.Env = b.opts.Source, append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("build it in the source's directory: %w\n%s", err, out)
	}
	keys := make([]wgtypes.Key, 2)
	var err error
	for i := range keys {
		if keys[i], err = wgtypes.GeneratePrivateKey(); err != nil {
			return nil, err
		}
	}
	outside, err := outsideOf(ctx, l)
	if err != nil {
		return nil, err
	}
	p := &plainTunnel{}
	for i, node := range []string{"dc1", "dc2"} {
		ended := make(chan error, 1)
		p.ended = append(p.ended, ended)
		go func() {
			// Linux shares processors among sessions (sched(7), autogroup): each has one to itself, as the agents have.
			out, exit, err := l.Exec(ctx, node, "setsid", program, "-f", plainLink(i))
			ended <- fmt.Errorf("wireguard-go on %s ended: exit status %d, %w\n%s", node, exit, err, out)
		}()
		info, err := l.Node(node)
		if err != nil {
			return p, err
		}
		other, err := l.Node([]string{"dc2", "dc1"}[i])
		if err != nil {
			return p, err
		}
		public := keys[1-i].PublicKey()
		text := fmt.Sprintf("set=1\nprivate_key=%x\nlisten_port=%d\npublic_key=%x\nendpoint=%s\nallowed_ip=%s/32\n\n",
			keys[i][:], plainPort, public[:], netip.AddrPortFrom(outside(other.Host), plainPort), plainAddr(1-i))
		if err := b.until(ctx, 10*time.Second, func() error { return configurePlain(i, text) }); err != nil {
			return p, err
		}
		if err := fabric.In(info.Namespace, func() error { return addressPlain(i) }); err != nil {
			return p, err
		}
	}
	p.pids, err = processesOf(program)
	return p, err
}

// outsideOf tells a host's address of the family that the agents' tunnel goes over: headers differ in size, and the
// kernel's work with them.
func outsideOf(ctx context.Context, l *lab.Lab) (func(fabric.Host) netip.Addr, error) {
	path, err := l.Path(ctx, "dc1", "dc2")
	if err != nil {
		return nil, err
	}
	at, err := netip.ParseAddrPort(path.GetEndpoint())
	if err != nil {
		return nil, fmt.Errorf("where dc1 reaches dc2: %w", err)
	}
	return func(h fabric.Host) netip.Addr {
		if at.Addr().Is6() {
			return h.Addr6
		}
		return h.Addr
	}, nil
}

// processesOf finds who runs a program.
func processesOf(program string) (pids []int, err error) {
	all, err := filepath.Glob("/proc/[0-9]*/exe")
	for _, exe := range all {
		if to, err := os.Readlink(exe); err == nil && to == program {
			pid, err := strconv.Atoi(filepath.Base(filepath.Dir(exe)))
			if err == nil {
				pids = append(pids, pid)
			}
		}
	}
	if len(pids) == 0 && err == nil {
		err = fmt.Errorf("no process runs %s", program)
	}
	return pids, err
}

// configurePlain speaks wireguard-go's configuration protocol, on the socket that it makes.
func configurePlain(i int, text string) error {
	c, err := net.Dial("unix", "/var/run/wireguard/"+plainLink(i)+".sock")
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte(text)); err != nil {
		return err
	}
	answer := make([]byte, 100)
	n, err := c.Read(answer)
	if err == nil && !strings.HasPrefix(string(answer[:n]), "errno=0\n") {
		err = fmt.Errorf("it answered %q", answer[:n])
	}
	return err
}

// addressPlain sets the link up with the MTU of the agents' own. Its address is the loopback link's: agents fit their
// tunnel into every link that has an address, and would make theirs smaller for this one.
func addressPlain(i int) error {
	ours, err := netlink.LinkByName(dataplane.DefaultNumbers().Link)
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(plainLink(i))
	if err != nil {
		return err
	}
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	const genModeNone = 1 // IN6_ADDR_GEN_MODE_NONE
	whole := func(a netip.Addr) *net.IPNet { return &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(32, 32)} }
	return errors.Join(
		netlink.LinkSetIP6AddrGenMode(link, genModeNone),
		netlink.LinkSetMTU(link, ours.Attrs().MTU),
		netlink.LinkSetUp(link),
		netlink.AddrAdd(loopback, &netlink.Addr{IPNet: whole(plainAddr(i))}),
		netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: whole(plainAddr(1 - i)),
			Src: plainAddr(i).AsSlice()}),
	)
}
