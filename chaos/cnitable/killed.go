package cnitable

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// eventually waits for a condition.
func eventually(ctx context.Context, what string, ok func() (bool, error)) error {
	for end := time.Now().Add(patience); time.Now().Before(end); {
		if yes, err := ok(); yes || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
	}
	return fmt.Errorf("%s: it did not come true within %s", what, patience)
}

// linkGone waits until the host's end of a container's link has gone.
func (h *host) linkGone(ctx context.Context, id string) error {
	return eventually(ctx, "the link is gone", func() (bool, error) {
		links, err := fabric.Links(h.info.Namespace)
		return !slices.Contains(links, podnet.HostLink(eth0(id))), err
	})
}

func addKilled() []Case {
	return []Case{
		{Verb: "ADD", Fault: "the plugin is killed meanwhile", want: always(0), tool: without,
			why: "killed while the agent had its request and stood still; afterwards nothing is left, without a DEL",
			run: killPlugin},
		{Verb: "ADD", Fault: "the agent is killed meanwhile", want: always(cni.CodeTryAgain), tool: without,
			why: "killed with ten requests under way; those that failed say 11, and after a restart and the DELs nothing is " +
				"left", run: killAgent},
	}
}

// killPlugin kills it while the agent stands still with its request.
func killPlugin(t *try) (Outcome, error) {
	if err := t.h.lab.Pause(node); err != nil {
		return Outcome{}, err
	}
	cmd, err := t.h.plugin(t.ctx, call{verb: "ADD", version: t.version, pod: t.pod})
	if err == nil {
		err = t.h.start(cmd)
	}
	if err == nil {
		err = eventually(t.ctx, "the plugin is connected", func() (bool, error) { return hasSocket(cmd.Process.Pid) })
		err = errors.Join(err, cmd.Process.Kill())
		cmd.Wait() // it was killed
	}
	if err = errors.Join(err, t.h.lab.Resume(node)); err != nil {
		return Outcome{}, err
	}
	// An ADD of another pod comes after it in time: what is undone is undone before this one's DEL has ended.
	p, err := t.another()
	if err == nil {
		err = t.must(call{verb: "ADD", pod: p})
	}
	if err == nil {
		err = t.must(call{verb: "DEL", pod: p})
	}
	return Outcome{}, errors.Join(err, t.h.gone(t.ctx))
}

// hasSocket tells whether a process has one open.
func hasSocket(pid int) (bool, error) {
	dir := filepath.Join("/proc", strconv.Itoa(pid), "fd")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil && strings.HasPrefix(to, "socket:") {
			return true, nil
		}
	}
	return false, nil
}

// killAgent kills it with requests under way, some of which may have been answered.
func killAgent(t *try) (Outcome, error) {
	const pods = 10
	outcomes, errs := make([]Outcome, pods), make([]error, pods)
	var wg sync.WaitGroup
	var list []*pod
	for range pods {
		p, err := t.another()
		if err != nil {
			return Outcome{}, err
		}
		list = append(list, p)
	}
	if err := t.h.lab.Pause(node); err != nil {
		return Outcome{}, err
	}
	for i, p := range list {
		wg.Go(func() { outcomes[i], errs[i] = t.do(call{verb: "ADD", pod: p}) })
	}
	// Resumed, it works on some of them; whether any is answered before the end is chance, and does not matter.
	err := errors.Join(t.h.lab.Resume(node), t.h.lab.Kill(t.ctx, node))
	wg.Wait()
	err = errors.Join(err, errors.Join(errs...), t.h.lab.Start(t.ctx, node))
	failed := Outcome{}
	for _, o := range outcomes {
		if o.ok() {
			continue
		}
		if failed = o; o.Code != cni.CodeTryAgain {
			err = errors.Join(err, fmt.Errorf("code %d: %s", o.Code, o.Message))
		}
	}
	return failed, err
}
