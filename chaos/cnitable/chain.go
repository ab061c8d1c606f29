package cnitable

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os/exec"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// hostPort is the one that portmap maps to the pod's podPort.
const hostPort, podPort = 18080, 8080

// chainCaps are what chained plugins are asked for; rates in bits a second, bursts in bits.
var chainCaps = map[string]any{
	"portMappings": []map[string]any{{"hostPort": hostPort, "containerPort": podPort, "protocol": "tcp"}},
	"bandwidth": map[string]any{"ingressRate": 8_000_000, "ingressBurst": 800_000, "egressRate": 8_000_000,
		"egressBurst": 800_000},
}

func chainCases() []Case {
	chain := func(verb string) func(*try) (Outcome, error) {
		return with(call{verb: verb, chain: true, caps: chainCaps})
	}
	add := func(t *try) error { return t.must(call{verb: "ADD", chain: true, caps: chainCaps}) }
	const forwarding = "from another host a host port is reached, and each way has its token bucket; the interface to " +
		"that host must forward IPv4 (sysctl net.ipv4.ip_forward)"
	return []Case{
		{Verb: "ADD", Fault: "none, with portmap and bandwidth after it", want: always(0), tool: only, why: forwarding,
			run: func(t *try) (Outcome, error) {
				o, err := chain("ADD")(t)
				if err == nil && o.ok() {
					err = errors.Join(t.portIsMapped(), t.bandwidthIsBounded(true))
				}
				return o, errors.Join(err, t.must(call{verb: "DEL", chain: true, caps: chainCaps}))
			}},
		{Verb: "CHECK", Fault: "none, with portmap and bandwidth after it", prepare: add, want: since("0.4.0", 0), tool: only,
			run: func(t *try) (Outcome, error) {
				o, err := chain("CHECK")(t)
				return o, errors.Join(err, t.must(call{verb: "DEL", chain: true, caps: chainCaps}))
			}},
		{Verb: "DEL", Fault: "none, with portmap and bandwidth after it", prepare: add, want: always(0), tool: only,
			run: func(t *try) (Outcome, error) {
				o, err := chain("DEL")(t)
				return o, errors.Join(err, t.bandwidthIsBounded(false))
			}},
	}
}

// portIsMapped connects from the other node to the host's port, which a server in the pod must answer.
func (t *try) portIsMapped() error {
	var l net.Listener
	err := fabric.In(fabric.PodNS(t.h.lab.Spec.Name, node, t.pod.name), func() (err error) {
		l, err = net.Listen("tcp4", fmt.Sprintf(":%d", podPort))
		return err
	})
	if err != nil {
		return err
	}
	defer l.Close()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, t.pod.name)
			c.Close()
		}
	}()
	to, err := t.h.address()
	if err != nil {
		return err
	}
	from, err := t.h.lab.Node(server)
	if err != nil {
		return err
	}
	var got []byte
	err = fabric.In(from.Namespace, func() error {
		c, err := net.DialTimeout("tcp4", netip.AddrPortFrom(to, hostPort).String(), 5*time.Second)
		if err != nil {
			return err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(5 * time.Second))
		got, err = io.ReadAll(c)
		return err
	})
	if err == nil && !bytes.Equal(got, []byte(t.pod.name)) {
		err = fmt.Errorf("it was answered %q", got)
	}
	if err != nil {
		return fmt.Errorf("port %d of the host, which portmap maps to the pod: %w", hostPort, err)
	}
	return nil
}

// address is the node's IPv4 address among hosts.
func (h *host) address() (netip.Addr, error) {
	if a := h.info.Host.Addr; a.IsValid() {
		return a, nil
	}
	return netip.Addr{}, errors.New("the node has no IPv4 address")
}

// bandwidthIsBounded looks for the queueing disciplines that bandwidth makes: tbf on the pod's link, and on an ifb.
func (t *try) bandwidthIsBounded(want bool) error {
	var out bytes.Buffer
	cmd := exec.Command("tc", "qdisc", "show")
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := t.h.start(cmd); err != nil {
		return err
	}
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("tc: %w: %s", err, out.String())
	}
	ours, others, devices := 0, 0, 0
	for _, line := range strings.Split(out.String(), "\n") {
		switch {
		case strings.Contains(line, "qdisc tbf") && strings.Contains(line, "dev "+podnet.HostLink(eth0(t.pod.id))+" "):
			ours++
		case strings.Contains(line, "qdisc tbf") && strings.Contains(line, "dev sk"):
			others++
		case strings.Contains(line, "qdisc tbf") && strings.Contains(line, "dev bwp"):
			devices++
		}
	}
	if (ours == 1) != want || devices != ours+others {
		return fmt.Errorf("token buckets: %d on the pod's link, %d on those of others, %d on devices of bandwidth: %s", ours,
			others, devices, out.String())
	}
	return nil
}
