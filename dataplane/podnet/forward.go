package podnet

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
)

const settings6 = "/proc/sys/net/ipv6/conf/"

// ForwardIPv6 enables forwarding of IPv6 packets that arrive on this link. Linux 6.17 has a switch per link. Older
// kernels have only one for the whole host, and with it a host stops learning from router advertisements: links that
// learned by the default setting are switched to continue (docs/decisions/0022).
func ForwardIPv6(link string) error {
	if v, err := readSetting("all", "forwarding"); err != nil || v != "0" {
		return err
	}
	switch v, err := readSetting(link, "force_forwarding"); {
	case errors.Is(err, fs.ErrNotExist):
		return forwardAll()
	case err != nil || v != "0":
		return err
	}
	return writeSetting(link, "force_forwarding", "1")
}

// forwardAll enables the switch of the whole host.
func forwardAll() error {
	dir, err := os.ReadDir(settings6)
	if err != nil {
		return fmt.Errorf("reading the IPv6 settings of links: %w", err)
	}
	for _, d := range dir {
		if d.Name() == "all" { // it has no effect on a link by itself
			continue
		}
		learns, err := readSetting(d.Name(), "accept_ra")
		if err == nil && learns == "1" {
			err = writeSetting(d.Name(), "accept_ra", "2") // learn although forwarding is on
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) { // a link may vanish meanwhile
			return err
		}
	}
	return writeSetting("all", "forwarding", "1")
}

func readSetting(link, name string) (string, error) {
	b, err := os.ReadFile(settings6 + link + "/" + name)
	if err != nil {
		return "", fmt.Errorf("reading an IPv6 setting: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

func writeSetting(link, name, value string) error {
	err := os.WriteFile(settings6+link+"/"+name, []byte(value), 0o644)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("setting net.ipv6.conf.%s.%s: %w", link, name, err)
	}
	return fmt.Errorf("setting net.ipv6.conf.%s.%s to %s: %w: the agent needs a writable /proc/sys for pods with IPv6",
		link, name, value, err)
}
