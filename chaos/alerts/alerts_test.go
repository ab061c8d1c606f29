package alerts

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/skeinmesh/skein/chaos/lab"
	"github.com/skeinmesh/skein/chaos/lab/fabric"
	"github.com/skeinmesh/skein/chaos/lab/labtest"
	"github.com/skeinmesh/skein/internal/testenv"
)

// mesh has a part of everything that alerts and queries are about. Prometheus runs on mon1, which nothing happens to.
const mesh = `name: alerts
sites:
  world: {nat: none}
  dc:    {nat: none}
  home:  {nat: port-restricted-cone}
nodes:
  target: {site: world, role: host} # 198.18.1.11
  dc1:    {site: dc, server: true, relay: true}
  dc2:    {site: dc, server: true}
  dc3:    {site: dc, server: true}
  mon1:   {site: dc, labels: {gateway: 'yes'}}
  home1:  {site: home}
config: {ports: {metrics: "0.0.0.0:9469"}}
pools:
  default: {subnets: [{ipv4: 10.100.0.0/24}], blockSizeBits: 3}
  one:     {subnets: [{ipv4: 10.101.0.0/29}], blockSizeBits: 3, allowed: [default]}
egresses:
  out/nat:
    destinations: [0.0.0.0/0]
    gateways: {gateway: 'yes'}
    probes: ['icmp:198.18.1.11']
`

const (
	scrapeEvery = time.Second
	soon        = 60 * time.Second
	port        = "9090"
	// loadRecord is what an autoscaler reads of an egress (docs/egress.md, "By load").
	loadRecord = "egress:skein_egress_bytes_total:rate2m"
)

// TestAlertsAndDashboard: in a mesh without a fault every alert has something to judge and is quiet, and every query of
// the dashboard has an answer; each fault is seen by the alerts that are about it.
func TestAlertsAndDashboard(t *testing.T) {
	w := raise(t)
	w.eventually("every query of the dashboard has an answer", func() error {
		var errs []error
		for _, q := range w.queries {
			if have, err := w.ask(q, 0); err != nil || len(have) == 0 {
				errs = append(errs, fmt.Errorf("%s: %v, %v", q, have, err))
			}
		}
		return errors.Join(errs...)
	})
	w.eventually("every alert has something to judge, and is quiet", func() error {
		var errs []error
		for name, expr := range w.alerts {
			judged, err := w.ask(judge(expr), ahead(expr))
			have, err2 := w.ask(expr, ahead(expr))
			if err = errors.Join(err, err2); err != nil || len(judged) == 0 || len(have) > 0 {
				errs = append(errs, fmt.Errorf("%s judges %v and finds %v: %v", name, judged, have, err))
			}
		}
		return errors.Join(errs...)
	})
	w.rulesAreWell()
	w.load()
	w.faults()
}

// load: what an egress carries is recorded under its namespace and name, as an autoscaler's metrics are asked for.
func (w *world) load() {
	if err := w.lab.Serve(lab.Serve{Nodes: []string{"target"}, Port: 80}); err != nil {
		w.Fatal(err)
	}
	if err := w.lab.StartPods(w.ctx, soon, lab.StartPods{Nodes: []string{"home1"}, Pods: []string{"client"},
		Annotations: map[string]string{"skein.dev/egress.out": "nat"}}); err != nil {
		w.Fatal(err)
	}
	w.eventually("an egress's load is recorded", func() error {
		out := lab.Fetch{From: []string{"home1/client"}, To: []string{"target"}, Port: 80}
		if err := w.lab.Fetch(w.ctx, soon, out); err != nil {
			return err
		}
		have, err := w.ask(loadRecord+"{namespace=\"out\", name=\"nat\"} > 0", 0)
		if err == nil && len(have) != 1 {
			all, _ := w.ask(loadRecord, 0)
			err = fmt.Errorf("there are %v, of %v", have, all)
		}
		return err
	})
}

