package upnp

import (
	"bytes"
	"encoding/xml"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
)

const (
	maxBody     = 128 << 10 // bytes of a description or of a SOAP answer
	maxDepth    = 6         // of devices inside devices
	maxServices = 64
)

// serviceTypes are those that map ports, the preferred ones first.
var serviceTypes = []string{
	"urn:schemas-upnp-org:service:WANIPConnection:2",
	"urn:schemas-upnp-org:service:WANIPConnection:1",
	"urn:schemas-upnp-org:service:WANPPPConnection:1",
}

// service is one that maps ports.
type service struct {
	kind    string
	control *url.URL
}

// any reports whether the service can choose the outer port itself.
func (s service) any() bool { return s.kind == serviceTypes[0] }

type xmlRoot struct {
	XMLName xml.Name  `xml:"root"`
	URLBase string    `xml:"URLBase"`
	Device  xmlDevice `xml:"device"`
}

type xmlDevice struct {
	Services []xmlService `xml:"serviceList>service"`
	Devices  []xmlDevice  `xml:"deviceList>device"`
}

type xmlService struct {
	Type    string `xml:"serviceType"`
	Control string `xml:"controlURL"`
}

// decodeDescription finds the services that map ports in a device's description, the preferred ones first.
func decodeDescription(b []byte, at *url.URL, gateway netip.Addr) ([]service, error) {
	if len(b) > maxBody {
		return nil, fmt.Errorf("%w: a description of more than %d bytes", ErrGarbled, maxBody)
	}
	var root xmlRoot
	d := xml.NewDecoder(bytes.NewReader(b))
	d.CharsetReader = plainCharset
	if err := d.Decode(&root); err != nil {
		return nil, fmt.Errorf("%w: %v", ErrGarbled, err)
	}
	base := at
	if root.URLBase != "" {
		if u, err := gatewayURL(at, root.URLBase, gateway); err == nil {
			base = u
		}
	}
	var out []service
	var walk func(d xmlDevice, depth int)
	walk = func(d xmlDevice, depth int) {
		for _, s := range d.Services {
			if u, err := gatewayURL(base, s.Control, gateway); err == nil && slices.Contains(serviceTypes, s.Type) &&
				len(out) < maxServices {
				out = append(out, service{kind: s.Type, control: u})
			}
		}
		for _, inner := range d.Devices {
			if depth < maxDepth {
				walk(inner, depth+1)
			}
		}
	}
	walk(root.Device, 0)
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: the device maps no ports", ErrGarbled)
	}
	slices.SortStableFunc(out, func(a, b service) int {
		return slices.Index(serviceTypes, a.kind) - slices.Index(serviceTypes, b.kind)
	})
	return out, nil
}
