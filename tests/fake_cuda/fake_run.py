# SPDX-License-Identifier: Apache-2.0
"""A run on fake CUDA devices, and what its host waits for. Imported by `run_cases.py`, which has loaded the device."""

import os
import traceback
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import branches
import mistakes
import torch
import torch._dynamo  # FakeTensorMode imports it: here once, not after each case's fork
import torch.distributed as dist
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.fused_kernels import TABLE
from megatron.guard.stopping import StopRequests
from megatron.model.command_line import parse_any
from megatron.model.kinds.experts import grouped, router
from megatron.model.recipe import recipe_of
from megatron.mpu import collectives, random
from megatron.training import build, step
from megatron.training.rules import resolve

ROOT = Path(__file__).resolve().parents[2]
SCALED_MM = F.scaled_mm
READS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__")


@contextmanager
def host_reads():
    """A list that grows with every point where the host reads a value of the device, for which it has to wait.

    What is read is made up: ones, which are true. Values on the CPU are made up in silence.
    """
    found: list[str] = []

    def reading(name):
        real = getattr(torch.Tensor, name)

        def read(tensor, *args, **kwargs):
            if not isinstance(tensor, FakeTensor):
                return real(tensor, *args, **kwargs)
            if tensor.device.type == "cuda":
                found.append(f"{name} in {_place()}")
            with unset_fake_temporarily():
                ones = torch.ones(tuple(tensor.shape), dtype=tensor.dtype)
                return ones if name == "cpu" else real(ones, *args, **kwargs)

        return read

    with ExitStack() as stack:
        for name in READS:
            read = reading(name)
            for kind in {torch.Tensor, FakeTensor if name in vars(FakeTensor) else torch.Tensor}:
                stack.enter_context(mock.patch.object(kind, name, read))
        yield found


class Copies(TorchDispatchMode):
    """Notes copies from the host to the device for which the host waits: not asked to go on, or from pageable memory.

    Below FakeTensorMode's functions there is no copy: what is seen is that the sides differ, the memory and the asking.
    """

    def __init__(self, found: list[str]):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        if function is torch.ops.aten._to_copy.default:
            self._note(args[0], out, kwargs.get("non_blocking", False))
        elif function is torch.ops.aten.copy_.default:
            self._note(args[1], args[0], args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        return out

    def _note(self, source: torch.Tensor, target: torch.Tensor, goes_on: bool) -> None:
        if {source.device.type, target.device.type} != {"cpu", "cuda"}:
            return
        host = source if source.device.type == "cpu" else target
        if not (goes_on and host.is_pinned()):
            kind = "copy that waits" if not goes_on else "copy of pageable memory"
            self.found.append(f"{kind} in {_place()}")


def words_of_no_generator(shape: tuple[int, ...], seeds: list[int], device: torch.device) -> torch.Tensor:
    """In place of `random_words`: a fake device has no generator."""
    return torch.zeros((len(seeds), *shape), dtype=torch.int16, device=device)


def _place() -> str:
    """The innermost place of the suite on the stack."""
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT / "megatron"))]
    return f"{os.path.relpath(frames[-1].filename, ROOT)}: {frames[-1].name}"


class Event:
    """Of a step's numbers on their way to the host: to wait for one of an earlier step does not make the device idle."""

    step = 0  # under way
    found: list[str] = []
    late = 0  # waits for an earlier step's

    def __init__(self, enable_timing: bool = False):
        pass

    def record(self) -> None:
        self.recorded = Event.step

    def elapsed_time(self, end: "Event") -> float:
        return 1.0

    def synchronize(self) -> None:
        if self.recorded == Event.step:
            self.found.append(f"wait for an event of this step in {_place()}")
        else:
            Event.late += 1


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that says of itself that its memory is page-locked."""
    tensor = tensor.clone()
    tensor.pinned = True
    return tensor


@contextmanager
def a_device():
    """What torch.cuda says of a device, as far as the suite asks."""
    same = dict(is_available=lambda: True, device_count=lambda: 8, set_device=lambda device: None)
    more = dict(get_device_name=lambda device=None: "NVIDIA H100 80GB HBM3", synchronize=lambda device=None: None)
    with ExitStack() as stack:
        for name, value in {**same, **more, "Event": Event}.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", pinned))
        stack.enter_context(mock.patch.object(torch.Tensor, "is_pinned", lambda self: getattr(self, "pinned", False)))
        stack.enter_context(mock.patch.object(F, "scaled_mm", scaled_mm))
        stack.enter_context(mock.patch.object(F, "scaled_grouped_mm", scaled_grouped_mm))
        for module in (random, router):
            stack.enter_context(mock.patch.object(module, "random_words", words_of_no_generator))
        stack.enter_context(mock.patch.object(grouped, "lacking_grouped", lambda device, dtype: ""))  # no trial run
        stack.enter_context(mock.patch.object(StopRequests, "agreed", lambda requests, sums: None))  # sums are made up
        yield


@contextmanager
def a_job(rank: int, world: int):
    """A process group of `world` ranks of which only this one is there; objects come back as this one's own."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    if world == 1:
        yield
        return
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    with ExitStack() as stack:
        own = mock.patch.object(collectives, "all_gather_object", lambda value, axis: [value] * axis.size)
        stack.enter_context(own)
        stack.enter_context(mock.patch.object(build, "check_model_complete", lambda *args, **kwargs: None))
        stack.enter_context(mock.patch.object(build, "build_once", lambda context, make, *more: make()))
        yield
    dist.destroy_process_group()


