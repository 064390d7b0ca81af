# SPDX-License-Identifier: Apache-2.0
"""The target of a plan: the cluster, the job and the vocabulary of the settings, the environment and this machine."""

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Optional

from megatron.errors import Failure, SettingsError, UsageError
from megatron.model.recipe import facts_of
from megatron.mpu.cpu_threads import cores
from megatron.planner import device as devices
from megatron.planner.cluster import Cluster
from megatron.planner.device import Device
from megatron.planner.layout import Job, Layout
from megatron.settings import rank_env
from megatron.settings.presets import GPT2_ROWS, cached, published_rows
from megatron.settings.schema import Config, Planner
from megatron.telemetry.host_memory import available_memory


def cluster_of(config: Config, env: Mapping[str, str] = os.environ, ask: bool = False) -> tuple[Cluster, str]:
    """The cluster of the settings, and a description of the source of its figures. ask: refuse to guess nodes of other than
    8 ranks.
    """
    asked, here = config.planner, rank_env.ranks(env)
    world = asked.world_size or here.world_size
    said = asked.local_world_size or here.local_world_size
    local = said or ranks_of_node(world)
    if world % min(local, world):
        raise SettingsError(f"--world-size {world} is not a multiple of --local-world-size {local}")
    memory = device_memory(asked, env)
    device, source = _device(config, memory, elsewhere=asked.world_size is not None, local=min(local, world))
    if asked.world_size and not said and local < world:
        if ask and local != 8:
            do = f"--local-world-size {local}, or another divisor of {world}"
            raise SettingsError(f"--world-size {world}: how many ranks does a node have?", "8 do not divide them", do)
        source += f"; {local} a node assumed: --local-world-size"
    margin = asked.memory_margin
    device = device if margin is None else replace(device, margin=margin)
    device = replace(device, mixture=config.model.mixture)
    return Cluster(device, world, min(local, world)), source


def ranks_of_node(world: int) -> int:
    """The default number of ranks per node: all of up to 8, else 8, or the largest divisor below 8.

    >>> [ranks_of_node(world) for world in (1, 6, 7, 16, 12)]
    [1, 6, 7, 8, 6]
    """
    return next(local for local in range(min(world, 8), 0, -1) if world % local == 0)


def device_memory(asked: Planner, env: Mapping[str, str] = os.environ) -> Optional[float]:
    """The memory of a device in GB from the flag, or else from the environment. Raises UsageError."""
    text = env.get("DEVICE_MEMORY_GB")
    if asked.device_memory_gb is not None or not text:
        return asked.device_memory_gb
    try:
        memory = float(text)
    except ValueError:
        memory = math.nan
    if not 0 < memory < math.inf:
        raise UsageError(f"DEVICE_MEMORY_GB={text} in the environment is not a number above 0")
    return memory


def _device(config: Config, memory: Optional[float], *, elsewhere: bool, local: int) -> tuple[Device, str]:
    """The device of a rank. elsewhere: the ranks are not on this machine."""
    asked, wanted = config.planner, config.kernels.device
    if asked.calibration:
        device = devices.choose(None, memory, asked.calibration)
        meant = "cpu" if (asked.device_name or wanted).lower() == "cpu" else "cuda"
        if (asked.device_name or wanted != "auto") and device.kind != meant:
            flag = f"--device-name {asked.device_name}" if asked.device_name else f"--device {wanted}"
            raise SettingsError(
                f"{asked.calibration} was measured on {device.name} ({device.kind}), and {flag} is another",
                do=f"leave {flag} out, or measure such a device: plan --calibrate FILE",
            )
        return device, f"measured: {asked.calibration}"
    if asked.device_name and asked.device_name.lower() != "cpu":
        return devices.choose(asked.device_name, memory), "from the table of devices"
    if asked.device_name or wanted == "cpu":
        return this_cpu(memory, local), "this CPU, with assumed speeds"
    here = installed_gpu()
    if here:
        return replace(here, memory_gb=memory or here.memory_gb), "the GPU of this machine"
    if memory or elsewhere or wanted == "cuda":
        return devices.choose(None, memory), "no --device-name: the speeds of an A100 are assumed"
    return this_cpu(memory, local), "this CPU, with assumed speeds"


