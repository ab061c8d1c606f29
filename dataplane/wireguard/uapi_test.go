package wireguard

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestDecodeReadsADevice(t *testing.T) {
	k := strings.Repeat("ab", 32)
	text := fmt.Sprintf(
		"private_key=%s\nlisten_port=51820\nfwmark=32\npublic_key=%s\npreshared_key=%s\nprotocol_version=1\n"+
			"endpoint=[2001:db8::1]:7\n"+
			"last_handshake_time_sec=5\nlast_handshake_time_nsec=6\ntx_bytes=10\nrx_bytes=20\n"+
			"persistent_keepalive_interval=25\nallowed_ip=10.4.0.2/32\nallowed_ip=10.1.0.0/24\nsome_new_key=x\n", k, k, k)
	s, status, err := decode([]byte(text), true)
	if err != nil {
		t.Fatal(err)
	}
	p := s.Peers[s.PrivateKey]
	if s.Port != 51820 || s.Mark != 32 || len(s.Peers) != 1 || p.Keepalive.Seconds() != 25 || len(p.AllowedIPs) != 2 ||
		p.AllowedIPs[0].String() != "10.1.0.0/24" || p.Endpoint.String() != "[2001:db8::1]:7" {
		t.Errorf("state: %+v", s)
	}
	if len(status) != 1 || status[0].TxBytes != 10 || status[0].RxBytes != 20 || status[0].LastHandshake.Unix() != 5 ||
		status[0].Endpoint != p.Endpoint {
		t.Errorf("status: %+v", status)
	}
}

func TestDecodeNamesTheBadLine(t *testing.T) {
	for _, bad := range []string{"private_key=12", "nonsense", "listen_port=x", "public_key=zz", "endpoint=1.2.3.4",
		"allowed_ip=10.0.0.0", "fwmark=-1", "fwmark=4294967296", "rx_bytes=18446744073709551616", "tx_bytes="} {
		if _, _, err := decode([]byte("fwmark=1\n"+bad), true); err == nil || !strings.Contains(err.Error(), "line 2") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}

func TestOperationsSayNoSecret(t *testing.T) {
	s := fleet(3)
	for _, op := range Diff(s, State{}, Options{}) {
		if k := op.Peer; k != nil && strings.Contains(op.String(), k.PresharedKey.String()) ||
			strings.Contains(op.String(), s.PrivateKey.String()) {
			t.Errorf("%s", op)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add([]byte("private_key=00\nlisten_port=1\npublic_key=" + strings.Repeat("01", 32) +
		"\nendpoint=1.2.3.4:5\nallowed_ip=10.0.0.0/8\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		s, status, err := decode(b, true)
		if _, light, lightErr := decode(b, false); err == nil && (lightErr != nil || len(light) != len(status)) {
			t.Errorf("status alone: %d peers and %v, want %d", len(light), lightErr, len(status))
		}
		if err == nil && len(status) < len(s.Peers) {
			t.Errorf("%d peers, status of %d", len(s.Peers), len(status))
		}
		if err == nil { // what it read can be compared
			if d := Diff(s, s, Options{Prune: true}); len(d) > 0 {
				t.Errorf("differs from itself: %v %s", d, cmp.Diff(s, s, equal))
			}
		}
	})
}
