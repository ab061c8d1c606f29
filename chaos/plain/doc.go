// Package plain tests plain WireGuard peers end to end: real agents behind real NATs, and clients that run wireguard-
// go with the
// configuration as `skein peer add` prints it, and nothing of skein.
package plain
