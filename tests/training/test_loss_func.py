# SPDX-License-Identifier: Apache-2.0
"""What a step differentiates, against the sums written out by hand."""

from types import SimpleNamespace

import pytest
import torch

from megatron.errors import SettingsError
from megatron.model.recipe import Recipe, sums_of
from megatron.settings.schema import Distillation, Optimizer
from megatron.training.loss import make_loss_func

CONFIG = SimpleNamespace(model=SimpleNamespace(seq_length=64), optimizer=Optimizer())
WEIGHTS = {"lm loss": 1.0, "extra loss": 0.5, "logged": 0.0}


def test_only_sums_of_weight_are_minimised():
    loss_func, unscale = make_loss_func(CONFIG, WEIGHTS, loss_scale=8.0, size=4, num_microbatches=2)
    sums = {"lm loss": torch.tensor(6.0), "extra loss": torch.tensor(2.0), "logged": torch.tensor(float("nan"))}
    nominal = 4 * 64
    assert loss_func(sums, None).item() == pytest.approx(8.0 * (6.0 + 0.5 * 2.0) / nominal)
    # A stage that logs alone has nothing to differentiate
    assert loss_func({"logged": torch.tensor(1.0)}, None) is None
    assert unscale(torch.tensor(10.0, dtype=torch.float64)).item() == nominal / 10 / 8.0


def sums(own, z_loss=0.0):
    own_settings = dict(extra={"mine": SimpleNamespace(coeff=0.25)}, distillation=Distillation())
    config = SimpleNamespace(model=SimpleNamespace(depths=0, z_loss_coeff=z_loss), **own_settings)
    return sums_of(Recipe("mine", None, None, None, sums=own), config)


def test_weights_of_sums_may_be_settings():
    assert sums(lambda config: {"lm loss": 1, "router": config.extra["mine"].coeff}) == {"lm loss": 1, "router": 0.25}
    assert sums(lambda config: {"lm loss": 1.0}, z_loss=1e-3) == {"lm loss": 1.0, "z loss": 1e-3}
    assert sums({"lm loss": 1.0, "logged": 0}) == {"lm loss": 1.0, "logged": 0}


@pytest.mark.parametrize("weight", [None, float("nan"), float("inf"), "0.1", True])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(SettingsError, match="the weight of 'router' is") as refused:
        sums(lambda config: {"lm loss": 1.0, "router": weight})
    assert refused.value.code == 3