def be_there(kernel: str) -> list:
    """Make a kernel that a GPU would have one of this process; a list that grows with its calls."""
    calls = []
    for entries in TABLE.values():
        for number, entry in enumerate(entries):
            if entry.name == kernel:
                entries[number] = replace(entry, run=noted(entry.run, calls), lacking="", probe=lambda: "")
    assert any(entry.name == kernel for entries in TABLE.values() for entry in entries)
    return calls


def noted(run, calls: list):
    """A kernel, or a class with the passes of one, whose calls are noted."""
    if isinstance(run, type):
        return SimpleNamespace(forward=noted(run.forward, calls), backward=run.backward)
    return lambda *args, **kwargs: calls.append(1) or run(*args, **kwargs)


def scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, *, bias=None, output_dtype, **more):
    """torch's, with what a device asks for, and fake tensors do not look at."""
    e5m2 = torch.float8_e5m2
    assert not (a.dtype == b.dtype == e5m2), "cuBLAS has no product of two e5m2"
    assert {scale_a.device.type, scale_b.device.type} == {"cuda"}, "scales lie on the device"
    assert bias is None or bias.dtype == output_dtype == torch.bfloat16, f"a {bias.dtype} bias, {output_dtype} outputs"
    return SCALED_MM(a, b, scale_a, kind_a, scale_b, kind_b, bias=bias, output_dtype=output_dtype, **more)


def scaled_grouped_mm(a, b, scale_a, kind_a, scale_b, kind_b, *, offs, output_dtype, use_fast_accum):
    """torch's has no fake kernel; the op of before has, with the layouts that CUTLASS asks for."""
    assert a.dtype == b.dtype == torch.float8_e4m3fn and kind_a == kind_b == F.ScalingType.RowWise
    assert {scale_a.device.type, scale_b.device.type, offs.device.type} == {"cuda"}, "scales and ends lie on the device"
    assert all(size % 16 == 0 for size in (a.shape[-1], b.shape[-1])), "widths are multiples of 16"
    return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs, out_dtype=output_dtype, use_fast_accum=use_fast_accum)


def run(
    flags: str, rank: int = 0, world: int = 1, steps: int = 2, mistake: str = "", kernel: str = "", asks: bool = False
) -> dict:
    """Build a run and train some steps; {"waits": where the host waits for the device in the last of them, "late": how
    often it asked for what came of an earlier step, "calls": of a kernel, "windows": in which ranks were compared,
    "reached": branches that a CPU never takes, if a case asks for them}.
    """
    with branches.reached() if asks else nullcontext(set()) as reached:
        found = train(flags, rank, world, steps, mistake, kernel)
    return found | dict(reached=sorted(reached))


def train(flags: str, rank: int, world: int, steps: int, mistake: str, kernel: str) -> dict:
    """See `run`."""
    calls = be_there(kernel) if kernel else []
    if mistake:
        getattr(mistakes, mistake)()
    with a_device(), a_job(rank, world), host_reads() as reads:
        config = resolve(parse_any(flags.split()), world_size=world)
        recipe = recipe_of(config)
        with FakeTensorMode(allow_non_fake_inputs=True), Copies(reads):
            run = build.build_run(config, recipe)
            run.passes.returned = None  # the sums of other ranks are nowhere
            Event.found = reads
            with run.ranks.measuring():
                for Event.step in range(steps):
                    reads.clear()
                    step.train_step(run)
                    run.ranks.after_step(run)
    windows = run.ranks.detector.count
    return dict(waits=reads, late=Event.late, calls=len(calls), windows=windows)
