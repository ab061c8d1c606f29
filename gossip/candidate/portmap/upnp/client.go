package upnp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strconv"
	"time"

	"golang.org/x/net/ipv4"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
	"github.com/skeinmesh/skein/internal/sock"
)

const (
	searchTime   = 2 * time.Second // MX lets a device wait a second before it answers
	searchAgain  = 500 * time.Millisecond
	callTime     = 3 * time.Second
	otherPorts   = 3 // tried when the wished one is taken
	lowestPort   = 1024
	description  = "skein"
	maxHeader    = 16 << 10
	ssdpGroup    = "239.255.255.250:1900"
	ssdpPort     = 1900
	protocolName = "UDP"
)

// Device is a gateway that maps ports.
type Device struct {
	gateway ask.Gateway
	service service
	http    *http.Client
}

// Wish is what is asked for.
type Wish struct {
	Inner    uint16
	Outer    uint16 // wished for; another one may be given
	Lifetime time.Duration
}

// Grant is what the gateway gave.
type Grant struct {
	Outer    netip.AddrPort
	Lifetime time.Duration // 0: until it is deleted
}

// Discover finds the gateway's device, in two seconds at most.
func Discover(ctx context.Context, g ask.Gateway) (*Device, error) {
	location, err := search(ctx, g)
	if err != nil {
		return nil, err
	}
	return open(ctx, g, location)
}

// open reads the description and chooses a connection that is up.
func open(ctx context.Context, g ask.Gateway, location *url.URL) (*Device, error) {
	d := &Device{gateway: g, http: client(g)}
	body, status, err := d.fetch(ctx, http.MethodGet, location, nil, nil)
	if err != nil {
		return nil, err
	}
	if status != http.StatusOK {
		return nil, fmt.Errorf("%w: the description has status %d", ErrGarbled, status)
	}
	services, err := decodeDescription(body, location, g.Addr.Addr())
	if err != nil {
		return nil, err
	}
	// A gateway with several connections describes those that are down too.
	for _, s := range services {
		d.service = s
		if _, err = d.ExternalAddress(ctx); err == nil || ctx.Err() != nil {
			break
		}
	}
	return d, err
}

// search asks the gateway where its description is, by multicast as all understand it and to its address as well.
func search(ctx context.Context, g ask.Gateway) (*url.URL, error) {
	conn, err := sock.ListenUDP("udp4", netip.AddrPortFrom(g.Local, 0), g.Mark)
	if err != nil {
		return nil, fmt.Errorf("search for UPnP: %w", err)
	}
	defer conn.Close()
	if link := linkOf(g.Local); link != nil {
		p := ipv4.NewPacketConn(conn)
		_ = p.SetMulticastInterface(link)
		_ = p.SetMulticastTTL(2)
	}
	ctx, cancel := context.WithTimeout(ctx, searchTime)
	defer cancel()
	found := make(chan *url.URL, 1)
	bad := make(chan error, 1)
	go hear(conn, g, found, bad)
	again := time.NewTicker(searchAgain)
	defer again.Stop()
	silence := fmt.Errorf("gateway %s: %w to a search for UPnP", g.Addr.Addr(), ask.ErrNoAnswer)
	ask := func() {
		for _, host := range []string{ssdpGroup, netip.AddrPortFrom(g.Addr.Addr(), ssdpPort).String()} {
			for _, target := range targets {
				_, _ = conn.WriteToUDPAddrPort(encodeSearch(host, target), netip.MustParseAddrPort(host))
			}
		}
	}
	ask()
	for {
		select {
		case u := <-found:
			return u, nil
		case err := <-bad:
			silence = err // a better one may come
		case <-again.C:
			ask()
		case <-ctx.Done():
			return nil, silence
		}
	}
}

// hear ends when the socket is closed.
func hear(conn *net.UDPConn, g ask.Gateway, found chan<- *url.URL, bad chan<- error) {
	b := make([]byte, maxDatagram)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(b)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || from.Addr().Unmap() != g.Addr.Addr() {
			continue // somebody else on this network
		}
		u, err := decodeSearch(b[:n], g.Addr.Addr())
		if err != nil {
			select {
			case bad <- err:
			default:
			}
			continue
		}
		select {
		case found <- u:
		default:
		}
	}
}

func linkOf(local netip.Addr) *net.Interface {
	links, err := net.Interfaces()
	if err != nil {
		return nil
	}
	for _, l := range links {
		addrs, _ := l.Addrs()
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr() == local {
				return &l
			}
		}
	}
	return nil
}

// client talks HTTP to the gateway and nobody else.
func client(g ask.Gateway) *http.Client {
	d := net.Dialer{Control: sock.Mark(g.Mark), LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(g.Local, 0)),
		Timeout: callTime}
	return &http.Client{
		Timeout:       callTime,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{DialContext: d.DialContext, DisableKeepAlives: true, DisableCompression: true,
			MaxResponseHeaderBytes: maxHeader},
	}
}

