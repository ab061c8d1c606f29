# Makes mutations of the sources, one at a time, and shows that the checks of address allocation find each; then lets
# Porcupine check SEEDS runs of a cluster. WRITE=docs/allocation-proof.md keeps the tables. MUTATION_FLAGS: for instance
# -run cooldown
SEEDS ?= 50
MUTATION_FLAGS ?=

.PHONY: mutations planted
mutations: setup
	go run ./chaos/mutation -seeds $(SEEDS) $(if $(WRITE),-write $(WRITE)) $(MUTATION_FLAGS)

planted: mutations # its former name
