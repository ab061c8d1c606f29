package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"connectrpc.com/connect"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/api/skein/v1/skeinv1connect"
	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/testns"
)

// The test program is the plugin when a test runs it as a runtime would.
func TestMain(m *testing.M) {
	if os.Getenv("CNI_COMMAND") != "" {
		os.Exit(Main("test"))
	}
	os.Exit(m.Run())
}

// outcome is what one run of the plugin has said.
type outcome struct {
	exit           int
	stdout, stderr string
	Version        string `json:"cniVersion"`
	Code           uint32 `json:"code"`
	Msg            string `json:"msg"`
	Details        string `json:"details"`
}

// run runs the plugin; env is added to what every runtime sets. In a namespace, if one is given.
func run(t *testing.T, in *testns.NS, command, stdin string, env ...string) outcome {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append([]string{"CNI_COMMAND=" + command, "CNI_CONTAINERID=c1", "CNI_IFNAME=eth0", "CNI_PATH=/nowhere",
		"CNI_NETNS=/nowhere/ns"}, env...)
	cmd.Stdin = strings.NewReader(stdin)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	start := func() {
		if err := cmd.Start(); err != nil {
			t.Error(err)
		}
	}
	if in == nil {
		start()
	} else {
		in.Do(start)
	}
	var exit *exec.ExitError
	if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	o := outcome{exit: cmd.ProcessState.ExitCode(), stdout: out.String(), stderr: errs.String()}
	if o.exit != 0 {
		if err := json.Unmarshal(out.Bytes(), &o); err != nil {
			t.Fatalf("%s: the error is not JSON: %v\n%s", command, err, out.String())
		}
	}
	return o
}

// conf is a network configuration with a socket in a directory.
func conf(dir, more string) string {
	return `{"cniVersion":"1.1.0","name":"n","type":"skein-cni","socket":"` + filepath.Join(dir, "cni.sock") +
		`"` + more + `}`
}

const prev = `,"prevResult":{"cniVersion":"1.1.0","interfaces":[{"name":"eth0","sandbox":"/nowhere/ns"}],"ips":[{"address":"10.0.0.1/32","interface":0}]}`

func TestWithoutAnAgent(t *testing.T) {
	for _, c := range []struct {
		command string
		exit    int
		code    uint32
	}{{"ADD", 1, CodeTryAgain}, {"CHECK", 1, CodeTryAgain}, {"STATUS", 1, CodeUnavailable}, {"DEL", 0, 0}, {"GC", 0, 0},
		{"VERSION", 0, 0}} {
		dir := t.TempDir()
		o := run(t, nil, c.command, conf(dir, prev+`,"cni.dev/valid-attachments":[]`))
		if o.exit != c.exit || o.Code != c.code || c.code != 0 && !strings.Contains(o.Msg, dir) {
			t.Errorf("%s: %+v", c.command, o)
		}
		notes, err := ReadNotes(NoteDir(filepath.Join(dir, "cni.sock")))
		if want := c.command == "DEL"; err != nil || (len(notes) == 1) != want || want &&
			notes[0] != (Note{podnet.Key{ContainerID: "c1", Interface: "eth0"}, "/nowhere/ns"}) {
			t.Errorf("%s leaves the notes %v, %v", c.command, notes, err)
		}
	}
}

// DEL takes the link away by itself.
func TestDelWithoutAnAgentRemovesTheLink(t *testing.T) {
	host, pod := testns.New(t, "ph"), testns.New(t, "pp")
	path := "/run/netns/" + pod.Name
	at := podnet.Attachment{Key: podnet.Key{ContainerID: "c1", Interface: "eth0"}, NetNS: path, MTU: 1420,
		IPv4: netip.MustParseAddr("10.0.0.1")}
	host.Must("a pod's link", func() error { _, err := podnet.Add(at); return err })
	if o := run(t, host, "DEL", conf(t.TempDir(), ""), "CNI_NETNS="+path); o.exit != 0 ||
		strings.Contains(o.stderr, "removing") {
		t.Errorf("%+v", o)
	}
	host.Must("looking for links", func() error {
		found, err := podnet.Scan(dataplane.DefaultNumbers().Link, 0)
		if len(found) > 0 {
			return errors.New("the pod's address is still there")
		}
		return err
	})
	pod.Do(func() {
		if _, err := net.InterfaceByName("eth0"); err == nil {
			t.Error("eth0 is still there")
		}
	})
}

