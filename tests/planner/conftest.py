# SPDX-License-Identifier: Apache-2.0
"""Plans for `--device cpu` are made for what memory is free on this machine: here it always is the same."""

import pytest

from megatron.planner import target


@pytest.fixture(autouse=True)
def free_memory(monkeypatch):
    """16 GB, however busy the machine is; ranks that are forked have them too."""
    monkeypatch.setattr(target, "available_memory", lambda: 16e9)
