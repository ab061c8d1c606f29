package agent

import "testing"

func TestProblems(t *testing.T) {
	p := newProblems()
	news := func(want bool, subject, severity, message string) {
		t.Helper()
		if have := p.set(subject, severity, message, "do this"); have != want {
			t.Errorf("%s %q: news %t, want %t", subject, message, have, want)
		}
	}
	news(false, "clock", warning, "")
	news(true, "clock", warning, "two minutes off")
	since := p.list()[0].GetSince()
	news(false, "clock", warning, "two minutes off")
	if p.list()[0].GetSince() != since {
		t.Error("a problem that stays must keep its time")
	}
	news(true, "clock", warning, "three minutes off")
	if p.failing() != nil {
		t.Error("a warning must not make the agent unready")
	}
	news(true, "data plane", failure, "no such device")
	if f := p.failing(); f.GetSubject() != "data plane" || f.GetAdvice() != "do this" {
		t.Errorf("failing is %v", f)
	}
	if l := p.list(); len(l) != 2 || l[0].GetSubject() != "clock" || l[1].GetSubject() != "data plane" {
		t.Errorf("the list is %v", l)
	}
	news(true, "data plane", failure, "")
	news(false, "data plane", failure, "")
	if p.failing() != nil || len(p.list()) != 1 {
		t.Errorf("left are %v", p.list())
	}
}
