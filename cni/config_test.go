package cni

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

func TestConfig(t *testing.T) {
	for _, c := range []struct {
		name, in string
		code     uint32 // 0: it is right
		says     string
	}{
		{"shortest", `{"cniVersion":"1.1.0","name":"n","type":"skein-cni"}`, 0, ""},
		{"no JSON", `{`, 6, "cannot be read"},
		{"empty", ``, 6, "cannot be read"},
		{"a list", `[]`, 6, "cannot be read"},
		{"socket of another kind", `{"cniVersion":"1.1.0","socket":7}`, 6, "socket"},
		{"relative socket", `{"cniVersion":"1.1.0","socket":"cni.sock"}`, 7, "not a path of a socket"},
		{"long socket", `{"cniVersion":"1.1.0","socket":"/` + strings.Repeat("a", 107) + `"}`, 7, "not a path of a socket"},
		{"another's addresses", `{"cniVersion":"1.1.0","ipam":{"type":"host-local"}}`, 2, `ipam: {type: "host-local"}`},
		{"no IPAM named", `{"cniVersion":"1.1.0","ipam":{}}`, 0, ""},
		{"masquerade", `{"cniVersion":"1.1.0","ipMasq":true}`, 2, "ipMasq: true"},
		{"addresses that are numbers", `{"cniVersion":"1.1.0","runtimeConfig":{"ips":[1]}}`, 6, "ips"},
		{"prevResult of another kind", `{"cniVersion":"1.1.0","prevResult":"x"}`, 6, "prevResult"},
		{"prevResult with a null", `{"cniVersion":"1.1.0","prevResult":{"cniVersion":"1.1.0","interfaces":[null]}}`, 7,
			"null"},
		{"prevResult beyond its list",
			`{"cniVersion":"1.1.0","prevResult":{"cniVersion":"1.1.0","ips":[{"address":"10.0.0.1/32","interface":3}]}}`, 7,
			"interface 3 of 0"},
		{"prevResult of an old version",
			`{"cniVersion":"0.3.1","prevResult":{"cniVersion":"0.3.1","interfaces":[{"name":"eth0"}],"ips":[{"version":"4","address":"10.0.0.1/32","interface":0}]}}`, 0, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, e := parseConfig([]byte(c.in))
			switch {
			case e == nil && c.code == 0:
				if got.Socket != DefaultSocket {
					t.Errorf("socket %q", got.Socket)
				}
			case e == nil:
				t.Errorf("accepted; code %d was expected", c.code)
			case uint32(e.Code) != c.code || !strings.Contains(e.Msg, c.says) || c.code == 0:
				t.Errorf("%d %q, expected %d with %q", e.Code, e.Msg, c.code, c.says)
			case e.Details == "":
				t.Errorf("%q has no next step", e.Msg)
			}
		})
	}
}

// The capability counts before args, and args before CNI_ARGS (CONVENTIONS.md).
func TestWantedAddresses(t *testing.T) {
	for _, c := range []struct {
		runtime, args, env string
		want               []string
		fails              string
	}{
		{"", "", "", nil, ""},
		{"", "", "IP=10.1.2.3", []string{"10.1.2.3"}, ""},
		{"", "", "IP=10.1.2.3/24,fd00::3", []string{"10.1.2.3", "fd00::3"}, ""},
		{"", `"10.1.2.4"`, "IP=10.1.2.3", []string{"10.1.2.4"}, ""},
		{`"10.1.2.5/16","fd00::5/64"`, `"10.1.2.4"`, "IP=10.1.2.3", []string{"10.1.2.5", "fd00::5"}, ""},
		{`"::ffff:10.1.2.3"`, "", "", []string{"10.1.2.3"}, ""},
		{`"10.1.2.5","10.1.2.5/32"`, "", "", []string{"10.1.2.5"}, ""},
		{`"10.1.2.5","10.1.2.6"`, "", "", nil, "both 10.1.2.5 and 10.1.2.6"},
		{`"ten"`, "", "", nil, `"ten" is not an address`},
		{`"fe80::1%eth0"`, "", "", nil, "is not an address"},
		{`"10.1.2.5"` + strings.Repeat(`,"10.1.2.5"`, 16), "", "", nil, "17 addresses"},
	} {
		config, e := parseConfig(
			[]byte(fmt.Sprintf(`{"cniVersion":"1.1.0","runtimeConfig":{"ips":[%s]},"args":{"cni":{"ips":[%s]}}}`,
				c.runtime, c.args)))
		if e != nil {
			t.Fatal(e)
		}
		args, e := parseArgs(c.env)
		if e != nil {
			t.Fatal(e)
		}
		got, e := config.wanted(args)
		if c.fails != "" {
			if e == nil || !strings.Contains(e.Msg, c.fails) || uint32(e.Code) != CodeConfig {
				t.Errorf("%+v: %v", c, e)
			}
			continue
		}
		if e != nil || !slices.Equal(got, c.want) {
			t.Errorf("%+v: %v, %v", c, got, e)
		}
	}
}

