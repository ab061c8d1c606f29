package service

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/skeinmesh/skein/agent/admission"
	"github.com/skeinmesh/skein/consensus"
	"github.com/skeinmesh/skein/internal/testenv"
)

const dropIns = "/etc/systemd/system/skein.service.d/"

// What docs/security.md promises of systemd's figure for the exposure of the service: with the unit alone, and with a
// drop-in.
const (
	unitExposure   = 4.2
	podsExposure   = 4.8
	egressExposure = 6.2
)

// scene is a host with the service and one other node.
type scene struct {
	*machine
	world world
	peer  *peer
	addr  netip.Addr // of the service's node in the overlay
	token string
	bare  string // what the container's kernel had before the first agent
}

// TestService goes through the life of a service as README tells it. The parts follow on each other: each begins with a
// service that runs, and says so in its own words.
func TestService(t *testing.T) {
	testenv.NeedRoot(t)
	for _, program := range []string{"unshare", "nsenter", "mount", "ip"} {
		if _, err := exec.LookPath(program); err != nil {
			testenv.Missing(t, "needs "+program+": run `make test-systemd`")
		}
	}
	built := build(t) // meanwhile
	w := newWorld(t)
	s := &scene{world: w, machine: boot(t, w.router)}
	binary := built()
	s.peer = startPeer(t, w, binary)
	s.install(binary, "/usr/local/bin/skein", 0o755)
	s.install("../../deploy/skein.service", "/etc/systemd/system/skein.service", 0o644)
	s.run("systemctl", "daemon-reload")
	s.bare = s.kernel()
	t.Cleanup(func() {
		if t.Failed() {
			out, err := s.try("journalctl", "--no-pager", "-o", "short-precise", "-u", "skein", "-n", "400")
			t.Logf("the service's journal: %v\n%s", err, out)
		}
	})
	for _, part := range []struct {
		name string
		run  func(*testing.T, *scene)
	}{
		{"no cluster yet", beforeJoining},
		{"install", install},
		{"rights", rights},
		{"restart", restart},
		{"crash", crash},
		{"down", down},
		{"purge", purge},
		{"gateway", gateway},
		{"pods", pods},
		{"boot", reboot},
		{"revoked", revoked},
		{"journal", journal},
		{"client", client},
	} {
		if !t.Run(part.name, func(t *testing.T) {
			s.machine.t, s.peer.t = t, t
			part.run(t, s)
		}) {
			break
		}
	}
	s.machine.t, s.peer.t = t, t
}

// build begins to build the binary; path waits for it.
func build(t *testing.T) (path func() string) {
	t.Helper()
	binary := filepath.Join(t.TempDir(), "skein")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-o", binary, "../../cmd/skein")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	wait := sync.OnceValue(cmd.Wait)
	t.Cleanup(func() { _ = wait() })
	return func() string {
		t.Helper()
		if err := wait(); err != nil {
			t.Fatalf("build skein: %v\n%s", err, &out)
		}
		return binary
	}
}

// A service that is started on a host without a cluster says so once, and is not started again and again.
func beforeJoining(t *testing.T, s *scene) {
	if out := s.run("systemd-analyze", "verify", "skein.service"); strings.Contains(out, "skein") {
		t.Errorf("systemd-analyze verify: %s", out)
	}
	if out, err := s.try("systemctl", "start", "skein"); err == nil {
		t.Errorf("the start of an agent that cannot start succeeds: %s", out)
	}
	s.failedForGood(t, "this host belongs to no cluster yet")
	s.run("systemctl", "reset-failed", "skein")
}

// failedForGood checks that the service has ended with the status that keeps systemd from starting it again.
func (s *scene) failedForGood(t *testing.T, says string) {
	t.Helper()
	if u := s.settled(); u["SubState"] != "failed" || u["ExecMainStatus"] != "6" {
		t.Errorf("the service is %v, want failed with status 6", u)
	}
	if out := s.run("journalctl", "-u", "skein", "-n", "20", "-o", "cat", "--no-pager"); !strings.Contains(out, says) {
		t.Errorf("the journal does not say %q:\n%s", says, out)
	}
}

