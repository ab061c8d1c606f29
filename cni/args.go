package cni

import (
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/utils"

	"github.com/skeinmesh/skein/dataplane/podnet"
)

// podArgs is what CNI_ARGS says.
type podArgs struct {
	namespace, pod string
	ips            []string
}

// known are the arguments that are understood, or may be there without a meaning for us: what kubelet's runtimes send.
var known = []string{"IgnoreUnknown", "IP", "K8S_POD_NAMESPACE", "K8S_POD_NAME",
	"K8S_POD_INFRA_CONTAINER_ID", "K8S_POD_UID"}

// parseArgs reads CNI_ARGS: KEY=VALUE pairs with semicolons between. One that is not known is an error, unless
// IgnoreUnknown is set. A value may hold "=".
func parseArgs(s string) (podArgs, *types.Error) {
	var a podArgs
	var unknown []string
	ignore := false
	for _, pair := range strings.Split(s, ";") {
		if pair == "" { // also a semicolon at the end
			continue
		}
		key, value, ok := strings.Cut(pair, "=")
		if !ok || !utf8.ValidString(pair) {
			return podArgs{}, complaint(CodeEnvironment, fmt.Sprintf("CNI_ARGS: %.100q is not KEY=VALUE", pair),
				"separate pairs with semicolons, as in K8S_POD_NAMESPACE=default;K8S_POD_NAME=web-0")
		}
		switch key {
		case "K8S_POD_NAMESPACE":
			a.namespace = value
		case "K8S_POD_NAME":
			a.pod = value
		case "IP":
			a.ips = strings.Split(value, ",")
		case "IgnoreUnknown":
			switch strings.ToLower(value) {
			case "1", "true":
				ignore = true
			case "0", "false":
				ignore = false
			default:
				return podArgs{}, complaint(CodeEnvironment, fmt.Sprintf("CNI_ARGS: IgnoreUnknown=%.100q is neither true nor false",
					value), "set it to 1 or 0")
			}
		}
		if !slices.Contains(known, key) {
			unknown = append(unknown, key)
		}
	}
	if len(unknown) > 0 && !ignore {
		return podArgs{}, complaint(CodeEnvironment, fmt.Sprintf("CNI_ARGS: %.200q is not known", unknown[0]),
			"take it out, or put IgnoreUnknown=1 before it")
	}
	return a, nil
}

// checkNames holds what names the attachment against what the library does not look at.
func checkNames(k podnet.Key) *types.Error {
	containerID, ifname := k.ContainerID, k.Interface
	if len(containerID) > maxContainerID {
		return complaint(CodeEnvironment, fmt.Sprintf("CNI_CONTAINERID has %d characters, %d are allowed", len(containerID),
			maxContainerID), "use the container runtime's own ID")
	}
	if err := utils.ValidateContainerID(containerID); err != nil {
		return complaint(CodeEnvironment, fmt.Sprintf("CNI_CONTAINERID %.100q is not a container ID", containerID),
			"it has letters, digits, dots, underscores and hyphens, a letter or digit first")
	}
	bad := utils.ValidateInterfaceName(ifname) != nil || !utf8.ValidString(ifname) ||
		strings.ContainsFunc(ifname, func(r rune) bool { return r < ' ' || r == 0x7f || r == '%' })
	// the last two are directories of every sysctl tree
	if bad || slices.Contains([]string{"lo", "all", "default"}, ifname) {
		return complaint(CodeEnvironment, fmt.Sprintf("CNI_IFNAME %.100q is not a name for an interface", ifname),
			"use up to 15 letters and digits, as in eth0")
	}
	return nil
}

// CheckNames holds container ID and interface name of an attachment against what the plugin and the kernel take. Its
// error is a *types.Error with CodeEnvironment.
func CheckNames(k podnet.Key) error { return failed(checkNames(k)) }
