package kerneltest

// Paths in the guest.
const (
	ModuleTable = "/lib/modules/table.json"
	PlanFile    = "/plan.json"
)

// What the guest says on the serial line. Up is its first line, Passed or Failed its last.
const (
	Up     = "skein-guest: up"
	Passed = "skein-guest: PASSED"
	Failed = "skein-guest: FAILED"
)

// Freeze, with a duration behind it, is what a test in the guest writes to the console to have the whole machine
// stopped for so long and continued. No clock of the guest but its RTC shows it. Frozen is the variable that says in a
// guest that this can be had.
const (
	Freeze = "skein-guest: freeze "
	Frozen = "SKEIN_GUEST"
)

// Kept is how what failed steps have left comes out of the guest (Step.Keep), with a piece of an archive behind it
// (tar, gzip, base64).
const Kept = "skein-guest: kept "

// Plan is what to run, in order.
type Plan struct {
	Preload []string `json:"preload"` // modules; all others are loaded when the kernel asks
	Env     []string `json:"env"`
	Steps   []Step   `json:"steps"`
}

// Step is one program. A test binary's output is shortened to its results unless it fails. Of a program that
// reports, the exit status says nothing.
type Step struct {
	Name   string   `json:"name"`
	Dir    string   `json:"dir"`
	Args   []string `json:"args"`
	Test   bool     `json:"test"`
	Report bool     `json:"report"`
	// Keep is a directory of the guest that the host gets when the step fails, such as its logs.
	Keep string `json:"keep,omitempty"`
}
