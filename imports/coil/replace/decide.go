package replace

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// mostNamed is how many of several pods an error names.
const mostNamed = 20

// Block is a reserved block that is to be given back.
type Block struct {
	Pool     string
	Number   uint64
	Index    uint64 // of the event that reserved it
	Prefixes []netip.Prefix
	// Held says what of the mesh's own has an address in it, which a release is refused for; empty: nothing.
	Held string
}

func (b Block) String() string {
	var out []string
	for _, p := range b.Prefixes {
		out = append(out, p.String())
	}
	return fmt.Sprintf("block %s of pool %s", strings.Join(out, ","), b.Pool)
}

// Controller is the object that starts another pod when one of its pods has ended. The zero value is none.
type Controller struct{ Kind, Name, UID string }

func (c Controller) String() string { return shown(c.Kind + " " + c.Name) }

// Pod is what is decided by of a pod.
type Pod struct {
	Namespace, Name, UID string
	Node                 string
	Addresses            []netip.Addr // as its kubelet says
	Controller           Controller
	HostNetwork          bool
	Static               bool // a kubelet has it from a file; what the apiserver has is its mirror
	Ready                bool // and not about to end
	Succeeded, Failed    bool // it has ended
}

func (p Pod) String() string { return shown("pod " + p.Namespace + "/" + p.Name) }

// where is the pod with its address and its node.
func (p Pod) where(a netip.Addr) string {
	if p.Node == "" {
		return fmt.Sprintf("%s (%s)", p, a)
	}
	return fmt.Sprintf("%s (%s on %s)", p, a, shown(p.Node))
}

// Plan is what is to be done, in its order.
type Plan struct {
	Steps []Step
	Notes []string // what is left alone, a sentence each
}

// Step is a block, and the pods to replace before it is given back.
type Step struct {
	Block Block
	Pods  []Pod // in order of their addresses
}

// Nothing reports whether there is nothing to do.
func (p Plan) Nothing() bool { return len(p.Steps) == 0 }

// Lines say what the plan does, a line each.
func (p Plan) Lines() (out []string) {
	for _, s := range p.Steps {
		f := finderOf([]Block{s.Block})
		for _, pod := range s.Pods {
			_, a, _ := f.find(pod)
			if pod.Controller == (Controller{}) {
				out = append(out, fmt.Sprintf("remove %s, which has no controller", pod.where(a)))
			} else {
				out = append(out, fmt.Sprintf("replace %s of %s", pod.where(a), pod.Controller))
			}
		}
		out = append(out, "release "+s.Block.String())
	}
	return out
}

// finder finds the block that a pod has an address in.
type finder struct {
	at   map[netip.Prefix]int
	bits []int // lengths of prefixes
}

func finderOf(blocks []Block) finder {
	f := finder{at: map[netip.Prefix]int{}}
	for i, b := range blocks {
		for _, p := range b.Prefixes {
			f.at[p.Masked()] = i
			if !slices.Contains(f.bits, p.Bits()) {
				f.bits = append(f.bits, p.Bits())
			}
		}
	}
	return f
}

// find is the first block in their order that a pod has an address in, and the lowest such address. A pod that has
// ended has none any more, and one in its host's network has none of its own.
func (f finder) find(p Pod) (block int, a netip.Addr, ok bool) {
	if p.HostNetwork || p.Succeeded || p.Failed {
		return 0, a, false
	}
	for _, addr := range p.Addresses {
		for _, bits := range f.bits {
			prefix, err := addr.Prefix(bits)
			if err != nil {
				continue // of the other family
			}
			n, is := f.at[prefix]
			if is && (!ok || n < block || n == block && addr.Less(a)) {
				block, a, ok = n, addr, true
			}
		}
	}
	return block, a, ok
}

// Decide says what is to be done, or everything that stands in its way. With bare, pods without a controller are
// removed too.
func Decide(blocks []Block, pods []Pod, bare bool) (Plan, error) {
	var p Plan
	var wanted []Block
	for _, b := range blocks {
		if b.Held != "" {
			p.Notes = append(p.Notes, fmt.Sprintf("%s stays reserved, and its pods stay: it holds %s; take that away, "+
				"then give the command again", b, b.Held))
			continue
		}
		wanted = append(wanted, b)
	}
	slices.SortFunc(wanted, func(a, b Block) int {
		return cmp.Or(strings.Compare(a.Pool, b.Pool), cmp.Compare(a.Number, b.Number))
	})
	f, address := finderOf(wanted), map[string]netip.Addr{} // by UID
	for _, b := range wanted {
		p.Steps = append(p.Steps, Step{Block: b})
	}
	var static, alone []string
	for _, pod := range pods {
		n, a, ok := f.find(pod)
		if !ok {
			continue
		}
		switch {
		case pod.Static:
			static = append(static, pod.where(a))
			continue
		case pod.Controller == (Controller{}) && !bare:
			alone = append(alone, pod.where(a))
			continue
		}
		address[pod.UID] = a
		p.Steps[n].Pods = append(p.Steps[n].Pods, pod)
	}
	for _, s := range p.Steps {
		slices.SortFunc(s.Pods, func(a, b Pod) int {
			return cmp.Or(address[a.UID].Compare(address[b.UID]), strings.Compare(a.UID, b.UID))
		})
	}
	var errs []error
	if len(static) > 0 {
		errs = append(errs, fmt.Errorf("static, of a file on their nodes, which the apiserver cannot replace: %s. Move "+
			"such a pod's file out of its kubelet's directory (mostly /etc/kubernetes/manifests), and back when the pod has "+
			"ended; then give the command again", named(static)))
	}
	if len(alone) > 0 {
		errs = append(errs, fmt.Errorf("without a controller, so that they would not come back: %s. Start them anew "+
			"yourself, or give --bare, which evicts them for good", named(alone)))
	}
	return p, errors.Join(errs...)
}

// named lists pods in order, and counts those that are too many.
func named(pods []string) string {
	slices.Sort(pods)
	text := strings.Join(pods[:min(len(pods), mostNamed)], ", ")
	if n := len(pods) - mostNamed; n > 0 {
		text += fmt.Sprintf(" and %d more", n)
	}
	return text
}
