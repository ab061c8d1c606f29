# The kernel tier: data-plane tests and KERNEL_LABS against kernel WireGuard, in a QEMU guest where this
# kernel has none: the tests in one guest, the labs in a fresh one. KERNEL_FLAGS go to chaos/kerneltier, for instance -guest or -run NAME.
KERNEL_LABS ?= $(wildcard examples/kernel-*.yaml)

.PHONY: test-kernel
test-kernel: $(if $(KERNEL_LABS),build)
	.ci/kernel-tier $(KERNEL_FLAGS)
	$(if $(KERNEL_LABS),.ci/kernel-tier $(addprefix -lab ,$(KERNEL_LABS)) $(KERNEL_FLAGS))

# What an agent takes with kernel WireGuard, measured in the guest where this kernel has none.
.PHONY: bench-kernel
bench-kernel: build-dev
	.ci/kernel-tier -bench memory -timeout 20m $(KERNEL_FLAGS)
