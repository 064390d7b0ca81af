# SPDX-License-Identifier: Apache-2.0
"""docs/serving.md against the code: commands, parameters, limits, metrics."""

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from megatron.model.quantization import QuantizeOptions
from megatron.serving.megatron_api import MegatronBody
from megatron.serving.metrics import PREFIX, ServeMetrics
from megatron.serving.openai_requests import Chat, Completion
from megatron.serving.settings import ServeLimits, ServeOptions, parsed

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
WITHOUT_BREAKS = PAGE.replace("\\\n", " ")
COMMANDS = re.findall(
    r"^(?:.*-m )?.*megatron\.tools\.serve (.*)$",
    "\n".join(re.findall(r"```(?:ba)?sh\n(.*?)```", WITHOUT_BREAKS, re.S)),
    re.M,
)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_flags_that_there_are(command):
    settings = parsed(shlex.split(command, comments=True)).serve
    assert settings.load or settings.follow or settings.replicas


def test_there_are_commands():
    assert len(COMMANDS) >= 5


def test_every_parameter_is_on_the_page():
    words = set(re.findall(r"`([A-Za-z_]+)", PAGE)) | {"safety_identifier"}
    for body in (Completion, Chat, MegatronBody):
        assert set(body.model_fields) - words == set()


def test_limits_are_those_of_the_code():
    rows = dict(re.findall(r"^\| `--([a-z-]+)` \| ([0-9]+)", PAGE, re.M))
    units = dict(max_body_bytes=1 << 20)
    found = {
        name.replace("-", "_"): float(value) * units.get(name.replace("-", "_"), 1) for name, value in rows.items()
    }
    assert len(found) >= 6 and found == {name: getattr(ServeLimits(), name) for name in found}
    assert f"`--stop-timeout` ({ServeLimits().stop_timeout:g} s)" in " ".join(PAGE.split())


def test_flags_on_the_page_are_there():
    known = {one.name for group in (ServeOptions, ServeLimits, QuantizeOptions) for one in fields(group)}
    known |= {"tensor_model_parallel_size", "pipeline_model_parallel_size", "nproc_per_node", "kill_every", "seconds"}
    known |= {"num_beams", "format", "tokens_to_generate"}
    known |= {"model", "tensor_parallel_size", "pipeline_parallel_size", "dtype", "max_num_seqs"}  # vLLM's names
    named = {flag.replace("-", "_").removeprefix("no_") for flag in re.findall(r"--([a-z][a-z-]+)", PAGE)}
    assert named - known == set()


def test_metrics_on_the_page_are_there():
    metrics = ServeMetrics()
    metrics.of("m").prompts(1, 1)
    names = {family.name.removeprefix(PREFIX) for family in metrics.registry.collect()}
    section = PAGE[PAGE.index("## Metrics") : PAGE.index("## Measured")]
    assert {name for name in names if f"`{name}" not in section} == set()
