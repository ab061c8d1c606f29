package portmap

import "time"

// epoch is a router's own account of how long it has kept its state.
type epoch struct {
	seconds uint32
	at      time.Time // when it said so; zero: never
}

// lost reports whether a router has lost its state between two of its words: its time went back, or passed at another
// pace than ours (RFC 6887 section 8.5, which is a little wider than RFC 6886 section 3.6).
func (e epoch) lost(now epoch) bool {
	if e.at.IsZero() {
		return false
	}
	server := int64(now.seconds) - int64(e.seconds)
	ours := int64(now.at.Sub(e.at) / time.Second)
	return server < -1 || ours+2 < server-server/16 || server+2 < ours-ours/16
}
