package main

import (
	"errors"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func TestPoolRemoveWhenEmpty(t *testing.T) {
	pool := func(draining bool, owned, reserved uint64, holders ...string) *skeinv1.PoolsResponse {
		v := &skeinv1.PoolView{Pool: &skeinv1.Pool{Name: "old", Draining: draining}, Owned: owned, Reserved: reserved,
			Nodes: uint32(len(holders))}
		for _, h := range holders {
			v.Holders = append(v.Holders, &skeinv1.PoolHolder{Name: h, Blocks: 1})
		}
		return &skeinv1.PoolsResponse{Pools: []*skeinv1.PoolView{v}}
	}
	for name, c := range map[string]struct {
		pools           []*skeinv1.PoolsResponse // as they are seen one after the other
		flags           string
		out, notes      string
		fail            string
		drains, removes int
	}{
		"it is empty": {pools: []*skeinv1.PoolsResponse{pool(false, 0, 0), pool(true, 0, 0)}, flags: "--when-empty",
			out: "pool old removed, as of event 9\n", drains: 1, removes: 1},
		"it gets empty": {pools: []*skeinv1.PoolsResponse{pool(false, 3, 0, "a", "b", "c"), pool(true, 3, 0, "a", "b", "c"),
			pool(true, 1, 0, "a"), pool(true, 0, 0)}, flags: "--when-empty",
			notes: "pool old gives nothing new; 3 blocks are in use, on a and 2 other nodes\n" +
				"pool old gives nothing new; 1 block is in use, on a\n",
			out: "pool old removed, as of event 9\n", drains: 1, removes: 1},
		"it drains already": {pools: []*skeinv1.PoolsResponse{pool(true, 0, 0)}, flags: "--when-empty",
			out: "pool old removed, as of event 9\n", removes: 1},
		"something is reserved": {pools: []*skeinv1.PoolsResponse{pool(false, 2, 1)}, flags: "--when-empty",
			fail: "pool old cannot become empty: 1 block is reserved; `skein block list --pool old --reserved`"},
		"it does not get empty": {pools: []*skeinv1.PoolsResponse{pool(false, 1, 0, "a")},
			flags: "--when-empty --timeout 1ms",
			notes: "pool old gives nothing new; 1 block is in use, on a\n", drains: 1,
			fail: "pool old is not empty: 1 block is in use, on a; it stays draining: run the command again"},
		"there is none":   {pools: []*skeinv1.PoolsResponse{{}}, flags: "--when-empty", fail: "there is no pool named old"},
		"without waiting": {out: "pool old removed, as of event 9\n", removes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeAgent(t)
			f.pools = c.pools
			f.lay(&skeinv1.ChangePoolRequest{}, &skeinv1.PoolResponse{})
			f.lay(&skeinv1.RemovePoolRequest{}, &skeinv1.RemovePoolResponse{Index: 9})
			out, notes, err := f.skein(t, strings.Fields("pool remove old "+c.flags)...)
			if c.fail == "" && err != nil || c.fail != "" && (err == nil || !strings.HasPrefix(err.Error(), c.fail)) {
				t.Errorf("the error is %v, want %q", err, c.fail)
			}
			if out != c.out || c.fail == "" && notes != c.notes {
				t.Errorf("it says %q, beside %q; want %q, beside %q", out, notes, c.out, c.notes)
			}
			drains, removes := 0, 0
			for _, r := range f.asked {
				switch r := r.(type) {
				case *skeinv1.ChangePoolRequest:
					drains++
					if !r.GetChange().GetSet().GetDraining() {
						t.Errorf("the change is %v", r)
					}
				case *skeinv1.RemovePoolRequest:
					removes++
				}
			}
			if drains != c.drains || removes != c.removes {
				t.Errorf("it was drained %d times and removed %d times, want %d and %d", drains, removes, c.drains, c.removes)
			}
		})
	}
	f := newFakeAgent(t)
	for _, args := range []string{"--timeout 1h", "--when-empty --timeout -1s"} {
		if _, _, err := f.skein(t, strings.Fields("pool remove old "+args)...); !errors.As(err, new(cli.UsageError)) ||
			len(f.asked) > 0 {
			t.Errorf("%s: %v", args, err)
		}
	}
}
