# Plants bugs, one at a time, and shows that the checks of address allocation find each; then lets Porcupine check SEEDS
# runs of a cluster. WRITE=docs/allocation-proof.md keeps the tables. PLANTED_FLAGS: for instance -run cooldown
SEEDS ?= 50
PLANTED_FLAGS ?=

.PHONY: planted
planted: setup
	go run ./chaos/planted -seeds $(SEEDS) $(if $(WRITE),-write $(WRITE)) $(PLANTED_FLAGS)
