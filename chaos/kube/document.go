package kube

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/skeinmesh/skein/chaos/lab"
)

// A Walk carries out a section of a document as it is written: what a reader would type, and the files that he would
// write. A test then looks at what came of it.
//
// In the document, a block that is to be carried out says on which host, behind the language:
//
//	```sh                              on the host "admin"
//	```sh node                         on the host "node"
//	```yaml node:/etc/skein/skein.yaml a file of the host "node", in place of what was there
//
// Other blocks are there to be read. Hosts are what the test's Hosts calls so. Commands run from the top of this
// repository, one after another, until one fails. A line that ends in a backslash, | or &&, and a here-document
// (<<END), belong to one command; a loop over several lines is refused by the shell. Variables that a command sets are
// there for the next one on the same host. A line that begins with # is skipped. Words in capitals that Replace lists
// (NODE, TOKEN) are placeholders.
type Walk struct {
	Document string // its text
	Heading  string // of the section, without #; it ends at the next heading of its level or above
	Hosts    map[string]Host
	// Replace has what stands for each placeholder.
	Replace map[string]string
	// Instead has what is done in place of commands that begin so (of several the longest counts), or of a file
	// (HOST:PATH), where the machine here lacks something, systemd for instance. It gets the command, or the file's
	// text. nil: it is left out. Keep it small, and say why.
	Instead map[string]func(ctx context.Context, what string) error
	// State is a directory for the variables of the shells.
	State string
	// Root is this repository.
	Root     string
	Progress func(string)
}

// Host runs a shell script on a host, and returns what it prints.
type Host func(ctx context.Context, script string) (string, error)

// WalkStep is one command of a walk-through, or one file.
type WalkStep struct {
	Line int // in the document
	Host string
	Do   string // the command; of a file HOST:PATH
	Path string // of a file
	Text string // of a file
}

const (
	walkHost    = "admin" // where nothing else is said
	walkTimeout = 2 * time.Minute
)

var (
	headingRE = regexp.MustCompile(`^(#+) +(.*?) *$`)
	fenceRE   = regexp.MustCompile("^```([a-z]*) *(.*?) *$")
	placeRE   = regexp.MustCompile(`^([a-z0-9]+):(/\S+)$`)
	goesOnRE  = regexp.MustCompile(`(\\|\||&&)$`) // on the next line
	hereRE    = regexp.MustCompile(`<<-?["']?([A-Z]+)["']?`)
	wordsRE   = regexp.MustCompile(`\$?\{?\b[A-Z][A-Z0-9_]*\b`)
)

// WalkSteps reads a section of a document.
func WalkSteps(document, heading string) ([]WalkStep, error) {
	lines := strings.Split(document, "\n")
	var steps []WalkStep
	level, found := 0, 0
	for i := 0; i < len(lines); i++ {
		if m := headingRE.FindStringSubmatch(lines[i]); m != nil {
			switch {
			case m[2] == heading:
				level = len(m[1])
				found++
			case level > 0 && len(m[1]) <= level:
				level = 0
			}
			continue
		}
		m := fenceRE.FindStringSubmatch(lines[i])
		if m == nil {
			continue
		}
		began := i + 1
		for i++; i < len(lines) && lines[i] != "```"; i++ {
		}
		if i == len(lines) {
			return nil, fmt.Errorf("line %d: the block does not end", began)
		}
		if level == 0 {
			continue
		}
		block, err := blockSteps(began, m[1], m[2], lines[began:i])
		if err != nil {
			return nil, err
		}
		steps = append(steps, block...)
	}
	switch {
	case found == 0:
		return nil, fmt.Errorf("the document has no section %q", heading)
	case found > 1:
		return nil, fmt.Errorf("the document has %d sections %q", found, heading)
	case len(steps) == 0:
		return nil, fmt.Errorf("section %q has nothing that can be carried out", heading)
	}
	return steps, nil
}