// Join by hand, end the agent, and let the service resume.
func install(t *testing.T, s *scene) {
	s.write("/etc/skein/skein.yaml", []byte("name: service\nlabels: {egress: 'yes'}\n"), 0o644)
	s.token = s.peer.run("token", "create")
	s.write("/root/token", []byte(s.token), 0o600)
	s.write("/run/join", []byte("skein up --join-file /root/token >/root/join.log 2>&1 &\n"), 0o755)
	s.run("sh", "/run/join")
	within(t, "the node has joined", func() error { _, err := s.try("skein", "status"); return err })
	if out := s.run("skein", "down"); out != "" {
		t.Errorf("down of an agent that is not a service says %q", out)
	}
	s.run("systemctl", "enable", "--now", "skein")
	s.running("")
	text := s.run("skein", "status")
	m := regexp.MustCompile(`addresses +(\S+)`).FindStringSubmatch(text)
	if m == nil {
		t.Fatalf("status names no address:\n%s", text)
	}
	s.addr = netip.MustParseAddr(m[1])
	s.peer.reaches(s.addr)
}

// The service has the rights that docs/security.md names, and systemd's own figure for its exposure does not grow.
func rights(t *testing.T, s *scene) {
	const netAdmin, netRaw = 1 << 12, 1 << 13
	status := s.run("cat", "/proc/"+s.running("")+"/status")
	for _, set := range []string{"CapPrm", "CapEff", "CapBnd"} {
		m := regexp.MustCompile(set + `:\s+([0-9a-f]+)`).FindStringSubmatch(status)
		if m == nil {
			t.Fatalf("no %s in\n%s", set, status)
		}
		if have, _ := strconv.ParseUint(m[1], 16, 64); have != netAdmin|netRaw {
			t.Errorf("%s is %x, want %x", set, have, netAdmin|netRaw)
		}
	}
	s.exposure(t, unitExposure)
}

// exposure holds systemd's figure against the greatest that is promised.
func (s *scene) exposure(t *testing.T, most float64) {
	t.Helper()
	out, _ := s.try("systemd-analyze", "security", "--no-pager", "skein.service")
	m := regexp.MustCompile(`exposure level for skein.service: ([0-9.]+)`).FindStringSubmatch(out)
	if m == nil {
		t.Fatalf("systemd-analyze security names no figure:\n%s", out)
	}
	t.Logf("systemd-analyze security: %s", m[1])
	if figure, err := strconv.ParseFloat(m[1], 64); err != nil || figure > most {
		t.Errorf("exposure %s, at most %.1f is promised", m[1], most)
	}
}

func restart(t *testing.T, s *scene) {
	before := s.running("")
	s.run("systemctl", "restart", "skein")
	// The start is over when the data plane stands, so that what is ordered behind it, such as kubelet, finds it.
	s.run("cat", "/sys/class/net/skein0/ifindex")
	if out := s.run("systemctl", "show", "-P", "Before", "skein"); !strings.Contains(out, "kubelet.service") {
		t.Errorf("the service is ordered before %s", out)
	}
	s.running(before)
	s.peer.reaches(s.addr)
}

// However an agent ends that nobody told to end, it comes back. A panic of the Go runtime ends it with status 2.
func crash(t *testing.T, s *scene) {
	for _, signal := range []string{"KILL", "QUIT"} {
		before := s.running("")
		s.run("sh", "-c", "kill -"+signal+" "+before)
		s.running(before)
		s.peer.reaches(s.addr)
	}
}

// A service that was told to end stays down, until somebody starts it.
func down(t *testing.T, s *scene) {
	before := s.running("")
	out := s.run("skein", "down")
	for _, part := range []string{"skein.service has ended", "systemctl disable skein.service",
		"systemctl start skein.service"} {
		if !strings.Contains(out, part) {
			t.Errorf("down does not say %q: %q", part, out)
		}
	}
	s.run("systemctl", "start", "skein") // at once: systemd knows already that it has ended
	before = s.running(before)
	s.run("skein", "down")
	if u := s.settled(); u["SubState"] != "dead" || u["Result"] != "success" {
		t.Errorf("after down the service is %v", u)
	}
	if _, err := s.try("skein", "down"); err == nil || !strings.Contains(err.Error(), "no agent answers") {
		t.Errorf("a second down: %v", err)
	}
	s.run("systemctl", "start", "skein")
	s.running(before)
	s.peer.reaches(s.addr)
}

// After a purge the kernel has what it had before the first agent, whether the agent ran or not, and the identity is
// kept.
func purge(t *testing.T, s *scene) {
	s.run("skein", "down", "--purge")
	s.gone(t)
	s.run("systemctl", "start", "skein")
	s.running("")
	s.peer.reaches(s.addr)
	s.run("systemctl", "stop", "skein")
	s.run("skein", "down", "--purge")
	s.gone(t)
	s.run("systemctl", "start", "skein")
	s.running("")
	s.peer.reaches(s.addr)
}

