package main

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/golden"
)

func TestReloadText(t *testing.T) {
	change := func(key, old, new, why string) *skeinv1.ConfigChange {
		return &skeinv1.ConfigChange{Key: key, Old: old, New: new, Why: why}
	}
	site := []*skeinv1.ConfigChange{
		change("site", "home", "attic", ""), change("nodeAddresses", "", "[192.168.77.0/24]", ""),
	}
	fou := []*skeinv1.ConfigChange{change("dataplane.fou", "auto", "userspace", "tunnels would be made anew")}
	name := []*skeinv1.ConfigChange{change("name", "a", "b", "`skein node set` changes it")}
	now := time.Unix(1000, 0)
	var lines []string
	for _, c := range []struct {
		r      *skeinv1.ReloadResponse
		dryRun bool
	}{
		{r: &skeinv1.ReloadResponse{File: "/etc/skein/skein.yaml"}},
		{r: &skeinv1.ReloadResponse{Live: site, RestartDue: fou, Agreed: name, TookNanos: 21e6}},
		{r: &skeinv1.ReloadResponse{Live: site, TookNanos: 5e9, NotFollowed: true}},
		{r: &skeinv1.ReloadResponse{Live: site, RestartDue: fou}, dryRun: true},
		{r: &skeinv1.ReloadResponse{
			RestartDue: fou, Last: site, LastAt: now.Add(-3 * time.Second).UnixNano(), LastTookNanos: 34e6,
		}},
	} {
		var b strings.Builder
		reloadText(&b, c.r, c.dryRun, now)
		lines = append(lines, strings.Split(b.String(), "\n")...)
	}
	golden.Lines(t, "reload", lines)
}

// Loggers that were made of one before a change of level and format follow it, with what was put on them.
func TestLogSwitch(t *testing.T) {
	var out bytes.Buffer
	s := newLogSwitch(&out, config.Log{Level: "info", Format: "text"})
	root := slog.New(s)
	part := root.With("component", "x").WithGroup("g").With("a", 1)
	say := func(l *slog.Logger, level slog.Level) string {
		out.Reset()
		l.Log(context.Background(), level, "hello", "k", "v")
		return out.String()
	}
	if have := say(part, slog.LevelInfo); !strings.Contains(have, "msg=hello component=x g.a=1 g.k=v") {
		t.Errorf("text: %q", have)
	}
	if have := say(part, slog.LevelDebug) + say(root, slog.LevelDebug); have != "" {
		t.Errorf("debug at level info: %q", have)
	}
	s.set(config.Log{Level: "debug", Format: "json"})
	if have := say(part, slog.LevelDebug); !strings.Contains(have, `"msg":"hello","component":"x","g":{"a":1,"k":"v"}`) {
		t.Errorf("JSON: %q", have)
	}
	if have := say(root, slog.LevelDebug); !strings.Contains(have, `"msg":"hello","k":"v"`) {
		t.Errorf("JSON of the first: %q", have)
	}
	s.set(config.Log{Level: "error", Format: "json"})
	if have := say(part, slog.LevelWarn) + say(root, slog.LevelInfo); have != "" {
		t.Errorf("a warning at level error: %q", have)
	}
}
