# SPDX-License-Identifier: Apache-2.0
# Short names for what a developer does often. `make` alone lists them.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)

CHECKS = tests/test_floors.py tests/test_source_form.py tests/settings/test_flags.py::test_docs_are_up_to_date

help:            ## list these targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## */\t/' | expand -t 16

check:           ## lint, format, import floors, form of sources, flag table (20 seconds)
	@failed=; \
	echo "ruff check"; $(PYTHON) -m ruff check . || failed="$$failed, lint"; \
	echo "ruff format --check"; $(PYTHON) -m ruff format --check . || failed="$$failed, format (make format)"; \
	echo "floors, form of sources, flag table"; $(PYTHON) -m pytest $(CHECKS) || failed="$$failed, floors, form or flag table"; \
	test -z "$$failed" || { echo "failed: $${failed#, }"; exit 1; }

format:          ## let ruff repair format and imports
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

test:            ## set-up and the tests
	bash scripts/test.sh

test-unit:       ## the tests without the files that take long, for daily work (4 minutes)
	bash scripts/test.sh --unit

test-full:       ## set-up and all tests, the slow ones too
	bash scripts/test.sh --full

gpu:             ## on a machine with a GPU: its tests, then speed and memory beside torch's own best, into runs/gpu (15 minutes or more)
	$(PYTHON) -m pytest -n 8 -m gpu tests
	$(PYTHON) benchmarks/gpu_train.py --output runs/gpu
	$(PYTHON) benchmarks/gpu_fp8.py --output runs/gpu-fp8
	$(PYTHON) benchmarks/gpu_train.py --skip-calibration --models 1.3B:8 llama-3-8b:1 --output runs/gpu-fp8 \
	    --contenders suite suite-fp8-tensorwise suite-fp8-blockwise

quickstart:      ## corpus, vocabulary, training, evaluation, samples, report
	bash scripts/quickstart.sh

screenshots:     ## reports of runs/ and drawings of docs/ in a browser, into runs/screenshots
	$(PYTHON) scripts/screenshots.py

clean:           ## remove what running left behind, but not .venv
	rm -rf runs build dist *.egg-info .pytest_cache .ruff_cache .hypothesis

.PHONY: help check format test test-unit test-full gpu quickstart screenshots clean
