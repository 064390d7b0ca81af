# SPDX-License-Identifier: Apache-2.0
"""Suites with command lines of Megatron-LM's flags, or close to them, for `dialects.translate`.

Other flags are read as `settings.parse` reads them.
"""

from collections.abc import Callable

from megatron.settings.dialects.table import VARIABLE, Computed, Default, Dialect, NoEffect, epochs_unless, sentence
from megatron.settings.spelling import NO, YES

PROFILER, TABLES = ("-p", "--profiler_options"), ("state", "sorted_key", "timer_only")


def profiler_options(words: list[str], given: object = None) -> list[tuple[str, list[str]]]:
    """Translate PaddleNLP's profiler options to flags. Raises ValueError for an unknown option.

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
    flags = [("--profile", []), ("--profile-step-start", steps[:1]), ("--profile-step-end", steps[1:])]
    flags += [("--profile-dir", [path]) for path in [said.get("profile_path")] if path]
    flags += [("--profile-detailed", [])] * said.get("tracer_option", "").endswith("OpDetail")
    if said.get("tracer_option", "Default") not in ("Default", "OpDetail", "AllOpDetail"):
        raise ValueError(f"tracer_option={said['tracer_option']}: there is Default, OpDetail, AllOpDetail")
    ends = said.get("exit_on_finished", "").lower() in ("yes", "true", "t", "1")
    return flags + [("--exit-interval", steps[1:])] * ends


def tests_of(words, given):
    """PaddleNLP tests ten times as many batches as it validates."""
    ten = str(10 * int(words[0])) if words[0].isdecimal() else f"$((10 * {words[0]}))"
    tests = words[0].isdecimal() or VARIABLE.search(words[0]) and words[0].strip("${}").isidentifier()
    return [("--eval-iters", words), *[("--test-iters", [ten])] * bool(tests and "--test_iters" not in given)]


def unless(key: str, words: tuple[str, ...], why: str, flag: str) -> Computed:
    """Compute a flag that has no effect if another key has one of these values."""

    def computed(own, given):
        if key in given and given[key].value.lower() in words:
            raise NoEffect(f"{key} {given[key].value}: {why}, there as well")
        return [(flag, own)]

    return computed


CHINESE = "the vocabulary of gpt-cn is --tokenizer-type GPTChineseTokenizer --tokenizer-model FILE"
NONE = ("--lr_decay_style=none",)
CONSTANT = ("--lr_decay_style", ("none",), "the rate is --max_lr from the first step to the last")
NO_DROPOUT = ("--check_accuracy", YES, "training has no dropout")

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
--tokenizer_name_or_path  --tokenizer-model
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
-  --model_type=gpt --max_steps=-1|0 --use_amp|--use_sharding|--use_recompute|--check_accuracy=
--micro_bsz              --micro-batch-size
--global_bsz             --global-batch-size
--eval_steps             --eval-interval
--warmup_steps           --lr-warmup-iters
--save_total_limit       --keep-last
""",
    changed={
        "--input_dir": "token files of preprocess_data.py: their prefix",
        "--dp_degree": "replicas outside sharding: world = mp x sharding x pp x dp, asserted",
        "--model_name_or_path": "a shape, or a folder to --load; the vocabulary is in --vocab-file and --merge-file",
        "--use_amp": "formats op by op, first loss scale 2^15; --amp-level O2 is faster",
        "--global_batch_size": "micro-batches follow from it; the mean is over all tokens of the batch",
    },
    idle={
        "gradients are added in place anyway": "--enable_addto",
        "kernels are chosen by what is installed; fused or not, the result is the same": """--fuse_transformer --fuse
            --fuse_mt --fuse_qkv --fuse_attention_qkv --fuse_attention_ffn --fuse_sequence_parallel_allreduce
            --use_fused_rms_norm --use_fused_rope --use_fused_linear --use_fused_dropout_add""",
        "each machine makes the index maps that it does not find (--data-cache-path)": "--share_folder",
    },
    lost={
        "say --load DIR to resume, and add --finetune to load only its weights": "--continue_training",
        "layers are compiled by --torch-compile": "--to_static",
        f"a GPT is trained; {CHINESE}": "--model_type",
    },
    computed={
        **dict.fromkeys(PROFILER, profiler_options),
        "--num_train_epochs": epochs_unless("--max_steps"),
        "--eval_iters": tests_of,
        "--min_lr": unless(*CONSTANT, "--min-lr"),
        "--decay_steps": unless(*CONSTANT, "--lr-decay-iters"),
        "--warmup_rate": unless(*CONSTANT, "--lr-warmup-fraction"),
        "--hidden_dropout_prob": unless(*NO_DROPOUT, "--hidden-dropout"),
        "--attention_probs_dropout_prob": unless(*NO_DROPOUT, "--attention-dropout"),
    },
    defaults=(
        Default("--lr", "1e-4"),
        Default("--min-lr", "1e-5", NONE),
        Default("--lr-decay-style", "cosine"),
        Default("--lr-decay-iters", "360000", (*NONE, "--lr?decay?samples")),
        Default("--lr-warmup-fraction", "0.01", (*NONE, "--warmup_steps", "--lr?warmup?iters", "--lr?warmup?samples")),
        Default("--weight-decay", "0"),
        Default("--clip-grad", "0"),
        Default("--micro-batch-size", "8"),
        Default("--train-iters", "500000", ("--max_steps", "--num_train_epochs", "--train?epochs", "--train?samples")),
        Default("--log-interval", "1"),
        Default("--eval-interval", "500"),
        Default("--eval-iters", "10"),
        Default("--test-iters", "100", ("--eval_iters",)),
        Default("--save-interval", "500", where="--output_dir"),
        Default("--split", "949,50,1"),
    ),
    programs=("run_pretrain_static.py", "run_pretrain.py"),
    base=True,
)

