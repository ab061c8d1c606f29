package kube

import (
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	annotationtier "github.com/skeinmesh/skein/gossip/kube"
	"github.com/skeinmesh/skein/internal/testenv"
)

// badInput is a world in which the agents of dc1, home1 and cloud1 reach the apiserver through a proxy.
type badInput struct {
	world
	proxy *proxy
	hung  time.Time // when cloud1's watch of its pods was asked for that hangs
}

// How an apiserver that is well again is judged.
const (
	wellWithin   = 20 * time.Second       // after at most 6 s the agent asks again (kube, backoff)
	hangAtMost   = 3 * time.Minute        // kube, watchAtMost
	hangMargin   = 20 * time.Second       // for a machine that is busy
	askedEarlier = 100 * time.Millisecond // the agent counts from when it asked
	fewRequests  = 150                    // of three agents in fewIn while everything is refused
	fewIn        = 5 * time.Second
)

// TestBadInput: an apiserver that answers badly, and objects that nobody should have made.
func TestBadInput(t *testing.T) {
	testenv.NeedRoot(t)
	b := &badInput{world: raise(t, "b")}
	b.proxy = startProxy(t, b.cluster)
	for _, host := range []string{"dc1", "home1", "cloud1"} {
		b.byProxy(host)
	}
	b.watchHangs()
	for _, one := range []struct {
		name string
		run  func(*badInput)
	}{
		{"TooManyRequests", func(b *badInput) { b.refused(http.StatusTooManyRequests, 2, "asks to try again later") }},
		{"InternalError", func(b *badInput) { b.refused(http.StatusInternalServerError, 0, "the test says so") }},
		{"StaleList", (*badInput).staleList},
		{"EmptyList", (*badInput).emptyList},
		{"NodeWithAHostsName", (*badInput).nodeWithAHostsName},
		{"EgressesAreChecked", (*badInput).egressesAreChecked},
		{"ClocksApart", (*badInput).clocksApart},
		{"ManyChanges", (*badInput).manyChanges},
		{"WatchHangs", (*badInput).hangIsNoticed},
	} {
		t.Run(one.name, func(t *testing.T) {
			inner := *b
			inner.T = t
			one.run(&inner)
		})
	}
}

// ask has a host's agent ask at another port.
func (b *badInput) ask(host string, port int) {
	b.Helper()
	file := filepath.Join(b.dir, host+".kubeconfig")
	text, err := os.ReadFile(file)
	if err == nil {
		text = regexp.MustCompile(`:644[0-9]"`).ReplaceAll(text, fmt.Appendf(nil, `:%d"`, port))
		err = errors.Join(os.WriteFile(file+".new", text, 0o600), os.Rename(file+".new", file))
	}
	if err != nil {
		b.Fatal(err)
	}
}

// byProxy sends a host's agent through the proxy.
func (b *badInput) byProxy(host string) {
	b.Helper()
	began := time.Now()
	b.ask(host, proxyPort)
	node := b.nodeOf[host]
	b.within(30*time.Second, host+" comes by the proxy", func() error {
		if len(b.proxy.since(began, func(a asked) bool { return a.fields == "spec.nodeName="+node })) == 0 {
			return errors.New("its pods are not asked for")
		}
		return nil
	})
}

// watchHangs has the next watch of cloud1's pods hang. hangIsNoticed, much later, sees what became of it.
func (b *badInput) watchHangs() {
	held := atomic.Bool{}
	b.proxy.holdOne(func(a asked) bool {
		return a.verb == "watch" && a.fields == "spec.nodeName=cloud1" && held.CompareAndSwap(false, true)
	})
	b.proxy.be(nil) // watches begin anew
	b.within(30*time.Second, "cloud1 watches its pods", func() error {
		if !held.Load() {
			return errors.New("not yet")
		}
		return nil
	})
	b.hung = time.Now()
	b.kubectl(nil, "create", "namespace", "quiet")
	b.kubectl([]byte(`{"apiVersion":"v1","kind":"Pod","metadata":{"namespace":"quiet","name":"job",
		"annotations":{"skein.dev/egress.out":"nat"}},"spec":{"nodeName":"cloud1","automountServiceAccountToken":false,
		"containers":[{"name":"c","image":"none"}]}}`), "apply", "-f", "-")
}

