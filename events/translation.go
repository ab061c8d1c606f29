package events

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/internal/addr"
)

// MaxTranslations bounds how many networks of sites have other addresses elsewhere. Fold does not rest on it.
const MaxTranslations = 256

// translationSchema is the schema that brought translations.
const translationSchema = 7

// translated is a translation that was read.
type translated struct {
	prefix, as netip.Prefix
	message    *skeinv1.SiteTranslation
}

// Translations are the networks of sites that other sites know under other addresses, sorted by site, then prefix.
func (s *State) Translations() []*skeinv1.SiteTranslation {
	out := list(&s.translations)
	slices.SortFunc(out, func(a, b *skeinv1.SiteTranslation) int {
		return cmp.Or(cmp.Compare(a.GetSite(), b.GetSite()), cmp.Compare(a.GetPrefix(), b.GetPrefix()))
	})
	return out
}

// Translation is the one of a site's network; nil: there is none.
func (s *State) Translation(site, prefix string) *skeinv1.SiteTranslation {
	key := translationKey(site, prefix)
	t, _ := s.translations.get(textKey(key), key)
	return t
}

func translationKey(site, prefix string) string { return site + "\x00" + prefix }

// SiteText names a site in a sentence; the default site has no name.
func SiteText(site string) string {
	if site == "" {
		return "the default site"
	}
	return "site " + site
}

// Translate gives a part of one prefix its place in another one of the same length. It reports false for what is no
// part.
func Translate(p, from, to netip.Prefix) (netip.Prefix, bool) {
	if p.Bits() < from.Bits() || !from.Contains(p.Addr()) || from.Bits() != to.Bits() ||
		from.Addr().BitLen() != to.Addr().BitLen() {
		return netip.Prefix{}, false
	}
	host, out := p.Addr().AsSlice(), to.Masked().Addr().AsSlice()
	for i := range host {
		network := min(max(from.Bits()-8*i, 0), 8) // bits of this byte
		out[i] |= host[i] & (0xff >> network)
	}
	a, _ := netip.AddrFromSlice(out)
	return netip.PrefixFrom(a, p.Bits()), true
}

// ReadTranslation reads both prefixes of a translation, which must be in their one form.
func ReadTranslation(t *skeinv1.SiteTranslation) (prefix, as netip.Prefix, ok bool) {
	for i, text := range []string{t.GetPrefix(), t.GetAs()} {
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.String() != text || !addr.Private(p) {
			return prefix, as, false
		}
		if i == 0 {
			prefix = p
		} else {
			as = p
		}
	}
	return prefix, as, prefix.Bits() == as.Bits() && prefix.Addr().BitLen() == as.Addr().BitLen() &&
		CheckSite("translation", t.GetSite()) == nil
}

// translationOver is a translation whose addresses elsewhere overlap the prefix or, if inside is set, whose network
// does.
func (s *State) translationOver(p netip.Prefix, inside bool) (*skeinv1.SiteTranslation, bool) {
	for _, t := range s.translated {
		if t.as.Overlaps(p) || inside && t.prefix.Overlaps(p) {
			return t.message, true
		}
	}
	return nil, false
}

// setTranslation folds a translation, unless somebody else has addresses in it; it reports whether it did.
func (s *State) setTranslation(t *skeinv1.SiteTranslation) bool {
	prefix, as, ok := ReadTranslation(t)
	if !ok || s.checkTranslationFree(t, prefix, as) != nil {
		return false
	}
	s.dropTranslation(t.GetSite(), t.GetPrefix())
	key := translationKey(t.GetSite(), t.GetPrefix())
	s.translations.put(s.own(), textKey(key), key, t)
	s.sizes.add(sectionTranslations, t)
	all := append(slices.Clone(s.translated), translated{prefix, as, t})
	slices.SortFunc(all, func(x, y translated) int { return x.as.Addr().Compare(y.as.Addr()) })
	s.translated = all
	return true
}

func (s *State) dropTranslation(site, prefix string) {
	t := s.Translation(site, prefix)
	if t == nil {
		return
	}
	key := translationKey(site, prefix)
	s.translations.del(s.own(), textKey(key), key)
	s.sizes.drop(sectionTranslations, t)
	s.translated = slices.DeleteFunc(slices.Clone(s.translated), func(o translated) bool { return o.message == t })
}

// loadTranslations takes a snapshot's translations.
func (s *State) loadTranslations(p *skeinv1.State) error {
	for _, t := range p.GetTranslations() {
		if s.Translation(t.GetSite(), t.GetPrefix()) != nil || !s.setTranslation(t) {
			return fmt.Errorf("translation of %s in %s: it is malformed or listed twice, or its addresses belong to another",
				t.GetPrefix(), SiteText(t.GetSite()))
		}
	}
	return nil
}

