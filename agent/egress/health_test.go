package egress

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// rounds parses text: one word per round, one letter per target: + answered, - failed, . no result.
func observe(h *Health, now *time.Time, rounds string) (states string) {
	var out []string
	for word := range strings.FieldsSeq(rounds) {
		*now = now.Add(ProbeEvery)
		var results []ProbeResult
		for i, c := range word {
			r := ProbeResult{Target: string(rune('a' + i))}
			if c == '.' {
				continue
			}
			if c == '-' {
				r.Err = errors.New("no answer")
			}
			results = append(results, r)
		}
		h.Observe(*now, results)
		c, _ := h.Judge(*now)
		out = append(out, string("UGB"[c]))
	}
	return strings.Join(out, "")
}

func TestHealth(t *testing.T) {
	for _, c := range []struct{ what, rounds, want string }{
		{"good after two answers", "+ + +", "UGG"},
		{"one answer is not enough", "+ - + - +", "UUUUU"},
		{"bad after three failures", "- - - -", "UUBB"},
		{"good, then bad after three", "+ + - - - -", "UGGGBB"},
		{"two failures are forgiven", "+ + - - + - - + - -", "UGGGGGGGGG"},
		{"any target that answers will do", "+- +- -+ -+ +- --", "UGGGGG"},
		{"two answers of different targets do not make good", "+- -+ +- -+", "UUUU"},
		{"all of all targets", "++ ++ -- -- --", "UGGGB"},
		{"good again after two", "- - - + +", "UUBBG"},
		{"bad and on and off stays bad", "- - - + - + - + -", "UUBBBBBBB"},
		{"a round without results says nothing", "+ . + . - . - . -", "UUGGGGGGB"},
		{"the second time in a minute it takes four", "- - - + + - - - + + + +", "UUBBGGGBBBBG"},
		{"the third time eight", "- - - + + - - - + + + + - - - + + + + + + + +", "UUBBGGGBBBBGGGBBBBBBBBG"},
	} {
		var h Health
		now := time.Unix(1000, 0)
		if got := observe(&h, &now, c.rounds); got != c.want {
			t.Errorf("%s: %s is %s, not %s", c.what, c.rounds, got, c.want)
		}
	}
}

func TestHealthForgets(t *testing.T) {
	var h Health
	now := time.Unix(1000, 0)
	if c, why := h.Judge(now); c != Unknown || why == "" {
		t.Errorf("at first %s: %s", c, why)
	}
	observe(&h, &now, "+ +")
	if c, _ := h.Judge(now.Add(StaleAfter)); c != Good {
		t.Errorf("as long as results last: %s", c)
	}
	if c, why := h.Judge(now.Add(StaleAfter + 1)); c != Unknown || !strings.Contains(why, "old") {
		t.Errorf("after that: %s: %s", c, why)
	}
	now = now.Add(time.Hour) // a process that was stopped begins anew
	if got := observe(&h, &now, "+ + - - - + +"); got != "UGGGBBG" {
		t.Errorf("after an hour: %s", got)
	}
	now = now.Add(2 * StaleAfter)
	if got := observe(&h, &now, "- - - + + + +"); got != "UUBBBBG" {
		t.Errorf("the bad time before the gap is forgotten: %s", got)
	}
	for range int(FlapWindow / ProbeEvery) {
		observe(&h, &now, "+")
	}
	if got := observe(&h, &now, "- - - + +"); got != "GGBBG" {
		t.Errorf("a minute later: %s", got)
	}
}

func TestHealthTakesLongestAtMost(t *testing.T) {
	var h Health
	now := time.Unix(1000, 0)
	for range 20 {
		observe(&h, &now, "- - -")
		h.condition = Good
	}
	observe(&h, &now, "- - -")
	if got := observe(&h, &now, strings.Repeat("+ ", GoodMost)); got != strings.Repeat("B", GoodMost-1)+"G" {
		t.Errorf("after many bad times: %s", got)
	}
}

func TestHealthSaysWhy(t *testing.T) {
	for rounds, want := range map[string]string{
		"-": "too few", "+ +": "targets answer", "+ + -": "1 of 3 times: no answer", "- - -": "3 times in a row: no answer",
		"- - - +": "answer again",
	} {
		var h Health
		now := time.Unix(1000, 0)
		observe(&h, &now, rounds)
		if _, why := h.Judge(now); !strings.Contains(why, want) {
			t.Errorf("%s: %q does not say %q", rounds, why, want)
		}
	}
}
