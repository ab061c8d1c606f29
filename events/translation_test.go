package events

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

func translate(site, prefix, as string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_SetSiteTranslation{SetSiteTranslation: &skeinv1.SetSiteTranslation{
		Translation: &skeinv1.SiteTranslation{Site: site, Prefix: prefix, As: as}}}}
}

func untranslate(site, prefix string) *skeinv1.Command {
	return &skeinv1.Command{Body: &skeinv1.Command_RemoveSiteTranslation{
		RemoveSiteTranslation: &skeinv1.RemoveSiteTranslation{Site: site, Prefix: prefix}}}
}

func translationHistory(t *testing.T) *world {
	w := newPools(t)
	w.must(translate("home", "192.168.1.0/24", "10.201.1.0/24"))
	w.must(translate("", "192.168.1.0/24", "10.201.2.0/24"))
	w.must(untranslate("home", "192.168.1.0/24"))
	return w
}

func translationsOf(s *State) (out []string) {
	for _, v := range s.Translations() {
		out = append(out, v.GetSite()+" "+v.GetPrefix()+" as "+v.GetAs())
	}
	return out
}

// Two sites have the same network, and each has other addresses for the rest.
func TestTranslations(t *testing.T) {
	w := newPools(t)
	step := func(c *skeinv1.Command, want ...string) {
		t.Helper()
		w.must(c)
		if have := translationsOf(w.s); !slices.Equal(have, want) {
			t.Fatalf("after %v: %q, want %q", c, have, want)
		}
		checkInvariants(t, w.s)
		checkSame(t, "through bytes", w.s, throughBytes(t, w.s))
	}
	step(translate("home", "192.168.1.0/24", "10.201.1.0/24"), "home 192.168.1.0/24 as 10.201.1.0/24")
	first := w.s.Translation("home", "192.168.1.0/24")
	if first.GetIndex() != w.s.Index() || first.GetSince() != w.s.Time() {
		t.Errorf("it is of event %d at %d, want %d at %d", first.GetIndex(), first.GetSince(), w.s.Index(), w.s.Time())
	}
	if evs, _, err := w.propose(translate("home", "192.168.1.0/24", "10.201.1.0/24")); err != nil || len(evs) != 0 {
		t.Errorf("what is so already gives %v, %v", evs, err)
	}
	step(translate("", "192.168.1.0/24", "10.201.2.0/24"),
		" 192.168.1.0/24 as 10.201.2.0/24", "home 192.168.1.0/24 as 10.201.1.0/24")
	step(translate("home", "192.168.1.0/24", "10.201.3.0/24"),
		" 192.168.1.0/24 as 10.201.2.0/24", "home 192.168.1.0/24 as 10.201.3.0/24")
	step(translate("home", "fd12:3::/64", "fd12:4::/64"), " 192.168.1.0/24 as 10.201.2.0/24",
		"home 192.168.1.0/24 as 10.201.3.0/24", "home fd12:3::/64 as fd12:4::/64")
	step(untranslate("home", "fd12:3::/64"), " 192.168.1.0/24 as 10.201.2.0/24",
		"home 192.168.1.0/24 as 10.201.3.0/24")
	w.must(plain("office", "b", "192.168.8.0/24"))
	w.must(podRanges("10.244.0.0/16", "10.201.0.0/16"))
	w.must(podCIDRs("b", "node-b", "10.244.1.0/24"))

	for _, c := range []struct {
		command *skeinv1.Command
		says    string
	}{
		{translate("home", "192.168.1.7/24", "10.201.9.0/24"),
			"prefix 192.168.1.7/24 has host bits set; write 192.168.1.0/24"},
		{translate("home", "nonsense", "10.201.9.0/24"), "prefix \"nonsense\": want a prefix such as 192.168.1.0/24"},
		{translate("home", "198.51.100.0/24", "10.201.9.0/24"), "prefix 198.51.100.0/24 is not private"},
		{translate("home", "192.168.3.0/24", "198.51.100.0/24"), "addresses elsewhere 198.51.100.0/24 is not private"},
		{translate("home", "192.168.3.0/24", "10.201.0.0/20"), "10.201.0.0/20 differs in size or family; each address " +
			"gets one elsewhere: name a /24"},
		{translate("home", "192.168.3.0/24", "fd00::/24"), "fd00::/24 differs in size or family"},
		{translate(strings.Repeat("s", 300), "192.168.3.0/24", "10.201.9.0/24"), "has 300 bytes: at most 64 are allowed"},
		{translate("home", "192.168.3.0/24", "192.168.3.0/24"), "192.168.3.0/24 overlaps the network itself"},
		{translate("home", "192.168.3.0/24", "10.201.2.0/24"), "10.201.2.0/24 overlaps 10.201.2.0/24, which is " +
			"192.168.1.0/24 of the default site elsewhere"},
		{translate("home", "192.168.1.0/25", "10.201.9.0/25"), "it overlaps 192.168.1.0/24, which is translated already"},
		{translate("dc", "192.168.3.0/24", "192.168.1.0/24"), "192.168.1.0/24 overlaps 192.168.1.0/24, a network of the " +
			"default site"},
		{translate("dc", "10.201.2.0/24", "10.201.9.0/24"), "it overlaps 10.201.2.0/24, which is 192.168.1.0/24 of the " +
			"default site elsewhere"},
		{translate("home", "192.168.3.0/24", "10.4.9.0/24"), "10.4.9.0/24 overlaps the overlay 10.4.0.0/16"},
		{translate("home", "10.4.0.0/24", "10.201.9.0/24"), "10.4.0.0/24 overlaps the overlay"},
		{translate("home", "192.168.3.0/24", "192.168.8.0/24"), "overlaps 192.168.8.0/24 behind plain peer office"},
		{translate("home", "192.168.3.0/24", "10.244.1.0/24"),
			"overlaps 10.244.1.0/24, where another CNI runs the pods of b"},
		{untranslate("home", "192.168.3.0/24"), "192.168.3.0/24 of site home is not translated: skein site list"},
		{plain("phone", "b", "192.168.1.0/25"), "network 192.168.1.0/25 overlaps the translation of 192.168.1.0/24 in"},
		{plain("phone", "b", "10.201.2.128/25"), "network 10.201.2.128/25 overlaps the translation of 192.168.1.0/24 in " +
			"the default site as 10.201.2.0/24"},
		{podCIDRs("c", "node-c", "10.201.2.0/25"), "pod CIDR 10.201.2.0/25 overlaps the translation of"},
		{createPool(pool("lan", 5, "10.201.0.0/16")), "subnet 10.201.0.0/16 overlaps the translation of"},
	} {
		before := w.s.Hash()
		if _, _, err := w.propose(c.command); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%v gives %v, want %q", c.command, err, c.says)
		}
		if w.s.Hash() != before {
			t.Errorf("%v was refused and changed the state", c.command)
		}
	}
	// The pods of a site's own nodes may be what is translated.
	w.must(translate("home", "10.244.0.0/16", "10.202.0.0/16"))
	checkInvariants(t, w.s)
}

