// Helm is Helm's own command line, as its release has it.
package main

import (
	"errors"
	"log/slog"
	"os"

	helm "helm.sh/helm/v4/pkg/cmd"
	"helm.sh/helm/v4/pkg/kube"
)

func main() {
	kube.ManagedFieldsManager = "helm" // whatever the program's file is called
	c, err := helm.NewRootCmd(os.Stdout, os.Args[1:], helm.SetupLogging)
	if err != nil {
		slog.Warn("command failed", slog.Any("error", err))
		os.Exit(1)
	}
	if err := c.Execute(); err != nil {
		if failed, ok := errors.AsType[helm.CommandError](err); ok {
			os.Exit(failed.ExitCode)
		}
		os.Exit(1)
	}
}
