#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An encoder-decoder from end to end on real text: corpus -> vocabulary -> sentences -> spans masked and written back, by a
# pipeline of two processes -> loss on held-out text -> gaps filled in -> the same model tells of which package a passage is.
# Needs no GPU and no download beyond the packages; under 5 minutes on 2 cores.
#
#   bash scripts/quickstart_t5.sh                     continue where the last call stopped
#   bash scripts/quickstart_t5.sh --fresh             start over
#   bash scripts/quickstart_t5.sh --train-iters 2000  another number of steps; other flags go to pretrain_t5.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source scripts/_steps.sh

RUN=runs/quickstart_t5
ITERATIONS=400
read_flags "$@"
VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt" --vocab-extra-ids 100)
export OMP_NUM_THREADS
OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2)

step 1/7 "A corpus from the documentation that comes with Python"
make_corpus

step 2/7 "A vocabulary of 8192 tokens, and 100 sentinels that stand for gaps"
make_vocabulary

step 3/7 "Text to sentences, sentences to tokens"
preprocess() {
    python preprocess_data.py --input "$RUN/$1.jsonl" --output-prefix "$RUN/$1" "${VOCABULARY[@]}" --split-sentences --workers 2 |
        grep -E 'documents num|sentences num| MB in '
}
for part in train held_out; do
    is_made "$RUN/${part}_text_sentence.idx" || told 1.5 preprocess "$part"
done

step 4/7 "Training an encoder-decoder of 8 million parameters for $ITERATIONS steps, half of it in each of two processes"
takes "$(awk "BEGIN { print 6 + $ITERATIONS * 0.24 }")"
others
python -m megatron.tools.launch --nproc-per-node 2 pretrain_t5.py \
    --encoder-num-layers 3 --decoder-num-layers 3 --hidden-size 256 --num-attention-heads 4 \
    --seq-length 128 --decoder-seq-length 64 --hidden-dropout 0 --attention-dropout 0 \
    --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 \
    --micro-batch-size 4 --global-batch-size 16 --train-iters "$ITERATIONS" \
    --lr 1.5e-3 --min-lr 1.5e-4 --lr-decay-style cosine --lr-warmup-fraction 0.03 --weight-decay 0.1 --adam-beta2 0.95 \
    --precision auto "${VOCABULARY[@]}" \
    --train-data-path "$RUN/train_text_sentence" --valid-data-path "$RUN/held_out_text_sentence" \
    --eval-interval 200 --eval-iters 8 --log-interval 20 \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 200 --keep-last 2 ${flags[@]+"${flags[@]}"}

step 5/7 "Gaps that it fills in: the likeliest words, by beam search"
fill() {
    python -m megatron.tools.generate --load "$RUN/checkpoints" --num-beams 4 --tokens-to-generate 12 --prompt \
        "Return a new <extra_id_0> object." "Raise <extra_id_0> if the file does not exist." \
        "The default value of this argument is <extra_id_0>." >"$RUN/gaps.txt.partial"
    mv "$RUN/gaps.txt.partial" "$RUN/gaps.txt"
}
rm -f "$RUN/gaps.txt"
told 5 fill
sed 's/^/  | /' "$RUN/gaps.txt"

step 6/7 "Passages of eight packages, with the package as their label; no passage is in both files"
label() {
    python - "$RUN" <<'END'
import hashlib, json, sys
packages = "asyncio email http importlib tkinter turtle unittest xml".split()
files = {part: open(f"{sys.argv[1]}/{part}.jsonl", "w") for part in ("task_train", "task_valid")}
for line in [*open(f"{sys.argv[1]}/train.jsonl"), *open(f"{sys.argv[1]}/held_out.jsonl")]:
    page = json.loads(line)
    package = page["source"].removeprefix("docs/").partition(".")[0]
    if package in packages:
        for passage in page["text"].split("\n\n"):
            text = " ".join(passage.replace(package, "").split())
            held_out = hashlib.sha256(text.encode()).digest()[0] < 40
            if len(text) > 80:
                print(json.dumps(dict(text=text, label=package)), file=files["task_valid" if held_out else "task_train"])
END
    wc -l "$RUN"/task_*.jsonl
}
is_made "$RUN/task_valid.jsonl" || told 0.5 label

step 7/7 "A head on the trained model tells the package of a passage"
cat >"$RUN/task.yaml" <<'END'
name: packages
train: task_train.jsonl
valid: task_valid.jsonl
text: text
label: label
metrics: [accuracy, macro_f1]
END
python -m megatron.tools.launch --nproc-per-node 2 finetune.py --task "$RUN/task.yaml" --data-path "$RUN" \
    --pretrained-checkpoint "$RUN/checkpoints" --load "$RUN/tuned" --save "$RUN/tuned" \
    --seq-length 64 --micro-batch-size 8 --global-batch-size 16 --train-epochs 3 --lr 5e-4 --lr-decay-style linear \
    --lr-warmup-fraction 0.1 --precision auto --log-interval 50
python - "$RUN" <<'END'
import collections, json, sys
run = sys.argv[1]
labels = collections.Counter(json.loads(line)["label"] for line in open(f"{run}/task_valid.jsonl"))
told = [json.loads(line) for line in open(f"{run}/tuned/metrics.jsonl")]
best = [record for record in told if record["kind"] == "eval" and record["final"] and "accuracy" in record][-1]
print(f"  right: {best['accuracy']:.1%} of {labels.total()} passages ({max(labels.values()) / labels.total():.1%} are of one package)")
END

cat <<END

${BOLD}Done.${PLAIN} Then try:
  bash scripts/quickstart_t5.sh --train-iters 2000
  .venv/bin/python -m megatron.tools.generate --load $RUN/checkpoints --num-beams 4 --prompt "Returns <extra_id_0> if there is none."
END
