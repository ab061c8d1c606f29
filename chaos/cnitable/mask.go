package cnitable

import "regexp"

// masks take out of messages what differs from run to run.
var masks = []struct {
	what *regexp.Regexp
	with string
}{
	{regexp.MustCompile(`cnitool-[0-9a-f]+`), "ID"},
	{regexp.MustCompile(`/run/netns/sk\S+\.p\d+`), "/run/netns/POD"},
	{regexp.MustCompile(`/run/netns/skcni\d*-n\b`), "/run/netns/HOST"},
	{regexp.MustCompile(`/\S+/run/cni\.sock`), "/run/skein/cni.sock"},
	{regexp.MustCompile(`sk[0-9a-f]{12}`), "skXXXXXXXXXXXX"},
	{regexp.MustCompile(`10\.6[4-7]\.\d+\.\d+`), "10.X.X.X"},
	{regexp.MustCompile(`fd64::[0-9a-f]+`), "fd64::X"},
}

func mask(s string) string {
	for _, m := range masks {
		s = m.what.ReplaceAllString(s, m.with)
	}
	return s
}
