# SPDX-License-Identifier: Apache-2.0
"""What this machine has, whether its GPUs and network work, which kernels are in use, and what missing ones would bring.

python -m megatron.tools.doctor
python -m megatron.tools.doctor --json
"""

import argparse
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
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
        software=_software(),
        processor=_processor(),
        memory=_memory(),
        gpus=_gpus(),
        disk=_disk(arguments.path),
        network=_network(),
        kernels=_kernels(),
    )
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
    words = [f"{gpu.name}, {_gib(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}" for gpu in found]
    return [f"{word}; {_gpu_check(number, len(found))}" for number, word in enumerate(words)]


def _gpu_check(number: int, count: int) -> str:
    """Whether a product of matrices is right there, how much is free, and which others it reads from directly."""
    import torch

    try:
        ones = torch.ones(512, 512, device=f"cuda:{number}")
        right = bool((ones @ ones == 512).all())
        free, _ = torch.cuda.mem_get_info(number)
    except RuntimeError as error:
        return f"FAILS: {str(error).splitlines()[0]}"
    near = [
        str(other) for other in range(count) if other != number and torch.cuda.can_device_access_peer(number, other)
    ]
    peers = f", reads from GPU {', '.join(near)} directly" if near else ", no other GPU within direct reach"
    return f"{'computes right' if right else 'COMPUTES WRONG'}, {_gib(free)} free" + (peers if count > 1 else "")


def _network() -> dict[str, str]:
    """What ranks of several processes and machines need of this one."""
    host, infiniband = socket.gethostname(), Path("/sys/class/infiniband")
    cards = sorted(card.name for card in infiniband.iterdir()) if infiniband.is_dir() else []
    shared = Path("/dev/shm")
    found = {
        "host": f"{host}, {_address(host)}",
        "interfaces": ", ".join(_interfaces()) or "unknown",
        "InfiniBand": ", ".join(cards) or "none: NCCL uses TCP between machines",
        "chosen by hand": ", ".join(f"{name}={os.environ[name]}" for name in CHOSEN if name in os.environ) or "nothing",
        "shared memory": _disk(str(shared)) if shared.is_dir() else "none at /dev/shm: NCCL inside a machine needs it",
        "open files": f"at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]:,} a process",
        "gloo": _collective("gloo", "cpu"),
    }
    import torch

    if torch.cuda.is_available():
        found["NCCL"] = f"{'.'.join(map(str, torch.cuda.nccl.version()))}: {_collective('nccl', 'cuda')}"
    return found


CHOSEN = (
    "MASTER_ADDR",
    "MASTER_PORT",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "NCCL_IB_HCA",
    "NCCL_P2P_DISABLE",
    "NCCL_DEBUG",
)


def _address(host: str) -> str:
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        return (
            f"UNKNOWN to this machine itself ({error.strerror}): ranks cannot say where they are; add it to /etc/hosts"
        )
    if address.startswith("127."):
        return f"{address}: only this machine reaches that; for several, GLOO_SOCKET_IFNAME names the interface"
    return address


def _interfaces() -> list[str]:
    """Names of the network's interfaces, with their state and, where they tell it, Mbit/s."""
    found, folder = [], Path("/sys/class/net")
    for one in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            state = (one / "operstate").read_text().strip()
            speed = (one / "speed").read_text().strip() if state == "up" else ""
        except OSError:
            state, speed = "unknown", ""
        found.append(f"{one.name} {state}" + (f" {int(speed):,} Mbit/s" if speed.isdigit() else ""))
    return found


def _collective(backend: str, device: str) -> str:
    """Whether a rank finds its store and a collective ends: ports, sockets and the library work."""
    import torch
    import torch.distributed as dist

    started = time.perf_counter()
    try:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            one = torch.ones(1, device=device)
            dist.all_reduce(one)
        finally:
            dist.destroy_process_group()
    except (RuntimeError, OSError) as error:
        return f"FAILS: {str(error).splitlines()[0]}"
    return f"a rank meets its store and sums ({time.perf_counter() - started:.2f} s)"


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
    lines += ["network"] + [f"  {name:22s} {value}" for name, value in facts["network"].items()]
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
