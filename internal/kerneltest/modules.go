package kerneltest

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Module is one kernel module, as the guest's modprobe needs to know it.
type Module struct {
	Name    string   `json:"name"`
	File    string   `json:"file"` // in the guest
	Deps    []string `json:"deps"`
	Aliases []string `json:"aliases"`
	from    string
}

// wanted are the modules the guest shall have, with what they depend on. All of net/netfilter comes along.
var wanted = []string{
	"wireguard", "tun", "veth", "dummy", "bridge", "macvlan", "ifb",
	"nf_tables", "nf_conntrack", "nf_nat", "nf_conntrack_netlink", "xfrm_user", "af_packet_diag", "inet_diag",
	"udp_diag", "tcp_diag",
	"ipip", "sit", "ip6_tunnel", "fou", "fou6", "ip_gre",
	"sch_netem", "sch_tbf", "sch_htb", "sch_ingress", "cls_u32", "cls_matchall", "act_mirred",
}

// findModules reads the module files below dir, and returns the wanted ones with all they need.
func findModules(dir string) ([]Module, error) {
	files := map[string]string{}
	var netfilter []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		base, _, ok := strings.Cut(d.Name(), ".ko")
		if !ok {
			return nil
		}
		name := moduleName(base)
		files[name] = p
		if strings.Contains(p, "/netfilter/") {
			netfilter = append(netfilter, name)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	builtin, err := builtinModules(dir)
	if err != nil {
		return nil, err
	}
	var out []Module
	seen := map[string]bool{}
	var add func(name string) error
	add = func(name string) error {
		if name = moduleName(name); seen[name] || builtin[name] {
			return nil
		}
		seen[name] = true
		p, ok := files[name]
		if !ok {
			return fmt.Errorf("this kernel has no module %s", name)
		}
		m, err := readModule(name, p)
		if err != nil {
			return err
		}
		for _, d := range m.Deps {
			if err := add(d); err != nil {
				return fmt.Errorf("%s needs: %w", name, err)
			}
		}
		out = append(out, m)
		return nil
	}
	slices.Sort(netfilter)
	for _, n := range slices.Concat(wanted, netfilter) {
		if err := add(n); err != nil {
			return nil, err
		}
	}
	return out, nil
}

func moduleName(s string) string { return strings.ReplaceAll(s, "-", "_") }

func builtinModules(dir string) (map[string]bool, error) {
	out := map[string]bool{}
	lists, err := filepath.Glob(filepath.Join(dir, "*", "modules.builtin"))
	if err != nil {
		return nil, err
	}
	for _, l := range lists {
		b, err := os.ReadFile(l)
		if err != nil {
			return nil, err
		}
		for _, line := range strings.Fields(string(b)) {
			out[moduleName(strings.TrimSuffix(filepath.Base(line), ".ko"))] = true
		}
	}
	return out, nil
}

// readModule reads what a module says of itself in its section .modinfo.
func readModule(name, file string) (Module, error) {
	data, err := moduleBytes(file)
	if err != nil {
		return Module{}, err
	}
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return Module{}, fmt.Errorf("%s: %w", file, err)
	}
	s := f.Section(".modinfo")
	if s == nil {
		return Module{}, fmt.Errorf("%s: no section .modinfo", file)
	}
	info, err := s.Data()
	if err != nil {
		return Module{}, fmt.Errorf("%s: %w", file, err)
	}
	m := Module{Name: name, File: "/lib/modules/" + name + ".ko", from: file}
	for _, kv := range strings.Split(string(info), "\x00") {
		k, v, _ := strings.Cut(kv, "=")
		switch k {
		case "depends":
			for _, d := range strings.FieldsFunc(v, func(r rune) bool { return r == ',' }) {
				m.Deps = append(m.Deps, moduleName(d))
			}
		case "alias":
			m.Aliases = append(m.Aliases, v)
		}
	}
	return m, nil
}

// moduleBytes reads a module file, unpacked if newer Debian packed it.
func moduleBytes(file string) ([]byte, error) {
	if !strings.HasSuffix(file, ".xz") {
		return os.ReadFile(file)
	}
	b, err := exec.Command("xz", "-dc", file).Output()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("unpacking %s with xz: %w", file, err))
	}
	return b, nil
}
