# SPDX-License-Identifier: Apache-2.0
"""`--torch-compile` on a CPU, by the compiler that users have (inductor), against a loop in plain PyTorch."""

import pytest

import pretrain_gpt
from tests.training.plain_loop import Job, train
from tests.training.test_plain_loop import ADAM, FLAGS, PLAIN, SIX, compare


@pytest.mark.full
@pytest.mark.parametrize(
    "more", ["", "--recompute-granularity full", "--recompute-activations --recompute-modules mlp"]
)
def test_compiled_layers_train_as_the_plain_loop_does(tmp_path, more):
    """Losses, norms, weights and moments of six steps, to rounding."""
    pretrain_gpt.main(f"{FLAGS} {SIX} {ADAM} --torch-compile {more} --save {tmp_path}".split())
    compare(tmp_path, train(Job(**PLAIN)), rel=4e-6, step=4e-5)
