package fou_test

import (
	"testing"

	"github.com/skeinmesh/skein/dataplane/fou"
)

func TestTUNDriverCarriesBothFamilies(t *testing.T) {
	for name, auto := range map[string]bool{"fixed source port": false, "automatic source port": true} {
		if auto && wantKernel() {
			continue // runs with each ordinary test; the emulated guest is for the kernel's part
		}
		t.Run(name, func(t *testing.T) { t.Parallel(); carries(t, newScene(t, fou.Userspace, fou.Userspace, auto)) })
	}
}
