// Package bundle puts what a maintainer needs to look into a fault into one file, a .tar.gz, without secrets.
//
// What always holds: no text reaches the file but through Scrub; each part is bounded in size and time; a part that
// fails is told of in the file INDEX.txt, which comes first, and the others are there all the same. Scrub works by
// what secrets look like and not by where they are expected, so one that turns up in a log or a comment goes as well.
//
// Scrub is pure. Source: issue 15.
package bundle
