#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture of 8 experts on real text: corpus -> vocabulary -> tokens -> training by two processes, which hold four experts of
# each layer -> held-out perplexity -> loads of experts. Needs no GPU and no download; about 4 minutes on 2 cores.
#
#   bash scripts/quickstart_experts.sh                     continue where the last call stopped
#   bash scripts/quickstart_experts.sh --fresh             start over
#   bash scripts/quickstart_experts.sh --train-iters 2000  go on to another number of steps; other flags go to pretrain_gpt.py
#   bash scripts/quickstart_experts.sh --text FILE         the same with your own text
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source scripts/_steps.sh

RUN=runs/quickstart_experts
TRAINS=pretrain_gpt.py
ITERATIONS=600
read_flags "$@"
VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt")

step 1/5 "A corpus, and a vocabulary of 8192 tokens"
make_corpus
make_vocabulary

step 2/5 "Text to tokens"
preprocess() {
    python preprocess_data.py --input "$RUN/$1.jsonl" --output-prefix "$RUN/$1" "${VOCABULARY[@]}" --append-eod --workers 2 |
        grep -E 'documents num|tokens num| MB in '
}
for part in train held_out; do
    is_made "$RUN/${part}_text_document.idx" || told "$(for_size "$RUN/$part.jsonl" 0.5 0.08)" preprocess "$part"
done

step 3/5 "Training: 8 experts in each layer, 2 for each token, as wide together as the MLP of quickstart.sh"
reached=$(cat "$RUN/checkpoints/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
if [ "$reached" -ge "$ITERATIONS" ]; then
    echo "  already trained to step $reached; --train-iters N goes on to step N, --fresh starts over"
else
    takes "$(awk "BEGIN { print 5 + ($ITERATIONS > $reached ? $ITERATIONS - $reached : 0) * 0.25 }")"
    others
    OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2) python -m megatron.tools.launch --nproc-per-node 2 pretrain_gpt.py \
        --num-layers 4 --hidden-size 256 --num-attention-heads 4 --seq-length 256 \
        --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --expert-model-parallel-size 2 \
        --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3 \
        --hidden-dropout 0 --attention-dropout 0 \
        --micro-batch-size 4 --global-batch-size 8 --train-iters "$ITERATIONS" \
        --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0.1 --adam-beta2 0.95 \
        --precision auto "${VOCABULARY[@]}" \
        --train-data-path "$RUN/train_text_document" --valid-data-path "$RUN/held_out_text_document" \
        --eval-interval 250 --eval-iters 8 --log-interval 10 \
        --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 200 --keep-last 2 \
        --metrics-file "$RUN/metrics.jsonl" --log-file "$RUN/train.log" ${flags[@]+"${flags[@]}"}
    rm -f "$RUN/evaluation.jsonl" "$RUN/report.html" # they belong to an earlier state
fi

step 4/5 "Perplexity of text that was held out"
is_made "$RUN/evaluation.jsonl" ||
    told 3 python -m megatron.tools.evaluate --load "$RUN/checkpoints" --data-path "$RUN/held_out_text_document" \
        --output "$RUN/evaluation.jsonl"

step 5/5 "Tokens of each expert in the last logged step, in per cent of an equal share"
python - "$RUN/metrics.jsonl" <<'PYTHON'
import json, sys
steps = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8") if '"kind": "experts"' in line]
for layer, loads in steps[-1]["loads"].items() if steps else ():
    print(f"  {layer:9s}", *(f"{100 * load * len(loads) / sum(loads):5.0f}" for load in loads))
PYTHON
is_made "$RUN/report.html" ||
    told 2.5 python -m megatron.tools.report --run "$RUN/metrics.jsonl" --output "$RUN/report.html" --title "$(basename "$RUN")"
echo
echo "${BOLD}Done.${PLAIN} Look at $RUN/report.html in a browser."
