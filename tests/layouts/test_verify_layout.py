# SPDX-License-Identifier: Apache-2.0
"""The tool that users check layouts with: it passes what is right, and a planted bug turns it red."""

import math
import re
import sys

import pytest
import torch

from megatron.errors import SettingsError, UsageError
from megatron.mpu import mappings
from megatron.optimizer.zero import DistributedOptimizer
from megatron.pipeline.stages import chunks_of
from megatron.planner.parity import Trace, compare, laid_out, parse_layout
from megatron.settings.parse import parse_pretrain
from megatron.tools import verify_layout

pytestmark = pytest.mark.sampled(10)

FLAGS = """--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --mock-data --vocab-size 50257
    --lr 1e-3 --train-iters 100000 --global-batch-size 512 --micro-batch-size 4 --shrink --steps 3"""


def _verify(flags, capsys):
    """(exit code, output) of the tool."""
    try:
        verify_layout.main(f"{FLAGS} {flags}".split())
        code = 0
    except SystemExit as leaving:
        code = leaving.code
    return code, capsys.readouterr().out


@pytest.mark.sampled(10)
def test_right_layouts_pass(capsys):
    code, text = _verify("--layouts tp2,dp2,tp2sp-dp2", capsys)
    assert code == 0 and text.count("PASS") == 3 and "3 of 3 pass" in text


def test_the_layout_of_the_flags_is_the_default(capsys):
    code, text = _verify("--tensor-model-parallel-size 2 --sequence-parallel", capsys)
    assert code == 0 and "tp2-sp" in text


def test_bf16_has_limits_of_its_own(capsys):
    code, text = _verify("--layouts tp2 --bf16", capsys)
    assert code == 0 and "limits for bf16" in text


@pytest.mark.sampled(10)
def test_matrices_are_orthogonalised_in_fp32_here(capsys):
    """Whatever --muon-fp32-matmul-prec says: bf16 would round layouts apart by more than the limits of fp32."""
    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --vocab-size 100 --mock-data"
    steps = "--global-batch-size 8 --micro-batch-size 1 --train-iters 5 --steps 5 --lr 1e-2 --optimizer muon"
    verify_layout.main(f"{shape} {steps} --layouts tp2sp --swiglu --disable-bias-linear".split())
    assert "1 of 1 pass" in capsys.readouterr().out


def _no_sum(self, *args):
    return None


@pytest.mark.parametrize(
    "layout, where, name, bug",
    [
        ("tp2sp", DistributedOptimizer, "_sum_partial", _no_sum),  # gradients of norms stay partial sums
        ("tp2", mappings, "_total", lambda x, axis: x),  # no all-reduce, in neither direction
    ],
)
def test_a_planted_bug_turns_it_red(layout, where, name, bug, capsys, monkeypatch):
    assert hasattr(where, name), f"{name} has another name now: plant the bug there"
    if where is mappings:
        pytest.importorskip("torch")
        for mapping in ("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"):
            broken = mappings.conjugate(lambda x, axis: x, lambda x, axis: x)
            monkeypatch.setattr(mappings, mapping, broken)
    else:
        monkeypatch.setattr(where, name, bug)
    code, text = _verify(f"--layouts {layout}", capsys)
    assert code == 1 and "FAIL" in text and "0 of 1 pass" in text


@pytest.mark.parametrize("flags", ["", "--shrink"])
def test_one_process_is_not_compared_with_itself(flags):
    with pytest.raises(UsageError, match="nothing to compare(.*)\n(.*)--layouts"):
        verify_layout.main(f"{SMALL} --train-iters 1 --global-batch-size 2 {flags}".split())


@pytest.mark.sampled(10)
def test_flags_of_a_layout_that_gives_way_to_layouts_are_named(capsys):
    line = f"{SMALL} --train-iters 1 --global-batch-size 2 --tensor-model-parallel-size 2 --sequence-parallel --layouts"
    for layouts, named in {
        "dp2": "note: --layouts dp2 replaces --tensor-model-parallel-size 2, --sequence-parallel",
        "tp2sp": "",
    }.items():
        verify_layout.main(f"{line} {layouts}".split())
        assert [text for text in capsys.readouterr().out.splitlines() if "replaces" in text] == [named] * bool(named)


