package hold

import (
	"encoding/binary"

	"github.com/google/nftables/expr"
	"github.com/google/nftables/xt"
)

// Form is how a rule of nftables gives packets to a queue. A kernel that does not take a form refuses the transaction.
type Form string

// Native is nftables' own statement. Target is the statement of iptables inside a rule of nftables, for kernels that
// are built without the first (NFT_QUEUE) but with NFT_COMPAT and NETFILTER_XT_TARGET_NFQUEUE.
const (
	Native Form = "queue"
	Target Form = "target"
)

// Forms are all, the one to be tried first in front.
func Forms() []Form { return []Form{Native, Target} }

// Statement is the last expression of a rule that gives packets to a queue, and lets them go on to the next rule when
// nobody has it.
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
