// Package examples holds lab files for `skein lab run`, and the test that runs them all on real
// agents. Each file's first lines say what it shows.
package examples
