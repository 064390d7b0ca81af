# SPDX-License-Identifier: Apache-2.0
"""Settings without effect in their combination are said, each once: a walk over all settings.

Every setting is either in ALWAYS, or has a condition (`settings.effects`, `Recipe.idle`) and a row in CASES.
"""

from dataclasses import fields

import pytest

import pretrain_gpt
from megatron.model import quantization, sparsity
from megatron.model.gpt import rules as gpt_rules
from megatron.optimizer import rules as optimizer_rules
from megatron.settings.effects import EFFECTS
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import GROUPS
from megatron.training.rules import idle, resolve

ALWAYS = """
    num_layers num_experts hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size kv_channels
    group_query_attention num_query_groups position_embedding_type normalization norm_epsilon norm_position qk_layernorm
    swiglu geglu quick_geglu scale_embedding query_pre_attn_scalar squared_relu attn_logit_softcapping softmax_type
    final_logit_softcapping z_loss_coeff disable_bias_linear linear quantization sparsity kd_hidden_projections
    lora_rank lora_alpha lora_dropout lora_target lora_split_fused use_rslora use_dora
    untie_embeddings_and_output_weights apply_query_key_layer_scaling hidden_dropout attention_dropout
    label_smoothing init_method_std make_vocab_size_divisible_by model_type model_name_or_path
    tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size data_parallel_size dp_degree
    expert_model_parallel_size expert_tensor_parallel_size pipeline_schedule
    num_virtual_stages_per_pipeline_rank pipeline_timeline print_topology
    tokenizer_type vocab_size vocab_extra_ids
    data_path train_data_path mock_data full_validation dataloader_type collate_fn num_workers reset_attention_mask
    eod_mask_loss
    micro_batch_size global_batch_size local_batch_size gradient_accumulation_steps rampup_batch_size train_iters
    train_samples train_epochs lr_step_unit save_epoch eval_epoch log_epoch
    log_memory_interval eval_requests exit_interval exit_duration_in_mins
    precision device torch_compile attention_backend deterministic_mode cross_entropy_chunk manual_gc_interval
    masked_softmax_fusion fuse_attn_qkv flash_attention_version
    recompute_granularity recompute_method recompute_num_layers recompute_modules
    save load save_interval keep_last save_retain_interval async_save save_mirror save_copy ckpt_step auto_resume finetune
    moe_use_upcycling
    exit_signal_handler kill_switch_file heartbeat_dir on_nan on_spike spike_window spike_threshold iterations_to_skip
    override teacher_load teacher_logits
    optimizer lr lr_decay_style lr_warmup_iters lr_warmup_samples lr_warmup_fraction start_weight_decay end_weight_decay
    weight_decay_incr_style clip_grad freeze train_only decoupled_lr decoupled_min_lr optimizer_cpu_offload
    nvme_offload_fraction param_cpu_offload gradient_accumulation_fusion loss_averaging
    grad_reduce_in_bf16 main_grads_dtype accumulate_allreduce_grads_in_fp32
    auto_parallel parallel_plan dry_run preflight allow_memory_overcommit
    profile
    log_interval timing_log_level progress_bar log_throughput log_params_norm log_num_zeros_in_grad
    metrics_file metrics_port tensorboard_dir visualdl_dir wandb_project wandb_exp_name peak_tflops seed
    debug console log_file log_ranks hooks on_event webhook event_rules straggler_detection
""".split()

LLAMA3 = """rope_scaling_factor rope_scaling_low_freq_factor rope_scaling_high_freq_factor
    rope_scaling_original_max_position_embeddings""".split()
YARN = """rotary_scaling_factor yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow mscale
    mscale_all_dim""".split()
