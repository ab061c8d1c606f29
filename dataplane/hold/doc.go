// Package hold queues packets of an egress slot in the kernel while the slot moves to this gateway, and releases them
// in order of arrival.
//
// A rule of the gateway's network namespace gives the packets to a queue at prerouting's raw priority, before the
// connection table. So after their release they find the flows loaded meanwhile. The kernel keeps the packets; this
// process receives only their number and mark.
//
// Packets that are not accepted are dropped when the queue closes or the process ends; so are packets that find the
// queue full (MaxPackets). While no process has the queue, packets continue to the next rules, and a gateway's check
// the lease.
//
// The rule ends with the Statement of the Form that the kernel accepts. If slots that share a queue move at different
// times, rules mark packets before queueing, and Accept releases the packets of one mark; each packet continues
// without its mark.
//
// All methods are safe for concurrent use. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN. Source: DESIGN.md section 11 of the
// project; linux/netfilter/nfnetlink_queue.h.
package hold
