# SPDX-License-Identifier: Apache-2.0
"""Recipes of NeMo 2 and Megatron-Bridge by name: sizes as published, values by hand, overrides, and what is refused."""

import math
import re

import pytest

import pretrain_gpt
from megatron.errors import UsageError
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of
from megatron.planner.target import vocabulary_of
from megatron.settings.dialects.runs import DIALECTS
from megatron.settings.dialects.shell import read_words
from megatron.tools import translate as tool
from megatron.training import rules
from tests.documented.test_translate import flags_printed, pairs, printed

NEMO, BRIDGE = DIALECTS["nemo2"], DIALECTS["megatron-bridge"]
START = {NEMO.name: ["nemo", "llm", "pretrain", "--factory"], BRIDGE.name: ["run_recipe.py", "--recipe"]}
# Billions of parameters, from the models' cards and reports; of DeepSeek-V3 with its depth of multi-token prediction.
PUBLISHED = {
    "llama2_7b": 6.74, "llama3_8b": 8.03, "llama3_70b": 70.6, "llama31_8b": 8.03, "llama31_70b": 70.6,
    "llama31_405b": 405.9, "llama32_1b": 1.24, "llama32_3b": 3.21, "llama31_nemotron_70b": 70.6,
    "llama31_nemotron_nano_8b": 8.03,
    "mistral_7b": 7.24, "mistral_nemo_12b": 12.2, "mixtral_8x7b": 46.7, "mixtral_8x22b": 140.6, "phi3_mini": 3.82,
    "gemma_2b": 2.51, "gemma_7b": 8.54, "gemma2_2b": 2.61, "gemma2_9b": 9.24, "gemma2_27b": 27.2, "gemma3_1b": 1.0,
    "nemotron3_4b": 4.19, "nemotron3_8b": 8.54, "nemotron3_22b": 21.3, "nemotron4_15b": 15.6, "nemotron4_340b": 341.0,
    "qwen2_500m": 0.494, "qwen2_1p5b": 1.54, "qwen2_7b": 7.62, "qwen2_72b": 72.7, "qwen25_500m": 0.494, "qwen25_1p5b": 1.54,
    "qwen25_7b": 7.62, "qwen25_14b": 14.8, "qwen25_32b": 32.8, "qwen25_72b": 72.7, "qwen3_600m": 0.596, "qwen3_1p7b": 1.72,
    "qwen3_4b": 4.02, "qwen3_8b": 8.19, "qwen3_14b": 14.8, "qwen3_32b": 32.8, "qwen3_30b_a3b": 30.5,
    "qwen3_235b_a22b": 235.1, "qwen3_next_80b_a3b": 81.3, "gpt3_175b": 174.6, "deepseek_v2_lite": 15.7,
    "deepseek_v3": 682.6, "gpt_oss_20b": 20.9, "gpt_oss_120b": 116.8, "olmoe_7b": 6.92, "kimi_k2": 1026.4,
    "nemotronh_8b": 8.1,
}  # fmt: skip


def found_in(dialect, name: str, *more: str):
    """The run of a recipe with overrides."""
    return dialect.own.of_command(read_words([*START[dialect.name], name, *more], dialect.programs), None)


