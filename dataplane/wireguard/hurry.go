package wireguard

import (
	"golang.zx2c4.com/wireguard/device"

	"github.com/skeinmesh/skein/dataplane"
)

// hurry lets peers whose endpoint is about to be set, and who have never had a session, start their
// handshake then. wireguard-go counts an attempt that had nowhere to go like any other and waits five
// seconds for the next, also when the peer's endpoint comes a moment after the first packet to it;
// in a mesh, that is the rule. It runs before the endpoint is set: setting it sends what waits, once,
// and a second initiation right after would spoil the answer to the first.
func (d *userspaceDevice) hurry(batch []Op) {
	var fresh []dataplane.Key
	for _, op := range batch {
		if op.Peer != nil && op.Peer.Endpoint.IsValid() && !d.met[op.Peer.Key] {
			fresh = append(fresh, op.Peer.Key)
		}
	}
	if len(fresh) == 0 {
		return
	}
	_, peers, err := d.read(false)
	if err != nil {
		return // the next read of the device will say so
	}
	clear(d.met)
	for _, p := range peers {
		if !p.LastHandshake.IsZero() {
			d.met[p.PublicKey] = true
		}
	}
	for _, key := range fresh {
		if d.met[key] {
			continue
		}
		if p := d.dev.LookupPeer(device.NoisePublicKey(key)); p != nil {
			p.ExpireCurrentKeypairs() // there are none; it is the attempt that is forgotten
		}
	}
}
