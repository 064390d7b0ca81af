# SPDX-License-Identifier: Apache-2.0
# Sourced by the quickstarts, behind _env.sh: their flags, and numbered steps that say how long they take.

if [ -t 1 ]; then BOLD=$'\033[1m' PLAIN=$'\033[0m'; else BOLD='' PLAIN=''; fi
flags=() TEXT='' SEPARATOR=''
read_flags() { # the words given to a script that has set RUN, its folder, TRAINS and ITERATIONS; other flags stay in `flags`
    local fresh=
    while [ $# -gt 0 ]; do
        case $1 in
            --fresh) fresh=yes ;;
            --text)
                TEXT=${2:-}
                [[ $TEXT == /* ]] || TEXT=$CALLED_FROM/$TEXT
                [ -f "$TEXT" ] || EXIT_CODE=4 stop "--text '${2:-}' is not a file" "-> give a .txt or .jsonl, packed or not"
                RUN=${RUN}_$(basename "$TEXT" | sed 's/\..*//; s/[^A-Za-z0-9_-]/_/g')
                shift
                ;;
            --document-separator) SEPARATOR=--document-separator=${2:-} && shift ;;
            --document-separator=*) SEPARATOR=$1 ;;
            --train-iters)
                [[ ${2:-} =~ ^[0-9]+$ ]] || stop "--train-iters '${2:-}' is not a number of steps"
                ITERATIONS=$2
                shift
                ;;
            -h | --help) sed -n '3,/^set /s/^# \{0,1\}//p' "scripts/$(basename "$0")"; exit ;;
            *) flags+=("$1") ;;
        esac
        shift
    done
    check_flags
    [ -z "$fresh" ] || rm -rf "$RUN"
    mkdir -p "$RUN"
}
check_flags() { # those of the training, before anything is done or removed; TRAINS: the script that gets them
    local said shape=(--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64)
    [ ${#flags[@]} -eq 0 ] || said=$(python "$TRAINS" "${shape[@]}" "${flags[@]}" --print-config 2>&1 >/dev/null) || {
        printf '%s\n' "$said" "  (flags of $(basename "$0"): --text, --document-separator, --train-iters, --fresh, --help; all others go to $TRAINS)" >&2
        exit 2
    }
}
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
make_corpus() { # text to train on and a part to try it on: what comes with Python, or a text of one's own
    local from=(--kinds topics docs) state
    if [ -n "$TEXT" ]; then
        from=(--input "$TEXT" ${SEPARATOR:+"$SEPARATOR"})
        state="$(cksum <"$TEXT") $SEPARATOR"
        [ ! -e "$RUN/train.jsonl" ] || [ "$state" = "$(cat "$RUN/text.cksum" 2>/dev/null)" ] ||
            stop "$RUN was made of another text or separator, or $TEXT has changed" "-> --fresh starts over"
        printf '%s\n' "$state" >"$RUN/text.cksum"
    fi
    is_made "$RUN/train.jsonl" ||
        told "$(for_size "${TEXT:-/dev/null}" 1.6 0.05)" python -m megatron.tools.get_sample_data "${from[@]}" \
            --held-out "$RUN/held_out.jsonl" --output "$RUN/train.jsonl"
}
for_size() { # seconds for a file: so many, and so many for each of its megabytes
    awk "BEGIN { print $2 + $3 * $(wc -c <"$1") / 1e6 }"
}
make_vocabulary() { # of so many tokens
    is_made "$RUN/vocab.json" ||
        told "$(for_size "$RUN/train.jsonl" 0.5 0.12)" python -m megatron.tools.train_tokenizer --input "$RUN/train.jsonl" --vocab-size "${1:-8192}" --output "$RUN"
}
is_made() { [ -e "$1" ] && echo "  already there: $1"; }
others() { # what other programs take from it, in words; nothing on a quiet machine
    python -c 'from megatron.mpu.cpu_threads import cores, crowded, load
if crowded(cores()): print(f"  other programs keep the {cores()} cores busy (load {load():.1f}), so it will take longer")'
}
