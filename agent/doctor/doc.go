// Package doctor examines the host that an agent runs on, or shall run on, for what keeps a mesh from working.
//
// Read collects Facts and Judge turns them into a Report. Judge is pure: the same facts give the same report. Read
// changes nothing: it loads no module, opens no listener and writes no setting. It sends nothing to the network but
// the name lookups for host names that the configuration has. What a caller may not see, or the kernel does not show,
// becomes a Skip with the reason and never a Finding.
//
// Facts are of the calling thread's network namespace. All functions are safe for concurrent use. Source: issue 15,
// DESIGN.md section 9 for names and numbers.
package doctor