MIXED = "--num-experts 4"
EXPERTS = {  # name -> (a value, flags with which it has an effect)
    "moe_layer_freq": ("2", MIXED),
    "moe_ffn_hidden_size": ("8", MIXED),
    "moe_shared_expert_intermediate_size": ("8", MIXED),
    "moe_shared_expert_gate": ("", f"{MIXED} --moe-shared-expert-intermediate-size 8"),
    "moe_router_topk": ("3", MIXED),
    "moe_router_score_function": ("sigmoid", MIXED),
    "moe_router_pre_softmax": ("", MIXED),
    "moe_router_num_groups": ("2", f"{MIXED} --moe-router-group-topk 1"),
    "moe_router_group_topk": ("1", f"{MIXED} --moe-router-num-groups 2"),
    "moe_router_topk_scaling_factor": ("2", MIXED),
    "moe_router_dtype": ("fp64", MIXED),
    "moe_router_load_balancing_type": ("none", MIXED),
    "moe_aux_loss_coeff": ("0.1", MIXED),
    "moe_z_loss_coeff": ("0.1", MIXED),
    "moe_router_enable_expert_bias": ("", MIXED),
    "moe_router_bias_update_rate": ("0.1", f"{MIXED} --moe-router-enable-expert-bias"),
    "moe_input_jitter_eps": ("0.1", MIXED),
    "moe_router_force_load_balancing": ("", MIXED),
    "moe_expert_capacity_factor": ("2", MIXED),
    "moe_pad_expert_input_to_capacity": ("", f"{MIXED} --moe-expert-capacity-factor 2"),
    "moe_token_drop_policy": ("position", f"{MIXED} --moe-expert-capacity-factor 2"),
}
MUON = dict(
    momentum=0.8, scale_mode="shape_scaling", extra_scale_factor=2, num_ns_steps=3, coefficient_type="simple"
) | dict(fp32_matmul_prec="highest")
SPARSE = dict(initial_sparsity=0.2, sparsity_begin_step=1, sparsity_end_step=5, sparsity_frequency=2) | dict.fromkeys(
    ("sparsity_layers", "sparsity_skip"), "mlp.*"
)
ROPE = "--position-embedding-type rope"
GROWTH = "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1"
RATE = "--lr-decay-style constant"
# name -> (flags that set it, what makes it without effect, what gives it one); "4:" in front: on so many ranks
CASES = {
    "rotary_base": ("--rotary-base 500", "", ROPE),
    "rotary_percent": ("--rotary-percent 0.5", "--position-embedding-type none", ROPE),
    "rope_local_base_freq": ("--rope-local-base-freq 500", ROPE, f"{ROPE} --window-size 3,0"),
    "qk_layernorm_across_heads": (
        "--qk-layernorm-across-heads",
        "--normalization RMSNorm",
        "--normalization RMSNorm --qk-layernorm",
    ),
    "add_qkv_bias": ("--add-qkv-bias", "", "--disable-bias-linear"),
    "rotary_seq_len_interpolation_factor": ("--rotary-seq-len-interpolation-factor 2", "", ROPE),
    "window_size": ("--window-size 7,0", "", "--seq-length 9"),
    "window_attn_skip_freq": ("--window-attn-skip-freq 2", "", "--window-size 3,0"),
    "weight_quantize_type": ("--weight-quantize-type abs_max", "", "--quantization"),
    "activation_quantize_type": ("--activation-quantize-type none", "", "--quantization"),
    "activation_preprocess_type": (
        "--activation-preprocess-type PACT",
        "--quantization --activation-quantize-type none",
        "--quantization",
    ),
    "weight_bits": ("--weight-bits 4", "", "--linear mlp.*=fake_quantize"),
    "activation_bits": ("--activation-bits 4", "--quantization --activation-quantize-type none", "--quantization"),
    "quantization_layers": ("--quantization-layers mlp.*", "", "--quantization"),
    "quantization_skip": ("--quantization-skip mlp.*", "", "--quantization"),
    **{
        name: (f"--{name.replace('_', '-')} {value}", "", "--sparsity 0.5 --sparsity-end-step 9")
        for name, value in SPARSE.items()
    },
    "use_rope_scaling": ("--use-rope-scaling", "", ROPE),
    "rope_type": ("--rope-type yarn", ROPE, f"{ROPE} --rotary-scaling-factor 2"),
    **{name: (f"--{name.replace('_', '-')} 3", ROPE, f"{ROPE} --use-rope-scaling") for name in LLAMA3},
    **{name: (f"--{name.replace('_', '-')} 3", ROPE, f"{ROPE} --rope-type yarn") for name in YARN},
    "yarn_correction_range_round_to_int": ("--no-yarn-correction-range-round-to-int", ROPE, f"{ROPE} --rope-type yarn"),
    **{name: (f"--{name.replace('_', '-')} {value}".strip(), "", more) for name, (value, more) in EXPERTS.items()},
    **{
        f"kd_{name}": (f"--kd-{name} {value}", "", "--teacher-load d")
        for name, value in dict(alpha=0.3, temperature=2, loss="js").items()
    },
    "kd_hidden_layers": ("--kd-hidden-layers even", "--teacher-logits d", "--teacher-load d"),
    **{
        f"kd_hidden_{name}": (
            f"--kd-hidden-{name} {value}",
            "--teacher-load d",
            "--teacher-load d --kd-hidden-layers even",
        )
        for name, value in dict(loss="cosine", coeff=2).items()
    },
    "adam_beta1": ("--adam-beta1 0.8", "--optimizer sgd", ""),
    "adam_beta2": ("--adam-beta2 0.8", "--optimizer lion", ""),
    "adam_eps": ("--adam-eps 1e-6", "--optimizer sgd", ""),
    "sgd_momentum": ("--sgd-momentum 0.8", "", "--optimizer sgd"),
    **{
        f"muon_{name}": (f"--muon-{name.replace('_', '-')} {value}", "", "--optimizer muon")
        for name, value in MUON.items()
    },
    "muon_nesterov": ("--muon-use-nesterov", "--optimizer sgd", "--optimizer muon"),
    "exp_avg_dtype": ("--exp-avg-dtype bf16", "--optimizer sgd --sgd-momentum 0", "--optimizer sgd"),
    "exp_avg_sq_dtype": ("--exp-avg-sq-dtype bf16", "--optimizer lion", "--optimizer muon"),
    "stochastic_rounding": ("--no-stochastic-rounding", "--optimizer lion", "--optimizer lion --exp-avg-dtype bf16"),
    "lion_beta1": ("--lion-beta1 0.8", "--optimizer sgd", "--optimizer lion"),
    "lion_beta2": ("--lion-beta2 0.8", "", "--optimizer lion"),
    "bias_gelu_fusion": ("--no-bias-gelu-fusion", "--swiglu", ""),
    "activation_func_clamp_value": ("--activation-func-clamp-value 0.3", "--geglu", "--swiglu"),
    "glu_linear_offset": ("--glu-linear-offset 0.5", "", "--quick-geglu"),
    "bias_dropout_fusion": ("--no-bias-dropout-fusion", "--device cpu", "--device cuda"),
    "bias_swiglu_fusion": ("--no-bias-swiglu-fusion", "--device cuda", "--device cuda --swiglu"),
    "rope_fusion": ("--no-rope-fusion", f"--device cpu {ROPE}", f"--device cuda {ROPE}"),
    "dump_graph": ("--dump-graph d", "", "--torch-compile"),
    "persist_layer_norm": ("--no-persist-layer-norm", "--device cpu", "--device cuda"),
    "cross_entropy_loss_fusion": ("--no-cross-entropy-loss-fusion", "--device cpu", "--device cuda"),
    "fused_linear": ("--no-fused-linear", "--disable-bias-linear", ""),
    "attention_softmax_in_fp32": ("--attention-softmax-in-fp32", "", "--bf16"),
    "reset_position_ids": ("--reset-position-ids", "--position-embedding-type none", ROPE),
    "sequence_parallel": ("--sequence-parallel", "2:", "2: --tp 2"),
    "overlap_moe_expert_parallel_comm": ("--overlap-moe-expert-parallel-comm", f"2: {MIXED}", f"2: {MIXED} --ep 2"),
    "account_for_embedding_in_pipeline_split": ("--account-for-embedding-in-pipeline-split", "2:", "2: --pp 2"),
    "account_for_loss_in_pipeline_split": ("--account-for-loss-in-pipeline-split", "2:", "2: --pp 2"),
    "num_layers_per_virtual_pipeline_stage": (
        "--num-layers-per-virtual-pipeline-stage 1",
        "2: --pp 2",
        "2: --pp 2 --num-layers 4 --gradient-accumulation-steps 2",
    ),
    "pipeline_stage_layers": ("--pipeline-stage-layers 1,1", "", "2: --pp 2"),
    "decoder_first_pipeline_num_layers": ("--decoder-first-pipeline-num-layers 1", "", "2: --pp 2"),
    "decoder_last_pipeline_num_layers": ("--decoder-last-pipeline-num-layers 1", "", "2: --pp 2"),
    "sharding_stage": ("--use-distributed-optimizer", "2: --tp 2", "2:"),
    "sharding_degree": ("--sharding-degree 2", "4:", "4: --sharding-stage 1"),
    "cp_comm_type": ("--cp-comm-type a2a", "2: --tp 2", "2: --cp 2"),
    "hierarchical_context_parallel_sizes": (
        "--hierarchical-context-parallel-sizes 2 1",
        "2: --cp 2",
        "2: --cp 2 --cp-comm-type a2a+p2p",
    ),
    "overlap_grad_reduce": ("--overlap-grad-reduce", "2: --pp 2", "2:"),
    "overlap_param_gather": ("--overlap-param-gather", "2:", "2: --sharding-stage 1"),
    "distributed_backend": ("--distributed-backend gloo", "", "2:"),
    "distributed_timeout_minutes": ("--distributed-timeout-minutes 3", "", "2:"),
    "vocab_file": ("--vocab-file v", "", "--merge-file m --tokenizer-type GPT2BPETokenizer"),
    "merge_file": ("--merge-file m", "", "--vocab-file v"),
    "tokenizer_model": ("--tokenizer-model t", "--tokenizer-type NullTokenizer", ""),
    "parse_special": ("--parse-special", "--tokenizer-type NullTokenizer --vocab-size 99", "--tokenizer-model t.json"),
    "tiktoken_pattern": ("--tiktoken-pattern v1", "--tokenizer-model t.json", "--tokenizer-model t.tiktoken"),
    "valid_data_path": ("--valid-data-path d", "--eval-iters 0", ""),
    "test_data_path": ("--test-data-path d", "--eval-iters 0", "--eval-iters 0 --test-iters 2"),
    "split": ("--split 9,1,0", "--train-data-path d", "--data-path d"),
    "data_cache_path": ("--data-cache-path c", "", "--train-data-path d"),
    "dataset_type": ("--dataset-type webtext", "", "--data-path d"),
    "verify_data": ("--verify-data", "", "--data-path d"),
    "eval_interval": ("--eval-interval 5", "--eval-iters 0", "--eval-iters 0 --full-validation"),
    "eval_iters": ("--eval-iters 1", "--full-validation --test-iters 1", "--full-validation"),
    "test_iters": ("--test-iters 2", "--data-path d --split 95,5,0", "--data-path d"),
    "eval_same_samples": ("--eval-same-samples", "--full-validation", ""),
    "stop_at_loss": ("--stop-at-loss 2", "--eval-iters 0 --eval-interval 5", "--eval-interval 5"),
    "skip_train": ("--skip-train", "--eval-iters 0", "--eval-iters 0 --full-validation"),
    "min_lr": ("--min-lr 1e-5", RATE, "--lr-decay-style cosine"),
    "lr_decay_iters": ("--lr-decay-iters 9", RATE, f"{RATE} --lr-warmup-fraction 0.1"),
    "lr_decay_samples": ("--lr-decay-samples 9", RATE, "--lr-decay-style inverse-square-root"),
    "lr_warmup_init": ("--lr-warmup-init 1e-5", "", "--lr-warmup-iters 1"),
    "lr_wsd_decay_style": ("--lr-wsd-decay-style cosine", "", "--lr-decay-style WSD"),
    "lr_wsd_decay_iters": ("--lr-wsd-decay-iters 2", "--lr-decay-style cosine", "--lr-decay-style WSD"),
    "lr_wsd_decay_samples": ("--lr-wsd-decay-samples 2", "", "--lr-decay-style WSD"),
    "weight_decay": ("--weight-decay 0.5", GROWTH, ""),
    "optimizer_offload_fraction": ("--optimizer-offload-fraction 0.5", "", "--optimizer cpu_adam"),
    "nvme_offload_dir": ("--nvme-offload-dir d", "", "--nvme-offload-fraction 0.5"),
    "no_recompute_layers": ("--no-recompute-layers 0", "", "--recompute-granularity full"),
    "amp_level": ("--amp-level O1", "", "--bf16"),
    "amp_custom_black_list": ("--amp-custom-black-list mm", "--bf16", "--bf16 --amp-level O1"),
    "amp_custom_white_list": ("--amp-custom-white-list mm", "--amp-level O1", "--fp16 --amp-level O1"),
    "loss_scale": ("--loss-scale 2", "--bf16", "--fp16"),
    "initial_loss_scale": ("--initial-loss-scale 2", "", "--fp16"),
    "min_loss_scale": ("--min-loss-scale 2", "--fp16 --loss-scale 8", "--fp16"),
    "loss_scale_window": ("--loss-scale-window 2", "--precision auto", "--fp16"),
    "hysteresis": ("--hysteresis 2", "--bf16", "--fp16"),  # the default, as scripts of Megatron-LM spell it out
    "mean_time_to_interruption": ("--mean-time-to-interruption 3", "--save-interval 4", "--save-interval auto"),
    "save_retries": ("--save-retries 1", "", "--save s"),
    "max_failed_saves": ("--max-failed-saves 1", "", "--save s"),
    "no_save_optim": ("--no-save-optim", "", "--save s"),
    "log_progress": ("--log-progress", "", "--save s"),
    "exit_on_missing_checkpoint": ("--exit-on-missing-checkpoint", "--save s", "--load s"),
    "resume_schedule": ("--override-opt_param-scheduler", "--load s --finetune", "--load s"),
    "use_checkpoint_args": ("--use-checkpoint-args", "", "--load s"),
    "load_strictness": ("--dist-ckpt-strictness log_all", "", "--load s"),
    "no_load_optim": ("--no-load-optim", "--load s --finetune", "--load s"),
    "check_replicas_interval": ("--check-replicas-interval 3", "", "2:"),
    "spike_skip_steps": ("--spike-skip-steps 3", "--on-spike skip", "--on-spike rollback"),
    "max_rollbacks": ("--max-rollbacks 3", "", "--on-spike rollback"),
    "timing_log_option": ("--timing-log-option max", "", "--timing-log-level 1"),
    "barrier_with_level_1_timing": (
        "--no-barrier-with-level-1-timing",
        "--timing-log-level 1",
        "2: --timing-log-level 1",
    ),
    "metrics_host": ("--metrics-host 0.0.0.0", "", "--metrics-port 9400"),
    "event_level": ("--event-level error", "", "--on-event true"),
    "throughput_ignore_steps": ("--throughput-ignore-steps 3", "", "--log-throughput"),
    "log_straggler": ("--log-straggler", "--no-straggler-detection", ""),
    "straggler_minmax_count": ("--straggler-minmax-count 2", "", "--log-straggler"),
    "log_timers_to_tensorboard": (
        "--log-timers-to-tensorboard",
        "--timing-log-level 1",
        "--timing-log-level 1 --tensorboard-dir t",
    ),
    "max_global_batch_size": ("--max-global-batch-size 64", "--dry-run", "--auto-parallel"),
    "tune_steps": ("--tune-steps 2", "", "--micro-batch-size auto"),
    "world_size": ("--world-size 8", "", "--print-topology"),
    "local_world_size": ("--local-world-size 8", "--print-topology", "--dry-run"),
    "device_name": ("--device-name A100-80GB", "", "--preflight"),
    "device_memory_gb": ("--device-memory-gb 80", "", "--dry-run"),
    "wide": ("--wide", "", "--dry-run"),
    "memory_margin": ("--memory-margin 0.1", "", "--dry-run"),
    "mtbf": ("--mtbf 1000", "", "--dry-run"),
    "calibration": ("--calibration c", "", "--auto-parallel"),
    "profile_step_start": ("--profile-step-start 3", "", "--profile"),
    "profile_step_end": ("--profile-step-end 5", "", "--profile"),
    "profile_ranks": ("--profile-ranks 0", "", "--profile"),
    "profile_dir": ("--profile-dir d", "", "--profile"),
    "profile_detailed": ("--profile-detailed", "", "--profile"),
}
IDLE = {**gpt_rules.IDLE, **optimizer_rules.IDLE, **quantization.EFFECTS, **sparsity.EFFECTS}
BASE = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --vocab-size 90"


