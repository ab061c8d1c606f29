package inet

import (
	"encoding/binary"
	"math/bits"
	"net/netip"
)

const udp = 17 // IPPROTO_UDP

// Sum adds b to a sum of 16-bit words in network byte order (RFC 1071), unfolded. An odd last byte counts as a word's
// first.
func Sum(b []byte, initial uint64) uint64 {
	acc, carry := initial, uint64(0)
	for len(b) >= 32 {
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b), carry)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b[8:]), carry)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b[16:]), carry)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b[24:]), carry)
		b = b[32:]
	}
	for len(b) >= 8 {
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(b), carry)
		b = b[8:]
	}
	if len(b) > 0 {
		var last [8]byte
		copy(last[:], b)
		acc, carry = bits.Add64(acc, binary.BigEndian.Uint64(last[:]), carry)
	}
	acc, carry = bits.Add64(acc, carry, 0)
	return acc + carry
}

// Fold makes a sum 16 bits.
func Fold(acc uint64) uint16 {
	for acc > 0xffff {
		acc = acc>>16 + acc&0xffff
	}
	return uint16(acc)
}

// Checksum is that of a header or message without it; over one with it, it is 0.
func Checksum(b []byte) uint16 { return ^Fold(Sum(b, 0)) }

// Pseudo is the sum of the pseudo header of a transport's checksum: addresses, protocol and length.
func Pseudo(addresses []byte, proto uint8, length int) uint64 {
	return Sum(addresses, uint64(proto)+uint64(length))
}

// UDP is the checksum of a UDP segment whose checksum field is zero (RFC 768). A zero is sent as all ones, since zero
// says that there is none.
func UDP(src, dst netip.Addr, segment []byte) uint16 {
	acc := Sum(segment, udp+uint64(len(segment)))
	for _, a := range [2]netip.Addr{src, dst} {
		b := a.As16() // of IPv4 the last four bytes
		if a.Is4() {
			acc = Sum(b[12:], acc)
		} else {
			acc = Sum(b[:], acc)
		}
	}
	if c := ^Fold(acc); c != 0 {
		return c
	}
	return 0xffff
}

// Adjust corrects a checksum for a 16-bit word of what it covers that has become another (RFC 1624).
func Adjust(checksum []byte, from, to uint16) {
	old := binary.BigEndian.Uint16(checksum)
	binary.BigEndian.PutUint16(checksum, ^Fold(uint64(^old)+uint64(^from)+uint64(to)))
}
