package bundle

import (
	"crypto/ed25519"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"strconv"
	"strings"
	"testing"
)

// TestScrubHidesKeys: a random key, in any encoding and any surroundings, is not in what is left, nor is most of it.
func TestScrubHidesKeys(t *testing.T) {
	surroundings := []string{"%s", "key %s\n", `{"a":"%s"}`, "time=1 msg=\"x\" k=%s\n", "[%s]", "x:%s,", "/%s/",
		"\\\"%s\\\"", "a\t%s\tb"}
	for range 200 {
		key := make([]byte, 32)
		_, _ = rand.Read(key)
		for _, enc := range []string{base64.StdEncoding.EncodeToString(key), base64.RawStdEncoding.EncodeToString(key),
			base64.URLEncoding.EncodeToString(key), base64.RawURLEncoding.EncodeToString(key), hex.EncodeToString(key),
			strings.ToUpper(hex.EncodeToString(key))} {
			for _, s := range surroundings {
				out, n := Scrub(fmt.Sprintf(s, enc))
				if n == 0 || strings.Contains(out, enc) || strings.Contains(out, enc[8:32]) {
					t.Fatalf("%q in %q leaves %q", enc, s, out)
				}
			}
		}
	}
}

func TestScrubHidesPEM(t *testing.T) {
	_, key, _ := ed25519.GenerateKey(nil)
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	text := string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
	body := strings.Split(text, "\n")[1]
	for name, in := range map[string]string{
		"whole": "a\n" + text + "b\n", "without its end": "a\n" + text[:len(text)-30], "without its begin": text[12:] + "b\n",
		"escaped": `{"x":` + strconv.Quote(text) + `}`, "indented": strings.ReplaceAll(text, "\n", "\n    "),
	} {
		out, n := Scrub(in)
		if n == 0 || strings.Contains(out, body) || strings.Contains(out, body[10:30]) {
			t.Errorf("%s: %q", name, out)
		}
	}
	if out, _ := Scrub("a\n" + text + "b\n"); out != "a\n"+gone+"\nb\n" {
		t.Errorf("what is around a key: %q", out)
	}
}

// TestScrub: what goes, and what stays.
func TestScrub(t *testing.T) {
	for in, want := range map[string]string{
		"join skein1_AbC-d_9 now":                                   "join [redacted] now",
		"https://bob:hunter2@example.net/x":                         "https://[redacted]@example.net/x",
		"https://bob:hunt@er2@example.net/x":                        "https://[redacted]@example.net/x",
		"https://example.net/x?a=1&api_key=hunter2&b=2":             "https://example.net/x?a=1&api_key=[redacted]&b=2",
		"Authorization: Bearer hunter2hunter2":                      "Authorization: [redacted] [redacted]",
		"got bearer hunter2hunter2":                                 "got bearer [redacted]",
		"eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0": "[redacted]",
		`{"password": "hun\"ter2", "b": 1}`:                         `{"password": "[redacted]", "b": 1}`,
		`{"pskSeed":"aGk=","x":1}`:                                  `{"pskSeed":"[redacted]","x":1}`,
		`{"msg":"{\"token\":\"hunter2\"}"}`:                         `{"msg":"{\"token\":\"[redacted]\"}"}`,
		"DB_PASSWORD=hunter2 next":                                  "DB_PASSWORD=[redacted] next",
		"password: 'hunter 2'":                                      "password: '[redacted]'",
		"level=INFO msg=joined token_id=ab12":                       "level=INFO msg=joined token_id=[redacted]",
		// What a maintainer needs stays.
		"path to 198.51.100.7:51820, node 7ef4fee4c02da850, fd73:6b65::1/128": "path to 198.51.100.7:51820, node " +
			"7ef4fee4c02da850, fd73:6b65::1/128",
		`"clusterId": "17e391664883f273df85f6e4b9e4adab"`:    `"clusterId": "17e391664883f273df85f6e4b9e4adab"`,
		"/var/lib/skein/a-long-name/and/another/one/journal": "/var/lib/skein/a-long-name/and/another/one/journal",
		`"tokens": [], "secret": null, "token": ""`:          `"tokens": [], "secret": null, "token": ""`,
		"mail to bob@example.net":                            "mail to bob@example.net",
	} {
		if out, _ := Scrub(in); out != want {
			t.Errorf("%s\n gives %s\n want  %s", in, out, want)
		}
		if again, n := Scrub(want); again != want && n > 0 {
			t.Errorf("what is scrubbed changes when it is scrubbed again: %q to %q", want, again)
		}
	}
}

// TestScrubKeepsEqual: whoever reads can tell whether two nodes mean one key.
func TestScrubKeepsEqual(t *testing.T) {
	key := strings.Repeat("ab", 32)
	out, n := Scrub(key + " " + key + " " + strings.Repeat("cd", 32))
	f := strings.Split(out, "] ")
	if n != 3 || len(f) != 3 || f[0] != f[1] || f[0] == strings.TrimSuffix(f[2], "]") {
		t.Errorf("%d in %q", n, out)
	}
}

func TestScrubFile(t *testing.T) {
	in := `name: home1 # the password is hunter2
# token: hunter2
forceEndpoint: "203.0.113.7:51820"
joinToken: hunter2 and more
secrets:
  - hunter2
  - {a: hunter2}
labels: {rack: "r#7"}
password: |
  hunter2

  hunter2
stunServers: ["https://hunter2@stun.example.net:3478"]
kubernetes: {kubeconfig: /etc/hunter2free/kubeconfig}
`
	want := `name: home1 # [redacted]
# [redacted]
forceEndpoint: "203.0.113.7:51820"
joinToken: [redacted]
secrets: [redacted]
labels: {rack: "r#7"}
password: [redacted]
stunServers: ["https://[redacted]@stun.example.net:3478"]
kubernetes: {kubeconfig: /etc/hunter2free/kubeconfig}
`
	out, n := ScrubFile(in)
	if out != want || n < 6 {
		t.Errorf("%d in\n%s", n, out)
	}
}
