# SPDX-License-Identifier: Apache-2.0
"""The scans of Mamba-2 and of gated delta nets beside transformers' own chunked forms in torch: processor time of a
forward and a backward pass on one thread, in turns, and the ratio to theirs.

    python -m benchmarks.scans --tokens 2048 --rounds 5
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megatron.fused_kernels.delta_rule import delta_rule
from megatron.fused_kernels.ssd import ssd

Case = tuple[str, Callable[[], torch.Tensor], Callable[[], torch.Tensor], list[torch.Tensor]]


def first(x: torch.Tensor) -> torch.Tensor:
    """[s, b, G, r, ...] -> [b, s, H, ...], as theirs have it."""
    return x.flatten(2, 3).transpose(0, 1)


def mamba(s: int, groups: int, heads: int, width: int, state: int) -> Case:
    from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

    x, B, C = torch.randn(s, 1, groups, heads, width), *(torch.randn(s, 1, groups, state) for _ in range(2))
    dt, A = F.softplus(torch.randn(s, 1, groups, heads) - 3), -torch.empty(groups, heads).uniform_(1, 16)
    given = [t.requires_grad_() for t in (x, dt, A, B, C, torch.ones(groups, heads))]
    x, dt, A, B, C, D = given
    both = lambda: (B.transpose(0, 1), C.transpose(0, 1))
    theirs = lambda: mamba2_chunk_scan(first(x), first(dt), A.flatten(), *both(), 128, D=D.flatten())
    return f"Mamba-2, {groups} x {heads} heads of {width}, states {state}", lambda: ssd(*given)[0], theirs, given


def delta(s: int, groups: int, heads: int, key: int, value: int) -> Case:
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    q, k = (torch.randn(s, 1, groups, key) for _ in range(2))
    v, beta = torch.randn(s, 1, groups, heads, value), torch.rand(s, 1, groups, heads)
    g = -F.softplus(torch.randn(s, 1, groups, heads) - 2)
    given = [t.requires_grad_() for t in (F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, g, beta)]
    q, k, v, g, beta = given
    of_heads = lambda t: first(t.unsqueeze(3).expand(-1, -1, -1, heads, -1))
    theirs = lambda: torch_chunk_gated_delta_rule(of_heads(q), of_heads(k), first(v), first(g), first(beta))[0]
    return f"delta rule, {groups} x {heads} heads of {key}, {value}", lambda: delta_rule(*given)[0], theirs, given


def seconds(run: Callable[[], torch.Tensor], given: list[torch.Tensor]) -> float:
    began = time.process_time()
    torch.autograd.grad(run().sum(), given)
    return time.process_time() - began


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(1)
    s = asked.tokens
    cases = [mamba(s, 2, 4, 64, 128), mamba(s, 1, 8, 32, 32), delta(s, 2, 2, 128, 128), delta(s, 2, 2, 64, 64)]
    print("| scan | seconds | of transformers | ratio |\n|---|---|---|---|")
    for name, ours, theirs, given in cases:
        turns = [(seconds(ours, given), seconds(theirs, given)) for _ in range(asked.rounds + 1)][1:]
        own, other = (min(column) for column in zip(*turns, strict=True))
        print(f"| {name} | {own:.3f} | {other:.3f} | {own / other:.2f} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
