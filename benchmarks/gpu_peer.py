# SPDX-License-Identifier: Apache-2.0
"""A GPT written with torch alone, as `gpu_train.py`'s peer: modules of torch.nn, scaled_dot_product_attention, FSDP2
(`fully_shard`: fp32 weights that are gathered in bf16, gradients reduced in fp32), fused AdamW, torch.compile.

The network is GPT-2's as the suite trains it: learned positions, LayerNorm before each branch, GELU's tanh form, tied
embeddings, no dropout.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from megatron.settings.schema import Model


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.output = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU("tanh"), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[b, s, hidden] -> [b, s, hidden]."""
        b, s, hidden = x.shape
        each = self.qkv(self.attention_norm(x)).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*each, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(b, s, hidden))
        return x + self.mlp(self.mlp_norm(x))


class PlainGPT(nn.Module):
    """tokens and labels [b, s] -> the mean loss of a token."""

    def __init__(self, shape: Model, vocab_size: int):
        super().__init__()
        self.words, self.positions = (nn.Embedding(n, shape.hidden_size) for n in (vocab_size, shape.seq_length))
        self.blocks = nn.ModuleList(
            Block(shape.hidden_size, shape.num_attention_heads) for _ in range(shape.num_layers)
        )
        self.final_norm, self.loss = nn.LayerNorm(shape.hidden_size), mean_loss
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.loss(self.final_norm(x), self.words.weight, labels)


def mean_loss(x: torch.Tensor, words: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """[b, s, hidden], [vocabulary, hidden] and [b, s] -> a number."""
    return F.cross_entropy(F.linear(x, words).flatten(0, 1).float(), labels.flatten())


def make_step(
    shape: Model, vocab_size: int, micro_batch: int, device: str, compiled: bool
) -> Callable[[], torch.Tensor]:
    """A training step in bf16 on random tokens: forward, backward, clipping, AdamW. Joins a group of one rank for FSDP2."""
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    with torch.device(device):
        model = PlainGPT(shape, vocab_size)
        tokens = torch.randint(0, vocab_size, (micro_batch, shape.seq_length + 1))
    if compiled:  # what FSDP2's gathers stand between is compiled piece by piece
        model.loss = torch.compile(mean_loss)
        for block in model.blocks:
            block.compile()
    mesh = dist.init_device_mesh(device, (1,))
    formats = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (*model.blocks, model):
        fully_shard(part, mesh=mesh, mp_policy=formats)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> torch.Tensor:
        loss = model(inputs, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step