# a flag of PaddleNLP's evaluation and generation -> its equivalent here
ELSEWHERE = {
    "--init-checkpoint-path": "--load",
    "--model-name": "--load (the checkpoint has its model and its vocabulary)",
    "--early-stopping": "--num-beams (its search ends by itself)",
    "--max-length": "--tokens-to-generate",
    "--min-length": "--min-tokens-to-generate",
}
# Words of PaddleNLP's and PaddleFleetX's command for token files
CREATE = "--input-path --model-name --tokenizer-name --data-format --data-impl --append-eos --json-key --chinese --cn-*"
_ROWS = [(key.replace("_", "-"), meaning) for key, meaning in PADDLENLP.table.items()]
THEIRS = {key for key, meaning in _ROWS if "=" not in key and key != meaning}  # flags that only PaddleNLP has
FALSE_ALONE = {key[:-1] for key, _ in _ROWS if key.endswith("=")}


def here_for(script: str) -> str:
    """The command for another suite's script of this name; "" for an unknown one."""
    return "pretrain_gpt.py" if script in PADDLENLP.programs else OURS.get(script) or INSTEAD.get(script, "")


def answer_of_paddlenlp(flag: str, words: list[str]) -> tuple[str, str]:
    """(why it has no effect, why it is refused) for a PaddleNLP flag, with dashes, that is no flag here; "" if neither.

    >>> answer_of_paddlenlp("--micro-bsz", ["8"])
    ('', 'has another name here: --micro-batch-size')
    >>> answer_of_paddlenlp("--to-static", ["false"])
    ('it asks for nothing', '')
    """
    key = "--" + flag[2:].replace("-", "_")
    lost, row = sentence(PADDLENLP.lost, key), PADDLENLP.table.get(key)
    if lost and len(words) == 1 and words[0].lower() in NO:
        return "it asks for nothing", ""
    refused = f"is not supported: {lost}" if lost else f"has another name here: {row}" if row else ""
    return sentence(PADDLENLP.idle, key) or "", refused


def defaults_of_paddlenlp(words: list[tuple[str, list[str]]], is_said: Callable[[str], bool]) -> list[str]:
    """Notes on defaults that differ for a command with PaddleNLP's flags. is_said: whether a flag's setting is given.

    >>> defaults_of_paddlenlp([("--use-amp", [])], lambda flag: True)
    ['--use-amp without a value is true here, and false in PaddleNLP']
    """
    flags = dict(words)
    alone = [flag for flag, values in flags.items() if flag in FALSE_ALONE and not values]
    notes = [f"{flag} without a value is true here, and false in PaddleNLP" for flag in alone]
    if len(THEIRS & set(flags)) < 3:
        return notes
    said = [*flags, *(f"{flag}={' '.join(values)}" for flag, values in words)]
    others = [one for one in PADDLENLP.defaults if not is_said(one.flag) and not any(map(one.is_said, said))]
    return notes + [PADDLENLP.defaults_note(others)] * bool(others)


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
    plans=("--world-size", "--world_size"),
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
    configs=dict(deepspeed_config="deepspeed"),
    base=True,
    as_is=True,
)


# Programs in the scripts of other suites, and the commands here that take their flags unchanged

# The prompts inside PaddleFleetX's programs
PROMPT, PROMPT_OF_EXPORTS = "Hi, GPT2. Tell me who Jack Ma is.", "Hi, GPT2. Tell me where is Beijing?"
_GENERATE, _GENERATE_EXPORTED = (
    f"-m megatron.tools.generate --prompt '{text}'" for text in (PROMPT, PROMPT_OF_EXPORTS)
)
# script or module -> the command here
OURS = {
    "gpt/preprocess_data.py": "-m megatron.tools.create_pretraining_data",  # PaddleFleetX's
    "preprocess_data.py": "preprocess_data.py",
    "merge_datasets.py": "merge_datasets.py",
    "create_pretraining_data.py": "-m megatron.tools.create_pretraining_data",
    "raw_trans_to_json.py": "-m megatron.tools.raw_trans_to_json",
    "shuf": "-m megatron.tools.shuf",
    "wikiextractor.WikiExtractor": "-m megatron.tools.wiki",
    "tools/eval.py": "-m megatron.tools.evaluate",
    "tools/export.py": "-m megatron.tools.export",
    "tools/auto_export.py": "-m megatron.tools.export",
    "tools/inference.py": "-m megatron.tools.generate",
    "tasks/gpt/generation.py": _GENERATE,
    "tasks/gpt/inference.py": _GENERATE,
    "projects/gpt/inference.py": _GENERATE_EXPORTED,
    "gpt/benchmark.py": "-m megatron.tools.benchmark_inference",
    **{
        f"{name}.py": f"-m megatron.tools.openwebtext.{name}"
        for name in """blacklist_urls download cleanup_dataset cleanup_fix_dataset find_duplicates group_duplicate_url
        remove_group_duplicates filter_ngrams""".split()
    },
}
# script -> the command here that takes other flags
_TEXT, _FIGURES = (f"python -m megatron.tools.{name} --load DIR" for name in ("generate", "evaluate"))
INSTEAD = {
    "run_eval.py": f"{_FIGURES} takes --eval_path and --overlapping_eval",
    "run_generation.py": f"{_TEXT} has --prompt, --top_k, --top_p and --temperature",
}
# commands of one process, which writes what each rank needs
ALONE = ("-m megatron.tools.export",)
