package kube

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"os"
	"time"
)

// authority is the cluster's certificate authority, in memory.
type authority struct {
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pem  []byte
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kubernetes"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, key.Public(), key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &authority{key: key, cert: cert, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}, err
}

// issue makes a certificate for name in groups, valid for addresses, and returns it with its key, both PEM.
func (a *authority) issue(name string, groups []string, addresses ...netip.Addr) (cert, key []byte, err error) {
	now := time.Now()
	return a.issueFor(now.Add(-time.Hour), now.Add(24*time.Hour), name, groups, apiserverNames, addresses...)
}

// apiserverNames are the names by which clients know the apiserver.
var apiserverNames = []string{
	"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local",
}

// issueFor does that with another time in which it is valid, and other names than the apiserver's.
func (a *authority) issueFor(from, until time.Time, name string, groups, dns []string,
	addresses ...netip.Addr) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 100))
	if err != nil {
		return nil, nil, err
	}
	t := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name, Organization: groups},
		NotBefore: from, NotAfter: until,
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		DNSNames:    dns,
	}
	for _, ip := range addresses {
		t.IPAddresses = append(t.IPAddresses, net.IP(ip.AsSlice()))
	}
	der, err := x509.CreateCertificate(rand.Reader, t, a.cert, k.Public(), a.key)
	if err != nil {
		return nil, nil, err
	}
	kb, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return nil, nil, err
	}
	cert = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	return cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: kb}), nil
}

// files are what the control plane reads, in Dir.
func (c *Cluster) files() error {
	var err error
	if c.ca, err = newAuthority(); err != nil {
		return fmt.Errorf("certificate authority: %w", err)
	}
	front, err := newAuthority() // of the apiserver as a client of others, for its word about users
	if err != nil {
		return fmt.Errorf("certificate authority: %w", err)
	}
	write := func(name string, b []byte) {
		err = errors.Join(err, os.WriteFile(c.file(name), b, 0o600))
	}
	pair := func(a *authority, file, user string, groups []string, addresses ...netip.Addr) {
		cert, key, e := a.issue(user, groups, addresses...)
		err = errors.Join(err, e)
		write(file+".crt", cert)
		write(file+".key", key)
	}
	write("ca.crt", c.ca.pem)
	write("front-ca.crt", front.pem)
	key, e := c.ca.keyPEM()
	err = errors.Join(err, e)
	write("ca.key", key)
	serving := append([]netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.MustParseAddr("10.96.0.1")}, c.Addresses...)
	pair(c.ca, "apiserver", "skein-test-apiserver", nil, serving...)
	pair(c.ca, "admin", "skein-test-admin", []string{"system:masters"})
	pair(c.ca, "service-accounts", "skein-test-service-accounts", nil)
	pair(front, "front-proxy", "front-proxy", nil)
	for _, name := range []string{"controllers", "scheduler"} {
		user := map[string]string{"controllers": "system:kube-controller-manager", "scheduler": "system:kube-scheduler"}[name]
		err = errors.Join(err, c.KubeconfigFor(c.file(name+".kubeconfig"), user))
	}
	return err
}

func (a *authority) keyPEM() ([]byte, error) {
	b, err := x509.MarshalPKCS8PrivateKey(a.key)
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: b}), err
}
