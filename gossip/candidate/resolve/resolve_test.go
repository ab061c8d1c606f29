package resolve

import (
	"context"
	"errors"
	"net/netip"
	"strings"
	"testing"
)

func TestResolver(t *testing.T) {
	up := true
	r := New(func(_ context.Context, host string) ([]netip.Addr, error) {
		if !up || host != "home.example" {
			return nil, errors.New("no such host")
		}
		return []netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("198.51.100.1")}, nil
	})
	tests := []struct{ in, port, want string }{
		{"198.51.100.7:99", "", "198.51.100.7:99"},
		{"198.51.100.7", "3478", "198.51.100.7:3478"},
		{"[2001:db8::7]:99", "3478", "[2001:db8::7]:99"},
		{"2001:db8::7", "3478", "[2001:db8::7]:3478"},
		{"home.example:99", "", "198.51.100.1:99 [2001:db8::1]:99"},
		{"home.example", "", "error: want host:port"},
		{"home.example:0", "", "error: want host:port with a port"},
		{"home.example:x", "3478", "error: want host:port with a port"},
		{":99", "", "error: want host:port"},
		{"away.example:99", "", "error: away.example"},
	}
	for range 2 { // the second time the name service is away, and what it said is remembered
		for _, tt := range tests {
			found, err := r.Endpoint(t.Context(), tt.in, tt.port)
			if want, isErr := strings.CutPrefix(tt.want, "error: "); isErr {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("%q: %v, %v; want an error with %q", tt.in, found, err, want)
				}
				continue
			}
			var got []string
			for _, a := range found {
				got = append(got, a.String())
			}
			if err != nil || strings.Join(got, " ") != tt.want {
				t.Errorf("%q: %v, %v; want %s", tt.in, got, err, tt.want)
			}
		}
		up = false
	}
}