// faults are what some of the alerts are about. Those that need minutes, or a bug, are not provoked.
func (w *world) faults() {
	start := func(s lab.StartPods) {
		w.Helper()
		s.Nodes = []string{"home1"}
		if err := w.lab.StartPods(w.ctx, soon, s); err != nil {
			w.Fatal(err)
		}
	}
	start(lab.StartPods{Pods: []string{"last"}, Pool: "one"})
	w.fires("the last block of a pool is taken", "SkeinPoolExhausted")
	for i := range 6 {
		start(lab.StartPods{Pods: []string{fmt.Sprint("none", i)}, Pool: "none", Fails: true})
	}
	w.fires("pods get no network", "SkeinPodsWait")
	w.skein("dc1", "egress", "create", "out/none", "--destination", "192.0.2.0/24", "--gateway-label", "gateway=none")
	w.fires("an egress has no gateway", "SkeinEgressSlotFree")
	if err := w.lab.Block(lab.Block{From: []string{"mon1"}, To: []string{"target"}}); err != nil {
		w.Fatal(err)
	}
	w.fires("a gateway's probe is not answered", "SkeinEgressUnhealthy")
	if err := w.lab.Kill(w.ctx, "home1"); err != nil {
		w.Fatal(err)
	}
	w.fires("an agent is killed", "SkeinAgentDown", "SkeinPeersDown")
	if err := w.lab.Kill(w.ctx, "dc1", "dc2"); err != nil {
		w.Fatal(err)
	}
	w.fires("two of three servers are killed", "SkeinNoLeader", "SkeinServerCutOff", "SkeinEgressNoLease")
}

// judge is an alert's expression with an answer for each series that it looks at, whatever the answer is.
func judge(expr string) string {
	for _, op := range []string{" == ", " > ", " < "} {
		expr = strings.ReplaceAll(expr, op, op+"bool ")
	}
	return expr
}

// ahead is how much later than now an expression is evaluated, so that what it looks for in the past is there.
func ahead(expr string) time.Duration {
	_, rest, has := strings.Cut(expr, " offset ")
	if !has {
		return 0
	}
	d, err := time.ParseDuration(rest[:strings.IndexAny(rest, ")]} ")])
	if err != nil {
		panic(err)
	}
	return d
}

type world struct {
	*testing.T
	lab     *lab.Lab
	ctx     context.Context
	alerts  map[string]string // expressions by name
	records []string          // names of what rules record
	queries []string
	client  http.Client
}

func raise(t *testing.T) *world {
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	prometheus := filepath.Join(root, ".cache/prometheus/usr/bin/prometheus")
	if _, err := os.Stat(prometheus); err != nil {
		testenv.Missing(t, "Prometheus is missing: run .ci/prometheus-tools: "+err.Error())
	}
	l, base := labtest.Up(t, "al", mesh)
	ctx, cancel := context.WithTimeout(t.Context(), 8*time.Minute)
	t.Cleanup(cancel)
	w := &world{T: t, lab: l, ctx: ctx, queries: queriesOf(t, root)}
	w.alerts, w.records = rulesOf(t, root)
	w.client.Transport = &http.Transport{DisableKeepAlives: true,
		DialContext: func(context.Context, string, string) (c net.Conn, err error) {
			err = fabric.In(fabric.HostNS(l.Spec.Name, "mon1"), func() error {
				c, err = net.Dial("tcp", "127.0.0.1:"+port)
				return err
			})
			return c, err
		}}
	w.run(prometheus, root, base)
	return w
}

// run starts Prometheus, which scrapes each agent at its address of the overlay, and ends it with the test.
func (w *world) run(prometheus, root, base string) {
	var targets []string
	for _, n := range w.lab.Running() {
		info, err := w.lab.Node(n)
		if err != nil {
			w.Fatal(err)
		}
		targets = append(targets, fmt.Sprintf("{targets: [%s:9469], labels: {node: %s}}", info.Overlay[0], n))
	}
	config := filepath.Join(base, "prometheus.yml")
	text := fmt.Sprintf("global: {scrape_interval: %s, evaluation_interval: %[1]s}\nrule_files: [%s]\n"+
		"scrape_configs:\n- job_name: skein\n  static_configs: [%s]\n", scrapeEvery,
		filepath.Join(root, "deploy/prometheus/skein.rules.yaml"), strings.Join(targets, ", "))
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		w.Fatal(err)
	}
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan struct{})
	var said bytes.Buffer
	go func() {
		defer close(ended)
		exit, err := w.lab.ExecIO(ctx, "mon1", []string{prometheus, "--config.file=" + config,
			"--storage.tsdb.path=" + filepath.Join(base, "tsdb"), "--web.listen-address=127.0.0.1:" + port,
			"--query.lookback-delta=15m"}, lab.Stdio{Out: &said, Err: &said})
		if ctx.Err() == nil {
			w.Errorf("Prometheus ended: exit status %d, %v", exit, err)
		}
	}()
	w.Cleanup(func() {
		cancel()
		<-ended
		if w.Failed() {
			w.Logf("Prometheus said:\n%s", said.String())
		}
	})
}

