package kube

import (
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"time"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

const (
	loadMetric = "skein_egress_bytes_per_second"
	metricsAPI = "external.metrics.k8s.io"
)

// egressByLoad: Kubernetes' autoscaler sets an Egress's replicas by what it carries, as docs/egress.md shows it.
// Programs that serve such metrics are not to be had here: a server on a host of the mesh answers as they do.
func (f fleet) egressByLoad() {
	var load atomic.Int64 // bytes a second, of the egress
	load.Store(140e6)
	f.serveMetrics("vm1", &load)
	f.apply(object{"apiVersion": "skein.dev/v1alpha1", "kind": "Egress",
		"metadata": object{"name": "busy", "namespace": "default"},
		"spec":     object{"destinations": []string{"203.0.113.0/24"}, "gateways": object{"gateway": "yes"}}},
		object{"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler",
			"metadata": object{"name": "busy", "namespace": "default"},
			"spec": object{
				"scaleTargetRef": object{"apiVersion": "skein.dev/v1alpha1", "kind": "Egress", "name": "busy"},
				"minReplicas":    1, "maxReplicas": 4,
				"behavior": object{"scaleDown": object{"stabilizationWindowSeconds": 0}},
				"metrics": []object{{"type": "External", "external": object{
					"metric": object{"name": loadMetric, "selector": object{"matchLabels": object{"name": "busy"}}},
					"target": object{"type": "AverageValue", "averageValue": "50M"}}}}}})
	f.remove("hpa/busy", "egress.skein.dev/busy")
	has := func(replicas string) func() error {
		return func() error {
			out, err := f.Cluster.Kubectl(f.Context(), nil, "get", "egress.skein.dev", "busy", "-o",
				"jsonpath={.spec.replicas} {.status.replicas}")
			if err == nil && out != replicas+" "+replicas {
				said, _ := f.Cluster.Kubectl(f.Context(), nil, "get", "hpa", "busy", "-o", "jsonpath={.status.conditions}")
				err = fmt.Errorf("it has %s replicas; the autoscaler says %s", out, said)
			}
			return err
		}
	}
	more := f.await(60*time.Second, "140 MB/s have three slots", has("3"))
	load.Store(40e6)
	fewer := f.await(60*time.Second, "40 MB/s have one", has("1"))
	f.Logf("the autoscaler has changed the slots after %s and %s", more.Round(time.Millisecond),
		fewer.Round(time.Millisecond))
}

// serveMetrics serves the metric of the egress busy on a host, to the apiserver, as the API of external metrics.
func (f fleet) serveMetrics(host string, load *atomic.Int64) {
	f.Helper()
	info, err := f.Lab.Node(host)
	if err != nil {
		f.Fatal(err)
	}
	now := time.Now()
	cert, key, err := f.Cluster.ca.issueFor(now.Add(-time.Hour), now.Add(time.Hour), "serving", nil,
		[]string{"metrics.default.svc"})
	if err != nil {
		f.Fatal(err)
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		f.Fatal(err)
	}
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var answer object
		switch r.URL.Path {
		case "/apis/" + metricsAPI + "/v1beta1":
			answer = object{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": metricsAPI + "/v1beta1",
				"resources": []object{{"name": loadMetric, "namespaced": true, "kind": "ExternalMetricValueList",
					"verbs": []string{"get"}}}}
		case "/apis/" + metricsAPI + "/v1beta1/namespaces/default/" + loadMetric:
			items := []object{}
			if r.URL.Query().Get("labelSelector") == "name=busy" {
				items = append(items, object{"metricName": loadMetric, "metricLabels": object{"name": "busy"},
					"timestamp": time.Now().UTC().Format(time.RFC3339), "value": fmt.Sprint(load.Load())})
			}
			answer = object{"kind": "ExternalMetricValueList", "apiVersion": metricsAPI + "/v1beta1",
				"metadata": object{}, "items": items}
		default:
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(answer) // the caller has gone, then
	}))
	s.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
	err = fabric.In(fabric.HostNS(f.Lab.Spec.Name, host), func() error {
		l, err := net.Listen("tcp", net.JoinHostPort(info.Overlay[0], "8443"))
		if err == nil {
			s.Listener.Close()
			s.Listener = l
		}
		return err
	})
	if err != nil {
		f.Fatal(err)
	}
	s.StartTLS()
	f.Cleanup(s.Close)
	f.apply(object{"apiVersion": "v1", "kind": "Service", "metadata": object{"name": "metrics", "namespace": "default"},
		"spec": object{"ports": []object{{"port": 443, "targetPort": 8443}}}},
		object{"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
			"metadata": object{"name": "metrics-1", "namespace": "default",
				"labels": object{"kubernetes.io/service-name": "metrics"}},
			"ports":     []object{{"port": 8443, "protocol": "TCP", "name": ""}},
			"endpoints": []object{{"addresses": []string{info.Overlay[0]}, "conditions": object{"ready": true}}}},
		object{"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
			"metadata": object{"name": "v1beta1." + metricsAPI},
			"spec": object{"group": metricsAPI, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
				"caBundle": base64.StdEncoding.EncodeToString(f.Cluster.ca.pem),
				"service":  object{"name": "metrics", "namespace": "default"}}})
	f.remove("apiservice/v1beta1."+metricsAPI, "service/metrics", "endpointslice/metrics-1")
	f.kubectl(nil, "wait", "--for=condition=Available", "--timeout=60s", "apiservice/v1beta1."+metricsAPI)
	if out := f.kubectl(nil, "get", "--raw", "/apis/"+metricsAPI+"/v1beta1"); !strings.Contains(out, loadMetric) {
		f.Errorf("the API of metrics has %s", out)
	}
}
