package rekey

import (
	"errors"

	"github.com/skeinmesh/skein/identity"
)

// Keys are this host's WireGuard keys. They differ between the change of the device and the event about it.
type Keys struct {
	// Agreed is the key that the log has: keys of control packets and of probes follow from it at both ends.
	Agreed, AgreedPublic identity.WireGuardKey
	// Device is the key of the tunnels.
	Device, DevicePublic identity.WireGuardKey
}

// NewKeys derives the public keys.
func NewKeys(agreed, device identity.WireGuardKey) (*Keys, error) {
	k := &Keys{Agreed: agreed, Device: device}
	var err1, err2 error
	k.AgreedPublic, err1 = agreed.Public()
	k.DevicePublic, err2 = device.Public()
	return k, errors.Join(err1, err2)
}

// Settled reports whether the log has the device's key.
func (k *Keys) Settled() bool { return k.Agreed == k.Device }

// Load reads this host's keys from its state directory, and makes them at the first start. A former key on the disk
// means that the agent ended in the middle of a change.
func Load(dir string) (*identity.Key, *Keys, error) {
	key, device, err := identity.LoadOrCreate(dir)
	if err != nil {
		return nil, nil, err
	}
	former, has, err := identity.Former(dir)
	if err != nil {
		return nil, nil, err
	}
	agreed := device
	switch {
	case has && former == device: // it ended before it changed anything
		if err := identity.ForgetFormer(dir); err != nil {
			return nil, nil, err
		}
	case has:
		agreed = former
	}
	keys, err := NewKeys(agreed, device)
	return key, keys, err
}
