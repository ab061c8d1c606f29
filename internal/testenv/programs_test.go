package testenv_test

import (
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/skeinmesh/skein/internal/testenv"
)

// declared reads .ci/programs: the programs of each package.
func declared(t *testing.T) map[string][]string {
	t.Helper()
	b, err := os.ReadFile("../../.ci/programs")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string][]string{}
	for line := range strings.Lines(string(b)) {
		line, _, _ = strings.Cut(line, "#")
		programs, _, _ := strings.Cut(line, ":")
		if words := strings.Fields(programs); len(words) > 1 {
			all[words[0]] = words[1:]
		}
	}
	return all
}

// ownedBy is the name of each program in the packages, as dpkg knows them; both /bin/x and /usr/bin/x are x.
func ownedBy(t *testing.T, packages ...string) map[string]bool {
	t.Helper()
	out, err := exec.Command("dpkg-query", append([]string{"-L"}, packages...)...).Output()
	if err != nil {
		t.Fatalf("dpkg-query -L: %v", err)
	}
	names := map[string]bool{}
	for file := range strings.Lines(string(out)) {
		names[filepath.Base(strings.TrimSpace(file))] = true
	}
	return names
}

// The tiers see Debian's base and what .ci/programs declares, whatever else is installed on this machine: a test that
// calls something else fails here, too, and not only on a bare machine.
func TestOnlyDeclaredProgramsAreFound(t *testing.T) {
	path := "../../.cache/path"
	links, err := os.ReadDir(path)
	if err != nil {
		testenv.Missing(t, "needs .cache/path, which .ci/setup makes: "+err.Error())
	}
	if _, err := exec.LookPath("dpkg-query"); err != nil {
		testenv.Missing(t, "needs Debian's dpkg")
	}
	may := ownedBy(t, essential(t)...)
	for _, programs := range declared(t) {
		for _, p := range programs {
			may[p] = true
		}
	}
	may["awk"], may["which"] = true, true // by Debian's alternatives
	for _, l := range links {
		if !may[l.Name()] {
			t.Errorf("%s is found by tests, and is neither in Debian's base nor in .ci/programs", l.Name())
		}
		if st, err := os.Stat(filepath.Join(path, l.Name())); err != nil {
			t.Errorf("%s of .cache/path leads nowhere: %v", l.Name(), err)
		} else if !st.Mode().IsRegular() || st.Mode()&0o111 == 0 {
			t.Errorf("%s of .cache/path is not a program: %s", l.Name(), st.Mode())
		}
	}
	// Some of them are words of the shell, too.
	for _, p := range []string{"sh", "go", "ip", "nft", "mount", "unshare", "test", "[", "true", "echo", "pwd", "printf"} {
		if _, err := os.Lstat(filepath.Join(path, p)); err != nil {
			t.Errorf("%s is missing: %v", p, err)
		}
	}
}

// essential are the packages of a minimal Debian that have programs.
func essential(t *testing.T) []string {
	t.Helper()
	out, err := exec.Command("dpkg-query", "-W", "-f", "${Essential} ${Package}\n").Output()
	if err != nil {
		t.Fatal(err)
	}
	all := []string{"apt", "gpgv", "mawk", "mount", "passwd"}
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(strings.TrimSpace(line), "yes "); ok {
			all = append(all, name)
		}
	}
	return all
}

// In a tier the directory of links is the PATH, besides Go's own programs and the tools that are built here.
func TestTiersLookNowhereElse(t *testing.T) {
	if os.Getenv("SKEIN_TIERS") != "1" {
		t.Skip("this is not a run of .ci/test")
	}
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	goroot, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		t.Fatal(err)
	}
	may := []string{root + "/bin/tools", root + "/.cache/path", strings.TrimSpace(string(goroot)) + "/bin"}
	for _, dir := range filepath.SplitList(os.Getenv("PATH")) {
		if !slices.Contains(may, dir) {
			t.Errorf("the PATH has %s: want %q alone", dir, may)
		}
	}
}

// Who reads the README knows what will be installed.
func TestReadmeNamesThePackages(t *testing.T) {
	b, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range slices.Sorted(maps.Keys(declared(t))) {
		if p != "golang" && !strings.Contains(string(b), "`"+p+"`") {
			t.Errorf("README.md does not name the package %s of .ci/programs", p)
		}
	}
}
