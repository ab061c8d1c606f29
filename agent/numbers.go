package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/skeinmesh/skein/agent/claims"
	"github.com/skeinmesh/skein/agent/egress/node"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/dataplane/relaynft"
	"github.com/skeinmesh/skein/dataplane/wireguard"
	"github.com/skeinmesh/skein/internal/wholefile"
)

const (
	numbersFile    = "numbers.json"
	subjectNumbers = "numbers"
	leaveTimeout   = 30 * time.Second
)

// numbersNote is what the state directory says of numbers.
type numbersNote struct {
	Numbers dataplane.Numbers `json:"numbers"` // of the last start
	// Left are those of earlier starts of which something may be in the kernel still.
	Left []dataplane.Numbers `json:"left,omitempty"`
}

// next is the note of a start with these numbers.
func (n numbersNote) next(now dataplane.Numbers) numbersNote {
	out := numbersNote{Numbers: now}
	for _, one := range append(slices.Clone(n.Left), n.Numbers) {
		if one != now && one != (dataplane.Numbers{}) && !slices.Contains(out.Left, one) {
			out.Left = append(out.Left, one)
		}
	}
	return out
}

// readNumbers reads the note; member says that an agent has run with this state directory before, and now are its
// present numbers. One of a version that wrote no note had the default ones, and a link that could be set.
func readNumbers(dir string, member bool, now dataplane.Numbers) (n numbersNote, err error) {
	b, err := os.ReadFile(filepath.Join(dir, numbersFile))
	switch {
	case errors.Is(err, fs.ErrNotExist) && member:
		n.Numbers = dataplane.DefaultNumbers()
		for i := range dataplane.MaxInstance + 1 {
			if now.Link == dataplane.NumbersOf(i).Link {
				return n, nil
			}
		}
		n.Numbers.Link = now.Link
		return n, nil
	case errors.Is(err, fs.ErrNotExist):
		return n, nil
	case err != nil:
		return n, fmt.Errorf("read which numbers this agent had: %w", err)
	}
	if err := json.Unmarshal(b, &n); err != nil {
		return n, fmt.Errorf("%s is damaged: %w: delete it once the kernel has nothing left (links, routes, nftables) of "+
			"the numbers that this agent had before", filepath.Join(dir, numbersFile), err)
	}
	return n, nil
}

func (n numbersNote) write(dir string) error {
	b, err := json.Marshal(n)
	if err == nil {
		err = wholefile.Replace(filepath.Join(dir, numbersFile), b)
	}
	if err != nil {
		return fmt.Errorf("note which numbers this agent has: %w", err)
	}
	return nil
}

// claimNumbers notes this start's numbers, and readies what the kernel has under former ones for the change: the link,
// since its port is needed, gateways, which are made anew, and pods, which get routes in the new table beside those
// they have. All else stays until the data plane stands; see leaveNumbers.
func (a *Agent) claimNumbers(member bool) error {
	note, err := readNumbers(a.cfg.StateDir, member, a.numbers)
	if err != nil {
		return err
	}
	note = note.next(a.numbers)
	if err := note.write(a.cfg.StateDir); err != nil {
		return err
	}
	if len(note.Left) == 0 {
		return nil
	}
	others, err := a.claims.Others()
	if err != nil {
		return err
	}
	var errs []error
	for _, former := range note.Left {
		if o := takenBy(former, others); o != nil {
			a.report(subjectNumbers, warning, fmt.Sprintf("the agent in %q (process %d) now has numbers that this agent had "+
				"before", o.RunDir, o.Process),
				"what this agent left under them is removed at its first start after that agent has given them up")
			continue
		}
		a.formerNumbers = append(a.formerNumbers, former)
		a.log.Info("numbers have changed", "link", former.Link, "nft", former.NftTable, "table", former.RouteTable, "now",
			a.numbers.RouteTable)
		if !slices.Contains(a.numbers.Links(), former.Link) {
			_, err := wireguard.DeleteLink(former.Link)
			errs = append(errs, err)
		}
		if former.RelayNftTable != a.numbers.RelayNftTable {
			errs = append(errs, relaynft.Purge(relaynft.Config{Numbers: former}))
		}
		errs = append(errs, node.PurgeGateways(a.cfg.RunDir, former), podnet.Move(former.PodTable(), a.numbers.PodTable()))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("changing to new numbers: %w", err)
	}
	return nil
}

// takenBy is the agent that has some of the numbers; nil: nobody has.
func takenBy(n dataplane.Numbers, others []claims.Claim) *claims.Claim {
	for _, o := range others {
		if n.Overlap(o.Numbers) != nil {
			return &o
		}
	}
	return nil
}

// leaveNumbers removes what is left of former numbers once the data plane stands under the present ones.
func (a *Agent) leaveNumbers(ctx context.Context) {
	if len(a.formerNumbers) == 0 {
		return
	}
	go func() {
		select {
		case <-a.planeStands:
		case <-ctx.Done():
			return
		}
		if err := a.leaveFormer(ctx); err != nil {
			a.report(subjectNumbers, warning, err.Error(), "the next start of the agent tries again; traffic is not affected")
		}
	}()
}

func (a *Agent) leaveFormer(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	var errs []error
	for _, former := range a.formerNumbers {
		errs = append(errs, plane.Leave(ctx, plane.Options{Numbers: a.numbers, Log: a.log}, former))
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("removing what former numbers have left: %w", err)
	}
	note, err := readNumbers(a.cfg.StateDir, false, a.numbers)
	if err != nil {
		return err
	}
	note.Left = slices.DeleteFunc(note.Left, func(n dataplane.Numbers) bool { return slices.Contains(a.formerNumbers, n) })
	if err := note.write(a.cfg.StateDir); err != nil {
		return err
	}
	a.log.Info("what former numbers have left in the kernel is removed")
	return nil
}
