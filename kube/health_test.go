package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net/url"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
)

func TestErrorsOfTheApiserverAreExplained(t *testing.T) {
	nodes := nodeResource.GroupResource()
	for what, c := range map[string]struct {
		err           error
		message, help string // parts; empty: nothing is told
	}{
		"none":     {},
		"canceled": {err: context.Canceled},
		"expired":  {err: apierrors.NewResourceExpired("too old")},
		"forbidden": {err: apierrors.NewForbidden(nodes, "n1", errors.New("no")), message: "may not patch nodes",
			help: "verb patch on nodes"},
		"token": {err: apierrors.NewUnauthorized("bad"), message: "does not accept this host's token", help: "token"},
		"overloaded": {err: apierrors.NewTooManyRequests("busy", 3), message: "asks to try again later",
			help: "go on as they are"},
		"another one": {err: apierrors.NewConflict(nodes, "n1", errors.New("uid")),
			message: "was changed, replaced or deleted since it was read",
			help:    "tried again"},
		"internal": {err: apierrors.NewInternalError(errors.New("boom")), message: "boom", help: "go on as they are"},
		"refused": {err: errors.New("connect: connection refused"), message: "connection refused",
			help: "reached from this host"},
		"another time": {err: &url.Error{Op: "Get", URL: "https://192.0.2.1", Err: &tls.CertificateVerificationError{
			Err: x509.CertificateInvalidError{Reason: x509.Expired, Detail: "current time is before"}}},
			message: "expired or is not yet valid", help: "this host's clock"},
	} {
		message, help := diagnosis("write it", "patch", "nodes", c.err)
		if (message == "") != (c.message == "") || !strings.Contains(message, c.message) ||
			!strings.Contains(help, c.help) {
			t.Errorf("%s: %q, %q", what, message, help)
		}
	}
}

func TestAProblemGoesWithWhatFailed(t *testing.T) {
	now := map[string]string{}
	h := health{report: func(subject, message, _ string) { now[subject] = message }}
	h.result("read the Nodes", "list", "nodes", nil)
	if len(now) != 0 {
		t.Errorf("a success reports %v", now)
	}
	h.result("read the Nodes", "list", "nodes", errors.New("refused"))
	h.result("write the record", "patch", "nodes", errors.New("refused"))
	h.result("read the Nodes", "list", "nodes", context.Canceled)
	if now["kubernetes: list nodes"] == "" {
		t.Error("an attempt that was broken off is taken for a success")
	}
	h.result("read the Nodes", "list", "nodes", nil)
	if now["kubernetes: list nodes"] != "" || now["kubernetes: patch nodes"] == "" {
		t.Errorf("after reading works again: %v", now)
	}
}

// statusError is an apiserver's answer with an HTTP status.
func statusError(code int) error {
	return apierrors.NewGenericServerResponse(code, "patch", nodeResource.GroupResource(), "n1", "", 0, false)
}
