package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// proxyPort is where agents reach the proxy, on the apiserver's node.
const proxyPort = 6444

// proxy stands between agents and the apiserver, on the apiserver's node, and can answer in its place.
type proxy struct {
	forward http.Handler
	admin   http.Handler // the same as the cluster's administrator

	mu    sync.Mutex
	hold  func(asked) bool                              // holds a request open, whatever else holds
	bad   func(http.ResponseWriter, *http.Request) bool // answers, and says so; nil: all are passed on
	cut   context.CancelFunc                            // ends what is under way
	open  context.Context                               // until then
	asked []asked
}

// asked is a request that came.
type asked struct {
	at     time.Time
	verb   string // as RBAC names it: get, list, watch, patch, create, …
	path   string
	fields string
}

// startProxy starts one for a cluster; it ends with the test.
func startProxy(t *testing.T, c *Cluster) *proxy {
	roots := x509.NewCertPool()
	roots.AddCert(c.ca.cert)
	ns := c.On.Namespace
	admin, err := tls.LoadX509KeyPair(c.file("admin.crt"), c.file("admin.key"))
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{
		forward: through(ns, &tls.Config{RootCAs: roots}),
		admin:   through(ns, &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{admin}}),
	}
	p.open, p.cut = context.WithCancel(context.Background())
	now := time.Now()
	p.serve(t, c, proxyPort, now.Add(-time.Hour), now.Add(24*time.Hour))
	return p
}

// serve listens at a port until the test ends, with a certificate that is valid for a time.
func (p *proxy) serve(t *testing.T, c *Cluster, port int, from, until time.Time) {
	cert, key, err := c.ca.issueFor(from, until, "skein-test-proxy", nil, apiserverNames, c.Addresses...)
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	var listener net.Listener
	if err := fabric.In(c.On.Namespace, func() (err error) {
		listener, err = net.Listen("tcp", fmt.Sprintf(":%d", port))
		return err
	}); err != nil {
		t.Fatal(err)
	}
	s := &http.Server{Handler: p, TLSConfig: &tls.Config{Certificates: []tls.Certificate{pair}},
		ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: time.Minute}
	ended := make(chan error, 1)
	go func() { ended <- s.ServeTLS(listener, "", "") }()
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		if err := <-ended; !errors.Is(err, http.ErrServerClosed) {
			t.Error("the proxy has ended:", err)
		}
	})
}

// through passes requests on to the apiserver of a network namespace.
func through(ns string, c *tls.Config) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(&url.URL{Scheme: "https", Host: fmt.Sprintf("127.0.0.1:%d", apiPort)})
		},
		FlushInterval: -1, // watches
		ErrorLog:      log.New(io.Discard, "", 0),
		Transport: &http.Transport{
			ForceAttemptHTTP2: true, TLSClientConfig: c,
			DialContext: func(ctx context.Context, network, address string) (c net.Conn, err error) {
				err = fabric.In(ns, func() error {
					c, err = (&net.Dialer{}).DialContext(ctx, network, address)
					return err
				})
				return c, err
			},
		},
	}
}

// holdOne has requests that match be held open until their clients end them.
func (p *proxy) holdOne(match func(asked) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hold = match
}

// be has the proxy answer so from now on, and ends what is under way.
func (p *proxy) be(bad func(http.ResponseWriter, *http.Request) bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.bad = bad
	p.cut()
	p.open, p.cut = context.WithCancel(context.Background())
}

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p.mu.Lock()
	bad, open := p.bad, p.open
	a := asked{time.Now(), verbOf(r), r.URL.Path, r.URL.Query().Get("fieldSelector")}
	p.asked = append(p.asked, a)
	holds := p.hold != nil && p.hold(a)
	p.mu.Unlock()
	if holds {
		hang(w, r)
		return
	}
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	defer context.AfterFunc(open, cancel)()
	r = r.WithContext(ctx)
	if bad != nil && bad(w, r) {
		return
	}
	p.forward.ServeHTTP(w, r)
}

// verbOf is a request's verb, as RBAC has it.
func verbOf(r *http.Request) string {
	switch r.Method {
	case http.MethodGet:
		if r.URL.Query().Get("watch") != "" {
			return "watch"
		}
		if strings.HasSuffix(r.URL.Path, "s") {
			return "list"
		}
		return "get"
	case http.MethodPost:
		return "create"
	}
	return strings.ToLower(r.Method)
}

// since lists what came after a moment and that match picks.
func (p *proxy) since(t time.Time, match func(asked) bool) (out []asked) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range p.asked {
		if !a.at.Before(t) && match(a) {
			out = append(out, a)
		}
	}
	return out
}

// refuse answers with a status, as the apiserver does; later, in seconds, is when to come again.
func refuse(w http.ResponseWriter, status int, later int) {
	reason := "InternalError"
	if later > 0 {
		reason = "TooManyRequests"
		w.Header().Set("Retry-After", fmt.Sprint(later))
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	fmt.Fprintf(w, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"the test says so",`+
		`"reason":%q,"details":{"retryAfterSeconds":%d},"code":%d}`, reason, later, status)
}

// hang holds a request open until the client ends it, as one that was accepted and forgotten.
func hang(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	<-r.Context().Done()
}
