package nftable

import (
	"bytes"
	"net/netip"
	"reflect"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"pgregory.net/rapid"
)

var equal = cmp.Options{cmpopts.EquateComparable(Range{}), cmpopts.EquateEmpty()}

// The kernel gives elements back in any order, with or without an end between adjacent ranges.
func TestElementsReadBackAreTheRanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		four, six := Ranges(genPrefixes(t, "prefixes"))
		for _, ranges := range [][]Range{four, six} {
			es := toElements(ranges)
			if rapid.Bool().Draw(t, "nft's way") { // an end that is also a start is left out
				es = slices.DeleteFunc(es, func(e nftables.SetElement) bool {
					return e.IntervalEnd && slices.ContainsFunc(es, func(o nftables.SetElement) bool {
						return !o.IntervalEnd &&
							bytes.Equal(o.Key, e.Key)
					})
				})
			}
			es = rapid.Permutation(es).Draw(t, "order")
			if d := cmp.Diff(ranges, fromElements(es), equal); d != "" {
				t.Fatalf("-want +got:\n%s", d)
			}
		}
	})
}

func FuzzForeignTable(f *testing.F) {
	f.Add([]byte{1, 0, 0, 0, 10, 0, 1, 0, 's', 'k', 'e', 'i', 'n', 0, 0, 0})
	f.Add([]byte{1, 0, 0, 0, 3, 0, 1, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		if _, name, ok := ForeignTable(b); ok && len(name) > len(b) {
			t.Error("a name longer than the message")
		}
	})
}

func TestForeignTableReadsTheName(t *testing.T) {
	f, name, ok := ForeignTable([]byte{1, 0, 0, 0, 8, 0, 2, 0, 0, 0, 0, 0, 10, 0, 1, 0, 's', 'k', 'e', 'i', 'n', 0, 0, 0})
	if f != 1 || name != "skein" || !ok {
		t.Errorf("%d %q %v", f, name, ok)
	}
}

// Addresses that are not the mesh's to lead are cut out of its pools, exactly.
func TestWithoutCutsExactly(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pools, _ := Ranges(genLow(t, "pools"))
		cut, _ := Ranges(genLow(t, "elsewhere"))
		got := Without(pools, cut)
		in := func(rs []Range, a netip.Addr) bool {
			return slices.ContainsFunc(rs, func(r Range) bool { return r.From.Compare(a) <= 0 && a.Compare(r.To) <= 0 })
		}
		for i := range 256 {
			a := netip.AddrFrom4([4]byte{255, 255, 255, byte(i)})
			if in(got, a) != (in(pools, a) && !in(cut, a)) {
				t.Fatalf("%s: %v without %v is %v", a, pools, cut, got)
			}
		}
		for i := 1; i < len(got); i++ {
			if !got[i-1].To.Less(got[i].From) {
				t.Fatalf("%v overlaps or is out of order", got)
			}
		}
	})
}

func genLow(t *rapid.T, name string) []netip.Prefix {
	return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) netip.Prefix {
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, rapid.Byte().Draw(t, "low")}),
			rapid.IntRange(23, 32).Draw(t, "bits"))
	}), 0, 8).Draw(t, name)
}

func genPrefixes(t *rapid.T, name string) []netip.Prefix {
	one := rapid.Custom(func(t *rapid.T) netip.Prefix {
		if rapid.Bool().Draw(t, "six") {
			bits := rapid.SampledFrom([]int{0, 1, 64, 120, 127, 128}).Draw(t, "bits")
			return netip.PrefixFrom(netip.AddrFrom16([16]byte{0: 0xff, 15: rapid.Byte().Draw(t, "low")}), bits)
		}
		bits := rapid.SampledFrom([]int{0, 1, 16, 24, 28, 31, 32}).Draw(t, "bits")
		return netip.PrefixFrom(netip.AddrFrom4([4]byte{255, 255, 255, rapid.Byte().Draw(t, "low")}), bits)
	})
	return rapid.SliceOfN(one, 0, 12).Draw(t, name)
}

// TestTagsTellRulesApart: each field of an expression counts, and so do the text and the order.
func TestTagsTellRulesApart(t *testing.T) {
	for _, e := range []expr.Any{&expr.Meta{}, &expr.Cmp{}, &expr.Bitwise{}, &expr.Payload{}, &expr.Lookup{},
		&expr.Immediate{}, &expr.Verdict{}, &expr.Ct{}, &expr.Counter{}, &expr.Fib{}, &expr.NAT{}, &expr.Limit{}} {
		seen := map[string]string{Rule{Exprs: []expr.Any{e}}.tag(): "nothing"}
		typ := reflect.TypeOf(e).Elem()
		for i := range typ.NumField() {
			other := reflect.New(typ)
			switch f := other.Elem().Field(i); f.Kind() {
			case reflect.Bool:
				f.SetBool(true)
			case reflect.String:
				f.SetString("x")
			case reflect.Slice:
				f.SetBytes([]byte{7})
			case reflect.Int, reflect.Int64, reflect.Int32:
				f.SetInt(7)
			default:
				f.SetUint(7)
			}
			tag := Rule{Exprs: []expr.Any{other.Interface().(expr.Any)}}.tag()
			if was, twice := seen[tag]; twice {
				t.Errorf("%s: %s has the tag of %s", typ, typ.Field(i).Name, was)
			}
			seen[tag] = typ.Field(i).Name
		}
	}
	a, b := &expr.Meta{Key: expr.MetaKeyMARK}, &expr.Meta{Key: expr.MetaKeyIIFNAME}
	if (Rule{Exprs: []expr.Any{a, b}}).tag() == (Rule{Exprs: []expr.Any{b, a}}).tag() ||
		(Rule{Text: "one"}).tag() == (Rule{Text: "two"}).tag() {
		t.Error("the order, or the text, is not in the tag")
	}
}

// covered is a table that leads these prefixes somewhere.
func covered(ps []netip.Prefix) Table {
	four, six := Ranges(ps)
	return Table{Name: "t", Chains: []Chain{{Name: "c"}}, Sets: []Set{
		{Name: "four", Key: nftables.TypeIPAddr, Interval: true, Ranges: four},
		{Name: "six", Key: nftables.TypeIP6Addr, Interval: true, Ranges: six},
	}}
}

func TestApplyingTheDiffGivesWhatIsWanted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		have, want := covered(genPrefixes(t, "actual")).State(), covered(genPrefixes(t, "want"))
		got, err := have.Apply(Diff(want, have, true))
		if err != nil {
			t.Fatal(err) // the kernel would refuse an overlap too
		}
		if d := cmp.Diff(want.State(), got, equal); d != "" {
			t.Fatalf("-want +got:\n%s", d)
		}
	})
}

func TestWithoutPruningEverythingOldAndNewIsCovered(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		old, now := genPrefixes(t, "actual"), genPrefixes(t, "want")
		have := covered(old).State()
		got, err := have.Apply(Diff(covered(now), have, false))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range slices.Concat(old, now) {
			set, one := "four", covered([]netip.Prefix{p})
			if p.Addr().Is6() {
				set = "six"
			}
			want := one.Set(set).Ranges[0]
			if !slices.ContainsFunc(got.Sets[set].Ranges, func(r Range) bool {
				return r.From.Compare(want.From) <= 0 && want.To.Compare(r.To) <= 0
			}) {
				t.Fatalf("%s is not covered by %v", p, got.Sets[set].Ranges)
			}
		}
	})
}
