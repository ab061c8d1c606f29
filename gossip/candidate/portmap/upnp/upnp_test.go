package upnp

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/gossip/candidate/portmap/ask"
)

var loopback = netip.MustParseAddr("127.0.0.1")

func answer(location string) []byte {
	return []byte("HTTP/1.1 200 OK\r\nCACHE-CONTROL: max-age=120\r\nST: " + targets[0] + "\r\nEXT:\r\nLOCATION: " +
		location + "\r\n\r\n")
}

func TestOnlyTheGatewayItselfIsBelieved(t *testing.T) {
	gateway := netip.MustParseAddr("192.168.1.1")
	for location, ok := range map[string]bool{
		"http://192.168.1.1:5000/rootDesc.xml":              true,
		"http://192.168.1.1/":                               true,
		"http://192.168.1.9:5000/rootDesc.xml":              false,
		"http://169.254.169.254/latest/meta-data":           false,
		"http://127.0.0.1:9469/":                            false,
		"http://[::1]/":                                     false,
		"http://router.example/":                            false,
		"https://192.168.1.1/":                              false,
		"file:///etc/passwd":                                false,
		"http://192.168.1.1@evil.example/":                  false,
		"http://user@192.168.1.1/":                          false,
		"http://192.168.1.1.evil.example/":                  false,
		"//192.168.1.1/":                                    false,
		"":                                                  false,
		"http://192.168.1.1/" + strings.Repeat("x", maxURL): false,
	} {
		if u, err := decodeSearch(answer(location), gateway); (err == nil) != ok {
			t.Errorf("%q: %v, %v", location, u, err)
		}
	}
	for _, bad := range []string{"", "NOTIFY * HTTP/1.1\r\nLOCATION: http://192.168.1.1/\r\n\r\n",
		"HTTP/1.1 404 Not Found\r\nLOCATION: http://192.168.1.1/\r\n\r\n", "\x00\x01"} {
		if u, err := decodeSearch([]byte(bad), gateway); err == nil {
			t.Errorf("%q: %v", bad, u)
		}
	}
}

// What routers of several makers describe, cut to what matters.
func TestDescriptions(t *testing.T) {
	gateway := netip.MustParseAddr("192.168.1.1")
	at, _ := url.Parse("http://192.168.1.1:5000/desc/root.xml")
	tests := []struct {
		file string
		want string
	}{
		{"igd2.xml", "WANIPConnection:2 http://192.168.1.1:5000/ctl/IPConn"},
		{"igd1.xml", "WANIPConnection:1 http://192.168.1.1:49000/igdupnp/control/WANIPConn1"},
		{"ppp.xml", "WANIPConnection:1 http://192.168.1.1:5000/desc/ip, WANPPPConnection:1 http://192.168.1.1:5000/ppp"},
		{"elsewhere.xml", "error: maps no ports"},
		{"printer.xml", "error: maps no ports"},
		{"broken.xml", "error: garbled"},
	}
	for _, tt := range tests {
		b, err := os.ReadFile(filepath.Join("testdata", tt.file))
		if err != nil {
			t.Fatal(err)
		}
		services, err := decodeDescription(b, at, gateway)
		var got []string
		for _, s := range services {
			got = append(got, strings.TrimPrefix(s.kind, "urn:schemas-upnp-org:service:")+" "+s.control.String())
		}
		if want, isErr := strings.CutPrefix(tt.want, "error: "); isErr {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s: %v, %v", tt.file, got, err)
			}
		} else if err != nil || strings.Join(got, ", ") != tt.want {
			t.Errorf("%s: %v, %v", tt.file, got, err)
		}
	}
	if _, err := decodeDescription(make([]byte, maxBody+1), at, gateway); err == nil {
		t.Error("a description without end was read")
	}
	deep := strings.Repeat("<device><deviceList>", 2000) + strings.Repeat("</deviceList></device>", 2000)
	if s, err := decodeDescription([]byte("<root>"+deep+"</root>"), at, gateway); err == nil {
		t.Errorf("devices without end: %v", s)
	}
}

