// Package graph draws a mesh: sites, the nodes in them, what each node is, and how the asked node reaches it. DOT
// is for Graphviz, SVG needs nothing but a browser.
//
// It is pure: the same Graph gives the same bytes. Names come from other hosts and are not believed: what is no
// printable character is replaced, the rest is quoted for the format, and every text has a largest width, so that
// a name can neither add elements nor push others away. Nothing is safe for concurrent change; drawing only
// reads.
//
// A mesh of up to detailedMost nodes is drawn with a card for each node and a labelled line for each path. A
// larger one has a grid of small marks for each site, and lines to sites that bundle the paths of one state, with
// their number.
//
// Where sites speak through leaders, leaders are marked, and a node that the asked one has no tunnel to has a line
// of its own colour, which names the leader that passes packets on (Hop). The path to that leader is its own line.
package graph
