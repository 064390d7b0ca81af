# SPDX-License-Identifier: Apache-2.0
"""What a step differentiates, against the sums written out by hand."""

import pytest
import torch

from megatron.settings.schema import Config
from megatron.training.loop import objective

WEIGHTS = {"lm loss": 1.0, "extra loss": 0.5, "logged": 0.0}


def test_only_sums_of_weight_are_minimised():
    loss_of, unscale = objective(Config(), WEIGHTS, loss_scale=8.0, size=4, micro_batches=2)
    sums = {"lm loss": torch.tensor(6.0), "extra loss": torch.tensor(2.0), "logged": torch.tensor(float("nan"))}
    nominal = 4 * Config().model.seq_length
    assert loss_of(sums, None).item() == pytest.approx(8.0 * (6.0 + 0.5 * 2.0) / nominal)
    assert loss_of({"logged": torch.tensor(1.0)}, None) is None  # a stage that logs alone has nothing to differentiate
    assert unscale(tokens=10) == pytest.approx(nominal / 10 / 8.0)
