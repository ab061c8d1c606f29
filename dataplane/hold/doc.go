// Package hold keeps packets of an egress slot waiting in the kernel while the slot moves to this gateway, and lets
// them go in the order in which they came.
//
// A rule of the gateway's network namespace gives the packets to a queue at prerouting's raw priority, before the
// connection table sees them. So they find the flows that are loaded while they wait. The kernel keeps the packets;
// this process learns only their number and mark.
//
// What nobody has accepted is dropped when the queue closes, or the process ends, and so is what finds the queue full
// (MaxPackets). What comes while nobody has the queue goes on to the rules behind: a gateway's ask whether its lease
// runs.
//
// The rule ends with the Statement of the Form that the kernel takes. Where slots that share a queue move at different
// times, rules give packets a mark before they queue them, and Accept lets go the packets of one mark; each packet goes
// on without its mark.
//
// All methods are safe for concurrent use. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN. Source: DESIGN.md section 11 of the
// project; linux/netfilter/nfnetlink_queue.h.
package hold