def config_of(run):
    words = [word for line in run.found.lines for word in (line.flag, *line.words)]
    return parse_any(words, recipe=pretrain_gpt.recipe())


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "dialect, name",
    [(one, row[0]) for one in (NEMO, BRIDGE) for row in one.own.table.names],
    ids=lambda one: str(one)[:40],
)
def test_every_recipe_is_a_command_of_this_suite(dialect, name):
    """Its flags have no problem on as many ranks as its layout needs, its model has the published size, and each of its
    values is a line, or stands below them with a reason."""
    run = found_in(dialect, name)
    config = config_of(run)
    p, size = config.parallel, facts_of(config, vocabulary_of(config)[0]).parameters
    world = p.tensor_model_parallel_size * p.pipeline_model_parallel_size * p.context_parallel_size
    parts = p.expert_tensor_parallel_size or p.tensor_model_parallel_size
    assert (
        rules.check(config, math.lcm(world, p.pipeline_model_parallel_size * p.expert_model_parallel_size * parts))
        == []
    )
    family = max((one for one in PUBLISHED if name.startswith(one)), key=len)
    assert size / 1e9 == pytest.approx(PUBLISHED[family], rel=0.005)
    named = {one.text for one, _ in run.found.idle + run.found.lost} | {line.source.text for line in run.found.lines}
    named |= {word.split(": ")[1] for word in run.notes if ": " in word}
    _, values = dialect.own.table.recipes[name]
    assert {f"{key}={value.replace('+', ',')}" for key, value in values.items()} <= named | {
        f"trainer.{key}={values[f'trainer.{key}']}" for key in ("devices", "num_nodes") if f"trainer.{key}" in values
    }
    assert not [text for _, text in run.found.lost if "that is known" in text]


def test_values_of_recipes_by_hand():
    """As NeMo's nemotron3_22b.py and Bridge's qwen3_moe.py have them."""
    flags = lambda run: {line.flag: " ".join(line.words) for line in run.found.lines}
    nemotron, qwen = flags(found_in(NEMO, "nemotron3_22b")), flags(found_in(BRIDGE, "qwen3_30b_a3b_pretrain_config"))
    wanted = {
        "--num-layers": "40", "--hidden-size": "6144", "--ffn-hidden-size": "24576", "--num-attention-heads": "48",
        "--init-method-std": "0.008", "--squared-relu": "", "--rotary-percent": "0.5", "--tensor-model-parallel-size": "2",
        "--pipeline-model-parallel-size": "4", "--num-virtual-stages-per-pipeline-rank": "10", "--seq-length": "4096",
        "--global-batch-size": "32", "--micro-batch-size": "1", "--train-iters": "300000", "--lr": "0.0001",
        "--min-lr": "1e-05", "--lr-warmup-iters": "500", "--lr-decay-style": "cosine", "--adam-eps": "1e-5", "--bf16": "",
        "--sharding-stage": "1", "--overlap-grad-reduce": "", "--overlap-param-gather": "", "--clip-grad": "1.0",
    }  # fmt: skip
    assert {flag: nemotron.get(flag) for flag in wanted} == wanted
    wanted = {
        "--model-name-or-path": "qwen3-30b-a3b", "--expert-model-parallel-size": "16", "--expert-tensor-parallel-size": "1",
        "--global-batch-size": "1024", "--micro-batch-size": "1", "--train-iters": "100", "--lr-warmup-iters": "40",
        "--lr-decay-iters": "100", "--save-interval": "50", "--grad-reduce-in-bf16": "", "--weight-decay": "0.033",
        "--moe-token-dispatcher-type": "flex", "--moe-router-load-balancing-type": "aux_loss",
        "--moe-aux-loss-coeff": "1e-3", "--adam-eps": "1e-8", "--split": "9999,8,2", "--eval-iters": "32", "--seed": "1234",
    }  # fmt: skip
    assert {flag: qwen.get(flag) for flag in wanted} == wanted
    assert flags(found_in(BRIDGE, "gpt_oss_20b_pretrain_config"))["--moe-router-load-balancing-type"] == "none"
    assert "--recompute-granularity" not in qwen and "--num-virtual-stages-per-pipeline-rank" not in qwen


