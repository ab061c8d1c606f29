package admission

import (
	"bytes"
	"encoding/base64"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
)

const testCluster = "000102030405060708090a0b0c0d0e0f"

func testToken() *skeinv1.JoinToken {
	return &skeinv1.JoinToken{
		ClusterId: testCluster, TokenId: "0f1e2d3c4b5a6978", Secret: bytes.Repeat([]byte{7}, 32),
		Seeds: []*skeinv1.JoinToken_Seed{{Address: "203.0.113.7:7443", IdentityKey: bytes.Repeat([]byte{9}, 32)}},
	}
}

func TestToken(t *testing.T) {
	want := testToken()
	text, err := EncodeToken(want)
	if err != nil {
		t.Fatal(err)
	}
	if strings.ContainsAny(text, " +/=\n") {
		t.Errorf("%q needs quoting somewhere", text)
	}
	have, err := DecodeToken("  " + text + "\n")
	if err != nil || !proto.Equal(have, want) {
		t.Errorf("have %v, %v; want %v", have, err, want)
	}
}

func TestTokenRefused(t *testing.T) {
	good, _ := EncodeToken(testToken())
	changed := func(change func(*skeinv1.JoinToken)) string {
		k := testToken()
		change(k)
		text, _ := EncodeToken(k)
		return text
	}
	for _, c := range []struct{ name, text, want string }{
		{"empty", "", "not a skein token"},
		{"another program's", "K10abc::server:xyz", `must begin with "skein1_"`},
		{"too long", tokenPrefix + strings.Repeat("A", maxTokenBytes), "not a skein token"},
		{"cut short", good[:len(good)-9], "copy it again, whole"},
		{"a wrong letter", good[:30] + "!" + good[31:], "copy it again, whole"},
		{"no protobuf", tokenPrefix + base64.RawURLEncoding.EncodeToString([]byte{0xff, 0xff}), "copy it again, whole"},
		{"no cluster", changed(func(k *skeinv1.JoinToken) { k.ClusterId = "" }), "the token is damaged"},
		{"a short secret", changed(func(k *skeinv1.JoinToken) { k.Secret = k.Secret[1:] }), "it holds no secret"},
		{"no ID", changed(func(k *skeinv1.JoinToken) { k.TokenId = "" }), "it holds no secret"},
		{"no seed", changed(func(k *skeinv1.JoinToken) { k.Seeds = nil }), "names 0 seeds"},
		{"many seeds", changed(func(k *skeinv1.JoinToken) {
			for range MaxSeeds {
				k.Seeds = append(k.Seeds, k.Seeds[0])
			}
		}), "names 17 seeds instead of 1 to 16"},
		{"a seed without key", changed(func(k *skeinv1.JoinToken) { k.Seeds[0].IdentityKey = nil }), "no address or " +
			"identity key"},
		{"a seed without address", changed(func(k *skeinv1.JoinToken) { k.Seeds[0].Address = "" }), "no address or " +
			"identity key"},
	} {
		t.Run(c.name, func(t *testing.T) {
			k, err := DecodeToken(c.text)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("have %v, %v; want %q", k, err, c.want)
			}
			if strings.Contains(err.Error(), "BwcH") {
				t.Errorf("the complaint shows the secret: %v", err)
			}
		})
	}
}

func FuzzDecodeToken(f *testing.F) {
	good, _ := EncodeToken(testToken())
	f.Add(good)
	f.Add(tokenPrefix)
	f.Add(good[:len(good)/2])
	f.Fuzz(func(t *testing.T, text string) {
		k, err := DecodeToken(text)
		if err != nil {
			return
		}
		if len(k.GetSecret()) != 32 || len(k.GetSeeds()) == 0 || len(k.GetSeeds()) > MaxSeeds {
			t.Fatalf("took %v", k)
		}
		again, err := EncodeToken(k)
		if err != nil {
			t.Fatal(err)
		}
		if back, err := DecodeToken(again); err == nil && !proto.Equal(back, k) {
			t.Fatalf("%v came back as %v", k, back)
		}
	})
}
