package consensus

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"log/slog"
	"net"
	"net/http"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/identity"
)

const (
	pingAfter   = 2 * time.Second // of silence on an RPC connection
	pingTimeout = 2 * time.Second
	// serverPingAfter is longer: a client that follows a stream sends nothing, so that it would be pinged all the time.
	// The client notices a dead connection sooner, and dials anew; on the server only handlers without a client must end.
	serverPingAfter = 10 * time.Second
	// idleTimeout is how long an unused connection stays open: less than pingAfter. Pings of a connection through a
	// leader of the site would keep the leader's path to this node busy, which costs more than a new connection.
	idleTimeout = 1500 * time.Millisecond
	// hurriedIdleTimeout is longer than the time between two renewals of a lease.
	hurriedIdleTimeout = 10 * time.Second
	// serverIdleTimeout is longer than that of clients of any version, so that no request meets a closing connection.
	serverIdleTimeout = 4 * time.Minute
	maxMessage        = 64 << 20               // a state in a snapshot
	maxRequest        = maxImport + maxCommand // what a service reads
	writeTimeout      = 10 * time.Second
)

// NewRequestID makes a random request ID.
func NewRequestID() string {
	var b [16]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

func http2Only() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true) // the streams of the control net are encrypted already
	return p
}

// Conns keeps one HTTP/2 connection per node over the control net.
type Conns struct {
	client    *http.Client
	transport *http.Transport
}

// NewConns makes connections as they are needed.
func NewConns(d Dialer) *Conns { return newConns(d, pingAfter, pingTimeout, idleTimeout) }

// NewHurriedConns makes connections for requests that come several times a second and must not hang: a connection on
// which nothing arrives for three quarters of a second is given up, and the next request dials anew.
func NewHurriedConns(d Dialer) *Conns {
	return newConns(d, 300*time.Millisecond, 450*time.Millisecond, hurriedIdleTimeout)
}

func newConns(d Dialer, pingAfter, pingTimeout, idle time.Duration) *Conns {
	transport := &http.Transport{
		Protocols: http2Only(),
		HTTP2:     &http.HTTP2Config{SendPingTimeout: pingAfter, PingTimeout: pingTimeout, WriteByteTimeout: writeTimeout},
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			id, err := identity.ParseID(host)
			if err != nil {
				return nil, err
			}
			c, err := d.Dial(ctx, id, identity.ALPNRPC)
			if err != nil {
				return nil, err
			}
			return plainConn{c}, nil
		},
		IdleConnTimeout: idle,
	}
	return &Conns{client: &http.Client{Transport: transport}, transport: transport}
}

// HTTP is the client for other services of nodes; the URL of a node is URL(id).
func (c *Conns) HTTP() *http.Client { return c.client }

// URL is the base URL of a node for HTTP.
func URL(id identity.ID) string { return "http://" + id.String() }

// Cluster is the ClusterService of a node.
func (c *Conns) Cluster(id identity.ID) skeinv1connect.ClusterServiceClient {
	return skeinv1connect.NewClusterServiceClient(c.client, URL(id), connect.WithReadMaxBytes(maxMessage))
}

// passer returns the ClusterService of a site's leader that passes events on. Its messages have at most passedBytes.
func (c *Conns) passer(id identity.ID) skeinv1connect.ClusterServiceClient {
	return skeinv1connect.NewClusterServiceClient(c.client, URL(id), connect.WithReadMaxBytes(passedBytes))
}

// Close closes idle connections.
func (c *Conns) Close() { c.transport.CloseIdleConnections() }

// plainConn hides that a connection is TLS: net/http would look for the protocol h2 in it.
type plainConn struct{ net.Conn }

type peerKey struct{}

// PeerFromContext is the node that sent a request.
func PeerFromContext(ctx context.Context) (identity.ID, bool) {
	id, ok := ctx.Value(peerKey{}).(identity.ID)
	return id, ok
}

// WithPeer makes a context in which a node is the sender, for handlers that are called directly.
func WithPeer(ctx context.Context, id identity.ID) context.Context {
	return context.WithValue(ctx, peerKey{}, id)
}

type writerKey struct{}

// writeDeadline limits the next write of a stream, so that a subscriber who does not read is cut.
func writeDeadline(ctx context.Context, d time.Duration) {
	if w, ok := ctx.Value(writerKey{}).(http.ResponseWriter); ok {
		_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(d)) // not all writers can; then the pings cut
	}
}

// NewHTTPServer serves handlers to the nodes that connect with ALPN skein-rpc; give it the listener of
// authenticated streams by Serve. Handlers learn by PeerFromContext who calls.
func NewHTTPServer(h http.Handler, log *slog.Logger) *http.Server {
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), writerKey{}, w)))
		}),
		Protocols: http2Only(),
		HTTP2: &http.HTTP2Config{SendPingTimeout: serverPingAfter, PingTimeout: pingTimeout,
			WriteByteTimeout: writeTimeout, MaxConcurrentStreams: 64},
		ReadHeaderTimeout: 5 * time.Second,
		MaxHeaderBytes:    32 << 10,
		IdleTimeout:       serverIdleTimeout,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if p, ok := c.(plainConn); ok {
				c = p.Conn
			}
			if id, ok := peerOf(c); ok {
				return WithPeer(ctx, id)
			}
			return ctx
		},
	}
}

// PlainListener hides from net/http that a listener's connections are TLS.
func PlainListener(l net.Listener) net.Listener { return plainListener{l} }

type plainListener struct{ net.Listener }

func (l plainListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return plainConn{c}, nil
}
