package fou_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// streamBytes goes through each TCP connection. The emulated guest is slow.
func streamBytes() int64 {
	if wantKernel() {
		return 1 << 20
	}
	return 8 << 20
}

// carries sends all that a tunnel must carry, both ways.
func carries(t *testing.T, s *scene) {
	t.Helper()
	for _, c := range []struct {
		target netip.Addr
		most   int // bytes of UDP payload that fit
	}{{target4, mtu4 - 28}, {target6, mtu6 - 48}} {
		s.echo(t, c.target)
		u := s.dial(t, "udp", c.target)
		ask(t, u, []byte("hello"))
		ask(t, u, bytes.Repeat([]byte{7}, c.most))
		if _, err := u.Write(make([]byte, c.most+1)); !errors.Is(err, unix.EMSGSIZE) {
			t.Errorf("%s: a datagram of one byte too many: %v, want message too long", c.target, err)
		}
		stream(t, s.dial(t, "tcp", c.target), streamBytes())
	}
	near, err := s.near.Stats()
	if err != nil || near.RxPackets == 0 || near.TxPackets == 0 || near.RxBytes < uint64(streamBytes()) ||
		near.TxBytes < uint64(streamBytes()) {
		t.Errorf("client's counters: %+v, %v", near, err)
	}
	if near.DroppedMalformed != 0 || near.DroppedStranger != 0 {
		t.Errorf("client's counters: %+v, want nothing dropped as malformed or a stranger's", near)
	}
	far, err := s.far.Stats()
	if err != nil || far.RxBytes < uint64(streamBytes()) || far.TxBytes < uint64(streamBytes()) ||
		far.DroppedMalformed != 0 || far.DroppedStranger != 0 {
		t.Errorf("gateway's counters: %+v, %v", far, err)
	}
}

// stream sends bytes through an echo and compares what comes back.
func stream(t testing.TB, c net.Conn, size int64) {
	t.Helper()
	defer c.Close()
	c.SetDeadline(time.Now().Add(60 * time.Second))
	sent, got := sha256.New(), sha256.New()
	done := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.MultiWriter(c, sent), io.LimitReader(rand.NewChaCha8([32]byte{1}), size))
		if err == nil {
			err = c.(*net.TCPConn).CloseWrite()
		}
		done <- err
	}()
	n, err := io.Copy(got, c)
	if err := errors.Join(err, <-done); err != nil || n != size {
		t.Fatalf("%s: %d of %d bytes came back: %v", c.RemoteAddr(), n, size, err)
	}
	if !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Errorf("%s: other bytes came back", c.RemoteAddr())
	}
}
