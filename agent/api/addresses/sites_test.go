package addresses

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/api/apitest"
	"github.com/skeinmesh/skein/agent/sites"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
)

// Asked for either address of a host in an overlapping network, the answer has both.
func TestWhoKnowsBothAddresses(t *testing.T) {
	s, ids := apitest.WithTranslations(t)
	name, records := "dc1", api.Records{parsed(t, ids[0]): {Site: "home", NodeAddresses: []string{"192.168.1.0/25"}}}
	for _, c := range []struct{ at, kind, says, event string }{
		{"192.168.1.18", "site-network", "It is 192.168.1.18 in the default site, and 10.202.1.18 in all other sites; or " +
			"192.168.1.18 in site home, behind " + name + ", and 10.201.1.18 in all other sites", "site_translation_set"},
		{"10.201.1.18", "site-network", "It is 192.168.1.18 in site home, behind " + name + ", and 10.201.1.18 in all " +
			"other sites", "site_translation_set"},
		{"10.202.1.18", "site-network", "It is 192.168.1.18 in the default site, and 10.202.1.18 in all other sites",
			"site_translation_set"},
		{"10.203.1.18", "unknown", "It lies in no pool and is not a member's", ""},
	} {
		at := netip.MustParseAddr(c.at)
		out := who(s, at)
		addTranslations(out, s, at, records)
		if out.GetKind() != c.kind || out.GetSays() != c.says || out.GetEvent() != c.event {
			t.Errorf("%s is %v", c.at, out)
		}
		for _, v := range out.GetTranslated() {
			if v.GetReal() != "192.168.1.18" || !strings.HasSuffix(v.GetAs(), ".1.18") ||
				(v.GetSite() == "home") != slices.Equal(v.GetNodes(), []string{name}) {
				t.Errorf("%s is translated as %v", c.at, v)
			}
		}
	}
	set := &skeinv1.Event{Body: &skeinv1.Event_SiteTranslationSet{SiteTranslationSet: &skeinv1.SiteTranslationSet{
		Translation: s.Translations()[1]}}}
	for at, want := range map[string]string{"192.168.1.7": "other sites know 192.168.1.0/24 of site home as 10.201.1.0/24",
		"10.201.1.7": "other sites know 192.168.1.0/24 of site home as 10.201.1.0/24", "10.202.1.7": ""} {
		if _, line := concernsTranslation(set, at); line != want {
			t.Errorf("of %s the history says %q, want %q", at, line, want)
		}
	}
}

func TestSitesAreListed(t *testing.T) {
	s, ids := apitest.WithTranslations(t)
	name, records := "dc1", api.Records{parsed(t, ids[0]): {Site: "home", NodeAddresses: []string{"192.168.1.0/25"}}}
	views := siteViews(s, records, sites.Of)
	if len(views) != 2 || views[0].GetName() != "" || views[1].GetName() != "home" || !slices.Equal(views[1].GetNodes(),
		[]string{name}) ||
		!slices.Equal(views[1].GetTranslations()[0].GetNodes(), []string{name}) ||
		len(views[0].GetTranslations()[0].GetNodes()) != 0 {
		t.Errorf("the sites are %v", views)
	}
}

func parsed(t *testing.T, id string) identity.ID {
	t.Helper()
	out, err := identity.ParseID(id)
	if err != nil {
		t.Fatal(err)
	}
	return out
}
