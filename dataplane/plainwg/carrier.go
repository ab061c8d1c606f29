package plainwg

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/wireguard"
	"github.com/skeinmesh/skein/identity"
)

// keepalive is that of a session which was begun here. The client has its own in its configuration; this one is what
// begins the session, and begins it again when nobody has answered for a while.
const keepalive = 25 // seconds

// Config of a Carrier.
type Config struct {
	Link   string // its name
	Port   uint16 // UDP
	Mark   uint32 // of what is sent
	MTU    int    // of the link, in bytes
	OwnKey dataplane.Key
	Source []netip.Addr // the host's overlay addresses, for what it sends to plain peers itself
	Log    *slog.Logger
	// OnHandshake is told that a handshake may have been completed. It must not block.
	OnHandshake func()
}

// Peer is a plain peer as its carriers see it.
type Peer struct {
	ID           uint64
	PublicKey    dataplane.Key
	CarrierKey   dataplane.Key // private: under which the carriers answer it
	PresharedKey dataplane.Key
	Prefixes     []netip.Prefix // its addresses and the networks behind it
}

func (p Peer) equal(o Peer) bool {
	return p.ID == o.ID && p.PublicKey == o.PublicKey && p.CarrierKey == o.CarrierKey &&
		p.PresharedKey == o.PresharedKey && slices.Equal(p.Prefixes, o.Prefixes)
}

// Seen is what a device knows of a peer.
type Seen struct {
	Handshake time.Time      // the last one that was completed; zero: none
	Endpoint  netip.AddrPort // where the peer is; invalid: not known
	Received  uint64         // bytes
	Sent      uint64
	Heard     time.Time // when Received was last seen to grow
}

// Status of a plain peer.
type Status struct {
	Session Seen // under the carriers' key: what carries packets
	Way     Seen // under this node's own key: where the client is, and that its NAT lets this node through
}

// Carrier is what answers plain peers on this host.
type Carrier struct {
	cfg      Config
	split    *splitter
	link     *link
	ways     *unit // the device with this node's own key
	sessions map[uint64]*session
}

// session is a plain peer's own device.
type session struct {
	Peer
	*unit
}

// unit is a wireguard-go device with what was last read of it.
type unit struct {
	dev  *device.Device
	port *port
	tap  *tap
	came uint64 // datagrams when it was read
	seen map[dataplane.Key]Seen
}

// Open opens the port and the link.
func Open(c Config) (*Carrier, error) {
	t, err := wireguard.OpenTUN(c.Link, c.MTU)
	if err != nil {
		return nil, err
	}
	if err := setUpLink(c.Link, c.MTU); err != nil {
		t.Close()
		return nil, err
	}
	return open(c, t, wireguard.NewBind())
}

func open(c Config, t tun.Device, bind conn.Bind) (*Carrier, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.OnHandshake == nil {
		c.OnHandshake = func() {}
	}
	s, err := newSplitter(c.Port, c.Mark, bind, c.OnHandshake)
	if err != nil {
		t.Close()
		if errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("UDP port %d, for plain peers: %w: stop the program that has it, or set ports.plain in "+
				"the configuration", c.Port, syscall.EADDRINUSE)
		}
		return nil, fmt.Errorf("UDP port %d, for plain peers: %w", c.Port, err)
	}
	out := &Carrier{cfg: c, split: s, link: newLink(t), sessions: map[uint64]*session{}}
	if out.ways, err = out.newUnit(c.OwnKey, nil); err != nil {
		return nil, errors.Join(err, out.Close())
	}
	return out, nil
}

// newUnit starts a device.
func (c *Carrier) newUnit(private dataplane.Key, l *link) (*unit, error) {
	public, err := identity.WireGuardKey(private).Public()
	if err != nil {
		return nil, fmt.Errorf("a carrier's key: %w", err)
	}
	u := &unit{port: c.split.newPort(dataplane.Key(public)), tap: newTap(l, c.cfg.MTU), seen: map[dataplane.Key]Seen{}}
	log := c.cfg.Log
	u.dev = device.NewDevice(u.tap, u.port, &device.Logger{
		Verbosef: device.DiscardLogf,
		Errorf:   func(f string, a ...any) { log.Debug("wireguard-go for plain peers", "message", fmt.Sprintf(f, a...)) },
	})
	if err := errors.Join(u.dev.IpcSet("private_key="+hexOf(private)+"\n"), u.dev.Up()); err != nil {
		c.end(u)
		return nil, fmt.Errorf("starting a device for plain peers: %w", err)
	}
	return u, nil
}

func (c *Carrier) end(u *unit) {
	u.dev.Close()
	c.split.drop(u.port)
}

