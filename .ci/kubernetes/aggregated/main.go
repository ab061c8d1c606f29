// Aggregated is Kubernetes' sample of an aggregated API server, with the etcd that it keeps its objects in beside it.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/embed"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/component-base/cli"
	"k8s.io/sample-apiserver/pkg/cmd/server"
)

func main() {
	ctx := genericapiserver.SetupSignalContext()
	cfg := embed.NewConfig() // on 127.0.0.1, with the usual ports
	cfg.Dir, cfg.LogLevel, cfg.UnsafeNoFsync = "/tmp/etcd", "error", true
	etcd, err := embed.StartEtcd(cfg)
	if err != nil {
		fmt.Fprintln(os.Stderr, "etcd:", err)
		os.Exit(1)
	}
	<-etcd.Server.ReadyNotify()
	options := server.NewWardleServerOptions(os.Stdout, os.Stderr)
	options.RecommendedOptions.Etcd.StorageConfig.Transport.ServerList = []string{"http://127.0.0.1:2379"}
	os.Exit(cli.Run(server.NewCommandStartWardleServer(ctx, options, false)))
}
