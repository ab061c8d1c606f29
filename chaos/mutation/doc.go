// Command mutation shows that the checks of address allocation find bugs: it builds the packages with one mutation at a
// time, by go's -overlay and so without touching a file, runs the tests that must notice, and fails if one of them does
// not. `make mutations` runs it; `make mutations WRITE=docs/allocation-proof.md` keeps the table there, beside that of
// Porcupine's runs (consensus, TestNothingIsGivenTwice).
//
// A bug is a patch: a file, the exact text that it replaces, and what comes instead. One whose text is not in the file
// exactly once is an error, so that a bug cannot rot. Every test passes without the bug, or its failing says nothing.
package main
