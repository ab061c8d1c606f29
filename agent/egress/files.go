package egress

import (
	"crypto/sha256"
	"encoding/hex"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/skeinmesh/skein/dataplane/egressns"
)

const hashDigits = 32 // of the hash of an egress's name in a file name

// fileName is the name of an egress's files on this host: the number of its namespace, and a hash of the egress's
// name. So no egress's name can lead out of the directory or be too long. `skein egress show` shows each egress's
// file.
func fileName(number int, ref Ref) string {
	return strconv.Itoa(number) + "-" + hashOf(ref)
}

func hashOf(ref Ref) string {
	// The length separates the two parts, so that no two egresses hash the same text.
	sum := sha256.Sum256([]byte(strconv.Itoa(len(ref.Namespace)) + " " + ref.Namespace + ref.Name))
	return hex.EncodeToString(sum[:])[:hashDigits]
}

// formerName is the file's name in earlier versions; empty where those could not have made it.
func formerName(number int, ref Ref) string {
	if !ref.Valid() {
		return ""
	}
	return strconv.Itoa(number) + "." + ref.Namespace + "." + ref.Name
}

// parseFile parses the number in a file's name, and reports whether the file is the egress's, by its present or
// former name.
func parseFile(name string, of Ref) (number int, its bool) {
	text, hash, present := strings.Cut(name, "-")
	if !present || len(hash) != hashDigits || !number10(text) {
		text, _, _ = strings.Cut(name, ".")
	}
	if !number10(text) {
		return 0, false
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 || n > maxEgresses {
		return 0, false
	}
	return n, name == fileName(n, of) || name == formerName(n, of)
}

func number10(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// number is the number of a namespace's local addresses: from the name of its file, else the lowest free one; 0:
// none. The caller holds mu.
func (g *Gateways) number(ref Ref) int {
	taken := map[int]bool{}
	for _, r := range g.served {
		taken[r.number] = true
	}
	files, _ := egressns.Files(g.cfg.Dir)
	for _, f := range files {
		n, its := parseFile(filepath.Base(f), ref)
		if its && !taken[n] {
			return n
		}
		taken[n] = true
	}
	for n := 1; n <= maxEgresses; n++ {
		if !taken[n] {
			return n
		}
	}
	return 0
}

// namespaceFile is where an egress's namespace is mounted. A namespace with a former name is renamed and continues to
// forward.
func (g *Gateways) namespaceFile(number int, ref Ref) string {
	file := filepath.Join(g.cfg.Dir, fileName(number, ref))
	name := formerName(number, ref)
	if name == "" {
		return file
	}
	former := filepath.Join(g.cfg.Dir, name)
	if err := egressns.Rename(former, file); err != nil {
		g.cfg.Log.Warn("a network namespace of an earlier version keeps its name", "egress", ref.String(),
			"file", former, "error", err)
		return former
	}
	return file
}

// clientsFiles returns the file with an egress's clients and its former name, which may be empty.
func (g *Gateways) clientsFiles(number int, ref Ref) (file, former string) {
	if name := formerName(number, ref); name != "" {
		former = filepath.Join(g.cfg.Known, name)
	}
	return filepath.Join(g.cfg.Known, fileName(number, ref)), former
}

// removeClients removes the files with an egress's clients.
func (gw *gateway) removeClients() {
	for _, f := range []string{gw.known, gw.formerKnown} {
		if f != "" {
			_ = os.Remove(f) // an egress defined later by that name learns its clients from their hosts
		}
	}
}
