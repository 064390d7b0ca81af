# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh: go to the project's folder, make .venv with what requirements.txt pins, and
# activate it. A second call finds everything in place and takes no time. PYTHON=/path/to/python chooses an interpreter.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit 1
}

supported() { # is "$1" a Python that can be used? (shims of absent versions exist and fail, so it is run)
    "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

choose_python() {
    if [ -n "${PYTHON:-}" ]; then
        supported "$PYTHON" || stop "PYTHON=$PYTHON does not run, or is not Python 3.10, 3.11, 3.12 or 3.13"
        echo "$PYTHON"
        return
    fi
    local candidate
    for candidate in python3 python3.12 python3.11 python3.13 python3.10 python; do
        if supported "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    stop "no Python 3.10, 3.11, 3.12 or 3.13 was found" \
        "found: $(python3 --version 2>&1 || true)" \
        "-> install one, or say where it is: PYTHON=/path/to/python3.12 bash $0"
}

install_requirements() {
    local python quiet=--quiet
    if ! supported .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(choose_python) || exit 1
        echo "Making .venv with $("$python" --version) ..."
        "$python" -m venv --clear .venv || stop "$python cannot make a virtual environment" \
            "-> its venv module is missing: on Debian and Ubuntu, apt install python3-venv"
    fi
    [ -t 1 ] && quiet=--progress-bar=on
    echo "Installing what requirements.txt pins into .venv (once; some minutes) ..."
    .venv/bin/python -m pip install --disable-pip-version-check --no-input $quiet -r requirements.txt ||
        stop "pip could not install requirements.txt into .venv" \
            "-> read pip's last lines above; running this script again continues where it stopped"
    cp requirements.txt .venv/requirements.installed
}

if ! cmp -s requirements.txt .venv/requirements.installed; then
    install_requirements
fi
# shellcheck disable=SC1091
source .venv/bin/activate
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
