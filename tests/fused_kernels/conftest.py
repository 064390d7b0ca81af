# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture
def device() -> str:
    """Where the kernels run; `tests/gpu` runs the same tests on CUDA."""
    return "cpu"
