#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Set up .venv, then run all tests, two files at a time. Arguments go to pytest:  bash scripts/test.sh tests/data -k blend
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
exec python -m pytest -n 2 --dist loadfile "$@"
