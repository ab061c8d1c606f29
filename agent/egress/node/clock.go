package node

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/egress"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// witnesses is how many nodes besides the servers a gateway asks for their clocks; one answer is enough.
const witnesses = 4

// readClock reads this machine's CLOCK_BOOTTIME, which cannot be set and continues during suspend.
func readClock() (egress.Reading, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return egress.Reading{}, fmt.Errorf("reading the machine's boot ID: %w", err)
	}
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &now); err != nil {
		return egress.Reading{}, fmt.Errorf("reading the machine's clock: %w", err)
	}
	return egress.Reading{Boot: strings.TrimSpace(string(boot)), At: time.Duration(now.Nano())}, nil
}

// Clock answers another node with this machine's clock.
func (s Service) Clock(ctx context.Context, _ *skeinv1.ClockRequest) (*skeinv1.ClockResponse, error) {
	if _, err := s.caller(ctx); err != nil {
		return nil, err
	}
	r, err := readClock()
	if err != nil {
		return nil, err
	}
	return &skeinv1.ClockResponse{BootId: r.Boot, Nanos: int64(r.At)}, nil
}

// Read asks the servers and some other nodes for their clocks. It returns the answers that came before the context's
// end, and this machine's own.
func (e *Node) Read(ctx context.Context) egress.Readings {
	out := egress.Readings{}
	if own, err := readClock(); err == nil {
		out[e.c.Self] = own
	}
	type answer struct {
		from identity.ID
		egress.Reading
	}
	ask := e.witnesses()
	answers := make(chan answer, len(ask))
	for _, id := range ask {
		go func() {
			r, err := e.c.LeaseOf(id).Clock(ctx, &skeinv1.ClockRequest{})
			if err != nil { // offline, or of a version without this: no witness
				answers <- answer{}
				return
			}
			answers <- answer{id, egress.Reading{Boot: r.GetBootId(), At: time.Duration(r.GetNanos())}}
		}()
	}
	for range ask {
		select {
		case a := <-answers:
			if a.Boot != "" {
				out[a.from] = a.Reading
			}
		case <-ctx.Done():
			return out
		}
	}
	return out
}

// witnesses are the servers, and the next nodes by ID that gossip knows to be alive. The choice is stable while they
// are.
func (e *Node) witnesses() []identity.ID {
	st := e.c.State()
	var servers, others []identity.ID
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		switch {
		case err != nil || id == e.c.Self:
		case st.Server(id) != nil:
			servers = append(servers, id)
		case e.c.Alive(id):
			others = append(others, id)
		}
	}
	return slices.Concat(servers, nextAfter(e.c.Self, others, witnesses))
}

// nextAfter returns the first n IDs of the circle that begins after self.
func nextAfter(self identity.ID, ids []identity.ID, n int) []identity.ID {
	slices.SortFunc(ids, func(a, b identity.ID) int { return slices.Compare(a[:], b[:]) })
	from, _ := slices.BinarySearchFunc(ids, self, func(a, b identity.ID) int { return slices.Compare(a[:], b[:]) })
	return slices.Concat(ids[from:], ids[:from])[:min(n, len(ids))]
}
