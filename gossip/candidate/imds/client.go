package imds

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/skeinmesh/skein/internal/addr"
	"github.com/skeinmesh/skein/internal/sock"
)

const (
	address     = "169.254.169.254:80"
	dialTime    = 500 * time.Millisecond // the service is on the same machine, or not at all
	answerTime  = time.Second
	tokenTime   = 6 * time.Hour // the longest that is allowed
	maxBody     = 4 << 10       // bytes
	maxToken    = 512
	maxLinks    = 8
	maxAddrs    = 8
	tokenHeader = "X-Aws-Ec2-Metadata-Token"
	lifeHeader  = "X-Aws-Ec2-Metadata-Token-Ttl-Seconds"
	tokenPath   = "/latest/api/token"
	dataPath    = "/latest/meta-data/"
)

// Errors that tell hosts apart.
var (
	errNone     = errors.New("there is no such value") // status 404
	errExpired  = errors.New("the token has expired")
	errDisabled = errors.New("the metadata service is switched off for this instance")
	errAway     = errors.New("no metadata service answers")
	errGarbled  = errors.New("garbled answer of the metadata service")
)

// client holds the token.
type client struct {
	http    *http.Client
	token   string
	expires time.Time
}

func newClient(mark uint32) *client {
	d := net.Dialer{Control: sock.Mark(mark), Timeout: dialTime}
	return &client{http: &http.Client{
		Timeout:       answerTime,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
				return d.DialContext(ctx, network, address) // nowhere else, whatever a URL says
			},
			DisableKeepAlives: true, DisableCompression: true, MaxResponseHeaderBytes: maxBody,
		},
	}}
}

func (c *client) do(ctx context.Context, method, path string, header, value string) (string, error) {
	r, err := http.NewRequestWithContext(ctx, method, "http://"+address+path, nil)
	if err != nil {
		return "", fmt.Errorf("ask the metadata service: %w", err)
	}
	r.Header.Set(header, value)
	answer, err := c.http.Do(r)
	if err != nil {
		return "", fmt.Errorf("%w: %w", errAway, err)
	}
	defer answer.Body.Close()
	b, err := io.ReadAll(io.LimitReader(answer.Body, maxBody+1))
	switch {
	case err != nil:
		return "", fmt.Errorf("%w: %w", errAway, err)
	case answer.StatusCode == http.StatusNotFound:
		return "", errNone
	case answer.StatusCode == http.StatusUnauthorized:
		return "", errExpired
	case answer.StatusCode == http.StatusForbidden:
		return "", errDisabled
	case answer.StatusCode != http.StatusOK:
		return "", fmt.Errorf("%w: status %d for %s", errGarbled, answer.StatusCode, path)
	case len(b) > maxBody:
		return "", fmt.Errorf("%w: more than %d bytes for %s", errGarbled, maxBody, path)
	}
	return string(b), nil
}

// get fetches one value, and a token first where there is none or the service has forgotten it.
func (c *client) get(ctx context.Context, path string) (string, error) {
	for fresh := false; ; fresh = true {
		if c.token == "" || !time.Now().Before(c.expires) {
			if err := c.newToken(ctx); err != nil {
				return "", err
			}
		}
		v, err := c.do(ctx, http.MethodGet, dataPath+path, tokenHeader, c.token)
		if !errors.Is(err, errExpired) || fresh {
			return v, err
		}
		c.token = ""
	}
}

func (c *client) newToken(ctx context.Context) error {
	token, err := c.do(ctx, http.MethodPut, tokenPath, lifeHeader, strconv.Itoa(int(tokenTime/time.Second)))
	if err != nil {
		return err
	}
	plain := func(r rune) bool { return r <= ' ' || r > '~' }
	if token == "" || len(token) > maxToken || strings.ContainsFunc(token, plain) {
		return fmt.Errorf("%w: a token of %d bytes", errGarbled, len(token))
	}
	c.token, c.expires = token, time.Now().Add(tokenTime-time.Minute)
	return nil
}

// addresses are those that the internet reaches this instance at: the public IPv4 address first, then those of all
// interfaces.
func (c *client) addresses(ctx context.Context) ([]netip.Addr, error) {
	var out []netip.Addr
	read := func(path string) error {
		text, err := c.get(ctx, path)
		if errors.Is(err, errNone) {
			return nil
		}
		if err != nil {
			return err
		}
		found, err := parseAddrs(text)
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		for _, a := range found {
			if !slices.Contains(out, a) && len(out) < maxAddrs {
				out = append(out, a)
			}
		}
		return nil
	}
	if err := read("public-ipv4"); err != nil {
		return nil, err
	}
	const links = "network/interfaces/macs/"
	text, err := c.get(ctx, links)
	if errors.Is(err, errNone) {
		return out, nil
	}
	if err != nil {
		return nil, err
	}
	for _, mac := range parseLinks(text) {
		for _, what := range []string{"/public-ipv4s", "/ipv6s"} {
			if err := read(links + mac + what); err != nil {
				return nil, err
			}
		}
	}
	return out, nil
}

// parseAddrs reads a list of public addresses, one on each line.
func parseAddrs(text string) ([]netip.Addr, error) {
	var out []netip.Addr
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		a, err := netip.ParseAddr(line)
		if err != nil || a.Zone() != "" {
			return nil, fmt.Errorf("%w: %.40q is not an address", errGarbled, line)
		}
		if a = a.Unmap(); !addr.Public(a) {
			return nil, fmt.Errorf("%w: %s is not public", errGarbled, a)
		}
		out = append(out, a)
	}
	return out, nil
}

// parseLinks reads the list of interfaces: hardware addresses with a slash behind.
func parseLinks(text string) []string {
	var out []string
	for line := range strings.Lines(text) {
		mac, err := net.ParseMAC(strings.TrimSuffix(strings.TrimSpace(line), "/"))
		if err == nil && len(mac) == 6 && len(out) < maxLinks {
			out = append(out, mac.String())
		}
	}
	return out
}
