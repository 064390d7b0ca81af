#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A mixture of 8 experts on real text: corpus -> vocabulary -> tokens -> training by two processes, which hold four experts of
# each layer -> held-out perplexity -> loads of experts. Needs no GPU and no download; about 4 minutes: it
# measures a step, and makes as many steps (at most 600) as take two minutes here.
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

step 1/5 "A corpus, and a vocabulary of 8192 tokens"
make_corpus
make_vocabulary

step 2/5 "Text to tokens"
make_tokens

step 3/5 "Training: 8 experts in each layer, 2 for each token, as wide together as the MLP of quickstart.sh"
train_gpt 0.25 256 --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 512 --expert-model-parallel-size 2 \
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3

step 4/5 "Perplexity of text that was held out"
evaluate_held_out

step 5/5 "Tokens of each expert in the last logged step, in per cent of an equal share"
python - "$RUN/metrics.jsonl" <<'PYTHON'
import json, sys
steps = [json.loads(line) for line in open(sys.argv[1], encoding="utf-8") if '"kind": "experts"' in line]
for layer, loads in steps[-1]["loads"].items() if steps else ():
    print(f"  {layer:9s}", *(f"{100 * load * len(loads) / sum(loads):5.0f}" for load in loads))
PYTHON
write_report
echo
echo "${BOLD}Done.${PLAIN} Look at $RUN/report.html in a browser."