// knowsPod tells whether cloud1 has heard of the pod that was made while its watch hung.
func (b *badInput) knowsPod() (bool, error) {
	info, err := b.lab.Node("cloud1")
	if err != nil {
		return false, err
	}
	text, err := os.ReadFile(filepath.Join(info.Dir, "state", "kubernetes.json"))
	return strings.Contains(string(text), "quiet/job"), err
}

func (b *badInput) hangIsNoticed() {
	left := time.Until(b.hung.Add(hangAtMost + hangMargin))
	b.within(left, "the watch that hangs begins anew", func() error {
		knows, err := b.knowsPod()
		if err == nil && !knows {
			err = errors.New("cloud1 does not know the pod that was made meanwhile")
		}
		return err
	})
	b.Logf("a watch that hangs began anew, and its news was known, %s after it was asked for",
		time.Since(b.hung).Round(time.Second))
}

// refused: first writes are refused, then everything. The agents say so, do not press, and are well again soon.
func (b *badInput) refused(status, later int, says string) {
	what := fmt.Sprintf("status-%d", status)
	write := func(r *http.Request) bool { return r.Method == http.MethodPatch || r.Method == http.MethodPost }
	b.proxy.be(func(w http.ResponseWriter, r *http.Request) bool {
		if write(r) {
			refuse(w, status, later)
		}
		return write(r)
	})
	began := time.Now()
	b.annotate("home1", "skein.dev/location="+what)
	b.site("home1", what, wellWithin) // by gossip, since the watch goes on
	b.tells("home1", "write the record", says)
	own := func(a asked) bool { return a.verb == "patch" && strings.HasSuffix(a.path, "/nodes/home1.example.com") }
	b.within(wellWithin, "it is tried again", func() error {
		if n := len(b.proxy.since(began, own)); n < 2 {
			return fmt.Errorf("%d attempts", n)
		}
		return nil
	})
	tries := b.proxy.since(began, own)
	for i := range tries[1:] {
		if gap := tries[i+1].at.Sub(tries[i].at); gap < time.Duration(later)*time.Second-askedEarlier {
			b.Errorf("asked to come after %ds, home1 comes after %s", later, gap.Round(time.Millisecond))
		}
	}
	b.proxy.be(func(w http.ResponseWriter, _ *http.Request) bool { refuse(w, status, later); return true })
	all := time.Now()
	b.tells("home1", "nodes", says)
	b.annotate("home1", "skein.dev/location=after-"+what)
	b.pass(all, fewIn)
	n := len(b.proxy.since(all, func(asked) bool { return true }))
	b.Logf("while everything is refused, three agents make %d requests in %s", n, time.Since(all).Round(time.Second))
	if n > fewRequests {
		b.Errorf("at most %d are well behaved", fewRequests)
	}
	b.proxy.be(nil)
	took := b.site("home1", "after-"+what, wellWithin)
	b.Logf("what was said meanwhile is known everywhere %s after the apiserver is well", took.Round(time.Millisecond))
	b.well()
	b.annotate("home1", "skein.dev/location-")
	b.site("home1", "", wellWithin)
}

// pass waits until so long has passed since a moment, in which something must not happen.
func (b *badInput) pass(since time.Time, d time.Duration) {
	select {
	case <-time.After(time.Until(since.Add(d))):
	case <-b.Context().Done():
	}
}

// tells waits until a host's status has a problem with some words.
func (b *badInput) tells(host string, says ...string) {
	b.Helper()
	took := b.within(wellWithin, fmt.Sprintf("%s tells of %q", host, says), func() error {
		problems := b.problems(host)
		for _, p := range problems {
			all := true
			for _, s := range says {
				all = all && strings.Contains(p, s)
			}
			if all {
				return nil
			}
		}
		return fmt.Errorf("problems: %q", problems)
	})
	b.Logf("%s tells of it after %s", host, took.Round(time.Millisecond))
}

// well waits until no agent has a problem with Kubernetes, and home1's Node has its record.
func (b *badInput) well() {
	b.Helper()
	for host := range b.nodeOf {
		b.within(wellWithin, "no problem on "+host, func() error { return none(b.problems(host)) })
	}
	b.within(wellWithin, "home1's record on its Node", func() error {
		v, err := b.annotation("home1", annotationtier.Annotation)
		if err != nil {
			return err
		}
		r, err := recordIn(v)
		have, err2 := b.seen("dc1", "home1")
		if err = errors.Join(err, err2); err == nil && r.GetSite() != have.GetSite() {
			err = fmt.Errorf("it has site %q, want %q", r.GetSite(), have.GetSite())
		}
		return err
	})
}

