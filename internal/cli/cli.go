// Package cli is what the command lines of skein and skein-dev share: how they complain, and what they print.
package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// UsageError says that a command was called wrongly. It makes the exit status 2.
type UsageError struct{ Err error }

func (e UsageError) Error() string { return e.Err.Error() }

func (e UsageError) Unwrap() error { return e.Err }

// ExitStatus is 0 without an error, 2 with a UsageError, else 1.
func ExitStatus(err error) int {
	switch {
	case err == nil:
		return 0
	case errors.As(err, new(UsageError)):
		return 2
	}
	return 1
}

// NoArgs refuses arguments.
func NoArgs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return UsageError{Err: fmt.Errorf("unknown command or argument %q for %q; see `%s --help`", args[0], c.CommandPath(),
			c.CommandPath())}
	}
	return nil
}

// Exactly demands n arguments.
func Exactly(n int, what string) cobra.PositionalArgs { return Between(n, n, what) }

// Between demands from least to most arguments.
func Between(least, most int, what string) cobra.PositionalArgs {
	return func(c *cobra.Command, args []string) error {
		if len(args) < least || len(args) > most {
			return UsageError{Err: fmt.Errorf("%s takes %s; see `%s --help`", c.CommandPath(), what, c.CommandPath())}
		}
		return nil
	}
}

// NeedSubcommand is the RunE of a command that only holds others.
func NeedSubcommand(c *cobra.Command, _ []string) error {
	return UsageError{Err: fmt.Errorf("%s needs a subcommand; see `%s --help`", c.CommandPath(), c.CommandPath())}
}

// Strict makes every complaint about flags and arguments a UsageError, and a missing or unknown subcommand one too. It
// is called once, for the root of a finished command line.
func Strict(root *cobra.Command) {
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return UsageError{Err: fmt.Errorf("%w; see `%s --help`", err, c.CommandPath())}
	})
	strict(root)
}

func strict(c *cobra.Command) {
	for _, sub := range c.Commands() {
		strict(sub)
	}
	if c.HasSubCommands() && !c.Runnable() {
		c.Args, c.RunE = NoArgs, NeedSubcommand
	}
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			err := check(c, args)
			if err == nil || errors.As(err, new(UsageError)) {
				return err
			}
			return UsageError{Err: fmt.Errorf("%s: %w; see `%s --help`", c.CommandPath(), err, c.CommandPath())}
		}
	}
}

// Group makes a command that only holds others. Its example is that of the first one that has one.
func Group(use, short string, subs ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, Args: NoArgs, RunE: NeedSubcommand}
	for _, s := range subs {
		if c.Example == "" {
			c.Example = s.Example
		}
		c.AddCommand(s)
	}
	return c
}

// PrintJSON writes indented JSON. It also undoes protojson's deliberately unstable spacing.
func PrintJSON(w io.Writer, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("encode as JSON: %w", err)
	}
	var out bytes.Buffer
	if err := json.Indent(&out, b, "", "  "); err != nil {
		return fmt.Errorf("encode as JSON: %w", err)
	}
	out.WriteByte('\n')
	_, err = w.Write(out.Bytes())
	return err
}

// OutputFlag adds -o to a root; CheckOutput and JSON are about it.
func OutputFlag(root *cobra.Command, output *string) {
	root.PersistentFlags().StringVarP(output, "output", "o", "table", "output: table or json")
}

// CheckOutput refuses what -o does not know.
func CheckOutput(output string) error {
	if output != "table" && output != "json" {
		return UsageError{Err: fmt.Errorf("-o %s: allowed: table, json", output)}
	}
	return nil
}

// JSON tells whether -o json was given.
func JSON(c *cobra.Command) bool {
	f := c.Flag("output")
	return f != nil && f.Value.String() == "json"
}

// Notes is where people read what goes on: not in the way of JSON.
func Notes(c *cobra.Command) io.Writer {
	if JSON(c) {
		return c.ErrOrStderr()
	}
	return c.OutOrStdout()
}

// Progress writes lines with the time since it was called.
func Progress(w io.Writer) func(string) {
	start := time.Now()
	return func(line string) {
		fmt.Fprintf(w, "%6.1fs  %s\n", time.Since(start).Seconds(), strings.ReplaceAll(line, "\n", "\n         "))
	}
}

// UntilSignal ends with a signal, so that what was begun is taken down again.
func UntilSignal(ctx context.Context) (context.Context, context.CancelFunc) {
	return signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
}
