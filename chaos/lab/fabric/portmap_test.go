package fabric

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/internal/testenv"
)

// household is a host behind a router that maps ports, and strangers outside.
func household(t *testing.T, kind NAT, protocols ...string) (p Plan, site Site) {
	t.Helper()
	if _, err := exec.LookPath(portmapProgram); err != nil {
		testenv.Missing(t, ErrNoPortmap.Error())
	}
	p = raise(t, []SiteSpec{{Name: "x", NAT: None}, {Name: "home", NAT: kind, Portmap: protocols}}, HostSpec{"x1", "x"},
		HostSpec{"h1", "home"})
	site, _ = p.Site("home")
	cmd, err := StartPortmap(t.Context(), p.Lab, site, t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	go func() { _ = cmd.Wait() }() // reaped when Teardown kills it
	return p, site
}

// ask sends a request from h1 to its router and returns the answer; ok is false when none comes.
func (p Plan) ask(t *testing.T, gateway netip.Addr, request []byte, patience time.Duration) (answer []byte, ok bool) {
	t.Helper()
	c := p.socket(t, "h1", false, 0)
	defer c.Close()
	answer = make([]byte, 1100)
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); {
		if _, err := c.WriteToUDPAddrPort(request, netip.AddrPortFrom(gateway, portmapPort)); err != nil {
			t.Fatal(err)
		}
		c.SetReadDeadline(time.Now().Add(silence))
		if n, err := c.Read(answer); err == nil {
			return answer[:n], true
		}
	}
	return nil, false
}

// natpmpMap asks for a mapping of a UDP port (RFC 6886 section 3.3); lifetime 0 ends it.
func natpmpMap(internal, suggested uint16, lifetime uint32) []byte {
	b := []byte{0, 1, 0, 0}
	b = binary.BigEndian.AppendUint16(b, internal)
	b = binary.BigEndian.AppendUint16(b, suggested)
	return binary.BigEndian.AppendUint32(b, lifetime)
}

// pcpMap is the same for PCP (RFC 6887 sections 7.1 and 11.1).
func pcpMap(client netip.Addr, internal, suggested uint16, lifetime uint32) []byte {
	b := []byte{2, 1, 0, 0}
	b = binary.BigEndian.AppendUint32(b, lifetime)
	a := netip.AddrFrom16(client.As16()).As16()
	b = append(b, a[:]...)
	b = append(b, bytes.Repeat([]byte{7}, 12)...) // nonce
	b = append(b, 17, 0, 0, 0)                    // UDP
	b = binary.BigEndian.AppendUint16(b, internal)
	b = binary.BigEndian.AppendUint16(b, suggested)
	any4 := netip.MustParseAddr("::ffff:0.0.0.0").As16()
	return append(b, any4[:]...)
}

// open and close a mapping by a protocol; open returns the address that the router promises.
type mapper struct {
	open  func(t *testing.T, p Plan, s Site) netip.AddrPort
	close func(t *testing.T, p Plan, s Site)
}

const inside, outside = 51820, 42424

var mappers = map[string]mapper{
	NATPMP: {
		func(t *testing.T, p Plan, s Site) netip.AddrPort {
			b, _ := p.ask(t, s.gateway(), []byte{0, 0}, arrival)
			m, _ := p.ask(t, s.gateway(), natpmpMap(inside, outside, 600), arrival)
			if len(b) < 12 || len(m) < 16 || m[3] != 0 {
				t.Fatalf("answers % x and % x", b, m)
			}
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[8:12])), binary.BigEndian.Uint16(m[10:]))
		},
		func(t *testing.T, p Plan, s Site) { p.ask(t, s.gateway(), natpmpMap(inside, 0, 0), arrival) },
	},
	PCP: {
		func(t *testing.T, p Plan, s Site) netip.AddrPort {
			m, _ := p.ask(t, s.gateway(), pcpMap(p.host(t, "h1").Addr, inside, outside, 600), arrival)
			if len(m) < 60 || m[0] != 2 || m[3] != 0 {
				t.Fatalf("answer % x", m)
			}
			return netip.AddrPortFrom(netip.AddrFrom16([16]byte(m[44:60])).Unmap(), binary.BigEndian.Uint16(m[42:]))
		},
		func(t *testing.T, p Plan, s Site) {
			p.ask(t, s.gateway(), pcpMap(p.host(t, "h1").Addr, inside, outside, 0), arrival)
		},
	},
	UPnP: {
		func(t *testing.T, p Plan, s Site) netip.AddrPort {
			control := p.findGateway(t)
			answer := p.soap(t, control, "AddPortMapping",
				fmt.Sprintf("<NewRemoteHost></NewRemoteHost><NewExternalPort>%d</NewExternalPort><NewProtocol>UDP</NewProtocol>"+
					"<NewInternalPort>%d</NewInternalPort><NewInternalClient>%s</NewInternalClient>"+
					"<NewEnabled>1</NewEnabled><NewPortMappingDescription>t</NewPortMappingDescription>"+
					"<NewLeaseDuration>600</NewLeaseDuration>", outside, inside, p.host(t, "h1").Addr))
			if !strings.Contains(answer, "AddPortMappingResponse") {
				t.Fatal(answer)
			}
			answer = p.soap(t, control, "GetExternalIPAddress", "")
			_, addr, _ := strings.Cut(answer, "<NewExternalIPAddress>")
			addr, _, _ = strings.Cut(addr, "<")
			return netip.AddrPortFrom(netip.MustParseAddr(addr), outside)
		},
		func(t *testing.T, p Plan, s Site) {
			p.soap(t, p.findGateway(t), "DeletePortMapping",
				fmt.Sprintf("<NewRemoteHost></NewRemoteHost><NewExternalPort>%d</NewExternalPort><NewProtocol>UDP</NewProtocol>",
					outside))
		},
	},
}

