package natpmp

import (
	"context"
	"errors"
	"net/netip"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
)

// Address asks a gateway for its address outside and its epoch.
func Address(ctx context.Context, g ask.Gateway) (outer netip.Addr, epoch uint32, err error) {
	var final error
	err = ask.Do(ctx, g, EncodeAddress(), func(b []byte) error {
		a, e, err := DecodeAddress(b)
		if errors.Is(err, ErrGarbled) {
			return err // a better one may come
		}
		outer, epoch, final = a, e, err
		return nil
	})
	return outer, epoch, errors.Join(err, final)
}

// Map asks a gateway for a mapping, or with no lifetime gives it back.
func Map(ctx context.Context, g ask.Gateway, w Wish) (Grant, error) {
	var grant Grant
	var final error
	err := ask.Do(ctx, g, EncodeMap(w), func(b []byte) error {
		got, err := DecodeMap(b, w)
		if errors.Is(err, ErrGarbled) {
			return err
		}
		grant, final = got, err
		return nil
	})
	return grant, errors.Join(err, final)
}