@pytest.mark.parametrize(
    "layout, words",
    [
        ("tp2xx", "'xx' in layout 'tp2xx' is none of"),
        ("tp2tp4", "has tp twice"),
        ("tp2,dp2zero4", "zero4 in layout 'dp2zero4': the stages are 0, 1, 2, 3"),
        (",", "--layouts , names none"),
    ],
)
def test_layouts_that_cannot_be_read(layout, words, capsys):
    with pytest.raises(UsageError, match=words):
        _verify(f"--layouts {layout}", capsys)


@pytest.mark.parametrize(
    "flags, words",
    [
        ("--layouts dp3", "--micro-batch-size 4 x data parallel size 3"),
        ("--layouts dp3,pp2vp5", "(?s)2 of 2 layouts cannot be.*pp2vp5: .*into 10 even stages"),
        ("--layouts dp2 --steps 0", "--steps 0 must be at least 1"),
        ("--layouts dp2 --train-iters 0", "--train-iters 0 trains nothing"),
        ("--data-parallel-size 4 --gradient-accumulation-steps 3", "accumulation-steps 3 is not 512"),
    ],
)
def test_what_cannot_be_compared_is_refused_with_what_works(flags, words, capsys):
    with pytest.raises(SettingsError, match=words):
        verify_layout.main(f"{FLAGS.replace('--shrink', '')} {flags}".split())


