# SPDX-License-Identifier: Apache-2.0
"""The conditions under which settings have an effect, by name. A setting that is not in the table always has one.

A given setting without effect is logged once at the start: it is harmless, and a sign that another one was forgotten.
Recipes add their own tables (`Recipe.idle`).
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import NamedTuple

from megatron.settings.rules import evaluates_early, has_data
from megatron.settings.schema import AUTO, WORD_PIECE
from megatron.settings.statements import Statement


class Needs(NamedTuple):
    """The condition for an effect: in words, with flags, and as a function of the settings (`rules.record`)."""

    words: str
    met: Callable[[SimpleNamespace], object]


def layout_was_open(s: SimpleNamespace) -> bool:
    """Whether the planner chooses part of the layout, or has chosen it (the micro-batch size is a number then)."""
    given = s.settings.given("micro_batch_size")
    chosen = given is not None and given.value == AUTO
    return s.auto_parallel or s.micro_batch_size == AUTO or chosen


def _by_files(s: SimpleNamespace) -> bool:
    """Whether flags give all files of a vocabulary that is not read from --tokenizer-model."""
    byte_level = s.tokenizer == "GPT2BPETokenizer" and s.vocab_file and s.merge_file
    return bool(byte_level or s.tokenizer in WORD_PIECE and s.vocab_file)


def _reads_files(s: SimpleNamespace, *kinds: str) -> bool:
    """Whether a vocabulary of one of these types may be read from --vocab-file and --merge-file."""
    return s.tokenizer in (None, *kinds) and (not s.tokenizer_model or _by_files(s))


def planned(s: SimpleNamespace) -> bool:
    return s.dry_run or s.preflight or layout_was_open(s)


def _tests(s: SimpleNamespace) -> object:
    """Whether --eval-iters sets the number of test batches, and there is test data."""
    return s.test_iters is None and has_data(s, "test")


FILES = Needs("--data-path or another data path", lambda s: s.settings.data.files)
EVALUATION = Needs("--eval-iters above 0", lambda s: s.eval_iters)
TEST = Needs("--test-iters or --eval-iters above 0", lambda s: s.settings.batch.tested_batches)
VALIDATION = Needs("--eval-iters above 0, or --full-validation", lambda s: s.eval_iters or s.full_validation)
BYTE_LEVEL = Needs("--tokenizer-type GPT2BPETokenizer", lambda s: _reads_files(s, "GPT2BPETokenizer"))
RANKS = Needs("more than one rank", lambda s: s.world > 1)
DATA_PARALLEL = Needs("data parallel size above 1", lambda s: s.dp * s.cp > 1)
STAGES = Needs("--pipeline-model-parallel-size above 1", lambda s: s.pp > 1)
FALLING = Needs("--lr-decay-style other than constant", lambda s: s.lr_decay_style != "constant")
DECAYING = Needs(
    "--lr-decay-style other than constant, or --lr-warmup-fraction",
    lambda s: s.lr_decay_style != "constant" or s.lr_warmup_fraction is not None,
)
WSD = Needs("--lr-decay-style WSD", lambda s: s.lr_decay_style == "WSD")
FP16 = Needs("--fp16", lambda s: s.precision == "fp16")
DYNAMIC_SCALE = Needs("--fp16, and no --loss-scale", lambda s: s.precision == "fp16" and s.loss_scale is None)
HALF = Needs("--bf16 or --fp16", lambda s: s.precision != "fp32")
O1 = Needs("--amp-level O1, and --bf16 or --fp16", lambda s: s.amp_level == "O1" and s.precision != "fp32")
SAVE = Needs("--save", lambda s: s.save)
LOAD = Needs("--load", lambda s: s.load)
RESUMING = Needs("--load, and not --finetune", lambda s: s.load and not s.finetune)
ROLLBACK = Needs("--on-spike rollback", lambda s: s.on_spike == "rollback")
TIMERS = Needs("--timing-log-level above 0", lambda s: s.timing_log_level)
OPEN_LAYOUT = Needs("--auto-parallel or --micro-batch-size auto", layout_was_open)
PLANNED = Needs("--dry-run, --preflight or --auto-parallel", planned)
PROFILE = Needs("--profile", lambda s: s.profile)
TEACHER = Needs("--teacher-load or --teacher-logits", lambda s: s.settings.distillation.distils)
HIDDEN = Needs("--teacher-load and --kd-hidden-layers", lambda s: s.teacher_load and s.kd_hidden_layers)

CUDA = Needs("a CUDA device", lambda s: s.device != "cpu")

EFFECTS: dict[str, Needs] = {
    # parallelism
    "sequence_parallel": Needs("--tensor-model-parallel-size above 1", lambda s: s.tp > 1),
    "account_for_embedding_in_pipeline_split": STAGES,
    "account_for_loss_in_pipeline_split": STAGES,
    "num_layers_per_virtual_pipeline_stage": Needs(
        "several model chunks a rank (fewer layers than a rank has): nothing is interleaved",
        lambda s: (
            s.num_layers_per_virtual_pipeline_stage * s.pp
            < s.num_layers + s.account_for_embedding_in_pipeline_split + s.account_for_loss_in_pipeline_split
        ),
    ),
    "overlap_moe_expert_parallel_comm": Needs(
        "--expert-model-parallel-size above 1: nothing is exchanged", lambda s: s.expert_model_parallel_size > 1
    ),
    "pipeline_stage_layers": STAGES,
    "decoder_first_pipeline_num_layers": STAGES,
    "decoder_last_pipeline_num_layers": STAGES,
    "cp_comm_type": Needs("--context-parallel-size above 1", lambda s: s.cp > 1),
    "hierarchical_context_parallel_sizes": Needs("--cp-comm-type a2a+p2p", lambda s: "a2a+p2p" in s.cp_comm),
    # Stage 3 moves parameters out of the model between their uses, even on one rank.
    "sharding_stage": DATA_PARALLEL._replace(met=lambda s: s.dp * s.cp > 1 or s.sharding_stage == 3),
    "sharding_degree": Needs("--sharding-stage", lambda s: s.sharding_stage),
    "overlap_grad_reduce": DATA_PARALLEL,
    "overlap_param_gather": Needs(
        "--sharding-stage and data parallel size above 1",
        lambda s: s.sharding_stage and (s.dp * s.cp > 1 or s.sharding_stage == 3),
    ),
    "distributed_backend": RANKS,
    "distributed_timeout_minutes": RANKS,
    # vocabulary and data
    "vocab_file": Needs(
        "--tokenizer-type GPT2BPETokenizer or one of WordPiece",
        lambda s: _reads_files(s, "GPT2BPETokenizer", *WORD_PIECE),
    ),
    "merge_file": BYTE_LEVEL,
    "tokenizer_model": Needs(  # a run replaces a folder or name by its files
        "a --tokenizer-type that reads it",
        lambda s: s.tokenizer != "NullTokenizer" and not (s.tokenizer_model and _by_files(s)),
    ),
    "tiktoken_pattern": Needs(
        "--tokenizer-type TikTokenizer",
        lambda s: s.tokenizer == "TikTokenizer" or not s.tokenizer and str(s.tokenizer_model).endswith(".tiktoken"),
    ),
    "parse_special": Needs("a tokenizer of texts", lambda s: s.tokenizer != "NullTokenizer"),
    "valid_data_path": VALIDATION,
    "test_data_path": TEST,
    "split": Needs("--data-path", lambda s: s.data_path),
    "data_cache_path": FILES,
    "verify_data": FILES,
    "dataset_type": FILES,
    "eval_interval": VALIDATION,
    "eval_iters": Needs(
        "validation data and no --full-validation, or test data and no --test-iters",
        lambda s: _tests(s) or (not s.full_validation and (has_data(s, "valid") or not s.eval_iters)),
    ),
    "test_iters": Needs(
        "test data (a third part of --split, or --test-data-path)", lambda s: has_data(s, "test") or not s.test_iters
    ),
    "eval_same_samples": Needs(
        "--eval-iters above 0, and not --full-validation", lambda s: s.eval_iters and not s.full_validation
    ),
    "stop_at_loss": Needs(
        "validations before the end (--eval-iters or --full-validation, --eval-interval or --eval-epoch)",
        evaluates_early,
    ),
    "skip_train": Needs(
        "--eval-iters or --test-iters above 0, or --full-validation",
        lambda s: s.settings.batch.tested_batches or s.eval_iters or s.full_validation,
    ),
    # learning rate and weight decay
    "min_lr": FALLING,
    "lr_decay_iters": DECAYING,
    "lr_decay_samples": DECAYING,
    "lr_warmup_init": Needs(
        "a warm-up (--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction)",
        lambda s: s.lr_warmup_iters or s.lr_warmup_samples or s.lr_warmup_fraction,
    ),
    "lr_wsd_decay_style": WSD,
    "lr_wsd_decay_iters": WSD,
    "lr_wsd_decay_samples": WSD,
    "weight_decay": Needs("--weight-decay-incr-style constant", lambda s: s.weight_decay_incr_style == "constant"),
    # offloading
    "optimizer_offload_fraction": Needs(
        "--optimizer-cpu-offload", lambda s: s.optimizer_cpu_offload or s.optimizer == "cpu_adam"
    ),
    "nvme_offload_dir": Needs("--nvme-offload-fraction", lambda s: s.nvme_offload_fraction),
    # recomputation and precision
    "no_recompute_layers": Needs("--recompute-granularity", lambda s: s.recompute_granularity),
    "amp_level": HALF,
    "amp_custom_black_list": O1,
    "amp_custom_white_list": O1,
    "loss_scale": FP16,
    "initial_loss_scale": DYNAMIC_SCALE,
    "min_loss_scale": DYNAMIC_SCALE,
    "loss_scale_window": DYNAMIC_SCALE,
    "hysteresis": DYNAMIC_SCALE,
    # kernels
    "bias_dropout_fusion": Needs(
        "a CUDA device, and --hidden-dropout above 0", lambda s: s.device != "cpu" and s.hidden_dropout
    ),
    "dump_graph": Needs("--torch-compile", lambda s: s.torch_compile),
    "persist_layer_norm": CUDA,
    "cross_entropy_loss_fusion": CUDA,
    "bias_swiglu_fusion": Needs("a CUDA device, and --swiglu", lambda s: s.device != "cpu" and s.swiglu),
    "rope_fusion": Needs(
        "a CUDA device, and --position-embedding-type rope",
        lambda s: s.device != "cpu" and s.position_embedding_type == "rope",
    ),
    "fused_linear": Needs("biases (no --disable-bias-linear)", lambda s: s.add_qkv_bias or not s.disable_bias_linear),
    # checkpoints
    "mean_time_to_interruption": Needs("--save-interval auto", lambda s: s.save_interval == AUTO),
    "save_retries": SAVE,
    "max_failed_saves": SAVE,
    "no_save_optim": SAVE,
    "log_progress": SAVE,
    "exit_on_missing_checkpoint": LOAD,
    "resume_schedule": RESUMING,
    "load_strictness": LOAD,
    "use_checkpoint_args": LOAD,
    "no_load_optim": RESUMING,
    # distillation
    "kd_alpha": TEACHER,
    "kd_temperature": TEACHER,
    "kd_loss": TEACHER,
    "kd_hidden_layers": Needs("--teacher-load", lambda s: s.teacher_load),
    "kd_hidden_loss": HIDDEN,
    "kd_hidden_coeff": HIDDEN,
    # guards
    "check_replicas_interval": RANKS,
    "spike_skip_steps": ROLLBACK,
    "max_rollbacks": ROLLBACK,
    # logging
    "timing_log_option": TIMERS,
    "barrier_with_level_1_timing": Needs(
        "--timing-log-level above 0 and more than one rank", lambda s: s.timing_log_level and s.world > 1
    ),
    "throughput_ignore_steps": Needs("--log-throughput", lambda s: s.log_throughput),
    "log_straggler": Needs("--straggler-detection", lambda s: s.straggler_detection),
    "straggler_minmax_count": Needs("--log-straggler", lambda s: s.log_straggler),
    "log_timers_to_tensorboard": Needs(
        "--timing-log-level above 0, and --tensorboard-dir or --wandb-project",
        lambda s: s.timing_log_level and (s.tensorboard_dir or s.wandb_project),
    ),
    "metrics_host": Needs("--metrics-port", lambda s: s.metrics_port is not None),
    "event_level": Needs("--on-event or --webhook", lambda s: s.on_event or s.webhook),
    # planner and profiling
    "max_global_batch_size": OPEN_LAYOUT,
    "tune_steps": OPEN_LAYOUT,
    "world_size": PLANNED._replace(met=lambda s: planned(s) or s.print_topology),
    "local_world_size": PLANNED,
    "device_name": PLANNED,
    "device_memory_gb": PLANNED,
    "memory_margin": PLANNED,
    "mtbf": PLANNED,
    "calibration": PLANNED,
    "wide": PLANNED,
    "profile_step_start": PROFILE,
    "profile_step_end": PROFILE,
    "profile_ranks": PROFILE,
    "profile_dir": PROFILE,
    "profile_detailed": PROFILE,
}


def without_effect(s: SimpleNamespace, table: dict[str, Needs]) -> dict[str, str]:
    """Name -> message, for each given setting that has no effect."""
    return {
        name: f"{said.words} has no effect without {needs.words}"
        for name in s.settings.statements
        if (needs := table.get(name)) and (said := s.settings.given(name)) and said.is_request and not needs.met(s)
    }


def idle_flags(group: object, said: Mapping[str, Statement], table: Mapping[str, Needs], **more) -> list[str]:
    """`without_effect` for a tool's group of settings. said: setting -> `Statement`; more: other inputs of `table`."""
    record = SimpleNamespace(statements=said, given=said.get)
    own = {name: needs for name, needs in table.items() if hasattr(group, name)}
    return list(without_effect(SimpleNamespace(settings=record, **vars(group), **more), own).values())
