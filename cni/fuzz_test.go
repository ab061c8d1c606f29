package cni

import (
	"fmt"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// sound holds an error against what every error must have.
func sound(t *testing.T, e *types.Error) {
	t.Helper()
	if e.Code == 0 || e.Msg == "" || e.Details == "" {
		t.Errorf("an error without code, cause or next step: %+v", e)
	}
	if len(e.Msg) > 1<<16 {
		t.Errorf("a message of %d bytes", len(e.Msg))
	}
}

func FuzzConfig(f *testing.F) {
	for _, v := range Versions() {
		f.Add([]byte(fmt.Sprintf(chained, v)))
	}
	f.Add([]byte(`{"cniVersion":"1.1.0","name":"n","socket":"/s","runtimeConfig":{"ips":["10.0.0.1/24"],"pool":"p","io.kubernetes.cri.pod-annotations":{"skein.dev/egress.a":"nat","x":"y"},"dns":{"servers":["::1"]}},"args":{"cni":{"ips":["fd00::1"],"pool":"q"}},"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		if s := socketOf(b); s != "" && (!strings.HasPrefix(s, "/") || len(s) > maxSocket) {
			t.Errorf("socket %q", s)
		}
		if _, _, e := stillValid(b); e != nil {
			sound(t, e)
		}
		c, e := parseConfig(b)
		if e != nil {
			sound(t, e)
			return
		}
		ips, e := c.wanted(podArgs{})
		if e != nil {
			sound(t, e)
		}
		if len(ips) > 2 {
			t.Errorf("%v are wanted", ips)
		}
		if have := c.annotations(); len(have) > MaxEgressAnnotations+1 {
			t.Errorf("%d annotations are passed on", len(have))
		}
		if _, e := expected(c, "eth0", "/n"); e != nil {
			sound(t, e)
		}
		r, err := result(c, "eth0", "/n", &skeinv1.CNIAddResponse{Ipv4: "10.0.0.1", Gateway4: "169.254.1.1"})
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range Versions() {
			if err := (&plugin{}).print(r, v); err != nil {
				t.Errorf("the result has no form of version %s: %v", v, err)
			}
		}
	})
}

func FuzzArgs(f *testing.F) {
	f.Add("IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;IP=10.0.0.1,fd00::1", "abc", "eth0")
	f.Add("A=B;;=;", "", "..")
	f.Fuzz(func(t *testing.T, args, container, ifname string) {
		a, e := parseArgs(args)
		if e != nil {
			sound(t, e)
		}
		if len(a.namespace) > len(args) || len(a.pod) > len(args) {
			t.Errorf("%+v", a)
		}
		if e := checkNames(podnet.Key{ContainerID: container, Interface: ifname}); e != nil {
			sound(t, e)
		} else if strings.ContainsAny(container+ifname, "/%\x00 ") || len(container) > maxContainerID || len(ifname) > 15 {
			t.Errorf("accepted: %q %q", container, ifname)
		}
	})
}

func FuzzNote(f *testing.F) {
	f.Add([]byte(`{"containerID":"a-b","interface":"eth0","netns":"/run/netns/a"}`))
	f.Add([]byte(`{"containerID":"../../etc","interface":"passwd"}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		n, err := parseNote(b)
		if err != nil {
			return
		}
		if strings.ContainsAny(n.file(), "/\x00") || len(n.file()) > 255 {
			t.Errorf("a note with the file name %q", n.file())
		}
	})
}
