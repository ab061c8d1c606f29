package fou_test

import (
	"testing"

	"github.com/skeinmesh/skein/dataplane/fou"
)

func TestTUNDriverCarriesBothFamilies(t *testing.T) {
	for name, auto := range map[string]bool{"fixed source port": false, "automatic source port": true} {
		t.Run(name, func(t *testing.T) { carries(t, newScene(t, fou.Userspace, fou.Userspace, auto)) })
	}
}
