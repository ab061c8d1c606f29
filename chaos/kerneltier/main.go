// Tier runs test packages, and lab files, against kernel WireGuard, FoU and netem: natively where this machine's
// kernel has them, else in a QEMU guest.
//
//	go run ./chaos/kerneltier [-lab examples/kernel-small.yaml] [packages]
//	go run ./chaos/kerneltier -bench memory
//	go run ./chaos/kerneltier -owners 20
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/kerneltest"
)

// defaultPackages are those whose tests run in the kernel tier, a line for each. One that does not exist is an error.
var defaultPackages = []string{
	"./dataplane/wireguard",
	"./dataplane/nft",
	"./dataplane/relaynft",
	"./dataplane/podnet",
	"./dataplane/route",
	"./dataplane/hopnet",
	"./dataplane/plane",
	"./dataplane/fou",
	"./dataplane/egresshost",
	"./dataplane/egressns",
	"./dataplane/egressclient",
	"./dataplane/conntrack",
	"./dataplane/flows",
	"./dataplane/hold",
	"./dataplane/announce",
	"./dataplane/tunprobe",
	"./dataplane/plainwg",
	"./agent/control",
	"./agent/probe",
	"./agent/egress",
	"./agent/witness",
	"./internal/mmsg",
}

// shortened are packages of which the emulated guest runs only what depends on the kernel's tunnels and tables: their
// other tests need no kernel, start many commands, which take seconds each there, or count losses of flows that are
// faster than an emulated machine can be relied on to carry.
var shortened = map[string]string{
	"dataplane/egressns": "TestPacketsLeaveWithTheSlotsSource|TestRulesAndRoutesAreTheSeeds|TestALeaseRunsOutByItself|" +
		"TestAnAddressMovesToAnotherSlot",
	"dataplane/egressclient": "TestSeedsScene|TestDualStack|TestThroughTunnels",
	"agent/egress":           "TestAFrozenGuest|TestReleasedIs|TestANamespaceOf",
	"dataplane/plainwg":      "Client",
	"agent/witness":          "TestEchoes|TestLarge",
	"dataplane/flows":        "TestFlowsGoOnThroughAnotherGateway|TestLoad|TestNoNamespace",
}

// apart are packages of which the emulated guest runs some tests in steps, and so with limits of time, of their own.
var apart = map[string][]string{
	"dataplane/plane": {"^TestHops", "^TestBothDrivers"},
}

// commands are programs of this machine that tests call in the guest, too.
var commands = []string{"ip", "nft"}

type options struct {
	labs    []string
	bench   string
	owners  int
	skein   string
	dev     string
	cache   string
	run     string
	guest   bool
	fresh   bool
	timeout time.Duration
}