func TestAnswers(t *testing.T) {
	body := func(inner string) string {
		return `<?xml version="1.0"?><s:Envelope xmlns:s="` + soapEnvelope + `"><s:Body>` + inner + `</s:Body></s:Envelope>`
	}
	values, err := decodeAnswer(
		[]byte(body(`<u:GetExternalIPAddressResponse xmlns:u="x"><NewExternalIPAddress> 11.22.33.4 </NewExternalIPAddress></u:GetExternalIPAddressResponse>`)))
	if err != nil || values["NewExternalIPAddress"] != "11.22.33.4" {
		t.Errorf("%v, %v", values, err)
	}
	_, err = decodeAnswer(
		[]byte(body(`<s:Fault><faultcode>s:Client</faultcode><faultstring>UPnPError</faultstring><detail><UPnPError><errorCode>718</errorCode><errorDescription>Conflict</errorDescription></UPnPError></detail></s:Fault>`)))
	if !refusedWith(err, codeConflict) {
		t.Errorf("conflict: %v", err)
	}
	var refused *RefusedError
	if _, err = decodeAnswer([]byte(body(`<s:Fault><faultstring>go away</faultstring></s:Fault>`))); !errors.As(err,
		&refused) || refused.Text != "go away" {
		t.Errorf("plain fault: %v", err)
	}
	for name, bad := range map[string]string{
		"empty": "", "no XML": "OK", "no body": "<a><b>c</b></a>", "unfinished": body("<a>")[:90],
		"long value":  body("<a>" + strings.Repeat("x", maxValue+1) + "</a>"),
		"many values": body(strings.Repeat("<a>x</a>", 1) + manyValues()),
		"error code":  body("<errorCode>none</errorCode>"),
		"entities":    `<!DOCTYPE x [<!ENTITY a "aaaa">]>` + body("<a>&a;</a>"),
		"too large":   body(strings.Repeat(" ", maxBody)),
	} {
		if v, err := decodeAnswer([]byte(bad)); !errors.Is(err, ErrGarbled) {
			t.Errorf("%s: %v, %v", name, v, err)
		}
	}
}

func manyValues() string {
	var b strings.Builder
	for i := range maxValues + 1 {
		fmt.Fprintf(&b, "<v%d>x</v%d>", i, i)
	}
	return b.String()
}

// router answers SOAP on the loopback as a gateway would, or as the test bends it.
type router struct {
	mu       sync.Mutex
	outside  string
	kind     string
	entries  map[string]string // outer port -> client:port
	answer   map[string]int    // action -> error code
	once     map[string]int    // the same, but only the first time
	calls    []string
	redirect bool
}

func newRouter(t *testing.T) (*router, *Device) {
	t.Helper()
	r := &router{outside: "11.22.33.4", kind: serviceTypes[1], entries: map[string]string{}, answer: map[string]int{},
		once: map[string]int{}}
	server := httptest.NewServer(r)
	t.Cleanup(server.Close)
	u, _ := url.Parse(server.URL)
	g := ask.Gateway{Addr: netip.MustParseAddrPort("127.0.0.1:5351"), Local: loopback}
	return r, &Device{gateway: g, http: client(g), service: service{kind: serviceTypes[1], control: u.JoinPath("ctl")}}
}

