# Kills random agents of a lab for SOAK, and checks that the mesh stands it. SEED repeats a run.
SOAK ?= 5m
.PHONY: soak
soak: setup build
	bin/skein lab soak --for $(SOAK) $(if $(SEED),--seed $(SEED))
