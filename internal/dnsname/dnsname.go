// Package dnsname says which strings are names as DNS and Kubernetes have them. It uses no regular expressions: a
// bounded repetition of one takes half a megabyte, and milliseconds of each start of the CNI plugin.
//
// Its functions may be called concurrently.
package dnsname

import "strings"

// Bounds of names, in characters.
const (
	MostLabel = 63  // RFC 1035, section 2.3.4
	MostName  = 253 // what 255 octets of RFC 1035 hold as text
)

const alphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"

// IsLabel tells whether s has 1 to MostLabel lower-case letters, digits and hyphens, no hyphen at an end.
func IsLabel(s string) bool { return isWord(s, "-", MostLabel) }

// IsName tells whether s has 1 to MostName lower-case letters, digits, hyphens and dots, with a letter or digit at both
// ends. It is what names of Kubernetes' Nodes are made of; what stands between the dots is not looked at.
func IsName(s string) bool { return isWord(s, "-.", MostName) }

func isWord(s, inside string, most int) bool {
	return s != "" && len(s) <= most && strings.Trim(s, alphanumeric+inside) == "" &&
		!strings.Contains(inside, s[:1]) && !strings.Contains(inside, s[len(s)-1:])
}
