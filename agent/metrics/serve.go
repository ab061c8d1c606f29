package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Listen takes the port for metrics and health, nil if none is wanted. It comes before anything is
// decided about this node, so that a port that is taken leaves nothing half done.
func Listen(addr string) (net.Listener, error) {
	if addr == "off" {
		return nil, nil
	}
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics and health: %w (set ports.metrics to another address, or to off)", err)
	}
	return l, nil
}

// Serve answers /metrics, /healthz and /readyz until ctx ends. at is what listens there: Listen's argument.
func (m *Metrics) Serve(ctx context.Context, at string, l net.Listener) {
	m.serving.Lock()
	defer m.serving.Unlock()
	m.use(at, l)
	context.AfterFunc(ctx, func() {
		m.serving.Lock()
		defer m.serving.Unlock()
		m.use("off", nil)
		m.ended = true
	})
}

// use goes over to another listener; nil: none. The caller holds serving.
func (m *Metrics) use(at string, l net.Listener) {
	if m.server != nil {
		m.server.Close()
	}
	m.at, m.server = at, nil
	if l != nil {
		m.server = &http.Server{Handler: m.Handler(), ReadHeaderTimeout: 5 * time.Second}
		go m.server.Serve(l)
	}
}

// Move answers at another address, or nowhere at "off". After an error it answers where it did.
func (m *Metrics) Move(to string) error {
	m.serving.Lock()
	defer m.serving.Unlock()
	if m.ended {
		return errors.New("the agent is stopping")
	}
	l, err := Listen(to)
	if errors.Is(err, syscall.EADDRINUSE) && m.server != nil { // perhaps by ourselves, at an address that covers both
		before := m.at
		m.use("off", nil)
		if l, err = Listen(to); err != nil {
			back, e := Listen(before)
			m.use(before, back)
			err = errors.Join(err, e)
		}
	}
	if err != nil {
		return err
	}
	m.use(to, l)
	return nil
}

// Handler answers these three and nothing else. Never net/http's default mux: packages register profiles and variables
// there.
func (m *Metrics) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := m.cfg.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}
