package lab

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/ping"
)

// defaultPort is the one that a step serves, or asks, when it names none.
const defaultPort = 80

// Paths of a server. At flowPath it sends back whatever comes, until the client closes.
const (
	whoPath  = "/"
	flowPath = "/flow"
)

// Seen is how a server saw a client.
type Seen struct {
	Address netip.Addr `json:"address"`
	Port    uint16     `json:"port"`
}

// server is what Serve has started in one place: HTTP over TCP, and echoes over UDP on the same port.
type server struct {
	place string
	http  *http.Server
	udp   net.PacketConn
	done  *sync.WaitGroup
}

// Serve starts servers. They belong to this process, and end with it or with Down.
func (l *Lab) Serve(s Serve) error {
	for _, place := range s.Nodes {
		if err := l.serve(place, s.Port); err != nil {
			return fmt.Errorf("serve port %d on %s: %w", s.Port, place, err)
		}
	}
	return nil
}

func (l *Lab) serve(place string, port int) error {
	_, ns, err := l.place(place)
	if err != nil {
		return err
	}
	var tcp net.Listener
	var udp net.PacketConn
	at := net.JoinHostPort("", strconv.Itoa(port))
	if err := fabric.In(ns, func() (err error) {
		if tcp, err = net.Listen("tcp", at); err == nil {
			l := net.ListenConfig{Control: ping.DeepQueue}
			udp, err = l.ListenPacket(context.Background(), "udp", at)
		}
		return err
	}); err != nil {
		if tcp != nil {
			tcp.Close()
		}
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+whoPath, answerAddress)
	mux.HandleFunc("GET "+flowPath, echoStream)
	s := server{place: place, http: &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}, udp: udp,
		done: &sync.WaitGroup{}}
	s.done.Go(func() { _ = s.http.Serve(tcp) })
	s.done.Go(func() { echoPackets(udp) })
	l.servers = append(l.servers, s)
	return nil
}

func (l *Lab) endServers() {
	for _, s := range l.servers {
		_ = s.http.Close()
		_ = s.udp.Close()
		s.done.Wait()
	}
	l.servers = nil
}

func answerAddress(w http.ResponseWriter, r *http.Request) {
	at, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(Seen{at.Addr().Unmap(), at.Port()})
}

// echoStream leaves HTTP behind. The client's first bytes come after the empty line of its request.
func echoStream(w http.ResponseWriter, _ *http.Request) {
	c, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer c.Close()
	_ = c.SetDeadline(time.Time{})
	_, _ = io.Copy(c, rw)
}