func TestArgs(t *testing.T) {
	for _, c := range []struct {
		in, namespace, pod, fails string
	}{
		{"", "", "", ""},
		{"IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;K8S_POD_INFRA_CONTAINER_ID=ab;K8S_POD_UID=1-2",
			"shop", "web-0", ""},
		{"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;", "shop", "web-0", ""},
		{"FOO=BAR;IgnoreUnknown=true", "", "", ""},
		{"IgnoreUnknown=1;K8S_POD_NAME=a=b", "", "a=b", ""},
		{"FOO=BAR", "", "", `"FOO" is not known`},
		{"FOO=BAR;IgnoreUnknown=0", "", "", `"FOO" is not known`},
		{"IgnoreUnknown=maybe", "", "", "neither true nor false"},
		{"K8S_POD_NAME", "", "", "is not KEY=VALUE"},
		{"K8S_POD_NAME=\xff", "", "", "is not KEY=VALUE"},
	} {
		a, e := parseArgs(c.in)
		switch {
		case c.fails == "" && (e != nil || a.namespace != c.namespace || a.pod != c.pod):
			t.Errorf("%q: %+v, %v", c.in, a, e)
		case c.fails != "" && (e == nil || uint32(e.Code) != CodeEnvironment || !strings.Contains(e.Msg, c.fails) ||
			!strings.Contains(e.Msg, "CNI_ARGS")):
			t.Errorf("%q: %v", c.in, e)
		}
	}
}

func TestNames(t *testing.T) {
	for id, ok := range map[string]bool{"a": true, "cnitool-77383ca0a0715733ca6f": true, strings.Repeat("a", 64): true,
		strings.Repeat("a", 65): false, "": false, "../a": false, "-a": false, "a b": false, "a\n": false} {
		if err := CheckNames(podnet.Key{ContainerID: id, Interface: "eth0"}); (err == nil) != ok {
			t.Errorf("container %q: %v", id, err)
		}
	}
	for name, ok := range map[string]bool{"eth0": true, "net1": true, "lo": false, "all": false, "default": false,
		"eth%d": false, "": false, ".": false, "a/b": false, "a:b": false, "a b": false, "averylonginterfacename": false,
		"\xff": false, "a\x01": false} {
		if err := CheckNames(podnet.Key{ContainerID: "a", Interface: name}); (err == nil) != ok {
			t.Errorf("interface %q: %v", name, err)
		}
	}
}

const chained = `{"cniVersion":"%s","name":"n","type":"skein-cni","dns":{"nameservers":["10.0.0.10"],"search":["local"]},"prevResult":{"cniVersion":"%[1]s",
	"interfaces":[{"name":"br0","mac":"00:11:22:33:44:55"}],"ips":[{"version":"4","address":"192.0.2.1/24","interface":0}],"routes":[{"dst":"192.0.2.0/24"}]}}`