// A forged or foreign event takes nobody's addresses.
func TestForgedTranslationChangesNothing(t *testing.T) {
	w := newPools(t)
	for _, v := range []*skeinv1.SiteTranslation{
		nil, {Prefix: "192.168.1.0/24", As: "10.4.0.0/24"}, {Prefix: "192.168.1.0/24", As: "10.201.0.0/16"},
		{Prefix: "192.168.1.0/24", As: "0.0.0.0/24"}, {Site: "a\x1b", Prefix: "192.168.1.0/24", As: "10.201.1.0/24"},
		{Prefix: "192.168.1.1/24", As: "10.201.1.0/24"},
	} {
		e := &skeinv1.Event{Index: w.s.Index() + 1, Schema: translationSchema, Time: w.s.Time(),
			Body: &skeinv1.Event_SiteTranslationSet{SiteTranslationSet: &skeinv1.SiteTranslationSet{Translation: v}}}
		if err := w.s.Fold(e); err != nil {
			t.Fatal(err)
		}
		if got := w.s.Translations(); len(got) != 0 {
			t.Errorf("%v was folded", got)
		}
	}
}

// An old server could not fold it, so it is refused.
func TestTranslationsNeedTheirSchema(t *testing.T) {
	w := newPools(t)
	w.must(&skeinv1.Command{Body: &skeinv1.Command_ChangeNode{ChangeNode: &skeinv1.ChangeNode{NodeId: id("a"),
		MinSchema: 1,
		MaxSchema: translationSchema - 1}}})
	_, _, err := w.propose(translate("home", "192.168.1.0/24", "10.201.1.0/24"))
	if err == nil || !strings.Contains(err.Error(), "folds event schemas up to 6 and this command needs 7: upgrade "+
		"skein on a first") {
		t.Errorf("it gives %v", err)
	}
}

