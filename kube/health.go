package kube

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

// health tells the agent's status what is wrong between this host and the apiserver, by what was tried. It is safe
// for concurrent use.
type health struct {
	report func(subject, message, advice string)

	mu  sync.Mutex
	ill map[string]bool // subjects
}

// result takes in how an attempt went.
func (h *health) result(what, verb, resource string, err error) {
	subject := "kubernetes: " + verb + " " + resource
	message, advice := diagnosis(what, verb, resource, err)
	h.mu.Lock()
	defer h.mu.Unlock()
	if message == "" && (err != nil || !h.ill[subject]) {
		return
	}
	if h.ill == nil {
		h.ill = map[string]bool{}
	}
	h.ill[subject] = message != ""
	h.report(subject, message, advice)
}

const meanwhile = "the mesh, running pods and what is configured go on as they are"

// diagnosis says what an error of the apiserver means and what to do; empty: nothing that anybody must know.
func diagnosis(what, verb, resource string, err error) (message, advice string) {
	switch {
	case err == nil, errors.Is(err, context.Canceled), apierrors.IsResourceExpired(err), apierrors.IsGone(err):
		return "", "" // the watch begins anew by itself
	case apierrors.IsForbidden(err):
		return fmt.Sprintf("cannot %s: this host's ServiceAccount may not %s %s (%v)", what, verb, resource, err),
			fmt.Sprintf("grant it the verb %s on %s, as deploy/kubernetes has it; %s", verb, resource, meanwhile)
	case apierrors.IsUnauthorized(err):
		return fmt.Sprintf("cannot %s: the apiserver does not accept this host's token (%v)", what, err),
			"give the kubeconfig a token that is valid; " + meanwhile
	case ofAnotherTime(err):
		return fmt.Sprintf("cannot %s: %v", what, err),
			"compare this host's clock with the apiserver's, and check whether its certificate has expired; " + meanwhile
	case apierrors.IsTooManyRequests(err):
		return fmt.Sprintf("cannot %s: the apiserver asks to try again later (%v)", what, err), meanwhile
	case apierrors.IsConflict(err), apierrors.IsNotFound(err):
		return fmt.Sprintf("cannot %s: it was changed, replaced or deleted since it was read (%v)", what,
			err), "it is tried again once the apiserver shows the new one"
	}
	return fmt.Sprintf("cannot %s: %v", what, err),
		"check that the apiserver is up and can be reached from this host; " + meanwhile
}

// ofAnotherTime tells whether a certificate was refused because it is not valid now, by this host's clock.
func ofAnotherTime(err error) bool {
	var invalid x509.CertificateInvalidError
	return errors.As(err, &invalid) && invalid.Reason == x509.Expired // also: not yet valid
}
