# SPDX-License-Identifier: Apache-2.0
"""Ranks that share sequences compute what one process computes: attention against a dense mask in fp64, a whole Llama with
documents against Hugging Face's.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.data.loader import MicroBatch, MicroBatchLoader
from megatron.errors import SettingsError
from megatron.model.context import ForwardContext
from megatron.model.gpt.module import GPT
from megatron.model.kinds.attention.module import attention_core
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Data, Kernels, Model
from tests.model.test_huggingface import HEADS, LLAMA, THEIR_LLAMA, H, V, llama_in_our_names

S, B = 48, 2
WAYS = ("p2p", "allgather", "a2a")


def rows_of(rank, cp, s=S):
    c = s // (2 * cp)
    return [*range(rank * c, rank * c + c), *range(s - rank * c - c, s - rank * c)]


def random(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- attention -------------------------------------------------------------------------------------------------------

DOCUMENTS = torch.stack([(torch.arange(S) >= 19).int() + (torch.arange(S) >= 40), (torch.arange(S) >= 1).int()], 1)
SETTINGS = [  # further settings of the model, and whether there are documents
    (dict(), False),
    (dict(), True),
    (dict(attn_logit_softcapping=2.0), True),
    (dict(window_size="9,0"), False),
    (dict(window_size="13,0", attn_logit_softcapping=2.0), True),
    (dict(attention_dropout=0.3), True),
    (dict(softmax_type="learnable", window_size="13,0"), True),
]


def layer_of(mesh, way, settings, backend):
    model = Model(
        num_layers=1,
        hidden_size=32,
        num_attention_heads=8,
        num_query_groups=4,
        seq_length=S,
        hidden_dropout=0.0,
        **dict(dict(attention_dropout=0.0), **settings),
    )
    network = GPT(model, mesh, 50, cp_comm_type=[way], kernels=Kernels(attention_backend=backend), device="cpu")
    layer = network.blocks["0"].attention
    if layer.softmax_offset is not None:
        layer.softmax_offset.data.copy_(torch.linspace(-1, 2, 8).view(4, 2))
    return network, layer


def dense(query, key, value, layer, documents):
    """[s, b, g q d] in fp64 from the scores of all pairs."""
    s, b, g, q, d = query.shape
    seen = torch.zeros(b, s, s, dtype=torch.bool)
    reach = s if layer.window is None else layer.window
    for i, j in itertools.product(range(s), range(s)):
        if 0 <= i - j <= reach:
            seen[:, i, j] = True if documents is None else documents[i] == documents[j]
    scores = torch.einsum("sbgqd,tbgd->bgqst", query, key) * d**-0.5
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    if layer.has_sinks:
        sinks = layer.softmax_offset.double().view(1, g, q, 1, 1).expand(b, g, q, s, 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., :s]
    if layer.dropout.p:
        kept = layer.dropout.keep((b, g * q, s, s), torch.arange(b), torch.device("cpu"))
        weights = weights * kept.mask().view(b, g, q, s, s) * kept.factor
    return torch.einsum("bgqst,tbgd->sbgqd", weights, value).reshape(s, b, g * q * d)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("cp", [2, 4])
def test_attention_is_that_of_the_whole_sequence(cp, run_ranks):
    inputs = [random(0, S, B, 4, 2, 4), random(1, S, B, 4, 4), random(2, S, B, 4, 4)]
    upstream = random(3, S, B, 32)
    backends = ("auto", "sdpa", "explicit") if cp == 2 else ("auto",)
    ways = [*WAYS, "a2a+p2p"] if cp == 4 else WAYS
    cases = [(*case, way, backend) for case in SETTINGS for way in ways for backend in backends]

    def body(rank):
        mesh, rows, found = Mesh(rank, cp=cp, cp_levels=(2, 2) if cp == 4 else None), rows_of(rank, cp), []
        for settings, documents, way, backend in cases:
            network, layer = layer_of(mesh, way, settings, backend)
            own = [x[rows].clone().requires_grad_() for x in inputs]
            tokens = torch.zeros(len(rows), B, dtype=torch.long)
            batch = MicroBatch(tokens, tokens, torch.arange(B), document_ids=DOCUMENTS if documents else None)
            context = network.context(batch)
            value = attention_core(*own, layer, context)
            of = [*own, layer.softmax_offset] if layer.has_sinks else own
            found.append((value.detach(), *torch.autograd.grad(value, of, upstream[rows])))
        return found

    found = run_ranks(cp, body)
    for number, (settings, documents, way, backend) in enumerate(cases):
        _, layer = layer_of(Mesh(), "p2p", settings, backend)
        exact = [x.double().requires_grad_() for x in inputs]
        value = dense(*exact, layer, DOCUMENTS if documents else None)
        of = [*exact, layer.softmax_offset] if layer.has_sinks else exact
        wanted = (value, *torch.autograd.grad(value, of, upstream.double()))
        if layer.has_sinks:  # each rank has a part of a sum: of its rows, or of its heads
            assert (sum(of_rank[number][4] for of_rank in found) - wanted[4]).abs().max() < 5e-5, (way, backend)
        for rank, of_rank in enumerate(found):
            for mine, want in zip(of_rank[number][:4], wanted[:4], strict=True):
                error = (mine - want[rows_of(rank, cp)]).abs().max()
                assert error < 2e-5, (settings, documents, way, backend, rank, error)


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_of_its_own_needs_whole_sequences(way):
    """ALiBi, relative positions: ranks would take the wrong part of it."""
    _, layer = layer_of(Mesh(0, cp=2, create_groups=False), way, {}, "auto")
    query, key = torch.zeros(S // 2, B, 4, 2, 4), torch.zeros(S // 2, B, 4, 4)
    with pytest.raises(SettingsError, match="needs whole sequences") as raised:
        attention_core(query, key, key, layer, ForwardContext(bias=torch.zeros(8, S, S)))
    assert "--context-parallel-size 2" in str(raised.value)


# ---- a whole model ---------------------------------------------------------------------------------------------------

EOD = 7


class Samples:
    """Two samples of numbers among which ends of documents stand in early and late chunks, and on their borders."""

    def __len__(self):
        return 2

    def __getitem__(self, number):
        sample = np.random.RandomState(number).randint(8, V, S + 1)
        sample[[[4, 11, 12, 30, 41], [0, 23, 24, 47]][number]] = EOD
        return sample


def in_one_piece():
    """Tokens, labels, loss mask, positions [b, s] and pairs that see each other [b, s, s], counted token by token."""
    samples = torch.tensor(np.stack([Samples()[n] for n in range(2)]))
    tokens, labels = samples[:, :-1], samples[:, 1:]
    positions, pairs = torch.zeros_like(tokens), torch.zeros(2, S, S, dtype=torch.bool)
    for b in range(2):
        start = 0
        for i in range(S):
            positions[b, i] = i - start
            pairs[b, i, start : i + 1] = True
            start = i + 1 if tokens[b, i] == EOD else start
    return tokens, labels, (tokens != EOD).float(), positions, pairs


@pytest.mark.sampled(5)
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("documents", [True, False], ids=["documents", "one document"])
def test_llama_is_hugging_faces(documents, sp, run_ranks):
    """Its loss, and the gradients of all its weights, summed over the ranks of a sequence. With sp on four ranks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        **THEIR_LLAMA, num_key_value_heads=HEADS, max_position_embeddings=S, attn_implementation="eager"
    )
    theirs = transformers.LlamaForCausalLM(config).eval()
    tokens, labels, mask, positions, pairs = in_one_piece()
    scores = torch.zeros(2, 1, S, S).masked_fill(~pairs.unsqueeze(1), torch.finfo(torch.float32).min)
    if not documents:
        mask = torch.ones_like(mask)
    more = dict(attention_mask=scores, position_ids=positions) if documents else {}
    logits = theirs(tokens, **more).logits
    expected = (F.cross_entropy(logits.view(-1, V), labels.reshape(-1), reduction="none") * mask.view(-1)).sum()
    expected.backward()
    weights = llama_in_our_names({name: p.detach() for name, p in theirs.named_parameters()}, HEADS)
    gradients = llama_in_our_names({name: p.grad for name, p in theirs.named_parameters()}, HEADS)
    model = Model(
        num_layers=2,
        hidden_size=H,
        num_attention_heads=HEADS,
        seq_length=S,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        make_vocab_size_divisible_by=2,
        **LLAMA,
    )
    wishes = dict.fromkeys(("reset_attention_mask", "reset_position_ids", "eod_mask_loss"), documents)
    data = Data(**wishes, num_workers=0)
    tp = 1 + sp

    def body(rank):
        mesh, found = Mesh(rank, cp=2, tp=tp), []
        loader = MicroBatchLoader(
            Samples(), data, micro_batch_size=2, eod=EOD, cp_rank=mesh.cp.rank, cp_size=2, seq_length=S
        )
        for way in WAYS:
            ours = GPT(model, mesh, V, cp_comm_type=[way], sequence_parallel=sp, device="cpu")
            boxes = {}
            with torch.no_grad():
                for name, parameter in ours.named_parameters():
                    owner, _, attribute = name.rpartition(".")
                    placed = ours.get_submodule(owner).placements[attribute]
                    offset, extent = placed.box(tuple(parameter.shape), mesh.coordinates)
                    boxes[name] = tuple(slice(at, at + n) for at, n in zip(offset, extent, strict=True))
                    parameter.copy_(weights[name][boxes[name]])
            sums = ours(None, loader.micro_batch(0, 0))[1]
            sums["lm loss"].backward()
            own = {name: (boxes[name], p.grad) for name, p in ours.named_parameters()}
            found.append((sums["lm loss"].item(), sums["tokens"].item(), own))
        return found

    found = run_ranks(2 * tp, body)
    for way in range(len(WAYS)):
        losses, counts = ([of_rank[way][n] for of_rank in found[::tp]] for n in range(2))
        assert (
            sum(losses) == pytest.approx(expected.item(), rel=1e-5)
            and sum(counts) == mask.sum() == 2 * S - 9 * documents
        )
        for name, want in gradients.items():
            total = torch.zeros_like(want)
            for rank, of_rank in enumerate(found):
                box, gradient = of_rank[way][2][name]
                if "norm" in name and not sp and rank % tp:
                    continue  # the same on ranks of tp
                total[box] += gradient
            torch.testing.assert_close(total, want, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
