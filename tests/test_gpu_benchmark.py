# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/gpu_train.py` compares like with like, and its page keeps count of what was promised."""

import importlib
import sys

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model

SHAPE = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16)


@pytest.fixture
def benchmark(monkeypatch, root):
    """`benchmark(name)`: a module of the folder of benchmarks."""
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    yield importlib.import_module
    for name in ("gpu_train", "gpu_peer"):
        sys.modules.pop(name, None)


def row(benchmark, contender, *, seconds, mfu=0.5, peak=100, planned=(None, None), model="124M"):
    cells = (model, contender, 12, 32, seconds, 1000 / seconds, 1.0, mfu, peak, *planned)
    return benchmark("gpu_train").Measured(*cells)


def test_the_peer_is_the_suites_network(benchmark):
    """As many parameters, and the same loss with the same weights."""
    model = GPT(Model(**SHAPE, hidden_dropout=0.0, attention_dropout=0.0), Mesh(), 128, device="cpu")
    peer = benchmark("gpu_peer").PlainGPT(Model(**SHAPE), 128)
    assert sum(p.numel() for p in peer.parameters()) == sum(p.numel() for p in model.parameters())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    names = {"qkv.": "attention.qkv.", "output.": "attention.output.", "mlp.0.": "mlp.up.", "mlp.2.": "mlp.down."}
    names |= {"words.": "embedding.word.", "positions.": "embedding.position."}
    ours = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in peer.named_parameters():
            for theirs, mine in names.items():
                name = name.replace(theirs, mine)
            # query, key and value stand together for each head here, and there each for all heads
            value = ours[name].transpose(0, 1) if ".qkv." in name else ours[name]
            parameter.copy_(value.reshape(parameter.shape))
    tokens = torch.randint(0, 50, (17, 2), generator=torch.Generator().manual_seed(1))
    loss, count = model(None, MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(2)))[1].values()
    torch.testing.assert_close(peer(tokens[:-1].t(), tokens[1:].t()), loss / count)


def test_a_step_of_the_peer_trains(benchmark):
    gpu_peer = benchmark("gpu_peer")
    step = gpu_peer.make_step(Model(**SHAPE), 50, 2, "cpu", compiled=False)
    try:
        losses = [step().item() for _ in range(8)]
    finally:
        torch.distributed.destroy_process_group()
    assert losses[-1] < losses[0] - 1e-4


def test_nobody_waits_between_the_steps_of_a_window(benchmark, monkeypatch):
    gpu_train, heard = benchmark("gpu_train"), []
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: heard.append(name))
    times = gpu_train.timed(lambda: heard.append("step"), 7, 2, "cuda")
    wait, reset = "synchronize", "reset_peak_memory_stats"
    assert heard == ["step"] * 2 + [wait, reset] + ["step"] * 5 + [wait] + ["step"] * 2 + [wait]
    assert len(times) == 2 and min(times) > 0


def test_promises(benchmark):
    rows = [
        row(benchmark, "suite", seconds=1.0, mfu=0.4, peak=100, planned=(1.05, 106)),
        row(benchmark, "suite-compiled", seconds=0.5, mfu=0.61),
        row(benchmark, "torch", seconds=1.0),
        row(benchmark, "torch-compiled", seconds=0.4),
        row(benchmark, "suite", seconds=1.0, mfu=0.49, planned=(0.8, 96), model="1.3B"),
    ]
    gpu_train = benchmark("gpu_train")
    assert [(what.replace(":", ""), found, kept) for what, found, kept in gpu_train.promises(rows)] == [
        ("124M MFU 60%", "61.0%", True),
        ("124M as fast as torch's best", "0.80 x torch-compiled", False),
        ("124M planned memory within 5 %", "1.060", False),
        ("124M planned time within 10 %", "1.05", True),
        ("1.3B MFU 50%", "49.0%", False),
        ("1.3B planned memory within 5 %", "0.960", True),
        ("1.3B planned time within 10 %", "0.80", False),
    ]
    text = gpu_train.page(rows, ["6.7B torch"], 300)
    assert text.count("**no**") == 4 and "did not run: 6.7B torch" in text


def test_a_mixture_has_no_peer(benchmark):
    contenders, of = benchmark("gpu_train").CONTENDERS, benchmark("gpu_train").contenders_of
    assert of("124M", contenders) == contenders and of("olmoe-1b-7b", contenders) == ["suite", "suite-compiled"]
    assert of("124M", contenders, micro_batches=8) == ["suite", "suite-compiled"]


def test_as_many_layers_as_fit(benchmark, tmp_path):
    """On a table's device instead of a measured one: 6.7 B in bf16 with fp32 state are 18 bytes a parameter."""
    import json
    from dataclasses import asdict

    from megatron.planner.device import find

    calibration = tmp_path / "calibration.json"
    calibration.write_text(json.dumps(dict(device=asdict(find("H100-80GB")))))
    fitting = benchmark("gpu_train").layers_that_fit
    assert fitting("124M", 32, "cuda", calibration) == 12 and fitting("1.3B", 8, "cuda", calibration) == 24
    assert fitting("olmoe-1b-7b", 4, "cuda", calibration) == 7  # of 16, of 0.42 B each
    layers = fitting("6.7B", 4, "cuda", calibration)
    layer, words = 12 * 4096**2, 50304 * 4096
    assert 0.6 * 80e9 < 18 * (layers * layer + words) < 80e9