// What a runtime may get wrong, with the code that says so. None of it reaches an agent.
func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		name, command, stdin string
		env                  []string
		code                 uint32
		says                 string
	}{
		{"10 MB of input", "ADD", strings.Repeat("x", 10<<20), nil, 7, "larger than 4 MiB"},
		{"10 MB of JSON", "DEL", `{"cniVersion":"1.1.0","name":"n","x":"` + strings.Repeat("x", 10<<20) + `"}`, nil, 7,
			"larger than 4 MiB"},
		{"unknown version", "ADD", `{"cniVersion":"9.0.0","name":"n"}`, nil, 1, "incompatible"},
		{"no version", "ADD", `{"name":"n"}`, nil, 1, "incompatible"},
		{"no name", "ADD", `{"cniVersion":"1.1.0"}`, nil, 7, "network name"},
		{"bad name", "ADD", `{"cniVersion":"1.1.0","name":"../n"}`, nil, 7, "network name"},
		{"no JSON", "ADD", `hello`, nil, 6, "network config"},
		{"no container", "ADD", conf("/x", ""), []string{"CNI_CONTAINERID="}, 4, "CNI_CONTAINERID"},
		{"no namespace", "ADD", conf("/x", ""), []string{"CNI_NETNS="}, 4, "CNI_NETNS"},
		{"bad container", "ADD", conf("/x", ""), []string{"CNI_CONTAINERID=a/b"}, 4, "CNI_CONTAINERID"},
		{"long container", "ADD", conf("/x", ""), []string{"CNI_CONTAINERID=" + strings.Repeat("a", 65)}, 4,
			"CNI_CONTAINERID has 65"},
		{"bad interface", "ADD", conf("/x", ""), []string{"CNI_IFNAME=eth%d"}, 4, "CNI_IFNAME"},
		{"long interface", "CHECK", conf("/x", ""), []string{"CNI_IFNAME=sixteen-letters-"}, 4, "CNI_IFNAME"},
		{"the host's namespace", "ADD", conf("/x", ""), []string{"CNI_NETNS=/proc/self/ns/net"}, 4, "the host's own"},
		{"unknown argument", "ADD", conf("/x", ""), []string{"CNI_ARGS=FOO=BAR"}, 4, "CNI_ARGS"},
		{"unknown command", "JUMP", conf("/x", ""), nil, 4, "CNI_COMMAND"},
		{"CHECK without prevResult", "CHECK", conf("/x", ""), nil, 7, "prevResult"},
		{"CHECK in 0.3.1", "CHECK", `{"cniVersion":"0.3.1","name":"n"}`, nil, 1, "CHECK"},
		{"GC in 1.0.0", "GC", `{"cniVersion":"1.0.0","name":"n","cni.dev/valid-attachments":[]}`, nil, 1, "GC"},
		{"STATUS in 1.0.0", "STATUS", `{"cniVersion":"1.0.0","name":"n"}`, nil, 1, "STATUS"},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := run(t, nil, c.command, c.stdin, c.env...)
			if o.exit != 1 || o.Code != c.code || !strings.Contains(o.Msg, c.says) || o.Version == "" || o.Details == "" {
				t.Errorf("%+v", o)
			}
		})
	}
}

// A DEL of what no ADD can have made succeeds, and a configuration that became wrong does not keep a pod alive.
func TestDelForgives(t *testing.T) {
	for name, c := range map[string]struct{ stdin, env string }{
		"long container":      {conf("/x", ""), "CNI_CONTAINERID=" + strings.Repeat("a", 65)},
		"interface lo":        {conf("/x", ""), "CNI_IFNAME=lo"},
		"relative socket":     {`{"cniVersion":"1.1.0","name":"n","socket":"x"}`, ""},
		"ipam":                {conf(t.TempDir(), `,"ipam":{"type":"host-local"}`), ""},
		"bad prevResult":      {conf(t.TempDir(), `,"prevResult":{"cniVersion":"1.1.0","ips":[null]}`), ""},
		"unknown argument":    {conf(t.TempDir(), ""), "CNI_ARGS=FOO=BAR"},
		"no namespace":        {conf(t.TempDir(), ""), "CNI_NETNS="},
		"the host's":          {conf(t.TempDir(), ""), "CNI_NETNS=/proc/self/ns/net"},
		"not a namespace":     {conf(t.TempDir(), ""), "CNI_NETNS=/etc/passwd"},
		"directory not there": {conf(filepath.Join(t.TempDir(), "a", "b"), ""), ""},
	} {
		if o := run(t, nil, "DEL", c.stdin, c.env); o.exit != 0 {
			t.Errorf("%s: %+v", name, o)
		}
	}
}

// agent answers every request with an error, or what it is told.
type agent struct {
	skeinv1connect.UnimplementedCNIServiceHandler
	err   error
	asked *skeinv1.CNIAddRequest
}

func (a *agent) Add(_ context.Context, r *skeinv1.CNIAddRequest) (*skeinv1.CNIAddResponse, error) {
	a.asked = r
	return &skeinv1.CNIAddResponse{Ipv4: "10.0.0.1", Gateway4: "169.254.1.1", HostInterface: "sk1", Mtu: 1420}, a.err
}

func (a *agent) serve(t *testing.T) (dir string) {
	dir = t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "cni.sock"))
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle(skeinv1connect.NewCNIServiceHandler(a))
	srv := &http.Server{Handler: mux}
	go srv.Serve(l)
	t.Cleanup(func() { srv.Close() })
	return dir
}

