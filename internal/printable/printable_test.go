package printable

import "testing"

func TestPrintable(t *testing.T) {
	const from = "pod \x1b[31ma/b\x07\u202e\nis\tgöne\r"
	if have, want := Lines(from), "pod [31ma/b\nisgöne"; have != want {
		t.Errorf("lines %q, want %q", have, want)
	}
	if have, want := Line(from), "pod [31ma/b isgöne"; have != want {
		t.Errorf("line %q, want %q", have, want)
	}
}
