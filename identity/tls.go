package identity

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"math/big"
	"time"
)

// ALPN protocols of skein's TLS listeners.
const (
	ALPNRaft   = "skein-raft"
	ALPNRPC    = "skein-rpc"
	ALPNGossip = "skein-gossip"
	ALPNJoin   = "skein-join"
	ALPNRelay  = "skein-relay"  // a relay session
	ALPNSplice = "skein-splice" // one end of a stream that a relay joins to another
)

// ErrUnknownPeer is returned when the other end proves a key that is not the one wanted.
var ErrUnknownPeer = errors.New("the other end's identity key is not the one expected")

// Verify decides whether the owner of a key may be at the other end.
type Verify func(key ed25519.PublicKey) error

// Expect accepts exactly one key.
func Expect(want ed25519.PublicKey) Verify {
	return func(key ed25519.PublicKey) error {
		if !want.Equal(key) {
			return fmt.Errorf("%w: want node %s, have node %s", ErrUnknownPeer, IDOf(want), IDOf(key))
		}
		return nil
	}
}

// Certificate is a self-signed certificate that carries the identity key. Its dates are wide on
// purpose: peers check the key against the roster and never the clock.
func (k *Key) Certificate() (tls.Certificate, error) { return k.certificate() }

func (k *Key) makeCertificate() (tls.Certificate, error) {
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		Subject:      pkix.Name{CommonName: k.id.String()},
		NotBefore:    time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC),
		NotAfter:     time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC),
		KeyUsage:     x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k.private)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("make the identity certificate: %w", err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: k.private}, nil
}

// ServerTLS is the configuration of a listener. verify runs on every client's key with the protocol
// that was negotiated, so that joiners who are not members yet can be let in for ALPNJoin alone.
func (k *Key) ServerTLS(protocols []string,
	verify func(alpn string, key ed25519.PublicKey) error) (*tls.Config, error) {
	c, err := k.base(func(s tls.ConnectionState, key ed25519.PublicKey) error {
		return verify(s.NegotiatedProtocol, key)
	})
	if err != nil {
		return nil, err
	}
	c.ClientAuth = tls.RequireAnyClientCert
	c.NextProtos = protocols
	return c, nil
}

// ClientTLS is the configuration of a dialer that speaks one protocol and demands a key.
func (k *Key) ClientTLS(alpn string, verify Verify) (*tls.Config, error) {
	c, err := k.base(func(s tls.ConnectionState, key ed25519.PublicKey) error {
		if s.NegotiatedProtocol != alpn {
			return fmt.Errorf("the other end does not speak %s", alpn)
		}
		return verify(key)
	})
	if err != nil {
		return nil, err
	}
	c.InsecureSkipVerify = true // names and dates mean nothing here; VerifyConnection checks the key
	c.NextProtos = []string{alpn}
	return c, nil
}

func (k *Key) base(check func(tls.ConnectionState, ed25519.PublicKey) error) (*tls.Config, error) {
	cert, err := k.Certificate()
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:             tls.VersionTLS13,
		Certificates:           []tls.Certificate{cert},
		SessionTicketsDisabled: true, // a resumed session would not check the roster again
		VerifyConnection: func(s tls.ConnectionState) error {
			key, err := PeerKey(s)
			if err != nil {
				return err
			}
			return check(s, key)
		},
	}, nil
}

// PeerKey is the identity key that the other end of a TLS connection has proved.
func PeerKey(s tls.ConnectionState) (ed25519.PublicKey, error) {
	if len(s.PeerCertificates) == 0 {
		return nil, errors.New("the other end showed no certificate")
	}
	key, ok := s.PeerCertificates[0].PublicKey.(ed25519.PublicKey)
	if !ok {
		return nil, errors.New("the other end's certificate carries no Ed25519 key")
	}
	return key, nil
}
