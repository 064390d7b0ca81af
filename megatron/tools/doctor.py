# SPDX-License-Identifier: Apache-2.0
"""Check this machine: its hardware, whether GPUs and network work, which kernels are used, and what missing ones cost.

python -m megatron.tools.doctor
python -m megatron.tools.doctor --json
python -m megatron.tools.doctor --wide      (whole messages of libraries, in long lines)
"""

import argparse
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Optional

from megatron.errors import DeviceLost, node_name, run_main
from megatron.mpu.cpu_threads import cores
from megatron.telemetry.figures import WIDE, WIDTH, labelled, sentence, several, shortened, size

PACKAGES = {  # package: what it is for
    "tokenizers": "byte-level BPE and Hugging Face tokenizers",
    "tiktoken": "faster byte-level BPE",
    "safetensors": "checkpoints",
    "orjson": "fast JSON in preprocessing",
    "tensorboard": "--tensorboard-dir",
    "prometheus-client": "--metrics-port",
    "starlette": "python -m megatron.tools.dashboard",
    "transformers": "benchmarks and tests against Hugging Face",
}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m megatron.tools.doctor", description=__doc__.partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.add_argument(
        "--wide", action="store_true", help="lines as long as they are, and messages of libraries whole"
    )
    parser.add_argument("--all", action="store_true", help="every kernel: its use, and why it is missing")
    parser.add_argument(
        "--node",
        nargs="?",
        type=int,
        const=-1,
        metavar="GPUS",
        help="only whether a rank can start here: so many GPUs (default: what SLURM or CUDA_VISIBLE_DEVICES gave), each of "
        "which computes, without a fatal Xid in the kernel's log; else exit code 11",
    )
    parser.add_argument("--path", default=".", help="folder whose disk is looked at")
    arguments = parser.parse_args(argv)
    if arguments.node is not None:
        check_node(gpus_given() if arguments.node < 0 else arguments.node)
        return
    facts = dict(
        software=_software(),
        processor=_processor(),
        memory=_memory(),
        gpus=_gpus(),
        **({"errors of GPUs": found} if (found := fatal_xids(kernel_log())) else {}),
        disk=_disk(arguments.path),
        network=_network(),
        kernels=_kernels(),
    )
    facts = dict(wrong=wrong(facts)) | facts
    print(
        json.dumps(facts, indent=2)
        if arguments.json
        else _text(facts, WIDE if arguments.wide else WIDTH, arguments.all)
    )


