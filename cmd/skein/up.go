package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/agent"
	"github.com/skeinmesh/skein/agent/config"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/dataplane/plane"
	"github.com/skeinmesh/skein/dataplane/relaynft"
)

// load reads the configuration file and puts the global flags over it.
func (g *globals) load() (config.Config, error) {
	c, err := config.Load(g.config, g.configAsked)
	if err != nil {
		return c, err
	}
	if g.stateDir != "" {
		c.StateDir = g.stateDir
	}
	if g.runDir != "" {
		c.RunDir = g.runDir
	}
	return c, nil
}

func logger(c config.Log) *slog.Logger {
	var level slog.Level
	if err := level.UnmarshalText([]byte(c.Level)); err != nil {
		level = slog.LevelInfo
	}
	o := &slog.HandlerOptions{Level: level}
	if c.Format == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, o))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, o))
}

func newUpCmd(g *globals) *cobra.Command {
	var initCluster bool
	var token, tokenFile, role string
	var patience time.Duration
	c := &cobra.Command{
		Use:   "up [--init | --join TOKEN]",
		Short: "Run the agent: create a cluster, join one, or resume",
		Long: "Run the agent in the foreground until it is stopped.\n\n" +
			"The first start creates a cluster (--init) or joins one (--join). Every later start with the same\n" +
			"state directory just resumes and needs neither.",
		Example: "  skein up --init\n  skein up --join skein1_…\n  skein up --config /etc/skein/skein.yaml\n  skein up --role relay --join skein1_…",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if initCluster && (token != "" || tokenFile != "") {
				return usageError{errors.New("--init and --join exclude each other: a node creates a cluster or joins one")}
			}
			if role != "agent" && role != "relay" {
				return usageError{fmt.Errorf("--role %s: allowed: agent, relay", role)}
			}
			if patience <= 0 {
				return usageError{fmt.Errorf("--join-timeout %s: want more than zero", patience)}
			}
			if tokenFile != "" {
				b, err := os.ReadFile(tokenFile)
				if err != nil {
					return fmt.Errorf("token file: %w", err)
				}
				token = strings.TrimSpace(string(b))
			}
			c, err := g.load()
			if err != nil {
				return err
			}
			if os.Getenv("GOGC") == "" {
				go tuneGC(cmd.Context())
			}
			return agent.Run(cmd.Context(), agent.Options{
				Config: c, Init: initCluster, Token: token, JoinPatience: patience, Role: role, Version: versionText(), Log: logger(c.Log),
			})
		},
	}
	c.Flags().BoolVar(&initCluster, "init", false, "create a cluster with this node as its first server")
	c.Flags().StringVar(&token, "join", "", "join the cluster that printed this token")
	c.Flags().StringVar(&tokenFile, "join-file", "", "read the token from a file, so that it shows in no process list")
	c.Flags().DurationVar(&patience, "join-timeout", agent.JoinPatience, "how long to try to join before giving up")
	c.Flags().StringVar(&role, "role", "agent", "agent, or relay: relay for the members and nothing else")
	return c
}

func newDownCmd(g *globals) *cobra.Command {
	var purge bool
	c := &cobra.Command{
		Use:   "down",
		Short: "Stop the agent; with --purge remove what skein put into the kernel",
		Long: "Stop the agent on this host. With kernel WireGuard the tunnel goes on carrying packets until the next\n" +
			"start; --purge removes link, rules, routes and the nft tables, and only those. The state directory stays:\n" +
			"it is this node's identity.",
		Example: "  skein down\n  skein down --purge",
		Args:    noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, err := g.client().Down(cmd.Context(), &skeinv1.DownRequest{Purge: purge})
			gone := errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED)
			switch {
			case err == nil:
				return g.waitGone(cmd.Context())
			case gone && purge:
				cfg, err := g.load()
				if err != nil {
					return err
				}
				return errors.Join(relaynft.Purge(relaynft.Config{}), plane.Purge(cmd.Context(), plane.Options{Link: cfg.Dataplane.Link, Log: logger(cfg.Log)}))
			}
			return g.plain(err)
		},
	}
	c.Flags().BoolVar(&purge, "purge", false, "remove the link, rules, routes and nft table too")
	return c
}

// waitGone waits until the agent has let go of its socket.
func (g *globals) waitGone(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	for {
		if _, err := os.Stat(g.socket()); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("the agent took the order to stop but %s is still there after 20s: see its log", g.socket())
		case <-time.After(50 * time.Millisecond):
		}
	}
}
