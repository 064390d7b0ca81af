#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv, then run the tests, three files at a time: on two cores, because many wait for processes most of the time.
# --unit (make test-unit) leaves out the files of tests/long_files.txt, which take long. What takes longest needs --full
# (make test-full). Of long families (`sampled` in conftest.py) one case in two, five or ten runs: the number of the commit
# chooses, so that each has its turn in ten submissions, and TEST_PART=N does, which the end of the output names.
# Arguments go to pytest:  bash scripts/test.sh tests/data -k blend
# They start, stop and kill some thousand processes. A test that fails is tried once more, at most two of them in a run
# (over all workers; the third fails at once). What passed then is no pass: the end of the output lists it under "rerun
# test summary info" with the traceback of its first try. It is a race that wants to be looked at. Without: --reruns 0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
if ! cmp -s requirements-test.txt .venv/requirements-test.installed; then
    echo "Installing what requirements-test.txt pins (once) ..."
    python -m pip install --quiet --disable-pip-version-check --no-input --no-deps -r requirements-test.txt \
        >>.venv/install.log 2>&1 ||
        echo "  pip could not: the tests that need it are skipped; what pip said is in .venv/install.log" >&2
    cp requirements-test.txt .venv/requirements-test.installed
fi
case $* in
    "") echo "All tests: about 8 minutes on two cores ..." ;;
    --unit) echo "The tests of files that take little time: about 4 minutes on two cores ..." ;;
    --full) echo "All tests, the slow ones too: much longer than the 8 minutes on two cores of the others ..." ;;
esac
exec python -m pytest -n 3 --dist loadfile --reruns 1 --max-suite-reruns 2 --rerun-show-tracebacks "$@"