SMALL = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-3
    --micro-batch-size 1"""


@pytest.mark.parametrize(
    "flags, layout, steps",
    [
        ("--train-iters 2 --local-batch-size 2 --data-parallel-size 2", "dp2", 2),  # the batch follows from the ranks
        # No more steps than training has
        ("--train-samples 8 --gradient-accumulation-steps 2 --layouts dp2", "dp2", 2),
        (
            "--train-iters 1 --global-batch-size 2 --layouts tp2 --on-spike rollback --save x --save-interval 1 "
            "--profile --profile-ranks 7",
            "tp2",
            1,
        ),
    ],
)
def test_the_command_line_of_a_training_can_be_compared(flags, layout, steps, capsys):
    verify_layout.main(f"{SMALL} {flags}".split())
    text = capsys.readouterr().out
    assert text.startswith(f"{steps} steps of 2 layers") and f"\n{layout} " in text and "1 of 1 pass" in text


# Where a recipe of one's own breaks: layouts, the row, the line of the file below that it names, the others that pass.
MISTAKES = [
    ("tp2,dp2", "tp2 +2 +- +- +-  FAIL .rank [01]: ZeroDivisionError: division by zero", "len(x) / (2 - tp)", 1),
    ("pp2", "one process +1 +- +- +-  FAIL .rank 0: KeyError: 'alibi'", "config.extra['alibi']", 0),
    ("dp2", "one process +1 +- +- +-  FAIL .rank 0: RuntimeError: no facts here", "raise RuntimeError", 0),
    ("dp2", "all layouts +- +- +-  FAIL .NameError: name 'foo' is not defined", "foo.bar()", 0),
    ("dp2", "all layouts +- +- +-  FAIL .SyntaxError: '.' was never closed", "oh = (", 0),
]


@pytest.mark.parametrize("layouts, said, line, passing", MISTAKES, ids=[case[2] for case in MISTAKES])
def test_what_a_recipe_raises_is_a_row_with_file_and_line(layouts, said, line, passing, capsys, tmp_path, monkeypatch):
    lines = [
        "from dataclasses import replace",
        "import torch",
        "import pretrain_gpt",
        "def facts(config, vocab_size):",
        "    raise RuntimeError('no facts here')" * (line == "raise RuntimeError"),
        "    return pretrain_gpt.facts(config, vocab_size)",
        "def build_model(config, mesh, vocab_size, **stage):",
        "    if torch.distributed.is_initialized():",  # not where this process looks ahead
        "        config.extra['alibi']" if "extra" in line else "        pass",
        "    model = pretrain_gpt.build_model(config, mesh, vocab_size, **stage)",
        "    if mesh.tp.size == 2:",
        "        def divided(block, args, x, tp=mesh.tp.size):",
        "            return len(x) / (2 - tp)",
        "        for block in model.blocks.values():",
        "            block.register_forward_hook(divided)",
        "    return model",
        "def recipe():",
        "    return replace(pretrain_gpt.recipe(), model_type='mistaken_recipe', facts=facts, build_model=build_model)",
        line if line in ("foo.bar()", "oh = (") else "",
    ]
    (tmp_path / "mistaken_recipe.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mistaken_recipe", raising=False)
    with pytest.raises(SystemExit) as leaving:
        flags = f"{SMALL} --train-iters 1 --global-batch-size 2 --model-type mistaken_recipe --layouts {layouts}"
        verify_layout.main(flags.split())
    text = capsys.readouterr().out
    number = next(number for number, each in enumerate(lines, 1) if line in each)
    assert leaving.value.code == 1 and text.count("PASS") == passing
    assert re.search(rf"^{said} \(\S*mistaken_recipe.py:{number}\)\)$", text, re.M), text


def test_a_layout_that_is_left_open_is_chosen_first(capsys):
    line = f"{SMALL} --train-iters 1 --global-batch-size 2 --world-size 2"
    asked = verify_layout.VerifyLayoutOptions()
    config, [layout] = verify_layout.wanted(parse_pretrain(f"{line} --auto-parallel".split()), asked)
    assert layout.world_size == 2 and config.batch.micro_batch_size > 0
    assert "expected to be the fastest" in capsys.readouterr().out
    shrunk, _ = verify_layout.wanted(
        parse_pretrain(f"{line} --micro-batch-size auto".replace("--micro-batch-size 1", "").split()),
        verify_layout.VerifyLayoutOptions(layouts="dp2", shrink=True),
    )
    assert (shrunk.batch.micro_batch_size, shrunk.batch.global_batch_size) == (1, 4)


def test_a_chunk_count_is_what_the_token_says():
    config = parse_pretrain(f"{SMALL} --num-layers 12 --train-iters 1 --global-batch-size 4".split(), {})
    found = laid_out(config, parse_layout("pp2vp3"))
    assert chunks_of(found.parallel, 12) == 3


def test_fp16_is_compared_in_steps_that_are_made(monkeypatch):
    line = f"{SMALL} --train-iters 1 --global-batch-size 4 --fp16"
    config = laid_out(parse_pretrain(line.split(), {}), parse_layout("tp2"))
    assert config.precision.initial_loss_scale <= 256
    nothing = Trace([5.0], [math.inf], {"w": torch.ones(2)}, 0.0)
    assert compare(nothing, nothing).norm == 0.0
    monkeypatch.setattr(verify_layout, "trained", lambda *args, **checks: nothing)
    with pytest.raises(SettingsError, match="all gradients overflow"):
        verify_layout.main(f"{line} --loss-scale 1e30 --layouts tp2".split())


EXPERTS = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --swiglu --disable-bias-linear
    --num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 32 --mock-data --vocab-size 100 --micro-batch-size 2
    --global-batch-size 4 --train-iters 2 --eval-iters 0 --lr 1e-3 --device cpu --bf16 --layouts tp2-ep2
    --steps 2""".split()


@pytest.mark.full
def test_layouts_replay_the_experts_of_one_process(capsys):
    """In bf16 tokens choose other experts in another layout: they are counted, and take those of one process."""
    verify_layout.main(EXPERTS)
    text = capsys.readouterr().out
    share = float(re.search(r"PASS .*; ([0-9.]+)% of tokens would choose other experts", text)[1])
    assert 0 < share < 20
    assert "each token went to the experts that it chose in one process" in text