func (r *router) ServeHTTP(w http.ResponseWriter, q *http.Request) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.redirect {
		http.Redirect(w, q, "http://127.0.0.1:1/", http.StatusFound)
		return
	}
	if q.URL.Path == "/desc" {
		fmt.Fprintf(w, `<root xmlns="urn:schemas-upnp-org:device-1-0"><device><serviceList><service><serviceType>%s</serviceType><controlURL>/ctl</controlURL></service></serviceList></device></root>`, r.kind)
		return
	}
	b, _ := io.ReadAll(q.Body)
	_, action, _ := strings.Cut(strings.Trim(q.Header.Get("SOAPAction"), `"`), "#")
	r.calls = append(r.calls, action)
	values, err := decodeAnswer(b) // a call has the same shape
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	code := r.answer[action]
	if c, ok := r.once[action]; ok {
		code = c
		delete(r.once, action)
	}
	reply := ""
	port := values["NewExternalPort"]
	switch {
	case code != 0:
	case action == "GetExternalIPAddress":
		reply = "<NewExternalIPAddress>" + r.outside + "</NewExternalIPAddress>"
	case action == "AddPortMapping":
		r.entries[port] = values["NewInternalClient"] + ":" + values["NewInternalPort"] + ":" + values["NewLeaseDuration"]
	case action == "AddAnyPortMapping":
		r.entries["4444"] = values["NewInternalClient"] + ":" + values["NewInternalPort"] + ":" + values["NewLeaseDuration"]
		reply = "<NewReservedPort>4444</NewReservedPort>"
	case action == "GetSpecificPortMappingEntry":
		e := strings.Split(r.entries[port], ":")
		if code = codeNoSuchEntry; len(e) == 3 {
			code, reply = 0, "<NewInternalClient>"+e[0]+"</NewInternalClient><NewInternalPort>"+e[1]+"</NewInternalPort>"
		}
	case action == "DeletePortMapping":
		delete(r.entries, port)
	}
	if code != 0 {
		w.WriteHeader(http.StatusInternalServerError)
		reply = fmt.Sprintf(
			"<s:Fault><faultstring>UPnPError</faultstring><detail><UPnPError><errorCode>%d</errorCode>"+
				"<errorDescription>no</errorDescription></UPnPError></detail></s:Fault>", code)
	}
	fmt.Fprintf(w, `<s:Envelope xmlns:s="%s"><s:Body>%s</s:Body></s:Envelope>`, soapEnvelope, reply)
}

func TestMappingByUPnP(t *testing.T) {
	wish := Wish{Inner: 51820, Outer: 51820, Lifetime: 2 * time.Hour}
	tests := []struct {
		name    string
		bend    func(*router, *Device)
		outer   string // empty: an error
		forget  string // what the error says
		forever bool
	}{
		{name: "granted", bend: func(*router, *Device) {}, outer: "11.22.33.4:51820"},
		{name: "permanent leases only", bend: func(r *router, _ *Device) { r.once["AddPortMapping"] = codePermanentOnly },
			outer: "11.22.33.4:51820", forever: true},
		{name: "same ports only", bend: func(r *router, _ *Device) { r.once["AddPortMapping"] = codeSamePorts },
			outer: "11.22.33.4:51820"},
		{name: "taken, and version 2 chooses", bend: func(r *router, d *Device) {
			r.answer["AddPortMapping"] = codeConflict
			d.service.kind = serviceTypes[0]
		}, outer: "11.22.33.4:4444"},
		{name: "taken for good", bend: func(r *router, _ *Device) { r.answer["AddPortMapping"] = codeConflict },
			forget: "code 718"},
		{name: "not authorized", bend: func(r *router, _ *Device) { r.answer["AddPortMapping"] = codeNotAuthorized },
			forget: "code 606"},
		{name: "it cannot tell its entries", bend: func(r *router, _ *Device) {
			r.answer["GetSpecificPortMappingEntry"] = 401
		}, outer: "11.22.33.4:51820"},
		{name: "no address outside", bend: func(r *router, _ *Device) { r.outside = "" }, forget: "external address"},
		{name: "an address that is none", bend: func(r *router, _ *Device) { r.outside = "<b>1.2.3.4</b>" },
			forget: "external address"},
		{name: "redirected elsewhere", bend: func(r *router, _ *Device) { r.redirect = true }, forget: "garbled"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, d := newRouter(t)
			tt.bend(r, d)
			g, err := d.Map(t.Context(), wish)
			if tt.outer == "" {
				if err == nil || !strings.Contains(err.Error(), tt.forget) {
					t.Errorf("%+v, %v; want %q", g, err, tt.forget)
				}
				return
			}
			if err != nil || g.Outer.String() != tt.outer || (g.Lifetime == 0) != tt.forever {
				t.Errorf("%+v, %v", g, err)
			}
			if err := d.Unmap(t.Context(), g.Outer.Port()); err != nil || len(r.entries) != 0 {
				t.Errorf("after giving it back: %v, %v", r.entries, err)
			}
			if err := d.Unmap(t.Context(), g.Outer.Port()); err != nil {
				t.Errorf("giving it back twice: %v", err)
			}
		})
	}
}

