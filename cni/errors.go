package cni

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/containernetworking/cni/pkg/types"
)

// Codes of the specification that its library has no name for here, and our own from 100 on.
//
// An exhausted pool has a code of its own, although runtimes try again whatever the code is: 11 says that waiting
// helps, as it does while servers are away, and here somebody has to act or a pod has to go.
const (
	CodeTryAgain    = uint32(types.ErrTryAgainLater)
	CodeUnavailable = uint32(types.ErrPluginNotAvailable)  // STATUS: no ADD can succeed
	CodeLimited     = uint32(types.ErrLimitedConnectivity) // STATUS: and running pods may be cut off
	CodeUnknown     = uint32(types.ErrUnknownContainer)    // the network namespace is not there
	CodeEnvironment = uint32(types.ErrInvalidEnvironmentVariables)
	CodeConfig      = uint32(types.ErrInvalidNetworkConfig)
	CodeInternal    = uint32(types.ErrInternal)

	CodeExhausted uint32 = 100 // the pool, the quota or the node's share of blocks is used up
	CodeDenied    uint32 = 101 // the namespace may not use that pool, or the address is somebody else's
	CodeExists    uint32 = 102 // the attachment, or an interface of that name, is there already
	CodeChanged   uint32 = 103 // CHECK: something is not as ADD made it
)

// complaint is an error in the words of the specification.
func complaint(code uint32, message, details string) *types.Error {
	return types.NewError(uint(code), message, details)
}

// printError writes an error as runtimes read it. The library's own lacks the version, which the specification asks
// for.
func printError(w io.Writer, version string, e *types.Error) error {
	b, err := json.MarshalIndent(struct {
		Version string `json:"cniVersion"`
		*types.Error
	}{version, e}, "", "    ")
	if err != nil {
		return fmt.Errorf("error %d as JSON: %w", e.Code, err)
	}
	_, err = w.Write(append(b, '\n'))
	return err
}
