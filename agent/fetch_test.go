package agent

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/gossip"
	"github.com/skeinmesh/skein/identity"
)

// TestSitesWithoutRecords: those sites are asked of whose nodes a record is missing, and each that does not answer is
// named.
func TestSitesWithoutRecords(t *testing.T) {
	var nodes []*skeinv1.Node
	for i := byte(1); i < 6; i++ {
		nodes = append(nodes, &skeinv1.Node{Id: identity.ID{i}.String()})
	}
	kept := map[identity.ID]gossip.Entry{{1}: {}, {2}: {}}
	at := map[identity.ID]string{{1}: "kept", {3}: "home", {4}: "dc", {5}: "home"}
	got := sitesWithout(nodes, kept, func(id identity.ID) (string, bool) { s, ok := at[id]; return s, ok })
	if !slices.Equal(got, []string{"dc", "home"}) {
		t.Errorf("%q", got)
	}
	one, two := errors.New("site dc: nobody of it is alive"), errors.New("site home: no answer")
	for _, c := range []struct {
		err  error
		want []string
	}{
		{nil, nil}, {one, []string{one.Error()}}, {errors.Join(one, two), []string{one.Error(), two.Error()}},
		{fmt.Errorf("fetch: %w", one), []string{"fetch: " + one.Error()}},
	} {
		if got := notAskedTexts(c.err); !slices.Equal(got, c.want) {
			t.Errorf("%v: %q", c.err, got)
		}
	}
}
