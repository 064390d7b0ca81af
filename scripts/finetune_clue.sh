#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Fine-tune a pretrained model on the tasks of CLUE, one after the other, and keep a file for its leaderboard of each:
# [TASK ...] [flags]. Default: AFQMC TNEWS IFLYTEK CMNLI OCNLI CLUEWSC CSL C3 CHID CMRC2018 DRCD,
# those of them that are there.
#
#   DATA=clue CHECKPOINTS=checkpoints/gpt_cn bash scripts/finetune_clue.sh
#   DATA=clue CHECKPOINTS=checkpoints/gpt_cn bash scripts/finetune_clue.sh TNEWS AFQMC --train-epochs 5
#
# DATA, CHECKPOINTS, OUT: as in finetune_gpt_345M.sh; OUT/TASK/predictions has the files
source "$(dirname "$0")/_launch.sh"
tasks=()
while [ $# -gt 0 ] && [[ $1 != -* ]]; do
    tasks+=("$1")
    shift
done
if [ ${#tasks[@]} -eq 0 ]; then
    for task in AFQMC TNEWS IFLYTEK CMNLI OCNLI CLUEWSC CSL C3 CHID CMRC2018 DRCD; do # TNEWS or tnews; CLUEWSC2020, as it is published
        [ -z "$(find -L "${DATA:-clue}" -maxdepth 1 -type d \( -iname "$task" -o -iname "${task}2020" \) 2>&-)" ] || tasks+=("$task")
    done
    [ ${#tasks[@]} -gt 0 ] || fail 4 "${DATA:-clue} has no folder of a task of CLUE" "DATA=FOLDER bash $0 (with tnews, afqmc ... below it)"
fi
for task in "${tasks[@]}"; do
    (finetune_on_task "$task" "$@") || exit $?
done