func (d *Device) fetch(ctx context.Context, method string, u *url.URL, header map[string]string,
	body []byte) ([]byte, int, error) {
	r, err := http.NewRequestWithContext(ctx, method, u.String(), bytes.NewReader(body))
	if err != nil {
		return nil, 0, fmt.Errorf("ask UPnP at %s: %w", u, err)
	}
	for k, v := range header {
		r.Header[k] = []string{v} // as written: some gateways read SOAPAction so
	}
	answer, err := d.http.Do(r)
	if err != nil {
		return nil, 0, fmt.Errorf("ask UPnP: %w", err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(io.LimitReader(answer.Body, maxBody+1))
	if err != nil {
		return nil, 0, fmt.Errorf("ask UPnP at %s: %w", u, err)
	}
	return b, answer.StatusCode, nil
}

func (d *Device) call(ctx context.Context, action string, args ...arg) (map[string]string, error) {
	b, status, err := d.fetch(ctx, http.MethodPost, d.service.control, map[string]string{
		"Content-Type": contentTypeOfCalls, "SOAPAction": `"` + d.service.kind + "#" + action + `"`,
	}, encodeCall(d.service.kind, action, args))
	if err != nil {
		return nil, err
	}
	values, err := decodeAnswer(b)
	if err == nil && status != http.StatusOK {
		err = fmt.Errorf("%w: status %d", ErrGarbled, status)
	}
	if err != nil {
		return nil, fmt.Errorf("UPnP %s: %w", action, err)
	}
	return values, nil
}

// ExternalAddress asks for the gateway's address outside, whatever it may be.
func (d *Device) ExternalAddress(ctx context.Context) (netip.Addr, error) {
	values, err := d.call(ctx, "GetExternalIPAddress")
	if err != nil {
		return netip.Addr{}, err
	}
	a, err := netip.ParseAddr(values["NewExternalIPAddress"])
	if err != nil || a.Zone() != "" {
		return netip.Addr{}, fmt.Errorf("%w: external address %q", ErrGarbled, values["NewExternalIPAddress"])
	}
	return a.Unmap(), nil
}

// Map asks for a mapping, another port where the wished one is taken, and checks that the gateway has it.
func (d *Device) Map(ctx context.Context, w Wish) (Grant, error) {
	outer, lifetime, err := d.add(ctx, w)
	if err != nil {
		return Grant{}, err
	}
	if err := d.Check(ctx, w.Inner, outer); err != nil {
		return Grant{}, err
	}
	a, err := d.ExternalAddress(ctx)
	if err != nil {
		return Grant{}, err
	}
	return Grant{Outer: netip.AddrPortFrom(a, outer), Lifetime: lifetime}, nil
}

func (d *Device) add(ctx context.Context, w Wish) (uint16, time.Duration, error) {
	outer, lifetime := w.Outer, w.Lifetime
	err := d.Check(ctx, w.Inner, outer)
	if errors.Is(err, errTaken) {
		outer = randomPort() // some gateways would let us take it from its owner
	}
	for try := 0; try <= otherPorts; {
		args := d.mapping(w.Inner, outer, lifetime)
		if _, err = d.call(ctx, "AddPortMapping", args...); err == nil {
			return outer, lifetime, nil
		}
		switch {
		case refusedWith(err, codePermanentOnly) && lifetime > 0:
			lifetime = 0
			continue
		case refusedWith(err, codeSamePorts):
			outer = w.Inner
		case refusedWith(err, codeConflict, codeConflictMech, codeArgs, codeFailed) && d.service.any():
			var values map[string]string
			if values, err = d.call(ctx, "AddAnyPortMapping", args...); err != nil {
				return 0, 0, err
			}
			n, perr := strconv.ParseUint(values["NewReservedPort"], 10, 16)
			if perr != nil || n == 0 {
				return 0, 0, fmt.Errorf("%w: reserved port %q", ErrGarbled, values["NewReservedPort"])
			}
			return uint16(n), lifetime, nil
		case refusedWith(err, codeConflict, codeConflictMech, codeArgs, codeFailed):
			outer = randomPort()
		default:
			return 0, 0, err
		}
		try++
	}
	return 0, 0, err
}

func randomPort() uint16 { return uint16(lowestPort + rand.N(65536-lowestPort)) }

func (d *Device) mapping(inner, outer uint16, lifetime time.Duration) []arg {
	return []arg{
		{"NewRemoteHost", ""}, {"NewExternalPort", strconv.Itoa(int(outer))}, {"NewProtocol", protocolName},
		{"NewInternalPort", strconv.Itoa(int(inner))},
		{"NewInternalClient", d.gateway.Local.String()}, {"NewEnabled", "1"}, {"NewPortMappingDescription", description},
		{"NewLeaseDuration", strconv.Itoa(int(lifetime / time.Second))},
	}
}

// ErrLost means that the gateway has forgotten a mapping, or given it to somebody else.
var (
	ErrLost  = errors.New("the gateway does not have the mapping")
	errTaken = fmt.Errorf("%w: another host has the port", ErrLost)
)

// Check asks whether the gateway has a mapping to this host. Gateways that cannot tell are believed.
func (d *Device) Check(ctx context.Context, inner, outer uint16) error {
	values, err := d.call(ctx, "GetSpecificPortMappingEntry", arg{"NewRemoteHost", ""},
		arg{"NewExternalPort", strconv.Itoa(int(outer))}, arg{"NewProtocol", protocolName})
	var refused *RefusedError
	switch {
	case refusedWith(err, codeNoSuchEntry):
		return ErrLost
	case errors.As(err, &refused):
		return nil
	case err != nil:
		return err
	}
	if values["NewInternalClient"] != d.gateway.Local.String() || values["NewInternalPort"] != strconv.Itoa(int(inner)) {
		return errTaken
	}
	return nil
}

// Unmap gives a mapping back.
func (d *Device) Unmap(ctx context.Context, outer uint16) error {
	_, err := d.call(ctx, "DeletePortMapping", arg{"NewRemoteHost", ""}, arg{"NewExternalPort", strconv.Itoa(int(outer))},
		arg{"NewProtocol", protocolName})
	if refusedWith(err, codeNoSuchEntry) {
		return nil
	}
	return err
}
