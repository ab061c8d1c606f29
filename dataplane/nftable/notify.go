package nftable

import (
	"encoding/binary"
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Concerns reports whether a notification is about a table of family inet, and of none of these sockets' writes.
func Concerns(m netlink.Message, table string, own ...uint32) bool {
	family, name, ok := ForeignTable(m.Data)
	return ok && family == unix.NFPROTO_INET && name == table && !slices.Contains(own, m.Header.PID)
}

// ForeignTable reads an nftables notification: the table it is about, and whether it could be read.
// In every message about tables, chains, sets, elements and rules the table's name is attribute 1.
func ForeignTable(payload []byte) (family byte, table string, ok bool) {
	const header, attr, nameType, typeMask = 4, 4, 1, 0x3fff
	if len(payload) < header {
		return 0, "", false
	}
	family = payload[0]
	for b := payload[header:]; len(b) >= attr; {
		n := int(binary.NativeEndian.Uint16(b))
		t := binary.NativeEndian.Uint16(b[2:]) & typeMask
		if n < attr || n > len(b) {
			return 0, "", false
		}
		if t == nameType {
			return family, strings.TrimRight(string(b[attr:n]), "\x00"), true
		}
		b = b[min((n+3)&^3, len(b)):]
	}
	return 0, "", false
}
