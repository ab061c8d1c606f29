package fou_test

import (
	"os"
	"testing"

	"github.com/skeinmesh/skein/dataplane/fou"
	"github.com/skeinmesh/skein/internal/testenv"
)

// wantKernel is set by the kernel tier.
func wantKernel() bool { return os.Getenv("SKEIN_WANT_KERNEL") == "1" }

// needKernel asks for a kernel with FoU.
func needKernel(t testing.TB) {
	t.Helper()
	testenv.NeedRoot(t)
	err := fou.TryKernel()
	switch {
	case err != nil && wantKernel():
		t.Fatal(err)
	case err != nil:
		t.Skipf("%v; runs in the kernel tier: make test-kernel", err)
	}
}

func TestKernelDriverCarriesBothFamilies(t *testing.T) {
	needKernel(t)
	for name, auto := range map[string]bool{"fixed source port": false, "automatic source port": true} {
		t.Run(name, func(t *testing.T) { t.Parallel(); carries(t, newScene(t, fou.Kernel, fou.Kernel, auto)) })
	}
}

func TestKernelAndTUNDriverUnderstandEachOther(t *testing.T) {
	needKernel(t)
	t.Run("kernel client, fixed source port", func(t *testing.T) {
		t.Parallel()
		carries(t, newScene(t, fou.Kernel, fou.Userspace, false))
	})
	t.Run("TUN client, automatic source port", func(t *testing.T) {
		t.Parallel()
		carries(t, newScene(t, fou.Userspace, fou.Kernel, true))
	})
}
