// Package filewatch tells when the content that a path leads to may have changed, by inotify.
//
// It follows the path as the kernel does, link by link, and watches each directory in which a step of that way can be
// put in another's place: editors and configuration management rename a new file over the old one, and Kubernetes puts
// another directory behind a symbolic link (..data) beside the file. Where the way ends, since a directory or the file
// is missing, it watches the directory in which the next step would appear.
//
// Invariants: a change that happens after Watch has told that it is ready is told of. What else happens in a watched
// directory, such as to a log, is not told of. A file that is being written is told of when its writer closes it.
//
// Source: inotify(7), symlink(7).
package filewatch
