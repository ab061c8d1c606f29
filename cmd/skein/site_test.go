package main

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/cli"
)

func (f *fakeAgent) Sites(_ context.Context, r *skeinv1.SitesRequest) (*skeinv1.SitesResponse, error) {
	return answerTo[*skeinv1.SitesResponse](f, r)
}

func (f *fakeAgent) SetSiteTranslation(_ context.Context,
	r *skeinv1.SetSiteTranslationRequest) (*skeinv1.SetSiteTranslationResponse, error) {
	return answerTo[*skeinv1.SetSiteTranslationResponse](f, r)
}

func (f *fakeAgent) RemoveSiteTranslation(_ context.Context,
	r *skeinv1.RemoveSiteTranslationRequest) (*skeinv1.RemoveSiteTranslationResponse, error) {
	return answerTo[*skeinv1.RemoveSiteTranslationResponse](f, r)
}

func TestSites(t *testing.T) {
	f := newFakeAgent(t)
	home := &skeinv1.SiteTranslation{Site: "home", Prefix: "192.168.1.0/24", As: "10.201.1.0/24",
		Since: 1795269600e9, Index: 31}
	six := &skeinv1.SiteTranslation{Site: "home", Prefix: "fd12:1::/64", As: "fd99:1::/64", Since: 1795269600e9, Index: 32}
	f.lay(&skeinv1.SitesRequest{}, &skeinv1.SitesResponse{Sites: []*skeinv1.SiteView{
		{Nodes: []string{"dc1"}},
		{Name: "home", Nodes: []string{"home1", "home2"}, Translations: []*skeinv1.TranslationView{
			{Translation: home, Nodes: []string{"home1"}}, {Translation: six}}},
	}})
	f.lay(&skeinv1.SetSiteTranslationRequest{}, &skeinv1.SetSiteTranslationResponse{Translation: home, Index: 31})
	f.lay(&skeinv1.RemoveSiteTranslationRequest{}, &skeinv1.RemoveSiteTranslationResponse{Index: 33})
	translate := []string{"site", "translate", "home", "--prefix", "192.168.1.0/24"}
	with := func(more ...string) []string { return slices.Concat(translate, more) }
	f.showsGolden(t, "sites", []string{"site", "list"}, with("--as", "10.201.1.0/24"), with("--remove"))
	for _, c := range []struct {
		args []string
		want string
	}{{translate, "give either --as PREFIX or --remove"}, {with("--remove", "--as", "10.201.1.0/24"), "give either"},
		{[]string{"site", "translate", "", "--as", "10.201.1.0/24"}, "--prefix is missing"}} {
		if _, _, err := f.skein(t, c.args...); !errors.As(err, new(cli.UsageError)) ||
			!strings.Contains(err.Error(), c.want) {
			t.Errorf("skein %s: %v; want a mistake in usage: %s", c.args, err, c.want)
		}
	}
}
