#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# An encoder-decoder from end to end on real text: corpus -> vocabulary -> sentences -> spans masked and written back, by a
# pipeline of two processes -> loss on held-out text beside that of counting tokens -> gaps filled in, beside what stood
# there -> the same model tells of which package a passage is. Needs no GPU and no download beyond the packages; under 5
# minutes on 2 cores.
#
#   bash scripts/quickstart_t5.sh                     continue where the last call stopped
#   bash scripts/quickstart_t5.sh --fresh             start over
#   bash scripts/quickstart_t5.sh --train-iters 2000  another number of steps; other flags go to pretrain_t5.py
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source scripts/_steps.sh

RUN=runs/quickstart_t5
ITERATIONS=800
read_flags "$@"
VOCABULARY=(--tokenizer-type GPT2BPETokenizer --vocab-file "$RUN/vocab.json" --merge-file "$RUN/merges.txt" --vocab-extra-ids 100)
SAMPLES=(--seq-length 64 --decoder-seq-length 32 --mask-spans geometric --mask-max-ngram 8 --mask-prob 0.25)
export OMP_NUM_THREADS
OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2)

step 1/7 "A corpus from the documentation that comes with Python"
make_corpus

step 2/7 "A vocabulary of 1024 tokens, and 100 sentinels that stand for gaps"
make_vocabulary 1024

step 3/7 "Text to sentences, sentences to tokens"
preprocess() {
    python preprocess_data.py --input "$RUN/$1.jsonl" --output-prefix "$RUN/$1" "${VOCABULARY[@]}" --split-sentences --workers 2 |
        grep -E 'documents num|sentences num| MB in '
}
for part in train held_out; do
    is_made "$RUN/${part}_text_sentence.idx" || told 1.5 preprocess "$part"
done

step 4/7 "Training an encoder-decoder of 2 million parameters for $ITERATIONS steps, half of it in each of two processes"
takes "$(awk "BEGIN { print 6 + $ITERATIONS * 0.16 }")"
others
python -m megatron.tools.launch --nproc-per-node 2 pretrain_t5.py \
    --encoder-num-layers 2 --decoder-num-layers 2 --hidden-size 192 --num-attention-heads 4 "${SAMPLES[@]}" \
    --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 \
    --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 \
    --micro-batch-size 8 --global-batch-size 32 --train-iters "$ITERATIONS" \
    --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 --weight-decay 0.1 --adam-beta2 0.98 \
    --precision auto "${VOCABULARY[@]}" \
    --train-data-path "$RUN/train_text_sentence" --valid-data-path "$RUN/held_out_text_sentence" \
    --eval-interval 400 --eval-iters 8 --log-interval 50 \
    --save "$RUN/checkpoints" --load "$RUN/checkpoints" --save-interval 400 --keep-last 2 ${flags[@]+"${flags[@]}"}
samples() { # of text, as the model sees them
    python -m megatron.tools.dump_samples --model-type T5 --data-path "$RUN/$1_text_sentence" --split 1,0,0 "${SAMPLES[@]}" \
        --train-samples 2000 --first "$2" "${VOCABULARY[@]}" >"$RUN/$1_samples.jsonl"
}
count_tokens() { # a guess that looks at no text: each token as often as in training
    samples train 2000
    samples held_out 500
    python - "$RUN" <<'PYTHON'
import collections, json, math, sys
run = sys.argv[1]
read = lambda part: [token for line in open(f"{run}/{part}_samples.jsonl") for token in json.loads(line)["labels"]]
counts, targets = collections.Counter(read("train")), read("held_out")
share = lambda token: (counts[token] + 0.5) / (counts.total() + 0.5 * 1200)
open(f"{run}/unigram.txt", "w").write(f"{sum(-math.log(share(token)) for token in targets) / len(targets)}\n")
PYTHON
}
is_made "$RUN/unigram.txt" || told 4 count_tokens
python - "$RUN" <<'PYTHON'
import json, math, sys
run = sys.argv[1]
found = [json.loads(line) for line in open(f"{run}/checkpoints/metrics.jsonl")]
loss = [record["lm loss"] for record in found if record["kind"] == "eval"][-1]
guess = float(open(f"{run}/unigram.txt").read())
print(f"  on held-out text: loss {loss:.2f}, as unsure as among {math.exp(loss):.0f} tokens")
print(f"  who only knows how often each token comes: {guess:.2f}, {math.exp(guess):.0f} tokens")
PYTHON

