// Guestinit is the first process of the test guest: it mounts what a Linux program expects, loads
// modules, runs the plan and switches off. Called as modprobe it loads a module for the kernel.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/kerneltest"
)

func main() {
	if filepath.Base(os.Args[0]) == "modprobe" {
		if err := modprobe(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "modprobe:", err)
			os.Exit(1)
		}
		return
	}
	verdict := kerneltest.Passed
	if err := run(); err != nil {
		fmt.Println("error:", err)
		verdict = kerneltest.Failed
	}
	fmt.Println(verdict)
	const drain = 200 * time.Millisecond // for the serial line
	time.Sleep(drain)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_RESTART)
}

func run() error {
	fmt.Println(kerneltest.Up)
	for _, m := range []struct{ kind, at string }{{"proc", "/proc"}, {"sysfs", "/sys"}, {"devtmpfs", "/dev"},
		{"tmpfs", "/tmp"}, {"tmpfs", "/run"}, {"tmpfs", "/var"}} {
		if err := os.MkdirAll(m.at, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil {
			return fmt.Errorf("mounting %s: %w", m.at, err)
		}
	}
	for _, d := range []string{"/dev/net", "/run/netns", "/var/lib", "/var/log", "/etc", "/root"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := os.Symlink("/run", "/var/run"); err != nil {
		return err
	}
	b, err := os.ReadFile(kerneltest.PlanFile)
	if err != nil {
		return err
	}
	var plan kerneltest.Plan
	if err := json.Unmarshal(b, &plan); err != nil {
		return fmt.Errorf("%s: %w", kerneltest.PlanFile, err)
	}
	if err := modprobe(plan.Preload); err != nil {
		return err
	}
	if err := loopback(); err != nil {
		return err
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err == nil {
		fmt.Printf("kernel %s\n", unix.ByteSliceToString(u.Release[:]))
	}
	failed := 0
	env := append([]string{"PATH=/bin:/sbin", "HOME=/root", "TMPDIR=/tmp"}, plan.Env...)
	for _, s := range plan.Steps {
		if err := kerneltest.RunStep(os.Stdout, s, env); err != nil {
			failed++
			if s.Keep != "" {
				if err := kerneltest.SendKept(os.Stdout, s.Keep); err != nil {
					fmt.Println(err)
				}
			}
		}
	}
	if failed > 0 {
		return fmt.Errorf("%d of %d steps failed", failed, len(plan.Steps))
	}
	return nil
}

// modprobe loads modules by name or alias with all they need. The kernel passes options before the name.
func modprobe(args []string) error {
	b, err := os.ReadFile(kerneltest.ModuleTable)
	if err != nil {
		return err
	}
	var mods []kerneltest.Module
	if err := json.Unmarshal(b, &mods); err != nil {
		return fmt.Errorf("%s: %w", kerneltest.ModuleTable, err)
	}
	byName := map[string]kerneltest.Module{}
	for _, m := range mods {
		byName[m.Name] = m
	}
	var load func(string) error
	load = func(name string) error {
		m, ok := byName[name]
		if !ok {
			return nil // built in
		}
		for _, d := range m.Deps {
			if err := load(d); err != nil {
				return err
			}
		}
		return insert(m.File)
	}
	for _, arg := range args {
		if strings.HasPrefix(arg, "-") {
			continue
		}
		found := false
		for _, m := range mods {
			if m.Name != strings.ReplaceAll(arg, "-", "_") && !hasAlias(m, arg) {
				continue
			}
			found = true
			if err := load(m.Name); err != nil {
				return err
			}
		}
		if !found {
			return fmt.Errorf("no module %s", arg)
		}
	}
	return nil
}

func hasAlias(m kerneltest.Module, name string) bool {
	for _, a := range m.Aliases {
		if ok, err := path.Match(a, name); err == nil && ok {
			return true
		}
	}
	return false
}

func insert(file string) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := unix.FinitModule(int(f.Fd()), "", 0); err != nil && err != unix.EEXIST {
		return fmt.Errorf("loading %s: %w", file, err)
	}
	return nil
}

// loopback brings lo up, which elsewhere the distribution does.
func loopback() error {
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	defer unix.Close(s)
	r, err := unix.NewIfreq("lo")
	if err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	r.SetUint16(unix.IFF_UP)
	if err := unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, r); err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	return nil
}
