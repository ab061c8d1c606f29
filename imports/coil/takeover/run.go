package takeover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/internal/wholefile"
)

// File is where Run notes, in the state directory, what Undo needs.
const File = "coil-takeover.json"

const (
	knownWithin = 15 * time.Second // the agent is to know the pods
	knownAgain  = 200 * time.Millisecond
)

// Takeover is one host's.
type Takeover struct {
	StateDir string
	Numbers  dataplane.Numbers
	Install  cni.Install // its Chain is Coil's
	// Log asks what was agreed about this host.
	Log func(context.Context) (Log, error)
	// Known asks the agent to look for pods again, and gives the addresses of those that it knows.
	Known func(context.Context) (map[netip.Addr]bool, error)
}

// done is what Undo needs, and is on the disk before anything changes.
type done struct {
	At           time.Time `json:"at"`
	Node         string    `json:"node"`
	Added        []Route   `json:"added,omitempty"`
	RemovedRoute []Route   `json:"removedRoutes,omitempty"`
	RemovedRules []Rule    `json:"removedRules,omitempty"`
	Confs        []Conf    `json:"configurations,omitempty"`
}

// Plan says what Run would do.
func (t *Takeover) Plan(ctx context.Context) (Plan, error) {
	p, err := t.decide(ctx)
	if err == nil && len(p.Confs) > 0 { // what would fail fails before anything is done
		if _, err = t.install(ctx, p.Chain, true); err != nil {
			err = fmt.Errorf("a configuration like Coil's%s cannot be put in place: %w", behind(p.Chain), err)
		}
	}
	return p, err
}

func (t *Takeover) decide(ctx context.Context) (Plan, error) {
	h, err := Read(t.Install.ConfDir, t.Numbers)
	if err != nil {
		return Plan{}, err
	}
	l, err := t.Log(ctx)
	if err != nil {
		return Plan{}, err
	}
	return Decide(h, l, t.Numbers)
}

func (t *Takeover) install(ctx context.Context, chain []string, dry bool) (*cni.Report, error) {
	in := t.Install
	in.Chain, in.DryRun, in.Own = chain, dry, true
	return in.Run(ctx)
}

// Run does what a plan of a moment ago says. What fails is taken back.
func (t *Takeover) Run(ctx context.Context, p Plan) error {
	if p.Nothing() {
		return nil
	}
	l, err := t.Log(ctx)
	if err != nil {
		return err
	}
	d, err := t.read()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	d.At, d.Node = time.Now(), l.Node // of a run before, which may have been cut short, all stays that is in it
	d.Added, d.RemovedRoute = append(d.Added, p.Add...), append(d.RemovedRoute, p.RemoveRoutes...)
	d.RemovedRules, d.Confs = append(d.RemovedRules, p.RemoveRules...), append(d.Confs, p.Confs...)
	if err := t.write(d); err != nil {
		return err
	}
	if err := t.do(ctx, p); err != nil {
		back := t.Undo()
		if back == nil {
			return fmt.Errorf("%w; all is as before", err)
		}
		return errors.Join(err, fmt.Errorf("and the rollback is not complete; %s lists what was changed: %w", t.file(),
			back))
	}
	return nil
}

func (t *Takeover) do(ctx context.Context, p Plan) error {
	for _, r := range p.Add {
		if err := setRoute(r, true); err != nil {
			return err
		}
	}
	if err := t.awaitKnown(ctx); err != nil {
		return err
	}
	if len(p.Confs) > 0 {
		if _, err := t.install(ctx, p.Chain, false); err != nil {
			return err
		}
	}
	for _, c := range p.Confs {
		if err := os.Remove(c.File); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("remove Coil's network configuration: %w", err)
		}
	}
	for _, r := range p.RemoveRules { // before the routes: what it leads to is in the agent's table by now
		if err := setRule(r, false); err != nil {
			return err
		}
	}
	for _, r := range p.RemoveRoutes {
		if err := setRoute(r, false); err != nil {
			return err
		}
	}
	return nil
}

// awaitKnown waits until the agent knows all of Coil's pods that are there: some may end meanwhile.
func (t *Takeover) awaitKnown(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, knownWithin)
	defer cancel()
	again := time.NewTicker(knownAgain)
	defer again.Stop()
	for {
		missing, err := t.unknown(ctx)
		if err == nil && len(missing) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			if err == nil {
				err = fmt.Errorf("the agent does not know Coil's pods with the addresses %v after %s: see `skein ip list`",
					missing, knownWithin)
			}
			return err
		case <-again.C:
		}
	}
}

func (t *Takeover) unknown(ctx context.Context) (missing []netip.Addr, err error) {
	p, err := t.decide(ctx)
	if err != nil {
		return nil, err
	}
	known, err := t.Known(ctx)
	if err != nil {
		return nil, err
	}
	for _, a := range p.Known {
		if !known[a] {
			missing = append(missing, a)
		}
	}
	return missing, nil
}

// Undo brings Coil's side back as it was before Run. What cannot be brought back is told, and can be tried again.
func (t *Takeover) Undo() error {
	d, err := t.read()
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is nothing to undo: this host was not taken over from Coil (%s is not there)", t.file())
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range d.RemovedRoute {
		errs = append(errs, setRoute(r, true))
	}
	for _, r := range d.RemovedRules {
		errs = append(errs, setRule(r, true))
	}
	for _, r := range d.Added {
		errs = append(errs, setRoute(r, false))
	}
	for _, c := range d.Confs { // first: by its name a runtime takes it before skein's
		errs = append(errs, restore(c))
	}
	if len(d.Confs) > 0 {
		_, err := t.Install.Remove()
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if err := os.Remove(t.file()); err != nil {
		return fmt.Errorf("delete the record of the takeover: %w", err)
	}
	return nil
}

// restore writes a configuration that is not there.
func restore(c Conf) error {
	f, err := os.OpenFile(c.File, os.O_WRONLY|os.O_CREATE|os.O_EXCL, os.FileMode(c.Mode))
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	if err == nil {
		_, err = f.Write(c.Content)
		if err = errors.Join(err, f.Close()); err != nil {
			err = errors.Join(err, os.Remove(c.File)) // half of one would be taken for a whole one
		}
	}
	if err != nil {
		return fmt.Errorf("restore Coil's network configuration: %w", err)
	}
	return nil
}

func (t *Takeover) file() string { return filepath.Join(t.StateDir, File) }

func (t *Takeover) read() (d done, err error) {
	b, err := os.ReadFile(t.file())
	if err != nil {
		return done{}, fmt.Errorf("read the record of the takeover: %w", err)
	}
	if err := json.Unmarshal(b, &d); err != nil {
		return done{}, fmt.Errorf("read the record of the takeover, %s: %w", t.file(), err)
	}
	return d, nil
}

func (t *Takeover) write(d done) error {
	b, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return fmt.Errorf("write the record of the takeover: %w", err)
	}
	return wholefile.Replace(t.file(), append(b, '\n'))
}
