# SPDX-License-Identifier: Apache-2.0
"""The tool that users check layouts with: it passes what is right, and a planted bug turns it red."""

import pytest

from megatron.errors import SettingsError, UsageError
from megatron.mpu import mappings
from megatron.optimizer.zero import ShardedAdamW
from megatron.tools import verify_layout

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


def test_right_layouts_pass(capsys):
    code, text = _verify("--layouts tp2,dp2,tp2sp-dp2", capsys)
    assert code == 0 and text.count("PASS") == 3 and "3 of 3 pass" in text


def test_the_layout_of_the_flags_is_the_default(capsys):
    code, text = _verify("--tensor-model-parallel-size 2 --sequence-parallel", capsys)
    assert code == 0 and "tp2-sp" in text


def test_bf16_has_limits_of_its_own(capsys):
    code, text = _verify("--layouts tp2 --bf16", capsys)
    assert code == 0 and "limits for bf16" in text


def _no_sum(self, *args):
    return None


@pytest.mark.parametrize(
    "layout, where, name, bug",
    [
        ("tp2sp", ShardedAdamW, "_sum_partial", _no_sum),  # gradients of norms stay partial sums
        ("tp2", mappings, "_total", lambda x, axis: x),  # no all-reduce, in neither direction
    ],
)
def test_a_planted_bug_turns_it_red(layout, where, name, bug, capsys, monkeypatch):
    assert hasattr(where, name), f"{name} has another name now: plant the bug there"
    if where is mappings:
        pytest.importorskip("torch")
        for mapping in ("copy_to", "reduce_from"):
            broken = mappings.conjugate(lambda x, axis: x, lambda x, axis: x)
            monkeypatch.setattr(mappings, mapping, broken)
    else:
        monkeypatch.setattr(where, name, bug)
    code, text = _verify(f"--layouts {layout}", capsys)
    assert code == 1 and "FAIL" in text and "0 of 1 pass" in text


@pytest.mark.parametrize(
    "layout, words",
    [
        ("tp2xx", "'xx' in layout 'tp2xx' is none of"),
        ("tp2tp4", "says tp twice"),
    ],
)
def test_layouts_that_cannot_be_read(layout, words, capsys):
    with pytest.raises(UsageError, match=words):
        _verify(f"--layouts {layout}", capsys)


def test_impossible_layouts_are_refused_with_what_works(capsys):
    with pytest.raises(SettingsError, match="--micro-batch-size 4 x data parallel size 3"):
        verify_layout.main(f"{FLAGS.replace('--shrink', '')} --layouts dp3".split())
