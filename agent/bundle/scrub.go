package bundle

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
	"strings"
	"unicode"
)

const gone = "[redacted]"

// word is what a name of a secret holds.
const word = `(?:passw(?:or)?d|passphrase|secret|token|psk|preshared|private[_-]?key|api[_-]?key|access[_-]?key|` +
	`credential|client[_-]?key(?:[_-]?data)?|authorization|cookie)`

var (
	// A private key in PEM, also one whose end was cut off, and one whose line breaks are escaped.
	pemRE = regexp.MustCompile(`(?s)-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]*PRIVATE KEY-----|\z)`)
	// The end of one whose beginning was cut off.
	pemEndRE = regexp.MustCompile(`(?s)\A[A-Za-z0-9+/=\s]*-----END [A-Z0-9 ]*PRIVATE KEY-----`)
	// Tokens to join with, and those of Kubernetes and of OAuth.
	tokenRE  = regexp.MustCompile(`skein1_[A-Za-z0-9_\-=+/]+`)
	jwtRE    = regexp.MustCompile(`eyJ[A-Za-z0-9_\-]{4,}\.[A-Za-z0-9_\-]*(?:\.[A-Za-z0-9_\-]*)?`)
	bearerRE = regexp.MustCompile(`(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=\-]{6,}`)
	// User and password in a URL. A password may hold an @ itself, so the last one before the path counts.
	userRE  = regexp.MustCompile(`(://)[^\s/?#"'<>]+@`)
	queryRE = regexp.MustCompile(`(?i)([?&](?:[a-z0-9_.\-]*` + word + `[a-z0-9_.\-]*|key|sig|signature|code)=)[^&\s"'<>]+`)
	// A name of a secret, and its value: JSON, YAML on one line, shell variables, logs.
	valueRE = regexp.MustCompile(`(?i)([a-z0-9_.\-]*` + word + `[a-z0-9_.\-]*\\?["']?[ \t]*[:=][ \t]*)` +
		`("(?:[^"\\\n]|\\.)*"?|\\"(?:[^"\n]*?)\\"|'[^'\n]*'?|[^\s,;}\]\["'{&|>][^\s,;}\]]*)`)
	// What is as long as a key: 32 bytes and more in base64, or in hexadecimal.
	hexRE    = regexp.MustCompile(`\b[0-9a-fA-F]{64,}\b`)
	base64RE = regexp.MustCompile(`[A-Za-z0-9+/_\-]{43,}={0,2}`)
)

// Scrub takes secrets out of a text and says how many. Values that are as long as a key are replaced by the first four
// bytes of their SHA-256, public ones and hashes too, so that equal ones can still be told to be equal.
func Scrub(text string) (out string, n int) {
	all := func(re *regexp.Regexp, by func(found string) string) {
		text = re.ReplaceAllStringFunc(text, func(found string) string {
			with := by(found)
			if with != found {
				n++
			}
			return with
		})
	}
	flat := func(string) string { return gone }
	all(pemRE, flat)
	all(pemEndRE, flat)
	all(tokenRE, flat)
	all(jwtRE, flat)
	all(bearerRE, func(s string) string {
		kind, _, _ := strings.Cut(s, " ")
		return kind + " " + gone
	})
	all(userRE, func(string) string { return "://" + gone + "@" })
	all(queryRE, func(s string) string {
		name, _, _ := strings.Cut(s, "=")
		return name + "=" + gone
	})
	all(valueRE, func(s string) string {
		m := valueRE.FindStringSubmatch(s)
		return m[1] + quoted(m[2])
	})
	all(hexRE, fingerprint)
	all(base64RE, func(s string) string {
		if !random(s) {
			return s
		}
		return fingerprint(s)
	})
	return text, n
}

// quoted replaces a value, and leaves its quotes and what is none.
func quoted(v string) string {
	switch bare := strings.Trim(v, `\"'`); {
	case bare == "" || bare == "true" || bare == "false" || bare == "null" || bare == gone || strings.HasPrefix(bare,
		gone):
		return v
	case v[0] == '"':
		return `"` + gone + `"`
	case strings.HasPrefix(v, `\"`):
		return `\"` + gone + `\"`
	case v[0] == '\'':
		return "'" + gone + "'"
	}
	return gone
}

func fingerprint(s string) string {
	sum := sha256.Sum256([]byte(strings.TrimRight(s, "=")))
	return "[redacted, SHA-256 " + hex.EncodeToString(sum[:4]) + "…]"
}

// random reports whether a long word can be encoded bytes, and not a path or a name in small letters: fewer than one
// of a hundred million keys of 32 bytes have less than two capitals, or less than two small letters, in base64.
func random(s string) bool {
	var upper, lower int
	for _, r := range s {
		switch {
		case unicode.IsUpper(r):
			upper++
		case unicode.IsLower(r):
			lower++
		}
	}
	return upper > 1 && lower > 1
}

// ScrubFile is Scrub for a configuration file: of a key with the name of a secret everything goes, also what follows in
// further lines, and so do comments, in which people keep what they do not know where else to put.
func ScrubFile(text string) (out string, n int) {
	var kept []string
	under := -1 // the indent of a key whose value's lines are left out
	for line := range strings.Lines(text) {
		line = strings.TrimRight(line, "\r\n")
		indent := len(line) - len(strings.TrimLeft(line, " \t"))
		if under >= 0 && (strings.TrimSpace(line) == "" || indent > under || indent == under &&
			strings.HasPrefix(line[indent:], "- ")) {
			continue
		}
		under = -1
		if i := comment(line); i >= 0 {
			line, n = line[:i]+"# "+gone, n+1
		}
		if m := keyRE.FindStringSubmatch(line); m != nil && secretRE.MatchString(m[1]) {
			under, n = indent, n+1
			line = line[:strings.Index(line, m[1])+len(m[1])] + ": " + gone
		}
		kept = append(kept, line)
	}
	out, more := Scrub(strings.Join(kept, "\n") + "\n")
	return out, n + more
}

var (
	keyRE    = regexp.MustCompile(`^\s*(?:- )?["']?([A-Za-z0-9_.\-]+)["']?\s*:`)
	secretRE = regexp.MustCompile(`(?i)` + word)
)

// comment is where a comment begins, by YAML's rules but for strings over several lines; -1: there is none.
func comment(line string) int {
	var in byte
	for i := range len(line) {
		switch c := line[i]; {
		case in != 0:
			if c == in {
				in = 0
			}
		case c == '"' || c == '\'':
			if i == 0 || strings.IndexByte(" \t[{,:", line[i-1]) >= 0 {
				in = c
			}
		case c == '#' && (i == 0 || line[i-1] == ' ' || line[i-1] == '\t'):
			return i
		}
	}
	return -1
}