def config(flags: str):
    return parse_pretrain(f"{BASE} {flags}".split())


def said_of(name: str, flags: str, more: str) -> list[str]:
    """What is said of a setting that is given by `flags`, with more flags on some ranks."""
    ranks, colon, words = more.partition(":")
    found = idle(config(f"{flags} {words if colon else more}"), int(ranks) if colon else 1)
    return [words for key, words in found.items() if key == name]


def test_every_setting_is_always_effective_or_has_a_condition():
    names = {field.name for group in GROUPS.values() for field in fields(group)}
    assert set(EFFECTS).isdisjoint(IDLE) and set(ALWAYS).isdisjoint(CASES)
    assert set(CASES) == {*EFFECTS, *IDLE}, "each condition has a row in CASES"
    assert {*ALWAYS, *CASES} == names, "each setting is in ALWAYS here, or in settings/effects.py"
    assert pretrain_gpt.recipe().idle is gpt_rules.IDLE


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_a_setting_is_said_where_it_has_no_effect_and_only_there(name):
    flags, without, with_effect = CASES[name]
    [words] = said_of(name, flags, without)
    assert words.startswith(f"{flags.split()[0].replace('_', '-')}") and " has no effect without " in words
    assert said_of(name, flags, with_effect) == []
    assert said_of(name, "", without) == []  # nobody gave it


