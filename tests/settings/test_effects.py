# SPDX-License-Identifier: Apache-2.0
"""Settings without effect in their combination are said, each once: a walk over all settings that have a condition."""

import dataclasses

import pytest

import pretrain_gpt
from megatron.model.gpt import gpt_rules
from megatron.optimizer import optimizer_rules
from megatron.settings.declare import declared
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import settings_of
from megatron.training.rules import idle, resolve

# condition, or setting -> (flags that do not meet it, flags that do); between |: alternatives, "2:": on so many ranks
# A condition that is not here is itself what meets it, and no flags do not.
CASES = {
    "--error-injection-rate N": (
        "--rerun-mode validate_results",
        "--rerun-mode validate_results --error-injection-rate 5",
    ),
    "a Mamba-2 layer (M or P in --hybrid-layer-pattern)": (
        " | --hybrid-layer-pattern *-",
        "--hybrid-layer-pattern M- | --hybrid-layer-pattern P-",
    ),
    "Mamba-2 layers with a norm, and without --no-mamba-rms-norm": (
        " | --hybrid-layer-pattern M- --no-mamba-rms-norm",
        "--hybrid-layer-pattern M-",
    ),
    "--position-embedding-type rope": (" | --position-embedding-type none", "--position-embedding-type rope"),
    "--position-embedding-type rope and a --window-size": (
        "--position-embedding-type rope",
        "--position-embedding-type rope --window-size 3,0",
    ),
    "--experimental-attention-variant": (
        "",
        "--experimental-attention-variant gdn --linear-attention-freq 2 --linear-num-key-heads 2",
    ),
    "gated delta nets (--experimental-attention-variant, or G in --hybrid-layer-pattern)": (
        " | --hybrid-layer-pattern *-",
        "--experimental-attention-variant gdn --linear-attention-freq 2 | --hybrid-layer-pattern G-",
    ),
    "a data path that is a URL": ("--mock-data false --data-path d", "1:--mock-data false --data-path s3://b/d"),
    "--keep-last or --save-retain-interval": (
        "--save d --save-interval 1",
        "--save d --save-interval 1 --keep-last 2 | --save d --save-interval 1 --save-retain-interval 5",
    ),
    "--qk-layernorm": ("--normalization RMSNorm", "--normalization RMSNorm --qk-layernorm"),
    "a --seq-length that is longer than the window": ("", "--seq-length 9"),
    "--window-size": ("", "--window-size 3,0"),
    "weight_bits": ("", "--quantization | --linear mlp.*=fake_quantize"),
    "--quantization that rounds inputs": ("--quantization --activation-quantize-type none", "--quantization"),
    "--sparsity that is a number, and --sparsity-end-step after --sparsity-begin-step": (
        "",
        "--sparsity 0.5 --sparsity-end-step 9",
    ),
    "--sparsity": ("", "--sparsity 0.5 --sparsity-end-step 9"),
    "--sparsity, and --sparsity-end-step after --sparsity-begin-step": ("", "--sparsity 0.5 --sparsity-end-step 9"),
    "--position-embedding-type rope, and --rotary-scaling-factor above 1 for yarn": (
        "--position-embedding-type rope",
        "--position-embedding-type rope --rotary-scaling-factor 2",
    ),
    "--use-rope-scaling": ("--position-embedding-type rope", "--position-embedding-type rope --use-rope-scaling"),
    "--rope-type yarn": ("--position-embedding-type rope", "--position-embedding-type rope --rope-type yarn"),
    "--num-experts": ("", "--num-experts 4"),
    "--non-persistent-save-interval": ("", "--non-persistent-save-interval 5"),
    "--num-experts above 1": ("", "--num-experts 4"),
    "--moe-router-group-topk": ("", "--num-experts 4 --moe-router-num-groups 2 --moe-router-group-topk 1"),
    "--num-experts above 1, and with --moe-router-load-balancing-type sinkhorn": ("", "--num-experts 4"),
    "--num-experts above 1 and --moe-router-score-function softmax, and with --moe-router-load-balancing-type sinkhorn": (
        "",
        "--num-experts 4",
    ),
    "--num-experts above 1 and a --moe-router-load-balancing-type with a loss": ("", "--num-experts 4"),
    "--moe-router-enable-expert-bias": ("", "--num-experts 4 --moe-router-enable-expert-bias"),
    "--moe-expert-capacity-factor": ("", "--num-experts 4 --moe-expert-capacity-factor 2"),
    "--teacher-load or --teacher-logits": ("", "--teacher-load d"),
    "--teacher-load": ("--teacher-logits d", "--teacher-load d"),
    "--teacher-load and --kd-hidden-layers": ("--teacher-load d", "--teacher-load d --kd-hidden-layers even"),
    "--optimizer adam or muon": ("--optimizer sgd | --optimizer lion", " | --optimizer muon"),
    "--optimizer muon": (" | --optimizer sgd", "--optimizer muon"),
    "an optimizer with a first moment": ("--optimizer sgd --sgd-momentum 0", "--optimizer sgd"),
    "--exp-avg-dtype bf16 or --exp-avg-sq-dtype bf16": ("--optimizer lion", "--optimizer lion --exp-avg-dtype bf16"),
    "--optimizer lion": ("--optimizer sgd | ", "--optimizer lion"),
    "GeLU (no --swiglu, --squared-relu or --quick-geglu)": ("--swiglu", ""),
    "--swiglu or --quick-geglu": ("--geglu | ", "--swiglu | --quick-geglu"),
    "a CUDA device, and --hidden-dropout above 0": ("--device cpu", "--device cuda"),
    "a CUDA device, and --swiglu": ("--device cuda", "--device cuda --swiglu"),
    "a CUDA device, and --position-embedding-type rope": (
        "--device cpu --position-embedding-type rope",
        "--device cuda --position-embedding-type rope",
    ),
    "a CUDA device": ("--device cpu", "--device cuda"),
    "biases (no --disable-bias-linear)": ("--disable-bias-linear", ""),
    "--bf16 or --fp16": ("", "--bf16"),
    "--mtp-num-layers": ("", "--mtp-num-layers 1"),
    "--position-embedding-type learned_absolute or rope": (
        "--position-embedding-type none",
        "--position-embedding-type rope",
    ),
    "--tensor-model-parallel-size above 1": ("2:", "2: --tp 2"),
    "--expert-model-parallel-size above 1: nothing is exchanged": ("2: --num-experts 4", "2: --num-experts 4 --ep 2"),
    "--pipeline-model-parallel-size above 1": ("2: | ", "2: --pp 2"),
    "several model chunks a rank (fewer layers than a rank has): nothing is interleaved": (
        "2: --pp 2",
        "2: --pp 2 --num-layers 4 --gradient-accumulation-steps 2",
    ),
    "data parallel size above 1": ("2: --tp 2 | 2: --pp 2", "2:"),
    "--sharding-stage": ("4:", "4: --sharding-stage 1"),
    "--context-parallel-size above 1": ("2: --tp 2", "2: --cp 2"),
    "--cp-comm-type a2a+p2p": ("2: --cp 2", "2: --cp 2 --cp-comm-type a2a+p2p"),
    "--sharding-stage and data parallel size above 1": ("2:", "2: --sharding-stage 1"),
    "more than one rank": ("", "2:"),
    "--tokenizer-type GPT2BPETokenizer or one of WordPiece": ("", "--merge-file m --tokenizer-type GPT2BPETokenizer"),
    "--tokenizer-type GPT2BPETokenizer": ("", "--vocab-file v"),
    "a --tokenizer-type that reads it": ("--tokenizer-type NullTokenizer", ""),
    "a tokenizer of texts": ("--tokenizer-type NullTokenizer --vocab-size 99", "--tokenizer-model t.json"),
    "--tokenizer-type TikTokenizer": ("--tokenizer-model t.json", "--tokenizer-model t.tiktoken"),
    "--eval-iters above 0, or --full-validation": ("--eval-iters 0", " | --eval-iters 0 --full-validation"),
    "--test-iters or --eval-iters above 0": ("--eval-iters 0", "--eval-iters 0 --test-iters 2"),
    "--data-path": ("--train-data-path d", "--data-path d"),
    "--data-path or another data path": ("", "--train-data-path d | --data-path d"),
    "validation data and no --full-validation, or test data and no --test-iters": (
        "--full-validation --test-iters 1",
        "--full-validation",
    ),
    "test data (a third part of --split, or --test-data-path)": ("--data-path d --split 95,5,0", "--data-path d"),
    "--eval-iters above 0, and not --full-validation": ("--full-validation", ""),
    "validations before the end (--eval-iters or --full-validation, --eval-interval or --eval-epoch)": (
        "--eval-iters 0 --eval-interval 5",
        "--eval-interval 5",
    ),
    "--eval-iters or --test-iters above 0, or --full-validation": (
        "--eval-iters 0",
        "--eval-iters 0 --full-validation",
    ),
    "--lr-decay-style other than constant": ("--lr-decay-style constant", "--lr-decay-style cosine"),
    "--lr-decay-style other than constant, or --lr-warmup-fraction": (
        "--lr-decay-style constant",
        "--lr-decay-style constant --lr-warmup-fraction 0.1 | --lr-decay-style inverse-square-root",
    ),
    "a warm-up (--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction)": ("", "--lr-warmup-iters 1"),
    "--lr-decay-style WSD": (" | --lr-decay-style cosine", "--lr-decay-style WSD"),
    "--weight-decay-incr-style constant": (
        "--weight-decay-incr-style linear --start-weight-decay 0 --end-weight-decay 1",
        "",
    ),
    "--optimizer-cpu-offload": ("", "--optimizer cpu_adam"),
    "--nvme-offload-fraction": ("", "--nvme-offload-fraction 0.5"),
    "--recompute-granularity": ("", "--recompute-granularity full"),
    "--amp-level O1, and --bf16 or --fp16": (
        "--bf16 | --amp-level O1",
        "--bf16 --amp-level O1 | --fp16 --amp-level O1",
    ),
    "--fp8-format": ("", "--fp8-format e4m3"),
    "--fp8-format, and --fp8-recipe tensorwise or blockwise": (
        "--fp8-format e4m3 --fp8-recipe mxfp8 | --bf16",
        "--fp8-format e4m3 --bf16",
    ),
    "heads of one size: those of --multi-latent-attention have others": ("--multi-latent-attention", ""),
    "--fp8-format, and --first-last-layers-bf16": (
        "--fp8-format e4m3 | --first-last-layers-bf16",
        "--fp8-format e4m3 --first-last-layers-bf16",
    ),
    "--fp16": ("--bf16", "--fp16"),
    "--fp16, and no --loss-scale": (" | --fp16 --loss-scale 8 | --precision auto | --bf16", "--fp16"),
    "--save-interval auto": ("--save-interval 4", "--save-interval auto"),
    "--save": ("", "--save s"),
    "--save-hf": ("--save s", "--save s --save-hf h"),
    "--load": ("--save s | ", "--load s"),
    "--load, and not --finetune": ("--load s --finetune", "--load s"),
    "--flight-recorder-dump-path": ("", "--flight-recorder-dump-path traces"),
    "--on-spike rollback": ("--on-spike skip | ", "--on-spike rollback"),
    "--timing-log-level above 0": ("", "--timing-log-level 1"),
    "--timing-log-level above 0 and more than one rank": ("--timing-log-level 1", "2: --timing-log-level 1"),
    "--metrics-port": ("", "--metrics-port 9400"),
    "--on-event or --webhook": ("", "--on-event true"),
    "--straggler-detection": ("--no-straggler-detection", ""),
    "--timing-log-level above 0, and --tensorboard-dir or --wandb-project": (
        "--timing-log-level 1",
        "--timing-log-level 1 --tensorboard-dir t",
    ),
    "--auto-parallel or --micro-batch-size auto": ("--dry-run | ", "--auto-parallel | --micro-batch-size auto"),
    "--dry-run, --preflight or --auto-parallel": ("", "--dry-run | --preflight | --auto-parallel"),
    "world_size": ("", "--print-topology | --dry-run"),
    "local_world_size": (" | --print-topology", "--dry-run"),
}
GIVEN = {  # where another spelling than its own is tried, or the value matters
    "window_size": "--window-size 7,0",
    "num_layers_per_virtual_pipeline_stage": "--num-layers-per-virtual-pipeline-stage 1",
    "hierarchical_context_parallel_sizes": "--hierarchical-context-parallel-sizes 2 1",
    "sharding_stage": "--use-distributed-optimizer",
    "muon_nesterov": "--muon-use-nesterov",
    "resume_schedule": "--override-opt_param-scheduler",
    "load_strictness": "--dist-ckpt-strictness log_all",
    "hysteresis": "--hysteresis 2",  # the default, as scripts of Megatron-LM spell it out
}
CONDITIONS = declared("needs", *GROUPS.values()) | optimizer_rules.IDLE
SETTINGS = {setting.name: setting for setting in settings_of(GROUPS)}
BASE = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --lr 1e-3 --vocab-size 90"


