# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by every script of a model, which then says: launch GPUS DEVICE FLAGS..., where so many GPUs of this kind are
# what its flags are made for. Words of the command line stand behind the flags and --then, and win over them.
#
#   bash scripts/X.sh --dry-run          what would happen; also --preflight, --print-config, --help: in one process
#   SHRINK=1 bash scripts/X.sh           a shrunk job with the same parallel features trains on CPU
#   PRINT=1 bash scripts/X.sh            say the command and do nothing
#   bash scripts/X.sh                    train: under our launcher or SLURM, on a cluster that numbers nodes, or here
#
# docs/launching.md explains the variables of the environment that are read here.
set -euo pipefail

ARGUMENTS=("$@")
NAME_DATA=(--data-path --input-dir --train-data-path --data-args-path --per-split-data-args-path --mock-data) # flags
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"

fail() { # exit code, lines
    printf 'error: %s\n' "$2" >&2
    [ $# -lt 3 ] || printf '  -> %s\n' "${@:3}" >&2
    exit "$1"
}

# shellcheck source=scripts/_python.sh
source "$ROOT/scripts/_python.sh"

launch() { # GPUs and device that the flags are made for, then flags of pretrain_gpt.py
    MADE_FOR=$1 DEVICE=$2 FLAGS=("${@:3}")
    local own=$(($# - 2 - ${#ARGUMENTS[@]}))
    [ ${#ARGUMENTS[@]} -eq 0 ] || FLAGS=("${FLAGS[@]:0:own}" --then "${FLAGS[@]:own}")
    add_environment
    if given --preflight && [ -n "${RANK:-}${SLURM_STEP_ID:-}${NNODES:-}${NPROC:-}" ]; then # on machines that are there
        add_mock_data
        find_ranks
        train
    elif given --dry-run --preflight --print-topology --print-config --help --help-all -h; then
        look pretrain_gpt.py
    elif [ -n "${SHRINK:-}" ]; then
        look -m megatron.tools.shrink
    else
        names_data ||
            fail 4 "there is no data to train on" \
                "DATA_PATH=PREFIX bash $0 (what preprocess_data.py wrote, without .bin)" \
                "or, for a trial on synthetic samples: bash $0 --mock-data"
        find_ranks
        [ -n "${PRINT:-}$EACH" ] || check_world # ranks that somebody has started check themselves
        train
    fi
}

prune_first() { # flags of tools.prune: before a training from PRETRAINED, which then is the pruned model
    local pruned=${CHECKPOINTS:-checkpoints/gpt}-pruned word
    [ -n "${PRETRAINED:-}" ] && [ -z "${SHRINK:-}" ] || return 0
    for word in ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}; do
        case $word in --dry-run | --preflight | --print-* | --help* | -h) return 0 ;; esac
    done
    local command=("$PYTHON" -m megatron.tools.prune --load "$PRETRAINED" --save "$pruned" "$@")
    PRETRAINED=$pruned
    if [ -n "${PRINT:-}" ]; then
        printf '%q ' "${command[@]}" && echo
    elif [ ! -e "$pruned/latest_checkpointed_iteration.txt" ]; then
        "${command[@]}"
    fi
}

run_tool() { # module, its flags
    run "$PYTHON" -m "$@"
}

run_tool_on_ranks() { # the same on NPROC ranks of this machine (default: one process)
    [ -z "${GPUS:-}" ] || export CUDA_VISIBLE_DEVICES=$GPUS
    choose_ranks 1
    [ "$NPROC" -gt 1 ] || run_tool "$@"
    choose_threads
    run "$PYTHON" -m megatron.tools.launch --standalone --nproc-per-node "$NPROC" -m "$@"
}

refuse_to_shrink() { # where there is no shrunk job
    [ -z "${SHRINK:-}" ] || fail 2 "SHRINK=1 is for training, texts and exports: $(basename "$0") has no shrunk job, run it without"
}

finetune_on_task() { # task, perhaps a set of its validation files, flags of finetune.py
    local task=$1 data=${DATA:-glue} flags=() out size
    refuse_to_shrink
    [ -n "$task" ] && [[ $task != -* ]] || fail 2 "which task?" "bash $0 SST2 (CoLA, MRPC, QQP, STSB, MNLI, QNLI, RTE, WNLI ...)"
    say_difference
    shift
    if [ $# -gt 0 ] && [[ $1 != -* ]]; then # the name of a set of validation examples
        flags+=(--valid-data "${1%.tsv}.tsv")
        shift
    fi
    out=${OUT:-runs/finetune}/$task
    choose_ranks 1
    size=$((32 / NPROC)) # PaddleFleetX's batch of 32, which the ranks share
    run_tool_on_ranks megatron.tasks.main --task "$task" --data-path "$data" \
        --pretrained-checkpoint "${CHECKPOINTS:-checkpoints/gpt_345M}" --save "$out" --load "$out" \
        --micro-batch-size $((size > 0 ? size : 1)) --log-interval 50 ${flags[@]+"${flags[@]}"} --then "$@"
}

say_difference() { # from PaddleFleetX's recipe of the same name: what the script's head says of it
    local said
    said=$(sed -nE '/^[^#]/q; /^# (Differs: |Learning rate, batch)/{s/^# //; /:$/{N; s/\n#//}; p}' "$0")
    [ -z "$said" ] || printf 'note: %s: %s\n' "$(basename "$0")" "$said" >&2
}

# ---- words of the command line ---------------------------------------------------------------------------------------

given() { # is one of these flags among FLAGS? _ is -, and the last word counts: --dry-run false asks for nothing
    local number word name value found=1
    for number in "${!FLAGS[@]}"; do
        word=${FLAGS[number]%%=*} value=${FLAGS[number + 1]:-}
        [ "$word" = "${FLAGS[number]}" ] || value=${FLAGS[number]#*=}
        for name in "$@"; do
            [ "${word//_/-}" != "$name" ] || case ${value,,} in false | no | off) found=1 ;; *) found=0 ;; esac
        done
    done
    return "$found"
}

overrides_data() { # PaddleFleetX's -o Data.Train.dataset.input_dir=FOLDER
    local word
    for word in "${FLAGS[@]}"; do
        case $word in Data.*input_dir=*) return 0 ;; esac
    done
    return 1
}

names_data() {
    given "${NAME_DATA[@]}" --config -c || overrides_data
}

add_environment() { # paths that belong to a site, not to a command line that is kept
    local words data=${DATA_PATH:-${DATA:-}} # DATA: Colossal-AI's name
    if [ -n "$data" ] && ! given "${NAME_DATA[@]}" && ! overrides_data; then
        read -ra words <<<"$data"
        FLAGS+=(--data-path "${words[@]}")
    fi
    [ -z "${VOCAB_FILE:-}" ] || given --vocab-file || FLAGS+=(--vocab-file "$VOCAB_FILE")
    [ -z "${MERGE_FILE:-}" ] || given --merge-file || FLAGS+=(--merge-file "$MERGE_FILE")
    [ -z "${TOKENIZER_MODEL:-}" ] || given --tokenizer-model --tokenizer-name-or-path || FLAGS+=(--tokenizer-model "$TOKENIZER_MODEL")
    if [ -n "${PRETRAINED:-}" ] && [ ! -e "${CHECKPOINTS:-}/latest_checkpointed_iteration.txt" ] && ! given --load; then
        FLAGS+=(--load "$PRETRAINED" --finetune) # until there is an own checkpoint
    fi
    if [ -n "${CHECKPOINTS:-}" ] && ! given --save --output-dir; then
        FLAGS+=(--save "$CHECKPOINTS")
        given --save-interval --save-steps --persistent-save-interval || FLAGS+=(--save-interval auto --async-save)
        given --load || FLAGS+=(--load "$CHECKPOINTS")
    fi
}

add_mock_data() { # for what needs no data
    names_data || FLAGS+=(--mock-data)
}

# ---- one process, before anything is started -------------------------------------------------------------------------

look() { # what to run: the flags on the ranks that they are made for
    say_difference
    add_mock_data
    given --world-size --num-gpus || FLAGS+=(--world-size "$MADE_FOR")
    given --local-world-size --gpus-per-node || FLAGS+=(--local-world-size "$((MADE_FOR < 8 ? MADE_FOR : 8))")
    given --device-name --calibration --device || FLAGS+=(--device-name "$DEVICE")
    unset RANK LOCAL_RANK WORLD_SIZE SLURM_STEP_ID # of a cluster that has set them: this is one process
    run_python "$@" "${FLAGS[@]}"
}

check_world() { # end with code 3 if the flags cannot work on the ranks that there are, before any of them is started
    given --auto-parallel && return # its layout is yet to be found
    local code=0 device=(--device-name "$DEVICE")
    given --calibration && device=()
    (unset RANK LOCAL_RANK SLURM_STEP_ID && "$PYTHON" "$ROOT/pretrain_gpt.py" "${FLAGS[@]}" --dry-run --world-size "$WORLD" \
        --local-world-size "$NPROC" ${device[@]+"${device[@]}"} --device-memory-gb 1e6 >/dev/null) || code=$?
    [ "$code" -eq 0 ] && return
    [ "$WORLD" -eq "$MADE_FOR" ] ||
        printf '  -> %s is made for %s ranks, and here are %s (%s nodes x %s); --dry-run shows it on %s\n' \
            "$(basename "$0")" "$MADE_FOR" "$WORLD" "$NNODES" "$NPROC" "$MADE_FOR" >&2
    exit "$code"
}

# ---- which ranks there are -------------------------------------------------------------------------------------------

number() { # variable, the least it may be; not set is well
    local value=${!1:-$2}
    [[ $value =~ ^(0|[1-9][0-9]{0,8})$ && ! $value -lt $2 ]] || fail 3 "$1=$value in the environment is no number from $2 on"
}

find_ranks() { # sets NNODES, NODE_RANK, NPROC, WORLD, and EACH where somebody has started a process for each rank
    EACH=''
    number RANK 0 && number WORLD_SIZE 1 && number LOCAL_RANK 0 && number NNODES 1 && number NODE_RANK 0
    if [ -n "${RANK:-}" ] && [ -n "${LOCAL_RANK:-}" ]; then # torchrun, or something like it
        [ -n "${WORLD_SIZE:-}" ] || fail 3 "RANK=$RANK and LOCAL_RANK=$LOCAL_RANK say which rank this is, and WORLD_SIZE is not set"
        number LOCAL_WORLD_SIZE 1
        EACH=yes WORLD=$WORLD_SIZE NPROC=${LOCAL_WORLD_SIZE:-$WORLD}
        NNODES=$((WORLD / NPROC))
        return
    fi
    if [ -n "${SLURM_STEP_ID:-}" ] && [ -n "${SLURM_STEP_NUM_NODES:-}" ]; then
        slurm_step
    elif [ -z "${PRINT:-}" ] && [ -n "${SLURM_JOB_ID:-}" ] && [ "${SLURM_NNODES:-1}" -gt 1 ]; then # on each node
        run srun --ntasks-per-node=1 bash "$0" ${ARGUMENTS[@]+"${ARGUMENTS[@]}"}
    elif [ -n "${RANK:-}" ] && [ -n "${WORLD_SIZE:-}" ]; then # one process a node, numbered as if nodes were ranks
        NNODES=$WORLD_SIZE NODE_RANK=$RANK
        : "${NPROC:=${LOCAL_WORLD_SIZE:-}}"
        unset RANK WORLD_SIZE LOCAL_WORLD_SIZE
    fi
    [ -z "$EACH" ] || return 0
    : "${NNODES:=1}" "${NODE_RANK:=0}"
    [ "$NNODES" -eq 1 ] || [ -n "${MASTER_ADDR:-}" ] || fail 2 "which is the first of $NNODES nodes?" "set MASTER_ADDR"
    [ "$NODE_RANK" -lt "$NNODES" ] || fail 3 "NODE_RANK (or RANK) is $NODE_RANK, and there are nodes 0 to $((NNODES - 1))" \
        "number them from 0, and set NNODES (or WORLD_SIZE) to how many there are"
    choose_ranks $((MADE_FOR / NNODES))
    WORLD=$((NNODES * NPROC))
}

choose_ranks() { # sets NPROC, ranks of this node: what somebody said, or so many if it has devices for them
    local devices
    case ${NPROC:-} in
    gpu | auto) NPROC=$(count_devices) ;; # torchrun's words
    0 | *[!0-9]*) fail 2 "NPROC=$NPROC (or LOCAL_WORLD_SIZE) is neither a number nor gpu" ;;
    esac
    devices=$(count_devices)
    if [ -n "${NPROC:-}" ]; then
        [ -z "${GPUS:-}" ] || [ "$NPROC" -le "$devices" ] ||
            fail 2 "NPROC=$NPROC is more ranks than GPUS=$GPUS has GPUs, $devices" "each rank needs one: change one of the two"
        [ "$NPROC" = "${LOCAL_WORLD_SIZE:-$NPROC}" ] ||
            echo "note: NPROC=$NPROC counts, and LOCAL_WORLD_SIZE=$LOCAL_WORLD_SIZE has no effect" >&2
        return
    fi
    NPROC=$1
    [ "$NPROC" -ge 1 ] && [ "$NPROC" -le "$devices" ] || NPROC=$devices
}