func TestMappingsOfOthersAreLeftAlone(t *testing.T) {
	r, d := newRouter(t)
	r.entries["51820"] = "192.168.1.9:51820:0" // and this router would let us take it
	g, err := d.Map(t.Context(), Wish{Inner: 51820, Outer: 51820, Lifetime: time.Hour})
	if err != nil || g.Outer.Port() == 51820 || r.entries["51820"] != "192.168.1.9:51820:0" {
		t.Errorf("%+v, %v: %v", g, err, r.entries)
	}
	if err := d.Check(t.Context(), 51820, g.Outer.Port()); err != nil {
		t.Errorf("ours: %v", err)
	}
	for port, want := range map[uint16]error{51820: errTaken, 9: ErrLost} {
		if err := d.Check(t.Context(), 51820, port); !errors.Is(err, want) {
			t.Errorf("port %d: %v", port, err)
		}
	}
}

func TestOpen(t *testing.T) {
	r, d := newRouter(t)
	at := d.service.control.ResolveReference(&url.URL{Path: "/desc"})
	got, err := open(t.Context(), d.gateway, at)
	if err != nil || got.service.control.String() != d.service.control.String() {
		t.Errorf("%+v, %v", got, err)
	}
	r.answer["GetExternalIPAddress"] = 501
	if _, err := open(t.Context(), d.gateway, at); err == nil {
		t.Error("a connection that is down was taken")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := open(ctx, d.gateway, at); err == nil {
		t.Error("a cancelled context was not heeded")
	}
}

func FuzzDecodeSearch(f *testing.F) {
	f.Add(answer("http://192.168.1.1:5000/rootDesc.xml"))
	gateway := netip.MustParseAddr("192.168.1.1")
	f.Fuzz(func(t *testing.T, b []byte) {
		if u, err := decodeSearch(b, gateway); err == nil && u.Hostname() != "192.168.1.1" {
			t.Fatalf("believed %s", u)
		}
	})
}

func FuzzDecodeDescription(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.xml")
	for _, name := range files {
		if b, err := os.ReadFile(name); err == nil {
			f.Add(b)
		}
	}
	gateway := netip.MustParseAddr("192.168.1.1")
	at, _ := url.Parse("http://192.168.1.1:5000/desc/root.xml")
	f.Fuzz(func(t *testing.T, b []byte) {
		services, err := decodeDescription(b, at, gateway)
		if err == nil && (len(services) == 0 || len(services) > maxServices) {
			t.Fatalf("%d services", len(services))
		}
		for _, s := range services {
			if s.control.Hostname() != "192.168.1.1" || s.control.Scheme != "http" {
				t.Fatalf("believed %s", s.control)
			}
		}
	})
}

func FuzzDecodeAnswer(f *testing.F) {
	f.Add(encodeCall(serviceTypes[0], "AddPortMapping", []arg{{"NewRemoteHost", ""}, {"NewExternalPort", "51820"}}))
	f.Add([]byte(`<s:Envelope xmlns:s="x"><s:Body><s:Fault><detail><errorCode>718</errorCode></detail></s:Fault></s:Body></s:Envelope>`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if values, err := decodeAnswer(b); err == nil && len(values) > maxValues {
			t.Fatalf("%d values", len(values))
		}
	})
}
