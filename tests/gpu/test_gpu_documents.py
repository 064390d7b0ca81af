# SPDX-License-Identifier: Apache-2.0
"""On a GPU: samples packed of documents take torch's attention of documents (`varlen_attn`), which gives what the CPU
gives, eager and compiled, and needs memory that is linear in the sequence.
"""

import numpy as np
import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.fused_kernels import Case, attention, choose_kernel
from megatron.fused_kernels.documents import Documents
from megatron.fused_kernels.gpu import probe
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Kernels, Model

pytestmark = pytest.mark.gpu


def test_the_probe_passes_and_the_kernel_is_chosen():
    assert probe.probe("attention") == ""
    case = Case("cuda", torch.bfloat16, 64, 64, causal=True, documents=True, head_dim=64)
    assert choose_kernel("attention", case, "sdpa").name == "varlen (CUDA)"
    assert "varlen" in choose_kernel("attention", case).name


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("window", [None, "100,0"])
def test_a_model_gives_what_the_cpu_gives(window, compiled):
    """Losses and the norm of all gradients, of samples with other documents each time; bf16 against fp32."""
    s, b = 512, 2
    shape = dict(num_layers=2, hidden_size=128, num_attention_heads=2, seq_length=s, window_size=window)
    model = Model(**shape, hidden_dropout=0.0, attention_dropout=0.0, position_embedding_type="rope")
    exact = GPT(model, Mesh(), 300, device="cpu")
    kernels = Kernels(attention_backend="sdpa", torch_compile=compiled)
    ours = GPT(model, Mesh(), 300, kernels=kernels, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for mine, theirs in zip(ours.parameters(), exact.parameters(), strict=True):
            theirs.normal_(0, 0.05)
            mine.copy_(theirs)
    for length in (40, 97, 600):
        tokens = torch.randint(0, 300, (s, b), generator=torch.Generator().manual_seed(length))
        ids = (torch.arange(s).unsqueeze(1) + 30 * torch.arange(b)) // length
        batch, found = MicroBatch(tokens, tokens.roll(1, 0), torch.arange(b), document_ids=ids.int()), []
        for network, device in ((exact, "cpu"), (ours, "cuda")):
            network.zero_grad()
            loss = network(None, batch.to(device))[1]["lm loss"]
            loss.backward()
            norm = sum(p.grad.float().square().sum().item() for p in network.parameters()) ** 0.5
            found.append((loss.item(), norm))
        assert found[1] == pytest.approx(found[0], rel=1e-2)


def test_memory_is_linear():
    """Of forward and backward through documents of 512 tokens; a mask of all pairs alone would take 1 GiB."""

    def most(s: int) -> int:
        documents = Documents.of((np.arange(s, dtype=np.int32) // 512 * 512)[None], "cuda")
        parts = [torch.randn(s, 1, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        query, key, value = parts
        attention.varlen(query.unsqueeze(3), key, value, scale=0.1, documents=documents).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    once, twice = most(16384), most(32768)
    assert twice <= 2.2 * once and twice < 2**28
