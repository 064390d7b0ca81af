# SPDX-License-Identifier: Apache-2.0
"""Attention of samples packed of documents equals the formula in fp64 over the pairs of a token-by-token count, values and
gradients, by every kernel that may be chosen; and no tensor of all pairs is made on the way.

`tests/gpu/test_gpu_kernels.py` runs the tests that take a device on CUDA. Legend: as in `test_attention.py`.
"""

import itertools
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.data import batch_arrays
from megatron.data.loader import MicroBatch
from megatron.fused_kernels import Case, attention, explicit_attention
from megatron.fused_kernels.documents import Documents, starts_of
from megatron.fused_kernels.dropout import DropoutMask
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Kernels, Model
from tests.fused_kernels.test_attention import (
    FACTOR,
    SCALE,
    THRESHOLD,
    B,
    assert_near,
    fitting_equal,
    formula,
    operands,
    results,
)

S = 300  # of 128 rows each are the blocks of block-causal below 512
LAYOUTS = {  # of two samples: where documents begin, besides 0
    "one document": ([], []),
    "tokens": (range(120, 281), [100]),
    "borders of blocks": ([128, 256], [127, 129, 255, 257]),
    "some": ([19, 40, 41, 205], [1, 150, 299]),
    "many and one": (range(0, S, 7), []),
    "a long one between": ([3, 5, 8, 258], [64, 192]),  # the last one is a key longer than a window of 40 reaches
}


def ids_of(layout: str, s: int = S) -> np.ndarray:
    """[b, s] numbers of documents."""
    return np.stack([np.cumsum([n in begins and n > 0 for n in range(s)]) for begins in LAYOUTS[layout]])


def pairs_of(ids: np.ndarray, rows: tuple[int, int], first: int, window) -> torch.Tensor:
    """[b, s, t] bool: same document, not after the query, in its window."""
    start, stop = rows
    back = np.arange(start, stop)[:, None] - np.arange(first, stop)  # [s, t] places from the query back to the key
    same = ids[:, start:stop, None] == ids[:, None, first:stop]
    return torch.from_numpy(same & (back >= 0) & (back <= (stop if window is None else window)))


# ---- what kernels are told -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_starts_edges_and_parts_name_the_pairs(layout):
    """Of whole samples and of rows of them, over all keys up to theirs or some: edges of queries and keys, documents
    aligned at their ends, make the same pairs as a count.
    """
    ids = ids_of(layout)
    for rows, first in [((0, S), 0), ((75, 150), 0), ((75, 150), 60), ((225, 300), 205), ((299, 300), 299)]:
        found = Documents.of(starts_of(torch.from_numpy(ids.T)), "cpu", rows=rows, first=first)
        s, t = rows[1] - rows[0], rows[1] - first
        wanted = pairs_of(ids, rows, first, None)
        order = torch.arange(t) <= torch.arange(t - s, t)[:, None]
        assert (found.allowed(t) & order).equal(wanted)
        queries, keys = found.query_edges.tolist(), found.key_edges.tolist()
        assert len(queries) == len(keys) and queries[-1] == B * s and keys[-1] == B * t
        assert [run for sample in found.parts for run in np.diff(queries)[: len(sample)] if run < 0] == []
        by_edges = torch.zeros(B * s, B * t, dtype=torch.bool)
        for q0, q1, k0, k1 in zip(queries, queries[1:], keys, keys[1:], strict=False):
            n, m = q1 - q0, k1 - k0
            by_edges[q0:q1, k0:k1] = torch.arange(m) <= torch.arange(m - n, m)[:, None]
            assert n <= found.longest[0] and m <= found.longest[1]
        blocks = by_edges.view(B, s, B, t)
        assert all(blocks[b, :, b].equal(wanted[b]) for b in range(B)) and by_edges.sum() == wanted.sum()
        assert max(np.diff(queries)) == found.longest[0] and max(np.diff(keys)) == found.longest[1]
        for parts, runs in zip(found.parts, found.runs, strict=True):
            assert [sum(part[n] for part in parts) for n in (0, 1)] == [sum(run[n] for run in runs) for n in (0, 1)]
            assert sum(run.documents for run in runs) == len(parts)


def test_the_loader_and_ids_agree_on_where_documents_begin():
    tokens = np.random.RandomState(0).randint(0, 4, (3, 50))
    starts = batch_arrays.document_starts(batch_arrays.document_ids(tokens, 0))
    for sample, row in zip(tokens, starts, strict=True):
        begins = [0] + [n + 1 for n, token in enumerate(sample[:-1]) if token == 0]
        assert row.tolist() == [max(n for n in begins if n <= place) for place in range(50)]
    assert (starts_of(torch.from_numpy(batch_arrays.document_ids(tokens, 0).T)) == starts).all()


