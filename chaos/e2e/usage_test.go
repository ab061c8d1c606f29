package e2e

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/chaos/lab"
)

// TestUsageOfAMesh: what real agents count grows, and what makes no profile: their port of metrics.
func TestUsageOfAMesh(t *testing.T) {
	l := shared(t)
	before, err := l.Usage(t.Context(), "seed", "peer")
	if err != nil {
		t.Fatal(err)
	}
	var after map[string]*skeinv1.UsageResponse
	eventually(t, "peers ping each other, and WireGuard carries it", func() error {
		if after, err = l.Usage(t.Context(), "seed", "peer"); err != nil {
			return err
		}
		for name, u := range after {
			was := before[name]
			var bytes uint64
			for _, p := range u.GetPeers() {
				bytes += p.GetRxBytes() + p.GetTxBytes()
			}
			if u.GetPingsSent() == was.GetPingsSent() || u.GetPingsReceived() == was.GetPingsReceived() ||
				u.GetWakeups() == was.GetWakeups() ||
				u.GetNetlinkRequests() == 0 || u.GetRecordsPublished() == 0 || u.GetRecordsTaken() == 0 || bytes == 0 {
				return fmt.Errorf("%s: %v", name, u)
			}
		}
		return nil
	})
	rates, err := lab.Rates(before, after)
	if err != nil || rates["seed"].GetWakeupsPerSecond() <= 0 {
		t.Errorf("%v, %v", rates, err)
	}
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/debug/vars"} {
		if status, _ := get(t, "seed", path); status != http.StatusNotFound {
			t.Errorf("%s: status %d, want %d", path, status, http.StatusNotFound)
		}
	}
	all := scrape(t, "seed")
	for family, series := range map[string]string{
		"skein_context_switches_total": "kind=voluntary", "skein_netlink_messages_total": "kind=request",
		"skein_records_total": "kind=taken",
	} {
		if v := values(all[family])[series]; v <= 0 {
			t.Errorf("%s %s: %g", family, series, v)
		}
	}
}

// TestProfileOfAnAgent takes one by the command, of a real agent.
func TestProfileOfAnAgent(t *testing.T) {
	l := shared(t)
	info, err := l.Node("seed")
	if err != nil {
		t.Fatal(err)
	}
	s := newSite(t, "spare", "looker", nil)
	file := filepath.Join(s.dir, "cpu")
	run := filepath.Join(info.Dir, "run")
	out, errs, exit := s.run("--run-dir", run, "debug", "pprof", "cpu", "--seconds", "1", "-o", file)
	if exit != 0 || !strings.Contains(out, file) {
		t.Fatalf("exit status %d: %s%s", exit, out, errs)
	}
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	head := make([]byte, 2)
	if _, err := io.ReadFull(f, head); err != nil || string(head) != "\x1f\x8b" {
		t.Errorf("begins with %x, %v: want gzip", head, err)
	}
	if out, errs, exit := s.run("--run-dir", run, "top", "--once", "--interval", "200ms"); exit != 0 ||
		!strings.Contains(out, "netlink  requests") {
		t.Error(errors.New(out + errs))
	}
}
