package reflexive

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"

	"github.com/skeinmesh/skein/agent/probe"
	"github.com/skeinmesh/skein/gossip/candidate"
	"github.com/skeinmesh/skein/gossip/candidate/hostaddr"
	"github.com/skeinmesh/skein/gossip/candidate/stunmsg"
	"github.com/skeinmesh/skein/gossip/candidate/stunserver"
	"github.com/skeinmesh/skein/internal/nattest"
	"github.com/skeinmesh/skein/internal/sock"
)

// A Discoverer opens sockets from several goroutines, so it runs in a child process that is in the host's namespace as
// a whole.
const childServers = "SKEIN_CANDIDATE_CHILD"

func TestMain(m *testing.M) {
	if servers := os.Getenv(childServers); servers != "" {
		if err := child(strings.Split(servers, ","), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// report is what the child saw.
type report struct {
	Result   candidate.Result
	Early    candidate.Result  // the first result that was told
	Ordinary map[string]string // server -> how it sees an ordinary socket on the same port
	Newest   []netip.AddrPort  // mappings of fresh sockets, one after the other
	Took     time.Duration
}

// child plays a host on which somebody else, as WireGuard does, owns the port. It writes one report, and another for
// each line it reads.
func child(servers []string, in io.Reader, out io.Writer) error {
	owner, err := sock.ListenUDP("udp4", netip.AddrPortFrom(netip.Addr{}, nattest.WireGuardPort), 0)
	if err != nil {
		return err
	}
	owner6, err := sock.ListenUDP("udp6", netip.AddrPortFrom(netip.Addr{}, nattest.WireGuardPort), 0)
	if err != nil {
		return err
	}
	defer owner6.Close()
	socket, err := probe.Open(probe.Config{Port: nattest.WireGuardPort, Mark: 0x20})
	if err != nil {
		return err
	}
	defer socket.Close()
	told := make(chan candidate.Result, 100)
	step, err := New(Config{Socket: socket, Port: nattest.WireGuardPort, Mark: 0x20, Servers: servers})
	if err != nil {
		return err
	}
	steps := []candidate.Step{step, &hostaddr.Step{Port: nattest.WireGuardPort}}
	d := candidate.New(candidate.Config{
		Steps: steps, First: steps, Network: hostaddr.Kernel{},
		OnResult: func(r candidate.Result) { told <- r },
	})
	socket.Serve(step.HandleSTUN)
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	start := time.Now()
	go d.Run(ctx)
	r, err := d.Check(ctx) // the second run: the first one has told its early result
	if err != nil {
		return err
	}
	first := report{Result: r, Early: <-told, Ordinary: map[string]string{}, Took: time.Since(start)}
	for _, o := range r.Mapped {
		if !o.Server.Addr().Is4() {
			continue
		}
		if first.Ordinary[o.Server.String()], err = ordinary(owner, o.Server); err != nil {
			return err
		}
	}
	for range 3 {
		if m, err := step.NewestMapping(ctx); err == nil {
			first.Newest = append(first.Newest, m)
		}
	}
	encoder := json.NewEncoder(out)
	if err := encoder.Encode(first); err != nil {
		return err
	}
	// What follows are changes that the host's addresses bring about.
	for len(told) > 0 {
		<-told
	}
	if _, err := in.Read(make([]byte, 1)); err != nil {
		return nil
	}
	select {
	case r := <-told:
		return encoder.Encode(report{Result: r})
	case <-ctx.Done():
		return errors.New("nothing was told of the new address")
	}
}

// ordinary asks a server through a plain UDP socket.
func ordinary(conn *net.UDPConn, server netip.AddrPort) (string, error) {
	request, err := stunmsg.EncodeRequest([12]byte{1, 2, 3}, stunmsg.Here)
	if err != nil {
		return "", err
	}
	if _, err := conn.WriteToUDPAddrPort(request, server); err != nil {
		return "", err
	}
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	for b := make([]byte, 2000); ; {
		n, from, err := conn.ReadFromUDPAddrPort(b)
		if err != nil {
			return "", fmt.Errorf("ask %s through an ordinary socket: %w", server, err)
		}
		r, err := stunmsg.DecodeResponse(b[:n], netip.AddrPortFrom(from.Addr().Unmap(), from.Port()))
		if err == nil && r.Tx == [12]byte{1, 2, 3} && r.From == server {
			return r.Mapped.String(), nil
		}
	}
}

// servers starts n public STUN servers, each of which asks the next one for answers from another address.
func servers(t *testing.T, internet *nattest.Net, n int) []string {
	t.Helper()
	running := make([]atomic.Pointer[stunserver.Server], n)
	var names []string
	for i := range n {
		host := internet.Host(nattest.Public)
		c := stunserver.Config{Port: 3478, Mark: 0x20}
		if n > 1 {
			c.ChangeIP = func(_ context.Context, addr netip.AddrPort, tx [12]byte) error {
				return running[(i+1)%n].Load().Answer(addr, tx, false)
			}
		}
		host.Do(func() {
			s, err := stunserver.Listen(c)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { s.Close() })
			running[i].Store(s)
		})
		names = append(names, netip.AddrPortFrom(host.Addr, 3478).String(), netip.AddrPortFrom(host.Addr6, 3478).String())
	}
	return names
}

// run starts the child on a host and returns its first report, and a function that lets it wait for a change and report
// again.
func run(t *testing.T, host *nattest.Host, servers []string) (report, func(change func()) report) {
	t.Helper()
	var decoder *json.Decoder
	var in io.WriteCloser
	err := host.Command(func(c *exec.Cmd) error {
		c.Env = append(os.Environ(), childServers+"="+strings.Join(servers, ","))
		c.Stderr = os.Stderr
		out, err := c.StdoutPipe()
		if err != nil {
			return err
		}
		if in, err = c.StdinPipe(); err != nil {
			return err
		}
		t.Cleanup(func() {
			if err := c.Wait(); err != nil {
				t.Errorf("the child ended badly: %v", err)
			}
		})
		t.Cleanup(func() { in.Close() })
		decoder = json.NewDecoder(out)
		return c.Start()
	}, os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	read := func() report {
		t.Helper()
		var r report
		if err := decoder.Decode(&r); err != nil {
			t.Fatalf("the child gave no report: %v", err)
		}
		return r
	}
	return read(), func(change func()) report {
		t.Helper()
		if _, err := in.Write([]byte("\n")); err != nil {
			t.Fatal(err)
		}
		change()
		return read()
	}
}

func TestBehindRealNATs(t *testing.T) {
	const (
		none       = skeinv1.NatType_NAT_TYPE_NONE
		full       = skeinv1.NatType_NAT_TYPE_FULL_CONE
		restricted = skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE
		port       = skeinv1.NatType_NAT_TYPE_PORT_RESTRICTED_CONE
		symmetric  = skeinv1.NatType_NAT_TYPE_SYMMETRIC
		blocked    = skeinv1.NatType_NAT_TYPE_BLOCKED
	)
	tests := []struct {
		kind      nattest.Kind
		nat       skeinv1.NatType
		mapping   candidate.Behaviour
		filtering candidate.Behaviour
		reflexive uint32 // priority of the reflexive candidate; 0: none
	}{
		{nattest.Public, none, candidate.EndpointIndependent, candidate.EndpointIndependent, 0},
		{nattest.Firewalled, port, candidate.EndpointIndependent, candidate.AddressAndPortDependent, 0},
		{nattest.OneToOne, full, candidate.EndpointIndependent, candidate.EndpointIndependent, candidate.PriorityReflexive},
		{nattest.FullCone, full, candidate.EndpointIndependent, candidate.EndpointIndependent, candidate.PriorityReflexive},
		{nattest.Hairpin, full, candidate.EndpointIndependent, candidate.EndpointIndependent, candidate.PriorityReflexive},
		{nattest.RestrictedCone, restricted, candidate.EndpointIndependent, candidate.AddressDependent,
			candidate.PriorityReflexive},
		{nattest.PortRestricted, port, candidate.EndpointIndependent, candidate.AddressAndPortDependent,
			candidate.PriorityReflexive},
		{nattest.Forwarded, full, candidate.EndpointIndependent, candidate.EndpointIndependent, candidate.PriorityReflexive},
		{nattest.Symmetric, symmetric, candidate.AddressAndPortDependent, candidate.AddressAndPortDependent,
			candidate.PrioritySymmetric},
		{nattest.Sequential, symmetric, candidate.AddressAndPortDependent, candidate.AddressAndPortDependent,
			candidate.PrioritySymmetric},
		{nattest.Blocked, blocked, candidate.Unknown, candidate.Unknown, 0},
	}
	for _, tt := range tests {
		t.Run(string(tt.kind), func(t *testing.T) {
			t.Parallel()
			internet := nattest.New(t)
			names := servers(t, internet, 3)
			host := internet.Host(tt.kind)
			got, _ := run(t, host, names)
			r := got.Result
			if r.NAT != tt.nat || r.Mapping != tt.mapping || r.Filtering != tt.filtering {
				t.Errorf("found %v, mapping %s, filtering %s; want %v, %s, %s\n%+v", r.NAT, r.Mapping, r.Filtering, tt.nat,
					tt.mapping, tt.filtering, r)
			}
			if r.UDP != (tt.kind != nattest.Blocked) {
				t.Errorf("UDP %v", r.UDP)
			}
			if r.Hairpin != (tt.kind == nattest.Hairpin) {
				t.Errorf("hairpin %v", r.Hairpin)
			}
			step := 0
			if tt.kind == nattest.Sequential {
				step = 1
			}
			if r.PortStep != step {
				t.Errorf("port step %d, want %d", r.PortStep, step)
			}
			if n := got.Newest; tt.kind == nattest.Sequential && (len(n) != 3 || int(n[1].Port()) != int(n[0].Port())+step ||
				int(n[2].Port()) != int(n[1].Port())+step) {
				t.Errorf("newest mappings %v do not follow each other", n)
			}
			if (len(got.Newest) == 0) != (tt.kind == nattest.Blocked) {
				t.Errorf("newest mappings %v", got.Newest)
			}
			random := tt.kind == nattest.Symmetric || tt.kind == nattest.Sequential || tt.kind == nattest.Blocked
			if r.Preserving == random {
				t.Errorf("port preserving %v", r.Preserving)
			}
			checkCandidates(t, host, r, tt.reflexive)
			for _, o := range r.Mapped {
				if want, ok := got.Ordinary[o.Server.String()]; ok && want != o.Mapped.String() {
					t.Errorf("%s sees the raw socket as %s and an ordinary one on the same port as %s", o.Server, o.Mapped, want)
				}
			}
			if tt.kind != nattest.Blocked && len(got.Ordinary) < 6 {
				t.Errorf("only %d server ports were asked", len(got.Ordinary))
			}
			if e := got.Early; tt.reflexive == candidate.PriorityReflexive && (e.NAT != skeinv1.NatType_NAT_TYPE_UNKNOWN &&
				e.NAT != r.NAT || len(e.Candidates) != len(r.Candidates)) {
				t.Errorf("the early result is %v with %v", e.NAT, e.Candidates)
			}
			t.Logf("two runs took %s; first told: %v with %d candidates", got.Took.Round(time.Millisecond), got.Early.NAT,
				len(got.Early.Candidates))
		})
	}
}

func checkCandidates(t *testing.T, host *nattest.Host, r candidate.Result, reflexive uint32) {
	t.Helper()
	own := netip.AddrPortFrom(host.Addr, nattest.WireGuardPort).String()
	var hosts, outside int
	for _, c := range r.Candidates {
		switch {
		case c.Type == skeinv1.CandidateType_CANDIDATE_TYPE_HOST && c.Address == own && c.Priority == candidate.PriorityHost:
			hosts++
		case c.Type == skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX && c.Priority == reflexive && strings.HasPrefix(c.Address,
			host.Outside.String()+":"):
			outside++
		case c.Type == skeinv1.CandidateType_CANDIDATE_TYPE_SRFLX:
			t.Errorf("candidate %v, want one of %s with priority %d", c, host.Outside, reflexive)
		}
	}
	if hosts != 1 || (outside == 1) != (reflexive > 0) {
		t.Errorf("candidates %v: want host %s and %d reflexive", r.Candidates, own, min(reflexive, 1))
	}
}

func TestOneServerAlone(t *testing.T) {
	internet := nattest.New(t)
	names := servers(t, internet, 1)
	got, _ := run(t, internet.Host(nattest.FullCone), names)
	// No other node can answer, so full and restricted cones look the same; the careful reading is told.
	if got.Result.NAT != skeinv1.NatType_NAT_TYPE_RESTRICTED_CONE {
		t.Errorf("found %v, want a restricted cone: %+v", got.Result.NAT, got)
	}
}

func TestNewAddressIsTold(t *testing.T) {
	internet := nattest.New(t)
	host := internet.Host(nattest.PortRestricted)
	_, again := run(t, host, servers(t, internet, 2))
	r := again(func() { host.AddAddress("eth0", "10.9.8.7/24") }).Result
	for _, c := range r.Candidates {
		if c.Address == "10.9.8.7:51820" {
			return
		}
	}
	t.Errorf("the new address is missing from %v", r.Candidates)
}