def gpus_given() -> int:
    """The number of GPUs that SLURM or CUDA_VISIBLE_DEVICES gave to this process; 0: unknown."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip() not in ("", "-1")]
    return int(os.environ.get("SLURM_GPUS_ON_NODE") or 0) or len(visible)


def check_node(expected: int) -> None:
    """Print what this node has. Raises DeviceLost with the first thing for which no rank can start here."""
    gpus, shared = _gpus(), Path("/dev/shm")
    problems = [f"GPU {number}: {words}" for number, words in enumerate(gpus) if any(bad in words for bad in BAD)]
    if len(gpus) < expected:
        problems.insert(0, f"{len(gpus)} of {expected} GPUs are there")
    problems += fatal_xids(kernel_log()) if gpus or expected else []
    if not os.access(shared, os.W_OK):
        problems.append(f"{shared} cannot be written")
    if problems:
        raise DeviceLost(f"{node_name()}: {'; '.join(problems)}")
    print(f"{node_name()}: {several(len(gpus), 'GPU')}, no problems")


# Errors of the driver after which a GPU needs a reset or a repair (NVIDIA's list of Xids).
FATAL_XIDS = {
    48: "ECC",
    64: "ECC",
    74: "NVLink",
    79: "fallen off the bus",
    95: "ECC",
    119: "GSP",
    120: "GSP",
    140: "ECC",
}
RECENT = 3600.0  # seconds: an older Xid may have been repaired by a reset


def kernel_log() -> str:
    """The kernel's messages, with seconds since the boot; "" if they may not be read."""
    try:
        return subprocess.run(["dmesg"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def fatal_xids(log: str, now: Optional[float] = None) -> list[str]:
    """The recent fatal Xids of a kernel log.

    >>> fatal_xids("[ 90.5] NVRM: Xid (PCI:0000:3b:00): 79, pid=7, GPU has fallen off the bus.\\n"
    ...            "[ 91.0] NVRM: Xid (PCI:0000:3b:00): 31, pid=7, name=python, MMU Fault", now=100.0)
    ['Xid 79 of GPU 0000:3b:00 (fallen off the bus) 10 s ago']
    """
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if now is None else now
    found = []
    for seconds, place, xid in re.findall(r"\[\s*(\d+\.\d+)\].*NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)", log):
        age = now - float(seconds)
        if int(xid) in FATAL_XIDS and age < RECENT:
            found.append(f"Xid {xid} of GPU {place} ({FATAL_XIDS[int(xid)]}) {age:.0f} s ago")
    return found


BAD = ("FAILS", "COMPUTES WRONG", "UNKNOWN")  # words of facts that prevent training


def wrong(facts: dict) -> list[str]:
    """The problems that prevent training."""
    checked = {f"GPU {number}": words for number, words in enumerate(facts["gpus"])} | facts["network"]
    problems = [f"{name}: {words}" for name, words in checked.items() if any(bad in words for bad in BAD)]
    problems += facts.get("errors of GPUs", [])
    if facts["gpus"] and facts["network"]["shared memory"].startswith("none"):
        problems.append(f"shared memory: {facts['network']['shared memory']}")
    return problems


def verdict(facts: dict, width: int) -> str:
    """The list of problems, or else the device that training would run on."""
    if problems := facts["wrong"]:
        rows = enumerate(problems, 1)
        lines = [sentence(f"  {number}. {_fitting(words, 2 * width)}", width) for number, words in rows]
        return "\n".join([f"doctor: {several(len(problems), 'problem')}", *lines])
    cores, gpus = facts["processor"]["cores"], facts["gpus"]
    where = f"a GPU ({several(len(gpus), 'GPU')})" if gpus else f"the CPU ({several(cores, 'core')})"
    return f"doctor: no problems; training runs on {where}"


def _software() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    versions = {"python": f"{platform.python_version()} ({sys.executable})", "torch": torch.__version__}
    for package, use in PACKAGES.items():
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = f"missing: {use}"
    compiler = shutil.which("g++") or shutil.which("clang++")
    versions["C++ compiler"] = compiler or "missing: --torch-compile on CPUs"
    return versions


def _processor() -> dict:
    import torch

    from megatron.fused_kernels import cpu_ops

    known = [str(dtype).removeprefix("torch.") for dtype in cpu_ops.FORMATS]
    flags = _cpu_field("flags", "Features").split()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags]
    return {
        "name": _cpu_field("model name") or platform.processor() or platform.machine(),
        "cores": cores(),
        "threads of torch": torch.get_num_threads(),
        "vector instructions": torch.backends.cpu.get_cpu_capability(),
        "bf16 instructions": ", ".join(bf16) or "none: --precision bf16 is no faster than fp32 here",
        "products by oneDNN": f"{', '.join(sorted(known)) or 'none'}; bf16 and fp16 without it are computed in fp32",
    }


def _cpu_field(*names: str) -> str:
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.exists() else ():
        key, _, value = line.partition(":")
        if key.strip() in names:
            return value.strip()
    return ""


def _memory() -> str:
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        free, total = os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (ValueError, OSError, AttributeError):
        return "unknown"
    return f"{size(free)} free of {size(total)}"


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    words = [f"{gpu.name}, {size(gpu.total_memory)}, compute capability {gpu.major}.{gpu.minor}" for gpu in gpus]
    return [f"{word}; {_gpu_check(number, len(gpus))}" for number, word in enumerate(words)]


def _gpu_check(number: int, count: int) -> str:
    """Check a GPU: a matrix product, its free memory, and its peers."""
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
    return f"{'computes right' if right else 'COMPUTES WRONG'}, {size(free)} free" + (peers if count > 1 else "")


def _network() -> dict[str, str]:
    """Check what ranks need to communicate, within this machine and with others."""
    host, infiniband = socket.gethostname(), Path("/sys/class/infiniband")
    cards = sorted(card.name for card in infiniband.iterdir()) if infiniband.is_dir() else []
    shared = Path("/dev/shm")
    facts = {
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
        facts["NCCL"] = f"{'.'.join(map(str, torch.cuda.nccl.version()))}: {_collective('nccl', 'cuda')}"
    return facts


CHOSEN = tuple(
    """
    MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME NCCL_SOCKET_IFNAME NCCL_IB_DISABLE NCCL_IB_HCA NCCL_P2P_DISABLE
    NCCL_DEBUG
    """.split()
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
    """Names of the network interfaces, with their state and, if known, Mbit/s."""
    interfaces, folder = [], Path("/sys/class/net")
    for one in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            state = (one / "operstate").read_text().strip()
            speed = (one / "speed").read_text().strip() if state == "up" else ""
        except OSError:
            state, speed = "unknown", ""
        interfaces.append(f"{one.name} {state}" + (f" {int(speed):,} Mbit/s" if speed.isdigit() else ""))
    return interfaces


def _collective(backend: str, device: str) -> str:
    """Check a collective of one rank through a store: ports, sockets and the library."""
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
    return f"{size(usage.free)} free of {size(usage.total)} at {Path(path).resolve()}"


def _kernels() -> dict[str, list[dict[str, str]]]:
    from megatron.fused_kernels import TABLE

    return {
        op: [dict(name=entry.name, lacking=entry.lacking or entry.probe(), worth=entry.worth) for entry in entries]
        for op, entries in TABLE.items()
    }


def _text(facts: dict, width: int, every_kernel: bool) -> str:
    """The verdict, then every fact; of kernels the names alone, unless all are asked for."""

    def rows(part: dict[str, object]) -> list[str]:
        return [labelled(name, _fitting(str(value), width - 24), width) for name, value in part.items()]

    lines = [verdict(facts, width), ""]
    for part in ("software", "processor"):
        lines += [part, *rows(facts[part])]
    lines += ["memory and disk", *rows({name: facts[name] for name in ("memory", "disk")})]
    lines += ["GPUs", *[sentence(f"  {_fitting(gpu, width - 2)}", width) for gpu in facts["gpus"] or [NO_GPU]]]
    lines += ["network", *rows(facts["network"])]
    if not every_kernel:
        return "\n".join(
            [*lines, "kernels that are ready, best first (--all: every one, and its use)", *rows(_ready(facts))]
        )
    for op, entries in facts["kernels"].items():
        lines.append(f"kernels of {op}, best first")
        for entry in entries:
            lacking = shortened(entry["lacking"], width // 2)
            state = f"missing ({lacking})" if lacking else "ready"
            lines.append(labelled(entry["name"], f"{state}: {entry['worth']}", width))
    return "\n".join(lines)


def _ready(facts: dict) -> dict[str, str]:
    return {
        op: ", ".join(one["name"] for one in kernels if not one["lacking"]) for op, kernels in facts["kernels"].items()
    }


NO_GPU = "none: training runs on the CPU"


def _fitting(value: str, width: int) -> str:
    """Shorten a library's message in a fact, and drop the place in the library's source."""
    return shortened(SOURCE.sub("", value), width) if "FAILS" in value and width < WIDE // 2 else value


SOURCE = re.compile(r"\[enforce fail at [^\]]*\] *|\[[^\] ]+\.(?:cc?|cpp|cu|h):\d+\] *")


if __name__ == "__main__":
    run_main(main)
