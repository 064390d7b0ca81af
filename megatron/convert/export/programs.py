# SPDX-License-Identifier: Apache-2.0
"""Files with a program: `torch.export` (.pt2) and ONNX (.onnx), and the libraries that run them."""

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn
from torch.export.passes import move_to_device_pass

from megatron.convert.export.tracing import GROUP, Program, record
from megatron.errors import CheckpointError, MissingPackage, SettingsError
from megatron.inference.scoring import ALONE
from megatron.mpu.mesh import Axis

Run = Callable[..., list[torch.Tensor]]  # (name of an input -> tensor) -> outputs in order


def file_name(form: str, rank: int = 0, ranks: int = 1) -> str:
    """The name of the program of a rank."""
    if form == "onnx":
        return "model.onnx"
    return "model.pt2" if ranks == 1 else f"model-rank-{rank}-of-{ranks}.pt2"


def write(form: str, program: Program, path: Path) -> None:
    """Record a program and write it."""
    with _quiet(), _recording():
        recorded = record(program)
        if form == "torch-export":
            torch.export.save(recorded, path)
            return
        onnx = torch.onnx.export(
            recorded,
            (),
            kwargs=dict(program.inputs),
            dynamic_shapes=program.dims,
            input_names=list(program.inputs),
            output_names=list(program.outputs),
            dynamo=True,
            verbose=False,
        )
        size = sum(x.numel() * x.element_size() for x in program.module.state_dict().values())
        onnx.save(str(path), external_data=size > 1 << 30)  # one file of protobuf ends at 2 GiB


def opened(form: str, path: Path, device="cpu", tp: Axis = ALONE, optimize: bool = True) -> Run:
    """The program of a file, as a function. tp: the ranks that share it. optimize: whether onnxruntime may rewrite it"""
    return _with_onnxruntime(path, device, optimize) if form == "onnx" else _with_torch(path, device, tp)


def _with_torch(path: Path, device, tp: Axis) -> Run:
    try:
        with _quiet():
            program = torch.export.load(path)
            if torch.device(device).type != "cpu":  # where it was recorded
                program = move_to_device_pass(program, device)
    except Exception as error:  # a zip file's, or torch's own
        raise CheckpointError(f"torch.export cannot load {path}: {str(error).splitlines()[0]}") from None
    if tp.size > 1:
        _connect(program.graph_module, tp)
    module = program.module()

    @torch.no_grad()
    def run(**inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = module(**{name: x.to(device) for name, x in inputs.items()})
        return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)

    return run


def _connect(graph: nn.Module, tp: Axis) -> None:
    """Make the collectives of a program use this job's ranks."""
    for node in graph.graph.nodes:
        if node.op == "call_function" and "_c10d_functional" in str(node.target):
            node.args = tuple(tp.group.group_name if arg == GROUP else arg for arg in node.args)
    graph.recompile()


def _with_onnxruntime(path: Path, device, optimize: bool) -> Run:
    runtime = onnxruntime()
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    if not optimize:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    wanted = ["CUDAExecutionProvider"] * (torch.device(device).type == "cuda") + ["CPUExecutionProvider"]
    providers = [name for name in wanted if name in runtime.get_available_providers()]
    try:
        session = runtime.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # whatever its C++ raises
        raise CheckpointError(f"onnxruntime cannot load {path}: {str(error).splitlines()[0]}") from None

    def run(**inputs: torch.Tensor) -> list[torch.Tensor]:
        outputs = session.run(None, {name: x.cpu().numpy() for name, x in inputs.items()})
        return [torch.from_numpy(x) for x in outputs]

    return run


def onnxruntime():
    """The package onnxruntime. Raises SettingsError where it is not installed."""
    try:
        import onnxruntime
    except ImportError:
        raise MissingPackage(
            "ONNX programs are run by onnxruntime, which is not installed",
            do="pip install onnxruntime; --no-check exports without the comparison",
        ) from None
    return onnxruntime


def require_onnx() -> None:
    """Raise SettingsError where the packages that write ONNX are not installed."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise MissingPackage(
            "--format onnx needs the packages onnx and onnxscript", do="pip install onnxscript"
        ) from None


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the words of torch's exporters about other packages."""
    logger = logging.getLogger("torch.onnx._internal.exporter._registration")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Raise SettingsError for a model that torch cannot record, with the line that it stopped at."""
    try:
        yield
    except (SettingsError, CheckpointError):
        raise
    except Exception as error:  # of many kinds
        said = re.sub(r"\x1b\[[\d;]*m", "", str(error))  # without colours
        lines = [line for line in said.splitlines() if line.strip()]
        where = re.search(r"File \"([^\"]*/megatron/[^\"]+)\", line (\d+)", str(error))
        raise SettingsError(
            f"the model cannot be recorded as a program: {type(error).__name__}: {lines[0] if lines else ''}",
            f"at {where[1]}:{where[2]}" if where else None,
            "--format hf exports weights, if transformers has the model; tools.generate and tools.serve read checkpoints",
        ) from error
