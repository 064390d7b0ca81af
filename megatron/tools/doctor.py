# SPDX-License-Identifier: Apache-2.0
"""What this machine has, which kernels are in use, and what the missing ones would bring.

python -m megatron.tools.doctor
python -m megatron.tools.doctor --json
"""

import argparse
import json
import os
import platform
import shutil
import sys
from pathlib import Path

from megatron.errors import run_main

PACKAGES = {  # package: what it is for
    "tokenizers": "byte-level BPE and Hugging Face tokenizers",
    "tiktoken": "faster byte-level BPE",
    "safetensors": "checkpoints",
    "orjson": "fast JSON in preprocessing",
    "tensorboard": "--tensorboard-dir",
    "transformers": "benchmarks and tests against Hugging Face",
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron.tools.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.add_argument("--path", default=".", help="folder whose disk is looked at")
    arguments = parser.parse_args(argv)
    facts = dict(
        software=_software(), processor=_processor(), memory=_memory(), gpus=_gpus(), disk=_disk(arguments.path),
        kernels=_kernels(),
    )  # fmt: skip
    print(json.dumps(facts, indent=2) if arguments.json else _text(facts))


def _software() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"python": f"{platform.python_version()} ({sys.executable})", "torch": torch.__version__}
    for package, use in PACKAGES.items():
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = f"missing: {use}"
    compiler = shutil.which("g++") or shutil.which("clang++")
    found["C++ compiler"] = compiler or "missing: --torch-compile on CPUs"
    return found


def _processor() -> dict:
    import torch

    flags = _cpu_flags()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags]
    return {
        "name": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads of torch": torch.get_num_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16 instructions": ", ".join(bf16) or "none: --precision bf16 would be slow here, use fp32",
    }


def _cpu_field(*names: str) -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def _cpu_name() -> str:
    return _cpu_field("model name") or platform.processor() or platform.machine()


def _cpu_flags() -> set[str]:
    return set(_cpu_field("flags", "Features").split())


def _memory() -> str:
    try:
        size = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * size, os.sysconf("SC_PHYS_PAGES") * size
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{_gib(free)} free of {_gib(total)}"


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [f"{gpu.name}, {_gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}" for gpu in found]


def _disk(path: str) -> str:
    usage = shutil.disk_usage(path)
    return f"{_gib(usage.free)} free of {_gib(usage.total)} at {Path(path).resolve()}"


def _kernels() -> dict[str, list[dict[str, str]]]:
    from megatron.fused_kernels import TABLE

    return {
        op: [dict(name=entry.name, lacking=entry.lacking, worth=entry.worth) for entry in entries]
        for op, entries in TABLE.items()
    }


def _text(facts: dict) -> str:
    lines = []
    for part in ("software", "processor"):
        lines += [part] + [f"  {name:22s} {value}" for name, value in facts[part].items()]
    lines += [f"memory  {facts['memory']}", f"disk    {facts['disk']}"]
    lines += ["GPUs"] + [f"  {gpu}" for gpu in facts["gpus"] or ["none: training runs on the CPU"]]
    for op, entries in facts["kernels"].items():
        lines.append(f"kernels of {op}, best first")
        for entry in entries:
            state = f"missing ({entry['lacking']})" if entry["lacking"] else "ready"
            lines.append(f"  {entry['name']:22s} {state}: {entry['worth']}")
    return "\n".join(lines)


def _gib(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"


if __name__ == "__main__":
    run_main(main)
