# SPDX-License-Identifier: Apache-2.0
"""Inference with a model that pipeline parallel ranks share. All ranks call the same functions with the same tokens.

A forward pass goes from stage to stage; its result is on the last rank of the pipeline, and the others get None
(`of_last_stage` broadcasts it). The number of ranks does not depend on that of training.

By default, each rank has two stages of an encoder-decoder, one of the encoder and one of the decoder:

    >>> from megatron.model.t5.facts import T5Facts
    >>> from megatron.settings.schema import Model
    >>> facts = T5Facts(Model(num_layers=8, hidden_size=32, num_attention_heads=4, seq_length=16), 99)
    >>> stages_of(facts, 2).layers, stages_of(facts, 4, (1, 3)).layers
    ((range(0, 2), range(2, 4), range(4, 6), range(6, 8)), (range(0, 4), range(4, 6), range(6, 7), range(7, 8)))

The encoder runs once over its stages, and its output is broadcast to all ranks. Each layer of the decoder computes keys and
values from it once and caches them. Messages of the decoder are one token long, [1, b, h].
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Optional

import torch
from torch import nn

from megatron.errors import SettingsError
from megatron.inference.stage_layers import decoder_layers
from megatron.model.cache import PagedCache
from megatron.model.facts import Facts
from megatron.model.t5.facts import even
from megatron.model.t5.layers import DecoderCache
from megatron.model.t5.module import EncodedSource, attended
from megatron.mpu import collectives
from megatron.mpu.mesh import Axis, Mesh
from megatron.pipeline.build import build_stages, check_model_complete
from megatron.pipeline.stages import Pipeline
from megatron.pipeline.wire import P2PCommunicator

Halves = tuple[Optional[int], Optional[int]]  # ranks with layers of the encoder, and of the decoder; None: all
ENCODER, DECODER = "--encoder-pipeline-stages", "--decoder-pipeline-stages"


def chunks_of(model: nn.Module) -> list[nn.Module]:
    """The parts of a model on this rank: its stages in a pipeline, or the whole model."""
    return list(getattr(model, "chunks", [model]))


def stages_of(facts: Facts, pp: int, halves: Halves = (None, None)) -> Pipeline:
    """Assign layers to the ranks of `pp`. Raises SettingsError for fewer layers than ranks."""
    encoder, given = facts.encoder_layers, any(half is not None for half in halves)
    if encoder is None:
        if given:
            raise SettingsError(f"{ENCODER} and {DECODER} are for encoder-decoders", do="leave them out")
        _counts("model", facts.num_layers, pp, "--pipeline-model-parallel-size")
        counts = decoder_layers(facts, pp)
        places = [(rank, 0) for rank in range(pp)]
    else:
        first, last = (pp if half is None else half for half in halves)
        for flag, number in ((ENCODER, first), (DECODER, last)):
            if not 1 <= number <= pp:
                raise SettingsError(f"{flag} {number}: there are {pp} ranks in a pipeline", do=f"give 1 to {pp}")
        if first + last < pp:
            raise SettingsError(
                f"{ENCODER} {first} and {DECODER} {last} leave {pp - first - last} of {pp} ranks without layers",
                "the encoder has the first ranks, the decoder the last ones; a rank may have layers of both",
                f"raise one of them, or --pipeline-model-parallel-size {first + last}",
            )
        counts = _counts("encoder", encoder, first, ENCODER if given else "--pipeline-model-parallel-size")
        flag = DECODER if given else "--pipeline-model-parallel-size"
        counts += _counts("decoder", facts.num_layers - encoder, last, flag)
        both = [*range(first), *range(pp - last, pp)]
        places = [(rank, both[:number].count(rank)) for number, rank in enumerate(both)]
    ends = [0, *accumulate(counts)]
    chunks = 1 + max(chunk for _, chunk in places)
    return Pipeline("generation", pp, chunks, tuple(places), tuple(range(*pair) for pair in pairwise(ends)))


def _counts(what: str, layers: int, ranks: int, flag: str) -> list[int]:
    if layers < ranks:
        raise SettingsError(f"{flag} {ranks}: the {what} has {layers} layers", do=f"give at most {layers}")
    return even(layers, ranks)


class Stages(nn.Module):
    """This rank's stages of a model, and the communication between stages.

    build: (layers=, first=, last=) -> the module of a stage, for example on the meta device. Raises SettingsError for a
    module without the methods in `passes`.
    """

    passes: tuple[str, ...] = ()  # methods that modules need

    def __init__(self, build: Callable[..., nn.Module], facts: Facts, pipeline: Pipeline, mesh: Mesh):
        super().__init__()
        self.facts, self.pipeline, self.pp, self.vocab_size = facts, pipeline, mesh.pp, facts.vocab_size
        self.numbers = pipeline.stages_of(mesh.pp.rank)
        self.chunks = nn.ModuleList(build_stages(build, pipeline, mesh))
        if lacking := [name for name in self.passes if not hasattr(self.chunks[0], name)]:
            raise SettingsError(
                f"{type(self.chunks[0]).__name__} generates nothing over pipeline stages: it has no {lacking[0]}",
                do="leave out --pipeline-model-parallel-size",
            )
        everybody = partial(collectives.all_gather_object, axis=mesh.world)
        check_model_complete(list(self.chunks), mesh, everybody, facts.weights)
        self.wire: Optional[P2PCommunicator] = None

    def through(self, numbers: Sequence[int], shape: tuple[int, ...], run: Callable) -> Optional[torch.Tensor]:
        """Call run(module, x) for these stages, in order; returns the result on the rank of the last one, None elsewhere.

        shape: of messages. x: the result of the stage before; None for the first.
        """
        own = next(self.parameters())
        self.wire = self.wire or P2PCommunicator(self.pp, shape, own.dtype, own.device)
        self.wire.shape, x = shape, None
        rank_of = [self.pipeline.stages[number][0] for number in numbers]
        for place, number in enumerate(numbers):
            if rank_of[place] != self.pp.rank:
                continue
            if place:
                x = self.wire.receive(rank_of[place - 1], "F", 0, number).wait()
            x = run(self.chunks[self.numbers.index(number)], x)
            if place + 1 < len(numbers):
                self.wire.send(x, rank_of[place + 1], "F", 0, numbers[place + 1])
                x = None
        self.wire.finish()
        return x


class DecoderStages(Stages):
    """The stages of a causal model. `logits` and `token_losses` are those of the whole model on the last rank of the
    pipeline, None on others.
    """

    passes = ("cached_pass",)

    def logits(self, tokens: torch.Tensor, *, cache: Optional[PagedCache] = None, **options) -> Optional[torch.Tensor]:
        shape = (*tokens.shape, self.facts.settings.hidden_size)
        run = lambda stage, x: stage.cached_pass(x, tokens, cache=cache, **options)
        return self.through(range(len(self.pipeline.stages)), shape, run)

    def token_losses(self, x: None, batch) -> Optional[torch.Tensor]:
        shape = (*batch.tokens.shape, self.facts.settings.hidden_size)
        run = lambda stage, x: stage.token_losses(x, batch)
        return self.through(range(len(self.pipeline.stages)), shape, run)


class T5Stages(Stages):
    """The stages of an encoder-decoder. `encode` and `decode` are those of `T5`; `decode` returns None except on the last
    rank.
    """

    passes = ("encoder_pass", "decoder_pass")

    def __init__(self, *arguments):
        super().__init__(*arguments)
        layers, encoder = self.pipeline.layers, self.facts.encoder_layers
        last = len(layers) - 1
        self.encoding = [n for n, own in enumerate(layers) if n == 0 or own.start < encoder]
        self.decoding = [n for n, own in enumerate(layers) if n in (0, last) or own.stop > encoder]
        self._tables: Optional[torch.Tensor] = None

    def encode(self, tokens: torch.Tensor, mask: Optional[torch.Tensor] = None) -> EncodedSource:
        """The encoder's output for sources, on all ranks."""
        padding, shape = None if mask is None else attended(mask), (*tokens.shape, self.facts.settings.hidden_size)
        run = lambda stage, x: stage.encoder_pass(x, tokens, padding, self.tables())
        self.tables()
        found = self.through(self.encoding, shape, run)
        source = self.pipeline.stages[self.encoding[-1]][0]
        return EncodedSource(self.shared(found, shape, source), padding)

    def decode(
        self,
        tokens: torch.Tensor,
        encoded: EncodedSource,
        cache: Optional[DecoderCache] = None,
        last_only: bool = False,
    ) -> Optional[torch.Tensor]:
        shape = (*tokens.shape, self.facts.settings.hidden_size)
        run = lambda stage, x: stage.decoder_pass(x, tokens, encoded, cache, self.tables(), last_only)
        scores = self.through(self.decoding, shape, run)
        if cache is not None:
            cache.length += len(tokens)
        return scores

    def tables(self) -> Optional[torch.Tensor]:
        """The tables of relative positions, [2, buckets, heads/tp]: broadcast once by the first stage, and cached."""
        if self.facts.relative and self._tables is None:
            own, heads = self.facts.own, self.facts.settings.num_attention_heads // self.chunks[0].tp.size
            found = self.chunks[0].tables() if self.pp.rank == 0 else None
            self._tables = self.shared(found, (2, own.relative_attention_num_buckets, heads), 0)
        return self._tables

    def shared(self, found: Optional[torch.Tensor], shape: tuple[int, ...], source: int) -> torch.Tensor:
        """Broadcast a tensor from rank `source` of the pipeline to all of its ranks."""
        own = next(self.parameters())
        x = torch.empty(shape, dtype=own.dtype, device=own.device) if found is None else found.contiguous()
        return collectives.broadcast(x, self.pp, source)


def summed(values: torch.Tensor, model: nn.Module, axis: Axis) -> torch.Tensor:
    """Sum values over the ranks of `axis`, and over pipeline stages, of which all but the last have 0; on all ranks."""
    values, pp = collectives.all_reduce(values, axis), getattr(model, "pp", None)
    return values if pp is None else collectives.all_reduce(values, pp)


def of_last_stage(
    found: Optional[torch.Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pp: Axis
) -> torch.Tensor:
    """Broadcast a tensor from the last rank of a pipeline to all of its ranks; the others pass None."""
    if pp.size == 1:
        return found
    x = torch.empty(shape, dtype=dtype, device=device) if found is None else found.to(dtype).contiguous()
    return collectives.broadcast(x, pp, pp.size - 1)
