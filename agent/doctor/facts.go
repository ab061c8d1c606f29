package doctor

import (
	"net/netip"
	"time"

	"github.com/skeinmesh/skein/agent/config"
)

// Facts are what Read has seen of a host. A zero part was not seen; Skipped says why.
type Facts struct {
	Config     Configuration
	Agent      Agent
	State      Directory
	Clock      Clock
	Sysctl     map[string]string // by the name with dots; absent: this kernel lacks it
	WireGuard  Module
	FoU        Module
	TUN        Module
	NfTables   Module
	Links      []Link
	Uplinks    []Uplink
	PathMTUs   []PathMTU
	Names      []Name
	Sockets    []Socket
	SawSockets bool
	Chains     []Chain
	Tables     []string // nft tables, as "inet skein"
	Rules      []Rule
	Routes     []Route // of skein's tables
	Limits     Limits
	Privileged bool // the caller is root
	Skipped    []Skip
}

// Configuration is the file and what it says.
type Configuration struct {
	File    string
	Exists  bool
	Problem string        // why it cannot be used; empty: it is valid
	Value   config.Config // the defaults when there is a Problem
}

// Agent is what the agent of this host says; the zero value is none.
type Agent struct {
	Running     bool
	Why         string // why nothing is known of it
	PID         int    // 0: not known
	Driver      string // WireGuard's: kernel | userspace
	Relay       bool   // it relays for others
	ClockOffset time.Duration
	Problems    []Problem
	Endpoints   map[string]netip.AddrPort // of peers by name, with a direct path
	TunnelMTU   int                       // bytes; 0: not known
}

// Problem is one that the agent reports itself.
type Problem struct{ Subject, Message, Advice, Severity string }

// Directory is the state directory.
type Directory struct {
	Path       string
	Exists     bool
	Mode       uint32 // permission bits
	FreeBytes  uint64
	FreeInodes uint64   // of a file system that counts them
	Inodes     uint64   // 0: it does not count them
	OpenFiles  []string // private keys that others than the owner may read
}

// Clock is what the kernel says of its discipline by NTP.
type Clock struct {
	Known        bool
	Synchronised bool
	MaxError     time.Duration
}

// Presence says how a driver of the kernel is there.
type Presence string

// Loaded covers what is built in and in use; Loadable is a module that nothing has asked for yet.
const (
	Unknown  Presence = ""
	Loaded   Presence = "loaded"
	Loadable Presence = "loadable"
	Absent   Presence = "absent"
)

// Module is a driver of the kernel.
type Module struct {
	Presence Presence
	Detail   string // what was looked at
}

// Link is a network device of this namespace.
type Link struct {
	Index  int
	Name   string
	Kind   string // as `ip -d link` has it: device, veth, wireguard, vxlan, …
	MTU    int    // bytes
	Up     bool
	Parent string // of a VLAN, VXLAN or tunnel: the device below, where it names one
}

// Uplink is where a family's packets to the internet leave.
type Uplink struct {
	Family string // IPv4 | IPv6
	Link   string
}

// PathMTU is what the kernel has learnt of the way to a peer's endpoint.
type PathMTU struct {
	Peer     string
	Endpoint netip.AddrPort
	Link     string
	MTU      int // bytes; 0: that of the link
}

// Name is a host name of the configuration.
type Name struct {
	Key, Host string
	Addresses []netip.Addr
	Problem   string // why it does not resolve
}

// Socket is one that waits for packets or connections.
type Socket struct {
	Proto   string // udp | tcp
	Address netip.AddrPort
	PID     int    // 0: the kernel's, or not known
	Program string // empty: not known
	Kernel  bool   // no process has it
}

// Rule is a policy rule that may concern skein.
type Rule struct {
	Family     string // IPv4 | IPv6
	Priority   int
	Mark, Mask uint32
	Table      int
	Protocol   int // 30: skein's
}

// Route is one in a table that skein uses.
type Route struct {
	Table    int
	To       string
	Link     string
	Protocol int
}

// Limits are what a process may hold.
type Limits struct {
	Whose               string // agent | this command
	OpenFiles, MaxFiles uint64 // MaxFiles: the hard limit; 0: not known
	InotifyProblem      string // why no further inotify instance can be made; empty: it can
}
