package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

const (
	retryAfterHeader = "Retry-After"
	mostRefusal      = 64 << 10 // bytes of a refusal that are read
	mostRetryAfter   = 5 * time.Minute
)

// later has refusals that say when to come again arrive as errors that say so. The client library would wait and ask
// again by itself, ten times: what is wrong would be told minutes later or, behind a time limit, never.
type later struct{ http.RoundTripper }

// RoundTrip is one request.
func (l later) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := l.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	seconds, err := strconv.Atoi(resp.Header.Get(retryAfterHeader))
	if err != nil || seconds < 0 || resp.StatusCode < http.StatusBadRequest {
		return resp, nil
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, mostRefusal))
	resp.Body.Close()
	if err != nil {
		return nil, err
	}
	s := refusal(resp.StatusCode, body, min(seconds, int(mostRetryAfter/time.Second)))
	resp.Header.Del(retryAfterHeader)
	resp.Header.Set("Content-Type", "application/json")
	resp.Header.Del("Content-Encoding")
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(s)), int64(len(s))
	return resp, nil
}

// refusal is an answer as the API has them, with the time to wait in it.
func refusal(code int, body []byte, seconds int) []byte {
	s := metav1.Status{}
	if json.Unmarshal(body, &s) != nil || s.Kind != "Status" { // filters before the API answer with a line of text
		s = metav1.Status{Message: http.StatusText(code), Reason: map[int]metav1.StatusReason{
			http.StatusTooManyRequests:     metav1.StatusReasonTooManyRequests,
			http.StatusInternalServerError: metav1.StatusReasonInternalError,
			http.StatusServiceUnavailable:  metav1.StatusReasonServiceUnavailable,
			http.StatusGatewayTimeout:      metav1.StatusReasonTimeout,
		}[code]}
	}
	s.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
	s.Status, s.Code = metav1.StatusFailure, int32(code)
	if s.Details == nil {
		s.Details = &metav1.StatusDetails{}
	}
	s.Details.RetryAfterSeconds = int32(seconds)
	b, _ := json.Marshal(s) // it has nothing that cannot be encoded
	return b
}

// pause waits until a moment, or until ctx ends.
func pause(ctx context.Context, until time.Time) {
	wait := time.Until(until)
	if wait <= 0 {
		return
	}
	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
