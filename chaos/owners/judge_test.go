package owners

import (
	"strings"
	"testing"
	"time"
)

// at is a moment, in milliseconds.
func at(ms int) time.Time { return time.Unix(1000, 0).Add(time.Duration(ms) * time.Millisecond) }

// seen makes runs of packets that are 10 ms apart; each letter is a packet's sender, a dot is none.
func seen(text string) []Spell {
	var r Spells
	for i, c := range text {
		if c != '.' {
			r.Add(string(c), at(10*i))
		}
	}
	return r.List()
}

// given makes grants; each letter is an owner, a dash a release. None says when.
func given(text string) (out []Grant) {
	for i, c := range text {
		out = append(out, Grant{Epoch: uint64(i + 1), Node: strings.Trim(string(c), "-")})
	}
	return out
}

func TestJudge(t *testing.T) {
	for _, c := range []struct{ log, packets, want string }{
		{"A", "AAAA", ""},
		{"A", "", ""},
		{"AB", "AA..BB", ""},
		{"AB", "BB", ""},              // A has sent nothing
		{"ABC", "AA.CC", ""},          // nor has B
		{"ABA", "AABBAA", ""},         // it came back
		{"A-A", "AA..AA", ""},         // released, and given again
		{"ABABAB", "AB", ""},          // few of many
		{"ABCACB", "ABCB", ""},        // a subsequence
		{"AB", "AABBA", "two owners"}, // the former owner is late
		{"AB", "AABABAB", "two owners"},
		{"AB", "AAC", "C was never given the slot"},
		{"", "A", "A was never given the slot"},
		{"BAB", "BABA", "two owners"},
	} {
		got := Judge("s", given(c.log), seen(c.packets))
		text := ""
		if len(got) > 0 {
			text = got[0].Text
		}
		if c.want == "" && len(got) > 0 || !strings.Contains(text, c.want) {
			t.Errorf("log %s, packets %s: %+v, want %q", c.log, c.packets, got, c.want)
		}
	}
}

// Every sequence of up to six packets of three nodes is judged as a slow and obvious reference does.
func TestJudgeAgainstReference(t *testing.T) {
	var logs, rows []string
	var grow func(s string, n int, keep *[]string)
	grow = func(s string, n int, keep *[]string) {
		*keep = append(*keep, s)
		for _, c := range "ABC" {
			if n > 0 {
				grow(s+string(c), n-1, keep)
			}
		}
	}
	grow("", 4, &logs)
	grow("", 5, &rows)
	for _, log := range logs {
		for _, row := range rows {
			if got, want := len(Judge("s", given(log), seen(row))) == 0, embeds(log, squeeze(row)); got != want {
				t.Fatalf("log %s, packets %s: allowed %v, want %v", log, row, got, want)
			}
		}
	}
}

func squeeze(s string) string {
	out := ""
	for _, c := range s {
		if !strings.HasSuffix(out, string(c)) {
			out += string(c)
		}
	}
	return out
}

// embeds tries all ways to leave letters out.
func embeds(log, row string) bool {
	if row == "" {
		return true
	}
	return log != "" && (log[0] == row[0] && embeds(log[1:], row[1:]) || embeds(log[1:], row))
}

func TestNobodySendsBeforeItIsGiven(t *testing.T) {
	grants := []Grant{{1, "A", at(0)}, {2, "B", at(100)}}
	if got := Judge("s", grants, []Spell{{Node: "A", First: at(1)}, {Node: "B", First: at(101)}}); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	got := Judge("s", grants, []Spell{{Node: "A", First: at(1)}, {Node: "B", First: at(90)}})
	if len(got) != 1 || got[0].Text != "B sent 10ms before it was given the slot with epoch 2" {
		t.Errorf("%+v", got)
	}
}

func TestRunsAndChanges(t *testing.T) {
	runs := seen("AAA...A....BB.A")
	if len(runs) != 3 || runs[0].Packets != 4 || runs[0].Gap != 40*time.Millisecond {
		t.Fatalf("%+v", runs)
	}
	got := Changes("s", runs, at(60))
	want := []Change{{"s", "A", "B", at(110), 50 * time.Millisecond}, {"s", "B", "A", at(140), 20 * time.Millisecond}}
	if len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("%+v, want %+v", got, want)
	}
	if len(Changes("s", runs, at(120))) != 1 {
		t.Error("a change before the moment counts")
	}
}
