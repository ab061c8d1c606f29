package dataplane

import (
	"bytes"
	"encoding/base64"
)

// String is the key's usual base64 form. Print public keys only.
func (k Key) String() string { return base64.StdEncoding.EncodeToString(k[:]) }

// Short is enough of a public key to recognise it in a log line.
func (k Key) Short() string { return k.String()[:8] }

// IsZero says whether no key was given.
func (k Key) IsZero() bool { return k == Key{} }

// Compare orders keys by their bytes.
func (k Key) Compare(o Key) int { return bytes.Compare(k[:], o[:]) }
