package plain

import (
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

// clientLink is the link of a plain peer, as a user may call it.
const clientLink = "wg0"

// settings is a configuration as wg-quick reads it: what is for the link, and the rest in the words of WireGuard's
// UAPI.
type settings struct {
	uapi      string
	addresses []netip.Prefix
	routes    []netip.Prefix
}

// read does what wg-quick does with a configuration file. It takes no key that wg-quick does not know.
func read(text string) (out settings, err error) {
	var b strings.Builder
	section := ""
	for number, line := range strings.Split(text, "\n") {
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		switch {
		case line == "":
		case strings.HasPrefix(line, "["):
			section = line
		default:
			key, value, _ := strings.Cut(line, "=")
			if err := out.take(&b, section, strings.ToLower(strings.TrimSpace(key)),
				strings.TrimSpace(value)); err != nil {
				return out, fmt.Errorf("line %d, %q: %w", number+1, line, err)
			}
		}
	}
	out.uapi = b.String()
	return out, nil
}

func (s *settings) take(b *strings.Builder, section, key, value string) (err error) {
	secret := func(name string) error {
		raw, err := base64.StdEncoding.DecodeString(value)
		if err == nil && len(raw) != 32 {
			err = fmt.Errorf("a key of %d bytes", len(raw))
		}
		fmt.Fprintf(b, "%s=%s\n", name, hex.EncodeToString(raw))
		return err
	}
	switch section + " " + key {
	case "[Interface] privatekey":
		return secret("private_key")
	case "[Interface] address":
		s.addresses, err = prefixes(value)
		return err
	case "[Peer] publickey":
		return secret("public_key")
	case "[Peer] presharedkey":
		return secret("preshared_key")
	case "[Peer] endpoint":
		_, err := netip.ParseAddrPort(value)
		fmt.Fprintf(b, "endpoint=%s\n", value)
		return err
	case "[Peer] persistentkeepalive":
		fmt.Fprintf(b, "persistent_keepalive_interval=%s\n", value)
		return nil
	case "[Peer] allowedips":
		ps, err := prefixes(value)
		for _, p := range ps {
			fmt.Fprintf(b, "allowed_ip=%s\n", p)
		}
		s.routes = append(s.routes, ps...)
		return err
	}
	return fmt.Errorf("wg-quick has no key %s in %s", key, section)
}

func prefixes(text string) (out []netip.Prefix, err error) {
	for part := range strings.SplitSeq(text, ",") {
		p, err := netip.ParsePrefix(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// runClient is a plain peer in the network namespace that it was started in, until it is told to end.
func runClient(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	s, err := read(string(text))
	if err != nil {
		return err
	}
	t, err := tun.CreateTUN(clientLink, device.DefaultMTU) // wg-quick takes it from the way to the endpoint
	if err != nil {
		return err
	}
	d := device.NewDevice(t, conn.NewDefaultBind(), device.NewLogger(device.LogLevelError, "client: "))
	defer d.Close()
	if err := d.IpcSet(s.uapi); err != nil {
		return err
	}
	if err := d.Up(); err != nil {
		return err
	}
	l, err := netlink.LinkByName(clientLink)
	if err != nil {
		return err
	}
	for _, p := range s.addresses {
		a, err := netlink.ParseAddr(p.String())
		if err != nil {
			return err
		}
		a.Flags = syscall.IFA_F_NODAD
		if err := netlink.AddrAdd(l, a); err != nil {
			return fmt.Errorf("address %s: %w", p, err)
		}
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return err
	}
	for _, p := range s.routes {
		_, dst, err := net.ParseCIDR(p.String())
		if err != nil {
			return err
		}
		if err := netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: dst}); err != nil {
			return fmt.Errorf("route %s: %w", p, err)
		}
	}
	fmt.Println("ready")
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM)
	<-end
	return nil
}
