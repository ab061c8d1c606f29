package probe

import (
	"fmt"

	"golang.org/x/net/bpf"
)

const (
	udpHeader   = 8
	stunCookie  = 0x2112a442 // at offset 4 of every STUN message, RFC 8489 section 5
	acceptBytes = 0x40000    // whole datagram
)

// filter is the program that a raw socket runs on every UDP packet that the host takes in. It passes
// what goes to port and is either ours or STUN. An IPv4 raw socket shows the packet from its IP header
// on, an IPv6 one from its UDP header on.
//
// The test for STUN's cookie looks at bytes that WireGuard fills with a receiver index, so a message that begins
// as WireGuard's do (a type and three zero bytes) is passed over, as is one with the two bits set that STUN has clear.
func filter(port uint16, ipv6 bool) ([]bpf.RawInstruction, error) {
	load := func(off uint32, size int) bpf.Instruction { return bpf.LoadIndirect{Off: off, Size: size} }
	var program []bpf.Instruction
	if ipv6 {
		program = append(program, bpf.LoadConstant{Dst: bpf.RegX, Val: 0})
	} else {
		program = append(program, bpf.LoadMemShift{Off: 0}) // X = length of the IP header
	}
	program = append(program,
		load(2, 2), // UDP destination port
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: uint32(port), SkipTrue: 7},
		load(udpHeader, 4),
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: magic, SkipTrue: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsNotSet, Val: 0x00ffffff, SkipTrue: 4},
		bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: 0xc0000000, SkipTrue: 3},
		load(udpHeader+4, 4),
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: stunCookie, SkipTrue: 1},
		bpf.RetConstant{Val: acceptBytes},
		bpf.RetConstant{Val: 0},
	)
	raw, err := bpf.Assemble(program)
	if err != nil {
		return nil, fmt.Errorf("assemble the filter for UDP port %d: %w", port, err)
	}
	return raw, nil
}
