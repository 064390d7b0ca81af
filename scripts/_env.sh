# SPDX-License-Identifier: Apache-2.0
# Sourced by quickstart.sh and test.sh: go to the project's folder, make .venv with what requirements.txt pins, and
# activate it. A second call finds everything in place and takes no time. PYTHON=/path/to/python chooses an interpreter.

CALLED_FROM=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."

stop() {
    printf 'error: %s\n' "$1" >&2
    shift
    [ $# -eq 0 ] || printf '  %s\n' "$@" >&2
    exit "${EXIT_CODE:-1}"
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

wait_for() { # pid, a command that says how far it is: until it ends, with its code; on a terminal a line that changes, and
    # elsewhere one every 4 seconds
    local code=0 before=$SECONDS every=4
    [ ! -t 1 ] || every=1
    while kill -0 "$1" 2>/dev/null; do
        sleep 0.2
        [ $((SECONDS - before)) -ge "$every" ] || continue
        before=$SECONDS
        if [ -t 1 ]; then printf '  %s\033[K\r' "$(eval "$2")"; else printf '  %s\n' "$(eval "$2")"; fi
    done
    [ ! -t 1 ] || printf '\033[K'
    wait "$1" || code=$?
    return "$code"
}

install_progress() { # pip's log: how far it is
    local all found
    all=$(sed -nE 's/^([A-Za-z0-9._-]+)==.*/\1/p' requirements.txt | sort -u | wc -l)
    found=$(grep -cE '^(Collecting|Requirement already satisfied)' "$1")
    if grep -q '^Installing collected packages' "$1"; then
        found=$(find .venv/lib -maxdepth 3 -name '*.dist-info' 2>/dev/null | wc -l)
        printf 'installed %s of about %s packages' "$found" "$all"
    else
        printf 'fetched %s of about %s packages' "$found" "$all"
    fi
    printf ', %s s' "$SECONDS"
}

install_requirements() {
    local python
    if ! supported .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
        python=$(choose_python) || exit 1
        echo "Making .venv with $("$python" --version) ..."
        "$python" -m venv --clear .venv || stop "$python cannot make a virtual environment" \
            "-> its venv module is missing: on Debian and Ubuntu, apt install python3-venv"
    fi
    local log=.venv/install.log
    echo "Installing what requirements.txt pins into .venv (once; about 2 minutes, or as long as the downloads take) ..."
    .venv/bin/python -m pip install --disable-pip-version-check --no-input --progress-bar off -r requirements.txt \
        >"$log" 2>&1 &
    wait_for $! "install_progress $log" || {
        tail -n 20 "$log" >&2
        stop "pip could not install requirements.txt into .venv" \
            "-> read pip's last lines above, or all of $log; running this script again continues where it stopped"
    }
    echo "  done; what pip said is in $log"
    cp requirements.txt .venv/requirements.installed
}

install_project() { # python -m megatron.tools.X works from any folder then. Takes seconds, once, and no network
    [ ! -L .venv ] || return 0 # it is another checkout's
    [ "$(cat .venv/project.installed 2>/dev/null)" != "$PWD" ] || return 0
    .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input --no-index --no-deps \
        --no-build-isolation -e . >>.venv/install.log 2>&1 ||
        echo "  note: pip install -e . failed, so commands work in this folder alone; pip's words are in .venv/install.log" >&2
    echo "$PWD" >.venv/project.installed
}

if ! cmp -s requirements.txt .venv/requirements.installed; then
    install_requirements
fi
install_project
# shellcheck disable=SC1091
source .venv/bin/activate
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
