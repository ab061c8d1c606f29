// Package claims keeps agents of one network namespace from sharing a name or number in its kernel. Each agent keeps an
// abstract unix socket there, which ends with the process, however that ends, and tells whoever connects what it holds.
// An agent that starts first opens its own and then asks all others: so of two that start together at least one finds
// the other.
package claims

import (
	"bytes"
	"cmp"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
)

const (
	prefix  = "@skein-agent-"
	most    = 64 << 10        // bytes of an answer
	timeout = 2 * time.Second // for an answer; the kernel takes connections for an agent that is frozen
)

// Claim is what an agent says of itself.
type Claim struct {
	Process int               `json:"process"`
	RunDir  string            `json:"runDir"`
	Numbers dataplane.Numbers `json:"numbers"`
}

// Claims is the own socket.
type Claims struct {
	l    *net.UnixListener
	name string
	own  dataplane.Numbers
}

// Hold holds numbers in this network namespace, or says who has some of them.
func Hold(runDir string, n dataplane.Numbers) (*Claims, error) {
	answer, err := json.Marshal(Claim{Process: os.Getpid(), RunDir: runDir, Numbers: n})
	if err != nil {
		return nil, fmt.Errorf("tell other agents this one's numbers: %w", err)
	}
	name := prefix + strings.ToLower(rand.Text())
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: name, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("tell other agents this one's numbers: %w", err)
	}
	c := &Claims{l: l, name: name, own: n}
	go c.serve(answer)
	others, err := c.Others()
	if err == nil {
		err = refusal(n, others)
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	return c, nil
}

// Close gives the numbers up.
func (c *Claims) Close() {
	if c != nil {
		_ = c.l.Close()
	}
}

// serve answers whoever asks, one after the other, until the socket is closed.
func (c *Claims) serve(answer []byte) {
	for {
		conn, err := c.l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no more open files, perhaps: who asks takes silence for a refusal
			continue
		}
		_ = conn.SetDeadline(time.Now().Add(timeout))
		_, _ = conn.Write(answer)
		_ = conn.Close()
	}
}

// refusal words what collides; nil: nothing does.
func refusal(n dataplane.Numbers, others []Claim) error {
	for _, o := range others {
		overlap := n.Overlap(o.Numbers)
		if overlap == nil {
			continue
		}
		return fmt.Errorf("another agent runs in this network namespace with some of the same numbers: process %d, run "+
			"directory %q. Both would have %s. "+
			"Stop that one (skein --run-dir %s down), or give this one numbers of its own: %s (docs/config.md, Numbers)",
			o.Process, o.RunDir, some(strings.Split(overlap.Error(), "\n")), o.RunDir, advice(others))
	}
	return nil
}

// some lists the first of many things.
func some(all []string) string {
	const named = 4
	if len(all) > named+1 {
		return fmt.Sprintf("%s and %d more", strings.Join(all[:named], ", "), len(all)-named)
	}
	return strings.Join(all, ", ")
}

// advice names a key by which this agent has none of the others' numbers.
func advice(others []Claim) string {
	for i := range dataplane.MaxInstance + 1 {
		free := !slices.ContainsFunc(others, func(o Claim) bool { return dataplane.NumbersOf(i).Overlap(o.Numbers) != nil })
		if free {
			return fmt.Sprintf("dataplane.instance: %d", i)
		}
	}
	return "keys under dataplane, since no instance is free"
}

// Others asks all other agents of this network namespace. Only what root or this process's own user has is one: anybody
// may make such a socket.
func (c *Claims) Others() ([]Claim, error) {
	b, err := os.ReadFile("/proc/thread-self/net/unix")
	if err != nil {
		return nil, fmt.Errorf("look for other agents in this network namespace: %w", err)
	}
	var out []Claim
	for _, name := range claimants(b) {
		if name == c.name {
			continue
		}
		o, err := ask(name)
		switch {
		case errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, errStranger):
			continue // it has ended meanwhile, or is nobody's who could hold anything
		case err != nil:
			return nil, fmt.Errorf("another agent runs in this network namespace (process %d) and does not say which numbers "+
				"it has: %w: stop it, or let it go on if it is frozen", o.Process, err)
		}
		out = append(out, o)
	}
	slices.SortFunc(out, func(a, b Claim) int { return cmp.Compare(a.Process, b.Process) })
	return out, nil
}

// claimants reads the names of agents' sockets, each once, from the kernel's list of unix sockets.
func claimants(list []byte) []string {
	var out []string
	for line := range bytes.Lines(list) {
		words := bytes.Fields(line)
		if len(words) != 8 || !bytes.HasPrefix(words[7], []byte(prefix)) {
			continue
		}
		if name := string(words[7]); !slices.Contains(out, name) { // connections that are open have the name too
			out = append(out, name)
		}
	}
	return out
}

// errStranger is for a socket of a user who is neither root nor this process's.
var errStranger = errors.New("not an agent's socket")

func ask(name string) (o Claim, err error) {
	d := net.Dialer{Timeout: timeout}
	conn, err := d.Dial("unix", name)
	if err != nil {
		return o, err
	}
	defer conn.Close()
	peer, err := peerOf(conn.(*net.UnixConn))
	if err != nil {
		return o, err
	}
	if peer.Uid != 0 && int(peer.Uid) != os.Geteuid() {
		return o, errStranger
	}
	o.Process = int(peer.Pid)
	_ = conn.SetDeadline(time.Now().Add(timeout))
	b, err := io.ReadAll(io.LimitReader(conn, most))
	if err != nil {
		return o, err
	}
	said := o
	if err := json.Unmarshal(b, &said); err != nil {
		return o, fmt.Errorf("its answer is not understood: %w", err)
	}
	if o.Process != 0 { // the kernel's word, where it has one: the other may be in another process namespace
		said.Process = o.Process
	}
	return said, nil
}

func peerOf(c *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	if e := raw.Control(func(fd uintptr) {
		cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); e != nil {
		return nil, e
	}
	return cred, err
}

// OfAgents reports whether a link is a tunnel of this agent or of another one of this network namespace, which may have
// stopped: no network of this host.
func (c *Claims) OfAgents(name, kind string) bool {
	if kind != "tuntap" && kind != "wireguard" && kind != "sit" {
		return false
	}
	for i := range dataplane.MaxInstance + 1 {
		if slices.Contains(dataplane.NumbersOf(i).Links(), name) {
			return true
		}
	}
	if c == nil {
		return false
	}
	if slices.Contains(c.own.Links(), name) {
		return true
	}
	others, _ := c.Others() // of those that do not answer nothing is known
	return slices.ContainsFunc(others, func(o Claim) bool { return slices.Contains(o.Numbers.Links(), name) })
}
