package probe_test

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/agent/path"
	"github.com/skeinmesh/skein/agent/probe"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/identity"
	"github.com/skeinmesh/skein/internal/testns"
)

const (
	heartbeatPort = 51820
	// crowdEnv makes this test program the crowd of peers, in a process of its own: their processor time is not ours.
	crowdEnv = "SKEIN_TEST_CROWD"
)

func TestMain(m *testing.M) {
	if os.Getenv(crowdEnv) != "" {
		if err := crowd(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func crowdAddr(i int) netip.Addr { return netip.AddrFrom4([4]byte{198, 18, byte(i >> 8), byte(i)}) }

func crowdID(i int) (id identity.ID) {
	binary.BigEndian.PutUint64(id[:], uint64(i+1)<<20)
	return id
}

func crowdKey(i int) (key [32]byte) {
	binary.BigEndian.PutUint64(key[:], uint64(i+1))
	return key
}

var heartbeatSelf = identity.ID{255}

// crowd answers each ping for the peer whose address it came to, and pings back: whoever is watched watches too.
func crowd() error {
	if err := wireGuard(); err != nil {
		return err
	}
	socket, err := probe.Open(probe.Config{Port: heartbeatPort})
	if err != nil {
		return err
	}
	counters := map[int]uint64{}
	socket.Serve(func(from netip.AddrPort, local netip.Addr, payload []byte, _ time.Time) {
		m, err := probe.Parse(payload)
		if err != nil || m.Type != probe.TypePing {
			return
		}
		a := local.As4()
		i := int(a[2])<<8 | int(a[3])
		c := probe.NewCodec(crowdKey(i))
		counters[i]++
		_ = socket.SendFrom(local, from, c.EncodePong(nil, probe.Message{Sender: crowdID(i), Tx: m.Tx, Epoch: 1,
			Observed: from}))
		_ = socket.SendFrom(local, from, c.EncodePing(nil, probe.Message{Sender: crowdID(i), Tx: probe.NewTxID(), Epoch: 1,
			Counter: counters[i]}))
	})
	fmt.Println("ready")
	select {}
}

// wireGuard has the port, as the kernel's would, and takes no notice of pings; where nobody has it the kernel complains
// to the sender of each. It stays until the process ends.
func wireGuard() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
	if err := unix.SetsockoptSockFprog(fd, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER,
		&unix.SockFprog{Len: 1, Filter: &nothing}); err != nil {
		return err
	}
	return unix.Bind(fd, &unix.SockaddrInet4{Port: heartbeatPort})
}

// pinger is how the agent lets the path manager ping.
type pinger struct{ *probe.Prober }

func (p pinger) SendPing(id identity.ID, to netip.AddrPort) ([12]byte, error) {
	tx, err := p.Prober.SendPing(id, to)
	return [12]byte(tx), err
}

func (p pinger) SendPingSize(id identity.ID, to netip.AddrPort, size int) ([12]byte, error) {
	tx, err := p.Prober.SendPingSize(id, to, size)
	return [12]byte(tx), err
}

// BenchmarkHeartbeats is what watching over peers costs: the path manager, the prober and its raw socket, with
// 1,000 direct peers, of which 50 have traffic, over a veth. Every peer answers, and watches us as we watch it.
// An iteration is a second; %core is the processor time of this process.
func BenchmarkHeartbeats(b *testing.B) {
	const peers, busy = 1000, 50
	here, there := testns.New(b, "beat"), testns.New(b, "beat")
	layCrowd(b, here, there)
	var socket *probe.Socket
	here.Do(func() {
		err := wireGuard()
		if err == nil {
			socket, err = probe.Open(probe.Config{Port: heartbeatPort})
		}
		if err != nil {
			b.Error(err)
		}
	})
	if b.Failed() {
		return
	}
	var m *path.Manager
	prober := probe.NewProber(probe.ProberConfig{Self: heartbeatSelf, Epoch: 1, Socket: socket,
		OnPing: func(p probe.Ping) { m.PingReceived(p.Peer, p.From, p.At) },
		OnPong: func(p probe.Pong) { m.PongReceived(p.Peer, p.From, p.Tx, p.At) }})
	m = path.NewManager(path.Config{Self: heartbeatSelf, Prober: pinger{prober}, Log: slog.New(slog.DiscardHandler)})
	defer m.Close()
	defer socket.Close()
	record := func(a netip.Addr) *skeinv1.Record {
		return &skeinv1.Record{NatType: skeinv1.NatType_NAT_TYPE_NONE, Candidates: []*skeinv1.Candidate{{
			Type: skeinv1.CandidateType_CANDIDATE_TYPE_HOST, Address: netip.AddrPortFrom(a, heartbeatPort).String(),
			Source: "interface"}}}
	}
	m.SetSettings(path.Settings{MTU: 1420})
	m.SetSelf(record(netip.MustParseAddr("198.19.0.1")))
	for i := range peers {
		prober.SetPeer(crowdID(i), crowdKey(i))
		m.SetPeer(crowdID(i), record(crowdAddr(i)))
	}
	socket.Serve(prober.Handle)
	for deadline := time.Now().Add(time.Minute); m.Metrics().PeersDirect < peers; {
		if time.Now().After(deadline) {
			b.Fatalf("%d of %d peers are direct", m.Metrics().PeersDirect, peers)
		}
		time.Sleep(100 * time.Millisecond)
	}
	traffic := uint64(0)
	count := func(busy int) {
		traffic += 1000
		c := make(map[identity.ID]path.Counters, peers)
		for i := range peers {
			if c[crowdID(i)] = (path.Counters{}); i < busy {
				c[crowdID(i)] = path.Counters{RxBytes: traffic, TxBytes: traffic}
			}
		}
		m.Traffic(c)
	}
	for i := range busy { // they begin to talk one after the other
		count(i + 1)
		time.Sleep(70 * time.Millisecond)
	}
	sent, began, used := m.Metrics().PingsSent, time.Now(), cpuNow()
	for b.Loop() {
		for range 4 {
			count(busy)
			time.Sleep(250 * time.Millisecond)
		}
	}
	took := time.Since(began)
	b.ReportMetric(100*float64(cpuNow()-used)/float64(took), "%core")
	b.ReportMetric(float64(m.Metrics().PingsSent-sent)/took.Seconds(), "pings/s")
	b.ReportMetric(float64((cpuNow()-used).Microseconds())/float64(m.Metrics().PingsSent-sent), "cpu-µs/ping")
	if d := m.Metrics(); d.PeersDirect != peers {
		b.Fatalf("%d of %d peers are still direct", d.PeersDirect, peers)
	}
}

// layCrowd joins two namespaces, the second of which has every peer's address, and starts the crowd there.
func layCrowd(b *testing.B, here, there *testns.NS) {
	here.Do(func() {
		veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "eth0",
			PeerNamespace: netlink.NsFd(there.Handle)}
		if err := netlink.LinkAdd(veth); err != nil {
			b.Error(err)
		}
	})
	for ns, addr := range map[*testns.NS]string{here: "198.19.0.1/24", there: "198.19.0.2/24"} {
		ns.Do(func() {
			l, err := netlink.LinkByName("eth0")
			if err != nil {
				b.Error(err)
				return
			}
			a, err := netlink.ParseAddr(addr)
			if err == nil {
				err = netlink.AddrAdd(l, a)
			}
			if err == nil {
				err = netlink.LinkSetUp(l)
			}
			if err == nil {
				// There all addresses of the prefix are this host's; here they are behind a router, as a neighbour each
				// would fill the kernel's table.
				r := netlink.Route{LinkIndex: 1, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, Table: unix.RT_TABLE_LOCAL}
				if ns == here {
					r = netlink.Route{LinkIndex: l.Attrs().Index, Gw: net.IPv4(198, 19, 0, 2)}
				}
				r.Dst = &net.IPNet{IP: net.IPv4(198, 18, 0, 0), Mask: net.CIDRMask(16, 32)}
				err = netlink.RouteAdd(&r)
			}
			if err != nil {
				b.Error(err)
			}
		})
	}
	if b.Failed() {
		b.FailNow()
	}
	c := exec.Command(os.Args[0])
	c.Env, c.Stderr = append(os.Environ(), crowdEnv+"=1"), os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	there.Do(func() { err = c.Start() })
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Process.Kill(); c.Wait() })
	if _, err := out.Read(make([]byte, 10)); err != nil {
		b.Fatal("the crowd did not come: ", err)
	}
}

func cpuNow() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
