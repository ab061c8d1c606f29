// Package nlcount counts the netlink messages of this process, for `skein top` and the metric
// skein_netlink_messages_total.
//
// The counters are the process's, as the kernel's own figures of CPU time and context switches are: the library for
// links and routes (vishvananda/netlink) keeps its sockets and its numbers for the process, too. They are atomic, cost
// an addition, and never go back.
//
// A request is a message to the kernel: a question, or a change. Where a library hides its messages, they are counted
// where it is called:
//   - functions of vishvananda/netlink itself, by the sequence number that it gives to its requests: exactly;
//   - methods of its Handle, by One: one for each call, though some ask twice on old kernels;
//   - google/nftables, by Nft: one for each question and each queued change, and the two that enclose a transaction;
//   - wgctrl, one for each call: a device with many peers is written by more messages;
//   - everything that sends messages itself, by Sent.
//
// A notification is a message of the kernel that nobody asked for, as the agent's subscriptions receive it. Answers are
// not counted.
//
// Not counted is what the Go runtime and libraries ask by themselves: net.Interfaces, the TUN device of userspace
// WireGuard, the setup of generic netlink families.
package nlcount