// gone checks that the service is down and the kernel bare.
func (s *scene) gone(t *testing.T) {
	t.Helper()
	if u := s.settled(); u["SubState"] != "dead" || u["Result"] != "success" {
		t.Errorf("after the purge the service is %v", u)
	}
	if now := s.kernel(); now != s.bare {
		t.Errorf("after the purge the kernel has\n%s\nbefore the first agent it had\n%s", now, s.bare)
	}
}

// On a gateway the namespace goes on while the agent is away, and what it knows of its clients is there when the agent
// is back.
func gateway(t *testing.T, s *scene) {
	outside(t, s.world)
	s.peer.run("pool", "create", "default", "--subnet", "10.100.0.0/24")
	s.dropIn("egress")
	s.peer.run("egress", "create", "out/nat", "--destination", outsideAddr+"/32", "--gateway-label", "egress=yes")
	s.peer.leaves(serviceAddr)
	s.exposure(t, egressExposure)
	if own, host := s.run("readlink", "/proc/"+s.running("")+"/ns/mnt"),
		s.run("readlink", "/proc/1/ns/mnt"); own != host {
		t.Error("the service has a mount namespace of its own: gateways' network namespaces would end with it")
	}
	// Names of namespaces and of clients' files, with what tells one namespace from another.
	kept := func() string {
		return s.run("sh", "-c",
			`cd /run/skein && find netns egress-clients -type f -exec stat -c '%n %d:%i' {} +|grep -v '\.new '|sort; cat egress-clients/* | cksum`)
	}
	has := kept()
	if !strings.Contains(has, "netns/") || !strings.Contains(has, "egress-clients/") {
		t.Fatalf("a gateway keeps\n%s", has)
	}
	for _, how := range [][]string{{"systemctl", "stop", "skein"}, {"skein", "down"},
		{"systemctl", "kill", "--signal=KILL", "skein"}} {
		before := s.running("")
		s.run(how...)
		s.settled()
		if now := kept(); now != has {
			t.Errorf("after %v a gateway has kept\n%s\nit had\n%s", how, now, has)
		}
		s.run("systemctl", "restart", "skein")
		s.running(before)
		s.peer.leaves(serviceAddr)
	}
	s.peer.run("egress", "remove", "out/nat")
	within(t, "the gateway's namespace and its clients are removed", s.noGateway)
	// An egress that ends while the agent is away leaves nothing behind either.
	s.peer.run("egress", "create", "out/nat", "--destination", outsideAddr+"/32", "--gateway-label", "egress=yes")
	s.peer.leaves(serviceAddr)
	s.run("systemctl", "stop", "skein")
	s.run("skein", "down", "--purge")
	s.gone(t)
	s.run("systemctl", "start", "skein")
	s.peer.leaves(serviceAddr)
	s.run("systemctl", "stop", "skein")
	s.peer.run("egress", "remove", "out/nat")
	s.run("systemctl", "start", "skein")
	within(t, "nothing is left of an egress that ended while the agent was away", s.noGateway)
}

func (s *scene) noGateway() error {
	out, err := s.try("sh", "-c", "find /run/skein/netns /run/skein/egress-clients -type f 2>/dev/null; true")
	if err == nil && out != "" {
		err = fmt.Errorf("there is %s", out)
	}
	return err
}

// dropIn installs one and restarts the service.
func (s *scene) dropIn(name string) {
	s.machine.t.Helper()
	before := s.running("")
	s.install("../../deploy/skein-"+name+".conf", dropIns+name+".conf", 0o644)
	s.run("systemctl", "daemon-reload")
	s.run("systemctl", "restart", "skein")
	s.running(before)
}

// Pods get their network from a service that has the drop-in for pods, by either name of their namespace. One that is
// taken away while the agent is down gives its address back.
func pods(t *testing.T, s *scene) {
	s.run("rm", dropIns+"egress.conf")
	s.dropIn("pods")
	s.exposure(t, podsExposure)
	s.run("skein", "cni", "install")
	s.run("ip", "netns", "add", "one")
	s.write("/run/two", []byte("unshare --net sleep 1000 >/dev/null 2>&1 &\necho $!\n"), 0o755)
	two := "/proc/" + strings.TrimSpace(s.run("sh", "/run/two")) + "/ns/net"
	for id, path := range map[string]string{"one": "/run/netns/one", "two": two} {
		within(t, "pod "+id+" gets a network", func() error { _, err := s.cni("ADD", id, path); return err })
	}
	if out := s.run("skein", "ip", "list"); strings.Count(out, "10.100.0.") < 2 {
		t.Errorf("two pods' addresses are not in\n%s", out)
	}
	s.run("systemctl", "stop", "skein")
	if _, err := s.cni("DEL", "one", "/run/netns/one"); err != nil {
		t.Error(err)
	}
	s.run("ls", "/run/skein/cni-deleted/one-eth0")
	s.run("systemctl", "start", "skein")
	within(t, "the address of the pod that went is free", func() error {
		out, err := s.try("sh", "-c", "ls /run/skein/cni-deleted; skein ip list -o json")
		if err == nil && strings.Contains(out, `one`) {
			err = fmt.Errorf("there is still %s", out)
		}
		return err
	})
	if _, err := s.cni("DEL", "two", two); err != nil {
		t.Error(err)
	}
	s.run("ip", "netns", "del", "one")
}

