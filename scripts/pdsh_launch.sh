#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# A script of a model on several machines at once, over ssh, where no scheduler does it. The first host is the meeting
# point; all need the same folder and the same code. When one of them ends badly, the others are ended.
#
#   HOSTS="node0 node1" bash scripts/pdsh_launch.sh scripts/pretrain_gpt_6.7B_sharding16.sh [FLAGS]
#   HOSTFILE=hosts.txt bash scripts/pdsh_launch.sh ...      a host a line; what follows it on the line is not read
#
# REMOTE is the command that reaches a host (default: ssh -tt -o BatchMode=yes). Variables of docs/launching.md go along.
set -euo pipefail

fail() {
    printf 'error: %s\n  -> %s\n' "$1" "$2" >&2
    exit 2
}

[ -f "${1:-}" ] || fail "which script?" "HOSTS=\"node0 node1\" bash $0 scripts/pretrain_X.sh [FLAGS]"
if [ -n "${HOSTFILE:-}" ]; then
    HOSTS=$(sed -E 's/#.*//; s/^[[:space:]]*([^[:space:]]*).*/\1/' "$HOSTFILE" | tr '\n' ' ')
fi
read -ra hosts <<<"${HOSTS:-}"
[ "${#hosts[@]}" -ge 1 ] || fail "on which machines?" "HOSTS=\"node0 node1\", or HOSTFILE=FILE"
read -ra remote <<<"${REMOTE:-ssh -tt -o BatchMode=yes}"

variables=()
for name in DATA_PATH VOCAB_FILE MERGE_FILE TOKENIZER_MODEL CHECKPOINTS GPUS NPROC MASTER_PORT SUPERVISE LOG_DIR PYTHON \
    OMP_NUM_THREADS PRINT; do
    [ -z "${!name:-}" ] || variables+=("$name=${!name}")
done
here=$(printf '%q' "$PWD")
started=()
trap 'kill "${started[@]}" 2>/dev/null || true' EXIT
for number in "${!hosts[@]}"; do
    words=$(printf '%q ' env ${variables[@]+"${variables[@]}"} "NNODES=${#hosts[@]}" "NODE_RANK=$number" \
        "MASTER_ADDR=${MASTER_ADDR:-${hosts[0]}}" bash "$@")
    "${remote[@]}" "${hosts[$number]}" "cd $here && exec $words" </dev/null &
    started+=($!)
done
code=0
for _ in "${started[@]}"; do
    wait -n || code=$?
    [ "$code" -eq 0 ] || break
done
exit "$code"