def test_what_a_command_says_wins(capsys):
    line = "nemo llm pretrain --factory \"llama3_8b(num_nodes=2, name='mine')\" trainer.max_steps=10 -y "
    line += "trainer.strategy.context_parallel_size=4 trainer.strategy.foo=1 log.ckpt.save_top_k=null "
    line += "model.config.num_layers=8"
    text = printed(capsys, "--from", "nemo", line, unknown="trainer.strategy.foo=1: no key that is known of NeMo 2")
    found = pairs(flags_printed(text))
    assert found["--train-iters"] == "10" and found["--context-parallel-size"] == "4" and found["--num-layers"] == "8"
    assert found["--save"] == found["--load"] == "nemo_experiments/mine" and "--keep-last" not in found
    assert "torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py" in text
    assert "trainer.max_steps=1168251: command:1: trainer.max_steps=10 says another value" in text
    assert "trainer.strategy.foo=1: no key that is known of NeMo 2" in text
    bridge = "torchrun --nproc_per_node 4 scripts/training/run_recipe.py --recipe llama32_1b_pretrain_config"
    bridge += " --mode pretrain -gb 256 model.tensor_model_parallel_size=2 --foo 3"
    text = printed(capsys, "--from", "megatron-bridge", bridge, unknown="--foo: no flag of Megatron-Bridge's command")
    found = pairs(flags_printed(text))
    assert found["--global-batch-size"] == "256" and found["--tensor-model-parallel-size"] == "2"
    assert (
        "torchrun --nproc_per_node 4 pretrain_gpt.py" in text and "--foo: no flag of Megatron-Bridge's command" in text
    )


@pytest.mark.parametrize(
    "suite, lines, wanted, lost",
    [
        (
            "nemo",
            """
            from nemo.collections import llm
            recipe = llm.llama3_70b.pretrain_recipe(name="big", num_nodes=4, num_gpus_per_node=8)
            recipe.trainer.strategy.tensor_model_parallel_size = 8
            recipe.trainer.max_steps = steps()
            recipe.data.global_batch_size = 256
            other.data.micro_batch_size = 9
            """,
            {"--tensor-model-parallel-size": "8", "--global-batch-size": "256", "--save": "nemo_experiments/big"},
            "recipe.trainer.max_steps = steps()",
        ),
        (
            "megatron-bridge",
            """
            from megatron.bridge.recipes.llama import llama32_1b_pretrain_config as pretrain_config
            cfg = pretrain_config()
            cfg.train.train_iters = 20
            cfg.model.sequence_parallel = False
            cfg.scheduler.lr_warmup_iters = None
            cfg.dataset.blend = paths
            """,
            {"--train-iters": "20", "--sequence-parallel": "false", "--model-name-or-path": "llama-3.2-1b"},
            "cfg.dataset.blend = paths",
        ),
    ],
)
def test_scripts_are_read(suite, lines, wanted, lost, tmp_path, capsys):
    script = tmp_path / "run.py"
    script.write_text(re.sub(r"(?m)^ {12}", "", lines))
    text = printed(capsys, "--from", suite, str(script))
    found = pairs(flags_printed(text))
    assert {flag: found.get(flag) for flag in wanted} == wanted and found["--micro-batch-size"] == "1"
    assert ("--lr-warmup-iters" in found) is (suite == "nemo")
    assert f"{lost}: it would have to be run" in text


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--from", "nemo", "--recipe", "llama3_9b"],
            "llama3_9b: no recipe of NeMo 2 that is known; did you mean llama3_8b",
        ),
        (["--from", "nemo", "--recipe", "t5_220m"], "encoder-decoders are pretrain_t5.py's"),
        (["--from", "nemo", "--recipe", "llama33_nemotron_super_49b"], "a search of architectures"),
        (["--from", "megatron-bridge", "--recipe", "llama3_8b_sft_config"], "it is fine-tuning: finetune.py"),
        (
            ["--from", "megatron-bridge", "--recipe", "llama3_8b_pretrain_2gpu_h100_nvfp4_config"],
            "not part of this suite",
        ),
        (["--from", "deepspeed", "--recipe", "llama3_8b"], "whose recipe it is"),
        (["--from", "nemo2", "nemo llm pretrain trainer.max_steps=1"], "no recipe is named"),
        (["--from", "nemo2", "nemo llm pretrain --factory 'llama3_8b('"], "the name of a recipe is wanted"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        tool.main(words)
