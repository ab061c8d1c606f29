package wire

import (
	"errors"
	"net"
	"slices"
	"testing"
)

// notes is a connection that notes what is written to it, call by call.
type notes struct {
	net.Conn
	calls []string
	err   error
}

func (n *notes) Write(b []byte) (int, error) {
	if n.err != nil {
		return 0, n.err
	}
	n.calls = append(n.calls, string(b))
	return len(b), nil
}

func TestTogether(t *testing.T) {
	under := &notes{}
	c, buffer := Gather(under), []byte("old")
	write := func(parts ...string) (n int, err error) {
		return together(c, &buffer, func() (int, error) {
			for _, p := range parts {
				if m, err := c.Write([]byte(p)); err != nil || m != len(p) {
					t.Errorf("wrote %d of %q: %v", m, p, err)
				}
				n += len(p)
			}
			return n, nil
		})
	}
	if n, err := write("one ", "two ", "three"); n != 13 || err != nil {
		t.Errorf("%d, %v", n, err)
	}
	_, _ = c.Write([]byte("four")) // by itself
	_, _ = write("five", "six")
	if want := []string{"one two three", "four", "fivesix"}; !slices.Equal(under.calls, want) {
		t.Errorf("calls %q, want %q", under.calls, want)
	}

	failed := errors.New("failed")
	if _, err := together(c, &buffer, func() (int, error) {
		_, _ = c.Write([]byte("alert"))
		return 0, failed
	}); err != failed {
		t.Errorf("the writer's error is lost: %v", err)
	}
	if last := under.calls[len(under.calls)-1]; last != "alert" {
		t.Errorf("what was written before an error is lost; the last call had %q", last)
	}
	under.err = failed
	if _, err := write("seven"); err != failed {
		t.Errorf("the connection's error is lost: %v", err)
	}
	plain := &notes{}
	if n, err := together(plain, &buffer, func() (int, error) { return plain.Write([]byte("eight")) }); n != 5 ||
		err != nil || len(plain.calls) != 1 {
		t.Errorf("a connection that does not gather: %d, %v, %q", n, err, plain.calls)
	}
}