const wanService = "urn:schemas-upnp-org:service:WANIPConnection:1"

// findGateway finds the router's control address, by SSDP and its description.
func (p Plan) findGateway(t *testing.T) string {
	t.Helper()
	c := p.socket(t, "h1", false, 0)
	defer c.Close()
	buf := make([]byte, 2000)
	for deadline := time.Now().Add(arrival); time.Now().Before(deadline); {
		search := "M-SEARCH * HTTP/1.1\r\nHOST: 239.255.255.250:1900\r\nMAN: \"ssdp:discover\"\r\nMX: 1\r\nST: " +
			wanService + "\r\n\r\n"
		if _, err := c.WriteToUDPAddrPort([]byte(search), netip.MustParseAddrPort("239.255.255.250:1900")); err != nil {
			t.Fatal(err)
		}
		c.SetReadDeadline(time.Now().Add(silence))
		n, err := c.Read(buf)
		if err != nil {
			continue
		}
		for _, line := range strings.Split(string(buf[:n]), "\r\n") {
			if name, url, _ := strings.Cut(line, ":"); strings.EqualFold(name, "location") {
				url = strings.TrimSpace(url)
				text := p.http(t, "GET", url, "", "")
				_, text, _ = strings.Cut(text, "<serviceType>"+wanService+"</serviceType>")
				_, text, _ = strings.Cut(text, "<controlURL>")
				path, _, _ := strings.Cut(text, "</controlURL>")
				host := strings.SplitN(url, "/", 4)
				return host[0] + "//" + host[2] + path
			}
		}
	}
	t.Fatal("no gateway answers a search")
	return ""
}

func (p Plan) soap(t *testing.T, control, action, args string) string {
	t.Helper()
	body := `<?xml version="1.0"?><s:Envelope xmlns:s="http://schemas.xmlsoap.org/soap/envelope/" s:encodingStyle="http://schemas.xmlsoap.org/soap/encoding/"><s:Body>` +
		`<u:` + action + ` xmlns:u="` + wanService + `">` + args + `</u:` + action + `></s:Body></s:Envelope>`
	return p.http(t, "POST", control, fmt.Sprintf("%q", wanService+"#"+action), body)
}

// http makes a request from h1.
func (p Plan) http(t *testing.T, method, url, action, body string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if action != "" {
		req.Header.Set("SOAPAction", action)
		req.Header.Set("Content-Type", "text/xml")
	}
	var conn net.Conn
	if err := In(HostNS(p.Lab, "h1"), func() (err error) {
		conn, err = net.DialTimeout("tcp", req.URL.Host, arrival)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	req.Close = true
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(conn)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// A mapping by each protocol lets strangers in at the address that the router names, behind each kind of NAT, until it
// is taken back.
func TestPortmapLetsStrangersIn(t *testing.T) {
	for _, kind := range []NAT{PortRestrictedCone, Symmetric} {
		for name, m := range mappers {
			t.Run(string(kind)+" "+name, func(t *testing.T) {
				t.Parallel()
				p, s := household(t, kind, name)
				x, y, h := p.socket(t, "x1", false, 3478), p.socket(t, "x1", false, 3479), p.socket(t, "h1", false, inside)
				got := m.open(t, p, s)
				if want := netip.AddrPortFrom(p.host(t, "h1").Public, outside); got != want {
					t.Errorf("the router promises %s, want %s", got, want)
				}
				as := arrives(t, y, got, h)
				if as != local(y) {
					t.Errorf("a stranger comes in as %s, want %s", as, local(y))
				}
				if back := arrives(t, h, as, y); back != got {
					t.Errorf("the answer comes from %s, want %s", back, got)
				}
				m.close(t, p, s)
				if _, ok := passes(t, x, got, h); ok {
					t.Error("a stranger still comes in when the mapping is gone")
				}
			})
		}
	}
}

// A router speaks the protocols that the lab file names, and no other.
func TestPortmapSpeaksOnlyWhatItShall(t *testing.T) {
	for _, name := range Portmaps() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p, s := household(t, PortRestrictedCone, name)
			for other, request := range map[string][]byte{NATPMP: natpmpMap(inside, outside, 600),
				PCP: pcpMap(p.host(t, "h1").Addr, inside, outside, 600)} {
				patience := arrival
				if other != name {
					patience = silence
				}
				if _, ok := p.ask(t, s.gateway(), request, patience); ok != (other == name) {
					t.Errorf("%s is answered: %v", other, ok)
				}
			}
			err := In(HostNS(p.Lab, "h1"), func() error { return askUPnP(s.gateway()) })
			if (err == nil) != (name == UPnP) {
				t.Errorf("UPnP: %v", err)
			}
		})
	}
}

// Behind a carrier's NAT a home router has no public address to map, and says so.
func TestPortmapBehindACarrier(t *testing.T) {
	p, s := household(t, Double, NATPMP, PCP)
	m, _ := p.ask(t, s.gateway(), natpmpMap(inside, outside, 600), arrival)
	if len(m) < 4 || m[3] == 0 {
		t.Errorf("the router answers % x, want a refusal", m)
	}
}

func TestPortmapSaysWhatIsMissing(t *testing.T) {
	t.Setenv("PATH", t.TempDir())
	if _, err := StartPortmap(t.Context(), "x", Site{SiteSpec: SiteSpec{Name: "home"}},
		t.TempDir()); !errors.Is(err, ErrNoPortmap) {
		t.Errorf("got %v", err)
	}
}