// nodesList tells whether a request asks for the list of all Nodes; a watch that would bring it counts too.
func nodesList(r *http.Request) bool {
	return r.URL.Path == "/api/v1/nodes" && r.URL.Query().Get("fieldSelector") == ""
}

// oldNodes answers lists of Nodes with answer, lets no watch of them bring a list, and then lets them hang.
func oldNodes(answer func(http.ResponseWriter, *http.Request)) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		q := r.URL.Query()
		switch {
		case !nodesList(r):
			return false
		case q.Get("sendInitialEvents") != "":
			refuse(w, http.StatusBadRequest, 0)
		case q.Get("watch") != "":
			hang(w, r)
		default:
			answer(w, r)
		}
		return true
	}
}

// staleList: the apiserver shows Nodes as they were a while ago, and tells no news of them. It is one of several that
// lags behind.
func (b *badInput) staleList() {
	b.annotate("home1", "skein.dev/location=before")
	b.site("home1", "before", wellWithin)
	b.well()
	_, old, _ := strings.Cut(b.kubectl(nil, "get", "--raw", "/api/v1/nodes?limit=1"), `"resourceVersion":"`)
	old, _, _ = strings.Cut(old, `"`) // of the list
	b.annotate("home1", "skein.dev/location=after")
	b.site("home1", "after", wellWithin)
	lists := atomic.Int64{}
	began := time.Now()
	b.proxy.be(oldNodes(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		q.Set("resourceVersion", old)
		q.Set("resourceVersionMatch", "Exact")
		r.URL.RawQuery = q.Encode()
		lists.Add(1)
		b.proxy.forward.ServeHTTP(w, r)
	}))
	b.within(wellWithin, "all three take the stale list", func() error {
		if n := lists.Load(); n < 3 {
			return fmt.Errorf("%d lists", n)
		}
		return nil
	})
	b.pass(time.Now(), fewIn)
	r, err := b.seen("cloud1", "home1")
	if err != nil {
		b.Fatal(err)
	}
	toNodes := func(a asked) bool { return a.verb == "patch" && strings.Contains(a.path, "/nodes/") }
	writes := len(b.proxy.since(began, toNodes))
	b.Logf("with a stale list home1 is in site %q, and three agents made %d writes to Nodes in %s", r.GetSite(), writes,
		time.Since(began).Round(time.Second))
	if writes > 12 {
		b.Errorf("at most four of each agent are few")
	}
	b.proxy.be(nil)
	took := b.site("home1", "after", wellWithin)
	b.Logf("the newest annotation is known everywhere %s after the apiserver tells of it", took.Round(time.Millisecond))
	b.well()
	b.annotate("home1", "skein.dev/location-")
	b.site("home1", "", wellWithin)
}

// emptyList: the apiserver says for a while that there are no Nodes. Nobody forgets where he is, and nobody is revoked,
// also who is silent: asked for the one Node, it says that it is there.
func (b *badInput) emptyList() {
	b.annotate("home1", "skein.dev/location=kept")
	b.site("home1", "kept", wellWithin)
	if err := b.lab.Kill(b.Context(), "gone1"); err != nil {
		b.Fatal(err)
	}
	asksOne := func(a asked) bool { return a.verb == "get" && strings.HasSuffix(a.path, "/nodes/gone1") }
	began := time.Now()
	b.proxy.be(oldNodes(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprint(w, `{"kind":"PartialObjectMetadataList","apiVersion":"meta.k8s.io/v1",`+
			`"metadata":{"resourceVersion":"1"},"items":[]}`)
	}))
	b.within(90*time.Second, "dc1 asks for the one Node before it revokes its member", func() error {
		if len(b.proxy.since(began, asksOne)) == 0 {
			return errors.New("it does not")
		}
		return nil
	})
	b.pass(time.Now(), fewIn)
	if out := b.skein("dc1", "nodes"); !strings.Contains(out, "gone1") {
		b.Errorf("a silent member was revoked on an empty list:\n%s", out)
	}
	if r, err := b.seen("cloud1", "home1"); err != nil || r.GetSite() != "kept" {
		b.Errorf("home1 is in site %q, want kept: %v", r.GetSite(), err)
	}
	b.proxy.be(nil)
	if err := b.lab.Start(b.Context(), "gone1"); err != nil {
		b.Fatal(err)
	}
	b.well()
	b.annotate("home1", "skein.dev/location-")
	b.site("home1", "", wellWithin)
}