func echoPackets(c net.PacketConn) {
	b := make([]byte, 2048)
	for {
		n, from, err := c.ReadFrom(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err == nil {
			_, _ = c.WriteTo(b[:n], from)
		}
	}
}

// How long one GET may take, and one that shall fail.
const (
	fetchPatience = 2 * time.Second
	failPatience  = time.Second
)

// Fetch asks until what it expects holds.
func (l *Lab) Fetch(ctx context.Context, within time.Duration, f Fetch) error {
	return eventually(ctx, within, 0, func(ctx context.Context) error {
		var errs []error
		var all []netip.Addr
		for _, from := range f.From {
			for _, to := range f.To {
				seen, err := l.fetch(ctx, f, from, to)
				if err != nil {
					errs = append(errs, pairError{from, to, err})
				}
				all = append(all, seen...)
			}
		}
		return errors.Join(append(errs, fewSources(all, f.Sources))...)
	})
}

// fewSources complains when clients were seen under fewer different addresses of a family than they are to be.
func fewSources(seen []netip.Addr, least int) error {
	var errs []error
	for _, ipv6 := range []bool{false, true} {
		some := slices.DeleteFunc(slices.Clone(seen), func(a netip.Addr) bool { return a.Is6() != ipv6 })
		slices.SortFunc(some, netip.Addr.Compare)
		if some = slices.Compact(some); len(some) > 0 && len(some) < least {
			errs = append(errs, fmt.Errorf("all come from %s; at least %d addresses are expected", list(some), least))
		}
	}
	return errors.Join(errs...)
}

// fetch returns as whom the client was seen.
func (l *Lab) fetch(ctx context.Context, f Fetch, from, to string) (all []netip.Addr, err error) {
	targets, err := l.addresses(to, f.Family)
	if err == nil && f.Family == "" {
		targets, err = l.common(from, targets)
	}
	if err != nil {
		return nil, err
	}
	var told []string
	for _, target := range targets {
		at := netip.AddrPortFrom(target, uint16(f.Port))
		seen, err := l.try(ctx, f, from, at)
		switch {
		case f.Fails && err == nil:
			return all, fmt.Errorf("%s should get no answer from %s, and got one as %s", from, at, seen.Address)
		case f.Fails:
			continue
		case err != nil:
			return all, fmt.Errorf("from %s: %w", from, err)
		}
		want, err := l.expectedSources(ctx, f, to)
		if err != nil {
			return all, err
		}
		if len(want) > 0 && !slices.Contains(want, seen.Address) {
			return all, fmt.Errorf("%s saw %s come from %s, not from %s", to, from, seen.Address, list(want))
		}
		all, told = append(all, seen.Address), append(told, seen.Address.String())
	}
	if len(told) > 0 {
		l.progress("%s saw %s come from %s", to, from, strings.Join(told, " and "))
	}
	return all, nil
}

func (l *Lab) try(ctx context.Context, f Fetch, from string, at netip.AddrPort) (Seen, error) {
	if f.Fails {
		short, cancel := context.WithTimeout(ctx, failPatience)
		defer cancel()
		ctx = short
	}
	return l.Get(ctx, from, at)
}

// expectedSources lists the addresses that a server on to may see; none: all.
func (l *Lab) expectedSources(ctx context.Context, f Fetch, to string) (want []netip.Addr, err error) {
	if f.OwnerOf != (Ref{}) {
		if want, err = l.sources(ctx, f.OwnerOf, to); err != nil {
			return nil, err
		}
	}
	for _, s := range f.Source {
		if a, err := netip.ParseAddr(s); err == nil {
			want = append(want, a)
		} else {
			want = append(want, l.seenFrom(s, to)...)
		}
	}
	return want, nil
}

// Get asks a server that Serve started, from a place, and returns how it saw the client.
func (l *Lab) Get(ctx context.Context, from string, at netip.AddrPort) (Seen, error) {
	_, ns, err := l.place(from)
	if err != nil {
		return Seen{}, err
	}
	ctx, cancel := context.WithTimeout(ctx, fetchPatience)
	defer cancel()
	c, err := dial(ctx, ns, "tcp", at)
	if err != nil {
		return Seen{}, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+at.String()+whoPath, nil)
	if err != nil {
		return Seen{}, err
	}
	if err := req.Write(c); err != nil {
		return Seen{}, fmt.Errorf("ask %s: %w", at, err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(c), req)
	if err != nil {
		return Seen{}, fmt.Errorf("answer of %s: %w", at, err)
	}
	defer resp.Body.Close()
	const most = 1 << 10
	var seen Seen
	if err := json.NewDecoder(io.LimitReader(resp.Body, most)).Decode(&seen); err != nil {
		return Seen{}, fmt.Errorf("answer of %s (status %d): %w", at, resp.StatusCode, err)
	}
	return seen, nil
}

// dial connects from inside a namespace.
func dial(ctx context.Context, ns, network string, at netip.AddrPort) (c net.Conn, err error) {
	err = fabric.In(ns, func() error {
		d := net.Dialer{Control: ping.DeepQueue}
		c, err = d.DialContext(ctx, network, at.String())
		return err
	})
	return c, err
}

func (r *reader) serve(v value) Action {
	s := Serve{Port: defaultPort}
	v.mapping(
		field{"node", func(v value) { s.Nodes = r.places(v) }},
		field{"port", func(v value) { s.Port = v.integer(1, 65535) }},
	)
	if len(s.Nodes) == 0 {
		v.fail("the key \"node\" is missing: name the nodes or pods that serve")
	}
	return s
}

func (r *reader) fetch(v value) Action {
	f := Fetch{Port: defaultPort}
	v.mapping(
		field{"from", func(v value) { f.From = r.places(v) }},
		field{"to", func(v value) { f.To = r.places(v) }},
		field{"port", func(v value) { f.Port = v.integer(1, 65535) }},
		field{"family", func(v value) { f.Family = v.oneOf("ipv4", "ipv6") }},
		field{"source", func(v value) { r.source(v, &f) }},
		field{"sources", func(v value) { f.Sources = v.integer(1, 1000) }},
		field{"fails", func(v value) { f.Fails = v.boolean() }},
	)
	switch {
	case len(f.From) == 0 || len(f.To) == 0:
		v.fail("needs both from and to: nodes, or pods as NODE/POD")
	case f.Fails && (len(f.Source) > 0 || f.Sources > 0 || f.OwnerOf != Ref{}):
		v.fail("fails: true gets no answer: leave source and sources out")
	}
	return f
}

// source reads as whom a client shall be seen.
func (r *reader) source(v value, f *Fetch) {
	if v.isMapping() {
		v.mapping(field{"owner-of", func(v value) { f.OwnerOf = parseRef(v, v.text("an egress, as namespace/name")) }})
		return
	}
	for _, s := range v.texts("addresses, names of nodes, or {owner-of: NAMESPACE/NAME}") {
		if _, err := netip.ParseAddr(s); err != nil && !slices.Contains(r.s.HostNames(), s) {
			v.fail("%q is neither an address nor a node; nodes: %s", s, strings.Join(r.s.HostNames(), ", "))
		}
		f.Source = append(f.Source, s)
	}
}
