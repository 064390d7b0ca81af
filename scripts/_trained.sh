# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the scripts that use a trained model. They say: export_model SIZE RANKS "FLAGS", generate_text SIZE RANKS, or
# evaluate_model SIZE "FLAGS", and the words of the command line follow.
#
#   bash scripts/X.sh --dry-run     generation on so many devices, predicted: memory and time per token; nothing is read or written
#   SHRINK=1 bash scripts/X.sh      exports and texts: the same with a tiny model of this shape, which is trained for two steps here first
#   PRINT=1 bash scripts/X.sh       say the command and do nothing
#
# CHECKPOINTS is the folder of the trained model; EXPORT that of the export, which generate_text uses if it is set.
source "$(dirname "${BASH_SOURCE[0]}")/_launch.sh"

export_model() { # size, ranks that will share the model, flags of tools.export, words of the command line
    local size=$1 ranks=$2 folder=${CHECKPOINTS:-checkpoints/gpt_$1} out flags
    read -ra flags <<<"$3"
    FLAGS=("${@:4}")
    ! given --dry-run || predict "$size" "$ranks" export
    [ -z "${SHRINK:-}" ] || ranks=$((ranks > 1 ? 2 : 1))
    [ "$ranks" -eq 1 ] || flags+=(--tensor-model-parallel-size "$ranks")
    out=${EXPORT:-$folder-$(form "${flags[@]}" "${FLAGS[@]}")$([ "$ranks" -eq 1 ] || echo "-tp$ranks")}
    if [ -n "${SHRINK:-}" ]; then
        shrunk_model "$size" "$ranks"
        folder=$SHRUNK/checkpoints out=$SHRUNK/export
        if [ -n "${PRUNE:-}" ] && [ -z "${PRINT:-}" ]; then # of a script for a pruned model
            "$PYTHON" -m megatron.tools.prune --load "$folder" --save "$SHRUNK/pruned" "${PRUNE[@]}" >&2
            folder=$SHRUNK/pruned
        fi
    fi
    need_model "$folder"
    run_tool megatron.tools.export --load "$folder" --output "$out" "${flags[@]}" --then "${FLAGS[@]}"
}

generate_text() { # size, ranks that share the model, words of the command line; NPROC=N: another number of ranks
    local size=$1 model=(--load "${CHECKPOINTS:-checkpoints/gpt_$1}") own=(--tokens-to-generate 60)
    [ -z "${EXPORT:-}" ] || model=(--load-exported "$EXPORT")
    : "${NPROC:=$2}"
    FLAGS=("${@:3}")
    ! given --dry-run || predict "$size" "$NPROC"
    [ -n "${EXPORT:-}" ] || need_model "${model[1]}"
    choose_ranks 1
    if [ -n "${SHRINK:-}" ]; then
        NPROC=$((NPROC > 1 ? 2 : 1))
        shrunk_model "$size" "$NPROC"
        model=(--load "$SHRUNK/checkpoints") own=(--tokens-to-generate 8 --prompt "1 2 3" --device cpu)
    fi
    given --greedy --num-beams --config -c || own+=(--top-p 0.9 --temperature 0.8)
    given --prompt --prompt-file --sample-input-file --config -c || [ -n "${SHRINK:-}" ] || own+=(--prompt "The future of")
    [ "$NPROC" -eq 1 ] || given --tensor-model-parallel-size --tp --pipeline-model-parallel-size --pp --config -c ||
        own+=(--tensor-model-parallel-size "$NPROC")
    run_tool_on_ranks megatron.tools.generate "${model[@]}" "${own[@]}" --then "${FLAGS[@]}"
}

evaluate_model() { # size, flags of tools.evaluate, words of the command line; NPROC=N: so many ranks share the work
    local size=$1 folder=${CHECKPOINTS:-checkpoints/gpt_$1} flags
    refuse_to_shrink
    read -ra flags <<<"$2"
    FLAGS=("${@:3}")
    ! given --dry-run || predict "$size" 1 evaluation
    need_model "$folder"
    run_tool_on_ranks megatron.tools.evaluate --load "$folder" --micro-batch-size 8 \
        ${flags[@]+"${flags[@]}"} --then "${FLAGS[@]}"
}

need_model() { # folder: stop if the script's own folder is not there, and nobody gives another one
    [ -e "$1" ] || [ -n "${CHECKPOINTS:-}${SHRINK:-}${PRINT:-}" ] ||
        given --load --load-exported --model-dir --config -c --help -h ||
        fail 5 "there is no $1, where this script looks for a trained model" "CHECKPOINTS=FOLDER bash $0"
}

form() { # the format that the last of these flags says
    local word last=hf next=''
    for word in "$@"; do
        [ -z "$next" ] || last=$word
        next=''
        case $word in --format) next=yes ;; --format=*) last=${word#*=} ;; esac
    done
    echo "$last"
}

predict() { # size, ranks, what the script does if that is not predicted
    [ -n "${PRINT:-}" ] || echo "predicted: generation with the model of $1 on $2 rank$([ "$2" -eq 1 ] || echo s) of A100-80GB${3:+; not the $3 itself}"
    unset RANK LOCAL_RANK WORLD_SIZE
    run_tool megatron.tools.plan --mode inference --model-name-or-path "$1" --bf16 --vocab-size 50304 \
        --world-size "$2" --local-world-size "$(($2 < 8 ? $2 : 8))" --device-name A100-80GB \
        --tensor-model-parallel-size "$2" --pipeline-model-parallel-size 1 ${SHAPE[@]+"${SHAPE[@]}"}
}

shrunk_model() { # size, ranks: sets SHRUNK, a folder with checkpoints of a tiny model that so many ranks trained
    SHRUNK=$(mktemp -d)
    [ -z "${PRINT:-}" ] || return 0
    "$PYTHON" -m megatron.tools.shrink --model-name-or-path "$1" --mock-data --vocab-size 50304 \
        --tokenizer-type NullTokenizer --world-size "$2" --local-world-size "$2" --device-name A100-80GB \
        --tensor-model-parallel-size "$2" --micro-batch-size 1 --global-batch-size 8 --train-iters 3 --lr 1e-4 \
        --steps 2 --shrunk-dir "$SHRUNK/checkpoints" >"$SHRUNK/log" 2>&1 || { cat "$SHRUNK/log" >&2 && exit 1; }
    echo "a tiny model in $SHRUNK/checkpoints" >&2
}