// nodeWithAHostsName: a Node is called as a host is that is another Node. It has no say in that host, and its end is
// not the host's.
func (b *badInput) nodeWithAHostsName() {
	if err := b.cluster.AddNode(b.Context(), "home1"); err != nil {
		b.Fatal(err)
	}
	v, err := b.annotation("home1", annotationtier.Annotation)
	if err != nil {
		b.Fatal(err)
	}
	b.kubectl(nil, "label", "node", "home1", "skein.dev/stolen=yes")
	b.kubectl(nil, "annotate", "node", "home1", "skein.dev/location=stolen", annotationtier.Annotation+"="+v)
	for _, host := range []string{"dc1", "home1", "cloud1"} { // who has heard of the one annotation has of all
		b.tells(host, "record of Node home1:", `says it is Node "home1.example.com"`)
	}
	b.within(wellWithin, "its MeshNode", func() error {
		if node := b.get("{.status.kubernetesNode}", "meshnode", "home1"); node != "home1.example.com" {
			return fmt.Errorf("it says that it is Node %q", node)
		}
		return nil
	})
	if err := b.lab.Kill(b.Context(), "home1"); err != nil {
		b.Fatal(err)
	}
	b.kubectl(nil, "delete", "node", "home1")
	silent := time.Now()
	const grace = 5 * time.Second // revokeAfterSeconds of dc1
	b.pass(silent, 5*grace/2)
	out := b.skein("dc1", "nodes", "-o", "json")
	if !strings.Contains(out, `"home1"`) {
		b.Errorf("host home1, which is silent, was revoked with a Node that it is not:\n%s", out)
	}
	if strings.Contains(out, "stolen") {
		b.Errorf("the Node's label or site is taken for host home1's:\n%s", out)
	}
	if err := b.lab.Start(b.Context(), "home1"); err != nil {
		b.Fatal(err)
	}
	b.site("home1", "", wellWithin)
	b.well()
}

// egressesAreChecked: the schema refuses what cannot be, and names the field.
func (b *badInput) egressesAreChecked() {
	const ways = `"gateways":{"a":"b"}`
	for what, c := range map[string]struct{ spec, says string }{
		"rubbish":         {`"destinations":["0.0.0.0/0","10.300.0.0/16"],` + ways, "spec.destinations[1]: Invalid value"},
		"host bits":       {`"destinations":["192.0.2.1/24"],` + ways, "want a CIDR without host bits"},
		"no destination":  {`"destinations":[],` + ways, "spec.destinations"},
		"no gateways":     {`"destinations":["::/0"]`, "spec.gateways: Required value"},
		"too many slots":  {`"destinations":["::/0"],"replicas":65,` + ways, "spec.replicas"},
		"a wrong address": {`"destinations":["::/0"],"addresses":[{"ipv4":"fd00::1"}],` + ways, "spec.addresses[0].ipv4"},
		"a wrong key":     {`"destination":["::/0"],"destinations":["::/0"],` + ways, `unknown field "spec.destination"`},
	} {
		o := fmt.Appendf(nil, `{"apiVersion":"skein.dev/v1alpha1","kind":"Egress",
			"metadata":{"namespace":"default","name":"bad"},"spec":{%s}}`, c.spec)
		out, err := b.cluster.Kubectl(b.Context(), o, "apply", "-f", "-")
		if err == nil || !strings.Contains(err.Error(), c.says) {
			b.Errorf("%s: %s, %v; want it refused: %s", what, out, err, c.says)
		}
	}
}

// clocksApart: to an agent whose clock is hours behind or ahead, the apiserver's certificate is not valid yet, or any
// more. Here the certificate is of another time, and the clocks are one, which is the same to whoever compares them.
func (b *badInput) clocksApart() {
	b.annotate("home1", "skein.dev/location=told")
	b.site("home1", "told", wellWithin)
	now := time.Now()
	for i, c := range []struct {
		what, says  string
		from, until time.Time
	}{
		{"home1's clock is three hours behind", "is before", now.Add(3 * time.Hour), now.Add(4 * time.Hour)},
		{"home1's clock is three hours ahead", "is after", now.Add(-4 * time.Hour), now.Add(-3 * time.Hour)},
	} {
		port := proxyPort + 1 + i
		b.proxy.serve(b.T, b.cluster, port, c.from, c.until)
		b.ask("home1", port)
		b.Log(c.what)
		b.tells("home1", "nodes", "certificate has expired or is not yet valid", c.says)
		if r, err := b.seen("cloud1", "home1"); err != nil || r.GetSite() != "told" {
			b.Errorf("%s: it is in site %q, want told: %v", c.what, r.GetSite(), err)
		}
	}
	b.byProxy("home1")
	b.annotate("home1", "skein.dev/location-")
	b.site("home1", "", wellWithin)
	b.well()
}

