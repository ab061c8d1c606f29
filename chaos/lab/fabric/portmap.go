package fabric

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// The protocols by which hosts ask a router for a port.
const (
	PCP    = "pcp"
	NATPMP = "natpmp"
	UPnP   = "upnp"
)

// Portmaps lists them.
func Portmaps() []string { return []string{PCP, NATPMP, UPnP} }

const (
	portmapProgram = "miniupnpd"
	portmapPort    = 5351 // PCP (RFC 6887) and NAT-PMP (RFC 6886) share it
	upnpPort       = 5000
	portmapWithin  = 10 * time.Second
)

// ErrNoPortmap says that the program is missing which answers port-mapping requests.
var ErrNoPortmap = errors.New("`portmap` needs the program miniupnpd with its nftables backend: install Debian's " +
	"package miniupnpd-nftables")

// portmapVersion is the first byte of a protocol's requests.
var portmapVersion = map[string]byte{NATPMP: 0, PCP: 2}

// onlyProtocols makes a router deaf to the one of PCP and NAT-PMP that it shall not speak: the daemon
// knows both or none.
func (n *nat) onlyProtocols() {
	speaks := n.site.Portmap
	for name, version := range portmapVersion {
		if len(speaks) > 0 && !slices.Contains(speaks, name) {
			n.add(n.input, from(lanLink), proto(unix.IPPROTO_UDP), rule{transport(offsetDport, 2, reg1),
				equal([]byte{portmapPort >> 8, portmapPort & 0xff})},
				rule{transport(8, 1, reg1), equal([]byte{version})}, drop())
		}
	}
}

// portmapChains makes the table in which the daemon keeps its mappings, empty. Its translation comes
// before the NAT's own.
func portmapChains(router string) error {
	return replaceRuleset(router, nftables.TableFamilyINet, portmapProgram, func(rs *ruleset) {
		rs.chain("forward", nftables.ChainTypeFilter, nftables.ChainHookForward, *nftables.ChainPriorityFilter-1)
		rs.chain("prerouting", nftables.ChainTypeNAT, nftables.ChainHookPrerouting, *nftables.ChainPriorityNATDest-1)
		rs.chain("postrouting", nftables.ChainTypeNAT, nftables.ChainHookPostrouting, *nftables.ChainPriorityNATSource-1)
	})
}

// StartPortmap starts miniupnpd in a site's router, with its files in dir, and waits until it answers.
// It ends with the namespace's processes (Teardown), or when the caller kills it. One that ran before
// must be gone; its mappings are forgotten.
func StartPortmap(ctx context.Context, lab string, s Site, dir string) (*exec.Cmd, error) {
	program, err := exec.LookPath(portmapProgram)
	if err != nil {
		return nil, fmt.Errorf("site %s: %w", s.Name, ErrNoPortmap)
	}
	router := Router(lab, s.Name)
	if err := portmapChains(router); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("site %s: portmap: %w", s.Name, err)
	}
	conf := filepath.Join(dir, "miniupnpd.conf")
	if err := os.WriteFile(conf, []byte(portmapConfig(s)), 0o600); err != nil {
		return nil, fmt.Errorf("site %s: portmap: %w", s.Name, err)
	}
	log, err := os.OpenFile(filepath.Join(dir, "miniupnpd.log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, fmt.Errorf("site %s: portmap: %w", s.Name, err)
	}
	defer log.Close()
	cmd := exec.Command(program, "-d", "-f", conf, "-P", filepath.Join(dir, "miniupnpd.pid"))
	cmd.Dir, cmd.Stdout, cmd.Stderr = dir, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := In(router, cmd.Start); err != nil {
		return nil, fmt.Errorf("site %s: start %s: %w", s.Name, program, err)
	}
	if err := portmapAnswers(ctx, router, s); err != nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		return nil, fmt.Errorf("site %s: %w; its log is %s", s.Name, err, log.Name())
	}
	return cmd, nil
}

func portmapConfig(s Site) string {
	yes := func(protocols ...string) string {
		if slices.ContainsFunc(protocols, func(p string) bool { return slices.Contains(s.Portmap, p) }) {
			return "yes"
		}
		return "no"
	}
	return strings.Join([]string{
		"ext_ifname=" + wanLink,
		"listening_ip=" + lanLink,
		fmt.Sprint("port=", upnpPort),
		"enable_upnp=" + yes(UPnP),
		"enable_natpmp=" + yes(PCP, NATPMP),
		"secure_mode=yes",
		"friendly_name=skein lab, " + s.Name,
		fmt.Sprintf("uuid=00000000-0000-4000-8000-%012x", s.Number),
		"upnp_table_name=" + portmapProgram,
		"upnp_nat_table_name=" + portmapProgram,
		"upnp_forward_chain=forward",
		"upnp_nat_chain=prerouting",
		"upnp_nat_postrouting_chain=postrouting",
		"allow 1024-65535 0.0.0.0/0 1024-65535",
		"deny 0-65535 0.0.0.0/0 0-65535",
		"",
	}, "\n")
}

// portmapAnswers waits until the daemon serves one of its protocols.
func portmapAnswers(ctx context.Context, router string, s Site) error {
	ctx, cancel := context.WithTimeout(ctx, portmapWithin)
	defer cancel()
	ask := askUPnP
	if slices.Contains(s.Portmap, PCP) || slices.Contains(s.Portmap, NATPMP) {
		ask = askNATPMP
	}
	for {
		err := In(router, func() error { return ask(s.gateway()) })
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("miniupnpd does not answer within %s: %w", portmapWithin, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func askUPnP(gateway netip.Addr) error {
	c, err := net.DialTimeout("tcp", netip.AddrPortFrom(gateway, upnpPort).String(), time.Second)
	if err == nil {
		c.Close()
	}
	return err
}

// askNATPMP asks for the public address (RFC 6886 section 3.2); any answer will do.
func askNATPMP(gateway netip.Addr) error {
	c, err := net.Dial("udp", netip.AddrPortFrom(gateway, portmapPort).String())
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte{0, 0}); err != nil {
		return err
	}
	_, err = c.Read(make([]byte, 100))
	return err
}
