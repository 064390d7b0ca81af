# SPDX-License-Identifier: Apache-2.0
"""Ranks that pass states on compute what a loop over the tokens of whole sequences computes in fp64, values and gradients:
states reach over all chunks; documents begin at and around borders of chunks, and some have one token.
"""

from dataclasses import replace
from functools import cache, partial
from itertools import product

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.fused_kernels.delta_rule import delta_rule
from megatron.fused_kernels.ssd import ssd
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.model.layer_ops import RankSetup
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model
from tests.model.test_context_parallel import rows_of
from tests.models.test_scan_layouts import GROUPS, HEADS_OF_GROUP, KINDS, STATE, TAPS, WIDTH, G, K, R, V
from tests.planner.test_activations import saved_by_layer
from tests.training.plain_loop import HIDDEN

S, B = 48, 2
BEGINS = [0, 11, 12, 13, 24, 30, 37], [0, 1, 36, 47]
IDS = torch.stack([torch.tensor([sum(begin <= n for begin in begins) for n in range(S)]) for begins in BEGINS], 1)
SIZES = dict(
    linear_num_key_heads=G,
    linear_num_value_heads=G * R,
    linear_key_head_dim=K,
    linear_value_head_dim=V,
    linear_conv_kernel_dim=TAPS,
    mamba_num_groups=GROUPS,
    mamba_num_heads=GROUPS * HEADS_OF_GROUP,
    mamba_head_dim=WIDTH,
    mamba_state_dim=STATE,
)
# Ranks of cp, of which so many exchange rows for the three groups; tokens of a chunk of the scan; documents
CASES = [(2, 1, 5, False), (2, 1, 5, True), (2, 1, 64, True), (4, 1, 4, True), (8, 1, 2, False), (8, 1, 2, True)]
CASES += [(6, 3, 5, False), (6, 3, 5, True)]


def facts_of(letter: str) -> GPTFacts:
    plain = dict(hidden_dropout=0.0, attention_dropout=0.0)
    return GPTFacts(Model(1, HIDDEN, 3, S, hybrid_layer_pattern=letter, **SIZES, **plain), 40)


def drawn(shape, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


X, UPSTREAM = drawn((S, B, HIDDEN), 0), drawn((S, B, HIDDEN), 1)


@cache
def weights_of(letter: str) -> dict[str, torch.Tensor]:
    """Rates of which states lose about a tenth in a token."""
    table = facts_of(letter).layer_table(0, False)
    slow = lambda name, shape: drawn(shape, len(name)).mul(0.3) - (3.0 if name.endswith("A_log") else 0.0)
    slot = KINDS[letter].slot
    return {name: slow(name, placed.shape) for name, placed in table.items() if name.startswith(f"{slot}.")}


@cache
def wanted(letter: str, packed: bool) -> list[torch.Tensor]:
    """What the layer gives, the gradient of its input, and those of its weights, by name."""
    weights = {name: values.double().requires_grad_() for name, values in weights_of(letter).items()}
    x, ids = X.double().transpose(0, 1).requires_grad_(), IDS.t() if packed else torch.zeros(B, S)
    y = KINDS[letter].adds(weights, f"{KINDS[letter].slot}.", x, ids).transpose(0, 1)
    of_x, *others = torch.autograd.grad((y * UPSTREAM).sum(), [x, *(weights[name] for name in sorted(weights))])
    return [y.detach(), of_x.transpose(0, 1), *others]


def computed(rank: int, letter: str, cp: int, heads: int, packed: bool) -> list[torch.Tensor]:
    mesh, rows = Mesh(rank, cp=cp, cp_levels=(heads, cp // heads) if heads > 1 else None), rows_of(rank, cp, S)
    network, slot = GPT(facts_of(letter), mesh, device="cpu"), KINDS[letter].slot
    mixer = getattr(network.blocks["0"], slot)
    own = {name.removeprefix(f"{slot}."): values for name, values in weights_of(letter).items()}
    mixer.load_state_dict(own)
    tokens, x = torch.zeros(len(rows), B, dtype=torch.long), X[rows].clone().requires_grad_()
    batch = MicroBatch(tokens, tokens, torch.arange(B), document_ids=IDS if packed else None)
    y = mixer(x, network.context(batch))
    parameters = dict(mixer.named_parameters())
    found = torch.autograd.grad((y * UPSTREAM[rows]).sum(), [x, *(parameters[name] for name in sorted(parameters))])
    return [y.detach(), *found]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("cp, heads, chunk, packed", CASES)
def test_passed_states_are_those_of_the_whole_sequence(cp, heads, chunk, packed, run_ranks, monkeypatch):
    monkeypatch.setattr("megatron.model.kinds.mamba.module.ssd", partial(ssd, chunk=chunk))
    monkeypatch.setattr("megatron.model.kinds.gdn.module.delta_rule", partial(delta_rule, chunk=chunk))
    of_letters = run_ranks(cp, lambda rank: [computed(rank, letter, cp, heads, packed) for letter in "GM"])
    for letter, *of_ranks in zip("GM", *of_letters, strict=True):
        want = wanted(letter, packed)
        for place, whole in enumerate(want):
            if place < 2:
                parts = [(of_rank[place], whole[rows_of(rank, cp, S)]) for rank, of_rank in enumerate(of_ranks)]
            else:  # each rank has a part of a sum over tokens, and over groups
                parts = [(sum(of_rank[place] for of_rank in of_ranks), whole)]
            for mine, theirs in parts:
                error = (mine - theirs).abs().max() / whole.abs().max()
                assert error < 1e-5, (letter, sorted(weights_of(letter))[place - 2] if place > 1 else place, error)


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("packed", [False, True], ids=["whole", "documents"])
@pytest.mark.parametrize("letter", "GM")
@pytest.mark.parametrize("cp, heads", [(2, 1), (6, 3)])
def test_kept_bytes_are_those_of_autograd(letter, packed, cp, heads, run_ranks):
    facts, cases = facts_of(letter), list(product(("fp32", "bf16"), ((), ("core_attn",), ("full_attn",))))
    share = RankSetup(device="cpu", micro_batch_size=B, documents=packed, cp=cp, cp_heads=heads)
    shares = dict(fp32=replace(share, precision="fp32", element=4), bf16=replace(share, precision="bf16", element=2))

    def body(rank):
        mesh = Mesh(rank, cp=cp, cp_levels=(heads, cp // heads) if heads > 1 else None)
        return [
            saved_by_layer(facts, shares[precision], words, 11 if packed else None, mesh) for precision, words in cases
        ]

    wanted = [facts.layer_saved_bytes(shares[one], facts.layer_kind(0), words).total() for one, words in cases]
    assert run_ranks(cp, body) == [wanted] * cp
