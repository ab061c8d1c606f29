package imds

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/ipv4"

	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/internal/nattest"
)

const childEnv = "SKEIN_IMDS_CHILD" // how many looks; it is in the namespace as a whole

func TestMain(m *testing.M) {
	n, err := strconv.Atoi(os.Getenv(childEnv))
	if err != nil {
		os.Exit(m.Run())
	}
	s := New(nattest.WireGuardPort, 0x20, nil)
	out := json.NewEncoder(os.Stdout)
	for range n {
		start := time.Now()
		f := s.Look(context.Background(), candidate.Request{})
		_ = out.Encode(said{f, time.Since(start)})
	}
}

type said struct {
	Found candidate.Found
	Took  time.Duration
}

// service speaks the protocol: a token by PUT with a lifetime, values by GET with the token, everything else refused.
type service struct {
	mu     sync.Mutex
	values map[string]string
	tokens int
	uses   int // of one token, before it is forgotten; 0: no limit
	left   int
	status int // for everything; 0: as it should be
}

func (s *service) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.status != 0 {
		w.Header().Set("Location", "http://127.0.0.1/")
		w.WriteHeader(s.status)
		return
	}
	token := fmt.Sprintf("AQAEA-token-%d==", s.tokens)
	if r.URL.Path == "/latest/api/token" {
		life, err := strconv.Atoi(r.Header.Get("X-aws-ec2-metadata-token-ttl-seconds"))
		switch {
		case r.Method != http.MethodPut:
			w.WriteHeader(http.StatusMethodNotAllowed)
		case err != nil || life < 1 || life > 21600 || r.Header.Get("X-Forwarded-For") != "":
			w.WriteHeader(http.StatusBadRequest)
		default:
			s.tokens++
			s.left = s.uses
			fmt.Fprintf(w, "AQAEA-token-%d==", s.tokens)
		}
		return
	}
	forgotten := s.uses > 0 && s.left == 0
	if r.Method != http.MethodGet || r.Header.Get("X-aws-ec2-metadata-token") != token || s.tokens == 0 || forgotten {
		w.WriteHeader(http.StatusUnauthorized)
		return
	}
	s.left--
	v, ok := s.values[strings.TrimPrefix(r.URL.Path, "/latest/meta-data/")]
	if !ok {
		w.WriteHeader(http.StatusNotFound)
		return
	}
	fmt.Fprint(w, v)
}

// look runs a service at 169.254.169.254 in a namespace, and looks n times from there. Its answers leave with hop limit
// 1, as the real one's do.
func look(t *testing.T, s *service, n int) []said {
	t.Helper()
	host := nattest.New(t).Host(nattest.Public)
	host.AddAddress("lo", "169.254.169.254/32")
	if s != nil {
		host.Do(func() {
			l, err := net.Listen("tcp4", "169.254.169.254:80")
			if err != nil {
				t.Fatal(err)
			}
			server := &http.Server{Handler: s, ConnContext: func(ctx context.Context, c net.Conn) context.Context {
				if err := ipv4.NewConn(c).SetTTL(1); err != nil {
					t.Error(err)
				}
				return ctx
			}}
			go server.Serve(l)
			t.Cleanup(func() { server.Close() })
		})
	}
	var out strings.Builder
	if err := host.Command(func(c *exec.Cmd) error {
		c.Env = append(os.Environ(), childEnv+"="+strconv.Itoa(n))
		c.Stdout, c.Stderr = &out, os.Stderr
		return c.Run()
	}, os.Args[0]); err != nil {
		t.Fatal(err)
	}
	var all []said
	for d := json.NewDecoder(strings.NewReader(out.String())); len(all) < n; {
		var w said
		if err := d.Decode(&w); err != nil {
			t.Fatal(err)
		}
		all = append(all, w)
	}
	return all
}