count_devices() { # that a process on this node may use: at least 1, the CPU
    local list=${GPUS:-${CUDA_VISIBLE_DEVICES:-}} count
    if [ -n "$list" ]; then
        count=$(tr -cd , <<<"$list" | wc -c)
        echo $((count + 1))
    elif [ -n "${SLURM_GPUS_ON_NODE:-}" ]; then
        echo "$SLURM_GPUS_ON_NODE"
    elif [ -n "${CUDA_VISIBLE_DEVICES+hidden}" ]; then
        echo 1
    else
        count=$( (nvidia-smi -L 2>/dev/null || true) | wc -l)
        echo $((count > 0 ? count : 1))
    fi
}

slurm_step() { # a task of srun: one for each node, or one for each rank
    NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID
    if [ -z "${MASTER_ADDR:-}" ]; then
        local first
        first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
        MASTER_ADDR=$(scontrol show node "$first" | sed -nE 's/.*NodeAddr=([^ ]+).*/\1/p')
    fi
    : "${MASTER_PORT:=$((20000 + (SLURM_JOB_ID * 16 + SLURM_STEP_ID + 97 * ${SLURM_RESTART_COUNT:-0}) % 10000))}"
    export MASTER_ADDR MASTER_PORT
    unset RANK WORLD_SIZE # what sbatch was given, perhaps in a session of another job
    [ "$SLURM_STEP_NUM_TASKS" -gt "$SLURM_STEP_NUM_NODES" ] || return 0
    EACH=yes WORLD=$SLURM_STEP_NUM_TASKS
    NPROC=$((WORLD / NNODES))
    export RANK=$SLURM_PROCID WORLD_SIZE=$WORLD LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$NPROC
    [ -z "${CUDA_VISIBLE_DEVICES:-}" ] || [[ $CUDA_VISIBLE_DEVICES == *,* ]] || LOCAL_RANK=0 # it sees its own GPU alone
}

