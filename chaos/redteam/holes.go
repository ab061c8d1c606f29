package redteam

// hole is a guard taken away by a patch of the sources.
type hole struct {
	name   string
	guards []Guard
	// seen are the attempts that must gain something when the guard is away, by parts of their names; one of each is enough.
	seen  []string
	edits []edit
}

// edit replaces a text, which the file has exactly once.
type edit struct{ file, old, new string }

var holes = []hole{}
