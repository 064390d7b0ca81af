# SPDX-License-Identifier: Apache-2.0
"""A server of a toy engine, for the tests of a module."""

import pytest

from tests.inference.conftest import checkpoint, new_checkpoint, small_gpt, vocabulary  # noqa: F401

for package in ("starlette", "uvicorn", "pydantic", "prometheus_client", "jinja2"):
    pytest.importorskip(package, reason=f"{package} is not installed: pip install '.[serve]'")


@pytest.fixture(scope="module")
def toy():
    from tests.serving.toy import served

    with served() as found:
        yield found
