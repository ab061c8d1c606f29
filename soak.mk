# Kills random agents of a lab for SOAK, and checks that the mesh stands it and leaks nothing. SEED repeats a run, SOAK_FLAGS
# are more options of `skein-dev soak`: make soak SOAK=30m SOAK_FLAGS="--crowd 40 --burn 2 --freeze"
SOAK ?= 5m
.PHONY: soak
soak: setup build-dev
	bin/skein-dev soak --for $(SOAK) $(if $(SEED),--seed $(SEED)) $(SOAK_FLAGS)
