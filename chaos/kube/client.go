package kube

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"github.com/skeinmesh/skein/chaos/lab/fabric"
)

// Client asks the apiserver as the cluster's administrator without starting a program for each request, and so tells
// when something happened.
type Client struct {
	http *http.Client
	base string
}

// Client is for use on the control plane's own node.
func (c *Cluster) Client() (*Client, error) {
	pair, err := tls.LoadX509KeyPair(c.file("admin.crt"), c.file("admin.key"))
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	roots.AppendCertsFromPEM(c.ca.pem)
	return &Client{base: fmt.Sprintf("https://127.0.0.1:%d", apiPort), http: &http.Client{Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}, MaxIdleConnsPerHost: 16,
		DialContext: DialIn(c.On.Namespace)}}}, nil
}

// DialIn opens TCP connections from a network namespace.
func DialIn(namespace string) func(ctx context.Context, network, address string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (conn net.Conn, err error) {
		err = fabric.In(namespace, func() (err error) {
			conn, err = new(net.Dialer).DialContext(ctx, network, address)
			return err
		})
		return conn, err
	}
}

func (c *Client) do(ctx context.Context, method, path, kind string, body []byte) (*http.Response, error) {
	r, err := http.NewRequestWithContext(ctx, method, c.base+path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	if kind != "" {
		r.Header.Set("Content-Type", kind)
	}
	a, err := c.http.Do(r)
	if err != nil {
		return nil, err
	}
	if a.StatusCode >= 300 {
		defer a.Body.Close()
		said, _ := io.ReadAll(a.Body)
		return nil, fmt.Errorf("%s %s: %s: %s", method, path, a.Status, said)
	}
	return a, nil
}

// Get returns what stands at a path.
func (c *Client) Get(ctx context.Context, path string) ([]byte, error) {
	a, err := c.do(ctx, http.MethodGet, path, "", nil)
	if err != nil {
		return nil, err
	}
	defer a.Body.Close()
	return io.ReadAll(a.Body)
}

// Create makes an object in the collection at a path.
func (c *Client) Create(ctx context.Context, path string, object any) error {
	return c.send(ctx, http.MethodPost, path, "application/json", object)
}

// Patch merges fields into the object at a path.
func (c *Client) Patch(ctx context.Context, path string, fields any) error {
	return c.send(ctx, http.MethodPatch, path, "application/merge-patch+json", fields)
}

// Delete removes the object at a path.
func (c *Client) Delete(ctx context.Context, path string) error {
	return c.send(ctx, http.MethodDelete, path, "", nil)
}

func (c *Client) send(ctx context.Context, method, path, kind string, object any) error {
	var b []byte
	if object != nil {
		var err error
		if b, err = json.Marshal(object); err != nil {
			return err
		}
	}
	a, err := c.do(ctx, method, path, kind, b)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	_, err = io.Copy(io.Discard, a.Body) // so that the connection serves again
	return err
}

// Watch tells of each change of what stands at a path, until ctx ends.
func (c *Client) Watch(ctx context.Context, path string, changed func(kind string, object json.RawMessage)) error {
	a, err := c.do(ctx, http.MethodGet, path, "", nil)
	if err != nil {
		return err
	}
	defer a.Body.Close()
	for d := json.NewDecoder(a.Body); ; {
		var one struct {
			Type   string
			Object json.RawMessage
		}
		if err := d.Decode(&one); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return errors.Join(fmt.Errorf("watch of %s", path), err)
		}
		changed(one.Type, one.Object)
	}
}
