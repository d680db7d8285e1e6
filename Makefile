# make demo        every notebook on the shipped model, one HTML report under runs/
# make test        lint and tests, a process a core (at most 4: each takes a GiB)
# make lab         JupyterLab on notebooks/
# make notebooks   execute all and keep the outputs in notebooks/ (before a commit that changes them)
# Each works from a fresh clone: the first one makes .venv. PYTHON=/path/to/python3 picks the interpreter.

.PHONY: demo test lab notebooks clean help
.DELETE_ON_ERROR:

BIN := .venv/bin
STAMP := .venv/installed
CHECK := import sys, ensurepip, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))

help:
	@sed -n 's/^# //p' Makefile

demo: $(STAMP)
	@$(BIN)/nemolab run

test: $(STAMP)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pytest -q -n logical --maxprocesses 4 --dist loadfile

lab: $(STAMP)
	@$(BIN)/nemolab lab

notebooks: $(STAMP)
	@$(BIN)/nemolab run --save

.venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@set -e; \
	for python in $(PYTHON) python3 python3.13 python3.12 python3.11 python3.14; do \
	  if "$$python" -c '$(CHECK)' 2>/dev/null; then found="$$python"; break; fi; \
	  if [ -n "$(PYTHON)" ]; then break; fi; \
	done; \
	if [ -z "$$found" ]; then \
	  echo "make: no Python 3.11 to 3.14 with the venv module found (tried $(or $(PYTHON),python3 and python3.11 to python3.14))."; \
	  echo "      On Debian or Ubuntu: apt install python3-venv. Or name one: make $(or $(MAKECMDGOALS),.venv) PYTHON=/path/to/python3"; \
	  exit 1; \
	fi; \
	echo "making .venv with $$("$$found" --version) ($$found); the first time downloads about 3 GB and takes some minutes"; \
	"$$found" -m venv .venv
	@$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[test]'
	@touch $@

clean:
	rm -rf .venv runs
