package clients

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/skeinmesh/skein/dataplane"
	"github.com/skeinmesh/skein/dataplane/podnet"
	"github.com/skeinmesh/skein/internal/wholefile"
)

// ClientsFile is the file's name in the state directory.
const ClientsFile = "egress-clients.json"

const maxClientsFile = 64 << 20 // bytes

// clientsFile is the content of the file: what a restarted agent could not learn otherwise.
type clientsFile struct {
	Version int         `json:"version"`
	Told    []Ref       `json:"told,omitempty"` // egresses whose gateways may know clients of this host
	Pods    []clientRow `json:"pods"`
	Flows   []flowsRow  `json:"flows,omitempty"`
}

// flowsRow lists the slots of an egress by which a client may have flows.
type flowsRow struct {
	ContainerID string   `json:"container,omitempty"`
	Interface   string   `json:"interface"` // of a client from the configuration: the namespace's path
	Egress      Ref      `json:"egress"`
	Slots       []uint32 `json:"slots"`
}

type clientRow struct {
	ContainerID string     `json:"container"`
	Interface   string     `json:"interface"`
	NetNS       string     `json:"netns"`
	Inode       inode      `json:"inode"`
	Namespace   string     `json:"namespace,omitempty"`
	Name        string     `json:"name,omitempty"`
	IPv4        netip.Addr `json:"ipv4"`
	IPv6        netip.Addr `json:"ipv6"`
	Annotated   []Ref      `json:"annotated,omitempty"`
	Attached    []Ref      `json:"attached,omitempty"`
	Wrong       string     `json:"wrong,omitempty"`
}

// inode distinguishes network namespaces that use the same path one after the other.
type inode struct {
	Dev uint64 `json:"dev"`
	Ino uint64 `json:"ino"`
}

func inodeOf(path string) (inode, error) {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return inode{}, err
	}
	return inode{uint64(s.Dev), s.Ino}, nil
}

// gone reports whether a network namespace is no longer at its path; another one may be.
func gone(path string, was inode) bool {
	now, err := inodeOf(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENOTDIR) {
		return true
	}
	return err == nil && was != (inode{}) && now != was
}

// isUnder reports whether a path lies in a directory.
func isUnder(dir, path string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && path != "" && rel != ".." && !strings.HasPrefix(rel, "../")
}

// load reads the file. An unreadable file is renamed: running pods then keep their tunnels, but these are no longer
// maintained.
func (c *Clients) load() error {
	f, err := os.Open(c.cfg.File)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("clients of egresses: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxClientsFile+1))
	if err != nil {
		return fmt.Errorf("clients of egresses: %w", err)
	}
	file, err := decodeClients(b)
	if err != nil {
		aside := c.cfg.File + ".broken"
		return errors.Join(fmt.Errorf("%s cannot be read: %w: it is kept as %s; start the pods that use egresses again, or "+
			"attach them anew", c.cfg.File, err, aside), os.Rename(c.cfg.File, aside))
	}
	c.saved = b
	for _, r := range file.Told {
		c.told[r] = true
	}
	for _, row := range file.Flows {
		id := podnet.Key{ContainerID: row.ContainerID, Interface: row.Interface}
		if c.before[id] == nil {
			c.before[id] = map[Ref][]uint32{}
		}
		c.before[id][row.Egress] = row.Slots
	}
	for _, row := range file.Pods {
		if gone(row.NetNS, row.Inode) {
			continue
		}
		p := podnet.Attachment{Key: podnet.Key{ContainerID: row.ContainerID, Interface: row.Interface},
			NetNS: row.NetNS, IPv4: row.IPv4, IPv6: row.IPv6, Namespace: row.Namespace, Pod: row.Name}
		m := &member{pod: p, client: Client{Key: keyOf(p), NetNS: p.NetNS, IPv4: p.IPv4, IPv6: p.IPv6, Uplink: p.Interface},
			noted: row.Annotated, attached: row.Attached}
		if row.Wrong != "" {
			m.wrong = errors.New(row.Wrong)
		}
		c.enter(m)
	}
	return nil
}

// decodeClients parses and checks the file's content, which may be damaged or foreign.
func decodeClients(b []byte) (clientsFile, error) {
	var f clientsFile
	if len(b) > maxClientsFile {
		return f, fmt.Errorf("it is larger than %d MiB", maxClientsFile>>20)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	if err := d.Decode(&f); err != nil {
		return clientsFile{}, err
	}
	if f.Version != 1 {
		return clientsFile{}, fmt.Errorf("it is of version %d; this agent knows 1", f.Version)
	}
	for _, row := range f.Pods {
		bad := func(r Ref) bool { return !r.Valid() }
		if row.ContainerID == "" || !filepath.IsAbs(row.NetNS) || len(row.Annotated)+len(row.Attached) > 2*MaxEgresses ||
			slices.ContainsFunc(row.Annotated, bad) || slices.ContainsFunc(row.Attached, bad) {
			return clientsFile{}, fmt.Errorf("the entry of container %.100q is invalid", row.ContainerID)
		}
	}
	for _, row := range f.Flows {
		if !row.Egress.Valid() || len(row.Slots) > dataplane.ClientFlowSlots {
			return clientsFile{}, fmt.Errorf("the slots of container %.100q are invalid", row.ContainerID)
		}
	}
	return f, nil
}

// flowsRows lists the slots by which clients may have flows: those of members, and those that only the file named.
func (c *Clients) flowsRows() (out []flowsRow) {
	for _, m := range c.ordered() {
		id := m.pod.Key
		for _, ch := range m.choices {
			if slots := m.flows[ch.Ref]; ch.Led {
				out = append(out, flowsRow{id.ContainerID, id.Interface, ch.Ref, append([]uint32{ch.Slot}, slots...)})
			} else if len(slots) > 0 {
				out = append(out, flowsRow{id.ContainerID, id.Interface, ch.Ref, slots})
			}
		}
	}
	for id, all := range c.before {
		for ref, slots := range all {
			out = append(out, flowsRow{id.ContainerID, id.Interface, ref, slots})
		}
	}
	slices.SortFunc(out, func(a, b flowsRow) int {
		return cmp.Or(cmp.Compare(a.ContainerID, b.ContainerID), cmp.Compare(a.Interface, b.Interface),
			a.Egress.Compare(b.Egress))
	})
	return out
}

// save writes the file if its content changes. The caller holds mu.
func (c *Clients) save() {
	file := clientsFile{Version: 1, Pods: []clientRow{}}
	for r := range c.told {
		file.Told = append(file.Told, r)
	}
	slices.SortFunc(file.Told, Ref.Compare)
	for _, m := range c.ordered() {
		if m.pod.ContainerID == "" {
			continue
		}
		row := clientRow{m.pod.ContainerID, m.pod.Interface, m.pod.NetNS, m.inode, m.pod.Namespace, m.pod.Pod, m.pod.IPv4,
			m.pod.IPv6, m.noted, m.attached, ""}
		if m.wrong != nil {
			row.Wrong = m.wrong.Error()
		}
		file.Pods = append(file.Pods, row)
	}
	file.Flows = c.flowsRows()
	if len(file.Told)+len(file.Pods)+len(file.Flows) == 0 && c.saved == nil {
		return // no file exists, and none is needed
	}
	b, err := json.MarshalIndent(file, "", " ")
	if err != nil || bytes.Equal(b, c.saved) {
		return
	}
	if err := wholefile.Replace(c.cfg.File, b); err != nil {
		c.cfg.Log.Warn("the clients of egresses are not kept for the agent's next start", "error", err)
		return
	}
	c.saved = b
}
