package egresses

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api/apitest"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// answers are what nodes say, by ID; one without an answer never says anything.
type answers struct {
	mu        sync.Mutex
	now, most int
	of        map[string]func() (*skeinv1.EgressReportResponse, error)
}

func (a *answers) Report(ctx context.Context, node identity.ID,
	_ *skeinv1.EgressReportRequest) (*skeinv1.EgressReportResponse, error) {
	a.mu.Lock()
	a.now++
	a.most = max(a.most, a.now)
	a.mu.Unlock()
	defer func() { a.mu.Lock(); a.now--; a.mu.Unlock() }()
	if f := a.of[node.String()]; f != nil {
		return f()
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

func (a *answers) Attach(context.Context, *skeinv1.AttachEgressRequest) (*skeinv1.AttachEgressResponse, error) {
	return nil, connect.NewError(connect.CodeNotFound, errors.New("this host has no pod web/nginx-1; `skein ip list` "+
		"shows those it has"))
}

// TestAskEgresses: nodes that do not answer cost one deadline together, not one each, and keep nobody's answer back.
func TestAskEgresses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		instance := &answers{of: map[string]func() (*skeinv1.EgressReportResponse, error){
			apitest.GW1: func() (*skeinv1.EgressReportResponse, error) {
				return &skeinv1.EgressReportResponse{Clients: []*skeinv1.EgressClientReport{{Key: "web/a"}}}, nil
			},
			apitest.GW2: func() (*skeinv1.EgressReportResponse, error) {
				return nil, connect.NewError(connect.CodeUnimplemented, errors.New("404"))
			},
			apitest.Host: func() (*skeinv1.EgressReportResponse, error) {
				return nil, connect.NewError(connect.CodeUnavailable, errors.New("the gateway starts"))
			},
		}}
		ask := []string{apitest.GW1, apitest.GW2, apitest.Host, "no ID"}
		for i := range atOnce - 3 {
			ask = append(ask, fmt.Sprintf("%016x", i+1))
		}
		start := time.Now()
		a := EgressService{Host: instance}
		reports, silent := a.ask(t.Context(), ask, &skeinv1.EgressReportRequest{})
		if took := time.Since(start); took != Patience {
			t.Errorf("it took %s", took)
		}
		if len(reports) != 1 || reports[apitest.GW1].GetClients()[0].GetKey() != "web/a" {
			t.Errorf("reports %v", reports)
		}
		if silent[apitest.GW2] != "its version of skein does not support egresses" ||
			silent[apitest.Host] != "the gateway starts" ||
			silent["0000000000000001"] != "it did not answer within 1.5s" || len(silent) != atOnce-1 {
			t.Errorf("silent: %v", silent)
		}
		for i := range 100 {
			ask = append(ask, fmt.Sprintf("%016x", i+1000))
		}
		if a.ask(t.Context(), ask, &skeinv1.EgressReportRequest{}); instance.most > atOnce {
			t.Errorf("%d were asked at a time", instance.most)
		}
	})
}

func TestAttachEgressRefuses(t *testing.T) {
	for _, c := range []struct {
		instance Host
		r        *skeinv1.AttachEgressRequest
		want     string
	}{
		{nil, &skeinv1.AttachEgressRequest{Pod: "nginx-1", Egresses: []string{"a/b"}}, "failed_precondition: this node " +
			"runs no egresses: it only relays; ask another"},
		{&answers{}, &skeinv1.AttachEgressRequest{Egresses: []string{"a/b"}}, "invalid_argument: no pod is named: give its " +
			"name and namespace, or its container's ID"},
		{&answers{}, &skeinv1.AttachEgressRequest{Pod: "nginx-1"}, "invalid_argument: no egress is named; `skein egress " +
			"list` shows those there are"},
		{&answers{}, &skeinv1.AttachEgressRequest{Pod: "nginx-1", Egresses: []string{"a/b"}}, "not_found: this host has no " +
			"pod web/nginx-1; `skein ip list` shows those it has"},
	} {
		a := EgressService{Host: c.instance}
		if _, err := a.AttachEgress(t.Context(), c.r); err == nil || err.Error() != c.want {
			t.Errorf("%v: %v\nwant %s", c.r, err, c.want)
		}
	}
}

// TestShownEgress: what the API gives is what was told, in order, without other egresses' clients.
func TestShownEgress(t *testing.T) {
	p := natPicture()
	p.silent[apitest.GW1] = "it has not been heard from lately"
	p.silent[""] = "of 300 members only gateways and this node were asked"
	r := p.shown()
	var silent []string
	for _, s := range r.GetSilent() {
		silent = append(silent, s.GetNode()+": "+s.GetError())
	}
	if have := strings.Join(silent, "\n"); have != "gw1: it has not been heard from lately\n: of 300 members only "+
		"gateways and this node were asked" {
		t.Errorf("silent:\n%s", have)
	}
	if len(r.GetGateways()) != 1 || r.GetGateways()[0].GetNodeId() != apitest.GW2 {
		t.Errorf("gateways: %v", r.GetGateways())
	}
	if len(r.GetClients()) != 1 || r.GetClients()[0].GetNode() != "host" || len(r.GetClients()[0].GetClients()) != 2 {
		t.Errorf("clients: %v", r.GetClients())
	}
	s := r.GetSummary()
	if strings.Join(s.GetEligible(), " ") != "gw1 gw2" || s.GetSlots()[0].GetOwner() != "gw2" ||
		!s.GetSlots()[0].GetAlive() {
		t.Errorf("summary: %v", s)
	}
}

// TestMissingEgress: who asked for an egress that is not there is named with it.
func TestMissingEgress(t *testing.T) {
	none := connect.NewError(connect.CodeNotFound, errors.New("there is no egress internet/nut"))
	report := func(keys ...string) map[string]*skeinv1.EgressReportResponse {
		r := &skeinv1.EgressReportResponse{}
		for _, k := range keys {
			r.Clients = append(r.Clients, &skeinv1.EgressClientReport{Key: k,
				Egresses: []*skeinv1.EgressOfClient{{Namespace: "internet", Name: "nat"}, {Namespace: "internet", Name: "nut",
					State: "unknown"}}})
		}
		return map[string]*skeinv1.EgressReportResponse{apitest.Host: r}
	}
	for _, c := range []struct {
		namespace, name string
		reports         map[string]*skeinv1.EgressReportResponse
		want            string
	}{
		{"internet", "nut", nil, "not_found: there is no egress internet/nut"},
		{"lab", "nut", report("web/a"), "not_found: there is no egress internet/nut"},
		{"internet", "nut", report("web/b", "web/a"), "not_found: there is no egress internet/nut; waiting: web/a for " +
			"internet/nut, web/b for internet/nut, which will use it when it is defined"},
		{"", "nut", report("a", "b", "c", "d", "e", "f", "g"), "not_found: there is no egress internet/nut; waiting: a for " +
			"internet/nut, b for internet/nut, c for internet/nut, d for internet/nut, " +
			"e for internet/nut and 2 more, which will use it when it is defined"},
	} {
		if err := stillMissing(none, c.namespace, c.name, c.reports); err.Error() != c.want {
			t.Errorf("%v\nwant %s", err, c.want)
		}
	}
	nodes := []member{labelled(apitest.GW1, "gw1", "egress=yes"), labelled(apitest.Host, "host")}
	if ask, silent := whomToAsk(nil, nil, nodes, apitest.Host); len(ask) != 2 || len(silent) != 0 {
		t.Errorf("asks %v, silent %v", ask, silent)
	}
}
