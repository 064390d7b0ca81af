# SPDX-License-Identifier: Apache-2.0
"""Which settings work together: one table of rules, walked once, so that all violations are reported at once.

    resolve(config, world_size) -> config with derived values filled in, or SettingsError with every violation

Everything is pure; files are looked at later, by whoever opens them. A rule sees all settings under their own names in
one record `s`, beside `s.world` (ranks), `s.dp` (data parallel ranks) and `s.head` (width of a head).
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from os.path import realpath
from types import SimpleNamespace

from megatron.errors import DataError, SettingsError, numbered
from megatron.optimizer import lr_schedule as schedule
from megatron.pipeline import stages
from megatron.pipeline.own_schedule import is_file
from megatron.settings import batch, schema


def resolve(settings: schema.Config, world_size: int) -> schema.Config:
    """The settings with derived values filled in. Raises SettingsError with everything that cannot work."""
    found = check(settings, world_size)
    if settings.batch.micro_batch_size == schema.AUTO:
        found.append("--micro-batch-size auto: nothing chooses it here; give a number")
    if len(found) == 1:
        raise SettingsError(found[0])
    if found:
        raise SettingsError(f"{len(found)} settings cannot work:{numbered(found)}")
    return filled(settings, world_size)


def check(settings: schema.Config, world_size: int) -> list[str]:
    """Every violation on this many ranks, in the words of the flags, with values near by that would work.

    Of settings that leave the micro-batch open, what is wrong with every size of it.
    """
    open_size = _open_size(settings)
    found, settings = _out_of_range(replace(settings, batch=batch.smallest(settings.batch)))
    found += open_size
    s = _record(settings, world_size)
    found += [rule.say(s) for rule in RULES + NOT_YET if rule.broken(s)]
    found += stages.problems(settings.parallel, s.num_layers)
    if s.world % s.model_ranks == 0:  # otherwise there is no data parallel size to divide batches by
        found += batch.problems(settings.batch, s.dp)
    return found + schedule.problems(settings.optimizer, settings.batch, s.dp)


def layout_is_open(settings: schema.Config) -> bool:
    """Whether the planner has yet to choose the layout, or the micro-batch in it."""
    return settings.planner.auto_parallel or settings.batch.micro_batch_size == schema.AUTO


def remarks(settings: schema.Config, world_size: int) -> list[str]:
    """What works and is probably not meant, one sentence each: for the log, before training."""
    s = _record(settings, world_size)
    return [rule.say(s) for rule in REMARKS if rule.broken(s)]


def idle(settings: schema.Config, world_size: int) -> list[str]:
    """Those of the remarks that tell of settings without effect: harmless, and a sign that another one was forgotten."""
    s = _record(settings, world_size)
    return [rule.say(s) for rule in IDLE if rule.broken(s)]


def filled(c: schema.Config, world: int) -> schema.Config:
    """Derived values of settings in which nothing is wrong. Each field gets here what its help calls its default."""
    m, p, b, o, t = c.model, c.parallel, c.batch, c.optimizer, c.tokenizer
    dp = world // (p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size)
    by_iters = b.train_iters is not None and o.lr_decay_iters is None
    by_samples = b.train_samples is not None and o.lr_decay_samples is None
    return replace(
        c,
        model=replace(
            m,
            ffn_hidden_size=m.ffn_size,
            kv_channels=m.head_dim,
            num_query_groups=m.query_groups,
            max_position_embeddings=m.position_table,
        ),
        parallel=replace(
            p,
            data_parallel_size=dp,
            sharding_degree=p.sharding_degree or dp,
            sequence_parallel=p.sequence_parallel and p.tensor_model_parallel_size > 1,
        ),
        batch=replace(b, global_batch_size=batch.full_size(b, dp)),
        optimizer=replace(
            o,
            optimizer="adam",
            optimizer_cpu_offload=o.optimizer_cpu_offload or o.optimizer == "cpu_adam",
            lr_decay_iters=b.train_iters if by_iters else o.lr_decay_iters,
            lr_decay_samples=b.train_samples if by_samples else o.lr_decay_samples,
        ),
        tokenizer=replace(t, tokenizer_type=t.tokenizer_type or tokenizer_type(t, c.data.mock_data)),
    )


def tokenizer_type(t: schema.Tokenizer, mock_data: bool) -> str | None:
    """The type that the given files can only mean, as in Megatron-LM; numbers for mock data. None: not clear."""
    if t.vocab_file and t.merge_file:
        return "GPT2BPETokenizer"
    return "NullTokenizer" if mock_data and t.vocab_size and not t.tokenizer_model else None


# Ranges of single values ----------------------------------------------------------------------------------------------

RANGES = {  # what a value must be -> test, fields
    "at least 1": (
        lambda v: v >= 1,
        """
        num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size kv_channels
        num_query_groups make_vocab_size_divisible_by tensor_model_parallel_size pipeline_model_parallel_size
        context_parallel_size data_parallel_size num_layers_per_virtual_pipeline_stage num_virtual_stages_per_pipeline_rank
        decoder_first_pipeline_num_layers decoder_last_pipeline_num_layers sharding_degree vocab_size
        micro_batch_size global_batch_size train_samples eval_interval exit_interval cross_entropy_chunk
        save_retain_interval max_failed_saves keep_last check_replicas_interval log_interval loss_scale_window hysteresis
        spike_skip_steps recompute_num_layers max_global_batch_size world_size local_world_size top""",
    ),
    "at least 32": (lambda v: v >= 32, "spike_window"),  # spikes.ENOUGH: of fewer steps it judges none
    "at least 0": (
        lambda v: v >= 0,
        """
        train_iters eval_iters num_workers ckpt_step save_retries seed init_method_std weight_decay clip_grad min_lr
        lr_warmup_iters lr_warmup_samples max_rollbacks tune_steps rejected manual_gc_interval""",
    ),
    "above 0": (
        lambda v: v > 0,
        """
        norm_epsilon rotary_base adam_eps lr exit_duration_in_mins distributed_timeout_minutes peak_tflops loss_scale
        mean_time_to_interruption
        initial_loss_scale min_loss_scale spike_threshold device_memory_gb params tokens""",
    ),
    "at least 0 and below 1": (
        lambda v: 0 <= v < 1,
        """
        hidden_dropout attention_dropout label_smoothing adam_beta1 adam_beta2""",
    ),
    "at least 0 and at most 1": (
        lambda v: 0 <= v <= 1,
        """
        optimizer_offload_fraction nvme_offload_fraction""",
    ),
    "above 0 and at most 1": (lambda v: 0 < v <= 1, "rotary_percent"),
}


def _open_size(settings: schema.Config) -> list[str]:
    """What `--micro-batch-size auto` lacks: a batch whose part of each rank it can divide."""
    b, most = settings.batch, settings.planner.max_global_batch_size
    given = b.global_batch_size or b.local_batch_size or (most and not b.rampup_batch_size)
    if b.micro_batch_size != schema.AUTO or given:
        return []
    return ["--micro-batch-size auto needs --global-batch-size N: it divides what each rank has of it"]


def _out_of_range(settings: schema.Config) -> tuple[list[str], schema.Config]:
    """Violations of ranges, and the settings with harmless values in their place, so that other rules can go on."""
    found = []
    for name in schema.GROUPS:
        group = getattr(settings, name)
        wrong = out_of_range(group)
        found += wrong.values()
        harmless = {
            field.name: 1 if field.default in (MISSING, None) else field.default
            for field in fields(group)
            if field.name in wrong
        }
        settings = replace(settings, **{name: replace(group, **harmless)})
    return found, settings


def out_of_range(group) -> dict[str, str]:
    """field -> what is wrong with it, for the values of a group of settings that are wrong whatever the others are."""
    given = {field.name: getattr(group, field.name) for field in fields(group)}
    return {
        name: f"--{name.replace('_', '-')} {given[name]} must be {words}"
        for words, (works, names) in RANGES.items()
        for name in names.split()
        if given.get(name) is not None and not works(given[name])
    }


# Settings that depend on each other -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """`broken(s)` is true where the settings cannot work; `say(s)` tells so, with values that do."""

    broken: Callable[[SimpleNamespace], object]
    say: Callable[[SimpleNamespace], str]


def _record(settings: schema.Config, world: int) -> SimpleNamespace:
    s = SimpleNamespace(
        **{f.name: getattr(getattr(settings, g), f.name) for g in schema.GROUPS for f in fields(schema.GROUPS[g])}
    )
    s.tp, s.pp, s.cp = s.tensor_model_parallel_size, s.pipeline_model_parallel_size, s.context_parallel_size
    s.world, s.model_ranks = world, s.tp * s.pp * s.cp
    s.dp = max(1, world // s.model_ranks)
    s.head = s.kv_channels or max(1, s.hidden_size // s.num_attention_heads)
    s.groups, s.ffn = s.num_query_groups or s.num_attention_heads, settings.model.ffn_size
    s.host_share = settings.optimizer.host_share
    s.rotary = int(s.head * s.rotary_percent)
    s.paths = [name for name in ("train", "valid", "test") if getattr(s, f"{name}_data_path")]
    s.tokenizer = s.tokenizer_type or tokenizer_type(settings.tokenizer, s.mock_data)
    return s


RULES = (
    # Ranks.
    Rule(
        lambda s: s.parallel_plan and s.data_parallel_size and s.world != s.data_parallel_size * s.model_ranks,
        lambda s: (
            f"--parallel-plan {s.parallel_plan} is for {s.data_parallel_size * s.model_ranks} ranks (tensor "
            f"{s.tp} x pipeline {s.pp} x data {s.data_parallel_size}), and here are {s.world}; run on as many, or "
            f"plan for {s.world}"
        ),
    ),
    Rule(
        lambda s: s.world % s.model_ranks and not s.parallel_plan,
        lambda s: (
            f"{s.world} ranks cannot be divided by tensor x pipeline x context parallel size {s.tp} x {s.pp} x "
            f"{s.cp} = {s.model_ranks}; run on {_or(_multiples(s.world, s.model_ranks))} ranks, or choose sizes "
            f"whose product divides {s.world} ({_or(_divisors(s.world, s.model_ranks))}) by "
            "--tensor-model-parallel-size and --pipeline-model-parallel-size"
        ),
    ),
    Rule(
        lambda s: not s.parallel_plan and s.data_parallel_size not in (None, s.dp) and s.world % s.model_ranks == 0,
        lambda s: (
            f"--data-parallel-size {s.data_parallel_size} is not what there is: {s.world} ranks / ({s.tp} x "
            f"{s.pp} x {s.cp}) = {s.dp}; leave the flag out or run on {s.data_parallel_size * s.model_ranks} "
            "ranks"
        ),
    ),
    Rule(
        lambda s: s.sharding_degree and s.dp % s.sharding_degree,
        lambda s: (
            f"--sharding-degree {s.sharding_degree} does not divide the data parallel size {s.dp}; nearest: "
            f"{_or(_divisors(s.dp, s.sharding_degree))}"
        ),
    ),
    Rule(
        lambda s: is_file(s.pipeline_schedule) and s.rampup_batch_size,
        lambda s: (
            f"--pipeline-schedule {s.pipeline_schedule} is for one number of micro-batches, and "
            "--rampup-batch-size changes it; drop one of them"
        ),
    ),
    Rule(
        lambda s: s.num_attention_heads % s.tp,
        lambda s: (
            f"--num-attention-heads {s.num_attention_heads} is not a multiple of --tensor-model-parallel-size "
            f"{s.tp}; nearest: {_or(_multiples(s.num_attention_heads, s.tp))} heads, or tensor parallel size "
            f"{_or(_divisors(s.num_attention_heads, s.tp))}"
        ),
    ),
    *(
        Rule(
            lambda s, name=name: s.tp > 1 and s.num_attention_heads % s.tp == 0 and getattr(s, name) % s.tp,
            lambda s, name=name, what=what: (
                f"{what.format(getattr(s, name))} cannot be divided by "
                f"--tensor-model-parallel-size {s.tp}; nearest: {_or(_multiples(getattr(s, name), s.tp))}, or tensor "
                f"parallel size {_or(_divisors(getattr(s, name), s.tp))}"
            ),
        )
        for name, what in (("groups", "--num-query-groups {}"), ("ffn", "--ffn-hidden-size {}"))
    ),
    Rule(
        lambda s: s.sequence_parallel and s.seq_length % s.tp,
        lambda s: (
            f"--seq-length {s.seq_length} cannot be divided by --tensor-model-parallel-size {s.tp}, as "
            f"--sequence-parallel needs; nearest: {_or(_multiples(s.seq_length, s.tp))}"
        ),
    ),
    Rule(
        lambda s: s.param_cpu_offload and s.sharding_stage != 3,
        lambda s: "--param-cpu-offload needs --sharding-stage 3: other stages use all parameters where they are",
    ),
    Rule(
        lambda s: s.nvme_offload_fraction and not s.nvme_offload_dir,
        lambda s: (
            f"--nvme-offload-fraction {s.nvme_offload_fraction:g} needs --nvme-offload-dir, a folder on a fast disk "
            "of each node"
        ),
    ),
    Rule(
        lambda s: s.host_share + s.nvme_offload_fraction > 1 + 1e-9,
        lambda s: (
            f"--optimizer-offload-fraction {s.host_share:g} and --nvme-offload-fraction "
            f"{s.nvme_offload_fraction:g} are more than all of the optimizer's state together; at most "
            f"--optimizer-offload-fraction {1 - s.nvme_offload_fraction:g}, or leave it out: it is then what is "
            "not on disk"
        ),
    ),
    Rule(
        lambda s: (
            s.profile and not 1 <= s.profile_step_start < min(s.profile_step_end, 1 + (s.train_iters or math.inf))
        ),
        lambda s: (
            f"--profile-step-start {s.profile_step_start} and --profile-step-end {s.profile_step_end} leave nothing "
            f"to profile of iterations 1 to {s.train_iters or 'the last'}: profiling ends before the second one"
        ),
    ),
    Rule(
        lambda s: s.profile and any(not 0 <= rank < s.world for rank in s.profile_ranks or ()),
        lambda s: f"--profile-ranks {' '.join(map(str, s.profile_ranks))}: this job has the ranks 0 to {s.world - 1}",
    ),
    Rule(
        lambda s: s.torch_compile and (s.sharding_stage == 3 or s.sharding_stage and s.overlap_param_gather),
        lambda s: (
            "--torch-compile needs all parameters in place: drop it, or use --sharding-stage 2 without "
            "--overlap-param-gather"
        ),
    ),
    Rule(
        lambda s: s.torch_compile and s.gradient_accumulation_fusion,
        lambda s: "--torch-compile arranges products for weight gradients: drop it, or --gradient-accumulation-fusion",
    ),
    Rule(
        lambda s: s.device == "cpu" and s.distributed_backend == "nccl",
        lambda s: "--distributed-backend nccl needs --device cuda; CPUs talk through gloo (the default)",
    ),
    # The model.
    Rule(
        lambda s: s.kv_channels is None and s.hidden_size % s.num_attention_heads,
        lambda s: (
            f"--hidden-size {s.hidden_size} is not a multiple of --num-attention-heads {s.num_attention_heads}; "
            f"nearest: {_or(_multiples(s.hidden_size, s.num_attention_heads))}, or "
            f"{_or(_divisors(s.hidden_size, s.num_attention_heads))} heads (or set --kv-channels)"
        ),
    ),
    Rule(
        lambda s: s.num_query_groups and s.num_attention_heads % s.num_query_groups,
        lambda s: (
            f"--num-attention-heads {s.num_attention_heads} cannot be shared by --num-query-groups "
            f"{s.num_query_groups}; nearest: {_or(_divisors(s.num_attention_heads, s.num_query_groups))} groups"
        ),
    ),
    Rule(
        lambda s: s.group_query_attention and s.num_query_groups is None,
        lambda s: (
            "--group-query-attention needs --num-query-groups: 1, "
            f"{_or(_divisors(s.num_attention_heads, s.num_attention_heads**0.5))} ..."
        ),
    ),
    Rule(
        lambda s: (
            s.position_embedding_type == "learned_absolute"
            and s.max_position_embeddings
            and s.seq_length > s.max_position_embeddings
        ),
        lambda s: (
            f"--seq-length {s.seq_length} is longer than --max-position-embeddings {s.max_position_embeddings}; "
            f"lower the one, raise the other to {s.seq_length}, or use --position-embedding-type rope"
        ),
    ),
    Rule(
        lambda s: s.position_embedding_type == "rope" and (s.rotary % 2 or s.rotary < 2),
        lambda s: (
            f"rotary positions turn pairs: {s.rotary} of {s.head} (--rotary-percent {s.rotary_percent:g} of the "
            f"width of a head) is not an even number above zero; {_even_rotary(s)}"
        ),
    ),
    # The vocabulary.
    Rule(
        lambda s: s.tokenizer is None and not s.tokenizer_model,
        lambda s: (
            "no vocabulary is given; "
            + (
                "--vocab-size N is enough for --mock-data"
                if s.mock_data
                else "--vocab-file vocab.json --merge-file merges.txt, or --tokenizer-model FILE, or (for numbers "
                f"without text) --tokenizer-type NullTokenizer --vocab-size {s.vocab_size or 'N'}"
            )
        ),
    ),
    Rule(
        lambda s: _missing_for_tokenizer(s),
        lambda s: f"--tokenizer-type {s.tokenizer} needs {' and '.join(_missing_for_tokenizer(s))}",
    ),
    # The data.
    Rule(
        lambda s: not (s.mock_data or s.data_path or s.paths),
        lambda s: (
            "no data is given; --data-path PREFIX (of .bin/.idx files, from preprocess_data.py), "
            "--train-data-path and its like, or --mock-data for synthetic samples"
        ),
    ),
    Rule(
        lambda s: s.mock_data and (s.data_path or s.paths),
        lambda s: (
            f"--mock-data reads no files, and files are given ({', '.join(_given_paths(s))}); drop one or the other"
        ),
    ),
    Rule(
        lambda s: s.data_path and s.paths,
        lambda s: f"--data-path goes with --split, and {', '.join(_given_paths(s)[1:])} without; give one or the other",
    ),
    Rule(
        lambda s: s.paths and "train" not in s.paths and not s.data_path,
        lambda s: f"{', '.join(_given_paths(s))} without --train-data-path: there is nothing to train on",
    ),
    Rule(
        lambda s: s.data_path and not s.paths and _split(s.split) is None,
        lambda s: f"--split {s.split} must be up to three numbers for train,valid,test, as in 969,30,1",
    ),
    Rule(
        lambda s: s.data_path and not s.paths and _split(s.split) and not _split(s.split)[0],
        lambda s: f"--split {s.split} leaves nothing to train on; raise its first number",
    ),
    Rule(lambda s: _blend_problems(s), lambda s: "; ".join(_blend_problems(s))),
    # How long.
    Rule(
        lambda s: s.train_iters is None and s.train_samples is None,
        lambda s: "the length of training is missing; --train-iters N (steps) or --train-samples N",
    ),
    # Number formats.
    Rule(
        lambda s: s.precision == "fp16" and s.loss_scale is None and s.min_loss_scale > s.initial_loss_scale,
        lambda s: f"--min-loss-scale {s.min_loss_scale:g} is above --initial-loss-scale {s.initial_loss_scale:g}",
    ),
    Rule(
        lambda s: s.torch_compile and s.amp_level == "O1" and s.precision != "fp32",
        lambda s: "--amp-level O1 casts op by op, which --torch-compile does not see; drop one of them",
    ),
    # Recomputation.
    Rule(
        lambda s: s.recompute_granularity != "full" and (s.recompute_method or s.recompute_num_layers),
        lambda s: (
            "--recompute-method and --recompute-num-layers go with --recompute-granularity full, not with "
            f"{s.recompute_granularity or 'none'}; to spare layers, use --no-recompute-layers"
        ),
    ),
    Rule(
        lambda s: s.recompute_method == "block" and s.recompute_granularity == "full" and not s.recompute_num_layers,
        lambda s: "--recompute-method block needs --recompute-num-layers: how many layers of each stage to recompute",
    ),
    Rule(
        lambda s: (
            _layers(s.no_recompute_layers) is None or not _layers(s.no_recompute_layers) <= set(range(s.num_layers))
        ),
        lambda s: (
            f"--no-recompute-layers {s.no_recompute_layers} must be numbers of layers from 0 to "
            f"{s.num_layers - 1} with commas between, as in 0,{s.num_layers - 1}"
        ),
    ),
    # Checkpoints.
    Rule(
        lambda s: s.save_interval is not None and s.save_interval < 1 and s.save_interval != schema.AUTO,
        lambda s: f"--save-interval {s.save_interval} must be at least 1, or auto",
    ),
    *(
        Rule(
            lambda s, a=a, b=b: getattr(s, a) and getattr(s, b) and realpath(getattr(s, a)) == realpath(getattr(s, b)),
            lambda s, a=a, b=b: (
                f"--{a.replace('_', '-')} {getattr(s, a)} is --{b.replace('_', '-')} itself; give a folder "
                "on another disk"
            ),
        )
        for a, b in (("save_mirror", "save"), ("save_copy", "save"), ("save_copy", "save_mirror"))
    ),
    Rule(
        lambda s: s.save_mirror and "{}" in s.save_mirror,
        lambda s: "--save-mirror is a folder for saves that failed; a command for each checkpoint is --save-copy",
    ),
    *(
        Rule(
            lambda s, name=name, needs=needs: getattr(s, name) and not getattr(s, needs),
            lambda s, name=name, needs=needs, why=why: f"--{name.replace('_', '-')} needs --{needs}: {why}",
        )
        for name, needs, why in (
            ("save_interval", "save", "there is no folder to save into"),
            ("keep_last", "save", "there is no folder to keep checkpoints in"),
            ("save_retain_interval", "save", "there is no folder to keep checkpoints in"),
            ("save_mirror", "save", "the mirror takes what --save does not"),
            ("save_copy", "save", "there is nothing to copy"),
            ("async_save", "save", "there is no folder to save into"),
            ("finetune", "load", "there are no weights to start from"),
            ("ckpt_step", "load", "there is no folder to look in"),
            ("auto_resume", "load", "it says what to do when the folder is empty"),
        )
    ),
    Rule(
        lambda s: s.on_spike == "rollback" and not (s.save and s.save_interval),
        lambda s: "--on-spike rollback needs --save and --save-interval: there must be checkpoints to go back to",
    ),
    Rule(
        lambda s: s.override and not s.load,
        lambda s: f"--override {s.override} needs --load: there is no checkpoint to differ from",
    ),
    Rule(
        lambda s: s.finetune and s.auto_resume,
        lambda s: "--finetune needs a checkpoint in --load, and --auto-resume allows for none; drop one of them",
    ),
    Rule(lambda s: s.wandb_exp_name and not s.wandb_project, lambda s: "--wandb-exp-name needs --wandb-project"),
)

# Declared and not built yet: delete a row when its feature arrives.
NOT_YET = (Rule(lambda s: s.cp > 1, lambda s: f"--context-parallel-size {s.cp} is not built yet; leave it at 1"),)

# Settings that do nothing as things are.
IDLE = (
    Rule(
        lambda s: s.sequence_parallel and s.tp == 1,
        lambda s: "--sequence-parallel has no effect without --tensor-model-parallel-size above 1",
    ),
    Rule(
        lambda s: s.dp > 1 and s.sharding_degree not in (None, s.dp) and not s.sharding_stage,
        lambda s: f"--sharding-degree {s.sharding_degree} has no effect without --sharding-stage",
    ),
    Rule(
        lambda s: s.overlap_param_gather and not s.sharding_stage,
        lambda s: "--overlap-param-gather has no effect without --sharding-stage: nothing is gathered",
    ),
    Rule(
        lambda s: s.optimizer_offload_fraction != 1 and not (s.optimizer_cpu_offload or s.optimizer == "cpu_adam"),
        lambda s: (
            f"--optimizer-offload-fraction {s.optimizer_offload_fraction:g} has no effect without "
            "--optimizer-cpu-offload"
        ),
    ),
    Rule(
        lambda s: s.nvme_offload_dir and not s.nvme_offload_fraction,
        lambda s: f"--nvme-offload-dir {s.nvme_offload_dir} has no effect without --nvme-offload-fraction",
    ),
    Rule(
        lambda s: s.precision != "fp16" and s.loss_scale is not None,
        lambda s: f"--loss-scale {s.loss_scale:g} has no effect without --fp16",
    ),
    Rule(
        lambda s: (s.amp_custom_black_list or s.amp_custom_white_list) and s.amp_level != "O1",
        lambda s: "--amp-custom-black-list and --amp-custom-white-list have no effect without --amp-level O1",
    ),
    Rule(
        lambda s: s.no_recompute_layers and not s.recompute_granularity,
        lambda s: "--no-recompute-layers has no effect without --recompute-granularity",
    ),
    Rule(
        lambda s: s.position_embedding_type != "rope" and s.rotary_percent != 1,
        lambda s: f"--rotary-percent {s.rotary_percent:g} has no effect without --position-embedding-type rope",
    ),
)

REMARKS = (
    *IDLE,
    Rule(
        lambda s: s.precision == "fp16" and s.device == "cpu",
        lambda s: "--fp16 on a CPU is about 90 times as slow as fp32; --bf16 is made for it",
    ),
    Rule(lambda s: not s.save, lambda s: "--save is not given: nothing of this training will be kept"),
    Rule(
        lambda s: s.train_iters and s.eval_iters and s.eval_interval > s.train_iters,
        lambda s: (
            f"--eval-interval {s.eval_interval} is beyond --train-iters {s.train_iters}: "
            "evaluation happens at the end alone"
        ),
    ),
)


# Words for the rules --------------------------------------------------------------------------------------------------


def _multiples(value: int, of: int) -> list[int]:
    """The multiples of `of` below and above a value that is none."""
    return [n for n in (value // of * of, value // of * of + of) if n]


def _divisors(of: int, near: float) -> list[int]:
    """The two divisors of a number that lie nearest."""
    return sorted(sorted((n for n in range(1, of + 1) if of % n == 0), key=lambda n: abs(n - near))[:2])


def _or(values: Iterable[int]) -> str:
    return " or ".join(map(str, values))


def _even_rotary(s: SimpleNamespace) -> str:
    even = max(2, s.rotary // 2 * 2)
    return (
        f"--rotary-percent {even / s.head:g} rotates {even}" if even < s.head else f"choose heads wider than {s.head}"
    )


_TOKENIZER_NEEDS = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), "NullTokenizer": ("vocab_size",)}


def _missing_for_tokenizer(s: SimpleNamespace) -> list[str]:
    needs = _TOKENIZER_NEEDS.get(s.tokenizer, ("tokenizer_model",)) if s.tokenizer else ()
    return [f"--{name.replace('_', '-')}" for name in needs if not getattr(s, name)]


def _given_paths(s: SimpleNamespace) -> list[str]:
    return ["--data-path"] * bool(s.data_path) + [f"--{name}-data-path" for name in s.paths]


def _layers(text: str | None) -> frozenset[int] | None:
    """The numbers of --no-recompute-layers, or None if they are none."""
    try:
        return schema.Recompute(no_recompute_layers=text).exempt_layers
    except ValueError:
        return None


def _split(text: str) -> list[float] | None:
    """The parts of --split, or None if they are none."""
    try:
        parts = [float(word) for word in text.replace("/", ",").split(",")]
    except ValueError:
        return None
    return parts if len(parts) <= 3 and min(parts) >= 0 and 0 < sum(parts) < math.inf else None


def _blend_problems(s: SimpleNamespace) -> list[str]:
    """What is wrong with lists of weights and prefixes."""
    found = []
    for flag in _given_paths(s):
        words = getattr(s, flag[2:].replace("-", "_"))
        if len(words) == 1 and len(words[0].split()) > 1 and _number(words[0].split()[0]) is not None:
            found.append(f"{flag} '{words[0]}' is one word for the shell; leave out the quotes")
            continue
        from megatron.data.blend import parse_blend  # it imports numpy, for which other checks need not wait

        try:
            parse_blend(words, flag)
        except DataError as error:
            found.append(f"{error.what}; {error.do}")
    return found


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None
