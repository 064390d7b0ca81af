# SPDX-License-Identifier: Apache-2.0
# Sourced by the quickstarts, behind _env.sh: numbered steps that say how long they take. What they make is in $RUN.

step() { printf '\n%s[%s] %s%s\n' "$BOLD" "$1" "$2" "$PLAIN"; }
# Says how long a step takes when nothing else runs: seconds on the machine that was measured, times how much slower a loop of
# Python is here than there: the best of several, so that a busy machine makes little difference to it.
LOOP=$(python -c 'import time, timeit; print(min(timeit.repeat("sum(i * i for i in range(300_000))", number=1, repeat=12, timer=time.process_time)))')
takes() {
    EXPECTED=$(awk "BEGIN { s = $1 * $LOOP / 0.0096; if (s < 100) printf \"%d s\", s + 0.99; else printf \"%.1f min\", s / 60 }")
    echo "  about $EXPECTED"
}
told() { # seconds, a command; what it says comes at its end, and until then how long it has been at work
    local code=0 start=$SECONDS
    takes "$1"
    "${@:2}" >"$RUN/said.txt" 2>"$RUN/said.errors" &
    wait_for $! 'printf "%s s of about %s" $((SECONDS - start)) "$EXPECTED"' || code=$?
    [ "$code" -eq 0 ] || { cat "$RUN/said.txt"; cat "$RUN/said.errors" >&2; exit "$code"; }
    sed 's/^/  /' "$RUN/said.txt"
    rm -f "$RUN/said.txt" "$RUN/said.errors"
}
is_made() { [ -e "$1" ] && echo "  already there: $1"; }
if [ -t 1 ]; then BOLD=$'\033[1m' PLAIN=$'\033[0m'; else BOLD='' PLAIN=''; fi
others() { # what other programs take from it, in words; nothing on a quiet machine
    python -c 'from megatron.mpu.cpu_threads import busy_cores, cores; busy = busy_cores()
if busy > 0.3: print(f"  other programs use {busy:.1f} of {cores()} cores now, so it will take longer")'
}
