# make demo       a small Qwen3 trained with and without offloading, and the plan of its real size for an H200
# make test       lint, types and the CPU tests, in their own environment
# make test-all   the same, with the tests that take long
# make types      types alone
# make pytest     the CPU tests alone; PYTEST_ARGS="-k budget" some of them
# make docs       the documentation, served on http://127.0.0.1:8000
# make dist       sdist and wheel of a release, in dist/
# make clean      removes the environments and what was built
#
# TORCH may carry pip arguments: make test TORCH="torch==2.11.0 --index-url https://..."
# A change of TORCH, of pyproject.toml or of this file installs again.

PYTHON ?= python3
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=

# The stamp's name carries the torch requirement: another TORCH is another stamp.
comma := ,
stamp = .installed-$(subst /,_,$(subst $(comma),_,$(subst =,_,$(subst <,_,$(subst >,_,$(firstword $(TORCH)))))))
demo_stamp := .venv-demo/$(stamp)
test_stamp := .venv-test/$(stamp)

# What make test leaves out.
LEFT_OUT := gpu or slow

.PHONY: help demo test test-all types pytest docs dist clean

help:
	@sed -n 's/^# \(make [a-z]\)/\1/p' Makefile

demo: $(demo_stamp)
	.venv-demo/bin/python docs/examples/demo.py

test: $(test_stamp)
	.venv-test/bin/ruff check .
	.venv-test/bin/ruff format --check .
	$(MAKE) --no-print-directory -j2 types pytest

test-all:
	$(MAKE) --no-print-directory test LEFT_OUT=gpu

types: $(test_stamp)
	.venv-test/bin/pyright --pythonpath .venv-test/bin/python

# A file goes to one process, so that what its tests share is made once. Files of one long test would come last if those
# of many tests came first. Rewritten assertions and imports of children are kept, which is a minute for two processes.
pytest: $(test_stamp)
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 .venv-test/bin/python -m pytest -m "not ($(LEFT_OUT))" \
		-n 2 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

docs: $(test_stamp)
	.venv-test/bin/python -m mkdocs serve --strict

dist: $(test_stamp)
	rm -rf dist
	.venv-test/bin/python -m build

# torch goes first and alone, so that no other requirement chooses its build.
$(demo_stamp): pyproject.toml Makefile
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	rm -f .venv-demo/.installed-*
	.venv-demo/bin/python -m pip install $(TORCH)
	.venv-demo/bin/python -m pip install -e ".[transformers,plot]"
	touch $@

$(test_stamp): pyproject.toml Makefile
	test -x .venv-test/bin/python || $(PYTHON) -m venv .venv-test
	rm -f .venv-test/.installed-*
	.venv-test/bin/python -m pip install $(TORCH)
	.venv-test/bin/python -m pip install -e ".[test]"
	touch $@

clean:
	rm -rf .venv-demo .venv-test build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
