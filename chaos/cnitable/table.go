package cnitable

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/cni"
)

// Options say what is tried.
type Options struct {
	Only      func(Case) bool // nil: every case
	Versions  []string        // of the specification; none: all
	Quick     bool            // faults in the newest version only
	Dir       string          // where labs keep their directories
	Binary    string          // the skein program; default the one that runs now
	Tools     string          // where cnitool, portmap and bandwidth are; default the path
	Progress  func(string)
	Artifacts string // where logs are left when the lab does not come up; "": nowhere
}

// call is one call of the plugin.
type call struct {
	verb, version string
	pod           *pod
	args          string         // CNI_ARGS
	caps          map[string]any // capability arguments
	conf          map[string]any // keys of the configuration that are others; nil takes one away
	stdin         []byte         // instead of a configuration
	env           []string       // instead of what a runtime says
	net, link     string         // instead of the pod's
	chain         bool           // the configuration with further plugins
}

func (c call) netns() string {
	if c.net != "" || c.pod == nil {
		return c.net
	}
	return c.pod.path
}

func (c call) ifname() string {
	if c.link != "" {
		return c.link
	}
	return "eth0"
}

// phase is a state that the lab is in for some cases.
type phase int

const (
	normal  phase = iota
	away          // the node's agent does not run
	alone         // the server does not: nobody decides
	drained       // the default pool gives nothing any more; there is no way back, so it is the last
)

// Case is one line of the table.
type Case struct {
	Verb, Fault string
	phase       phase
	want        func(version string) uint32 // the code; 0: success
	tool        toolSays                    // what cnitool makes of it
	why         string                      // of a tool that does not say the same
	prepare     func(*try) error            // before the phase begins
	run         func(*try) (Outcome, error)
}

// toolSays is how cnitool's word relates to the plugin's.
type toolSays int

const (
	same    toolSays = iota // it fails when the plugin does
	itself                  // it judges by itself in versions where the plugin would refuse: what it says is not looked at
	without                 // it cannot be brought to such a call
	only                    // only it can: a chain of plugins
)

// try is one case in one version, by one way.
type try struct {
	ctx     context.Context
	h       *host
	version string
	byTool  bool
	pod     *pod
	extra   []*pod
	outcome Outcome
	err     error
}

// do makes one call.
func (t *try) do(c call) (o Outcome, err error) {
	if c.version == "" {
		c.version = t.version
	}
	if c.pod == nil {
		c.pod = t.pod
	}
	if t.byTool {
		o, err = t.h.byTool(t.ctx, c)
	} else {
		o, err = t.h.direct(t.ctx, c)
	}
	if err == nil && o.ok() && c.verb == "ADD" {
		c.pod.prev = o.Result
	}
	return o, err
}

// must is a call that has to succeed before the one that counts.
func (t *try) must(c call) error {
	o, err := t.do(c)
	if err == nil && !o.ok() {
		err = fmt.Errorf("%s before it: %s %s", c.verb, o.Message, o.Details)
	}
	return err
}

// another makes a second pod.
func (t *try) another() (*pod, error) {
	p, err := t.h.newPod()
	t.extra = append(t.extra, p)
	return p, err
}

// Cell is what came of one case in one version.
type Cell struct {
	Code uint32 `json:"code"`
	Want uint32 `json:"want"`
	Tool bool   `json:"cnitool"` // cnitool was there too, and agreed
	Why  string `json:"why,omitempty"`
}

// Row is a case with its cells, one for each version.
type Row struct {
	Verb    string          `json:"verb"`
	Fault   string          `json:"fault"`
	Cells   map[string]Cell `json:"versions"`
	Says    string          `json:"says,omitempty"` // the newest version's message
	Details string          `json:"details,omitempty"`
	Note    string          `json:"note,omitempty"`
}

// Report is all that a run has seen.
type Report struct {
	At       time.Time `json:"at"`
	CPUs     int       `json:"cpus"`
	Seconds  float64   `json:"seconds"`
	Versions []string  `json:"versions"`
	Rows     []Row     `json:"rows"`
	Chain    []string  `json:"chain,omitempty"` // what was found out about chained plugins on this machine
}

// OK is true when every cell is as expected.
func (r *Report) OK() bool {
	for _, row := range r.Rows {
		for _, c := range row.Cells {
			if c.Why != "" {
				return false
			}
		}
	}
	return true
}

// Run tries all cases.
func Run(ctx context.Context, opts Options) (r *Report, err error) {
	r = &Report{At: time.Now(), CPUs: runtime.NumCPU(), Versions: opts.Versions}
	if len(r.Versions) == 0 {
		r.Versions = cni.Versions()
	}
	h, err := raise(ctx, opts)
	if h != nil && h.lab != nil {
		defer func() { err = errors.Join(err, h.lab.Down(context.WithoutCancel(ctx))) }()
	}
	if err != nil {
		return nil, err
	}
	chosen := slices.DeleteFunc(cases(), func(c Case) bool { return opts.Only != nil && !opts.Only(c) })
	r.Rows = make([]Row, len(chosen))
	for p := normal; p <= drained; p++ {
		if err := r.phase(ctx, h, p, chosen, opts); err != nil {
			return nil, err
		}
	}
	r.Seconds = time.Since(r.At).Seconds()
	return r, nil
}