func main() {
	var o options
	flag.Func("lab", "lab file to run with `skein lab run FILE`; may be given several times", func(s string) error {
		o.labs = append(o.labs, s)
		return nil
	})
	flag.StringVar(&o.bench, "bench", "", "groups of figures to measure with `skein-dev bench --only`, instead of "+
		"tests; a target that is missed is not a failure")
	flag.IntVar(&o.owners, "owners", 0, "schedules of faults that `skein-dev owners` tries, instead of tests; in the "+
		"guest also with its wall clock turned")
	flag.StringVar(&o.skein, "skein", "bin/skein", "static skein binary, for -lab, -bench and -owners")
	flag.StringVar(&o.dev, "skein-dev", "bin/skein-dev", "static skein-dev binary, for -bench and -owners")
	flag.StringVar(&o.cache, "cache", ".cache/kernel", "where the guest's kernel is kept")
	flag.StringVar(&o.run, "run", "", "run only tests that match, as go test -run")
	flag.BoolVar(&o.guest, "guest", false, "use the guest even where this kernel has all that is needed")
	flag.BoolVar(&o.fresh, "fresh", false, "look for a newer kernel package than the cached one")
	flag.DurationVar(&o.timeout, "timeout", 15*time.Minute, "limit for the run")
	flag.Parse()
	packages := flag.Args()
	if len(packages) == 0 && len(o.labs) == 0 && o.bench == "" && o.owners == 0 {
		packages = defaultPackages
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	start := time.Now()
	if err := tier(ctx, o, packages); err != nil {
		fmt.Fprintf(os.Stderr, "kernel tier: %v\n", err)
		os.Exit(1)
	}
	fmt.Printf("kernel tier passed in %s\n", time.Since(start).Round(100*time.Millisecond))
}

func tier(ctx context.Context, o options, packages []string) error {
	work, err := os.MkdirTemp("", "skein-kernel-tier-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	tests, err := build(ctx, work, packages)
	if err != nil {
		return err
	}
	env := []string{"SKEIN_WANT_KERNEL=1", "SKEIN_REQUIRE_ALL=1"}
	ctx, cancel := context.WithTimeoutCause(ctx, o.timeout, fmt.Errorf("not done within %s", o.timeout))
	defer cancel()
	if !o.guest && os.Geteuid() == 0 && kerneltest.NativeWireGuard() && kerneltest.NativeNetem() &&
		fou.TryKernel() == nil {
		fmt.Println("this kernel has WireGuard, FoU and netem: running natively")
		return native(o, tests, env)
	}
	return guest(ctx, o, work, tests, env)
}

type testBinary struct{ pkg, file, dir string }

// build compiles static test binaries, and guestinit.
func build(ctx context.Context, work string, packages []string) ([]testBinary, error) {
	fmt.Println("building", strings.Join(append(packages, "guestinit"), " "))
	var out []testBinary
	for i, p := range packages {
		t := testBinary{pkg: strings.TrimPrefix(p, "./"), file: filepath.Join(work, fmt.Sprintf("t%d.test", i)), dir: p}
		if err := goBuild(ctx, "test", "-c", "-trimpath", "-ldflags=-s -w", "-o", t.file, p); err != nil {
			return nil, err
		}
		if _, err := os.Stat(t.file); err != nil {
			return nil, fmt.Errorf("%s has no tests", p)
		}
		out = append(out, t)
	}
	return out, goBuild(ctx, "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(work, "init"),
		"./internal/kerneltest/guestinit")
}

func goBuild(ctx context.Context, args ...string) error {
	c := exec.CommandContext(ctx, "go", args...)
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	c.Stdout, c.Stderr = os.Stdout, os.Stderr
	if err := c.Run(); err != nil {
		return fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return nil
}

func (o options) testArgs(binary, run string) []string {
	args := []string{binary, "-test.v", "-test.timeout=150s"}
	if o.run != "" {
		run = o.run
	}
	if run != "" {
		args = append(args, "-test.run", run)
	}
	return args
}

// benchArgs measure figures, with a skein-dev program at path.
func (o options) benchArgs(path, skein string) []string {
	return []string{path, "bench", "--skein", skein, "--only", o.bench}
}

// ownersArgs look for a slot with two owners, with a skein-dev program at path. A guest is emulated, so it gets a small
// mesh and more time.
func (o options) ownersArgs(path, skein string, guest bool) []string {
	args := []string{path, "owners", "--skein", skein, "--schedules", strconv.Itoa(o.owners)}
	if guest {
		args = append(args, "--small", "--clock", "--recovery", "150s")
	}
	return args
}

func native(o options, tests []testBinary, env []string) error {
	env = append(os.Environ(), env...)
	var errs []error
	for _, t := range tests {
		errs = append(errs, kerneltest.RunStep(os.Stdout, kerneltest.Step{Name: t.pkg, Dir: t.dir,
			Args: o.testArgs(t.file, ""), Test: true}, env))
	}
	for _, l := range o.labs {
		errs = append(errs, kerneltest.RunStep(os.Stdout, kerneltest.Step{Name: "lab " + l, Args: []string{o.skein, "lab",
			"run", l}}, env))
	}
	if o.bench != "" {
		errs = append(errs, kerneltest.RunStep(os.Stdout, kerneltest.Step{Name: "bench " + o.bench,
			Args: o.benchArgs(o.dev, o.skein), Report: true}, env))
	}
	if o.owners > 0 {
		errs = append(errs, kerneltest.RunStep(os.Stdout, kerneltest.Step{Name: "owners",
			Args: o.ownersArgs(o.dev, o.skein, false)},
			env))
	}
	return errors.Join(errs...)
}

// addCommands puts commands with their libraries into the guest: those where they are looked for there, these where
// they are here.
func addCommands(ctx context.Context, files map[string]string) error {
	for _, name := range commands {
		file, err := exec.LookPath(name)
		if err == nil {
			file, err = filepath.EvalSymlinks(file)
		}
		if err != nil {
			return fmt.Errorf("tests in the guest need %s: %w: install iproute2 and nftables", name, err)
		}
		files["/sbin/"+name] = file
		out, err := exec.CommandContext(ctx, "ldd", file).Output()
		if err != nil {
			return fmt.Errorf("libraries of %s: %w", file, err)
		}
		for word := range strings.FieldsSeq(string(out)) {
			if strings.HasPrefix(word, "/") {
				files[word] = word
			}
		}
	}
	return nil
}

func guest(ctx context.Context, o options, work string, tests []testBinary, env []string) error {
	im, err := kerneltest.FindImage(ctx, o.cache, o.fresh, func(s string) { fmt.Println(s) })
	if err != nil {
		return err
	}
	fmt.Printf("this kernel lacks WireGuard, FoU or netem, or is not to be used: guest with Debian's %s\n", im.Version)
	p := kerneltest.Payload{
		Plan: kerneltest.Plan{Preload: []string{"wireguard", "nf_tables", "tun", "veth"},
			Env: append(env, kerneltest.Frozen+"=1")},
		Init:  filepath.Join(work, "init"),
		Files: map[string]string{}, Trees: map[string]string{},
	}
	if err := addCommands(ctx, p.Files); err != nil {
		return err
	}
	for i, t := range tests {
		dir := fmt.Sprintf("/t/%d", i)
		p.Files[dir+"/test"] = t.file
		p.Trees[dir+"/testdata"] = filepath.Join(t.dir, "testdata")
		step := kerneltest.Step{Name: t.pkg, Dir: dir, Args: o.testArgs(dir+"/test", shortened[t.pkg]), Test: true}
		if groups := apart[t.pkg]; len(groups) > 0 && o.run == "" {
			for _, some := range groups {
				other := step
				other.Name, other.Args = t.pkg+" "+some, o.testArgs(dir+"/test", some)
				p.Plan.Steps = append(p.Plan.Steps, other)
			}
			step.Args = append(step.Args, "-test.skip", strings.Join(groups, "|"))
		}
		p.Plan.Steps = append(p.Plan.Steps, step)
	}
	if o.bench != "" {
		p.Files["/bin/skein"], p.Files["/bin/skein-dev"] = o.skein, o.dev
		p.Plan.Steps = append(p.Plan.Steps, kerneltest.Step{Name: "bench " + o.bench, Dir: "/tmp",
			Args: o.benchArgs("/bin/skein-dev", "/bin/skein"), Report: true})
	}
	if o.owners > 0 {
		p.Files["/bin/skein"], p.Files["/bin/skein-dev"] = o.skein, o.dev
		p.Plan.Steps = append(p.Plan.Steps, kerneltest.Step{Name: "owners", Dir: "/tmp",
			Args: o.ownersArgs("/bin/skein-dev", "/bin/skein", true)})
	}
	if len(o.labs) > 0 || o.owners > 0 {
		if p.Busybox, err = exec.LookPath("busybox"); err != nil {
			return fmt.Errorf("the guest's shell: %w: install busybox-static", err)
		}
	}
	for _, l := range o.labs {
		at := "/lab/" + filepath.Base(l)
		p.Files["/bin/skein"], p.Files[at] = o.skein, l
		p.Plan.Steps = append(p.Plan.Steps, kerneltest.Step{Name: "lab " + l, Dir: "/lab",
			Args: []string{"/bin/skein", "lab", "run", at}, Keep: "/lab/lab-failures"})
	}
	return kerneltest.RunGuest(ctx, im, p, o.cache, os.Stdout)
}
