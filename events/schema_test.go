package events

import (
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

// folds is what a node says of the schemas that it folds.
func folds(name string, high uint32) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id(name),
		MinSchema: SchemaMin, MaxSchema: high}}}
}

// TestServersDoNotLowerTheSchemaInUse: a server that says it folds less than what the cluster has would stop commands
// about it for everybody.
func TestServersDoNotLowerTheSchemaInUse(t *testing.T) {
	w := newPools(t)
	w.must(today(admit("s", "1", asServer)))
	w.must(folds("a", 1)) // rolled back before anything newer was used: that is true, and shows
	w.must(folds("s", 2))
	if h := w.s.Holdbacks(SchemaMax); len(h) != 2 || h[0].GetName() != "a" || h[1].GetName() != "s" {
		t.Fatalf("held back by %v", h)
	}
	if h := w.s.Holdbacks(2); len(h) != 1 || h[0].GetName() != "a" {
		t.Fatalf("held back by %v", h)
	}
	w.must(folds("a", SchemaMax))
	w.must(folds("s", SchemaMax))
	if h := w.s.Holdbacks(SchemaMax); len(h) != 0 {
		t.Fatalf("held back by %v", h)
	}

	w.must(createPool(pool("default", 2, "10.64.0.0/24")))
	w.refused(folds("a", 1), FailedPrecondition, "server a would fold event schemas up to 1 only, and the cluster has "+
		"pools, which need 2", "skein node withdraw a server")
	w.must(folds("s", 2))
	w.must(folds("s", SchemaMax))
	w.must(folds("b", 1)) // no server: it matters to itself alone
	w.must(allocate("b", "default", 1))

	// Joining again says it, too.
	w.refused(admit("s", "1"), FailedPrecondition, "server s would fold event schemas up to 1 only")
	w.must(today(admit("s", "1")))

	w.must(define(egress("web/out", "192.0.2.0/24", 1)))
	w.refused(folds("s", 2), FailedPrecondition, "the cluster has egresses, which need 3")
	w.must(allocate("c", "default", 1))
}