step 5/7 "Gaps in sentences of held-out text: what it writes, beside the word that stood there"
choose_gaps() {
    python - "$RUN" <<'PYTHON'
import json, random, re, sys
run, draw, found = sys.argv[1], random.Random(1), []
for line in open(f"{run}/held_out.jsonl"):
    for text in re.split(r"\n\n+", json.loads(line)["text"]):
        text = " ".join(text.split())
        words = [word for word in re.finditer(r"(?<= )[a-z]+(?= )", text) if word.start() > 15]
        if 60 < len(text) < 120 and re.match(r"[A-Z].*\.$", text) and words:
            word = draw.choice(words)
            found.append((text[: word.start() - 1] + "<extra_id_0>" + text[word.end() :], word.group()))
found = draw.sample(found, min(200, len(found)))
open(f"{run}/gaps.txt", "w").writelines(f"{text}\n" for text, _ in found)
open(f"{run}/gaps_words.txt", "w").writelines(f"{word}\n" for _, word in found)
PYTHON
}
fill() {
    python -m megatron.tools.generate --load "$RUN/checkpoints" --greedy --tokens-to-generate 10 --json \
        --prompt-file "$RUN/gaps.txt" >"$RUN/filled.jsonl.partial"
    mv "$RUN/filled.jsonl.partial" "$RUN/filled.jsonl"
}
choose_gaps
told 3 fill
python - "$RUN" <<'PYTHON'
import collections, json, sys
run = sys.argv[1]
words = open(f"{run}/gaps_words.txt").read().split()
told = [json.loads(line) for line in open(f"{run}/filled.jsonl")]
filled = [one["text"].partition("<extra_id_0>")[2].partition("<extra_id_")[0].strip() for one in told]
right = [(one["prompt"], word) for one, own, word in zip(told, filled, words) if own == word]
wrong = [(one["prompt"], f"{own} (there stood: {word})") for one, own, word in zip(told, filled, words) if own != word]
for prompt, answer in right[:4] + wrong[:4]:
    print(f"  | {prompt.replace('<extra_id_0>', ' ____')} -> {answer}")
[(common, count)] = collections.Counter(words).most_common(1)
print(f"  the very word in {len(right) / len(words):.0%} of {len(words)} gaps; {common!r} everywhere: {count / len(words):.0%}")
if len(right) <= count:
    print("  so it has not learned yet to look at what stands around a gap: that takes more steps than these")
PYTHON

step 6/7 "Passages of eight packages, with the package as their label; no passage is in both files"
label() {
    python - "$RUN" <<'PYTHON'
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
PYTHON
    wc -l "$RUN"/task_*.jsonl
}
is_made "$RUN/task_valid.jsonl" || told 0.5 label

step 7/7 "A head on the trained model tells the package of a passage"
cat >"$RUN/task.yaml" <<'YAML'
name: packages
train: task_train.jsonl
valid: task_valid.jsonl
text: text
label: label
metrics: [accuracy, macro_f1]
YAML
python -m megatron.tools.launch --nproc-per-node 2 finetune.py --task "$RUN/task.yaml" --data-path "$RUN" \
    --pretrained-checkpoint "$RUN/checkpoints" --load "$RUN/tuned" --save "$RUN/tuned" \
    --seq-length 96 --micro-batch-size 8 --global-batch-size 16 --train-epochs 6 --lr 2e-3 --lr-decay-style linear \
    --lr-warmup-fraction 0.1 --precision auto --log-interval 100
python - "$RUN" <<'PYTHON'
import collections, json, math, re, sys
run = sys.argv[1]
train, valid = ([json.loads(line) for line in open(f"{run}/task_{part}.jsonl")] for part in ("train", "valid"))
labels = collections.Counter(row["label"] for row in valid)
told = [json.loads(line) for line in open(f"{run}/tuned/metrics.jsonl")]
best = [record for record in told if record["kind"] == "eval" and record["final"] and "accuracy" in record][-1]
print(f"  right: {best['accuracy']:.1%} of {labels.total()} passages; {max(labels.values()) / labels.total():.1%} are of one package")
words_of, texts = collections.defaultdict(collections.Counter), collections.Counter()
for row in train:
    words_of[row["label"]].update(re.findall(r"\w+", row["text"].lower()))
    texts[row["label"]] += 1
size = len(set().union(*words_of.values()))
def score(label, text):
    counts, total = words_of[label], words_of[label].total()
    words = re.findall(r"\w+", text.lower())
    return math.log(texts[label]) + sum(math.log((counts[word] + 0.5) / (total + 0.5 * size)) for word in words)
guessed = sum(max(texts, key=lambda label: score(label, row["text"])) == row["label"] for row in valid)
print(f"  who counts the words of each package (naive Bayes): {guessed / len(valid):.1%}; names tell most of it")
PYTHON

cat <<WORDS

${BOLD}Done.${PLAIN} Then try:
  bash scripts/quickstart_t5.sh --train-iters 2000
  .venv/bin/python -m megatron.tools.generate --load $RUN/checkpoints --num-beams 4 --prompt "Return<extra_id_0> if there is none."
WORDS
