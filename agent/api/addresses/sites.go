package addresses

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"connectrpc.com/connect"

	"github.com/skeinmesh/skein/agent/api"
	"github.com/skeinmesh/skein/agent/projection"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/events"
	"github.com/skeinmesh/skein/identity"
)

// SetSiteTranslation has other sites know a network of a site under other addresses.
func (s AddressService) SetSiteTranslation(ctx context.Context,
	r *skeinv1.SetSiteTranslationRequest) (*skeinv1.SetSiteTranslationResponse, error) {
	want := &skeinv1.SiteTranslation{Site: r.GetSite(), Prefix: r.GetPrefix(), As: r.GetAs()}
	if as, err := netip.ParsePrefix(r.GetAs()); err == nil { // the leader says what else is wrong
		for id, record := range s.Agent.RecordsAsked(ctx) {
			if what := api.Overlapped(as, record); what != "" {
				return nil, connect.NewError(connect.CodeAlreadyExists,
					fmt.Errorf("translation of %s: %s covers %s of node %s; choose other addresses",
						r.GetPrefix(), as, what, s.Agent.Name(id)))
			}
		}
	}
	answer, err := s.Agent.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_SetSiteTranslation{
		SetSiteTranslation: &skeinv1.SetSiteTranslation{Translation: want}}})
	if err != nil {
		return nil, err
	}
	return &skeinv1.SetSiteTranslationResponse{Translation: want, Index: answer.GetIndex()}, nil
}

// RemoveSiteTranslation ends that.
func (s AddressService) RemoveSiteTranslation(ctx context.Context,
	r *skeinv1.RemoveSiteTranslationRequest) (*skeinv1.RemoveSiteTranslationResponse, error) {
	answer, err := s.Agent.Propose(ctx, &skeinv1.Command{Body: &skeinv1.Command_RemoveSiteTranslation{
		RemoveSiteTranslation: &skeinv1.RemoveSiteTranslation{Site: r.GetSite(), Prefix: r.GetPrefix()}}})
	return &skeinv1.RemoveSiteTranslationResponse{Index: answer.GetIndex()}, err
}

// Sites lists the sites with their members and translations.
func (s AddressService) Sites(context.Context, *skeinv1.SitesRequest) (*skeinv1.SitesResponse, error) {
	return &skeinv1.SitesResponse{Sites: siteViews(s.Agent.State(), s.Agent.Records(), s.Agent.SiteOf)}, nil
}

// siteViews are all sites that a member is in, or that something is agreed about, by name.
func siteViews(st *events.State, records api.Records,
	siteOf func(*skeinv1.Node, *skeinv1.Record) (string, bool)) (out []*skeinv1.SiteView) {
	all := map[string]*skeinv1.SiteView{}
	site := func(name string) *skeinv1.SiteView {
		if all[name] == nil {
			all[name] = &skeinv1.SiteView{Name: name}
			out = append(out, all[name])
		}
		return all[name]
	}
	for _, n := range st.Nodes() {
		id, err := identity.ParseID(n.GetId())
		if err != nil {
			continue
		}
		if name, known := siteOf(n, records[id]); known {
			v := site(name)
			v.Nodes = append(v.Nodes, n.GetName())
		}
	}
	for _, t := range st.Translations() {
		v := site(t.GetSite())
		v.Translations = append(v.Translations, &skeinv1.TranslationView{Translation: t, Nodes: namesBehind(st, t, records)})
	}
	for _, v := range out {
		slices.Sort(v.Nodes)
	}
	slices.SortFunc(out, func(a, b *skeinv1.SiteView) int { return strings.Compare(a.GetName(), b.GetName()) })
	return out
}

func namesBehind(st *events.State, t *skeinv1.SiteTranslation, records api.Records) (out []string) {
	for _, n := range projection.Behind(st, t, func(id identity.ID) *skeinv1.Record { return records[id] }) {
		out = append(out, n.GetName())
	}
	slices.Sort(out)
	return out
}

// addTranslations adds to what is known of an address how other sites know it or, if it is such an address, what it
// is in its site. Several sites may have it as their own.
func addTranslations(out *skeinv1.WhoResponse, st *events.State, at netip.Addr,
	records api.Records) {
	var says []string
	for _, t := range st.Translations() {
		prefix, as, ok := events.ReadTranslation(t)
		if !ok {
			continue
		}
		one := netip.PrefixFrom(at, at.BitLen())
		real, outside := one, one
		if inside, ok := events.Translate(one, prefix, as); ok {
			outside = inside
		} else if real, ok = events.Translate(one, as, prefix); !ok {
			continue
		}
		v := &skeinv1.TranslatedAddress{Site: t.GetSite(), Real: real.Addr().String(), As: outside.Addr().String(),
			Nodes: namesBehind(st, t, records)}
		out.Translated = append(out.Translated, v)
		behind := ""
		if len(v.Nodes) > 0 {
			behind = ", behind " + strings.Join(v.GetNodes(), ", ")
		}
		says = append(says, fmt.Sprintf("%s in %s%s, and %s in all other sites", v.GetReal(),
			events.SiteText(v.GetSite()), behind, v.GetAs()))
		if out.GetKind() == "unknown" && out.EventIndex < t.GetIndex() {
			out.EventIndex, out.EventTime, out.Event = t.GetIndex(), t.GetSince(), "site_translation_set"
		}
	}
	switch {
	case len(says) == 0:
	case out.GetKind() == "unknown":
		out.Kind, out.Says = "site-network", "It is "+strings.Join(says, "; or ")
	default:
		out.Says += "; it is " + strings.Join(says, "; or ")
	}
}

// concernsTranslation tells what an event did to an address of a site's network.
func concernsTranslation(e *skeinv1.Event, text string) (name, line string) {
	covers := func(prefixes ...string) bool { return events.Covered(text+single(text), prefixes) }
	switch b := e.GetBody().(type) {
	case *skeinv1.Event_SiteTranslationSet:
		if t := b.SiteTranslationSet.GetTranslation(); covers(t.GetPrefix(), t.GetAs()) {
			return "site_translation_set", fmt.Sprintf("other sites know %s of %s as %s", t.GetPrefix(),
				events.SiteText(t.GetSite()), t.GetAs())
		}
	case *skeinv1.Event_SiteTranslationRemoved:
		if t := b.SiteTranslationRemoved; covers(t.GetPrefix()) {
			return "site_translation_removed", fmt.Sprintf("%s of %s is not translated any more", t.GetPrefix(),
				events.SiteText(t.GetSite()))
		}
	}
	return "", ""
}
