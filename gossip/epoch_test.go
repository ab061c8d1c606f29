package gossip

import (
	"strconv"
	"testing"
)

func FuzzDecodeEpoch(f *testing.F) {
	f.Add("7 " + epochSum("7") + "\n")
	f.Add("7 0000")
	f.Add("18446744073709551615 " + epochSum("18446744073709551615"))
	f.Fuzz(func(t *testing.T, s string) {
		for _, in := range []string{s, s + " " + epochSum(s) + "\n"} {
			if n, err := decodeEpoch(in); err == nil && n >= maxNumber {
				t.Fatalf("%q reads as %s", in, strconv.FormatUint(n, 10))
			}
		}
	})
}