# ---- training --------------------------------------------------------------------------------------------------------

train() {
    local command=("$PYTHON")
    [ -z "${GPUS:-}" ] || export CUDA_VISIBLE_DEVICES=$GPUS
    choose_threads
    if [ -z "$EACH" ] && { [ "$WORLD" -gt 1 ] || [ -n "${LOG_DIR:-}" ]; }; then
        command+=(-m megatron.tools.launch --nproc-per-node "$NPROC")
        if [ "$NNODES" -gt 1 ]; then
            command+=(--nnodes "$NNODES" --node-rank "$NODE_RANK")
            command+=(--master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}")
        else
            command+=(--standalone)
        fi
        # A file for each rank; the terminal shows the first one of each node.
        [ -z "${LOG_DIR:-}" ] || command+=(--log-dir "$LOG_DIR/ranks-of-node-$NODE_RANK")
    fi
    command+=("$ROOT/pretrain_gpt.py" "${FLAGS[@]}")
    [ "${RANK:-0}" -gt 0 ] || [ "${NODE_RANK:-0}" -gt 0 ] || say_difference
    if [ -n "${SUPERVISE:-}" ] && [ -z "$EACH" ]; then
        local patience=() logs=()
        [[ $SUPERVISE != -* ]] || read -ra patience <<<"$SUPERVISE"
        [ -z "${LOG_DIR:-}" ] || logs=(--log-dir "$LOG_DIR/supervisor-of-node-$NODE_RANK")
        command=(-m megatron.tools.supervise ${logs[@]+"${logs[@]}"} ${patience[@]+"${patience[@]}"} -- "${command[@]}")
        command=("$PYTHON" "${command[@]}")
    fi
    run "${command[@]}"
}

choose_threads() { # or torchrun warns, and gives each rank one
    if [ -z "${OMP_NUM_THREADS:-}" ] && [ -z "${PRINT:-}" ]; then
        OMP_NUM_THREADS=$("$PYTHON" -m megatron.mpu.cpu_threads "$NPROC")
        export OMP_NUM_THREADS
    fi
}

run_python() { # a script of the project, or -m module, and its arguments
    [ "$1" = -m ] || set -- "$ROOT/$1" "${@:2}"
    run "$PYTHON" "$@"
}

run() { # the command takes the place of this shell, so that signals reach it
    if [ -n "${PRINT:-}" ]; then
        printf '%s\n' "${GPUS:+CUDA_VISIBLE_DEVICES=$GPUS }$(printf '%q ' "$@")" # in one piece: several machines may speak at once
        exit
    fi
    exec "$@"
}