def device_by_flags(config: Config, env: Mapping[str, str] = os.environ) -> Device:
    """The device as in `cluster_of`, but equal on all ranks: all that it uses of this machine is whether it has a GPU."""
    asked, wanted = config.planner, config.kernels.device
    if asked.calibration:
        return devices.choose(None, None, asked.calibration)
    if (asked.device_name or wanted).lower() == "cpu":
        return devices.cpu()
    open_ = not (asked.device_name or asked.world_size or device_memory(asked, env)) and wanted == "auto"
    return devices.cpu() if open_ and not shutil.which("nvidia-smi") else devices.choose(asked.device_name, None)


def this_cpu(memory: Optional[float], local: int) -> Device:
    """A rank's share of this machine's cores and memory."""
    return devices.cpu(max(1, cores() // local), memory or available_memory() / local / 1e9)


def installed_gpu() -> Optional[Device]:
    """The first GPU that the driver's tool lists; None without one."""
    tool = shutil.which("nvidia-smi")
    if not tool:
        return None
    query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.splitlines()
    except (OSError, subprocess.SubprocessError):
        return None
    if not lines:
        return None
    name, _, mebibytes = lines[0].rpartition(",")
    memory = float(mebibytes) * 2**20 / 1e9
    words = name.replace("-", " ").split()
    known = [key for key in devices.TABLE if set(key.rpartition("-")[0].split()) <= set(words)]
    nearest = min(known, key=lambda key: abs(devices.TABLE[key][0] * 1.074 - memory), default="A100-80GB")
    return replace(devices.find(nearest), name=name, memory_gb=memory)


def vocabulary_of(config: Config) -> tuple[int, str]:
    """The vocabulary size before padding, and a remark or "": from the checkpoint to load if this is its tokenizer, from
    the tokenizer if its files are here, else from flags or a named shape.

    Raises SettingsError if the flags have fewer tokens than the tokenizer.
    """
    t, shape = config.tokenizer, config.model.published_shape
    numbers = t.tokenizer_type == "NullTokenizer" or (
        t.tokenizer_type is None and not (t.vocab_file or t.tokenizer_model or _texts(config))
    )
    if numbers and t.vocab_size and not (t.vocab_extra_ids and t.tokenizer_type):
        given = config.given("vocab_size")
        return (
            t.vocab_size + 1,
            f"vocabulary {t.vocab_size + 1}: {given.words}, and the end of documents" if given else "",
        )
    files = [path for path in (t.vocab_file, t.merge_file, t.tokenizer_model) if path]
    known = t.vocab_size or published_rows(shape)
    if numbers and t.vocab_size or files and all(Path(path).exists() or cached(path) for path in files):
        from megatron.settings.from_checkpoint import found_record
        from megatron.settings.rules import tokenizer_type
        from megatron.tokenizer import build_tokenizer
        from megatron.tokenizer.embedding_rows import rows_of, rows_of_model

        kind = t.tokenizer_type or tokenizer_type(t, config.data)
        try:
            built = build_tokenizer(replace(t, tokenizer_type=kind), lambda text: None)
        except (Failure, ImportError) as error:
            return known or GPT2_ROWS, f"the tokenizer cannot be used: {str(error).splitlines()[0]}"
        record = found_record(config.checkpoint.load, config.checkpoint.ckpt_step)
        return rows_of(replace(t, tokenizer_type=kind), built.vocab_size, rows_of_model(config, built, record), shape)
    missing = next((path for path in files if not Path(path).exists()), None)
    why = f"{missing} is not here" if missing else "no vocabulary is given"
    if t.vocab_size or known and not missing:
        return known, ""
    of = f"{shape}'s {known}" if known else f"GPT-2's {GPT2_ROWS}"
    return known or GPT2_ROWS, f"{why}: {of} tokens are assumed"


def _texts(config: Config) -> bool:
    """Whether a tokenizer's data are given: then --vocab-size has the rows of its embedding."""
    return bool(config.data.files) and not config.data.mock_data


def job_of(config: Config, cluster: Cluster, dp: int = 1) -> tuple[Job, str]:
    """The job of the settings, and a remark on its vocabulary."""
    size, remark = vocabulary_of(config)
    return Job.of(config, facts_of(config, size), dp=dp, device=cluster.device.kind), remark


def planned_job(config: Config, cluster: Cluster) -> tuple[Job, Layout]:
    """The job of settings with derived values, and their layout on all ranks of a cluster."""
    layout = Layout.of(config, cluster.world_size)
    return job_of(config, cluster, layout.dp)[0], layout
