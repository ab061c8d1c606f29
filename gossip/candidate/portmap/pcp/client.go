package pcp

import (
	"context"
	"errors"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
)

// Map asks a gateway for a mapping, or with no lifetime gives it back.
func Map(ctx context.Context, g ask.Gateway, w Wish) (Grant, error) {
	var grant Grant
	var final error
	err := ask.Do(ctx, g, EncodeMap(w), func(b []byte) error {
		got, err := DecodeMap(b, w)
		if errors.Is(err, ErrGarbled) {
			return err // a better one may come
		}
		grant, final = got, err
		return nil
	})
	return grant, errors.Join(err, final)
}

// Announce asks a gateway for its epoch.
func Announce(ctx context.Context, g ask.Gateway) (uint32, error) {
	var epoch uint32
	var final error
	err := ask.Do(ctx, g, EncodeAnnounce(g.Local), func(b []byte) error {
		got, err := DecodeAnnounce(b)
		if errors.Is(err, ErrGarbled) {
			return err
		}
		epoch, final = got, err
		return nil
	})
	return epoch, errors.Join(err, final)
}
