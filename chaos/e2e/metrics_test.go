package e2e

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// get asks an agent's HTTP port in its host's namespace.
func get(t *testing.T, host, path string) (status int, body io.Reader) {
	t.Helper()
	c := http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (c net.Conn, err error) {
			err = fabric.In(fabric.HostNS(labName, host), func() error {
				c, err = net.Dial("tcp", "127.0.0.1:9469")
				return err
			})
			return c, err
		},
	}}
	r, err := c.Get("http://skein" + path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Body.Close() })
	return r.StatusCode, r.Body
}

// scrape reads all metrics, as Prometheus would.
func scrape(t *testing.T, host string) map[string]*dto.MetricFamily {
	t.Helper()
	status, body := get(t, host, "/metrics")
	if status != http.StatusOK {
		text, _ := io.ReadAll(body)
		t.Fatalf("/metrics: status %d: %s", status, text)
	}
	p := expfmt.NewTextParser(model.LegacyValidation)
	all, err := p.TextToMetricFamilies(body)
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// values are a family's series: label=value pairs in order, and what they have.
func values(f *dto.MetricFamily) map[string]float64 {
	out := map[string]float64{}
	for _, m := range f.GetMetric() {
		var labels []string
		for _, l := range m.GetLabel() {
			labels = append(labels, l.GetName()+"="+l.GetValue())
		}
		slices.Sort(labels)
		out[strings.Join(labels, " ")] = m.GetGauge().GetValue() + m.GetCounter().GetValue() // each has one
	}
	return out
}

func TestMetricsAndHealth(t *testing.T) {
	shared(t)
	eventually(t, "the metrics tell how the peer is reached", func() error {
		all := scrape(t, "seed")
		for _, want := range []struct {
			family, series string
			least          float64
		}{
			{"skein_peer_path", "path=direct peer=peer", 1},
			{"skein_path_changes_total", "change=to_direct", 2}, // peer and third
			{"skein_punches_total", "kind=sent", 0},
		} {
			if have, ok := values(all[want.family])[want.series]; !ok || have < want.least {
				return fmt.Errorf("%s %s: %g, %t", want.family, want.series, have, ok)
			}
		}
		for series := range values(all["skein_info"]) {
			if !strings.Contains(series, "mode=direct") || !strings.Contains(series, "nat=none") {
				return fmt.Errorf("skein_info %s", series)
			}
		}
		if all["skein_path_silence_seconds"].GetMetric()[0].GetSummary() == nil {
			return errNotYet
		}
		return nil
	})
	for _, path := range []string{"/healthz", "/readyz"} {
		if status, body := get(t, "seed", path); status != http.StatusOK {
			text, _ := io.ReadAll(body)
			t.Errorf("%s: status %d: %s", path, status, text)
		}
	}
	if status, _ := get(t, "seed", "/else"); status != http.StatusNotFound {
		t.Errorf("/else: status %d, want %d", status, http.StatusNotFound)
	}
}
