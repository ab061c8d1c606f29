package kube

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// behindNAT are the nodes that are behind the two worst kinds of NAT, each with the pod that answers on it.
var behindNAT = map[string]string{"home1": "web-home1", "cloud1": "web-cloud1"}

// webs starts one pod that answers on each node.
func (f fleet) webs() {
	f.apply(with(web("web-cp1", "cp1"), "metadata.labels.app", "web"),
		with(web("web-home1", "home1"), "metadata.labels.app", "web"),
		with(web("web-cloud1", "cloud1"), "metadata.labels.app", "web"))
	f.ready("web-cp1", "web-home1", "web-cloud1")
	f.Log(f.kubectl(nil, "get", "pods", "-o", "custom-columns=NAME:.metadata.name,IPS:.status.podIPs[*].ip"))
}

// logsExecPortForward: the apiserver reaches kubelets behind NATs with no flag about tunnels.
func (f fleet) logsExecPortForward() {
	var all sync.WaitGroup
	cp, ports := f.host(controlPlane), map[string]int{"home1": 18081, "cloud1": 18082}
	for node, name := range behindNAT {
		all.Go(func() { f.access(cp, node, name, ports[node]) })
	}
	all.Wait()
}

func (f fleet) access(cp, node, name string, port int) {
	f.Helper()
	call := func(stdin string, args ...string) string {
		out, err := f.Cluster.Kubectl(f.Context(), []byte(stdin), args...)
		if err != nil {
			f.Errorf("to %s: %v", node, err)
		}
		return out
	}
	if out := call("", "logs", name); !strings.Contains(out, "Started HTTP server on port 8080") {
		f.Errorf("logs of %s: %q", name, out)
	}
	if out := call("", "exec", name, "--", "hostname"); out != name {
		f.Errorf("exec on %s: %q", name, out)
	}
	if out := call("through a NAT", "exec", "-i", name, "--", "cat"); out != "through a NAT" {
		f.Errorf("exec on %s with standard input: %q", name, out)
	}
	if _, err := f.Cluster.Kubectl(f.Context(), nil, "exec", name, "--", "false"); err == nil ||
		!strings.Contains(err.Error(), "exit code 1") {
		f.Errorf("exec of a command that fails on %s: %v", name, err)
	}
	ctx, cancel := context.WithCancel(f.Context())
	ended := make(chan error, 1)
	go func() {
		_, err := f.Cluster.Kubectl(ctx, nil, "port-forward", "pod/"+name, fmt.Sprintf("%d:8080", port))
		ended <- err
	}()
	local := netip.MustParseAddr("127.0.0.1")
	var out string
	deadline := time.Now().Add(20 * time.Second)
	for {
		var err error
		if out, err = get(ctx, cp, local, port, "/hostname"); err == nil {
			break
		}
		if time.Now().After(deadline) {
			f.Errorf("port-forward to %s: %v", name, err)
			break
		}
		select {
		case err := <-ended:
			f.Errorf("port-forward to %s has ended: %v", name, err)
			cancel()
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
	cancel()
	<-ended
	if out != name {
		f.Errorf("port-forward to %s: %q answers", name, out)
	}
}

// kubeletMetrics: kubelets' own and their containers', through the apiserver's proxy.
func (f fleet) kubeletMetrics() {
	for node := range f.Workers {
		out := f.kubectl(nil, "get", "--raw", "/api/v1/nodes/"+node+"/proxy/metrics")
		if !strings.Contains(out, "\nkubelet_running_pods ") {
			f.Errorf("metrics of %s: %.200q", node, out)
		}
		f.await(30*time.Second, "kubelet on "+node+" has measured its pod", func() error {
			out := f.kubectl(nil, "get", "--raw", "/api/v1/nodes/"+node+"/proxy/metrics/resource")
			if !strings.Contains(out, `pod_memory_working_set_bytes{namespace="default",pod="web-`+node+`"}`) {
				return fmt.Errorf("%.300q", out)
			}
			return nil
		})
	}
}

// serving is a Secret with a certificate for a Service's name in the default Namespace.
func (f fleet) serving(service string) object {
	f.Helper()
	now := time.Now()
	cert, key, err := f.Cluster.ca.issueFor(now.Add(-time.Hour), now.Add(time.Hour), "serving", nil,
		[]string{service + ".default.svc"})
	if err != nil {
		f.Fatal(err)
	}
	encode := base64.StdEncoding.EncodeToString
	return object{"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls",
		"metadata": object{"name": service, "namespace": "default"},
		"data":     object{"tls.crt": encode(cert), "tls.key": encode(key)}}
}

// secured has a Pod serve with the certificate of the Secret of that name.
func secured(p object, secret string) object {
	main := p["spec"].(object)["containers"].([]object)[0]
	main["args"] = append(main["args"].([]string), "--tls-cert-file=/tls/tls.crt", "--tls-private-key-file=/tls/tls.key")
	with(p, "spec.volumes", []object{{"name": "tls", "secret": object{"secretName": secret}}})
	return with(p, "spec.containers.volumeMounts", []object{{"name": "tls", "mountPath": "/tls"}})
}

// webhook: a validating webhook, served by a pod behind a symmetric NAT, is asked by the apiserver behind another NAT.
func (f fleet) webhook() {
	p := secured(pod("hook", "cloud1", "webhook", "--port=8080"), "hook")
	with(p, "spec.containers.readinessProbe",
		object{"httpGet": object{"path": "/readyz", "port": 8080, "scheme": "HTTPS"}, "periodSeconds": 1})
	f.apply(f.serving("hook"), p, service("hook", object{"name": "hook"}, 443))
	f.remove("validatingwebhookconfiguration/hook", "pod/hook", "service/hook", "secret/hook", "configmap/good")
	f.ready("hook")
	f.apply(object{"apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
		"metadata": object{"name": "hook"},
		"webhooks": []object{{
			"name": "configmaps.hook.example.com", "sideEffects": "None", "admissionReviewVersions": []string{"v1"},
			"failurePolicy": "Fail", "timeoutSeconds": 5,
			"clientConfig": object{"caBundle": base64.StdEncoding.EncodeToString(f.Cluster.ca.pem),
				"service": object{"name": "hook", "namespace": "default", "path": "/configmaps"}},
			"namespaceSelector": object{"matchLabels": object{"kubernetes.io/metadata.name": "default"}},
			"rules": []object{{"operations": []string{"CREATE"}, "apiGroups": []string{""}, "apiVersions": []string{"v1"},
				"resources": []string{"configmaps"}}},
		}}})
	create := func(name, data string) error {
		_, err := f.Cluster.Kubectl(f.Context(), nil, "create", "configmap", name, "--from-literal=webhook-e2e-test="+data)
		return err
	}
	tried := 0
	f.await(20*time.Second, "the webhook denies", func() error { // the apiserver learns of it within a second or so
		tried++
		name := fmt.Sprintf("bad%d", tried)
		err := create(name, "webhook-disallow")
		if err == nil {
			f.kubectl(nil, "delete", "configmap", name)
			return fmt.Errorf("a ConfigMap that the webhook is against was made")
		}
		if !strings.Contains(err.Error(), "the configmap contains unwanted key and value") {
			return err
		}
		return nil
	})
	if err := create("good", "webhook-allow"); err != nil {
		f.Errorf("a ConfigMap that the webhook is for: %v", err)
	}
}

const aggregatedImage = "skein.test/aggregated:1"

// aggregatedAPI: Kubernetes' sample API server runs as a pod behind a NAT, asks the apiserver about its callers, and is
// asked by it.
func (f fleet) aggregatedAPI() {
	archive := filepath.Join(f.Config.Dir, "aggregated.tar")
	if err := writeArchive(archive, Image{Names: []string{aggregatedImage}, Entrypoint: []string{"/aggregated"},
		Programs: map[string]string{"aggregated": filepath.Join(f.Cluster.Programs, "aggregated")}}); err != nil {
		f.Fatal(err)
	}
	if err := f.Workers["home1"].Import(f.Context(), archive); err != nil {
		f.Fatal(err)
	}
	account := []object{{"kind": "ServiceAccount", "name": "aggregated", "namespace": "default"}}
	binding := func(kind, name, namespace, roleKind, role string) object {
		return object{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": kind,
			"metadata": object{"name": name, "namespace": namespace}, "subjects": account,
			"roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": roleKind, "name": role}}
	}
	reads := func(group string, resources ...string) object {
		return object{"apiGroups": []string{group}, "resources": resources, "verbs": []string{"get", "list", "watch"}}
	}
	p := secured(pod("aggregated", "home1", "--secure-port=8080"), "aggregated")
	with(p, "spec.containers.image", aggregatedImage)
	with(p, "spec.automountServiceAccountToken", true)
	with(p, "spec.serviceAccountName", "aggregated")
	f.apply(object{"apiVersion": "v1", "kind": "ServiceAccount",
		"metadata": object{"name": "aggregated", "namespace": "default"}},
		object{"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": object{"name": "aggregated"},
			"rules": []object{reads("", "namespaces"),
				reads("admissionregistration.k8s.io", "mutatingwebhookconfigurations", "validatingwebhookconfigurations",
					"mutatingadmissionpolicies", "mutatingadmissionpolicybindings",
					"validatingadmissionpolicies", "validatingadmissionpolicybindings"),
				reads("flowcontrol.apiserver.k8s.io", "prioritylevelconfigurations", "flowschemas")}},
		binding("ClusterRoleBinding", "aggregated", "", "ClusterRole", "aggregated"),
		binding("ClusterRoleBinding", "aggregated-delegates", "", "ClusterRole", "system:auth-delegator"),
		binding("RoleBinding", "aggregated-reads", "kube-system", "Role", "extension-apiserver-authentication-reader"),
		f.serving("aggregated"), p, service("aggregated", object{"name": "aggregated"}, 443),
		object{"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService",
			"metadata": object{"name": "v1alpha1.wardle.example.com"},
			"spec": object{"group": "wardle.example.com", "version": "v1alpha1", "groupPriorityMinimum": 1000,
				"versionPriority": 15,
				"caBundle":        base64.StdEncoding.EncodeToString(f.Cluster.ca.pem),
				"service":         object{"name": "aggregated", "namespace": "default"}}})
	f.remove("apiservice/v1alpha1.wardle.example.com", "pod/aggregated", "service/aggregated", "secret/aggregated")
	f.kubectl(nil, "wait", "--for=condition=Available", "--timeout=60s", "apiservice/v1alpha1.wardle.example.com")
	b := `{"apiVersion":"wardle.example.com/v1alpha1","kind":"Flunder","metadata":{"name":"mine","namespace":"default"}}`
	f.kubectl([]byte(b), "create", "--validate=false", "-f", "-")
	out := f.kubectl(nil, "get", "flunders.wardle.example.com", "-o", "name")
	if out != "flunder.wardle.example.com/mine" {
		f.Errorf("the aggregated API lists %q", out)
	}
}