func TestTranslate(t *testing.T) {
	for _, c := range []struct{ part, from, to, want string }{
		{"192.168.1.7/32", "192.168.1.0/24", "10.201.1.0/24", "10.201.1.7/32"},
		{"192.168.1.64/26", "192.168.1.0/24", "10.201.9.0/24", "10.201.9.64/26"},
		{"10.201.9.200/32", "10.201.9.128/25", "192.168.1.0/25", "192.168.1.72/32"},
		{"10.244.3.0/24", "10.244.0.0/20", "172.20.16.0/20", "172.20.19.0/24"},
		{"fd12:3::1234:5/128", "fd12:3::/64", "fd99::/64", "fd99::1234:5/128"},
		{"fd12:3:0:a::1/128", "fd12:3::/57", "fd99:0:0:80::/57", "fd99:0:0:8a::1/128"},
		{"192.168.2.7/32", "192.168.1.0/24", "10.201.1.0/24", ""},
		{"192.168.0.0/16", "192.168.1.0/24", "10.201.1.0/24", ""},
		{"fd12::1/128", "192.168.1.0/24", "10.201.1.0/24", ""},
	} {
		p, ok := Translate(netip.MustParsePrefix(c.part), netip.MustParsePrefix(c.from), netip.MustParsePrefix(c.to))
		if ok != (c.want != "") || ok && p.String() != c.want {
			t.Errorf("%s of %s in %s is %s, %t; want %s", c.part, c.from, c.to, p, ok, c.want)
		}
	}
}

// anyTranslationCommand draws a command about translations that meet each other, pools, pods and plain peers.
func anyTranslationCommand(t *rapid.T, n func() string) *skeinv1.Command {
	prefix := rapid.SampledFrom([]string{"192.168.8.0/24", "192.168.9.0/24", "192.168.8.0/25",
		"10.244.1.0/24", "nonsense"})
	if rapid.IntRange(0, 2).Draw(t, "remove") == 0 {
		return untranslate(n(), prefix.Draw(t, "prefix"))
	}
	as := rapid.SampledFrom([]string{"10.201.1.0/24", "10.201.2.0/24", "192.168.9.0/24", "10.64.0.0/24", "10.4.0.0/24",
		"10.201.1.0/25"})
	return translate(n(), prefix.Draw(t, "prefix"), as.Draw(t, "as"))
}

// checkTranslations: what a site's network is elsewhere nobody else has, and what it is in its site nobody has
// everywhere.
func checkTranslations(t fatal, s *State) {
	t.Helper()
	all := s.Translations()
	if len(all) != len(s.translated) {
		t.Fatalf("%d translations are there, and %d are known", len(all), len(s.translated))
	}
	for i, v := range all {
		prefix, as, ok := ReadTranslation(v)
		if !ok {
			t.Fatalf("translation %v makes no sense", v)
		}
		for _, p := range []netip.Prefix{prefix, as} {
			_, pool := s.overlap(p)
			_, plain := s.plainNetOverlapping(p, "")
			_, pods := s.podNetOverlapping(as, "")
			if pool || plain || pods || slices.ContainsFunc(s.overlays(), p.Overlaps) {
				t.Fatalf("%s of translation %v is somebody else's", p, v)
			}
		}
		for j, o := range all {
			if p, a, _ := ReadTranslation(o); p.Overlaps(as) || i != j && a.Overlaps(as) ||
				i != j && o.GetSite() == v.GetSite() && p.Overlaps(prefix) {
				t.Fatalf("translations %v and %v meet", v, o)
			}
		}
	}
}