// blockSteps reads a block whose first line of text is number began+1 of the document.
func blockSteps(began int, language, more string, text []string) ([]WalkStep, error) {
	if at := placeRE.FindStringSubmatch(more); at != nil {
		return []WalkStep{{Line: began, Host: at[1], Do: more, Path: at[2], Text: strings.Join(text, "\n") + "\n"}}, nil
	}
	if language != "sh" {
		if more != "" {
			return nil, fmt.Errorf("line %d: %q is not HOST:PATH", began, more)
		}
		return nil, nil
	}
	if more == "" {
		more = walkHost
	}
	var steps []WalkStep
	for i := 0; i < len(text); i++ {
		one := WalkStep{Line: began + 1 + i, Host: more}
		command := text[i]
		for goesOnRE.MatchString(command) {
			if i++; i == len(text) {
				return nil, fmt.Errorf("line %d: the command does not end", one.Line)
			}
			command = strings.TrimRight(strings.TrimSuffix(command, `\`), " ") + " " + strings.TrimLeft(text[i], " \t")
		}
		if here := hereRE.FindStringSubmatch(command); here != nil {
			for end := ""; end != here[1]; {
				if i++; i == len(text) {
					return nil, fmt.Errorf("line %d: the here-document does not end", one.Line)
				}
				end = text[i]
				command += "\n" + end
			}
		}
		if trimmed := strings.TrimSpace(command); trimmed == "" || strings.HasPrefix(trimmed, "#") {
			continue
		}
		one.Do = command
		steps = append(steps, one)
	}
	return steps, nil
}

// fill puts values in the place of placeholders, and notes which were used. A shell's variable of the name is none.
func fill(text string, values map[string]string, used map[string]bool) string {
	return wordsRE.ReplaceAllStringFunc(text, func(word string) string {
		value, ok := values[word]
		if !ok {
			return word
		}
		used[word] = true
		return value
	})
}

// Run carries the section out. What Replace and Instead list must occur in it.
func (w Walk) Run(ctx context.Context) error {
	steps, err := WalkSteps(w.Document, w.Heading)
	if err != nil {
		return err
	}
	used := map[string]bool{}
	for _, s := range steps {
		s.Do, s.Text = fill(s.Do, w.Replace, used), fill(s.Text, w.Replace, used)
		if w.Progress != nil {
			w.Progress(fmt.Sprintf("line %d, on %s: %s", s.Line, s.Host, s.Do))
		}
		if err := w.step(ctx, s, used); err != nil {
			return fmt.Errorf("%s, line %d, on %s: %s: %w", w.Heading, s.Line, s.Host, s.Do, err)
		}
	}
	for _, listed := range slices.Concat(slices.Sorted(maps.Keys(w.Replace)), slices.Sorted(maps.Keys(w.Instead))) {
		if !used[listed] {
			err = errors.Join(err, fmt.Errorf("section %q does not use %q any more", w.Heading, listed))
		}
	}
	return err
}

func (w Walk) step(ctx context.Context, s WalkStep, used map[string]bool) error {
	what := s.Do
	if s.Path != "" {
		what = s.Text
	}
	longest := ""
	for prefix := range w.Instead {
		if strings.HasPrefix(s.Do, prefix) && len(prefix) > len(longest) {
			longest = prefix
		}
	}
	if longest != "" {
		used[longest] = true
		if do := w.Instead[longest]; do != nil {
			return do(ctx, what)
		}
		return nil
	}
	host := w.Hosts[s.Host]
	if host == nil {
		return errors.New("the test has no such host")
	}
	ctx, cancel := context.WithTimeout(ctx, walkTimeout)
	defer cancel()
	script := w.script(s)
	out, err := host(ctx, script)
	if err == nil && w.Progress != nil && strings.TrimSpace(out) != "" {
		w.Progress(strings.TrimSpace(out))
	}
	return err
}

// script is what a host's shell is given for a step.
func (w Walk) script(s WalkStep) string {
	if s.Path != "" {
		return fmt.Sprintf("mkdir -p '%s' && cat >'%s' <<'END OF THE FILE'\n%sEND OF THE FILE\n",
			path.Dir(s.Path), s.Path, s.Text)
	}
	state := filepath.Join(w.State, "walk-"+s.Host+".sh")
	// The braces make half a command, whose other half the shell would take from the lines after it, an error.
	return fmt.Sprintf("set -a\n[ ! -e '%s' ] || . '%s'\ncd '%s'\n{\n%s\n}\ncode=$?\nexport -p >'%s'\nexit $code\n",
		state, state, w.Root, s.Do, state)
}

// shell runs a script on a node of a lab.
func shell(ctx context.Context, on *lab.Lab, node, script string) (string, error) {
	sh, err := exec.LookPath("sh")
	if err != nil {
		return "", err
	}
	out, exit, err := on.Exec(ctx, node, sh, "-c", script)
	if err == nil && exit != 0 {
		err = fmt.Errorf("exit status %d: %s", exit, strings.TrimSpace(out))
	}
	return out, err
}
