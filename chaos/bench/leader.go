package bench

import (
	"context"
	"fmt"
	"slices"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// leaders measures how long after the Raft leader's end a command is committed, asked for on a node that is
// no server.
func (f *field) leaders(ctx context.Context) []Figure {
	const name, limit = "Raft leader killed: next commit", 3 * time.Second
	var took sample
	runs := f.opts.runs(8, 3)
	f.note("leaders: %d kills", runs)
	asked := []string{"home1", "cloud1", "office1", "home2"}
	for i := range runs {
		d, who, err := f.leaderKilled(ctx, asked[i%len(asked)])
		if err != nil {
			return []Figure{notMeasured(name, "≤ 3.00 s", fmt.Errorf("kill %d: %w", i+1, err))}
		}
		took.add(d, fmt.Sprintf("%s killed, asked on %s", who, asked[i%len(asked)]))
	}
	return []Figure{took.figure(name, 100, limit, "kill -9 of the leader's agent; from the kill until `token create`, "+
		"asked at once on a node that is not a server, is committed and seen there")}
}

func (f *field) leaderKilled(ctx context.Context, asked string) (time.Duration, string, error) {
	var leader string
	if err := f.until(ctx, formedWithin, func() error {
		st, err := f.status(ctx, asked)
		if err != nil {
			return err
		}
		leader = st.GetLeaderName()
		if !slices.Contains(f.names, leader) {
			return fmt.Errorf("%s knows no leader", asked)
		}
		st, err = f.status(ctx, leader)
		if err == nil && st.GetLeaderName() != leader {
			err = fmt.Errorf("%s does not think that it leads", leader)
		}
		return err
	}); err != nil {
		return 0, leader, err
	}
	c, err := f.lab.Client(asked)
	if err != nil {
		return 0, leader, err
	}
	start := time.Now()
	if err := f.lab.Kill(ctx, leader); err != nil {
		return 0, leader, err
	}
	_, err = c.CreateToken(ctx, &skeinv1.CreateTokenRequest{Uses: 1, LifetimeNanos: int64(time.Minute), Label: "bench"})
	took := time.Since(start)
	if err != nil {
		return 0, leader, fmt.Errorf("%s killed, asked on %s: %w", leader, asked, err)
	}
	if err := f.lab.Start(ctx, leader); err != nil {
		return took, leader, err
	}
	if err := f.lab.WaitConverged(ctx, formedWithin); err != nil {
		return took, leader, err
	}
	return took, leader, f.until(ctx, formedWithin, func() error { return f.voters(ctx, 3) })
}
