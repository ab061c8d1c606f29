package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	write := flag.String("write", "", "put the tables into this document, between its marks")
	pattern := flag.String("run", "", "make only the mutations whose names match")
	seeds := flag.Int("seeds", 50, "runs of the cluster whose histories Porcupine checks; 0: none")
	jobs := flag.Int("j", 2, "bugs at a time")
	flag.Parse()
	if err := run(ctx, *write, *pattern, *seeds, *jobs); err != nil {
		fmt.Fprintln(os.Stderr, "mutation:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, write, pattern string, seeds, jobs int) error {
	some, err := matching(pattern)
	if err != nil {
		return err
	}
	p, cleanup, err := newMutator(ctx, jobs)
	if err != nil {
		return err
	}
	defer cleanup()
	r := report{at: time.Now()}
	fmt.Printf("%d bugs; first the checks without any\n", len(some))
	if err := p.baseline(ctx, some); err != nil {
		return err
	}
	began := time.Now()
	r.results = p.each(ctx, some, func(one result) { fmt.Print(one.text()) })
	r.took = time.Since(began)
	if err := ctx.Err(); err != nil {
		return err
	}
	if seeds > 0 {
		fmt.Printf("Porcupine: %d seeds\n", seeds)
		if r.runs, err = p.histories(ctx, seeds); err != nil {
			return err
		}
		fmt.Println(r.runsText())
	}
	fmt.Println(r.summary())
	if write != "" {
		if err := r.insert(write); err != nil {
			return err
		}
	}
	return r.failure()
}

func matching(pattern string) (out []bug, err error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return nil, err
	}
	for _, b := range allBugs() {
		if re.MatchString(b.name) {
			out = append(out, b)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("no bug has a name like %q", pattern)
	}
	return out, nil
}

func newMutator(ctx context.Context, jobs int) (*mutator, func(), error) {
	out, err := exec.CommandContext(ctx, "go", "env", "GOMOD").Output()
	if err != nil {
		return nil, nil, fmt.Errorf("go env: %w", err)
	}
	mod := strings.TrimSpace(string(out))
	if mod == "" || mod == os.DevNull {
		return nil, nil, fmt.Errorf("no go.mod: run it in skein's sources")
	}
	tmp, err := os.MkdirTemp("", "skein-mutation-")
	if err != nil {
		return nil, nil, err
	}
	return &mutator{root: filepath.Dir(mod), tmp: tmp, jobs: max(1, jobs)}, func() { os.RemoveAll(tmp) }, nil
}
