# A cluster of the commit FROM, the last one before roles, is upgraded node by node while its nodes reach each other.
FROM ?= bbbdcc5
.PHONY: upgrade
upgrade: setup build
	.ci/upgrade $(FROM)