func TestTheAgentsWordReachesTheRuntime(t *testing.T) {
	a := &agent{err: connect.NewError(connect.CodeResourceExhausted, errors.New("full"))}
	d, err := connect.NewErrorDetail(&skeinv1.CNIError{Code: CodeExhausted, Message: "pool p is used up",
		Details: "extend it"})
	if err != nil {
		t.Fatal(err)
	}
	a.err.(*connect.Error).AddDetail(d)
	dir := a.serve(t)
	o := run(t, nil, "ADD", conf(dir, `,"runtimeConfig":{"ips":["10.0.0.7/24"],"pool":"p"},"args":{"cni":{"pool":"q"}}`),
		"CNI_ARGS=IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0;X=Y")
	if o.Code != CodeExhausted || o.Msg != "pool p is used up" || o.Details != "extend it" {
		t.Errorf("%+v", o)
	}
	r := a.asked
	if r.GetNamespace() != "shop" || r.GetPod() != "web-0" || r.GetPool() != "p" ||
		strings.Join(r.GetIps(), ",") != "10.0.0.7" || r.GetNetwork() != "n" || r.GetNetns() != "/nowhere/ns" ||
		r.GetAttachment().GetContainerId() != "c1" {
		t.Errorf("the agent was asked %v", r)
	}
	a.err = nil
	if o := run(t, nil, "ADD", conf(dir, "")); o.exit != 0 || !strings.Contains(o.stdout, `"10.0.0.1/32"`) {
		t.Errorf("%+v", o)
	}
	if o := run(t, nil, "STATUS", conf(dir, "")); o.Code != CodeInternal { // the agent does not know it
		t.Errorf("%+v", o)
	}
	if o := run(t, nil, "DEL", conf(dir, "")); o.exit != 0 { // nor that; DEL goes on alone
		t.Errorf("%+v", o)
	}
}

// An agent that ends with the request in its hands is one to try again with, however the connection breaks.
func TestAgentGoesAway(t *testing.T) {
	for name, end := range map[string]func(*net.UnixConn){
		"before it has read": func(c *net.UnixConn) { c.Close() },
		"after it has read":  func(c *net.UnixConn) { c.Read(make([]byte, 1<<16)); c.Close() },
		"in its answer": func(c *net.UnixConn) {
			c.Read(make([]byte, 1<<16))
			c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Le"))
			c.Close()
		},
		"in its answer's end": func(c *net.UnixConn) {
			c.Read(make([]byte, 1<<16))
			c.Write([]byte("HTTP/1.1 200 OK\r\nContent-Type: application/proto\r\nContent-Length: 100\r\n\r\n"))
			c.Close()
		},
	} {
		dir := t.TempDir()
		l, err := net.Listen("unix", filepath.Join(dir, "cni.sock"))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				end(c.(*net.UnixConn))
			}
		}()
		for command, code := range map[string]uint32{"ADD": CodeTryAgain, "CHECK": CodeTryAgain, "STATUS": CodeUnavailable,
			"DEL": 0, "GC": 0} {
			if o := run(t, nil, command, conf(dir, prev+`,"cni.dev/valid-attachments":[]`)); o.Code != code ||
				(o.exit == 0) != (code == 0) {
				t.Errorf("%s: %s: %+v", name, command, o)
			}
		}
	}
}

func TestCalled(t *testing.T) {
	set := func(string) string { return "ADD" }
	unset := func(string) string { return "" }
	for _, c := range []struct {
		args   []string
		getenv func(string) string
		want   bool
	}{
		{[]string{"/opt/cni/bin/skein-cni"}, set, true}, {[]string{"skein-cni"}, unset, true}, {[]string{"skein", "cni"}, set,
			true}, {[]string{"skein"}, set, true},
		{[]string{"skein", "cni"}, unset, false}, {[]string{"skein", "status"}, set, false},
		{[]string{"skein", "cni", "install"}, set, false}, {[]string{"skein"}, unset, false}, {nil, set, false},
	} {
		if Called(c.args, c.getenv) != c.want {
			t.Errorf("%v: not %v", c.args, c.want)
		}
	}
}

func TestNotesThatAreNone(t *testing.T) {
	dir, key := t.TempDir(), podnet.Key{ContainerID: "a-b", Interface: "eth0"}
	if err := WriteNote(dir, Note{key, strings.Repeat("/x", maxNote)}); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"a-eth0": `{"containerID":"b","interface":"eth0"}`, "x": "{",
		"y": strings.Repeat(" ", maxNote+1), "z": `{"containerID":"../z","interface":"eth0"}`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	notes, err := ReadNotes(dir)
	if len(notes) != 1 || notes[0] != (Note{Key: key}) || err == nil {
		t.Errorf("%v, %v", notes, err)
	}
	if notes, err := ReadNotes(dir); len(notes) != 1 || err != nil {
		t.Errorf("the others are still there: %v, %v", notes, err)
	}
	if !HasNote(dir, key) || RemoveNote(dir, key) != nil || HasNote(dir, key) || RemoveNote(dir, key) != nil {
		t.Error("a note cannot be removed, any number of times")
	}
	if err := WriteNote(dir, Note{podnet.Key{ContainerID: "../a", Interface: "eth0"}, ""}); err == nil {
		t.Error("a note outside its directory was written")
	}
}
