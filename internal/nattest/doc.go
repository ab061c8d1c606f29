// Package nattest builds small internets for tests: public hosts on one segment, and hosts behind routers whose NAT
// maps and filters as its kind says. Everything lives in unnamed network namespaces, which vanish with the test.
//
// chaos/lab is the big sister that runs whole agents; this one is for packages below it. Needs root.
package nattest