// Set makes these the peers that are carried; they are sorted by ID. Sessions of those that are the same go on. Peers
// that cannot be carried are in the error, and the others are carried all the same.
func (c *Carrier) Set(peers []Peer) error {
	var errs []error
	want := map[uint64]bool{}
	for _, p := range peers {
		want[p.ID] = true
		if old := c.sessions[p.ID]; old != nil && old.equal(p) {
			continue
		}
		c.remove(p.ID)
		if err := c.add(p); err != nil {
			errs = append(errs, err)
		}
	}
	for id := range c.sessions {
		if !want[id] {
			c.remove(id)
		}
	}
	var ways []way
	var prefixes []netip.Prefix
	for _, p := range peers {
		if s := c.sessions[p.ID]; s != nil {
			for _, x := range p.Prefixes {
				ways, prefixes = append(ways, way{x, s.tap}), append(prefixes, x)
			}
		}
	}
	c.link.setWays(ways)
	return errors.Join(append(errs, c.routes(prefixes))...)
}

func (c *Carrier) add(p Peer) error {
	u, err := c.newUnit(p.CarrierKey, c.link)
	if err != nil {
		return err
	}
	s := &session{Peer: p, unit: u}
	if err := errors.Join(s.configure(netip.AddrPort{}), c.ways.dev.IpcSet(peerText(p.PublicKey,
		p.PresharedKey))); err != nil {
		c.end(u)
		return fmt.Errorf("configuring a plain peer: %w", err)
	}
	c.sessions[p.ID] = s
	return nil
}

func (c *Carrier) remove(id uint64) {
	if s := c.sessions[id]; s != nil {
		c.end(s.unit)
		// it cannot fail: the key was taken before
		_ = c.ways.dev.IpcSet("public_key=" + hexOf(s.PublicKey) + "\nremove=true\n")
		delete(c.ways.seen, s.PublicKey)
		delete(c.sessions, id)
	}
}

func peerText(public, psk dataplane.Key) string {
	return "public_key=" + hexOf(public) + "\npreshared_key=" + hexOf(psk) + "\n"
}

// configure sets a session's peer up anew, without a session. With an endpoint one is begun there.
func (s *session) configure(at netip.AddrPort) error {
	var b strings.Builder
	fmt.Fprintf(&b, "public_key=%s\nremove=true\n%sreplace_allowed_ips=true\n", hexOf(s.PublicKey),
		peerText(s.PublicKey, s.PresharedKey))
	for _, p := range s.Prefixes {
		fmt.Fprintf(&b, "allowed_ip=%s\n", p)
	}
	if at.IsValid() {
		fmt.Fprintf(&b, "endpoint=%s\npersistent_keepalive_interval=%d\n", at, keepalive)
	}
	clear(s.seen)
	return s.dev.IpcSet(b.String())
}

// Begin begins a session with a plain peer from here, so that it follows. The former one of this node ends.
func (c *Carrier) Begin(id uint64, at netip.AddrPort) error {
	s := c.sessions[id]
	if s == nil {
		return nil
	}
	return s.configure(at)
}

// Drop ends this node's session with a plain peer, which another node has now: nothing is sent to it any more, so that
// it does not follow back.
func (c *Carrier) Drop(id uint64) error { return c.Begin(id, netip.AddrPort{}) }

// Status tells of all plain peers.
func (c *Carrier) Status(now time.Time) map[uint64]Status {
	c.ways.read(now)
	out := map[uint64]Status{}
	for id, s := range c.sessions {
		s.read(now)
		out[id] = Status{Session: s.seen[s.PublicKey], Way: c.ways.seen[s.PublicKey]}
	}
	return out
}

// read asks a device for its peers, if anything has come since.
func (u *unit) read(now time.Time) {
	came := u.port.came.Load()
	if came == u.came && len(u.seen) > 0 {
		return
	}
	var b bytes.Buffer
	if err := u.dev.IpcGetOperation(&b); err != nil {
		return // it has ended, and has nothing to tell
	}
	defer clear(b.Bytes()) // there are keys in it
	u.came = came
	peers, _ := wireguard.ParseStatus(b.Bytes()) // it is what the library writes
	next := map[dataplane.Key]Seen{}
	for _, p := range peers {
		v := Seen{Handshake: p.LastHandshake, Endpoint: p.Endpoint, Received: p.RxBytes, Sent: p.TxBytes}
		if old, known := u.seen[p.PublicKey]; known && old.Received == v.Received {
			v.Heard = old.Heard
		} else if v.Received > 0 {
			v.Heard = now
		}
		next[p.PublicKey] = v
	}
	u.seen = next
}

// Close ends all sessions and takes the link away.
func (c *Carrier) Close() error {
	for id := range c.sessions {
		c.remove(id)
	}
	if c.ways != nil {
		c.end(c.ways)
	}
	return errors.Join(c.split.close(), c.link.close())
}

func hexOf(k dataplane.Key) string { return hex.EncodeToString(k[:]) }
