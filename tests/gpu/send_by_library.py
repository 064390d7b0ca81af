# SPDX-License-Identifier: Apache-2.0
"""A rank of `test_gpu_libraries.py`: tokens that a library sends to their experts, beside rows sent by NCCL.

torchrun --nproc-per-node 2 -m tests.gpu.send_by_library deepep
"""

import os
import sys

import torch
import torch.distributed as dist

from megatron.model.kinds.experts.dispatch import Dispatcher
from megatron.model.kinds.experts.libraries import library_dispatcher
from megatron.mpu.mesh import Mesh

N, H, K, E = 4096, 2048, 8, 64
NEAR = 2e-2  # of the norm: bf16 rounds the sums of a rank, then those of ranks


def passes(make, mesh, experts, x, weights, upstream) -> tuple:
    """(rows of this rank's experts, outputs, gradients of tokens and of weights)."""
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    dispatcher = make(experts, E, mesh.ep, True)
    rows, own = dispatcher.dispatch(x, weights)
    first = mesh.ep.rank * E // mesh.ep.size
    scale = 1 + torch.arange(first, first + E // mesh.ep.size, device=x.device) / E
    y = dispatcher.combine((rows.sin() * own * dispatcher.rows.each(scale.unsqueeze(1))).to(rows.dtype))
    return dispatcher.rows.counts.tolist(), y, *torch.autograd.grad(y, (x, weights), upstream)


def main(backend: str) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    mesh = Mesh(rank, replicate=world, ep=world, ep_library=(backend, None))
    by_library = library_dispatcher(mesh, None)
    for step in range(4):  # the last ones drop pairs, and leave a rank without tokens
        draw = torch.Generator().manual_seed(10 * step + rank)
        experts = torch.rand(N, E, generator=draw).topk(K).indices
        if step == 2:
            experts.view(-1)[torch.randperm(N * K, generator=draw)[:5000]] = E
        if step == 3:
            experts %= E // world
            experts[:, 1:] = E
        x, upstream = (torch.randn(N, H, generator=draw).to(device, torch.bfloat16) for _ in range(2))
        weights, experts = torch.rand(N, K, generator=draw).to(device), experts.to(device)
        found = passes(by_library, mesh, experts, x, weights, upstream)
        wanted = passes(Dispatcher, mesh, experts, x, weights, upstream)
        assert found[0] == wanted[0], (step, found[0], wanted[0])
        for name, one, other in zip(("output", "of tokens", "of weights"), found[1:], wanted[1:], strict=True):
            off = ((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-9)).item()
            assert off < NEAR, (step, name, off)
    mesh.release()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
