package cniserver

import (
	"cmp"
	"context"
	"errors"
	"io/fs"

	"connectrpc.com/connect"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/skeinmesh/skein/agent/ipam"
	skeinv1 "github.com/skeinmesh/skein/api/skein/v1"
	"github.com/skeinmesh/skein/cni"
	"github.com/skeinmesh/skein/dataplane/podnet"
)

// refuse makes an error that reaches the runtime as it is.
func refuse(code uint32, message, details string) error {
	return types.NewError(uint(code), message, details)
}

// ipamCodes gives each kind of refusal its CNI code. What is wrong with a request is in the configuration or in what
// the runtime passes with it, which the specification calls an invalid configuration.
var ipamCodes = map[ipam.Code]uint32{
	ipam.Invalid:     cni.CodeConfig,
	ipam.Denied:      cni.CodeDenied,
	ipam.Exhausted:   cni.CodeExhausted,
	ipam.Unavailable: cni.CodeTryAgain,
	ipam.Exists:      cni.CodeExists,
}

// ipamAdvice is the next step where the refusal itself names none apart.
var ipamAdvice = map[ipam.Code]string{
	ipam.Invalid:     "change the network configuration, or what the runtime passes",
	ipam.Denied:      "see `skein pool show` for who may use which pool",
	ipam.Exhausted:   "see `skein pool show` for who has the addresses",
	ipam.Unavailable: "see `skein status`; the runtime may try again",
	ipam.Exists:      "DEL must come before another ADD for the same container and interface",
}

// asCNI finds what the specification says of an error.
func asCNI(err error) *skeinv1.CNIError {
	var refused *types.Error
	var ours *ipam.Error
	switch {
	case errors.As(err, &refused):
		return &skeinv1.CNIError{Code: uint32(refused.Code), Message: refused.Msg, Details: refused.Details}
	case errors.As(err, &ours) && ipamCodes[ours.Code] != 0:
		return &skeinv1.CNIError{Code: ipamCodes[ours.Code], Message: ours.Message,
			Details: cmp.Or(ours.Advice, ipamAdvice[ours.Code])}
	case errors.Is(err, context.Canceled):
		return &skeinv1.CNIError{Code: cni.CodeTryAgain, Message: "the request was cancelled: " + err.Error(),
			Details: "everything that it had made was undone; try again"}
	case errors.Is(err, context.DeadlineExceeded):
		return &skeinv1.CNIError{Code: cni.CodeTryAgain, Message: "the request took too long: " + err.Error(),
			Details: "see `skein status` for what the agent waits for; everything that it had made was undone; try " +
				"again"}
	case errors.Is(err, podnet.ErrAddressInUse): // what lies beside the records is found when the agent looks for leaks
		return &skeinv1.CNIError{Code: cni.CodeTryAgain, Message: err.Error(), Details: "see who has it with `ip route " +
			"show table all`; another try gets another address"}
	case errors.Is(err, podnet.ErrNoIPv6):
		return &skeinv1.CNIError{Code: cni.CodeConfig, Message: err.Error(), Details: "let the namespace use a pool that " +
			"has IPv4, or enable IPv6"}
	case errors.Is(err, podnet.ErrInvalid):
		return &skeinv1.CNIError{Code: cni.CodeConfig, Message: err.Error(), Details: "see which parameters the " +
			"container runtime passes"}
	case errors.Is(err, podnet.ErrExists):
		return &skeinv1.CNIError{Code: cni.CodeExists, Message: err.Error(), Details: "another plugin or an earlier ADD " +
			"has made it: remove it, or choose another name for the interface"}
	case errors.Is(err, fs.ErrPermission):
		return &skeinv1.CNIError{Code: uint32(types.ErrIOFailure), Message: err.Error(), Details: "the agent needs " +
			"CAP_NET_ADMIN and CAP_SYS_ADMIN for pods: see docs/cni.md"}
	}
	return &skeinv1.CNIError{Code: cni.CodeInternal, Message: err.Error(), Details: "see the agent's log"}
}

// asConnect packs a CNIError for the way. The plugin goes by the detail; the code is for other clients.
func asConnect(e *skeinv1.CNIError) error {
	code := connect.CodeInternal
	switch e.GetCode() {
	case cni.CodeTryAgain, cni.CodeUnavailable, cni.CodeLimited:
		code = connect.CodeUnavailable
	case cni.CodeConfig, cni.CodeEnvironment:
		code = connect.CodeInvalidArgument
	case cni.CodeDenied:
		code = connect.CodePermissionDenied
	case cni.CodeExhausted:
		code = connect.CodeResourceExhausted
	case cni.CodeExists:
		code = connect.CodeAlreadyExists
	case cni.CodeUnknown:
		code = connect.CodeNotFound
	case cni.CodeChanged:
		code = connect.CodeFailedPrecondition
	}
	text := e.GetMessage()
	if e.GetDetails() != "" {
		text += "; " + e.GetDetails()
	}
	err := connect.NewError(code, errors.New(text))
	if d, derr := connect.NewErrorDetail(e); derr == nil {
		err.AddDetail(d)
	}
	return err
}
