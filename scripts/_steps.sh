# SPDX-License-Identifier: Apache-2.0
# Sourced by the quickstarts, behind _env.sh: their flags, and numbered steps that say how long they take.

if [ -t 1 ]; then BOLD=$'\033[1m' PLAIN=$'\033[0m'; else BOLD='' PLAIN=''; fi
flags=() TEXT='' SEPARATOR='' GIVEN=
read_flags() { # the words given to a script that has set RUN, its folder, TRAINS and ITERATIONS; other flags stay in `flags`;
    # MOST: the script's own ITERATIONS; AGAIN: the command that calls it again on the same text
    local fresh=
    MOST=$ITERATIONS # of a machine that is fast enough
    while [ $# -gt 0 ]; do
        case $1 in
            --fresh) fresh=yes ;;
            --text)
                TEXT=${2:-}
                TEXT=${TEXT/#\~\//$HOME/} # within quotes the shell leaves it
                [[ $TEXT == /* ]] || TEXT=$CALLED_FROM/$TEXT
                [ -f "$TEXT" ] || EXIT_CODE=4 stop "--text '${2:-}' is not a file" "-> give a .txt or .jsonl, packed or not"
                RUN=${RUN}_$(basename "$TEXT" | sed 's/\..*//; s/[^A-Za-z0-9_-]/_/g')
                shift
                ;;
            --document-separator) SEPARATOR=--document-separator=${2:-} && shift ;;
            --document-separator=*) SEPARATOR=$1 ;;
            --train-iters)
                [[ ${2:-} =~ ^[0-9]+$ ]] || stop "--train-iters '${2:-}' is not a number of steps"
                ITERATIONS=$2 GIVEN=yes
                shift
                ;;
            -h | --help) sed -n '3,/^set /s/^# \{0,1\}//p' "scripts/$(basename "$0")"; exit ;;
            *) flags+=("$1") ;;
        esac
        shift
    done
    check_flags
    AGAIN="bash scripts/$(basename "$0")${TEXT:+ --text $(printf %q "$TEXT")}${SEPARATOR:+ $(printf %q "$SEPARATOR")}"
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
# Says how long a step takes: seconds on the machine that was measured, times how much slower a loop of Python is here than
# there: by its fastest turn, and by the share of a core that one gets next to other programs.
LOOP=$(python -c 'import time, timeit
start, own = time.perf_counter(), time.process_time()
fastest = min(timeit.repeat("sum(i * i for i in range(300_000))", number=1, repeat=24, timer=time.process_time))
print(fastest * (time.perf_counter() - start) / (time.process_time() - own))')
takes() { expect "$(awk "BEGIN { print $1 * $LOOP / 0.0096 }")"; }
in_words() { awk "BEGIN { if ($1 < 100) printf \"%d s\", $1 + 0.99; else printf \"%.1f min\", $1 / 60 }"; }
expect() { # seconds on this machine
    EXPECTED=$(in_words "$1")
    echo "  about $EXPECTED"
}
told() { # seconds (as of `takes`, or behind a = of this machine), a command; what it says comes at its end, and until then how long it has been at work
    local code=0 start=$SECONDS
    case $1 in =*) expect "${1#=}" ;; *) takes "$1" ;; esac
    "${@:2}" >"$RUN/said.txt" 2>"$RUN/said.errors" &
    wait_for $! 'printf "%s s, expected about %s" $((SECONDS - start)) "$EXPECTED"' || code=$?
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
make_tokens() { # of the corpus and of the part that is held out
    local part
    VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt")
    for part in train held_out; do
        is_made "$RUN/${part}_text_document.idx" || told "$(for_size "$RUN/$part.jsonl" 0.5 0.08)" preprocess "$part"
    done
}
preprocess() {
    python preprocess_data.py --input "$RUN/$1.jsonl" --output-prefix "$RUN/$1" "${VOCABULARY[@]}" --append-eod --workers 2 |
        grep -E 'documents num|tokens num| [kM]B in '
}
START=8 # seconds from the command to the first step, where that was not measured
ENOUGH=300 # steps for which no smaller model is tried
choose_size() { # a function that trains; widths of the model, the largest first; then its flags: sets WIDTH, and ITERATIONS
    # unless they were given, so that training takes two minutes here, by steps that are measured; SECONDS_A_STEP: empty if
    # none were
    local width train=$1 before
    shift
    if [ -s "$RUN/size.txt" ]; then
        read -r WIDTH CHOSEN SECONDS_A_STEP <"$RUN/size.txt"
    elif [ -n "$GIVEN" ] || [ -e "$RUN/checkpoints" ]; then # of a run without a choice
        WIDTH=${1%% *} CHOSEN=$MOST SECONDS_A_STEP=
    else
        echo "  measuring a step ..."
        for width in $1; do
            before=$SECONDS
            "$train" "$width" --train-iters 6 --eval-iters 0 --metrics-file "$RUN/measured.jsonl" "${@:2}" >"$RUN/said.txt" 2>&1 ||
                { cat "$RUN/said.txt" >&2; exit 1; }
            WIDTH=$width SECONDS_A_STEP=$(median_step) CHOSEN=
            CHOSEN=$(steps_in "$SECONDS_A_STEP")
            START=$(awk "BEGIN { start = $((SECONDS - before)) - 6 * $SECONDS_A_STEP; print (start > 8 ? start : 8) }")
            rm -f "$RUN"/measured.* "$RUN/said.txt"
            if [[ $width == *[!0-9]* ]]; then printf ' '; else printf '  %s wide:' "$width"; fi
            echo " a step takes $SECONDS_A_STEP s here, so $CHOSEN steps take $(in_words "$(awk "BEGIN { print $START + 1.05 * $CHOSEN * $SECONDS_A_STEP }")")"
            [ "$CHOSEN" -lt "$ENOUGH" ] || break
        done
    fi
    printf '%s\n' "$WIDTH $CHOSEN $SECONDS_A_STEP" >"$RUN/size.txt"
    [ -n "$GIVEN" ] || ITERATIONS=$CHOSEN
}
median_step() { # of the last four that were measured: the first ones take longer
    python - "$RUN/measured.jsonl" <<'PYTHON'
import json, statistics, sys
records = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8")]
print(f"{statistics.median([record['seconds'] for record in records if record['kind'] == 'step'][-4:]):.3g}")
PYTHON
}
steps_in() { # seconds of a step: how many are two minutes, with start, validations and checkpoints; nearly all are all;
    # LEAST: fewer make no sense
    awk "BEGIN { n = int(110 / (1.05 * $1) / 10) * 10; print (n > $MOST / 1.2 ? $MOST : n < $LEAST ? $LEAST : n) }"
}
LEAST=50
expect_training() { # seconds of a step where none was measured: says how long the steps behind REACHED take
    local left
    left=$((ITERATIONS > REACHED ? ITERATIONS - REACHED : 0))
    if [ -n "$SECONDS_A_STEP" ]; then expect "$(awk "BEGIN { print $START + 1.05 * $left * $SECONDS_A_STEP }")"; else takes "$(awk "BEGIN { print 5 + $left * $1 }")"; fi
    others
}
steps_done() { # sets REACHED, of the checkpoints of RUN
    REACHED=$(cat "$RUN/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
}
with_script() { # a command that gets SIGTERM when this script ends: bash dies of SIGTERM at once, and tells nobody
    python -c 'import os, sys
from megatron.guard.processes import die_with_parent
die_with_parent()
os.execvp(sys.argv[1], sys.argv[1:])' "$@"
}
gpt() { # the width of the model, and more flags: two processes train it
    OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2) with_script \
        python -m megatron.tools.launch --nproc-per-node 2 pretrain_gpt.py --num-layers 4 --hidden-size "$1" --num-attention-heads 4 --seq-length 256 \
        --hidden-dropout 0 --attention-dropout 0 --micro-batch-size 4 --global-batch-size 8 \
        --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0.1 --adam-beta2 0.95 \
        --precision auto "${VOCABULARY[@]}" --train-data-path "$RUN/train_text_document" "${@:2}" ${flags[@]+"${flags[@]}"}
}
train_gpt() { # seconds of a step, widths, flags of the model: trains it for ITERATIONS steps, or goes on with it
    local own=("${@:3}")
    steps_done
    choose_size gpt "$2" ${own[@]+"${own[@]}"}
    if [ "$REACHED" -ge "$ITERATIONS" ] && [ ${#flags[@]} -eq 0 ]; then
        echo "  already trained to step $REACHED; --train-iters N goes on to step N, --fresh starts over"
        return
    fi
    echo "  $WIDTH wide, ${ITERATIONS} steps of 2048 tokens"
    expect_training "$1"
    RESUME_COMMAND="$AGAIN $(printf '%q ' --train-iters "$ITERATIONS" ${flags[@]+"${flags[@]}"})"
    export RESUME_COMMAND
    if [ "$REACHED" -gt 0 ] && [ "$(made_for)" -ne "$ITERATIONS" ]; then
        echo "  from step $REACHED on: the text in a new order, and the learning rate of a training of $ITERATIONS steps"
        own+=(--override data-order --resume-schedule command)
    fi
    gpt "$WIDTH" --train-iters "$ITERATIONS" --valid-data-path "$RUN/held_out_text_document" \
        --eval-interval $((ITERATIONS < 250 ? ITERATIONS : 250)) --eval-iters 8 --eval-same-samples --log-interval 10 \
        --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 200 --keep-last 2 \
        --metrics-file "$RUN/metrics.jsonl" --log-file "$RUN/train.log" ${own[@]+"${own[@]}"}
    rm -f "$RUN/evaluation.jsonl" "$RUN/samples.txt" "$RUN/report.html" # they belong to an earlier state
}
made_for() { # steps of the training that the last checkpoint is of
    python -m megatron.tools.checkpoint inspect "$RUN/checkpoints" --json |
        python -c 'import json, sys; print(json.load(sys.stdin)["config"]["batch"]["train_iters"])'
}
evaluate_held_out() { # a forward pass takes a third of a step of as many tokens
    local seconds=3
    [ -z "$SECONDS_A_STEP" ] || seconds==$(for_tokens)
    is_made "$RUN/evaluation.jsonl" ||
        told "$seconds" python -m megatron.tools.evaluate --load "$RUN/checkpoints" --data-path "$RUN/held_out_text_document" \
            --output "$RUN/evaluation.jsonl"
}
for_tokens() { # seconds for a start and for the tokens that are held out, of 2 bytes each
    awk "BEGIN { print 5 + $(wc -c <"$RUN/held_out_text_document.bin") / 2 / 2048 * $SECONDS_A_STEP / 3 }"
}
write_report() {
    is_made "$RUN/report.html" ||
        told 2.5 python -m megatron.tools.report --run "$RUN/metrics.jsonl" --output "$RUN/report.html" --title "$(basename "$RUN")"
}
is_made() { [ -e "$1" ] && echo "  already there: $1"; }
others() { # what other programs use of the machine, in words; nothing on a quiet one
    python -c 'from megatron.mpu.cpu_threads import busy_cores, cores
if (busy := busy_cores()) >= 0.3: print(f"  other programs use {busy:.1f} of the {cores()} cores: without them it takes less time")'
}
