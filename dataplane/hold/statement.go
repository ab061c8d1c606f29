package hold

import (
	"errors"
	"fmt"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
	"github.com/vishvananda/netns"

	"github.com/skeinmesh/skein/internal/nlcount"
)

// Form is how a rule of nftables gives packets to a queue.
type Form int

// Native is nftables' own statement. Target is the statement of iptables inside a rule of nftables, for kernels that
// are built without the first (NFT_QUEUE) but with NFT_COMPAT and NETFILTER_XT_TARGET_NFQUEUE.
const (
	Native Form = iota
	Target
)

// Statement is the last expression of a rule that gives packets to a queue, and drops them when nobody has it.
func (f Form) Statement(queue uint16) expr.Any {
	if f == Native {
		return &expr.Queue{Num: queue, Total: 1}
	}
	info := xt.Unknown(binaryutil.NativeEndian.PutUint16(queue)) // struct xt_NFQ_info
	return &expr.Target{Name: "NFQUEUE", Info: &info}
}

// probeTable is made and removed in one transaction.
const probeTable = "skein_hold_probe"

// FormOf finds the form that the kernel takes in the network namespace at path; "" is the calling thread's own.
func FormOf(path string) (Form, error) {
	var o []nftables.ConnOption
	if path != "" {
		ns, err := netns.GetFromPath(path)
		if err != nil {
			return 0, fmt.Errorf("opening the network namespace %s: %w", path, err)
		}
		defer ns.Close()
		o = append(o, nftables.WithNetNSFd(int(ns)))
	}
	c, err := nlcount.NewNft(o...)
	if err != nil {
		return 0, fmt.Errorf("opening nftables in the network namespace %q: %w", path, err)
	}
	var errs []error
	for _, f := range []Form{Native, Target} {
		t := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: probeTable})
		chain := c.AddChain(&nftables.Chain{Name: "probe", Table: t})
		c.AddRule(&nftables.Rule{Table: t, Chain: chain, Exprs: []expr.Any{f.Statement(0)}})
		c.DelTable(t)
		if err := c.Flush(); err != nil {
			errs = append(errs, err)
			continue
		}
		return f, nil
	}
	return 0, fmt.Errorf("this kernel queues no packets from a rule of nftables (it needs NFT_QUEUE, or NFT_COMPAT and "+
		"NETFILTER_XT_TARGET_NFQUEUE): %w",
		errors.Join(errs...))
}
