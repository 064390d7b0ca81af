# SPDX-License-Identifier: Apache-2.0
"""Golden scales were made with megatron-core 0.16.1's DynamicGradScaler."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.optimizer.scaler import LossScaler
from megatron.settings.schema import Precision


def run(scaler: LossScaler, overflows: str) -> list[float]:
    """Scales after each step; x is an overflow, . a good step."""
    scales = []
    for step in overflows:
        scaler = scaler.update(step == "x")
        scales.append(scaler.scale)
    return scales


def test_sequence_equals_megatrons():
    scaler = LossScaler(scale=16.0, window=3, hysteresis=2, min_scale=2.0)
    assert run(scaler, "x.xx..x...x...xxxxx") == [16, 16, 8, 4, 4, 4, 2, 2, 2, 4, 4, 4, 4, 8, 8, 4, 2, 2, 2]


def test_good_steps_do_not_give_hysteresis_back():
    scaler = LossScaler(scale=16.0, window=100, hysteresis=2, min_scale=1.0)
    assert run(scaler, "x" + "." * 50 + "x")[-1] == 8.0


def test_defaults_of_fp16_are_megatrons():
    scaler = LossScaler.of(Precision(precision="fp16"))
    assert scaler == LossScaler(scale=2.0**32, window=1000, hysteresis=2, min_scale=1.0)
    assert run(scaler, "." * 1000)[-2:] == [2.0**32, 2.0**33]


@pytest.mark.parametrize(
    "precision, scale",
    [
        (Precision(precision="fp32"), 1.0),
        (Precision(precision="bf16"), 1.0),
        (Precision(precision="fp16", loss_scale=4096.0), 4096.0),
    ],
)
def test_constant_scales_never_change(precision, scale):
    scaler = LossScaler.of(precision)
    assert not scaler.dynamic
    assert set(run(scaler, "x.x..xxx")) == {scale}
    assert scaler.restored(dict(scale=7.0, good_steps=1, overflows=1)) == scaler


@given(st.text("x.", max_size=40), st.text("x.", max_size=40), st.integers(1, 5), st.integers(1, 4))
def test_a_restored_scaler_goes_on_as_if_nothing_had_happened(before, after, window, hysteresis):
    scaler = LossScaler(scale=1024.0, window=window, hysteresis=hysteresis, min_scale=1.0)
    whole = run(scaler, before + after)
    for step in before:
        scaler = scaler.update(step == "x")
    fresh = LossScaler(scale=1024.0, window=window, hysteresis=hysteresis, min_scale=1.0)
    restored = fresh.restored(json.loads(json.dumps(scaler.state())))
    assert restored == scaler
    assert run(restored, after) == whole[len(before) :]
    assert all(scale >= 1.0 for scale in whole)


def test_restoring_into_a_shorter_window_still_grows():
    restored = LossScaler(scale=8.0, window=3, hysteresis=1).restored(dict(scale=8.0, good_steps=500, overflows=0))
    assert run(restored, "...")[-1] > 8.0
