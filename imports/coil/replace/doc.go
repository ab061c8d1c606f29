// Package replace replaces the pods that Coil v1 has started, one by one, and gives back the blocks that an import of
// Coil has reserved for them.
//
// Decide is pure: from blocks and pods it makes a Plan, or says what stands in its way; view is what is known of pods,
// and tells how far the replacement of one is. Run does it: a pod is evicted, so that a PodDisruptionBudget is heeded,
// and the next one comes when it has ended and its controller has another one that is ready. A block is released when
// the apiserver, asked anew, knows of no pod with an address in it.
//
// Invariants: at no moment is more than one pod evicted and not yet replaced. No block is released while a pod has an
// address in it, and none that is not among those that the caller names. A run may end at any moment: what is left is
// found by the next one, and a run with nothing left changes nothing.
//
// Whom it trusts: status.podIPs is the word of a pod's node. A node that claims an address of a block for a pod of its
// own has that pod evicted, which it could do anyway, and no other; one that conceals an address has the block
// released under its own pod. An apiserver that lies can have both, of the pods that it is the apiserver of. Text of
// the apiserver is printable, and short, before it goes into an error.
//
// A Run is not safe for concurrent use; two runs at once do no harm but that two pods may be away at one moment.
//
// Source: seeds/coil-v2-design.txt, "Upgrading from v1", steps 7 and 8. Step 9, which tells Coil's daemons, has no
// counterpart: the log tells every agent.
package replace
