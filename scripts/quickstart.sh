#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job from end to end on real text: corpus -> vocabulary -> tokens -> training by two processes -> held-out
# perplexity -> samples -> report. Needs no GPU and no download beyond the packages; about 4 minutes on 2 cores.
#
#   bash scripts/quickstart.sh                     continue where the last call stopped
#   bash scripts/quickstart.sh --fresh             start over
#   bash scripts/quickstart.sh --train-iters 600   any other flag goes to pretrain_gpt.py; more steps go on training
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"

RUN=runs/quickstart
ITERATIONS=300
flags=()
while [ $# -gt 0 ]; do
    case $1 in
        --fresh) rm -rf "$RUN" ;;
        --train-iters) ITERATIONS=${2:?--train-iters needs a number}; shift ;;
        -h | --help) sed -n '3,9s/^# \{0,1\}//p' scripts/quickstart.sh; exit ;;
        *) flags+=("$1") ;;
    esac
    shift
done

step() { printf '\n%s[%s] %s%s\n' "$BOLD" "$1" "$2" "$PLAIN"; }
is_made() { [ -e "$1" ] && echo "  already there: $1"; }
if [ -t 1 ]; then BOLD=$'\033[1m' PLAIN=$'\033[0m'; else BOLD='' PLAIN=''; fi
mkdir -p "$RUN"
VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt")

step 1/7 "A corpus from the documentation and sources that come with Python"
is_made "$RUN/train.jsonl" ||
    python -m megatron.tools.get_sample_data --held-out "$RUN/held_out.jsonl" --output "$RUN/train.jsonl"

step 2/7 "A vocabulary of 8192 tokens (byte-level BPE)"
is_made "$RUN/vocab.json" ||
    python -m megatron.tools.train_tokenizer --input "$RUN/train.jsonl" --vocab-size 8192 --output "$RUN"

step 3/7 "Text to tokens"
for part in train held_out; do
    is_made "$RUN/${part}_text_document.idx" ||
        python preprocess_data.py --input "$RUN/$part.jsonl" --output-prefix "$RUN/$part" "${VOCABULARY[@]}" \
            --append-eod --workers 2
done

step 4/7 "Training a GPT of 5 million parameters for $ITERATIONS steps with two processes"
tracker=$RUN/checkpoints/latest_checkpointed_iteration.txt
if [ "$(cat "$tracker" 2>/dev/null || echo 0)" -ge "$ITERATIONS" ] && [ ${#flags[@]} -eq 0 ]; then
    echo "  already trained to step $(cat "$tracker"); --train-iters N goes on to step N, --fresh starts over"
else
    cores=$(python -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')
    OMP_NUM_THREADS=$((cores > 3 ? cores / 2 : 1)) torchrun --nproc-per-node 2 pretrain_gpt.py \
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 8 --global-batch-size 16 --train-iters "$ITERATIONS" \
        --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-iters 20 --weight-decay 0.1 --adam-beta2 0.95 \
        --precision auto "${VOCABULARY[@]}" \
        --train-data-path "$RUN/train_text_document" --valid-data-path "$RUN/held_out_text_document" \
        --eval-interval 100 --eval-iters 4 --log-interval 10 --log-progress \
        --save "$RUN/checkpoints" --load "$RUN/checkpoints" --auto-resume --save-interval 100 --keep-last 2 \
        --metrics-file "$RUN/metrics.jsonl" ${flags[@]+"${flags[@]}"}
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
sed 's/^/  | /' "$RUN/samples.txt"

step 7/7 "A report"
is_made "$RUN/report.html" || python -m megatron.tools.report --run "$RUN/metrics.jsonl" --output "$RUN/report.html" --title quickstart

cat <<END

${BOLD}Done.${PLAIN} Look at $RUN/report.html in a browser. Then try:
  bash scripts/quickstart.sh --train-iters 600
  .venv/bin/python -m megatron.tools.generate --load $RUN/checkpoints --prompt "def parse(" --top-p 0.9
END
