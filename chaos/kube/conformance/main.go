package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/kube"
	"github.com/skeinmesh/skein/internal/marks"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	write := flag.String("write", "", "put the table into this document, between its marks")
	pattern := flag.String("run", "", "run only the tests whose names match")
	jobs := flag.Int("j", 3, "tests at a time")
	flag.Parse()
	if err := run(ctx, *write, *pattern, *jobs); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, write, pattern string, jobs int) (err error) {
	programs, err := kube.Programs(".")
	if err != nil {
		return err
	}
	e2e := filepath.Join(programs, "e2e.test")
	tests, err := chosen(e2e, pattern)
	if err != nil {
		return err
	}
	f, err := raise(ctx, e2e, programs)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lower(f)) }()
	version, err := ask(e2e, "--version")
	if err != nil {
		return err
	}
	r := report{at: time.Now(), version: strings.TrimPrefix(strings.TrimSpace(string(version)), "v"), jobs: jobs}
	if r.results, err = runTests(ctx, f, programs, tests, jobs, os.Stdout); err != nil {
		return err
	}
	r.took = time.Since(r.at)
	fmt.Printf("%s\n%s\n", r.table(), r.summary())
	if write != "" {
		if pattern != "" {
			return errors.New("a table of some tests is not written: leave out -run")
		}
		if err := marks.InsertFile(write, begin, r.table()); err != nil {
			return err
		}
	}
	if err := r.failure(); err != nil {
		if kept, kerr := f.SaveArtifacts(context.WithoutCancel(ctx)); kerr == nil {
			fmt.Println("logs and states are in", kept)
		}
		return err
	}
	return nil
}

// chosen are the network's tests whose names match.
func chosen(e2e, pattern string) ([]string, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	list, err := ask(e2e, "--list-conformance-tests")
	if err != nil {
		return nil, err
	}
	all, err := networkTests(list)
	if err != nil {
		return nil, err
	}
	var some []string
	for _, name := range all {
		if re.MatchString(name) {
			some = append(some, name)
		}
	}
	if len(some) == 0 {
		return nil, fmt.Errorf("no test has a name like %q", pattern)
	}
	return some, nil
}

// raise makes the cluster, with the tests' images on its nodes.
func raise(ctx context.Context, e2e, programs string) (*kube.Fleet, error) {
	names, err := ask(e2e, "--list-images")
	if err != nil {
		return nil, err
	}
	tree, err := filepath.Abs(".cache/conformance/root")
	if err != nil {
		return nil, err
	}
	module, err := moduleDir(".")
	if err != nil {
		return nil, err
	}
	some, err := images(strings.Fields(string(names)), tree, module, programs)
	if err != nil {
		return nil, err
	}
	binary, err := filepath.Abs("bin/skein")
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "skc")
	if err != nil {
		return nil, err
	}
	began := time.Now()
	f, err := kube.RaiseFleet(ctx, kube.FleetConfig{
		Root: ".", Dir: dir, Binary: binary, Name: fmt.Sprintf("c%d", os.Getpid()), Images: some, Artifacts: "lab-failures",
		Progress: func(s string) { fmt.Printf("%6.1fs  %s\n", time.Since(began).Seconds(), s) },
	})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return f, nil
}

func lower(f *kube.Fleet) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return errors.Join(f.Close(ctx), os.RemoveAll(f.Config.Dir))
}
