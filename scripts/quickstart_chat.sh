#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# From the quickstart's model to a chat in the browser: conversations about a hundred facts -> training on the answers -> questions
# in other words to the server. Needs no GPU and no download; about 2 minutes on 2 cores after scripts/quickstart.sh, which it
# runs if it has not run yet. It measures a step, and makes as many steps (at most 240) as take two minutes here.
#
#   bash scripts/quickstart_chat.sh                    continue where the last call stopped
#   bash scripts/quickstart_chat.sh --fresh            start over, from the quickstart's model
#   bash scripts/quickstart_chat.sh --train-iters 400  another number of steps; other flags go to finetune.py --task chat
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/_env.sh"
source scripts/_steps.sh

RUN=runs/quickstart_chat
MODEL=runs/quickstart/checkpoints
ITERATIONS=240
check_flags() { # finetune.py itself refuses wrong ones, before it trains
    [ -z "$TEXT" ] || stop "--text: conversations are about facts of this script" "-> docs/chat.md has the command for your own"
}
read_flags "$@"

step 1/4 "The quickstart's model"
is_made "$MODEL/latest_checkpointed_iteration.txt" || bash scripts/quickstart.sh

step 2/4 "Conversations about a hundred facts"
is_made "$RUN/train.jsonl" || python scripts/quickstart_chat.py talks "$RUN" | sed 's/^/  /'

step 3/4 "Training on the answers with two processes"
chat() { # nothing, and more flags
    OMP_NUM_THREADS=$(python -m megatron.mpu.cpu_threads 2) with_script python -m megatron.tools.launch --nproc-per-node 2 finetune.py \
        --task chat --train-data "$RUN/train.jsonl" --valid-data "$RUN/valid.jsonl" --chat-template plain --packing \
        --pretrained-checkpoint "$MODEL" --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 --precision auto \
        "${@:2}" ${flags[@]+"${flags[@]}"}
}
steps_done
LEAST=120 # fewer teach it nothing
choose_size chat model
echo "  $ITERATIONS steps"
expect_training 0.2
chat model --load "$RUN/checkpoints" --save "$RUN/checkpoints" --train-iters "$ITERATIONS" --log-interval 20
echo '{"do_sample": false}' >"$RUN/checkpoints/generation_config.json" # the page's answers are the likeliest ones, too

step 4/4 "Questions to the server, in words that it has not seen"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
python -m megatron.tools.serve --load "$RUN/checkpoints" --port "$port" --no-access-log >"$RUN/serve.log" 2>&1 &
server=$!
trap 'kill $server 2>/dev/null || true' EXIT
told 6 python scripts/quickstart_chat.py wait "http://127.0.0.1:$port"
python scripts/quickstart_chat.py ask "http://127.0.0.1:$port" "$RUN"
kill "$server"
wait "$server" || true

cat <<END

${BOLD}Done.${PLAIN} Now try:
  .venv/bin/python -m megatron.tools.serve --load $RUN/checkpoints
and open http://127.0.0.1:8000/ in a browser. docs/chat.md is about conversations of your own.
END
