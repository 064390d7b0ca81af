#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job from end to end on real text: corpus -> vocabulary -> tokens -> training by two processes -> held-out
# perplexity -> samples -> report. Needs no GPU and no download beyond the packages; about 3 minutes on 2 cores.
#
#   bash scripts/quickstart.sh                     continue where the last call stopped
#   bash scripts/quickstart.sh --fresh             start over
#   bash scripts/quickstart.sh --train-iters 2000  any other flag goes to pretrain_gpt.py; more steps go on training
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

RUN=runs/quickstart
ITERATIONS=600
flags=()
while [ $# -gt 0 ]; do
    case $1 in
        --fresh) rm -rf "$RUN" ;;
        --train-iters)
            [[ ${2:-} =~ ^[0-9]+$ ]] || stop "--train-iters '${2:-}' is not a number of steps"
            ITERATIONS=$2
            shift
            ;;
        -h | --help) sed -n '3,9s/^# \{0,1\}//p' scripts/quickstart.sh; exit ;;
        *) flags+=("$1") ;;
    esac
    shift
done

step() { printf '\n%s[%s] %s%s\n' "$BOLD" "$1" "$2" "$PLAIN"; }
# Of the log lines, which train.log keeps in full, what fits on a terminal; everything else as it is.
short_lines() {
    sed -uE -e '/^-+$/d' -e 's/^ \[.*\] iteration +([0-9]+)\/ +([0-9]+) .*lm loss: ([0-9]\.[0-9]{3})[0-9]*E\+00 .*tokens per second: ([0-9]+).*ETA: ([0-9:]+).*/  step \1 of \2    loss \3    \4 tokens\/s    \5 left/' \
        -e 's/^ (validation loss at iteration [0-9]+)[^|]*\| lm loss value: ([0-9]\.[0-9]{3})[0-9]*E\+00 .*/  \1: \2/'
}
is_made() { [ -e "$1" ] && echo "  already there: $1"; }
if [ -t 1 ]; then BOLD=$'\033[1m' PLAIN=$'\033[0m'; else BOLD='' PLAIN=''; fi
mkdir -p "$RUN"
VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt")

step 1/7 "A corpus from the documentation that comes with Python"
is_made "$RUN/train.jsonl" ||
    python -m megatron.tools.get_sample_data --kinds topics docs --held-out "$RUN/held_out.jsonl" \
        --output "$RUN/train.jsonl"

step 2/7 "A vocabulary of 8192 tokens (byte-level BPE)"
is_made "$RUN/vocab.json" ||
    python -m megatron.tools.train_tokenizer --input "$RUN/train.jsonl" --vocab-size 8192 --output "$RUN"

step 3/7 "Text to tokens"
for part in train held_out; do
    is_made "$RUN/${part}_text_document.idx" ||
        python preprocess_data.py --input "$RUN/$part.jsonl" --output-prefix "$RUN/$part" "${VOCABULARY[@]}" \
            --append-eod --workers 2 | grep -E 'documents num|tokens num| MB in '
done

step 4/7 "Training a GPT of 5 million parameters for $ITERATIONS steps with two processes"
tracker=$RUN/checkpoints/latest_checkpointed_iteration.txt
if [ "$(cat "$tracker" 2>/dev/null || echo 0)" -ge "$ITERATIONS" ] && [ ${#flags[@]} -eq 0 ]; then
    echo "  already trained to step $(cat "$tracker"); --train-iters N goes on to step N, --fresh starts over"
else
    cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    OMP_NUM_THREADS=$((cores > 3 ? cores / 2 : 1)) python -m megatron.tools.launch --nproc-per-node 2 pretrain_gpt.py \
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$ITERATIONS" \
        --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0.1 --adam-beta2 0.95 \
        --precision auto "${VOCABULARY[@]}" \
        --train-data-path "$RUN/train_text_document" --valid-data-path "$RUN/held_out_text_document" \
        --eval-interval 250 --eval-iters 8 --log-interval 20 \
        --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 200 --keep-last 2 \
        --metrics-file "$RUN/metrics.jsonl" ${flags[@]+"${flags[@]}"} |
        (trap '' INT && tee -a "$RUN/train.log" | short_lines) # Ctrl-C is for the training
    rm -f "$RUN/evaluation.jsonl" "$RUN/samples.txt" "$RUN/report.html" # they belong to an earlier state
fi

step 5/7 "Perplexity of text that was held out"
is_made "$RUN/evaluation.jsonl" ||
    python -m megatron.tools.evaluate --load "$RUN/checkpoints" --data-path "$RUN/held_out_text_document" \
        --output "$RUN/evaluation.jsonl"

step 6/7 "What it writes by now"
is_made "$RUN/samples.txt" || {
    python -m megatron.tools.generate --load "$RUN/checkpoints" --tokens-to-generate 60 --top-p 0.9 --temperature 0.8 \
        --prompt "Return a new" "The module defines" "class Error(" >"$RUN/samples.txt.partial"
    mv "$RUN/samples.txt.partial" "$RUN/samples.txt"
}
cat -s "$RUN/samples.txt" | sed 's/^/  | /'

step 7/7 "A report: loss, learning rate, throughput, gradient norm"
is_made "$RUN/report.html" ||
    python -m megatron.tools.report --run "$RUN/metrics.jsonl" --output "$RUN/report.html" --title quickstart

cat <<END

${BOLD}Done.${PLAIN} Look at $RUN/report.html in a browser. Then try:
  bash scripts/quickstart.sh --train-iters 2000
  .venv/bin/python -m megatron.tools.generate --load $RUN/checkpoints --prompt "def parse(" --top-p 0.9
END
