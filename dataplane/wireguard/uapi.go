package wireguard

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"fmt"
	"net/netip"
	"strconv"
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

// decode reads what a device answers in that protocol. Keys it does not know are ignored.
func decode(text []byte) (State, []dataplane.PeerStatus, error) {
	d := decoder{state: State{Peers: map[dataplane.Key]dataplane.Peer{}}}
	sc := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; sc.Scan(); n++ {
		k, v, ok := strings.Cut(sc.Text(), "=")
		if !ok {
			return State{}, nil, fmt.Errorf("device state, line %d: no =", n)
		}
		if err := d.line(k, v); err != nil {
			return State{}, nil, fmt.Errorf("device state, line %d, %s: %w", n, k, err)
		}
	}
	if err := sc.Err(); err != nil {
		return State{}, nil, fmt.Errorf("device state: %w", err)
	}
	d.endPeer()
	sortStatus(d.all)
	return d.state, d.all, nil
}

type decoder struct {
	state  State
	all    []dataplane.PeerStatus
	inPeer bool
	peer   dataplane.Peer
	status dataplane.PeerStatus
	sec    int64
	nsec   int64
}

func (d *decoder) endPeer() {
	if !d.inPeer {
		return
	}
	d.peer.AllowedIPs = normal(d.peer.AllowedIPs)
	d.status.Endpoint = d.peer.Endpoint
	if d.sec != 0 || d.nsec != 0 {
		d.status.LastHandshake = time.Unix(d.sec, d.nsec)
	}
	d.state.Peers[d.status.PublicKey] = d.peer
	d.all = append(d.all, d.status)
	d.peer, d.status, d.sec, d.nsec = dataplane.Peer{}, dataplane.PeerStatus{}, 0, 0
}

func (d *decoder) line(k, v string) (err error) {
	switch k {
	case "private_key":
		d.state.PrivateKey, err = hexKey(v)
	case "listen_port":
		d.state.Port, err = strconv.Atoi(v)
	case "fwmark":
		var m uint64
		m, err = strconv.ParseUint(v, 10, 32)
		d.state.Mark = uint32(m)
	case "public_key":
		d.endPeer()
		d.inPeer = true
		d.status.PublicKey, err = hexKey(v)
	case "preshared_key":
		d.peer.PresharedKey, err = hexKey(v)
	case "endpoint":
		var a netip.AddrPort
		a, err = netip.ParseAddrPort(v)
		d.peer.Endpoint = unmapped(a)
	case "persistent_keepalive_interval":
		var s uint64
		s, err = strconv.ParseUint(v, 10, 16)
		d.peer.Keepalive = time.Duration(s) * time.Second
	case "allowed_ip":
		var p netip.Prefix
		p, err = netip.ParsePrefix(v)
		d.peer.AllowedIPs = append(d.peer.AllowedIPs, p)
	case "last_handshake_time_sec":
		d.sec, err = strconv.ParseInt(v, 10, 64)
	case "last_handshake_time_nsec":
		d.nsec, err = strconv.ParseInt(v, 10, 64)
	case "rx_bytes":
		d.status.RxBytes, err = strconv.ParseUint(v, 10, 64)
	case "tx_bytes":
		d.status.TxBytes, err = strconv.ParseUint(v, 10, 64)
	}
	return err
}

func hexKey(s string) (k dataplane.Key, err error) {
	if len(s) != 2*len(k) {
		return k, fmt.Errorf("a key has %d hexadecimal digits, this has %d", 2*len(k), len(s))
	}
	_, err = hex.Decode(k[:], []byte(s))
	return k, err
}
