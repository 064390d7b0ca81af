#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job from end to end on real text: corpus -> vocabulary -> tokens -> training by two processes -> held-out
# perplexity -> samples -> report. Needs no GPU and no download beyond the packages; about 3 minutes on 2 cores.
#
#   bash scripts/quickstart.sh                     continue where the last call stopped
#   bash scripts/quickstart.sh --fresh             start over
#   bash scripts/quickstart.sh --train-iters 2000  go on to another number of steps; other flags go to pretrain_gpt.py
#   bash scripts/quickstart.sh --text FILE         the same with your own text: .txt (one document, or those that
#                                                  --document-separator blank-line, or a text, parts) or JSON lines
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source scripts/_steps.sh

RUN=runs/quickstart
TRAINS=pretrain_gpt.py
ITERATIONS=600
read_flags "$@"
given=(${flags[@]+"${flags[@]}"})
VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt")

again="bash scripts/quickstart.sh${TEXT:+ --text $(printf %q "$TEXT")}${SEPARATOR:+ $(printf %q "$SEPARATOR")}"

if [ -n "$TEXT" ]; then
    step 1/7 "$(basename "$TEXT"): a part of it is held out, from the vocabulary too"
else
    step 1/7 "A corpus from the documentation that comes with Python"
fi
make_corpus

step 2/7 "A vocabulary of 8192 tokens (byte-level BPE)"
make_vocabulary

step 3/7 "Text to tokens"
preprocess() {
    python preprocess_data.py --input "$RUN/$1.jsonl" --output-prefix "$RUN/$1" "${VOCABULARY[@]}" --append-eod --workers 2 |
        grep -E 'documents num|tokens num| MB in '
}
for part in train held_out; do
    is_made "$RUN/${part}_text_document.idx" || told "$(for_size "$RUN/$part.jsonl" 0.5 0.08)" preprocess "$part"
done

tracker=$RUN/checkpoints/latest_checkpointed_iteration.txt
reached=$(cat "$tracker" 2>/dev/null || echo 0)
made_for() { # steps of the training that the last checkpoint is of
    python -m megatron.tools.checkpoint inspect "$RUN/checkpoints" --json |
        python -c 'import json, sys; print(json.load(sys.stdin)["config"]["batch"]["train_iters"])'
}
step 4/7 "Training a GPT of 5 million parameters for $ITERATIONS steps with two processes"
if [ "$reached" -ge "$ITERATIONS" ] && [ ${#flags[@]} -eq 0 ]; then
    echo "  already trained to step $reached; --train-iters N goes on to step N, --fresh starts over"
else
    takes "$(awk "BEGIN { print 5 + ($ITERATIONS > $reached ? $ITERATIONS - $reached : 0) * 0.17 }")"
    others
    if [ "$reached" -gt 0 ] && [ "$(made_for)" -ne "$ITERATIONS" ]; then
        echo "  from step $reached on: the text in a new order, and the learning rate of a training of $ITERATIONS steps"
        flags+=(--override data-order --resume-schedule command)
    fi
    RESUME_COMMAND="$again $(printf '%q ' --train-iters "$ITERATIONS" ${given[@]+"${given[@]}"})"
    export RESUME_COMMAND
    OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2) python -m megatron.tools.launch --nproc-per-node 2 pretrain_gpt.py \
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$ITERATIONS" \
        --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0.1 --adam-beta2 0.95 \
        --precision auto "${VOCABULARY[@]}" \
        --train-data-path "$RUN/train_text_document" --valid-data-path "$RUN/held_out_text_document" \
        --eval-interval 250 --eval-iters 8 --log-interval 10 \
        --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 200 --keep-last 2 \
        --metrics-file "$RUN/metrics.jsonl" --log-file "$RUN/train.log" ${flags[@]+"${flags[@]}"}
    rm -f "$RUN/evaluation.jsonl" "$RUN/samples.txt" "$RUN/report.html" # they belong to an earlier state
fi

step 5/7 "Perplexity of text that was held out"
is_made "$RUN/evaluation.jsonl" ||
    told 3 python -m megatron.tools.evaluate --load "$RUN/checkpoints" --data-path "$RUN/held_out_text_document" \
        --output "$RUN/evaluation.jsonl"

step 6/7 "What it writes by now"
beginnings() { # of three lines of the text that was held out
    python - "$RUN/held_out.jsonl" <<'PYTHON'
import json, sys
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
lines = [line for text in texts for line in text.splitlines() if len(line) > 30] or texts
for line in lines[:: -(-len(lines) // 3)]:
    beginning = " ".join(line[:100].split())[:24]
    print(beginning.rpartition(" ")[0] or beginning)
PYTHON
}
write_samples() {
    if [ -n "$TEXT" ]; then beginnings; else printf '%s\n' "Return a new" "The module defines" "class Error("; fi \
        >"$RUN/prompts.txt"
    python -m megatron.tools.generate --load "$RUN/checkpoints" --tokens-to-generate 60 --top-p 0.9 --temperature 0.8 \
        --prompt-file "$RUN/prompts.txt" >"$RUN/samples.txt.partial"
    mv "$RUN/samples.txt.partial" "$RUN/samples.txt"
}
is_made "$RUN/samples.txt" || told 3.5 write_samples
cat -s "$RUN/samples.txt" | sed 's/^/  | /'

step 7/7 "A report: loss, learning rate, throughput, gradient norm"
is_made "$RUN/report.html" ||
    told 2.5 python -m megatron.tools.report --run "$RUN/metrics.jsonl" --output "$RUN/report.html" --title "$(basename "$RUN")"

cat <<END

${BOLD}Done.${PLAIN} Look at $RUN/report.html in a browser. Then try:
  $again --train-iters 2000
  .venv/bin/python -m megatron.tools.generate --load $RUN/checkpoints --prompt "$(head -n 1 "$RUN/prompts.txt" 2>/dev/null)" --top-p 0.9
END
