package probe

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/internal/nattest"
)

func TestRights(t *testing.T) {
	host := nattest.New(t).Host(nattest.Public)
	tests := []struct {
		name string
		caps uint32
		want string
	}{
		{"CAP_NET_RAW alone", 1 << unix.CAP_NET_RAW, ""},
		{"none", 0, "needs CAP_NET_RAW"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var err error
			host.Do(func() {
				withCapabilities(t, tt.caps, func() {
					var s *Socket
					if s, err = Open(Config{Port: wgPort, Mark: 0x20}); err == nil {
						s.Close()
					}
				})
			})
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("open: %v, want %q", err, tt.want)
			}
		})
	}
}

// withCapabilities takes all but some of the first 32 capabilities away from this thread for a while.
func withCapabilities(t *testing.T, keep uint32, f func()) {
	t.Helper()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var before [2]unix.CapUserData
	if err := unix.Capget(&header, &before[0]); err != nil {
		t.Fatal(err)
	}
	now := before
	now[0].Effective, now[1].Effective = keep, 0
	if err := unix.Capset(&header, &now[0]); err != nil {
		t.Fatal(err)
	}
	f()
	if err := unix.Capset(&header, &before[0]); err != nil {
		t.Fatal(err)
	}
}
