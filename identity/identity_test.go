package identity_test

import (
	"bytes"
	"crypto/ed25519"
	"crypto/tls"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/identity"
)

func newKey(t testing.TB) *identity.Key {
	t.Helper()
	k, err := identity.NewKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func TestLoadOrCreate(t *testing.T) {
	dir := t.TempDir()
	key, wg, err := identity.LoadOrCreate(dir)
	if err != nil {
		t.Fatal(err)
	}
	again, wg2, err := identity.LoadOrCreate(dir)
	if err != nil || again.ID() != key.ID() || wg2 != wg {
		t.Fatalf("the second start has another identity: %v, %v", again.ID(), err)
	}
	for _, name := range []string{"identity.pem", "wireguard.pem"} {
		path := filepath.Join(dir, name)
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: mode %v, %v; want 0600", name, st.Mode(), err)
		}
		whole, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for how, bad := range map[string][]byte{
			"empty": {}, "cut short": whole[:len(whole)/2], "another kind": bytes.ReplaceAll(whole, []byte("SKEIN"),
				[]byte("OTHER")), "noise": []byte("noise"),
		} {
			if bytes.Equal(bad, whole) {
				continue
			}
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, _, err := identity.LoadOrCreate(dir); err == nil || !strings.Contains(err.Error(), path+" is damaged") {
				t.Errorf("%s %s: %v", name, how, err)
			}
			if left, _ := os.ReadFile(path); !bytes.Equal(left, bad) {
				t.Errorf("%s %s: it was overwritten", name, how)
			}
		}
		if err := os.WriteFile(path, whole, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*.new-*")); len(left) > 0 {
		t.Errorf("temporary files are left: %v", left)
	}
}

func TestPairKeys(t *testing.T) {
	a, _ := identity.NewWireGuardKey()
	b, _ := identity.NewWireGuardKey()
	pa, _ := a.Public()
	pb, _ := b.Public()
	cluster := identity.ClusterID{1}
	ab, err := identity.PairKey(a, pb, cluster, "probe")
	if err != nil {
		t.Fatal(err)
	}
	ba, err := identity.PairKey(b, pa, cluster, "probe")
	if err != nil || ab != ba {
		t.Errorf("the two ends derive different keys: %v", err)
	}
	if other, _ := identity.PairKey(a, pb, cluster, "else"); other == ab {
		t.Error("two purposes share a key")
	}
	if other, _ := identity.PairKey(a, pb, identity.ClusterID{2}, "probe"); other == ab {
		t.Error("two clusters share a key")
	}
	if _, err := identity.PairKey(a, identity.WireGuardKey{}, cluster, "probe"); err == nil {
		t.Error("a peer's key of low order is taken")
	}
}

// handshake joins a client and a server and gives each end's verdict.
func handshake(t *testing.T, server, client *tls.Config) (atServer, atClient error) {
	t.Helper()
	x, y := net.Pipe()
	s, c := tls.Server(x, server), tls.Client(y, client)
	done := make(chan error, 1)
	go func() {
		err := s.HandshakeContext(t.Context())
		if err == nil {
			_, err = s.Write([]byte("x"))
		}
		x.Close()
		done <- err
	}()
	atClient = c.HandshakeContext(t.Context())
	if atClient == nil {
		_, atClient = c.Read(make([]byte, 1))
	}
	y.Close()
	return <-done, atClient
}

func TestTLS(t *testing.T) {
	server, client, other := newKey(t), newKey(t), newKey(t)
	errNo := errors.New("not you")
	admit := func(alpn string, key ed25519.PublicKey) error {
		if alpn != "skein-join" && !key.Equal(client.Public()) {
			return errNo
		}
		return nil
	}
	for _, c := range []struct {
		name             string
		who              *identity.Key
		alpn             string
		want             *identity.Key
		atServer, atUser error
		in               bool
	}{
		{"both are who they should be", client, "skein-rpc", server, nil, nil, true},
		{"a stranger", other, "skein-rpc", server, errNo, nil, false},
		{"a stranger who joins", other, "skein-join", server, nil, nil, true},
		{"an impostor at the other end", client, "skein-rpc", other, nil, identity.ErrUnknownPeer, false},
		{"a protocol that is not spoken", client, "skein-raft", server, nil, nil, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			sc, err := server.ServerTLS([]string{"skein-rpc", "skein-join"}, admit)
			if err != nil {
				t.Fatal(err)
			}
			cc, err := c.who.ClientTLS(c.alpn, identity.Expect(c.want.Public()))
			if err != nil {
				t.Fatal(err)
			}
			atServer, atClient := handshake(t, sc, cc)
			if c.in != (atServer == nil && atClient == nil) {
				t.Fatalf("server %v, client %v", atServer, atClient)
			}
			if c.atServer != nil && !errors.Is(atServer, c.atServer) || c.atUser != nil && !errors.Is(atClient, c.atUser) {
				t.Errorf("server %v, client %v", atServer, atClient)
			}
		})
	}
	t.Run("a client without certificate", func(t *testing.T) {
		sc, err := server.ServerTLS([]string{"skein-join"}, admit)
		if err != nil {
			t.Fatal(err)
		}
		if atServer, _ := handshake(t, sc, &tls.Config{InsecureSkipVerify: true,
			NextProtos: []string{"skein-join"}}); atServer == nil {
			t.Error("it was let in")
		}
	})
}

func FuzzParseIDs(f *testing.F) {
	f.Add("0011223344556677")
	f.Add("00112233445566778899aabbccddeeff")
	f.Add("zz")
	f.Fuzz(func(t *testing.T, s string) {
		if id, err := identity.ParseID(s); err == nil && !strings.EqualFold(id.String(), s) {
			t.Fatalf("node %q reads as %s", s, id)
		}
		if c, err := identity.ParseClusterID(s); err == nil && !strings.EqualFold(c.String(), s) {
			t.Fatalf("cluster %q reads as %s", s, c)
		}
	})
}

// A host's WireGuard key changes on the disk, and the one of before is there until it is forgotten: the first of
// several.
func TestReplaceWireGuard(t *testing.T) {
	dir := t.TempDir()
	_, first, err := identity.LoadOrCreate(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, has, err := identity.Former(dir); has || err != nil {
		t.Errorf("a former key without a change: %v, %v", has, err)
	}
	var next identity.WireGuardKey
	for range 2 {
		if next, err = identity.NewWireGuardKey(); err != nil {
			t.Fatal(err)
		}
		if err := identity.ReplaceWireGuard(dir, next); err != nil {
			t.Fatal(err)
		}
		if _, have, err := identity.LoadOrCreate(dir); err != nil || have != next {
			t.Errorf("not the next key: %v", err)
		}
		if former, has, err := identity.Former(dir); !has || err != nil || former != first {
			t.Errorf("the former key is not the first one: %v, %v", has, err)
		}
	}
	for range 2 {
		if err := identity.ForgetFormer(dir); err != nil {
			t.Error(err)
		}
	}
	if _, has, err := identity.Former(dir); has || err != nil {
		t.Errorf("%v, %v", has, err)
	}
	fi, err := os.Stat(filepath.Join(dir, "wireguard.pem"))
	if err != nil {
		t.Fatal(err)
	}
	if fi.Mode().Perm() != 0o600 {
		t.Errorf("others may read the key: %v", fi.Mode())
	}
}