# ---- values and gradients --------------------------------------------------------------------------------------------

ROWS = {  # the queries, and the first key for a window: a whole sample; an early and a late chunk of rows of one
    "whole": lambda window: ((0, S), 0),
    "chunk": lambda window: ((75, 150), max(0, 75 - window) if window else 0),
    "last chunk": lambda window: ((225, S), max(0, 225 - window) if window else 0),
}
SETTINGS = [  # window, cap, dropout, g, q
    (None, None, False, 2, 1),
    (None, None, False, 1, 3),
    (40, None, False, 2, 1),
    (40, None, False, 2, 3),
    (5, 0.7, False, 1, 2),
    (None, 0.7, True, 2, 1),
    (150, None, True, 1, 3),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_kernel(device, layout, rows):
    for setting in SETTINGS:
        names = check(device, torch.float32, layout, rows, *setting)
        assert {"reference", "block-causal"} <= names
        assert setting[1] or setting[2] or any(name.startswith("sdpa") for name in names)


def test_one_document_gives_the_bits_of_none():
    """What a run without documents computes on a CPU."""
    inputs = operands(S, S, 2, 2, 16, torch.float32, "cpu")
    for window, softcap in [(None, None), (40, 0.7)]:
        how = dict(scale=SCALE, causal=True, window=window, softcap=softcap)
        plain = results(partial(explicit_attention.in_blocks, **how), inputs)
        documents = Documents.of(np.zeros((B, S), np.int32), "cpu")
        apart = results(partial(explicit_attention.in_blocks, documents=documents, **how), inputs)
        assert all(map(torch.equal, apart, plain))


def test_half_precision(device):
    """On CUDA the kernels of documents are among them, in all layouts and rows."""
    some = [("some", "last chunk")]
    every = itertools.product(["one document", "tokens", "borders of blocks", "some", "many and one"], ROWS)
    for (layout, rows), setting in itertools.product(every if device == "cuda" else some, SETTINGS):
        names = check(device, torch.bfloat16, layout, rows, *setting)
        assert device == "cpu" or setting[1] or setting[2] or "varlen (CUDA)" in names


def check(device, dtype, layout, rows, window, softcap, dropped, g, q) -> set[str]:
    """All kernels that may be chosen against the formula; their names."""
    (start, stop), first = ROWS[rows](window)
    s, t, ids = stop - start, stop - first, ids_of(layout)
    documents = Documents.of(starts_of(torch.from_numpy(ids.T)), device, rows=(start, stop), first=first)
    pairs = pairs_of(ids, (start, stop), first, window)
    words = torch.randint(-32768, 32768, (B, g * q, s, t), generator=torch.Generator().manual_seed(3)).short()
    inputs = operands(s, t, g, q, 16, dtype, device)
    exact = [x.detach().cpu().double().requires_grad_() for x in inputs]
    wanted = results(lambda *x: formula(*x, pairs, (words >= THRESHOLD) if dropped else None, softcap), exact)
    how = dict(
        scale=SCALE,
        causal=True,
        documents=documents,
        dropout=DropoutMask(words.to(device), THRESHOLD, FACTOR) if dropped else None,
        softcap=softcap,
        window=window,
    )
    extras = dict(grouped=q > 1, softcap=bool(softcap), window=window, documents=True)
    case = Case(device, dtype, s, t, True, False, dropped, **extras, head_dim=16)
    return fitting_equal(case, how, inputs, wanted)


# ---- packages that are not here --------------------------------------------------------------------------------------


def one_after_the_other(q, k, v, query_edges, key_edges, window, softcap):
    """What flash attention of documents is said to compute, one document at a time: [all queries, heads, d]."""
    found, heads = torch.zeros_like(q), q.shape[1] // k.shape[1]
    for q0, q1, k0, k1 in zip(query_edges, query_edges[1:], key_edges, key_edges[1:], strict=False):
        n, m = q1 - q0, k1 - k0
        if n:
            pairs = torch.ones(1, n, m, dtype=torch.bool).tril(m - n)
            pairs = pairs if window < 0 else pairs.triu(m - n - window)
            of_one = q[q0:q1].unsqueeze(1).unflatten(2, (-1, heads)), k[k0:k1].unsqueeze(1), v[k0:k1].unsqueeze(1)
            found[q0:q1] = formula(*of_one, pairs, None, softcap).view(n, -1, q.shape[-1])
    return found


def stand_ins(monkeypatch, groups_have_a_word: bool):
    """Modules with the signatures of flash-attn 2.8 and of torch 2.11 or 2.13."""

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, softmax_scale, causal, **more
    ):
        assert softmax_scale == SCALE and causal and set(more) <= {"window_size", "softcap"}
        window, right = more.get("window_size", (-1, 0))
        return attend(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window, right, more.get("softcap")
        )

    def newer(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa=False):
        assert scale == SCALE and enable_gqa == (query.shape[1] != key.shape[1]) and query.shape[-1] % 8 == 0
        return attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *window_size, None)

    def older(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
        return newer(
            query,
            key,
            value,
            cu_seq_q,
            cu_seq_k,
            max_q,
            max_k,
            scale=scale,
            window_size=window_size,
            enable_gqa=query.shape[1] != key.shape[1],
        )

    def attend(q, k, v, query_edges, key_edges, max_q, max_k, window, right, softcap):
        assert right == 0 and query_edges.dtype == key_edges.dtype == torch.int32
        assert query_edges.diff().max() <= max_q and key_edges.diff().max() <= max_k
        return one_after_the_other(q, k, v, query_edges.tolist(), key_edges.tolist(), window, softcap)

    flash = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    monkeypatch.setitem(sys.modules, "flash_attn", flash)
    torchs = types.SimpleNamespace(varlen_attn=newer if groups_have_a_word else older)
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", torchs)


@pytest.mark.parametrize("run", [attention.varlen, attention.flash_attn_varlen])
@pytest.mark.parametrize("rows", ROWS)
def test_packages_are_told_of_documents(monkeypatch, run, rows):
    for layout, (window, d, q) in itertools.product(["some", "many and one"], [(None, 16, 1), (9, 8, 2)]):
        stand_ins(monkeypatch, groups_have_a_word=layout != "some")
        (start, stop), first = ROWS[rows](window)
        ids = ids_of(layout)
        documents = Documents.of(starts_of(torch.from_numpy(ids.T)), "cpu", rows=(start, stop), first=first)
        inputs = operands(stop - start, stop - first, 2, q, d, torch.float32, "cpu")
        exact = [x.detach().double().requires_grad_() for x in inputs]
        pairs = pairs_of(ids, (start, stop), first, window)
        wanted = results(lambda *x, pairs=pairs: formula(*x, pairs, None), exact)
        got = results(partial(run, scale=SCALE, documents=documents, window=window), inputs)
        for mine, theirs in zip(got, wanted, strict=True):
            assert_near(mine, theirs, torch.float32, "cpu", f"{layout} {window}")


def test_widths_that_torchs_kernel_does_not_take_are_filled_up(monkeypatch):
    stand_ins(monkeypatch, groups_have_a_word=True)
    ids, inputs = ids_of("some"), operands(S, S, 1, 2, 5, torch.float32, "cpu")
    documents = Documents.of(starts_of(torch.from_numpy(ids.T)), "cpu")
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = results(lambda *x: formula(*x, pairs_of(ids, (0, S), 0, None), None), exact)
    for mine, theirs in zip(
        results(partial(attention.varlen, scale=SCALE, documents=documents), inputs), wanted, strict=True
    ):
        assert_near(mine, theirs, torch.float32, "cpu", "width 5")


# ---- memory ----------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.numel())
        return made


def largest(s: int, begins, backend: str, window=None) -> tuple[int, int]:
    """(elements of the largest tensor of a forward and a backward pass, bytes kept between them) of a small model."""
    model = Model(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=1,
        seq_length=s,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        position_embedding_type="rope",
        window_size=window and f"{window},0",
    )
    network = GPT(model, Mesh(), 8, kernels=Kernels(attention_backend=backend), device="cpu")
    tokens = torch.zeros(s, 1, dtype=torch.long)
    ids = torch.tensor([[n in begins] for n in range(s)]).cumsum(0)
    batch = MicroBatch(tokens, tokens, torch.arange(1), document_ids=ids)
    kept = {}
    keep = lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x) is None or x
    with Largest() as seen:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            loss = network(None, batch)[1]["lm loss"]
        loss.backward()
    return seen.elements, sum(x.untyped_storage().nbytes() for x in kept.values())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_memory_is_linear_in_the_sequence(backend):
    """Twice the documents are twice the memory, and no tensor is of all pairs; a single document's are as large as a block
    of queries by the keys (auto), or none (sdpa).
    """
    for begins in (lambda s: range(0, s, 100), lambda s: range(s)):
        (once, kept), (twice, kept_twice) = (largest(s, begins(s), backend) for s in (1024, 2048))
        assert twice <= 2.1 * once and kept_twice <= 2.1 * kept and twice < 2048**2 / 4
    (once, kept), (twice, kept_twice) = (largest(s, [], backend) for s in (1024, 2048))
    assert twice <= 2.1 * once and twice < 2048**2 / 4
    assert backend == "auto" or kept_twice <= 2.1 * kept