// What an earlier plugin made stays, and our addresses name our interface.
func TestResultFollowsThatOfAnEarlierPlugin(t *testing.T) {
	answer := &skeinv1.CNIAddResponse{Ipv4: "10.8.0.1", Ipv6: "fd00::1", HostInterface: "sk0123456789ab",
		HostMac: "02:00:00:00:00:01", Mac: "02:00:00:00:00:02", Gateway4: "169.254.1.1", Gateway6: "fe80::1", Mtu: 1420}
	for _, version := range Versions() {
		c, e := parseConfig([]byte(fmt.Sprintf(chained, version)))
		if e != nil {
			t.Fatal(e)
		}
		r, err := result(c, "eth0", "/run/netns/a", answer)
		if err != nil {
			t.Fatal(err)
		}
		p := &plugin{}
		if err := p.print(r, version); err != nil {
			t.Fatal(err)
		}
		ip := func(address, gateway string, i int) map[string]any {
			m := map[string]any{"address": address, "interface": float64(i)}
			if gateway != "" {
				m["gateway"] = gateway
			}
			if version < "1.0.0" {
				m["version"] = map[bool]string{true: "6", false: "4"}[strings.Contains(address, ":")]
			}
			return m
		}
		link := func(name, mac, sandbox string) map[string]any {
			m := map[string]any{"name": name, "mac": mac}
			if sandbox != "" {
				m["sandbox"] = sandbox
			}
			if version == "1.1.0" && name != "br0" {
				m["mtu"] = 1420.
			}
			return m
		}
		want := map[string]any{
			"cniVersion": version,
			"interfaces": []any{link("br0", "00:11:22:33:44:55", ""), link("sk0123456789ab", "02:00:00:00:00:01", ""),
				link("eth0", "02:00:00:00:00:02", "/run/netns/a")},
			"ips": []any{ip("192.0.2.1/24", "", 0), ip("10.8.0.1/32", "169.254.1.1", 2), ip("fd00::1/128", "fe80::1", 2)},
			"routes": []any{map[string]any{"dst": "192.0.2.0/24"}, map[string]any{"dst": "0.0.0.0/0", "gw": "169.254.1.1"},
				map[string]any{"dst": "::/0", "gw": "fe80::1"}},
			"dns": map[string]any{"nameservers": []any{"10.0.0.10"}, "search": []any{"local"}},
		}
		var got map[string]any
		if err := json.Unmarshal(p.out.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", version, diff)
		}
		// CHECK finds the same addresses in what ADD has printed, and leaves those of others.
		b, err := json.Marshal(map[string]any{"cniVersion": version, "name": "n", "prevResult": got})
		if err != nil {
			t.Fatal(err)
		}
		c, e = parseConfig(b)
		if e != nil {
			t.Fatal(e)
		}
		if ips, e := expected(c, "eth0", "/run/netns/a"); e != nil || !slices.Equal(ips, []string{"10.8.0.1", "fd00::1"}) {
			t.Errorf("%s: CHECK expects %v, %v", version, ips, e)
		}
		if _, e := expected(c, "eth1", "/run/netns/a"); e == nil || uint32(e.Code) != CodeConfig {
			t.Errorf("an interface that is not listed: %v", e)
		}
		if _, e := expected(c, "eth0", "/run/netns/b"); e == nil || uint32(e.Code) != CodeConfig {
			t.Errorf("another container's namespace: %v", e)
		}
	}
}

// A list that is missing is not an empty one.
func TestGCKnowsAMissingList(t *testing.T) {
	for in, want := range map[string]int{
		`{}`: 0, `{"cni.dev/valid-attachments":[]}`: 0, `{"cni.dev/valid-attachments":null}`: 0,
		`{"cni.dev/attachments":[{"containerID":"a","ifname":"eth0"}]}`:                                           1,
		`{"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"b","ifname":"eth0"}]}`: 2,
		`{"cni.dev/valid-attachments":"x"}`:                                                                       -1,
	} {
		list, listed, e := stillValid([]byte(in))
		if listed != (e == nil && in != `{}`) {
			t.Errorf("%s: taken for a list: %v", in, listed)
		}
		if (e != nil) != (want < 0) || want >= 0 && len(list) != want {
			t.Errorf("%s: %v, %v", in, list, e)
		}
	}
}