func text(f candidate.Found) string {
	var out []string
	for _, c := range f.Candidates {
		out = append(out, c.Address+" "+c.Source)
		if at, err := netip.ParseAddrPort(c.Address); err != nil || !slices.Contains(f.Elastic, at.Addr()) {
			out = append(out, "which is not among the elastic addresses")
		}
	}
	return strings.Join(out, ", ")
}

func TestElasticAddressIsFound(t *testing.T) {
	s := &service{values: map[string]string{
		"public-ipv4":              "203.0.113.25",
		"network/interfaces/macs/": "02:29:96:8f:6a:2d/\n02:13:37:00:00:01/\n",
		"network/interfaces/macs/02:29:96:8f:6a:2d/public-ipv4s": "203.0.113.25\n203.0.113.26",
		"network/interfaces/macs/02:29:96:8f:6a:2d/ipv6s":        "2001:db8:8:4::2",
	}}
	for _, w := range look(t, s, 3) {
		if got := text(w.Found); got != "203.0.113.25:51820 imds, 203.0.113.26:51820 imds, [2001:db8:8:4::2]:51820 imds" ||
			w.Found.Again != lookEvery {
			t.Errorf("found %s, %+v", got, w.Found)
		}
	}
	if s.tokens != 1 {
		t.Errorf("%d tokens were fetched for three looks, want one", s.tokens)
	}
}

func TestTokenThatIsForgottenIsFetchedAgain(t *testing.T) {
	s := &service{uses: 2, values: map[string]string{"public-ipv4": "203.0.113.25"}}
	for _, w := range look(t, s, 3) {
		if got := text(w.Found); got != "203.0.113.25:51820 imds" {
			t.Errorf("found %s, %v", got, w.Found.Notes)
		}
	}
	if s.tokens != 3 {
		t.Errorf("%d tokens", s.tokens)
	}
}

func TestServicesThatHaveNothingOrLie(t *testing.T) {
	for _, tt := range []struct {
		name string
		s    *service
		want string // in the note
	}{
		{"no public address", &service{}, "no public address"},
		{"loopback", &service{values: map[string]string{"public-ipv4": "127.0.0.1"}}, "not public"},
		{"private", &service{values: map[string]string{"public-ipv4": "10.0.0.1"}}, "not public"},
		{"no address", &service{values: map[string]string{"public-ipv4": "<html>login</html>"}}, "is not an address"},
		{"without end", &service{values: map[string]string{"public-ipv4": strings.Repeat("203.0.113.25\n", 1000)}},
			"more than"},
		{"switched off", &service{status: http.StatusForbidden}, "switched off"},
		{"a portal that redirects", &service{status: http.StatusFound}, "status 302"},
		{"nobody", nil, "hop limit"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			w := look(t, tt.s, 1)[0]
			if n := w.Found.Notes; len(w.Found.Candidates) != 0 || len(n) != 1 || !strings.Contains(n[0].Text, tt.want) {
				t.Errorf("found %+v", w.Found)
			}
			if w.Took > 5*time.Second {
				t.Errorf("took %s", w.Took)
			}
		})
	}
}

func TestLikely(t *testing.T) {
	dir := t.TempDir()
	if Likely(dir) {
		t.Error("a host without firmware is Amazon's")
	}
	for content, want := range map[string]bool{"Amazon EC2\n": true, "QEMU\n": false, "4.11.amazon\n": true} {
		if err := os.WriteFile(filepath.Join(dir, "bios_version"), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		if Likely(dir) != want {
			t.Errorf("%q: %v", content, !want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("203.0.113.25\n2001:db8::1\n")
	f.Add("02:29:96:8f:6a:2d/\n")
	f.Fuzz(func(t *testing.T, s string) {
		addrs, err := parseAddrs(s)
		for _, a := range addrs {
			if err == nil && (a.IsPrivate() || !a.IsGlobalUnicast()) {
				t.Fatalf("believed %s", a)
			}
		}
		for _, mac := range parseLinks(s) {
			if strings.ContainsAny(mac, "/?#% ") {
				t.Fatalf("path %q", mac)
			}
		}
	})
}
