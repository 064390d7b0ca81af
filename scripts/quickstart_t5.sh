#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An encoder-decoder from end to end on real text: corpus -> vocabulary -> sentences -> spans masked and written back, by a
# pipeline of two processes -> loss on held-out text beside that of counting tokens -> gaps filled in, beside what stood
# there -> its encoder tells of which package a passage is -> reports. Needs no GPU and no download beyond the packages;
# under 5 minutes on 2 cores: it measures a step, and makes as many steps (at most 800) as take two minutes here.
#
#   bash scripts/quickstart_t5.sh                     continue where the last call stopped
#   bash scripts/quickstart_t5.sh --fresh             start over
#   bash scripts/quickstart_t5.sh --train-iters 2000  another number of steps; other flags go to pretrain_t5.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source scripts/_steps.sh

RUN=runs/quickstart_t5
TRAINS=pretrain_t5.py
ITERATIONS=800
read_flags "$@"
if [ -n "$TEXT" ]; then
    rmdir "$RUN" 2>/dev/null
    stop "--text: the last steps of this one are about Python's packages" "-> bash scripts/quickstart.sh --text FILE"
fi
VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt" --vocab-extra-ids 100)
SAMPLES=(--seq-length 64 --decoder-seq-length 32 --mask-spans geometric --mask-max-ngram 8 --mask-prob 0.25)
export OMP_NUM_THREADS
OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2)

step 1/8 "A corpus from the documentation that comes with Python"
make_corpus

step 2/8 "A vocabulary of 1024 tokens, and 100 sentinels that stand for gaps"
make_vocabulary 1024

step 3/8 "Text to sentences, sentences to tokens"
preprocess() {
    python preprocess_data.py --input "$RUN/$1.jsonl" --output-prefix "$RUN/$1" "${VOCABULARY[@]}" --split-sentences --workers 2 |
        grep -E 'documents num|sentences num| [kM]B in '
}
for part in train held_out; do
    is_made "$RUN/${part}_text_sentence.idx" || told 1.5 preprocess "$part"
done

step 4/8 "Training an encoder-decoder of 2 million parameters, half of it in each of two processes"
t5() { # its width, and more flags
    with_script python -m megatron.tools.launch --nproc-per-node 2 pretrain_t5.py \
        --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size "$1" --num-attention-heads 4 "${SAMPLES[@]}" \
        --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \
        --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 \
        --micro-batch-size 8 --global-batch-size 32 \
        --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.98 \
        --precision auto "${VOCABULARY[@]}" --train-data-path "$RUN/train_text_sentence" "${@:2}" ${flags[@]+"${flags[@]}"}
}
steps_done
choose_size t5 192
echo "  $ITERATIONS steps of 32 samples"
expect_training 0.16
t5 192 --train-iters "$ITERATIONS" --valid-data-path "$RUN/held_out_text_sentence" \
    --eval-interval $((ITERATIONS < 400 ? ITERATIONS : 400)) --eval-iters 8 --eval-same-samples --log-interval 50 \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 400 --keep-last 2
samples() { # of text, as the model sees them
    python -m megatron.tools.dump_samples --model-type T5 --data-path "$RUN/$1_text_sentence" --split 1,0,0 "${SAMPLES[@]}" \
        --train-samples 2000 --first "$2" "${VOCABULARY[@]}" >"$RUN/$1_samples.jsonl"
}
count_tokens() { # a guess that looks at no text: each token as often as in training
    samples train 2000
    samples held_out 500
    python scripts/quickstart_t5.py unigram "$RUN"
}
is_made "$RUN/unigram.txt" || told 4 count_tokens
python scripts/quickstart_t5.py loss "$RUN"

step 5/8 "Gaps in sentences of held-out text: what it writes, beside the word that stood there"
fill() {
    python -m megatron.tools.generate --load "$RUN/checkpoints" --greedy --tokens-to-generate 10 --json \
        --prompt-file "$RUN/gaps.txt" >"$RUN/filled.jsonl.partial"
    mv "$RUN/filled.jsonl.partial" "$RUN/filled.jsonl"
}
python scripts/quickstart_t5.py gaps "$RUN"
told 3 fill
python scripts/quickstart_t5.py filled "$RUN" | tee "$RUN/checkpoints/samples.txt"

step 6/8 "Passages of eight packages, with the package as their label; no passage is in both files"
is_made "$RUN/task_valid.jsonl" || told 0.5 python scripts/quickstart_t5.py label "$RUN"

step 7/8 "A head on the trained encoder tells the package of a passage"
cat >"$RUN/task.yaml" <<'YAML'
name: packages
train: task_train.jsonl
valid: task_valid.jsonl
text: text
label: label
metrics: [accuracy, macro_f1]
YAML
# A step has half of the tokens of one of pretraining, and no decoder. At most 6 epochs, and so many as take a minute and a half.
STEPS=$(awk 'END { print int(NR / 16) }' "$RUN/task_train.jsonl") # of an epoch
EPOCHS=6
if [ -n "$SECONDS_A_STEP" ]; then
    A_STEP=$(awk "BEGIN { print 0.4 * $SECONDS_A_STEP }")
    EPOCHS=$(awk "BEGIN { n = int(90 / ($STEPS * $A_STEP)); print (n > 6 ? 6 : n < 1 ? 1 : n) }")
    expect "$(awk "BEGIN { print 10 + $EPOCHS * $STEPS * $A_STEP }")"
else
    takes "$(awk "BEGIN { print 10 + $EPOCHS * $STEPS * 0.06 }")"
fi
with_script python -m megatron.tools.launch --nproc-per-node 2 finetune.py --task "$RUN/task.yaml" --data-path "$RUN" \
    --pretrained-checkpoint "$RUN/checkpoints" --load "$RUN/tuned" --save "$RUN/tuned" \
    --pooling mean --seq-length 96 --micro-batch-size 8 --global-batch-size 16 --train-epochs "$EPOCHS" --lr 2e-3 \
    --lr-decay-style linear --lr-warmup-fraction 0.1 --precision auto --log-interval 100
python scripts/quickstart_t5.py right "$RUN"

step 8/8 "Two reports: the training, and the task"
told 2.5 python -m megatron.tools.report "$RUN/checkpoints" --output "$RUN/report.html" --title quickstart_t5
told 2.5 python -m megatron.tools.report "$RUN/tuned" --output "$RUN/task.html" --title "quickstart_t5, the task"

cat <<WORDS

${BOLD}Done.${PLAIN} Look at $RUN/report.html and $RUN/task.html in a browser. Then try:
  bash scripts/quickstart_t5.sh --train-iters 2000
  .venv/bin/python -m megatron.tools.generate --load $RUN/checkpoints --num-beams 4 --prompt "Return<extra_id_0> if there is none."
WORDS
