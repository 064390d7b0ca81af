# SPDX-License-Identifier: Apache-2.0
"""Suites whose runs are command lines with flags of Megatron-LM, or close to them, for `settings.translate`.

What is not named here is read as `settings.parse` reads it.
"""

from megatron.settings.dialects.table import Default, Dialect, epochs_unless

PROFILER, TABLES = ("-p", "--profiler_options"), ("state", "sorted_key", "timer_only")


def profiler_options(words: list[str], given: object = None) -> list[tuple[str, list[str]]]:
    """Flags for PaddleNLP's options of its profiler. Raises ValueError for what is none.

    >>> profiler_options(["batch_range=[50, 60]; profile_path=traces"])
    [('--profile', []), ('--profile-step-start', ['50']), ('--profile-step-end', ['60']), ('--profile-dir', ['traces'])]
    """
    said = dict(part.partition("=")[::2] for part in "".join(words).replace(" ", "").split(";") if part)
    for key in said:
        if key not in ("batch_range", "profile_path", "exit_on_finished", "tracer_option", *TABLES):
            raise ValueError(f"'{key}' is no option of the profiler: batch_range=[10,20];profile_path=DIR")
    steps = said.get("batch_range", "10,20").strip("[]").split(",")
    if len(steps) != 2 or not all(map(str.isdecimal, steps)):
        raise ValueError(f"batch_range={said['batch_range']}: the first step and the one to end before, as in [10,20]")
    found = [("--profile", []), ("--profile-step-start", steps[:1]), ("--profile-step-end", steps[1:])]
    found += [("--profile-dir", [path]) for path in [said.get("profile_path")] if path]
    found += [("--profile-detailed", [])] * said.get("tracer_option", "").endswith("OpDetail")
    if said.get("tracer_option", "Default") not in ("Default", "OpDetail", "AllOpDetail"):
        raise ValueError(f"tracer_option={said['tracer_option']}: there is Default, OpDetail, AllOpDetail")
    ends = said.get("exit_on_finished", "").lower() in ("yes", "true", "t", "1")
    return found + [("--exit-interval", steps[1:])] * ends


PADDLENLP = Dialect(
    "paddlenlp",
    "PaddleNLP",
    """
=  --model_name_or_path --micro_batch_size --global_batch_size --dp_degree --sharding_degree --min_lr --weight_decay
=  --eval_iters --test_iters --adam_beta1 --adam_beta2 --split --seed --device
--input_dir              --data-path
--output_dir             --save
--max_seq_len            --seq-length
--mp_degree              --tensor-model-parallel-size
--pp_degree              --pipeline-model-parallel-size
--max_lr                 --lr
--max_steps              --train-iters
--save_steps             --save-interval
--decay_steps            --lr-decay-iters
--warmup_rate            --lr-warmup-fraction
--grad_clip              --clip-grad
--logging_freq           --log-interval
--eval_freq              --eval-interval
--adam_epsilon           --adam-eps
--use_amp=true           --fp16; --amp-level O1; --initial-loss-scale 32768
--use_sharding=true      --sharding-stage 1
--use_recompute=true     --recompute-granularity full
--use_amp=false          --use-amp false
--use_sharding=false     --use-sharding false
--use_recompute=false    --use-recompute false
--check_accuracy=true    --hidden-dropout 0; --attention-dropout 0
--lr_decay_style=cosine  --lr-decay-style cosine
--lr_decay_style=none    --lr-decay-style constant
-  --model_type=gpt --max_steps=-1|0
""",
    changed={
        "--input_dir": "token files of preprocess_data.py: their prefix",
        "--dp_degree": "replicas outside sharding: world = mp x sharding x pp x dp, asserted",
        "--model_name_or_path": "a shape; weights are in --load, the vocabulary in --vocab-file and --merge-file",
        "--use_amp": "formats op by op, first loss scale 2^15; --amp-level O2 is faster",
        "--global_batch_size": "micro-batches follow from it; the mean is over all tokens of the batch",
    },
    idle={
        "gradients are added in place anyway": "--enable_addto",
        "text is not read while training": "--tokenizer_name_or_path",
    },
    lost={"Chinese texts have --tokenizer-type GPTChineseTokenizer --tokenizer-model FILE": "--model_type"},
    computed={**dict.fromkeys(PROFILER, profiler_options), "--num_train_epochs": epochs_unless("--max_steps")},
    defaults=(
        Default("--lr-decay-style", "cosine"),
        Default("--lr-decay-iters", "360000"),
        Default("--eval-iters", "10"),
        Default("--save-interval", "500"),
        Default("--split", "949,50,1"),
    ),
    programs=("run_pretrain_static.py", "run_pretrain.py"),
    base=True,
)

LLMACC = Dialect(
    "llmacc",
    "llmacc (PAI)",
    """
--max-global-batch-size  --max-global-batch-size; --auto-parallel
-  --task-type=llmacc.megatron.gpt
""",
    changed={
        "--max-global-batch-size": "the planner searches the layout, batch included, and says why (docs/planning.md)"
    },
    lost={"the task is a GPT; pretrain_bert.py and pretrain_t5.py take --auto-parallel, too": "--task-type"},
    programs=("llmacc.pretrain",),
    base=True,
    as_is=True,
)

MEGATRON_DEEPSPEED = Dialect(
    "megatron-deepspeed",
    "Megatron-DeepSpeed",
    """
--zero-stage                          --sharding-stage
--deepspeed-activation-checkpointing  --recompute-granularity full
--checkpoint-activations              --recompute-granularity full
--ds-sequence-parallel-size           --context-parallel-size; --cp-comm-type a2a
--cpu-optimizer                       --optimizer-cpu-offload
--remote-device=cpu                   --param-cpu-offload
-  --remote-device=none --no-pipeline-parallel
""",
    changed={"--ds-sequence-parallel-size": "Ulysses' exchange of tokens for heads; sequences stay whole in the data"},
    idle={
        "sharding, offloading and precision come from the flags": "--deepspeed --deepspeed-mpi --use-pin-memory",
        "activations that are computed again are divided by --sequence-parallel": "--partition-activations",
        "where they wait changes the speed alone": "--contigious-checkpointing --synchronize-each-layer --profile-backward",
    },
    lost={
        "tokens are counted in samples: tokens / --seq-length": "--train-tokens --lr-decay-tokens --lr-warmup-tokens",
        "activations stay on the device, or are computed again": "--checkpoint-in-cpu",
        "parameters stay on the device or on the host, not on disk": "--remote-device",
    },
    programs=("pretrain_gpt.py", "pretrain_llama.py"),
    base=True,
    as_is=True,
)