// manyChanges: Nodes that are not members change as often as this machine can make them, up to a thousand times a
// second. Agents stay small and quick.
func (b *badInput) manyChanges() {
	const (
		many    = 50 // Nodes
		atOnce  = 16
		perSec  = 1000
		lasting = 8 * time.Second
	)
	for i := range many {
		o := fmt.Sprintf(`{"apiVersion":"v1","kind":"Node","metadata":{"name":"busy-%d","labels":{"busy":"yes"}}}`, i)
		if err := b.asAdmin("POST", "/api/v1/nodes", o); err != nil {
			b.Fatal(err)
		}
	}
	hosts := []string{"dc1", "home1", "cloud1"}
	before, err := b.lab.Usage(b.Context(), hosts...)
	if err != nil {
		b.Fatal(err)
	}
	began := time.Now()
	var made, failed atomic.Int64
	var all sync.WaitGroup
	tickets := make(chan int)
	for range atOnce {
		all.Go(func() {
			for n := range tickets {
				if err := b.asAdmin("PATCH", fmt.Sprintf("/api/v1/nodes/busy-%d", n%many),
					fmt.Sprintf(`{"metadata":{"labels":{"topology.kubernetes.io/region":"r%d"}}}`, n)); err != nil {
					failed.Add(1)
					continue
				}
				made.Add(1)
			}
		})
	}
	all.Go(func() {
		defer close(tickets)
		ticker := time.NewTicker(time.Second / perSec)
		defer ticker.Stop()
		for n := 0; time.Since(began) < lasting; n++ {
			<-ticker.C
			tickets <- n
		}
	})
	b.annotate("home1", "skein.dev/location=busy")
	took := b.site("home1", "busy", wellWithin)
	all.Wait()
	lasted := time.Since(began)
	after, err := b.lab.Usage(b.Context(), hosts...)
	if err != nil {
		b.Fatal(err)
	}
	b.Logf("%.0f changes a second for %s (%d failed); an annotation among them is known everywhere after %s",
		float64(made.Load())/lasted.Seconds(), lasted.Round(time.Second), failed.Load(), took.Round(time.Millisecond))
	for _, h := range hosts {
		cpu := float64(after[h].GetCpuNanos()-before[h].GetCpuNanos()) /
			float64(after[h].GetUptimeNanos()-before[h].GetUptimeNanos())
		b.Logf("%s: %.2f of a processor, %d MiB", h, cpu, after[h].GetRssBytes()>>20)
		if cpu > 0.5 {
			b.Errorf("%s takes %.2f of a processor, at most half of one is fair", h, cpu)
		}
	}
	if failed.Load() > made.Load()/10 || made.Load() < 100 {
		b.Errorf("%d changes were made and %d failed: this was no load", made.Load(), failed.Load())
	}
	b.annotate("home1", "skein.dev/location-")
	b.kubectl(nil, "delete", "nodes", "-l", "busy=yes", "--wait=false")
	b.site("home1", "", wellWithin)
}

// asAdmin asks the apiserver as the cluster's administrator.
func (b *badInput) asAdmin(method, path, body string) error {
	r := httptest.NewRequestWithContext(b.Context(), method, "https://apiserver"+path, strings.NewReader(body))
	kinds := map[string]string{"POST": "application/json", "PATCH": "application/merge-patch+json"}
	r.Header.Set("Content-Type", kinds[method])
	answer := httptest.NewRecorder()
	b.proxy.admin.ServeHTTP(answer, r)
	if answer.Code >= 300 {
		return fmt.Errorf("%s %s: %d: %s", method, path, answer.Code, answer.Body)
	}
	return nil
}

// recordIn reads a record's annotation without verifying it.
func recordIn(value string) (*skeinv1.Record, error) {
	s, err := annotationtier.Decode(value)
	if err != nil {
		return nil, err
	}
	r := new(skeinv1.Record)
	return r, unmarshal(s, r)
}
