package ipam

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// A command that returns something may reach the log late, after its proposal timed out. So its request ID contains
// the index of the event that allocated what it returns: the log answers a late copy like the first, and never takes
// what the node was allocated again in between.

func releaseID(self string, blocks []blockView) string {
	h := sha256.New()
	fmt.Fprintf(h, "release %s", self)
	for _, b := range blocks {
		fmt.Fprintf(h, " %s/%d@%d", b.Key.Pool, b.Key.Number, b.Index)
	}
	return hex.EncodeToString(h.Sum(nil)[:16])
}

func giveUpID(self string, s staticView) string {
	h := sha256.Sum256(fmt.Appendf(nil, "give up %s %s %s@%d", self, s.Pool, s.addr(), s.Index))
	return hex.EncodeToString(h[:16])
}

// command is the command that the task proposes.
func (t task) command(self string) *skeinv1.Command {
	c := &skeinv1.Command{RequestId: t.id}
	switch t.kind {
	case taskAllocate:
		c.Body = &skeinv1.Command_AllocateBlocks{AllocateBlocks: &skeinv1.AllocateBlocks{NodeId: self, Pool: t.pool,
			Total: t.total}}
	case taskRelease:
		r := &skeinv1.ReleaseBlocks{Pool: t.pool, NodeId: self, Reason: t.reason}
		for _, b := range t.blocks {
			// the index protects a block that was allocated again from a late copy
			r.Numbers, r.Indexes = append(r.Numbers, b.Key.Number), append(r.Indexes, b.Index)
		}
		c.Body = &skeinv1.Command_ReleaseBlocks{ReleaseBlocks: r}
	case taskGrant:
		c.Body = &skeinv1.Command_SetGrant{SetGrant: &skeinv1.SetGrant{NodeId: self, Pool: t.pool, Namespace: t.namespace,
			Addresses: t.grant}}
	case taskClaim, taskGiveUp:
		c.Body = &skeinv1.Command_ClaimAddress{ClaimAddress: &skeinv1.ClaimAddress{
			NodeId: self, Pool: t.pool, Address: t.static.addr().String(), Namespace: t.static.Namespace, Pod: t.static.Pod,
			GiveUp: t.kind == taskGiveUp,
		}}
	}
	return c
}
