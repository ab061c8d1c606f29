package agent

import (
	"fmt"
	"net/netip"

	"github.com/skeinmesh/skein/agent/hostlinks"
	"github.com/skeinmesh/skein/agent/projection"
	"github.com/skeinmesh/skein/events"
)

func podRanges(st *events.State) (out []netip.Prefix) {
	for _, text := range st.Settings().GetPodRanges() {
		if p, err := netip.ParsePrefix(text); err == nil {
			out = append(out, p)
		}
	}
	return out
}

const subjectOtherCNI = "another CNI's link "

// noteOtherCNI tells of links of another CNI that do not fit.
func (a *Agent) noteOtherCNI() {
	st := a.replica.State()
	now := map[string]bool{}
	all := hostlinks.Misfits(a.links.Get(), a.cfg.Dataplane.Link, a.linkMTU(), projection.Overlays(st.Cluster()),
		podRanges(st))
	for _, m := range all {
		now[m.Link] = true
		a.report(subjectOtherCNI+m.Link, warning, fmt.Sprintf("its MTU is %d, and %d is the largest that fits: %s",
			m.Have, m.Want, m.Why),
			fmt.Sprintf("set the MTU of that CNI to %d; until then large packets are lost where no answer about their size "+
				"comes back", m.Want))
	}
	for name := range a.loop.misfits {
		if !now[name] {
			a.report(subjectOtherCNI+name, "", "", "")
		}
	}
	a.loop.misfits = now
}
