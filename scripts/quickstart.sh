#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The main job from end to end on real text: corpus -> vocabulary -> tokens -> training by two processes -> held-out
# perplexity -> samples -> report. Needs no GPU and no download beyond the packages; about 3 minutes: it
# measures a step, and chooses a size of the model and a number of steps (at most 600) that take two minutes here.
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

if [ -n "$TEXT" ]; then
    step 1/7 "$(basename "$TEXT"): a part of it is held out, from the vocabulary too"
else
    step 1/7 "A corpus from the documentation that comes with Python"
fi
make_corpus

step 2/7 "A vocabulary of 8192 tokens (byte-level BPE)"
make_vocabulary

step 3/7 "Text to tokens"
make_tokens

step 4/7 "Training a GPT with two processes: of 5 million parameters (256 wide), or 2 million (128) on a slower machine"
train_gpt 0.17 "256 128"

step 5/7 "Perplexity of text that was held out"
evaluate_held_out

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
echo "  Two minutes teach a small model words and form, and no sense: that takes a larger model and billions of tokens."

step 7/7 "A report: loss, learning rate, throughput, gradient norm"
write_report

cat <<END

${BOLD}Done.${PLAIN} Look at $RUN/report.html in a browser. Then try:
  $AGAIN --train-iters 2000
  .venv/bin/python -m megatron.tools.generate --load $RUN/checkpoints --prompt "$(head -n 1 "$RUN/prompts.txt" 2>/dev/null)" --top-p 0.9
END
