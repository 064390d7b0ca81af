# SPDX-License-Identifier: Apache-2.0
"""The rules and remarks about settings that need no other package, and the check of these and others (`rules`)."""

import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, replace
from os.path import realpath
from types import SimpleNamespace

from megatron.settings import schema
from megatron.settings.declare import dashed, declared
from megatron.settings.dialects.hints import lacks_vocabulary
from megatron.settings.groups.tokenizer import WORD_PIECE
from megatron.settings.hybrid_pattern import CUT
from megatron.settings.presets import where_to_put
from megatron.settings.rules import (
    LAYOUT,
    REPLICAS,
    Rule,
    alone,
    divisors,
    either,
    multiples,
    of_the_checkpoint,
    out_of_range,
    ranks_in_words,
    ranks_needed,
    record,
    said,
    start_them,
    too_few,
)
from megatron.settings.statements import in_users_words
from megatron.storage.urls import UrlPath, local_folder, location


def violations(settings: schema.Config, world_size: int, rules: Iterable["Rule"]) -> tuple[list[str], SimpleNamespace]:
    """Check these rules and those of this module. Returns (violations, the record that rules see).

    Values out of range are reported, and replaced by harmless ones so that other rules can be checked.
    """
    open_size = _open_size(settings)
    wrong, settings = _out_of_range(replace(settings, batch=settings.batch.smallest()))
    s = record(settings, world_size)
    s.stand_ins = set(wrong)
    broken = of_given_values([rule.message(s) for rule in (*RULES, *rules) if rule.broken(s)], s)
    return [*wrong.values(), *open_size, *broken], s


def of_given_values(sentences: list[str], s: SimpleNamespace) -> list[str]:
    """Drop sentences about values that the user did not give: replacements of values out of range, and their effects."""
    if s.stand_ins & SIZES:
        return []
    spelled = {word for name in s.stand_ins for word in (dashed(name), said(s, name).split()[0])}
    flags = [re.compile(rf"{re.escape(flag)}(?![\w-])") for flag in spelled]
    return [sentence for sentence in sentences if not any(flag.search(sentence) for flag in flags)]


def remarks(settings: schema.Config, world_size: int, more: Iterable["Rule"] = ()) -> list[str]:
    """Sentences about settings that work but are probably not intended, from this module and from `more` remarks."""
    s = record(settings, world_size)
    return [in_users_words(rule.message(s), settings.statements) for rule in (*REMARKS, *more) if rule.broken(s)]


# settings that other numbers are derived from
SIZES = {*LAYOUT, "num_layers", "hidden_size", "num_attention_heads", "seq_length", "ffn_hidden_size", "kv_channels"}
SIZES |= {"num_query_groups", "micro_batch_size", "global_batch_size", "num_layers_per_virtual_pipeline_stage"}


def _open_size(settings: schema.Config) -> list[str]:
    """The problem of `--micro-batch-size auto` without a global batch to divide."""
    b, most = settings.batch, settings.planner.max_global_batch_size
    given = b.global_batch_size or b.local_batch_size or (most and not b.size_flag)
    if b.micro_batch_size != schema.AUTO or given:
        return []
    return ["--micro-batch-size auto needs --global-batch-size N: it divides what each rank has of it"]


def _out_of_range(settings: schema.Config) -> tuple[dict[str, str], schema.Config]:
    """Violations of ranges, and the settings with harmless values instead, so that other rules can be checked."""
    violations, groups, given = {}, {}, settings.given_words
    for name, group in settings.groups.items():  # a recipe's own, too
        if wrong := out_of_range(group, given):
            violations |= wrong
            groups[name] = replace(
                group,
                **{one.name: _harmless(one, getattr(group, one.name)) for one in fields(group) if one.name in wrong},
            )
    extra = {name: groups.pop(name, group) for name, group in settings.extra.items()}
    return violations, replace(settings, **groups, extra=extra)


def _harmless(field: Field, value: object) -> object:
    """A value in range for a setting; optional numbers may be needed, too."""
    optional_count = field.default is None and isinstance(value, int)
    return 1 if field.default is MISSING or optional_count else field.default


