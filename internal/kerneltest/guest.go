package kerneltest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// kvmPatience is how long a guest under KVM may take to say its first word. /dev/kvm may exist and
// still not carry a guest.
const kvmPatience = 8 * time.Second

// emulatedPatience is the same for an emulated guest, which takes 6 s on a machine that has nothing else to do.
const emulatedPatience = 4 * time.Minute

var errNoWord = errors.New("the guest did not start")

// Payload is what goes into the guest beside the kernel and its modules.
type Payload struct {
	Plan    Plan
	Init    string            // path of guestinit's static binary
	Busybox string            // path of a static busybox, for lab steps that are shell lines; may be empty
	Files   map[string]string // path in the guest → file here, made executable
	Trees   map[string]string // path in the guest → directory here
}

// applets are busybox's in the guest. None is named ip or tc: those would shadow iproute2's.
var applets = []string{"sh", "cat", "echo", "env", "grep", "head", "kill", "ls", "ping", "ping6", "ps", "sed", "sleep",
	"sort", "tail", "test", "timeout", "wc", "awk", "nc"}

// pack writes the initramfs: the cached modules, then the payload.
func pack(im Image, p Payload, to string) error {
	f, err := os.Create(to)
	if err != nil {
		return err
	}
	defer f.Close()
	mods, err := os.Open(im.Modules)
	if err != nil {
		return err
	}
	defer mods.Close()
	n, err := io.Copy(f, mods)
	if err != nil {
		return err
	}
	if _, err := f.Write(pad(int(n))); err != nil {
		return err
	}
	buf := bufio.NewWriterSize(f, 1<<20)
	a := newArchive(buf)
	for _, d := range []string{"proc", "sys", "dev", "tmp", "run", "var", "etc", "root", "bin", "sbin"} {
		a.dir(d)
	}
	a.charDevice("dev/console", 5, 1)
	a.copyFile("init", 0o755, p.Init)
	a.symlink("sbin/modprobe", "/init")
	if p.Busybox != "" {
		a.copyFile("bin/busybox", 0o755, p.Busybox)
		for _, applet := range applets {
			a.symlink("bin/"+applet, "busybox")
		}
	}
	plan, err := json.Marshal(p.Plan)
	if err != nil {
		return err
	}
	a.file(PlanFile, 0o644, plan)
	for at, from := range p.Files {
		a.copyFile(at, 0o755, from)
	}
	for at, from := range p.Trees {
		a.copyTree(at, from)
	}
	return errors.Join(a.close(), buf.Flush())
}

// RunGuest boots the image with the payload and shows what it says. It fails unless the guest passed.
func RunGuest(ctx context.Context, im Image, p Payload, cache string, out io.Writer) error {
	work, err := os.MkdirTemp("", "skein-guest-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	initrd := filepath.Join(work, "initrd")
	if err := pack(im, p, initrd); err != nil {
		return fmt.Errorf("packing the guest: %w", err)
	}
	if kvmUsable(cache) {
		err := boot(ctx, im, initrd, out, "kvm", "host", kvmPatience)
		if !errors.Is(err, errNoWord) {
			return err
		}
		fmt.Fprintf(out, "KVM does not carry a guest here: %v; emulating\n", err)
		rememberNoKVM(cache)
	}
	return boot(ctx, im, initrd, out, "tcg", "max", emulatedPatience)
}

// boot runs QEMU once. patience limits the time to the guest's first word.
func boot(ctx context.Context, im Image, initrd string, out io.Writer, accel, cpu string,
	patience time.Duration) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	monitor := filepath.Join(filepath.Dir(initrd), "monitor-"+accel)
	q := exec.CommandContext(ctx, "qemu-system-x86_64", "-accel", accel, "-cpu", cpu, "-smp", "2", "-m", "1536",
		"-display", "none", "-nodefaults", "-serial", "stdio", "-monitor", "none", "-qmp",
		"unix:"+monitor+",server=on,wait=off", "-no-reboot",
		"-kernel", im.Kernel, "-initrd", initrd, "-append", "console=ttyS0 quiet panic=-1 loglevel=3")
	q.WaitDelay = 5 * time.Second
	pipe, err := q.StdoutPipe()
	if err != nil {
		return err
	}
	var complaint strings.Builder
	q.Stderr = &complaint
	start := time.Now()
	if err := q.Start(); err != nil {
		return fmt.Errorf("starting QEMU: %w: install qemu-system-x86", err)
	}
	first := time.AfterFunc(patience, func() { cancel(errNoWord) })
	defer first.Stop()
	kept := keptFile{path: filepath.Join("lab-failures", "guest.tar.gz")}
	verdict := listen(pipe, out, func() {
		first.Stop()
		fmt.Fprintf(out, "guest is up after %s (%s)\n", time.Since(start).Round(100*time.Millisecond), accel)
	}, func(d time.Duration) error { return freeze(ctx, monitor, d) }, kept.add)
	err = q.Wait()
	if at, e := kept.close(); at != "" {
		fmt.Fprintf(out, "what failed steps have left is in %s: tar xizf %s (error: %v)\n", at, at, e)
	}
	switch {
	case verdict == Passed:
		return nil
	case verdict == Failed:
		return errors.New("the guest's run failed, see above")
	case errors.Is(context.Cause(ctx), errNoWord):
		return fmt.Errorf("%w within %s", errNoWord, patience)
	case ctx.Err() != nil:
		return fmt.Errorf("the guest was stopped: %w", context.Cause(ctx))
	case verdict == "":
		return fmt.Errorf("%w: %v %s", errNoWord, err, strings.TrimSpace(complaint.String()))
	}
	return fmt.Errorf("the guest ended without a verdict: %v %s", err, strings.TrimSpace(complaint.String()))
}

// listen shows what the guest says until it is silent, and returns its last verdict: Passed or Failed,
// Up if it said no more than that, or nothing. A guest that asks for it is frozen; kept gets what it keeps.
func listen(serial io.Reader, out io.Writer, up func(), freeze func(time.Duration) error,
	kept func(text string) error) (verdict string) {
	sc := bufio.NewScanner(serial)
	sc.Buffer(nil, maxKept)
	for sc.Scan() {
		line := strings.TrimRight(sc.Text(), "\r")
		if text, asks := strings.CutPrefix(strings.TrimSpace(line), Freeze); asks {
			d, err := time.ParseDuration(text)
			if err == nil {
				err = freeze(d)
			}
			fmt.Fprintf(out, "the guest was frozen for %s (error: %v)\n", text, err)
			continue
		}
		if text, ok := strings.CutPrefix(strings.TrimSpace(line), Kept); ok {
			if err := kept(text); err != nil {
				fmt.Fprintf(out, "keeping what a step has left: %v\n", err)
			}
			continue
		}
		switch strings.TrimSpace(line) {
		case Up:
			verdict = Up
			up()
		case Passed, Failed:
			verdict = strings.TrimSpace(line)
		default:
			fmt.Fprintln(out, line)
		}
	}
	return verdict
}

// noKVMFile remembers for this boot of the machine that KVM was tried in vain.
func noKVMFile(cache string) string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return filepath.Join(cache, "no-kvm-"+strings.TrimSpace(string(id)))
}

func kvmUsable(cache string) bool {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	f.Close()
	_, err = os.Stat(noKVMFile(cache))
	return os.IsNotExist(err)
}

func rememberNoKVM(cache string) {
	if name := noKVMFile(cache); name != "" {
		_ = os.WriteFile(name, nil, 0o644)
	}
}
