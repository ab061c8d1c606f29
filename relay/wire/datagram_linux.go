package wire

import "golang.org/x/sys/unix"

// What both ends have to do with UDP: the client's sockets for WireGuard, and the relay's reserved ports.
const (
	// ReceiveMessages are taken per system call.
	ReceiveMessages = 16
	// ReceiveBytes takes the largest datagram, or a train of equal ones when the sender uses
	// UDP_SEGMENT, as wireguard-go does. Pages that no datagram reaches are never touched.
	ReceiveBytes = 64 << 10
	// socketBuffer rides out bursts; it is a limit, not an allocation.
	socketBuffer = 4 << 20
)

// PrepareUDP asks for large buffers and trains of segments.
func PrepareUDP(fd uintptr) {
	for _, force := range []int{unix.SO_RCVBUFFORCE, unix.SO_SNDBUFFORCE} {
		if unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, force, socketBuffer) != nil {
			plain := unix.SO_RCVBUF
			if force == unix.SO_SNDBUFFORCE {
				plain = unix.SO_SNDBUF
			}
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, plain, socketBuffer)
		}
	}
	_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_UDP, unix.UDP_GRO, 1)
}
