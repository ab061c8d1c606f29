package nftable

import (
	"slices"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nfnl"
)

// Concerns reports whether a notification is about a table of family inet, and of none of these sockets' writes.
func Concerns(m netlink.Message, table string, own ...uint32) bool {
	family, name, ok := ForeignTable(m.Data)
	return ok && family == unix.NFPROTO_INET && name == table && !slices.Contains(own, m.Header.PID)
}

// ForeignTable reads an nftables notification: the table it is about, and whether it could be read.
// In every message about tables, chains, sets, elements and rules the table's name is attribute 1.
func ForeignTable(payload []byte) (family byte, table string, ok bool) {
	const header, nameType = 4, 1
	if len(payload) < header {
		return 0, "", false
	}
	for typ, v := range nfnl.Attributes(payload[header:]) {
		if typ == nameType {
			return payload[0], strings.TrimRight(string(v), "\x00"), true
		}
	}
	return 0, "", false
}
