// Command bench is `make bench-kube`: how quick the agents are about what Kubernetes tells, and what they cost it, each
// figure beside its target. It is run from the top of the repository.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/skeinmesh/skein/chaos/bench"
	"github.com/skeinmesh/skein/chaos/kube"
	"github.com/skeinmesh/skein/internal/marks"
	"github.com/skeinmesh/skein/internal/pause"
)

// begin opens the table's place in a document.
var begin = marks.Begin("make bench-kube WRITE=docs/bench.md")

// run is one run of the bench.
type run struct {
	binary, dir string
	figures     []bench.Figure
}

func main() {
	binary := flag.String("binary", "bin/skein", "the skein program")
	write := flag.String("write", "", "document that the table is written into")
	only := flag.String("only", "", "groups with commas between: news, starts, nodes; empty: all")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := do(ctx, *binary, *write, *only); err != nil {
		fmt.Fprintln(os.Stderr, "bench-kube: "+err.Error())
		os.Exit(1)
	}
}

func do(ctx context.Context, binary, write, only string) (err error) {
	r := &run{}
	if r.binary, err = filepath.Abs(binary); err != nil {
		return err
	}
	if r.dir, err = os.MkdirTemp("", "skb"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(r.dir)) }()
	began := time.Now()
	wanted := func(group string) bool { return only == "" || strings.Contains(","+only+",", ","+group+",") }
	if wanted("news") || wanted("starts") {
		if err := r.onFleet(ctx, wanted); err != nil {
			return err
		}
	}
	if wanted("nodes") {
		if err := r.nodes(ctx); err != nil {
			r.add(bench.NotMeasured("a thousand Nodes", "", err))
		}
	}
	var table bytes.Buffer
	fmt.Fprintf(&table, "\nOn %s, in %s on %d processors, which did other work too where the load says so.\n\n",
		began.UTC().Format("2006-01-02"),
		time.Since(began).Round(time.Second), runtime.NumCPU())
	bench.Table(&table, r.figures)
	fmt.Println(table.String())
	if write != "" {
		err = marks.InsertFile(write, begin, table.String()+"\n")
	}
	for _, f := range r.figures {
		if f.Verdict == bench.Failed || f.Verdict == bench.Missed {
			err = errors.Join(err, fmt.Errorf("%s: %s", f.Name, f.Got))
		}
	}
	return err
}

// add takes a figure down, and shows it.
func (r *run) add(f bench.Figure) {
	r.say("%s: %s (%s) %s", f.Name, f.Got, f.Target, f.Verdict)
	r.figures = append(r.figures, f)
}

func (r *run) say(format string, a ...any) {
	fmt.Printf("%s  "+format+"\n", append([]any{time.Now().Format("15:04:05")}, a...)...)
}

// onFleet measures what a whole cluster is needed for.
func (r *run) onFleet(ctx context.Context, wanted func(string) bool) (err error) {
	began := time.Now()
	f, err := kube.RaiseFleet(ctx, kube.FleetConfig{Root: ".", Dir: filepath.Join(r.dir, "f"), Binary: r.binary,
		Artifacts: "lab-failures",
		Name:      fmt.Sprintf("b%d", os.Getpid()), Progress: func(s string) { r.say("%s", s) }})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close(context.WithoutCancel(ctx))) }()
	r.add(bench.NewFigure("from nothing to a cluster that is ready", "",
		time.Since(began).Round(100*time.Millisecond).String(), true,
		"a mesh of five hosts behind three NATs, then etcd, control plane, three nodes with kubelet, containerd and "+
			"kube-proxy, and CoreDNS; programs and images are there"))
	client, err := f.Cluster.Client()
	if err != nil {
		return err
	}
	c := &cluster{run: r, Fleet: f, api: client}
	if wanted("news") {
		if err := c.news(ctx); err != nil {
			r.add(bench.NotMeasured("news", "", err))
		}
	}
	if wanted("starts") {
		if err := c.starts(ctx); err != nil {
			r.add(bench.NotMeasured("pods that start", "", err))
		}
	}
	return nil
}

// cluster is a fleet and a way to its apiserver.
type cluster struct {
	*run
	*kube.Fleet
	api *kube.Client
}

// until asks again each millisecond or so.
func until(ctx context.Context, within time.Duration, f func() error) error {
	return pause.Until(ctx, within, 2*time.Millisecond, f)
}
