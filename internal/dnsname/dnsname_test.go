package dnsname

import (
	"strings"
	"testing"
)

func TestNames(t *testing.T) {
	for _, c := range []struct {
		s           string
		label, name bool
	}{
		{"", false, false}, {"a", true, true}, {"0", true, true}, {"-", false, false}, {".", false, false},
		{"node-1", true, true}, {"-node", false, false}, {"node-", false, false}, {"Node", false, false},
		{"node_1", false, false}, {"ip-10-0-0-1.eu.compute", false, true}, {".a", false, false}, {"a.", false, false},
		{"a..b", false, true}, {"a-.b", false, true}, {"é", false, false}, {"a\x00b", false, false}, {"a b", false, false},
		{"a\n", false, false}, {"a/b", false, false}, {"a`b", false, false}, {"a{b", false, false},
		{strings.Repeat("a", MostLabel), true, true}, {strings.Repeat("a", MostLabel+1), false, true},
		{strings.Repeat("a", MostName), false, true}, {strings.Repeat("a", MostName+1), false, false},
	} {
		if IsLabel(c.s) != c.label || IsName(c.s) != c.name {
			t.Errorf("%q: label %v, name %v; want %v, %v", c.s, IsLabel(c.s), IsName(c.s), c.label, c.name)
		}
	}
}
