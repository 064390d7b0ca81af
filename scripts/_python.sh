# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced with ROOT set to the project's folder: sets PYTHON, the interpreter of everything that is started. What somebody has
# chosen, else that of the active environment, else .venv's, else python or python3.

if [ -n "${PYTHON:-}" ]; then
    command -v "$PYTHON" >/dev/null || {
        printf 'error: PYTHON=%s is no program here\n' "$PYTHON" >&2
        exit 1
    }
elif [ -z "${VIRTUAL_ENV:-}${CONDA_PREFIX:-}" ] && [ -x "$ROOT/.venv/bin/python" ]; then
    PYTHON=$ROOT/.venv/bin/python
else
    PYTHON=$(command -v python || command -v python3) || {
        printf 'error: there is no python here\n  -> PYTHON=/path/to/it bash %s\n' "$0" >&2
        exit 1
    }
fi
