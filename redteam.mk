# Attacks a lab as a hostile member, pod, neighbour and stranger, about six minutes. WRITE=docs/security.md keeps the table;
# REDTEAM_FLAGS: for instance --only relay, or --short.
REDTEAM_FLAGS ?=
.PHONY: redteam redteam-holes
redteam: setup build-dev
	bin/skein-dev redteam $(REDTEAM_FLAGS) $(if $(WRITE),--write $(WRITE))

# The same attempts against a skein whose guards were taken away by patches: each must gain something, else it proves nothing.
redteam-holes: setup build-dev
	bin/skein-dev redteam --holes . $(REDTEAM_FLAGS)
