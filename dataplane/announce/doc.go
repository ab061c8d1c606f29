// Package announce answers for addresses on a host's links: ARP requests for IPv4 addresses and neighbour solicitations
// for IPv6 ones, with the link's own MAC, and tells the neighbours when it begins to.
//
// The addresses are not the kernel's. An Announcer answers for an address while Set names it and Valid says so at the
// moment of the answer: a process that was stopped and goes on must not answer from old state.
//
// An address that is new is announced at once (ARP in both forms, an unsolicited neighbour advertisement that
// overrides) and again after 100 ms, 500 ms and 2 s, and whenever its link comes up. Who has an address is decided
// elsewhere: one that another host answers for is reported, and announced again a second later when it is still ours.
//
// All methods are safe for concurrent use. Needs CAP_NET_RAW and CAP_NET_ADMIN. Source: DESIGN.md section 11 of the
// project; RFC 826, RFC 5227, RFC 4861 sections 4.3, 4.4 and 7.2.
package announce