def test_values_that_ask_for_nothing_are_not_said(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("hysteresis: 2\nsequence_parallel: false\nrotary_base: 10000.0\nrotary_percent: 0.5\n")
    assert list(idle(config(f"--config {path}"), 1).values()) == [
        f"--rotary-percent 0.5 ({path}:4) has no effect without --position-embedding-type rope"
    ]
    assert idle(config("--sequence-parallel false --no-save-optim false"), 1) == {}
    assert idle(config("--model-name-or-path gpt2-medium"), 1) == {}


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--data-path d --split 95,5,0 --test-iters 1", "--test-iters 1"),
        ("--train-data-path a --valid-data-path b --test-iters 2", "--test-iters 2"),
        ("--train-data-path a --eval-iters 1", "--eval-iters 1"),
        ("--data-path d --split 95,5,0 --full-validation --eval-iters 1", "--eval-iters 1"),
        ("--data-path d --split 100 --eval-iters 1 --test-iters 0", "--eval-iters 1"),
        ("--data-path d --split 100 --eval-iters 0 --test-iters 0", None),
        ("--data-path d --split 100,0,0 --full-validation --eval-iters 0", "--eval-iters 0"),
        ("--data-path d --split 95,5,0 --eval-iters 1", None),
        ("--data-path d --split 95,0,5 --eval-iters 1", None),
        ("--data-path d --split 95/5/0 --eval-iters 1", None),
        ("--data-path d --split 95,5 --test-iters 1", "--test-iters 1"),
        ("--train-data-path a --test-data-path b --test-iters 2", None),
    ],
)
def test_evaluations_without_data_are_said(flags, named):
    found = list(idle(config(flags), 1).values())
    assert [words.partition(" has no effect")[0] for words in found] == ([named] if named else [])


