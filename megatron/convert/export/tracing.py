# SPDX-License-Identifier: Apache-2.0
"""Record a model as a program of torch's own ops (`torch.export`), for any number and length of texts.

Programs take and return tensors with the batch first, as other libraries do. Legend: b texts, s tokens, t cached tokens, L
layers, g key-value groups, d channels per head, v vocabulary.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Optional

import torch
import torch.nn.functional as F
from torch import nn

from megatron import fused_kernels
from megatron.errors import SettingsError
from megatron.fused_kernels import reference
from megatron.model.bert.facts import BertFacts
from megatron.model.facts import Facts
from megatron.model.t5 import module as t5_module
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.positions import relative_buckets
from megatron.mpu import collectives
from megatron.mpu.mesh import Axis

GROUP = "tensor parallel"  # the name that a program has for the ranks that share a model


class Program(NamedTuple):
    """A module to record: its example inputs, their dynamic dims by position, and the names of inputs and outputs."""

    module: nn.Module
    inputs: dict[str, torch.Tensor]
    dims: dict[str, dict[int, Any]]
    outputs: tuple[str, ...]


def program_of(model: nn.Module, facts: Facts, kind: str, longest: int) -> Program:
    """The program of a model; kind: `lm` (scores at every position) or `generation` (of the next token, with a cache).

    Raises SettingsError for layers whose ops depend on the length of a text.
    """
    if names := facts.with_states:
        raise SettingsError(
            f"layers of {' and '.join(names)} have no program for texts of any length",
            "they go through a text chunk by chunk, and a program has as many chunks as the text that it is recorded with",
            "--format hf exports weights, if transformers has the model; tools.generate and tools.serve read checkpoints",
        )
    dim, tokens = torch.export.Dim, torch.zeros(2, 3, dtype=torch.int64)
    b, s = dim("batch", min=1), dim("sequence", min=1, max=longest)
    if isinstance(facts, T5Facts):
        t = dim("target_sequence", min=1, max=facts.target)
        s = dim("sequence", min=2, max=facts.source)  # torch records that 1 is not below it
        inputs = dict(input_ids=tokens, decoder_input_ids=torch.zeros(2, 4, dtype=torch.int64))
        dims = dict(input_ids={0: b, 1: s}, decoder_input_ids={0: b, 1: t})
        return Program(_EncoderDecoder(model), inputs, dims, ("logits",))
    if isinstance(facts, BertFacts):
        inputs = dict(input_ids=tokens, token_type_ids=torch.zeros_like(tokens))
        second = ("next_sentence_logits",) * bool(facts.own.bert_binary_head)
        return Program(_Bidirectional(model), inputs, dict.fromkeys(inputs, {0: b, 1: s}), ("logits", *second))
    if kind == "lm":
        return Program(_LanguageModel(model), dict(input_ids=tokens), dict(input_ids={0: b, 1: s}), ("logits",))
    attention = next(iter(model.blocks.values())).attention
    shape = (len(model.blocks), 2, 5, attention.groups, attention.head_dim)
    past, t = torch.zeros(shape, dtype=model.dtype), dim("past_sequence", max=longest)
    inputs = dict(input_ids=tokens, past_keys=past, past_values=past.clone())
    dims = dict(input_ids={0: b, 1: s}, past_keys={1: b, 2: t}, past_values={1: b, 2: t})
    return Program(_NextToken(model), inputs, dims, ("logits", "keys", "values"))


@torch.no_grad()
def record(program: Program) -> torch.export.ExportedProgram:
    """Record a program, for all sizes of its dynamic dims."""
    with only_torch():
        return torch.export.export(
            program.module.eval(),
            (),
            dict(program.inputs),
            dynamic_shapes=program.dims,
            prefer_deferred_runtime_asserts_over_guards=True,  # slices compare sizes that always fit
        )


# ---- the modules -----------------------------------------------------------------------------------------------------


class _LanguageModel(nn.Module):
    """input_ids [b, s] -> scores of the next token at every position, [b, s, v] fp32."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model.logits(input_ids.t()).transpose(0, 1)


class _NextToken(_LanguageModel):
    """input_ids [b, s] after cached tokens [L, b, t, g, d] -> scores after the last one [b, v], and the new cache.

    Texts of a batch have the same length. The first call has a cache of t = 0 tokens.
    """

    def forward(self, input_ids, past_keys, past_values):
        cache = Past(past_keys, past_values, input_ids.shape[1])
        scores = self.model.logits(input_ids.t(), cache=cache, last_only=True)
        return scores[-1], torch.stack(cache.keys), torch.stack(cache.values)


