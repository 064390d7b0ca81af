# SPDX-License-Identifier: Apache-2.0
"""--deterministic-mode on CUDA, as far as it can be seen without one: what torch is asked for, and what is not chosen."""

import contextlib
import os

import pytest
import torch

from megatron import fused_kernels
from megatron.errors import SettingsError
from megatron.fused_kernels import TABLE, Case
from megatron.mpu import initialize
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Kernels, Parallel
from megatron.training.rules import remarks, resolve

CUBLAS, NCCL = "CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"


@pytest.mark.parametrize(
    "device, asked, expected", [("cuda", True, True), ("cuda", False, False), ("cpu", True, False)]
)
def test_cuda_is_asked_for_kernels_that_repeat(device, asked, expected, monkeypatch):
    monkeypatch.setattr(initialize, "pick_device", lambda wanted, local_rank: torch.device(device))
    monkeypatch.setattr(initialize, "use_threads", lambda ranks: "")
    for name in (CUBLAS, NCCL):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(os.environ, "RANK", "0")
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "1")
    try:
        initialize.join_job(Parallel(), Kernels(deterministic_mode=asked))
        assert torch.are_deterministic_algorithms_enabled() is expected
        assert [os.environ.pop(name, None) for name in (CUBLAS, NCCL)] == (
            [":4096:8", "^NVLS"] if expected else [None] * 2
        )
        flash = next(entry for entry in TABLE["attention"] if entry.name == "flash-attn")
        case = Case("cuda", torch.bfloat16, 0, 0)
        assert flash.suits(case) is not expected
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "given, kept", [("Ring", True), ("allreduce:tree", True), ("^NVLS,NVLSTree", True), ("NVLS", False)]
)
def test_a_sum_inside_switches_is_refused(given, kept, monkeypatch):
    monkeypatch.setenv(CUBLAS, "")
    monkeypatch.setenv(NCCL, given)
    try:
        with contextlib.nullcontext() if kept else pytest.raises(SettingsError, match="NCCL_ALGO=NVLS with --deter"):
            initialize.repeat_bit_by_bit()
        assert os.environ[NCCL] == given
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_measurement_does_not_choose_what_is_compiled(capsys):
    """What compiles otherwise, compiles nothing, and says why."""
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --lr 1e-3 --train-iters 1"
    )
    asked = f"{flags} --micro-batch-size 1 --vocab-size 50 --torch-compile auto"
    for more, compiles in {"": "auto", "--deterministic-mode": False}.items():
        config = parse_pretrain(f"{asked} {more}".split())
        assert resolve(config, 1).kernels.torch_compile == compiles
        said = [text for text in remarks(config, 1) if "a measurement would choose" in text]
        assert len(said) == (compiles is False)


def test_a_cpu_says_which_kernel_takes_the_place_of_flash_attention(capsys):
    import pretrain_gpt

    tiny = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --vocab-size 50 --lr 1e-3 "
        "--micro-batch-size 1 --train-iters 1 --eval-iters 0 --device cpu --attention-dropout 0"
    ).split()
    used = []
    choose = fused_kernels.choose_kernel
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "megatron.model.kinds.attention.module.choose_kernel", lambda *args: used.append(choose(*args)) or used[-1]
        )
        pretrain_gpt.main([*tiny, "--use-flash-attn"])
        said = capsys.readouterr().out
        assert f"the {used[0].name} kernel computes attention on this CPU" in said
        pretrain_gpt.main(tiny)
    assert "computes attention" not in capsys.readouterr().out


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "layout", ["--tensor-model-parallel-size 2 --sequence-parallel", "--sharding-stage 2", "--pp 2"]
)
def test_on_a_cpu_every_run_has_the_same_bits(layout, run_ranks, tmp_path):
    """Twice with dropout, documents and bf16: files of equal bytes, by kernels of which torch says that they repeat."""
    import pretrain_gpt

    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 50 --lr 1e-2 "
        "--bf16 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --eval-iters 0 --device cpu "
        "--attention-dropout 0.1 --tokenizer-type NullTokenizer --reset-attention-mask --reset-position-ids "
        "--deterministic-mode "
    )

    def train(rank, folder):
        torch.use_deterministic_algorithms(True)  # torch raises where a kernel may add up in any order
        pretrain_gpt.main(f"{flags} {layout} --save {folder}".split())

    for name in ("one", "other"):
        run_ranks(2, train, tmp_path / name)
    one, other = (
        {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.safetensors")}
        for name in ("one", "other")
    )
    assert one and one == other
