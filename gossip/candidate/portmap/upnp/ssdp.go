package upnp

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
)

const (
	maxDatagram = 2048 // bytes
	maxURL      = 512
)

// targets are the devices to search for; version 2 should answer to the first as well, and not all do.
var targets = []string{"urn:schemas-upnp-org:device:InternetGatewayDevice:1",
	"urn:schemas-upnp-org:device:InternetGatewayDevice:2"}

// ErrGarbled means that what the gateway sent makes no sense, or points elsewhere.
var ErrGarbled = errors.New("garbled UPnP answer")

// encodeSearch is an M-SEARCH request.
func encodeSearch(host, target string) []byte {
	return []byte("M-SEARCH * HTTP/1.1\r\nHOST: " + host + "\r\nMAN: \"ssdp:discover\"\r\nMX: 1\r\nST: " +
		target + "\r\n\r\n")
}

// decodeSearch reads an answer to M-SEARCH that came from the gateway, and returns where its description is.
func decodeSearch(b []byte, gateway netip.Addr) (*url.URL, error) {
	r, err := http.ReadResponse(bufio.NewReaderSize(bytes.NewReader(b), maxDatagram), nil)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrGarbled, err)
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%w: status %d", ErrGarbled, r.StatusCode)
	}
	return gatewayURL(nil, r.Header.Get("Location"), gateway)
}

// gatewayURL reads a URL that must lead to the gateway itself. A relative one needs a base.
func gatewayURL(base *url.URL, s string, gateway netip.Addr) (*url.URL, error) {
	if s == "" || len(s) > maxURL {
		return nil, fmt.Errorf("%w: a URL of %d bytes", ErrGarbled, len(s))
	}
	u, err := url.Parse(s)
	if err != nil {
		return nil, fmt.Errorf("%w: %v", ErrGarbled, err)
	}
	if base != nil {
		u = base.ResolveReference(u)
	}
	host, err := netip.ParseAddr(u.Hostname())
	if u.Scheme != "http" || u.User != nil || err != nil || host.Unmap() != gateway.Unmap().WithZone("") {
		return nil, fmt.Errorf("%w: %q does not lead to the gateway %s", ErrGarbled, s, gateway)
	}
	return u, nil
}