// cni calls the plugin as a container runtime does.
func (s *scene) cni(verb, id, netns string) (string, error) {
	return s.try("env", "CNI_COMMAND="+verb, "CNI_CONTAINERID="+id, "CNI_NETNS="+netns, "CNI_IFNAME=eth0",
		"CNI_PATH=/opt/cni/bin", "sh", "-c",
		`echo '{"cniVersion": "1.0.0", "name": "skein", "type": "skein-cni"}' | /opt/cni/bin/skein-cni`)
}

// An enabled service comes up at boot and resumes, also one that was told to end before.
func reboot(t *testing.T, s *scene) {
	s.run("skein", "down", "--purge")
	s.machine.reboot()
	s.running("")
	s.peer.reaches(s.addr)
}

// A node that the cluster throws out removes what it has in the kernel and ends; systemd does not start it again.
func revoked(t *testing.T, s *scene) {
	before := s.unit("NRestarts")["NRestarts"]
	s.peer.run("node", "revoke", "service")
	s.failedForGood(t, "this node was revoked")
	if n := s.unit("NRestarts")["NRestarts"]; n != before {
		t.Errorf("it was restarted: %s times instead of %s", n, before)
	}
	if now := s.kernel(); now != s.bare {
		t.Errorf("a revoked node has left\n%s\nbefore the first agent the kernel had\n%s", now, s.bare)
	}
}

// What the agent and systemd have logged in all these lives holds no secret, in whichever form it would be printed.
func journal(t *testing.T, s *scene) {
	text := s.run("journalctl", "--no-pager", "-o", "cat")
	if !strings.Contains(text, "agent is up") {
		t.Fatal("the journal does not have the service's log")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "replica.db"), []byte(s.run("cat", "/var/lib/skein/replica.db")),
		0o600); err != nil {
		t.Fatal(err)
	}
	replica, err := consensus.OpenReplica(dir, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer replica.Close()
	token, err := admission.DecodeToken(s.token)
	if err != nil {
		t.Fatal(err)
	}
	secrets := map[string][]byte{
		"the token's secret": token.GetSecret(), "the seed": replica.State().Cluster().GetPskSeed(),
		"the gossip key": replica.State().GossipKeys().GetPrimary(),
	}
	for _, name := range []string{"identity.pem", "wireguard.pem"} {
		block, _ := pem.Decode([]byte(s.run("cat", "/var/lib/skein/"+name)))
		if block == nil {
			t.Fatalf("%s is not a PEM file", name)
		}
		secrets[name] = block.Bytes[len(block.Bytes)-32:] // the last 32 bytes are the key
	}
	if len(secrets) < 5 {
		t.Errorf("there are only %d secrets to look for", len(secrets))
	}
	if strings.Contains(text, s.token) {
		t.Error("the journal has the token")
	}
	for name, secret := range secrets {
		if len(secret) < 16 {
			t.Errorf("%s has %d bytes", name, len(secret))
			continue
		}
		for _, form := range []string{string(secret), hex.EncodeToString(secret),
			base64.RawStdEncoding.EncodeToString(secret), base64.RawURLEncoding.EncodeToString(secret),
			fmt.Sprint(secret)} {
			if strings.Contains(text, form) {
				t.Errorf("the journal has %s", name)
			}
		}
	}
}

// A purge after the agent has ended also removes what the host has as a client of an egress.
func client(t *testing.T, s *scene) {
	// nobody is one any more
	s.peer.run("egress", "create", "out/nat", "--destination", outsideAddr+"/32", "--gateway-label", "egress=yes")
	within(t, "the peer's packets to the outside are led away", func() error {
		if now := s.peer.rules(); !strings.Contains(now, "lookup 118") {
			return fmt.Errorf("there is\n%s", now)
		}
		return nil
	})
	s.peer.end()
	s.world.host.Must("purge", func() error { _, err := s.peer.try("down", "--purge"); return err })
	if now := s.peer.rules(); now != s.peer.bare {
		t.Errorf("after the purge there is\n%s\nbefore the first agent there was\n%s", now, s.peer.bare)
	}
}
