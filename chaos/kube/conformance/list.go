package main

import (
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/skeinmesh/skein/chaos/kube"
)

// What the names of the tests have in common.
const (
	group = "[sig-network] "
	kind  = "[Conformance]"
)

// networkTests reads Kubernetes' list of conformance tests and returns the names of the network's, sorted.
func networkTests(list []byte) ([]string, error) {
	var all []struct {
		Codename string `yaml:"codename"`
	}
	if err := yaml.Unmarshal(list, &all); err != nil {
		return nil, fmt.Errorf("the list of conformance tests: %w", err)
	}
	var names []string
	for _, t := range all {
		if strings.HasPrefix(t.Codename, group) && strings.Contains(t.Codename, kind) {
			names = append(names, t.Codename)
		}
	}
	slices.Sort(names)
	if len(names) == 0 {
		return nil, fmt.Errorf("no test of the list has %s and %s in its name", strings.TrimSpace(group), kind)
	}
	return names, nil
}

// shorter is a test's name without what all of them have.
func shorter(name string) string {
	return strings.Join(strings.Fields(strings.Replace(strings.TrimPrefix(name, group), kind, "", 1)), " ")
}

// ask runs e2e.test for something that it prints.
func ask(e2e, flag string) ([]byte, error) {
	cmd := exec.Command(e2e, flag)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", e2e, flag, err)
	}
	return out, nil
}

// users is /etc/passwd of the images.
const users = `root:x:0:0:root:/root:/bin/sh
www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
`

const groups = "root:x:0:\nwww-data:x:33:\nnogroup:x:65534:\n"

// moduleDir is where Kubernetes' sources are on this machine. root is this repository's.
func moduleDir(root string) (string, error) {
	of := filepath.Join(root, ".ci/kubernetes")
	out, err := exec.Command("go", "-C", of, "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes").Output()
	dir := strings.TrimSpace(string(out))
	if err != nil || dir == "" {
		return "", fmt.Errorf("Kubernetes' Go module is missing: run .ci/kubernetes-tools, which fetches it: %w", err)
	}
	return dir, nil
}

// images makes those that the network's tests want, under the names that the tests have for them. tree is a directory
// with Debian's programs, module Kubernetes' sources.
func images(names []string, tree, module, programs string) ([]kube.Image, error) {
	called := map[string][]string{}
	for _, n := range names {
		base, _, _ := strings.Cut(path.Base(n), ":")
		called[base] = append(called[base], n)
	}
	common := map[string]string{"etc/passwd": users, "etc/group": groups}
	agnhost := filepath.Join(programs, "agnhost")
	withKeys := maps.Clone(common) // that agnhost's servers have
	for _, name := range []string{"localhost.crt", "localhost.key"} {
		b, err := os.ReadFile(filepath.Join(module, "test/images/agnhost/porter", name))
		if err != nil {
			return nil, err
		}
		withKeys[name] = string(b)
	}
	all := []kube.Image{
		{Names: called["agnhost"], Tree: tree, Texts: withKeys, Programs: map[string]string{"agnhost": agnhost},
			Links: map[string]string{"agnhost-2": "agnhost"}, Entrypoint: []string{"/agnhost"}, Command: []string{"pause"}},
		{Names: called["glibc-dns-testing"], Tree: tree, Texts: common},
		{Names: called["nginx"], Tree: tree, Texts: common, Entrypoint: []string{"/usr/sbin/nginx", "-g", "daemon off;"},
			Links: map[string]string{"etc/nginx/sites-enabled/default": "../sites-available/default"}},
		{Names: called["pause"], Programs: map[string]string{"agnhost": agnhost}, Entrypoint: []string{"/agnhost", "pause"}},
	}
	for i, im := range all {
		if len(im.Names) == 0 {
			return nil, fmt.Errorf("no image that `e2e.test --list-images` tells is the %d. of those made here", i+1)
		}
	}
	return all, nil
}
