# SPDX-License-Identifier: Apache-2.0
import pytest


@pytest.fixture
def device() -> str:
    return "cuda"
