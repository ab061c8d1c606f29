package forced

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/simtime"
)

func text(f candidate.Found) string {
	var out []string
	for _, c := range f.Candidates {
		out = append(out, c.Address)
	}
	return strings.Join(out, " ")
}

func TestAddressesNeedNoLookup(t *testing.T) {
	for endpoint, want := range map[string]string{"": "", "198.51.100.7:99": "198.51.100.7:99",
		"[2001:db8::7]:99": "[2001:db8::7]:99", "127.0.0.1:99": ""} {
		s, err := New(endpoint, nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		if f := s.Look(t.Context(), candidate.Request{}); text(f) != want || f.Again != 0 || f.Problem != "" {
			t.Errorf("%s: %+v", endpoint, f)
		}
	}
	for _, bad := range []string{"home.example", "home.example:0", ":99"} {
		if _, err := New(bad, nil, nil); err == nil || !strings.Contains(err.Error(), "forceEndpoint") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestTheEndpointCanBeChanged(t *testing.T) {
	s, err := New("", nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	woken := 0
	r := candidate.Request{Wake: func() { woken++ }}
	for i, c := range []struct{ set, want string }{
		{"", ""}, {"198.51.100.7:99", "198.51.100.7:99"}, {"198.51.100.7:99", "198.51.100.7:99"},
		{"198.51.100.8:98", "198.51.100.8:98"}, {"nowhere", "198.51.100.8:98"}, {"", ""},
	} {
		if err := s.Set(c.set); (err != nil) != (c.set == "nowhere") {
			t.Errorf("%d: %v", i, err)
		}
		if f := s.Look(t.Context(), r); text(f) != c.want || f.Problem != "" {
			t.Errorf("%d: %q gives %+v", i, c.set, f)
		}
	}
	if woken != 3 {
		t.Errorf("three changes have woken it %d times", woken)
	}
}

// A name is followed when it changes, kept for a while when it cannot be looked up, and then given up.
func TestNameIsFollowedAndKept(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		answer, err := []string{"2001:db8::1", "198.51.100.2", "198.51.100.1", "198.51.100.1"}, error(nil)
		s, _ := New("home.example:99", func(_ context.Context, host string) ([]netip.Addr, error) {
			if host != "home.example" {
				t.Errorf("asked for %s", host)
			}
			var out []netip.Addr
			for _, a := range answer {
				out = append(out, netip.MustParseAddr(a))
			}
			return out, err
		}, nil)
		look := func(wantText, wantProblem string) {
			t.Helper()
			f := s.Look(t.Context(), candidate.Request{})
			if text(f) != wantText || !strings.Contains(f.Problem, wantProblem) || wantProblem == "" && f.Problem != "" ||
				(f.Problem == "") != (f.Help == "") {
				t.Errorf("%q, %q; want %q, %q", text(f), f.Problem, wantText, wantProblem)
			}
			if want := time.Minute; f.Problem == "" && f.Again != want {
				t.Errorf("again after %s", f.Again)
			}
		}
		look("198.51.100.1:99 198.51.100.2:99 [2001:db8::1]:99", "")
		answer = []string{"198.51.100.7"}
		look("198.51.100.7:99", "")
		answer, err = nil, errors.New("i/o timeout")
		look("198.51.100.7:99", "does not answer; its last address stays published until")
		time.Sleep(keepFailed - time.Minute)
		look("198.51.100.7:99", "stays published")
		time.Sleep(time.Minute)
		look("", "it is not published")
		answer, err = []string{"198.51.100.8"}, nil
		look("198.51.100.8:99", "")
		answer, err = nil, &net.DNSError{IsNotFound: true}
		look("198.51.100.8:99", "the name has no address; its last")
		time.Sleep(keepGone)
		look("", "the name has no address; it is not published")
	})
}

func TestHangingNameServiceIsGivenUp(t *testing.T) {
	simtime.Test(t, func(t *testing.T) {
		s, _ := New("home.example:99", func(ctx context.Context, _ string) ([]netip.Addr, error) {
			<-ctx.Done()
			return nil, ctx.Err()
		}, nil)
		start := time.Now()
		if f := s.Look(t.Context(), candidate.Request{}); f.Problem == "" || time.Since(start) > patience {
			t.Errorf("%+v after %s", f, time.Since(start))
		}
	})
}
