package probe

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// disconnect is connect(2) with AF_UNSPEC, for which x/sys/unix has no address type.
func disconnect(fd int, unspec *unix.RawSockaddr) error {
	_, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(unspec)), unsafe.Sizeof(*unspec))
	if errno != 0 {
		return errno
	}
	return nil
}
