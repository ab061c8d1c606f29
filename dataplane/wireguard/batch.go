package wireguard

// One message to the kernel holds at most this many peers and allowed IPs: what wgctrl sends in one.
const (
	batchPeers      = 32
	batchAllowedIPs = 256
)

// Batches groups operations into messages, in order. A peer with more allowed IPs than fit is spread
// over several.
func Batches(ops []Op) [][]Op {
	var out [][]Op
	var cur []Op
	peers, ips := 0, 0
	flush := func() {
		if len(cur) > 0 {
			out = append(out, cur)
		}
		cur, peers, ips = nil, 0, 0
	}
	seen := map[[32]byte]bool{}
	for _, op := range split(ops) {
		n := 0
		if p := op.Peer; p != nil {
			n = len(p.Gain) + len(p.Final)
			if peers+1 > batchPeers || ips+n > batchAllowedIPs || seen[p.Key] {
				flush()
				clear(seen)
			}
			seen[p.Key] = true
			peers++
		} else if len(cur) > 0 {
			flush() // two device changes never share a message
		}
		ips += n
		cur = append(cur, op)
	}
	flush()
	return out
}

// split cuts operations with too many allowed IPs into several on the same peer.
func split(ops []Op) []Op {
	out := make([]Op, 0, len(ops))
	for _, op := range ops {
		p := op.Peer
		for p != nil && len(p.Gain) > batchAllowedIPs {
			head := *p
			head.Gain = p.Gain[:batchAllowedIPs:batchAllowedIPs]
			out = append(out, Op{Peer: &head})
			p = &PeerOp{Action: Update, Key: p.Key, Gain: p.Gain[batchAllowedIPs:]}
			op = Op{Peer: p}
		}
		if p != nil && len(p.Final) > batchAllowedIPs {
			head := *p
			head.Final = p.Final[:batchAllowedIPs:batchAllowedIPs]
			out = append(out, Op{Peer: &head})
			out = append(out, split([]Op{{Peer: &PeerOp{Action: Update, Key: p.Key, Gain: p.Final[batchAllowedIPs:]}}})...)
			continue
		}
		out = append(out, op)
	}
	return out
}