// work is a case's tries.
type work struct {
	Case
	row   *Row
	tries []*try
}

// phase runs the cases of one state of the lab.
func (r *Report) phase(ctx context.Context, h *host, p phase, chosen []Case, opts Options) error {
	var all []*work
	for i, c := range chosen {
		if c.phase == p {
			r.Rows[i] = Row{Verb: c.Verb, Fault: c.Fault, Cells: map[string]Cell{}, Note: c.why}
			all = append(all, &work{Case: c, row: &r.Rows[i]})
		}
	}
	if len(all) == 0 {
		return nil
	}
	if opts.Progress != nil {
		opts.Progress(fmt.Sprintf("%s: %d cases", phaseNames[p], len(all)))
	}
	for _, w := range all {
		versions := r.Versions
		if opts.Quick && !strings.HasPrefix(w.Fault, none) {
			versions = versions[len(versions)-1:]
		}
		w.begin(ctx, h, versions)
		if p == normal {
			if err := w.whole(ctx, h); err != nil {
				return err
			}
		}
	}
	if p == normal {
		return nil
	}
	if err := h.enter(ctx, p); err != nil {
		return fmt.Errorf("%s: %w", phaseNames[p], err)
	}
	for _, w := range all {
		w.runAll()
	}
	if err := h.leave(ctx, p); err != nil {
		return fmt.Errorf("end of %s: %w", phaseNames[p], err)
	}
	for _, w := range all {
		w.clean(h)
	}
	err := h.gone(ctx)
	for _, w := range all {
		w.judge(err)
	}
	return ctx.Err()
}

var phaseNames = map[phase]string{normal: "agents run", away: "the agent does not run", alone: "no server runs",
	drained: "the default pool is drained"}

// enter brings the lab into a state.
func (h *host) enter(ctx context.Context, p phase) error {
	switch p {
	case away:
		return h.lab.Kill(ctx, node)
	case alone:
		return h.lab.Kill(ctx, server)
	case drained:
		if err := h.exec(ctx, server, "skein", "pool", "drain", "default"); err != nil {
			return err
		}
		return h.lab.WaitConverged(ctx, patience)
	}
	return nil
}

func (h *host) leave(ctx context.Context, p phase) error {
	switch p {
	case away:
		return h.lab.Start(ctx, node)
	case alone:
		return h.lab.Start(ctx, server)
	}
	return nil
}

// begin makes the tries and their pods, and prepares them.
func (w *work) begin(ctx context.Context, h *host, versions []string) {
	for _, v := range versions {
		for _, byTool := range []bool{false, true} {
			if byTool && w.tool == without || !byTool && w.tool == only {
				continue
			}
			t := &try{ctx: ctx, h: h, version: v, byTool: byTool}
			w.tries = append(w.tries, t)
			if t.pod, t.err = h.newPod(); t.err == nil && w.prepare != nil {
				t.err = w.prepare(t)
			}
		}
	}
}

func (w *work) runAll() {
	for _, t := range w.tries {
		if t.err == nil {
			t.outcome, t.err = w.run(t)
		}
	}
}

// whole is a case from the preparation to the verdict.
func (w *work) whole(ctx context.Context, h *host) error {
	w.runAll()
	w.clean(h)
	w.judge(h.gone(ctx))
	return ctx.Err()
}

// clean deletes what the tries have added, whatever became of them, twice: a runtime may.
func (w *work) clean(h *host) {
	for _, t := range w.tries {
		for _, p := range append([]*pod{t.pod}, t.extra...) {
			if p == nil {
				continue
			}
			t.err = errors.Join(t.err, h.delete(t, p))
		}
	}
}

func (h *host) delete(t *try, p *pod) error {
	last := &try{ctx: t.ctx, h: h, version: "1.1.0", byTool: t.byTool, pod: p}
	for range 2 {
		if err := last.must(call{verb: "DEL"}); err != nil {
			return fmt.Errorf("DEL afterwards: %w", err)
		}
	}
	err := h.vanish(p)
	if err != nil && strings.Contains(err.Error(), "no such file") {
		err = nil
	}
	return err
}

// judge compares both ways with what was expected.
func (w *work) judge(left error) {
	versions := cni.Versions()
	newest := versions[len(versions)-1]
	for _, t := range w.tries {
		c, seen := w.row.Cells[t.version]
		if !seen {
			c = Cell{Want: w.want(t.version)}
		}
		if !t.byTool || w.tool == only {
			c.Code = t.outcome.Code
			if t.err == nil && c.Code != c.Want && (!t.byTool || t.outcome.ok() != (c.Want == 0)) {
				c.Why = fmt.Sprintf("code %d, expected %d: %s %s", c.Code, c.Want, t.outcome.Message, t.outcome.Details)
			}
			if t.outcome.Message != "" && t.version == newest {
				w.row.Says, w.row.Details = t.outcome.Message, t.outcome.Details
			}
		}
		if t.byTool {
			c.Tool = w.tool != itself
			if t.err == nil && w.tool == same && t.outcome.ok() != (c.Want == 0) {
				c.Why = fmt.Sprintf("cnitool: %s", t.outcome.Message)
			}
		}
		if err := errors.Join(t.err, left); err != nil {
			c.Why = strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		w.row.Cells[t.version] = c
	}
}
