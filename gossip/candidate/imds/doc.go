// Package imds is the step of discovery that asks Amazon's instance metadata service, version 2: an elastic IP is known
// to it and to nothing else inside the host. It fetches a token (PUT, with a lifetime), then the public IPv4 address
// and the addresses of each network interface.
//
// Whoever answers on the link-local address is not trusted further than needed: nothing but public addresses is taken,
// answers have a size limit, redirects and proxies are not followed, and a host that does not look like Amazon's is not
// asked unless the configuration says so. Source: Amazon EC2 User Guide, "Use the Instance Metadata Service".
package imds