// checkTranslationFree refuses addresses that somebody else has. Inside of the site the network is as it is, and so
// may not be what the whole mesh knows under the same addresses; elsewhere nobody may have its other addresses.
func (s *State) checkTranslationFree(t *skeinv1.SiteTranslation, prefix, as netip.Prefix) error {
	what := fmt.Sprintf("translation of %s in %s", prefix, SiteText(t.GetSite()))
	if as.Overlaps(prefix) {
		return refuse(InvalidArgument, "%s: %s overlaps the network itself; choose addresses outside of it for the other "+
			"sites", what, as)
	}
	for _, o := range s.translated {
		same := o.message.GetSite() == t.GetSite()
		switch {
		case same && o.prefix == prefix: // it is replaced
		case o.as.Overlaps(as):
			return refuse(AlreadyExists, "%s: %s overlaps %s, which is %s of %s elsewhere; choose other addresses",
				what, as, o.as, o.prefix, SiteText(o.message.GetSite()))
		case same && o.prefix.Overlaps(prefix):
			return refuse(AlreadyExists, "%s: it overlaps %s, which is translated already; remove that first", what, o.prefix)
		}
		if o.prefix.Overlaps(as) {
			return refuse(AlreadyExists, "%s: %s overlaps %s, a network of %s; choose other addresses",
				what, as, o.prefix, SiteText(o.message.GetSite()))
		}
		if o.as.Overlaps(prefix) && (!same || o.prefix != prefix) {
			return refuse(AlreadyExists, "%s: it overlaps %s, which is %s of %s elsewhere; remove that translation first",
				what, o.as, o.prefix, SiteText(o.message.GetSite()))
		}
	}
	for _, p := range []netip.Prefix{prefix, as} {
		for _, o := range s.overlays() {
			if o.Overlaps(p) {
				return refuse(AlreadyExists, "%s: %s overlaps the overlay %s, where nodes have their addresses", what, p, o)
			}
		}
		if o, taken := s.overlap(p); taken {
			return refuse(AlreadyExists, "%s: %s overlaps %s of pool %s, which all sites know", what, p, o.prefix, o.pool)
		}
		if o, taken := s.plainNetOverlapping(p, ""); taken {
			return refuse(AlreadyExists, "%s: %s overlaps %s behind plain peer %s, which all sites know",
				what, p, o.prefix, o.peer)
		}
	}
	if o, taken := s.podNetOverlapping(as, ""); taken {
		return refuse(AlreadyExists, "%s: %s overlaps %s, where another CNI runs the pods of %s; choose other addresses",
			what, as, o.prefix, s.called(o.node))
	}
	return nil
}

// checkNotTranslated refuses addresses that a site's network has elsewhere or, if inside is set, in its site.
func (s *State) checkNotTranslated(what string, p netip.Prefix, inside bool) error {
	t, taken := s.translationOver(p, inside)
	if !taken {
		return nil
	}
	return refuse(AlreadyExists,
		"%s %s overlaps the translation of %s in %s as %s; use other addresses, or remove it with skein site translate",
		what, p, t.GetPrefix(), SiteText(t.GetSite()), t.GetAs())
}

func (d *decision) setSiteTranslation(c *skeinv1.SetSiteTranslation) error {
	want := c.GetTranslation()
	if err := CheckSite("translation", want.GetSite()); err != nil {
		return err
	}
	prefix, err := readSiteNetwork("prefix", want.GetPrefix())
	if err != nil {
		return err
	}
	as, err := readSiteNetwork("addresses elsewhere", want.GetAs())
	if err != nil {
		return err
	}
	if prefix.Addr().Is4() != as.Addr().Is4() || prefix.Bits() != as.Bits() {
		return refuse(InvalidArgument,
			"translation of %s: %s differs in size or family; each address gets one elsewhere: name a /%d of the same family",
			prefix, as, prefix.Bits())
	}
	next := &skeinv1.SiteTranslation{Site: want.GetSite(), Prefix: prefix.String(), As: as.String(), Since: d.c.GetTime(),
		Index: d.nextIndex()}
	old := d.s.Translation(next.GetSite(), next.GetPrefix())
	switch {
	case old.GetAs() == next.GetAs():
		return nil
	case old == nil && d.s.translations.n >= MaxTranslations:
		return refuse(ResourceExhausted,
			"there are %d translations already, the most that are allowed: translate a larger prefix, or remove some",
			d.s.translations.n)
	}
	if err := d.s.checkTranslationFree(next, prefix, as); err != nil {
		return err
	}
	if err := d.s.checkNoDestination("translation: the prefix", []netip.Prefix{as}); err != nil {
		return err
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_SiteTranslationSet{
		SiteTranslationSet: &skeinv1.SiteTranslationSet{Translation: next}}})
	return nil
}

// readSiteNetwork reads one of a translation's prefixes.
func readSiteNetwork(what, text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil || p.Addr().Is4In6() || p.Addr().Zone() != "":
		return p, refuse(InvalidArgument, "translation: %s %.80q: want a prefix such as 192.168.1.0/24", what, text)
	case p != p.Masked():
		return p, refuse(InvalidArgument, "translation: %s %s has host bits set; write %s", what, p, p.Masked())
	case !addr.Private(p):
		return p, refuse(InvalidArgument, "translation: %s %s is not private: %s", what, p, addr.PrivateText)
	}
	return p, nil
}

func (d *decision) removeSiteTranslation(c *skeinv1.RemoveSiteTranslation) error {
	prefix, err := readSiteNetwork("prefix", c.GetPrefix())
	if err != nil {
		return err
	}
	if d.s.Translation(c.GetSite(), prefix.String()) == nil {
		return refuse(NotFound, "%s of %s is not translated: skein site list shows what is", prefix, SiteText(c.GetSite()))
	}
	d.emit(&skeinv1.Event{Body: &skeinv1.Event_SiteTranslationRemoved{
		SiteTranslationRemoved: &skeinv1.SiteTranslationRemoved{Site: c.GetSite(), Prefix: prefix.String()}}})
	return nil
}
