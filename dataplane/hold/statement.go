package hold

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
)

// Form is how a rule of nftables gives packets to a queue. A kernel without support for a form refuses the
// transaction.
type Form string

// Native is nftables' own statement. Target is iptables' target inside a rule of nftables, for kernels built without
// NFT_QUEUE but with NFT_COMPAT and NETFILTER_XT_TARGET_NFQUEUE.
const (
	Native Form = "queue"
	Target Form = "target"
)

// Forms lists all forms in the order in which to try them.
func Forms() []Form { return []Form{Native, Target} }

// Statement is the last expression of a rule that gives packets to a queue. While no process has the queue, packets
// continue to the next rule.
func (f Form) Statement(queue uint16) expr.Any {
	if f == Native {
		return &expr.Queue{Num: queue, Total: 1, Flag: expr.QueueFlagBypass}
	}
	const queues, bypass, revision = 1, 1, 3
	info := make(xt.Unknown, 8) // struct xt_NFQ_info_v3, padded
	binary.NativeEndian.PutUint16(info, queue)
	binary.NativeEndian.PutUint16(info[2:], queues)
	binary.NativeEndian.PutUint16(info[4:], bypass)
	return &expr.Target{Name: "NFQUEUE", Rev: revision, Info: &info}
}