def test_files_beside_a_tokenizer_model_that_reads_none():
    found = idle(config("--merge-file m --vocab-file v --tokenizer-model t --tokenizer-type HuggingFaceTokenizer"), 1)
    assert list(found) == ["merge_file", "vocab_file"]
    assert list(idle(config("--merge-file m --tokenizer-model t"), 1)) == ["merge_file"]


def test_resolving_keeps_what_was_given():
    """--sequence-parallel on one tensor parallel rank is off by then, and still said."""
    resolved = resolve(config("--mock-data --train-iters 1 --sequence-parallel"), 1)
    assert not resolved.parallel.sequence_parallel and list(idle(resolved, 1)) == ["sequence_parallel"]


def test_a_chosen_micro_batch_was_open():
    import dataclasses

    asked = config("--micro-batch-size auto --tune-steps 2 --device-name A100-80GB")
    chosen = dataclasses.replace(asked, batch=dataclasses.replace(asked.batch, micro_batch_size=4))
    assert idle(chosen, 1) == {}


def test_the_log_says_each_once(run_ranks, command, capfd):
    def body(rank):
        pretrain_gpt.main(command("--train-iters 1 --hysteresis 4 --lr-wsd-decay-iters 3 --rotary-base 7"))

    run_ranks(2, body)
    said = [line for line in capfd.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert said == [
        "warning: --hysteresis 4 has no effect without --fp16, and no --loss-scale",
        "warning: --lr-wsd-decay-iters 3 has no effect without --lr-decay-style WSD",
        "warning: --rotary-base 7.0 has no effect without --position-embedding-type rope",
    ]


SAME = (
    "rotary_base bias_gelu_fusion activation_func_clamp_value glu_linear_offset reset_position_ids weight_decay".split()
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SAME)
def test_what_is_said_to_have_no_effect_has_none(name, train):
    """The losses of a run with the setting and of one without are the same to the bit."""
    flags, without, with_effect = CASES[name]

    def losses(more, own, folder):
        return train(f"--train-iters 3 --reset-attention-mask --lr-warmup-iters 1 {more} {own}", folder).losses

    assert losses(without, "", "a") == losses(without, flags, "b")
    if name == "weight_decay":
        assert losses(with_effect, "", "c") != losses(with_effect, flags, "d")  # so the comparison sees one
