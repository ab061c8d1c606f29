package kube

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"testing"
)

const walkDocument = "# A document\n" +
	"```sh\nnot in the section\n```\n" +
	"## Do it\n" +
	"Words.\n" +
	"```sh\necho one \\\n    two # more\n# a remark\n\necho NODE\n```\n" +
	"```sh\necho one |\n  tee NODE &&\n  echo two\n```\n" +
	"```sh node\ncat >x <<END\nof NODE\nEND\n```\n" +
	"```yaml node:/etc/x.yaml\na: NODE\n```\n" +
	"```yaml\nto: be read\n```\n" +
	"### Below it\n" +
	"```sh\necho $NODE ${NODE} NODES\n```\n" +
	"## Another\n" +
	"```sh\nnot in the section either\n```\n"

func TestWalkSteps(t *testing.T) {
	got, err := WalkSteps(walkDocument, "Do it")
	want := []WalkStep{
		{Line: 8, Host: "admin", Do: "echo one two # more"},
		{Line: 12, Host: "admin", Do: "echo NODE"},
		{Line: 15, Host: "admin", Do: "echo one | tee NODE && echo two"},
		{Line: 20, Host: "node", Do: "cat >x <<END\nof NODE\nEND"},
		{Line: 24, Host: "node", Do: "node:/etc/x.yaml", Path: "/etc/x.yaml", Text: "a: NODE\n"},
		{Line: 32, Host: "admin", Do: "echo $NODE ${NODE} NODES"},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v\n%+v\nwant\n%+v", err, got, want)
	}
	for document, says := range map[string]string{
		"## Do it\nnothing\n":                        "nothing that can be carried out",
		"## Do that\n```sh\nx\n```\n":                "no section",
		"## Do it\n```sh\nx\n```\n## Do it\n":        "2 sections",
		"## Do it\n```sh\nx\n":                       "line 2: the block does not end",
		"## Do it\n```sh\nx \\\n```\n":               "line 3: the command does not end",
		"## Do it\n```sh\nx |\n```\n":                "line 3: the command does not end",
		"## Do it\n```sh\ncat <<END\nx\n```\n":       "line 3: the here-document does not end",
		"## Do it\n```yaml on the node\nx: y\n```\n": "is not HOST:PATH",
	} {
		if _, err := WalkSteps(document, "Do it"); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%q: %v, want %q", document, err, says)
		}
	}
}

// TestWalk: commands run by a real shell, in order, until one fails.
func TestWalk(t *testing.T) {
	dir := t.TempDir()
	sh := func(ctx context.Context, script string) (string, error) {
		out, err := exec.CommandContext(ctx, "sh", "-c", script).CombinedOutput()
		return string(out), err
	}
	var instead []string
	w := Walk{Heading: "H", Hosts: map[string]Host{"admin": sh}, State: dir, Root: dir,
		Replace: map[string]string{"NODE": "home1"},
		Instead: map[string]func(context.Context, string) error{
			"systemctl start": func(_ context.Context, what string) error { instead = append(instead, what); return nil },
			"systemctl stop":  nil,
		},
		Document: "# H\n```sh\nA=$(echo NODE)\nsystemctl start NODE\nsystemctl stop\necho \"$A\" >first\n```\n" +
			"```yaml admin:" + dir + "/sub/file.yaml\n'of': \"NODE\" $A\n```\n```sh\ncat sub/file.yaml >>first\n```\n"}
	if err := w.Run(t.Context()); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(dir + "/first"); string(b) != "home1\n'of': \"home1\" $A\n" {
		t.Errorf("the commands made %q, %v", b, err)
	}
	if !reflect.DeepEqual(instead, []string{"systemctl start home1"}) {
		t.Errorf("in place of systemctl start: %q", instead)
	}
	for name, change := range map[string]func(*Walk){
		"line 3, on admin: false": func(w *Walk) { w.Document = "# H\n```sh\nfalse\ntouch NODE\n```\n" },
		"line 3, on admin: if true; then": func(w *Walk) {
			w.Document = "# H\n```sh\nif true; then\ntouch NODE\nfi\n```\n"
		},
		"line 3, on admin: true | # then": func(w *Walk) { // the shell would go on with what the test puts behind it
			w.Document = "# H\n```sh\ntrue | # then\ntouch NODE\n```\n"
		},
		"the test has no such host":         func(w *Walk) { w.Document = "# H\n```sh other\ntrue\n```\n" },
		`does not use "NODE" any more`:      func(w *Walk) { w.Document = "# H\n```sh\nsystemctl start\n```\n" },
		`does not use "systemctl stop" any`: func(w *Walk) { w.Document = "# H\n```sh\nsystemctl start NODE\n```\n" },
		"systemctl start home1: it is broken": func(w *Walk) {
			w.Instead = map[string]func(context.Context, string) error{
				"systemctl start": func(context.Context, string) error { return errors.New("it is broken") }}
		},
	} {
		w := w
		change(&w)
		if err := w.Run(t.Context()); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%v, want %q", err, name)
		}
	}
	if _, err := os.Stat(dir + "/home1"); err == nil {
		t.Error("a command ran behind one that failed")
	}
}