def config(flags: str):
    return parse_pretrain(f"{BASE} {flags}".split())


def case(name: str) -> tuple[str, list[str], list[str]]:
    """(flags that give the setting, flags without its condition, flags with it)"""
    setting, condition = SETTINGS[name], CONDITIONS[name].words
    value = {bool: "", int: "3", float: "0.3", str: "d"}.get(setting.kind) if isinstance(setting.kind, type) else None
    other = next(choice for choice in setting.kind if choice != setting.default) if value is None else value
    without, with_effect = CASES.get(name) or CASES.get(condition, ("", condition))
    return GIVEN.get(name, f"{setting.flag} {other}"), without.split(" | "), with_effect.split(" | ")


def said_of(name: str, flags: str, more: str) -> list[str]:
    """What is said of a setting that is given by `flags`, with more flags on some ranks."""
    ranks, colon, words = more.partition(":")
    found = idle(config(f"{flags} {words if colon else more}"), int(ranks) if colon else 1)
    return [words for key, words in found.items() if key == name]


def test_conditions_of_the_network_are_those_of_the_recipe():
    assert pretrain_gpt.recipe().idle is gpt_rules.IDLE
    assert set(CASES) <= {needs.words for needs in CONDITIONS.values()} | set(CONDITIONS)
    assert {"rotary_base", "moe_router_topk", "reset_position_ids"} <= gpt_rules.IDLE.keys()
    assert gpt_rules.IDLE.keys().isdisjoint(["weight_bits", "sparsity_layers", "save_retries"])


@pytest.mark.parametrize("name", CONDITIONS)
def test_a_setting_is_said_where_it_has_no_effect_and_only_there(name):
    flags, without, with_effect = case(name)
    for more in without:
        [words] = said_of(name, flags, more)
        assert words.startswith(f"{flags.split()[0].replace('_', '-')}") and " has no effect without " in words
        assert said_of(name, "", more) == []  # nobody gave it
    assert [said_of(name, flags, more) for more in with_effect] == [[]] * len(with_effect)


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


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", SAME)
def test_what_is_said_to_have_no_effect_has_none(name, train):
    """The losses of a run with the setting and of one without are the same to the bit."""
    flags, [without, *_], [with_effect, *_] = case(name)

    def losses(more, own, folder):
        return train(f"--train-iters 3 --reset-attention-mask --lr-warmup-iters 1 {more} {own}", folder).losses

    assert losses(without, "", "a") == losses(without, flags, "b")
    if name == "weight_decay":
        assert losses(with_effect, "", "c") != losses(with_effect, flags, "d")  # so the comparison sees one
