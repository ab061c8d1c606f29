// Package mmsg moves many UDP datagrams per system call over unconnected sockets: recvmmsg(2) and sendmmsg(2),
// with trains of equal datagrams that the kernel cuts up and puts together (UDP_SEGMENT, UDP_GRO in udp(7)),
// and with the local address of each (IP_PKTINFO in ip(7)).
//
// golang.org/x/net has the batches too, but makes an address object for every datagram, and leaves trains
// and local addresses to its caller.
//
// A Reader takes what a raw socket receives, too.
//
// A Reader belongs to one goroutine. A Writer may be used by several. Both wait by the runtime's poller and
// end with net.ErrClosed when their socket is closed.
package mmsg