class _EncoderDecoder(_LanguageModel):
    """Sources [b, s] and targets so far [b, t] -> scores of the targets' next tokens, [b, t, v] fp32."""

    def forward(self, input_ids, decoder_input_ids):
        return self.model.logits(input_ids.t(), decoder_input_ids.t()).transpose(0, 1)


class _Bidirectional(_LanguageModel):
    """input_ids and token_type_ids [b, s] -> scores of the word at each position [b, s, v], and of the next sentence."""

    def forward(self, input_ids, token_type_ids):
        words = self.model.logits(input_ids.t(), types=token_type_ids.t()).transpose(0, 1)
        if getattr(self.model, "binary", None) is None:
            return words
        return words, self.model.follows(input_ids.t(), types=token_type_ids.t())


class Past:
    """A `model.cache.Cache` of s new tokens after cached keys and values [L, b, t, g, d]; layers add theirs."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, s: int):
        self.past, self.first, self.s = (keys, values), keys.shape[2], s
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def position_ids(self, device) -> torch.Tensor:
        """[s, 1], of the new tokens."""
        return (torch.arange(self.s, device=device) + self.first).unsqueeze(1)

    def attend(self, layer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context) -> torch.Tensor:
        """Attend to all tokens: query [s, b, g, q, d], key and value [s, b, g, d] of the new ones -> [s, b, g q d]."""
        both = []
        for past, new, kept in zip(self.past, (key, value), (self.keys, self.values)):
            both.append(torch.cat((past[len(kept)].transpose(0, 1), new)))
            kept.append(both[-1].transpose(0, 1))
        return layer.core(query, *both, layer, context.without_cache)


# ---- what is different while a program is recorded -------------------------------------------------------------------


@contextlib.contextmanager
def only_torch() -> Iterator[None]:
    """Use each op's plain PyTorch, and collectives that a program can contain.

    Other kernels choose by the sizes of a call, or are not torch's.
    """
    plain = {op: [entries[-1]] for op, entries in fused_kernels.TABLE.items()}
    plain["attention"] = [replace(plain["attention"][0], run=_attention)]
    replaced = (
        (fused_kernels, "TABLE", plain),
        (collectives, "all_reduce", _all_reduce),
        (collectives, "all_gather", _all_gather),
        (t5_module, "relative_bias", _relative_bias),
    )
    before = [getattr(module, name) for module, name, _ in replaced]
    try:
        for module, name, value in replaced:
            setattr(module, name, value)
        yield
    finally:
        for (module, name, _), value in zip(replaced, before):
            setattr(module, name, value)


def _attention(query, key, value, *, causal: bool, allowed: Optional[torch.Tensor] = None, window=None, **more):
    """`reference.attention` with the causal order as a mask: the same ops for one token and for many."""
    s, t, b = query.shape[0], key.shape[0], query.shape[1]
    if causal:
        order = torch.arange(t, device=query.device)
        own = order[t - s :].unsqueeze(1)
        visible = order <= own
        if window is not None:
            visible = visible & (order >= own - window)
        visible = visible.unsqueeze(0).expand(b, s, t)
        allowed = visible if allowed is None else visible & allowed
    return reference.attention(query, key, value, causal=False, allowed=allowed, **more)


def _relative_bias(table: torch.Tensor, own, queries, keys, both_ways: bool, first=0) -> torch.Tensor:
    """`t5.positions.relative_bias`, with a row looked up for each pair: windows have a fixed size in a program."""
    place = lambda n, start=0: torch.arange(n, device=table.device) + start
    distances = place(keys) - place(queries, first).unsqueeze(1)  # [queries, keys]
    return F.embedding(relative_buckets(distances, own, both_ways), table).permute(2, 0, 1)


def _all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    if axis.size == 1:
        return x
    return x.copy_(_arrived(torch.ops._c10d_functional.all_reduce(x, op, GROUP)))  # in place, as callers expect


def _all_gather(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    if axis.size == 1:
        return x
    whole = _arrived(torch.ops._c10d_functional.all_gather_into_tensor(x.contiguous(), axis.size, GROUP))
    return whole if dim == 0 else torch.cat(whole.unflatten(0, (axis.size, -1)).unbind(), dim)


def _arrived(pending: torch.Tensor) -> torch.Tensor:
    return torch.ops._c10d_functional.wait_tensor(pending)
