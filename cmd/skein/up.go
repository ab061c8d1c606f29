package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/skeinmesh/skein/agent"
	"github.com/skeinmesh/skein/agent/config"
	"github.com/skeinmesh/skein/agent/joining"
	"github.com/skeinmesh/skein/agent/part"
	"github.com/skeinmesh/skein/internal/cli"
	"github.com/skeinmesh/skein/internal/lag"
	"github.com/skeinmesh/skein/internal/procs"
	"github.com/skeinmesh/skein/internal/slack"
	"github.com/skeinmesh/skein/kube"
)

// timerSlack is how much later than asked for the kernel may wake the agent's threads; deploy/skein.service has the
// same.
const timerSlack = time.Millisecond

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
	if c.Kubernetes.Kubeconfig != "" && c.Kubernetes.Node == "" {
		if c.Kubernetes.Node = os.Getenv(nodeVariable); c.Kubernetes.Node != "" {
			if err := c.Check(); err != nil {
				return c, fmt.Errorf("%s: %w", nodeVariable, err)
			}
		}
	}
	return c, nil
}

func logger(c config.Log) *slog.Logger { return slog.New(handler(os.Stderr, c)) }

// notifySystemd tells the service manager, where there is one, that what is ordered behind this agent can start.
func notifySystemd(log *slog.Logger) {
	if _, err := daemon.SdNotify(true, daemon.SdNotifyReady); err != nil {
		log.Warn("cannot tell the service manager that the agent is ready", "error", err)
	}
}

// parts are the concerns that the configuration asks for beside the mesh.
func parts(c config.Config, log *slog.Logger) (all []part.Part) {
	if k := c.Kubernetes; k.Kubeconfig != "" {
		all = append(all, kube.New(kube.Config{Kubeconfig: k.Kubeconfig, Node: k.Node, Dir: c.StateDir, TokenOf: tokenOf,
			Log: log.With("component", "kubernetes")}))
	}
	return all
}

func newUpCmd(g *globals) *cobra.Command {
	var initCluster bool
	var token, tokenFile, role, joinKubernetes string
	var patience time.Duration
	c := &cobra.Command{
		Use:   "up [--init | --join TOKEN]",
		Short: "Run the agent: create a cluster, join one, or resume",
		Long: "Run the agent in the foreground until it is stopped.\n\n" +
			"The first start creates a cluster (--init) or joins one (--join). Every later start with the same\n" +
			"state directory just resumes and needs neither.",
		Example: "  skein up --init\n  skein up --join skein1_…\n  skein up --config /etc/skein/skein.yaml\n  skein up " +
			"--role relay --join skein1_…",
		Args: cli.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if initCluster && (token != "" || tokenFile != "") {
				return cli.UsageError{Err: errors.New(
					"--init and --join cannot be used together: a node creates a cluster or joins one")}
			}
			if joinKubernetes != "" && (initCluster || token != "" || tokenFile != "") {
				return cli.UsageError{Err: errors.New("--join-kubernetes decides by itself whether this node creates a cluster " +
					"or joins " +
					"one: leave --init and --join out")}
			}
			if joinKubernetes != "" && joinKubernetes != "agent" && joinKubernetes != "server" {
				return cli.UsageError{Err: fmt.Errorf("--join-kubernetes %s: allowed: agent, server", joinKubernetes)}
			}
			if role != "agent" && role != "relay" {
				return cli.UsageError{Err: fmt.Errorf("--role %s: allowed: agent, relay", role)}
			}
			if patience <= 0 {
				return cli.UsageError{Err: fmt.Errorf("--join-timeout %s: want more than zero", patience)}
			}
			if tokenFile != "" {
				b, err := os.ReadFile(tokenFile)
				if err != nil {
					return fmt.Errorf("read the token for --join-file: %w", err)
				}
				token = strings.TrimSpace(string(b))
			}
			c, err := g.load()
			if err != nil {
				return err
			}
			late := new(lag.Meter)
			if os.Getenv("GOGC") == "" {
				go tuneGC(cmd.Context(), late)
			}
			logs := newLogSwitch(os.Stderr, c.Log)
			log := slog.New(logs)
			reread := make(chan os.Signal, 1)
			signal.Notify(reread, syscall.SIGHUP)
			defer signal.Stop(reread)
			if err := slack.Set(timerSlack); err != nil {
				log.Debug("this process wakes more often than it must: start it with a timer slack of "+
					timerSlack.String(), "error", err)
			}
			o := agent.Options{
				Config: c, Load: g.load, File: g.config, Reread: reread, OnConfig: func(c config.Config) { logs.set(c.Log) },
				Init: initCluster, Token: token, JoinPatience: patience, Role: role, Version: versionText(), Log: log,
				Procs: procs.New(), Lag: late, Parts: parts(c, log), OnReady: func() { notifySystemd(log) },
			}
			if joinKubernetes != "" {
				if err := enterByKubernetes(&o, joinKubernetes == "server"); err != nil {
					return err
				}
			}
			return agent.Run(cmd.Context(), o)
		},
	}
	c.Flags().BoolVar(&initCluster, "init", false, "create a cluster with this node as its first server")
	c.Flags().StringVar(&token, "join", "", "join the cluster that printed this token")
	c.Flags().StringVar(&tokenFile, "join-file", "", "read the token from a file, so that it shows in no process list")
	c.Flags().DurationVar(&patience, "join-timeout", joining.Patience, "how long to try to join before giving up")
	c.Flags().StringVar(&joinKubernetes, "join-kubernetes", "", "agent, or server: in a pod of the chart's, enter the "+
		"mesh of this Kubernetes cluster as that")
	c.Flags().StringVar(&role, "role", "agent", "agent, or relay: relay for the members and nothing else")
	return c
}