def _are_levels(s: SimpleNamespace) -> bool:
    sizes = s.hierarchical_context_parallel_sizes
    return len(sizes) == 2 and min(sizes) > 0 and math.prod(sizes) == s.cp


def _two_levels(cp: int) -> tuple[int, int]:
    """Sizes for a message: the smallest groups.

    >>> _two_levels(8), _two_levels(9), _two_levels(5)
    ((2, 4), (3, 3), (5, 1))
    """
    inner = next((n for n in range(2, cp + 1) if cp % n == 0), 1)
    return inner, cp // inner


# What compiled layers do not work with. An error with --torch-compile; --torch-compile auto leaves layers as they are.
UNCOMPILED = (
    Rule(
        lambda s: s.sharding_stage == 3 or s.sharding_stage and s.overlap_param_gather,
        lambda s: (
            "--torch-compile needs all parameters in place: drop it, or use --sharding-stage 2 without "
            "--overlap-param-gather"
        ),
    ),
    Rule(
        lambda s: s.gradient_accumulation_fusion,
        lambda s: "--torch-compile arranges products for weight gradients: drop it, or --gradient-accumulation-fusion",
    ),
    Rule(
        lambda s: s.amp_level == "O1" and s.precision != "fp32",
        lambda s: "--amp-level O1 casts op by op, which --torch-compile does not see; drop one of them",
    ),
    Rule(
        lambda s: _discarding(s),
        lambda s: (
            f"--recompute-modules {' '.join(_discarding(s))}: --torch-compile itself chooses what compiled layers keep of "
            "norms and activations; drop one of them"
        ),
    ),
    Rule(
        lambda s: s.deterministic_mode and s.torch_compile == "auto",
        lambda s: (
            "--torch-compile auto is off with --deterministic-mode: a measurement would choose, and compiled layers round "
            "in another way"
        ),
    ),
)


def can_compile(settings: schema.Config, world_size: int) -> bool:
    """Whether layers can be compiled with these settings."""
    s = record(settings, world_size)
    return not any(rule.broken(s) for rule in UNCOMPILED)


def _uncompiled(s: SimpleNamespace) -> list[str]:
    """The reasons why --torch-compile auto leaves layers as they are."""
    given = s.settings.given("torch_compile")
    return [rule.message(s) for rule in UNCOMPILED if given and given.value == "auto" and rule.broken(s)]


def _if_compiled(rule: Rule) -> Rule:
    return Rule(lambda s: s.torch_compile is True and rule.broken(s), rule.message)


