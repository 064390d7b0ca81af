# SPDX-License-Identifier: Apache-2.0
"""Functions with a branch that a CPU never takes, and no training run either, called with tensors that say "cuda"."""

from types import SimpleNamespace
from unittest import mock

import branches
import torch
from fake_run import Event, a_device
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.checkpoint.store import LiveSum
from megatron.fused_kernels import attention, explicit_attention
from megatron.inference import choices, quantize
from megatron.model.cache import stored_dtype
from megatron.model.lora_product import LoRAProduct
from megatron.model.packed_rows import PackedRows
from megatron.mpu import cross_entropy, initialize, layers, random
from megatron.pipeline.execute import _OpRunner
from megatron.telemetry import lanes, memory, report_facts
from megatron.telemetry.history import Columns
from megatron.training import instruments
from megatron.training.pace import Pace

HALF = torch.bfloat16


def on_device(*shape: int, dtype=HALF) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


def grouped_queries(window):
    query, key, value = on_device(6, 2, 2, 3, 8), on_device(6, 2, 2, 8), on_device(6, 2, 2, 8)
    return attention.sdpa(query, key, value, causal=True, scale=1.0, window=window)


def added_pair():
    product = SimpleNamespace(scale=2.0, stacked=0)
    return LoRAProduct.added(product, None, on_device(5, 4), on_device(5, 3), on_device(4, 3))


def summed_samples():
    total = on_device(4, 3)
    explicit_attention.add_samples(total, on_device(2, 4, 3))
    return total


def masked_scores():
    scores = on_device(4, 6, 5)
    explicit_attention.mask_padding(scores, on_device(2, 5, dtype=torch.bool))
    return scores


def weight_gradient():
    """Half precision into fp32, by one product that adds."""
    block = layers.WgradGemm(on_device(6, 4), lambda: on_device(3, 6), layers.matmul(on_device(1)))
    return cross_entropy._add_block(None, block, on_device(4, 3))


def seeded():
    with (
        mock.patch.object(torch.cuda, "is_initialized", lambda: True),
        mock.patch.object(torch.cuda, "manual_seed") as seed,
    ):
        random.seed_torch(torch.device("cuda"), 1, "a")
    [call] = seed.call_args_list
    return call.args == (random.seed_of(1, "a"),)


def peak():
    stats = {f"{kind}_bytes.all.{end}": n + m for n, kind in enumerate(("allocated", "reserved"), 1) for m, end in ENDS}
    with mock.patch.object(torch.cuda, "memory_stats", lambda: stats):
        return list(memory.memory_use("cuda"))


def in_use():
    stats = {f"{kind}_bytes.all.{end}": n + m for n, kind in enumerate(("allocated", "reserved"), 1) for m, end in ENDS}
    with (
        mock.patch.object(torch.cuda, "memory_stats", lambda: stats),
        mock.patch.object(torch.cuda, "mem_get_info", lambda: (100, 150)),
    ):
        return list(memory.memory_in_use("cuda", 3, 1, state=8))


def live_sum():
    """Of a tensor on a device; the host does not wait for it."""
    total = LiveSum.of(on_device(5, 9)).on_device
    return [str(total.device.type), str(total.dtype), *total.shape]


ENDS = ((10, "current"), (20, "peak"))


def synchronized():
    waited = []
    with mock.patch.object(torch.cuda, "synchronize", waited.append):
        _OpRunner.now(SimpleNamespace(wire=SimpleNamespace(device=torch.device("cuda"))))
    return len(waited)


def int8(rows: int, inputs: int, outputs: int):
    """With the sizes that cuBLAS takes: more than 16 rows, and multiples of 8."""
    multiply = torch._int_mm

    def checked(x, weight):
        assert len(x) > 16 and x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0, (x.shape, weight.shape)
        return multiply(x, weight)

    with mock.patch.object(torch, "_int_mm", checked):
        return quantize.multiply_int8(
            on_device(rows, inputs, dtype=torch.int8), on_device(outputs, inputs, dtype=torch.int8)
        )


def timed():
    """Timers wait for the device before the clock is read."""
    waited = []
    context = SimpleNamespace(mesh=SimpleNamespace(world=None), device=torch.device("cuda"))
    with mock.patch.object(torch.cuda, "synchronize", waited.append):
        settings = SimpleNamespace(timing_log_level=1, barrier_with_level_1_timing=False)
        with instruments.build_timers(settings, context)("update"):
            pass
    return waited == [context.device] * 2


def told_memory():
    records = Columns()
    records.extend([dict(kind="memory", bytes=3, iteration=1)])
    return report_facts.memory(SimpleNamespace(memory=records, run=dict(device="cuda")))[0][1].partition(": ")[2]


CALLS = {
    "int8, few rows": lambda: int8(3, 10, 5),
    "int8, many rows": lambda: int8(40, 16, 8),
    "likeliest": lambda: choices._likeliest(on_device(2, 5, dtype=torch.float32)),
    "cache": lambda: str(stored_dtype(on_device(1))),
    "pair": added_pair,
    "packed rows": lambda: PackedRows.of(on_device(2, 5, dtype=torch.bool)),
    "samples": summed_samples,
    "padding": masked_scores,
    "grouped, with a window": lambda: grouped_queries(3),
    "grouped": lambda: grouped_queries(None),
    "gradient of a block": weight_gradient,
    "seed": seeded,
    "memory": peak,
    "memory in use": in_use,
    "sum of bits": live_sum,
    "synchronized": synchronized,
    "timers": timed,
    "memory in reports": told_memory,
    "pace": lambda: Pace.of(SimpleNamespace(device=torch.device("cuda"))).threads,
    "lanes": lambda: type(lanes.Recording("cuda").clock).__name__,
    "device": lambda: str(initialize.pick_device("cuda", 0)),
}


def called() -> dict:
    """{"calls": name -> result, or the shape and format of a tensor; "reached": branches}."""
    found = {}
    with a_device(), mock.patch.object(Event, "found", []), branches.reached() as reached:
        for name, call in CALLS.items():
            with FakeTensorMode(allow_non_fake_inputs=True):
                try:
                    result = call()
                except Exception as error:  # the others are asked, too
                    result = f"{type(error).__name__}: {error}"[:300]
            if isinstance(result, torch.Tensor):
                result = [str(result.device.type), str(result.dtype), *result.shape]
            found[name] = result
    return dict(calls=found, reached=sorted(reached))
