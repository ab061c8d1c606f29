package wireguard

import (
	"bytes"
	"encoding/hex"
	"fmt"
	mathbits "math/bits"
	"net/netip"
	"strings"
	"time"

	"github.com/skeinmesh/skein/dataplane"
)

// encode writes a batch in wireguard-go's configuration protocol.
func encode(batch []Op) string {
	var b strings.Builder
	for _, op := range batch {
		if op.PrivateKey != nil {
			fmt.Fprintf(&b, "private_key=%x\n", op.PrivateKey[:])
		}
		if op.Mark != nil {
			fmt.Fprintf(&b, "fwmark=%d\n", *op.Mark)
		}
		if op.Port != nil {
			fmt.Fprintf(&b, "listen_port=%d\n", *op.Port)
		}
	}
	for _, op := range batch {
		if op.Peer != nil {
			encodePeer(&b, *op.Peer)
		}
	}
	return b.String()
}

func encodePeer(b *strings.Builder, p PeerOp) {
	fmt.Fprintf(b, "public_key=%x\n", p.Key[:])
	if p.Action == Remove {
		b.WriteString("remove=true\n")
		return
	}
	if p.Action == Update {
		b.WriteString("update_only=true\n")
	}
	if p.PresharedKey != nil {
		fmt.Fprintf(b, "preshared_key=%x\n", p.PresharedKey[:])
	}
	if p.Endpoint.IsValid() {
		fmt.Fprintf(b, "endpoint=%s\n", p.Endpoint)
	}
	if p.Keepalive != nil {
		fmt.Fprintf(b, "persistent_keepalive_interval=%d\n", int(p.Keepalive.Seconds()))
	}
	for _, ip := range p.Gain {
		fmt.Fprintf(b, "allowed_ip=%s\n", ip)
	}
	for _, ip := range p.Lose {
		fmt.Fprintf(b, "allowed_ip=-%s\n", ip)
	}
}

// ParseStatus reads what wireguard-go answers when it is asked for its peers (device.IpcGetOperation); sorted by key.
func ParseStatus(text []byte) ([]dataplane.PeerStatus, error) {
	_, peers, err := decode(text, false)
	return peers, err
}

// decode reads what a device answers in that protocol. Keys it does not know are ignored. Without
// state only the peers' status is read, which allocates next to nothing.
func decode(text []byte, withState bool) (State, []dataplane.PeerStatus, error) {
	d := decoder{withState: withState, state: State{Peers: map[dataplane.Key]dataplane.Peer{}}}
	d.all = make([]dataplane.PeerStatus, 0, bytes.Count(text, []byte("public_key=")))
	for n := 1; len(text) > 0; n++ {
		line, rest, _ := bytes.Cut(text, []byte{'\n'})
		text = rest
		k, v, ok := bytes.Cut(line, []byte{'='})
		if !ok {
			return State{}, nil, fmt.Errorf("device state, line %d: no =", n)
		}
		if err := d.line(k, v); err != nil {
			return State{}, nil, fmt.Errorf("device state, line %d, %s: %w", n, k, err)
		}
	}
	d.endPeer()
	sortStatus(d.all)
	return d.state, d.all, nil
}

type decoder struct {
	withState bool
	state     State
	all       []dataplane.PeerStatus
	inPeer    bool
	peer      dataplane.Peer
	status    dataplane.PeerStatus
	sec       int64
	nsec      int64
}

func (d *decoder) endPeer() {
	if !d.inPeer {
		return
	}
	if d.sec != 0 || d.nsec != 0 {
		d.status.LastHandshake = time.Unix(d.sec, d.nsec)
	}
	if d.withState {
		d.peer.Endpoint = d.status.Endpoint
		d.peer.AllowedIPs = normal(d.peer.AllowedIPs)
		d.state.Peers[d.status.PublicKey] = d.peer
	}
	d.all = append(d.all, d.status)
	d.peer, d.status, d.sec, d.nsec = dataplane.Peer{}, dataplane.PeerStatus{}, 0, 0
}

func (d *decoder) line(k, v []byte) (err error) {
	var n uint64
	switch string(k) {
	case "public_key":
		d.endPeer()
		d.inPeer = true
		d.status.PublicKey, err = hexKey(v)
	case "endpoint":
		var a netip.AddrPort
		a, err = netip.ParseAddrPort(string(v))
		d.status.Endpoint = unmapped(a)
	case "last_handshake_time_sec":
		n, err = number(v, 62)
		d.sec = int64(n)
	case "last_handshake_time_nsec":
		n, err = number(v, 62)
		d.nsec = int64(n)
	case "rx_bytes":
		d.status.RxBytes, err = number(v, 64)
	case "tx_bytes":
		d.status.TxBytes, err = number(v, 64)
	default:
		if d.withState {
			return d.stateLine(k, v)
		}
	}
	return err
}

func (d *decoder) stateLine(k, v []byte) (err error) {
	var n uint64
	switch string(k) {
	case "private_key":
		d.state.PrivateKey, err = hexKey(v)
	case "listen_port":
		n, err = number(v, 16)
		d.state.Port = int(n)
	case "fwmark":
		n, err = number(v, 32)
		d.state.Mark = uint32(n)
	case "preshared_key":
		d.peer.PresharedKey, err = hexKey(v)
	case "persistent_keepalive_interval":
		n, err = number(v, 16)
		d.peer.Keepalive = time.Duration(n) * time.Second
	case "allowed_ip":
		var p netip.Prefix
		p, err = netip.ParsePrefix(string(v))
		d.peer.AllowedIPs = append(d.peer.AllowedIPs, p)
	}
	return err
}

// number reads a decimal number without allocating.
func number(b []byte, bits int) (n uint64, err error) {
	const most = 20 // digits of 2^64
	if len(b) == 0 || len(b) > most {
		return 0, fmt.Errorf("%q is not a number", b)
	}
	for _, c := range b {
		if c < '0' || c > '9' {
			return 0, fmt.Errorf("%q is not a number", b)
		}
		hi, lo := mathbits.Mul64(n, 10)
		sum, carry := mathbits.Add64(lo, uint64(c-'0'), 0)
		if hi+carry != 0 {
			return 0, fmt.Errorf("%q is too large", b)
		}
		n = sum
	}
	if bits < 64 && n >= 1<<bits {
		return 0, fmt.Errorf("%q is too large", b)
	}
	return n, nil
}

func hexKey(s []byte) (k dataplane.Key, err error) {
	if len(s) != 2*len(k) {
		return k, fmt.Errorf("a key has %d hexadecimal digits, this has %d", 2*len(k), len(s))
	}
	_, err = hex.Decode(k[:], s)
	return k, err
}