// get reads what Prometheus's API says at a path.
func (w *world) get(path string, into any) error {
	r, err := w.client.Get("http://prometheus/api/v1/" + path)
	if err != nil {
		return err
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return err
	}
	var answer struct {
		Status, Error string
		Data          json.RawMessage
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return fmt.Errorf("%s: %w", body, err)
	}
	if answer.Status != "success" {
		return errors.New(answer.Error)
	}
	return json.Unmarshal(answer.Data, into)
}

// ask evaluates a query, some time from now, and returns its series with their values.
func (w *world) ask(query string, ahead time.Duration) (series []string, err error) {
	var data struct {
		Result []struct {
			Metric map[string]string
			Value  [2]any
		}
	}
	at := strconv.FormatFloat(float64(time.Now().Add(ahead).UnixMilli())/1000, 'f', 3, 64)
	if err := w.get("query?"+url.Values{"query": {query}, "time": {at}}.Encode(), &data); err != nil {
		return nil, err
	}
	for _, r := range data.Result {
		delete(r.Metric, "job")
		series = append(series, fmt.Sprint(r.Metric, " ", r.Value[1]))
	}
	slices.Sort(series)
	return series, nil
}

// rulesAreWell: Prometheus itself has loaded every rule and evaluates it without an error.
func (w *world) rulesAreWell() {
	var data struct {
		Groups []struct {
			Rules []struct{ Name, Health, LastError string }
		}
	}
	if err := w.get("rules", &data); err != nil {
		w.Fatal(err)
	}
	well := 0
	for _, g := range data.Groups {
		for _, r := range g.Rules {
			if r.Health != "ok" || w.alerts[r.Name] == "" && !slices.Contains(w.records, r.Name) {
				w.Errorf("rule %s: %s %s", r.Name, r.Health, r.LastError)
			}
			well++
		}
	}
	if want := len(w.alerts) + len(w.records); well != want {
		w.Errorf("Prometheus has %d rules, the file %d", well, want)
	}
}

// fires waits until alerts find something.
func (w *world) fires(after string, names ...string) {
	w.Helper()
	w.eventually(after, func() error {
		var errs []error
		for _, name := range names {
			expr, known := w.alerts[name]
			if !known {
				w.Fatalf("there is no alert %s", name)
			}
			if have, err := w.ask(expr, 0); err != nil || len(have) == 0 {
				judged, _ := w.ask(judge(expr), 0)
				errs = append(errs, fmt.Errorf("%s finds nothing, of %v: %v", name, judged, err))
			}
		}
		return errors.Join(errs...)
	})
}

func (w *world) eventually(what string, check func() error) {
	w.Helper()
	began := time.Now()
	for {
		err := check()
		if err == nil {
			w.Logf("%s after %s", what, time.Since(began).Round(time.Millisecond))
			return
		}
		if time.Since(began) > soon {
			w.Fatalf("%s: not within %s: %v", what, soon, err)
		}
		select {
		case <-w.ctx.Done():
			w.Fatalf("%s: %v", what, err)
		case <-time.After(scrapeEvery / 4):
		}
	}
}

func (w *world) skein(node string, args ...string) {
	w.Helper()
	out, exit, err := w.lab.Exec(w.ctx, node, append([]string{"skein"}, args...)...)
	if err != nil || exit != 0 {
		w.Fatalf("on %s, skein %s: exit status %d, %v: %s", node, strings.Join(args, " "), exit, err, out)
	}
}

// rulesOf are the expressions of alerts, by name, and the names of what other rules record.
func rulesOf(t *testing.T, root string) (alerts map[string]string, records []string) {
	b, err := os.ReadFile(filepath.Join(root, "deploy/prometheus/skein.rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct{ Alert, Record, Expr string }
		}
	}
	if err := yaml.Unmarshal(b, &file); err != nil {
		t.Fatal(err)
	}
	alerts = map[string]string{}
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			if r.Record != "" {
				records = append(records, r.Record)
			} else {
				alerts[r.Alert] = r.Expr
			}
		}
	}
	return alerts, records
}

// queriesOf are the expressions of a dashboard, wherever they stand in it.
func queriesOf(t *testing.T, root string) (out []string) {
	b, err := os.ReadFile(filepath.Join(root, "deploy/grafana/skein.json"))
	if err != nil {
		t.Fatal(err)
	}
	var board any
	if err := json.Unmarshal(b, &board); err != nil {
		t.Fatal(err)
	}
	var walk func(any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			if expr, ok := v["expr"].(string); ok {
				out = append(out, expr)
			}
			for _, in := range v {
				walk(in)
			}
		case []any:
			for _, in := range v {
				walk(in)
			}
		}
	}
	walk(board)
	slices.Sort(out)
	return out
}