RULES = (
    *map(_if_compiled, UNCOMPILED),
    Rule(
        lambda s: s.linear is not None and not s.fuse_attn_qkv,
        lambda s: (
            f"--linear {s.linear} chooses the kernel of a layer's one product, and --no-fuse-attn-qkv makes three of "
            "queries, keys and values; leave one of the two out"
        ),
    ),
    Rule(
        lambda s: s.fp8_format and s.precision == "fp16",
        lambda s: (
            f"--fp8-format {s.fp8_format} with --fp16: products of fp8 numbers have the range of bf16, which fp16 cannot "
            "hold; say --bf16"
        ),
    ),
    Rule(
        lambda s: s.fp8_format and s.amp_level == "O1" and s.precision != "fp32",
        lambda s: (
            f"--fp8-format {s.fp8_format} with --amp-level O1: autocast casts the operands of each op itself; leave one of "
            "the two out"
        ),
    ),
    Rule(
        lambda s: s.fp8_format and s.fp8_param_gather and s.precision == "fp32",
        lambda s: (
            "--fp8-param-gather with --precision fp32: weights in fp32 are the optimizer's own, and fp8 numbers would take "
            "more memory; say --bf16, or leave it out"
        ),
    ),
    Rule(
        lambda s: s.fp8_format and not s.fuse_attn_qkv,
        lambda s: (
            f"--fp8-format {s.fp8_format} is for a layer's one product, and --no-fuse-attn-qkv makes three of queries, "
            "keys and values; leave one of the two out"
        ),
    ),
    Rule(
        lambda s: (
            s.fp8_format
            and s.first_last_layers_bf16
            and s.num_layers_at_start_in_bf16 + s.num_layers_at_end_in_bf16 >= s.num_layers
        ),
        lambda s: (
            f"--num-layers-at-start-in-bf16 {s.num_layers_at_start_in_bf16} and --num-layers-at-end-in-bf16 "
            f"{s.num_layers_at_end_in_bf16} leave none of the {s.num_layers} layers for --fp8-format {s.fp8_format}; give "
            "smaller numbers, or leave --fp8-format out"
        ),
    ),
    Rule(
        lambda s: s.teacher_load and s.teacher_logits,
        lambda s: (
            f"--teacher-load {s.teacher_load} and --teacher-logits {s.teacher_logits} are two sources of the same logits; "
            "leave one of them out"
        ),
    ),
    Rule(
        lambda s: s.parallel_plan and s.data_parallel_size and s.world != s.data_parallel_size * s.model_ranks,
        lambda s: (
            f"--parallel-plan {s.parallel_plan} is for {s.data_parallel_size * s.model_ranks} ranks (tensor "
            f"{s.tp} x pipeline {s.pp} x data {s.data_parallel_size}), and here are {s.world}; run on as many, or "
            f"plan for {s.world}{start_them(s, s.data_parallel_size * s.model_ranks)}"
        ),
    ),
    Rule(
        lambda s: s.world % s.model_ranks and not s.parallel_plan and alone(s),
        lambda s: too_few(
            s,
            " x ".join(said(s, name) for name in (*LAYOUT, *REPLICAS) if (getattr(s, name) or 1) > 1) or "--tp 1",
            ranks_needed(s),
        ),
    ),
    Rule(
        lambda s: s.world % s.model_ranks and not s.parallel_plan and not alone(s),
        lambda s: (
            f"{ranks_in_words(s.world)} cannot be divided by tensor x pipeline x context parallel size {s.tp} x {s.pp} x "
            f"{s.cp} = {s.model_ranks}; "
            + (
                f"run on {either(multiples(s.world, s.model_ranks))} ranks, or choose sizes whose product divides "
                f"{s.world} ({either(divisors(s.world, s.model_ranks))}) by --tensor-model-parallel-size and "
                "--pipeline-model-parallel-size"
                if s.world > 1
                else f"give the ranks of the job that is planned: --world-size {ranks_needed(s)}"
            )
        ),
    ),
    Rule(
        lambda s: not s.parallel_plan and s.data_parallel_size not in (None, s.dp) and s.world % s.model_ranks == 0,
        lambda s: (
            f"--data-parallel-size {s.data_parallel_size} is not what there is: {ranks_in_words(s.world)} / ({s.tp} x "
            f"{s.pp} x {s.cp}) = {s.dp}; leave the flag out or run on {s.data_parallel_size * s.model_ranks} "
            f"ranks{start_them(s, s.data_parallel_size * s.model_ranks)}"
        ),
    ),
    Rule(
        lambda s: (
            s.dp_degree
            and s.world % s.model_ranks == s.dp % s.sharding_ranks == 0  # else the size itself is refused
            and s.dp_degree * s.sharding_ranks != s.dp
        ),
        lambda s: (
            f"--dp-degree {s.dp_degree} is not what there is: it counts replicas outside sharding, and "
            f"{ranks_in_words(s.world)} / (mp {s.tp} x pp {s.pp}{f' x cp {s.cp}' if s.cp > 1 else ''} x "
            f"sharding {s.sharding_ranks}) = {s.dp / s.sharding_ranks:g}; leave it out or run on "
            f"{s.dp_degree * s.sharding_ranks * s.model_ranks} "
            "ranks (the total, shards included, is --data-parallel-size)"
            f"{start_them(s, s.dp_degree * s.sharding_ranks * s.model_ranks)}"
        ),
    ),
    Rule(
        lambda s: s.sharding_degree and s.dp % s.sharding_degree and not (alone(s) and s.model_ranks > 1),
        lambda s: (
            too_few(s, said(s, "sharding_degree"), ranks_needed(s))
            if alone(s)
            else f"--sharding-degree {s.sharding_degree} does not divide the data parallel size {s.dp}; nearest: "
            f"{either(divisors(s.dp, s.sharding_degree))}{start_them(s, ranks_needed(s))}"
        ),
    ),
    Rule(
        lambda s: s.cp == 1 and s.seq_length % s.row_pieces,
        lambda s: (
            f"--seq-length {s.seq_length} cannot be divided by --tensor-model-parallel-size {s.tp}, as "
            f"--sequence-parallel needs; nearest: {either(multiples(s.seq_length, s.tp))}"
        ),
    ),
    Rule(
        lambda s: s.cp > 1 and s.seq_length % s.row_pieces,
        lambda s: (
            f"--seq-length {s.seq_length} is not a multiple of {s.row_pieces}, as --context-parallel-size {s.cp} needs "
            f"(two chunks a rank{', each divided by tensor parallel ranks' * (s.row_pieces > 2 * s.cp)}); nearest: "
            f"{either(multiples(s.seq_length, s.row_pieces))}"
        ),
    ),
    Rule(
        lambda s: "a2a+p2p" in s.cp_comm and not s.hierarchical_context_parallel_sizes,
        lambda s: (
            "--cp-comm-type a2a+p2p needs --hierarchical-context-parallel-sizes: the ranks that exchange tokens for heads, "
            f"and the ranks of a ring of these groups, whose product is --context-parallel-size {s.cp}, as "
            f"{' '.join(map(str, _two_levels(s.cp)))}"
        ),
    ),
    Rule(
        lambda s: "a2a+p2p" in s.cp_comm and s.hierarchical_context_parallel_sizes and not _are_levels(s),
        lambda s: (
            "--hierarchical-context-parallel-sizes "
            f"{' '.join(map(str, s.hierarchical_context_parallel_sizes or ()))} must be two numbers whose product is "
            f"--context-parallel-size {s.cp}, as {' '.join(map(str, _two_levels(s.cp)))}"
        ),
    ),
    Rule(
        lambda s: len(s.cp_comm) not in (0, 1, s.num_layers),
        lambda s: (
            f"--cp-comm-type has {len(s.cp_comm)} words; give one for all layers, or one for each of {s.num_layers}"
        ),
    ),
    Rule(
        lambda s: s.profile and not s.profile_step_start < min(s.profile_step_end, 1 + (s.train_iters or math.inf)),
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
        lambda s: s.world > 1 and s.device == "cpu" and s.distributed_backend == "nccl",
        lambda s: (
            "--distributed-backend nccl needs CUDA devices, and this run is on the CPU; leave the flag out (gloo)"
        ),
    ),
    Rule(
        lambda s: s.tokenizer is None and not s.tokenizer_model,
        lambda s: (
            f"--vocab-file {s.vocab_file}: of which kind? Add --merge-file merges.txt (byte-level BPE), or "
            "--tokenizer-type BertWordPieceLowerCase (vocab.txt of WordPiece)"
            if s.vocab_file
            else "no vocabulary is given; "
            + (
                "--vocab-file vocab.json --merge-file merges.txt; for data without files --vocab-size N is enough"
                if not s.settings.data.files
                else lacks_vocabulary(s.settings.statements.values())
                or "--vocab-file vocab.json --merge-file merges.txt, or --tokenizer-model FILE, or (for numbers "
                f"without text) --tokenizer-type NullTokenizer --vocab-size {s.vocab_size or 'N'}"
            )
            + where_to_put(s.model_name_or_path)
            + of_the_checkpoint(s)
        ),
    ),
    Rule(
        lambda s: _missing_for_tokenizer(s),
        lambda s: f"--tokenizer-type {s.tokenizer} needs {' and '.join(_missing_for_tokenizer(s))}",
    ),
    Rule(
        lambda s: s.train_iters is None and s.train_samples is None,
        lambda s: (
            f"--train-epochs {s.train_epochs}: training's own command knows how many samples these are, and this one does "
            "not; give --train-samples N"
            if s.train_epochs
            else "the length of training is missing; --train-iters N (steps), --train-samples N, or --train-epochs N"
        ),
    ),
    Rule(
        lambda s: s.train_iters == 0 and not s.skip_train,
        lambda s: (
            f"--train-iters {s.train_iters} trains nothing: give at least 1, or --skip-train, which evaluates alone"
        ),
    ),
    Rule(
        lambda s: not s.train_epochs and (s.save_epoch or s.eval_epoch or s.log_epoch or s.lr_step_unit == "epoch"),
        lambda s: (
            f"{', '.join(_asks_for_epochs(s))}: an epoch is known with --train-epochs alone; give it instead of "
            "--train-iters or --train-samples"
        ),
    ),
    Rule(
        lambda s: s.recompute_granularity != "full" and (s.recompute_method or s.recompute_num_layers),
        lambda s: (
            f"{' and '.join(said(s, name) for name in ('recompute_method', 'recompute_num_layers') if getattr(s, name))}: "
            "goes with --recompute-granularity full alone"
            + (f", not with {s.recompute_granularity}" if s.recompute_granularity else ", which is not given; add it")
            + "; to spare layers, use --no-recompute-layers" * bool(s.recompute_granularity)
        ),
    ),
    Rule(
        lambda s: s.recompute_modules and s.recompute_granularity != "core_attn",
        lambda s: (
            f"{said(s, 'recompute_modules')}: goes with --recompute-granularity selective"
            + (f", not with {s.recompute_granularity}" if s.recompute_granularity else ", which is not given; add it")
        ),
    ),
    Rule(
        lambda s: s.amp_level == "O1" and s.precision != "fp32" and "layernorm" in _discarding(s),
        lambda s: (
            "--recompute-modules layernorm: with --amp-level O1 products read and keep a copy of a norm's output, in half "
            "precision; leave layernorm out, or say --amp-level O2"
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
    Rule(
        lambda s: s.save_interval is not None and s.save_interval < 1 and s.save_interval != schema.AUTO,
        lambda s: f"--save-interval {s.save_interval} must be at least 1, or auto",
    ),
    *(
        Rule(
            lambda s, a=a, b=b: getattr(s, a) and getattr(s, b) and realpath(getattr(s, a)) == realpath(getattr(s, b)),
            lambda s, a=a, b=b: f"{dashed(a)} {getattr(s, a)} is {dashed(b)} itself; give a folder on another disk",
        )
        for a, b in (("save_mirror", "save"), ("save_copy", "save"), ("save_copy", "save_mirror"))
    ),
    Rule(
        lambda s: s.save_parity and "://" in (s.save or ""),
        lambda s: f"--save-parity {s.save_parity}: --save {s.save} is an object store, which keeps copies itself",
    ),
    Rule(
        lambda s: s.replication and s.replication_factor < 2,
        lambda s: (
            f"--replication-factor {s.replication_factor} leaves each part in one memory: give 2, or drop --replication"
        ),
    ),
    Rule(
        lambda s: "://" in (s.non_persistent_local_ckpt_dir or ""),
        lambda s: (
            f"--non-persistent-local-ckpt-dir {s.non_persistent_local_ckpt_dir} must be a folder of each node; only --save "
            "may be a URL"
        ),
    ),
    Rule(
        lambda s: s.save_hf and ("://" in s.save_hf or "://" in (s.save or "")),
        lambda s: f"--save-hf {s.save_hf}: it and --save {s.save} must be local folders; copy the export afterwards",
    ),
    Rule(
        lambda s: s.save_mirror and "{}" in s.save_mirror,
        lambda s: "--save-mirror is a folder for saves that failed; a command for each checkpoint is --save-copy",
    ),
    *(
        Rule(
            lambda s, name=name, needs=needs: getattr(s, name) and not getattr(s, needs),
            lambda s, name=name, needs=needs, why=why: f"{said(s, name).split()[0]} needs {dashed(needs)}: {why}",
        )
        for name, (needs, why) in declared("requires", *schema.GROUPS.values()).items()
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
        lambda s: s.moe_use_upcycling and not (s.finetune and s.settings.model.mixture),
        lambda s: (
            "--moe-use-upcycling makes experts from a dense model's weights: add "
            + " and ".join(["--finetune"] * (not s.finetune) + ["--num-experts"] * (not s.settings.model.mixture))
        ),
    ),
    Rule(
        lambda s: s.finetune and s.auto_resume,
        lambda s: "--finetune needs a checkpoint in --load, and --auto-resume allows for none; drop one of them",
    ),
    Rule(
        lambda s: s.exit_on_missing_checkpoint and s.auto_resume,
        lambda s: "--exit-on-missing-checkpoint refuses what --auto-resume allows; drop one of them",
    ),
    Rule(
        lambda s: any(not 0 <= rank < s.world for rank in s.log_ranks or ()),
        lambda s: (
            f"--log-ranks {' '.join(map(str, s.log_ranks or ()))}: this job has "
            + (f"the ranks 0 to {s.world - 1}" if s.world > 1 else "rank 0 alone")
        ),
    ),
    Rule(
        lambda s: min(s.iterations_to_skip or [1]) < 1,
        lambda s: (
            f"--iterations-to-skip {' '.join(map(str, s.iterations_to_skip or ()))}: iterations are counted from 1"
        ),
    ),
    Rule(
        lambda s: any(not re.fullmatch(r"[\w.]+:[\w.]+", name) for name in s.hooks or ()),
        lambda s: f"--hooks {' '.join(s.hooks or ())}: each is a module and a name in it, as in my_hooks:MyHook",
    ),
    Rule(
        lambda s: s.collate_fn and not re.fullmatch(r"[\w.]+:[\w.]+", s.collate_fn),
        lambda s: f"--collate-fn {s.collate_fn}: it is a module and a function in it, as in my_data:collate",
    ),
    Rule(lambda s: s.wandb_exp_name and not s.wandb_project, lambda s: "--wandb-exp-name needs --wandb-project"),
    Rule(
        lambda s: s.metrics_port is not None and not 0 <= s.metrics_port < 1 << 16,
        lambda s: f"--metrics-port {s.metrics_port}: ports are from 1 to 65535; 0 chooses a free one",
    ),
)


def _known_positions(s) -> int:
    """The positions that a model comes with, if --seq-length goes beyond; otherwise 0."""
    one = s.settings.said("max_position_embeddings")
    while one and one.earlier:
        one = one.earlier
    return one.value if one and one.value and s.seq_length > one.value else 0


REMARKS = (
    Rule(_uncompiled, lambda s: f"--torch-compile auto compiles nothing here: {_uncompiled(s)[0]}"),
    Rule(  # the same --load and --save resume a run from its second start on
        lambda s: _starts_anew(s) and s.settings.given("load").value != s.save,
        lambda s: (
            f"{s.settings.given('load').words} holds no checkpoint: training starts from --pretrained-checkpoint {s.load}"
        ),
    ),
    Rule(
        lambda s: s.skip_train,
        lambda s: (
            "skipping training (--skip-train is on)"
            + ("" if s.load else "; without --load these are the weights that --seed draws")
        ),
    ),
    Rule(
        lambda s: (
            not s.group_query_attention
            and (given := s.settings.given("num_query_groups"))
            and given.flag == "--num-query-groups"
            and given.value != s.num_attention_heads
        ),
        lambda s: (
            f"--num-query-groups {s.num_query_groups} is group-query attention by itself; in Megatron-LM it has no effect "
            "without --group-query-attention"
        ),
    ),
    Rule(
        _known_positions,  # of a checkpoint or a preset; longer learned positions are refused
        lambda s: (
            f"--seq-length {s.seq_length} is more than the {_known_positions(s)} positions of the model "
            f"(max_position_embeddings): later ones are new to it, and exports will say {s.seq_length}"
        ),
    ),
    Rule(
        lambda s: s.hybrid_layer_pattern and (said := s.settings.given("num_layers")) and said.value != s.num_layers,
        lambda s: (
            f"{s.settings.given('num_layers').words}: --hybrid-layer-pattern lists {s.num_layers} layers, and counts"
        ),
    ),
    Rule(
        lambda s: (said := s.settings.given("mtp_num_layers")) and said.value != (s.mtp_num_layers or 0),
        lambda s: (
            f"{s.settings.given('mtp_num_layers').words}: the parts after / in --hybrid-layer-pattern are "
            f"{s.mtp_num_layers}, and count"
        ),
    ),
    Rule(
        lambda s: s.pp == 1 and (said := s.settings.given("hybrid_layer_pattern")) and CUT in str(said.value),
        lambda s: (
            f"{s.settings.given('hybrid_layer_pattern').words}: {CUT} cuts pipeline stages, and "
            "--pipeline-model-parallel-size is 1"
        ),
    ),
    Rule(lambda s: not s.save, lambda s: "--save is not given: nothing of this training will be kept"),
    Rule(
        lambda s: s.save and s.save_interval is None and not s.skip_train and s.steps > LONG,
        lambda s: (
            "--save-interval is not given: the only checkpoints are those at the end and at Ctrl-C; --save-interval auto"
        ),
    ),
    Rule(
        lambda s: s.save and isinstance(location(s.save), UrlPath),
        lambda s: (
            f"--save {s.save} is for checkpoints; metrics.jsonl, profiles and supervise/ stay on this machine, in "
            f"{local_folder(s.save)} (--metrics-file, --profile-dir, --log-dir give other places)"
        ),
    ),
    Rule(
        lambda s: (
            s.settings.validates
            and 0 < s.steps < s.eval_interval
            and (s.settings.given("eval_interval") if s.eval_epoch else s.train_iters)
        ),
        lambda s: (
            f"--eval-interval {s.eval_interval}{'' if s.settings.given('eval_interval') else ', the default,'} is beyond "
            f"{last_step(s)}"
            f": evaluation happens {'by --eval-epoch and ' * bool(s.eval_epoch)}at the end alone"
        ),
    ),
    Rule(
        lambda s: 0 < s.steps < (s.exit_interval or 0),
        lambda s: f"--exit-interval {s.exit_interval} is beyond {last_step(s)}: the run ends first",
    ),
    Rule(
        lambda s: s.settings.validates and s.eval_epoch and s.train_epochs and s.eval_epoch > s.train_epochs,
        lambda s: (
            f"--eval-epoch {s.eval_epoch} is beyond --train-epochs {s.train_epochs}: "
            f"evaluation happens {'by --eval-interval and ' * (0 < s.eval_interval < s.steps)}at the end alone"
        ),
    ),
)


def _asks_for_epochs(s: SimpleNamespace) -> list[str]:
    asked = {f"--save-epoch {s.save_epoch}": s.save_epoch, f"--eval-epoch {s.eval_epoch}": s.eval_epoch}
    asked["--log-epoch"] = s.log_epoch
    return [flag for flag, given in (asked | {"--lr-step-unit epoch": s.lr_step_unit == "epoch"}).items() if given]


LONG = 1000  # steps: repeating as many is costly


def last_step(s: SimpleNamespace) -> str:
    """The length of the run, in the words of its flag."""
    return f"--train-iters {s.train_iters}" if s.train_iters else f"the {s.steps} steps of this run"


_TOKENIZER_NEEDS = {"GPT2BPETokenizer": ("vocab_file", "merge_file"), "NullTokenizer": ("vocab_size",)}
_TOKENIZER_NEEDS |= dict.fromkeys(WORD_PIECE, ("vocab_file",))


def _starts_anew(s) -> bool:
    """Whether a --load without a checkpoint gave way to --pretrained-checkpoint."""
    load = s.settings.said("load")
    return load is not None and load.words == "--pretrained-checkpoint" and s.settings.given("load") is not None


def _missing_for_tokenizer(s: SimpleNamespace) -> list[str]:
    needs = _TOKENIZER_NEEDS.get(s.tokenizer, ("tokenizer_model",)) if s.tokenizer else ()
    if s.tokenizer_model and s.tokenizer != "NullTokenizer":  # a folder or a name provides all its files
        return []
    return [dashed(name) for name in needs if not getattr(s, name)]


def _discarding(s: SimpleNamespace) -> list[str]:
    """The recomputed modules whose output is discarded, too."""
    return [name for name in s.recompute_modules or () if name in ("layernorm", "mlp_act")]


def _layers(text: str | None) -> frozenset[int] | None:
    """The numbers of --no-recompute-layers, or None if the text is invalid."""
    try:
        return schema.Recompute(no_recompute_layers=text).exempt_layers
    except ValueError:
        return None
