# SPDX-License-Identifier: Apache-2.0
"""The stages of a pipeline: from its settings to the layers of each stage. Pure.

    >>> p = Pipeline.of(Parallel(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2), num_layers=8)
    >>> p.layers_of(rank=0), p.layers_of(rank=1)
    ([range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)])

A *stage* is a piece of consecutive layers; a rank holds one or more of them, its *chunks*. The first stage has the
embedding, the last one the final norm, the output layer and the loss; either may have no layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain, groupby
from operator import itemgetter
from typing import Optional

from megatron.errors import SettingsError
from megatron.pipeline import schedule
from megatron.pipeline.custom_schedule import CustomSchedule, is_file, read_schedule
from megatron.pipeline.data_parallel_messages import pairs_of, passes_of, without_messages
from megatron.pipeline.schedule import Op, StageMap
from megatron.pipeline.simulate import report
from megatron.settings.hashed_once import hashed_once
from megatron.settings.schema import Parallel

LAYERS_EACH = "--pipeline-stage-layers"


@hashed_once
@dataclass(frozen=True)
class Pipeline:
    """The stages of a run, their ranks, and the order of their passes."""

    name: str
    pp: int
    chunks: int  # stages of a rank
    stages: StageMap  # stage -> (rank, chunk)
    layers: tuple[range, ...]  # stage -> global numbers of its layers
    custom: Optional[CustomSchedule] = field(default=None, hash=False)  # it has lists
    turns: bool = False  # forward and backward passes take turns (--overlap-moe-expert-parallel-comm, or & in a file)

    @classmethod
    def of(cls, parallel: Parallel, num_layers: int, num_microbatches: Optional[int] = None) -> "Pipeline":
        """The pipeline for settings without `problems`, and steps of `num_microbatches` micro-batches.

        Reads and verifies a schedule file; raises SettingsError if it does not fit this run.
        """
        pp, name = parallel.pipeline_model_parallel_size, parallel.pipeline_schedule
        custom = None
        if is_file(name):
            custom = read_schedule(name)
            _check_custom(custom, parallel, num_layers, num_microbatches)
        chunks = custom.chunks if custom else chunks_of(parallel, num_layers)
        turns = custom.turns if custom else takes_turns(parallel)
        stages = custom.stages if custom else schedule.stage_map(name, pp, chunks)
        return cls(name, pp, chunks, stages, _cut(num_layers, _counts(parallel, num_layers, stages)), custom, turns)

    @property
    def split(self) -> bool:
        """Whether gradients of weights are computed in passes of their own."""
        return self.custom.split if self.custom else schedule.SCHEDULES[self.name].split

    def ops(self, rank: int, num_microbatches: int, training: bool = True) -> list[Op]:
        """The ops of a rank in a training step, or in an evaluation, of this many micro-batches.

        They are passes. A file may also have their messages of data parallelism.
        """
        if not training:
            return schedule.make_schedule("forward-only", rank, self.pp, num_microbatches, self.chunks)
        if self.custom:
            assert num_microbatches == self.custom.num_microbatches, (
                f"a plan of {self.custom.num_microbatches} micro-batches for {num_microbatches}"
            )
            return self.custom.lists[rank]
        return schedule.make_schedule(self.order, rank, self.pp, num_microbatches, self.chunks)

    @property
    def order(self) -> str:
        """The name of the schedule in `schedule.SCHEDULES`."""
        return schedule.in_turns(self.name) if self.turns else self.name

    def stages_of(self, rank: int) -> list[int]:
        """Stages of a rank, by chunk."""
        return list(self._of_ranks[rank])

    @cached_property
    def _of_ranks(self) -> dict[int, list[int]]:
        """The stages of each rank, by chunk."""
        places = sorted((rank, chunk, stage) for stage, (rank, chunk) in enumerate(self.stages))
        return {rank: [stage for *_, stage in own] for rank, own in groupby(places, key=itemgetter(0))}

    def describe(self, num_microbatches: int) -> str:
        """A line with the layers of each rank, the bubble and the live activations.

        >>> Pipeline.of(Parallel(pipeline_model_parallel_size=2), num_layers=4).describe(num_microbatches=8)
        'pipeline 1f1b: layers 0-1 | 2-3; bubble of equal stages 11.1 %, activations of at most 2 of 8 micro-batches'
        """
        plan = [self.ops(rank, num_microbatches) for rank in range(self.pp)]
        result = report(list(map(without_messages, plan)), self.stages)
        layers = " | ".join(" and ".join(_span(held) for held in self.layers_of(rank)) for rank in range(self.pp))
        name = "interleaved" if self.name == "1f1b" and self.chunks > 1 else self.name
        return (
            f"pipeline {name}: layers {layers}; bubble of equal stages {100 * result.bubble:.1f} %, activations "
            f"of at most {max(result.live) / self.chunks:g} of {num_microbatches} micro-batches{self._turns(plan)}"
        )

    def _turns(self, plan: list[list[Op]]) -> str:
        """How many passes take turns, in words."""
        count = sum(map(len, map(pairs_of, plan)))
        of = sum(op.kind == "F" for ops in plan for op in passes_of(ops))
        return (
            f"; {100 * count / of:.0f} % of forward passes take turns with a backward pass"
            if count or self.turns
            else ""
        )

    def layers_of(self, rank: int) -> list[range]:
        """Layers of each chunk of a rank."""
        return [self.layers[stage] for stage in self.stages_of(rank)]

    def all_layers_of(self, rank: int) -> tuple[int, ...]:
        """The numbers of a rank's layers, chunk after chunk."""
        return self._layers_of_ranks[rank]

    @cached_property
    def _layers_of_ranks(self) -> dict[int, tuple[int, ...]]:
        return {rank: tuple(chain.from_iterable(self.layers_of(rank))) for rank in self._of_ranks}


def takes_turns(parallel: Parallel) -> bool:
    """Whether forward and backward passes take turns. A file says it by itself."""
    if is_file(parallel.pipeline_schedule):
        return read_schedule(parallel.pipeline_schedule).turns
    return parallel.overlap_moe_expert_parallel_comm and parallel.expert_model_parallel_size > 1


def _check_custom(own: CustomSchedule, parallel: Parallel, num_layers: int, num_microbatches: Optional[int]) -> None:
    wrong, pp = [], parallel.pipeline_model_parallel_size
    if len(own.plan) != pp:
        wrong.append(f"it has {len(own.plan)} lines of ops, and --pipeline-model-parallel-size is {pp}")
    if num_microbatches is not None and own.num_microbatches != num_microbatches:
        wrong.append(
            f"it is for {own.num_microbatches} micro-batches, and a step has {num_microbatches} (--global-batch-size / "
            "--micro-batch-size / data parallel size)"
        )
    if parallel.overlap_moe_expert_parallel_comm and not own.turns:
        wrong.append(
            "with --overlap-moe-expert-parallel-comm the file says which passes take turns, by & between the two, as in "
            "F0 F1 & B0 B1, and it has no &"
        )
    wrong += _uneven(parallel, num_layers, own.chunks)
    if wrong:
        raise SettingsError(f"--pipeline-schedule {own.path} does not fit this run: {'; '.join(wrong)}")


def chunks_of(parallel: Parallel, num_layers: int) -> int:
    """Model chunks of a rank for these settings."""
    p = parallel
    if p.num_virtual_stages_per_pipeline_rank:
        return p.num_virtual_stages_per_pipeline_rank
    if p.num_layers_per_virtual_pipeline_stage:
        weight = num_layers + p.account_for_embedding_in_pipeline_split + p.account_for_loss_in_pipeline_split
        return max(1, weight // (p.pipeline_model_parallel_size * p.num_layers_per_virtual_pipeline_stage))
    return schedule.default_chunks(p.pipeline_schedule)


def problems(parallel: Parallel, num_layers: int) -> list[str]:
    """Messages about settings that give no pipeline, with flags and values that work; empty when all is well."""
    p = parallel
    if is_file(p.pipeline_schedule):
        return _problems_of_file(p)
    if p.pipeline_schedule not in schedule.TRAINING:
        return [schedule.unknown(p.pipeline_schedule)]
    chunks = chunks_of(p, num_layers)
    wrong = schedule.problems(p.pipeline_schedule, p.pipeline_model_parallel_size, 1, chunks)
    wrong += _conflicts(p)
    return wrong or _uneven(p, num_layers, chunks)


def _problems_of_file(p: Parallel) -> list[str]:
    """Messages about a schedule file that do not need its contents."""
    if p.num_layers_per_virtual_pipeline_stage or p.num_virtual_stages_per_pipeline_rank:
        return [
            f"--pipeline-schedule {p.pipeline_schedule} itself sets the number of model chunks per rank; leave out "
            "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage"
        ]
    return _conflicts(p)


def _conflicts(p: Parallel) -> list[str]:
    """Messages about settings that contradict or repeat each other."""
    wrong = []
    ends = {
        "--decoder-first-pipeline-num-layers": p.decoder_first_pipeline_num_layers,
        "--decoder-last-pipeline-num-layers": p.decoder_last_pipeline_num_layers,
    }
    weights = {
        "--account-for-embedding-in-pipeline-split": p.account_for_embedding_in_pipeline_split,
        "--account-for-loss-in-pipeline-split": p.account_for_loss_in_pipeline_split,
    }
    ends, weights = ([flag for flag, value in flags.items() if value] for flags in (ends, weights))
    if p.num_virtual_stages_per_pipeline_rank and p.num_layers_per_virtual_pipeline_stage:
        wrong.append(
            "--num-virtual-stages-per-pipeline-rank and --num-layers-per-virtual-pipeline-stage set the same "
            "thing; give one of them"
        )
    if p.pipeline_stage_layers and (ends or weights or p.num_layers_per_virtual_pipeline_stage):
        others = [
            *ends,
            *weights,
            *["--num-layers-per-virtual-pipeline-stage"] * bool(p.num_layers_per_virtual_pipeline_stage),
        ]
        wrong.append(
            f"{LAYERS_EACH} {p.pipeline_stage_layers} sets the number of layers of each stage; leave out "
            f"{', '.join(others)}"
        )
    elif ends and weights:
        wrong.append(
            f"{', '.join(ends)} and {', '.join(weights)} are two ways to even out the stages; give one of them"
        )
    elif ends and p.num_layers_per_virtual_pipeline_stage:
        wrong.append(
            f"{', '.join(ends)} with several model chunks a rank needs --num-virtual-stages-per-pipeline-rank "
            "instead of --num-layers-per-virtual-pipeline-stage"
        )
    if ends and p.pipeline_model_parallel_size == 1:
        wrong.append(f"{', '.join(ends)} needs --pipeline-model-parallel-size above 1")
    return wrong


def _uneven(p: Parallel, num_layers: int, chunks: int) -> list[str]:
    """Messages about layers that cannot be cut into the stages."""
    pp = p.pipeline_model_parallel_size
    if p.pipeline_stage_layers:
        return _wrong_list(p.pipeline_stage_layers, num_layers, pp, chunks)
    if p.decoder_first_pipeline_num_layers or p.decoder_last_pipeline_num_layers:
        return _wrong_ends(p, num_layers, chunks)
    first, last = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
    size = p.num_layers_per_virtual_pipeline_stage
    weight, number = num_layers + first + last, pp * chunks
    if size and weight != number * size:
        good = [n for n in range(1, weight) if weight % (pp * n) == 0]
        fits = f"{_or(good)} would work" if good else f"--num-layers {_near(num_layers, pp, first + last)} would work"
        return [
            f"--num-layers-per-virtual-pipeline-stage {size} does not cut {num_layers} layers evenly for "
            f"--pipeline-model-parallel-size {pp}; {fits}"
        ]
    if weight % number or weight < number:
        counted = " and ".join(["the embedding"] * first + ["the loss"] * last)
        return [
            f"--num-layers {num_layers}{f' with {counted}' if counted else ''} cannot be cut into {number} even "
            f"stages (--pipeline-model-parallel-size {pp}{f' x {chunks} model chunks a rank' if chunks > 1 else ''})"
            f"; nearest: {_near(num_layers, number, first + last)} layers"
            + _or_sizes(weight, pp, chunks)
            + _or_list(num_layers, number)
        ]
    return []


def problems_of_list(text: str, num_layers: int) -> list[str]:
    """Messages about --pipeline-stage-layers for any number of ranks.

    >>> problems_of_list("1,1", 4)
    ['--pipeline-stage-layers 1,1 is 2 layers, and --num-layers is 4; 2,2 would work']
    """
    return _wrong_list(text, num_layers, len(_numbers(text) or ()), 1)


def _wrong_list(text: str, num_layers: int, pp: int, chunks: int) -> list[str]:
    counts, number = _numbers(text), pp * chunks
    if counts is None:
        return [f"{LAYERS_EACH} {text} must be numbers with commas, one for each stage, as in 2,1,1,1"]
    wrong = []
    if len(counts) != number:
        wrong.append(
            f"{LAYERS_EACH} {text} is for {len(counts)} stages, and there are {number} "
            f"(--pipeline-model-parallel-size {pp}{f' x {chunks} model chunks a rank' if chunks > 1 else ''})"
        )
    if sum(counts) != num_layers:
        wrong.append(f"{LAYERS_EACH} {text} is {sum(counts)} layers, and --num-layers is {num_layers}")
    if wrong and num_layers >= number:
        wrong[-1] += f"; {_even_list(num_layers, number)} would work"
    return wrong


def _wrong_ends(p: Parallel, num_layers: int, chunks: int) -> list[str]:
    pp = p.pipeline_model_parallel_size
    given = [n for n in (p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers) if n]
    middle, ranks = num_layers - sum(given), pp - len(given)
    flags = " and ".join(
        f"--decoder-{end}-pipeline-num-layers {n}"
        for end, n in (("first", p.decoder_first_pipeline_num_layers), ("last", p.decoder_last_pipeline_num_layers))
        if n
    )
    odd = [n for n in given if n % chunks]
    if odd:
        return [
            f"{flags}: {odd[0]} layers cannot be divided by {chunks} model chunks a rank; use a multiple of {chunks}"
        ]
    if middle < 0 or (ranks == 0 and middle) or (ranks and (middle % (ranks * chunks) or middle == 0)):
        rest = f"for {ranks} ranks" if ranks else "for no rank"
        best = _or_list(num_layers, pp * chunks).removeprefix(", or ") or f"at least {pp * chunks} layers"
        rest += f" of {chunks} model chunks" * (chunks > 1)
        return [f"{flags} leaves {middle} of {num_layers} layers {rest}, which cannot be even; {best} would work"]
    return []


def _counts(p: Parallel, num_layers: int, stages: StageMap) -> list[int]:
    """Number of layers of each stage, for settings without problems."""
    if p.pipeline_stage_layers:
        return _numbers(p.pipeline_stage_layers)
    pp, number = p.pipeline_model_parallel_size, len(stages)
    first, last = p.decoder_first_pipeline_num_layers, p.decoder_last_pipeline_num_layers
    if first or last:
        ranks = pp - bool(first) - bool(last)
        each = (num_layers - (first or 0) - (last or 0)) // ranks if ranks else 0
        of_rank = [first or each, *[each] * (pp - 2), last or each]
        return [of_rank[rank] * pp // number for rank, _ in stages]
    embedding, loss = p.account_for_embedding_in_pipeline_split, p.account_for_loss_in_pipeline_split
    counts = [(num_layers + embedding + loss) // number] * number
    counts[0] -= embedding
    counts[-1] -= loss
    return counts


def _cut(num_layers: int, counts: list[int]) -> tuple[range, ...]:
    ends = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    assert ends[-1] == num_layers, f"{counts} are not {num_layers} layers"
    return tuple(range(start, end) for start, end in zip(ends, ends[1:]))


def _span(layers: range) -> str:
    return f"{layers[0]}-{layers[-1]}" if len(layers) > 1 else str(layers[0]) if layers else "none"


def _numbers(text: str) -> Optional[list[int]]:
    words = text.replace(",", " ").split()
    return [int(word) for word in words] if words and all(word.isdigit() for word in words) else None


def _even_list(num_layers: int, number: int) -> str:
    """The most even list of layers; where it is not even, stages in the middle get one more."""
    least, more = divmod(num_layers, number)
    heavy = set(sorted(range(number), key=lambda stage: (stage in (number - 1,), stage == 0, stage))[:more])
    return ",".join(str(least + (stage in heavy)) for stage in range(number))


def _or_list(num_layers: int, number: int) -> str:
    return f", or {LAYERS_EACH} {_even_list(num_layers, number)}" if num_layers >= number else ""


def _or_sizes(weight: int, pp: int, chunks: int) -> str:
    good = [n for n in range(1, weight // 2 + 2) if weight % (n * chunks) == 0]
    near = sorted(sorted(good, key=lambda n: abs(n - pp))[:2])
    return f", or --pipeline-model-parallel-size {_or(near)}" if near else ""


def _near(num_layers: int, number: int, extra: int) -> str:
    """Numbers of layers below and above that can be cut evenly."""
    below = (num_layers + extra) // number * number
    return _or([n - extra for n in (below, below + number) if n - extra > 0 and n])


def _or(values) -> str:
    return " or ".join(map(str, values))


def balanced(costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0) -> list[int]:
    """The number of layers of each stage, at least one: minimizes the largest cost of a stage, then the sum of squares.
    first, last: additional cost of the first and last stage.

    >>> balanced([1.0, 1.0, 1.0, 0.5, 0.5, 0.5], 3)
    [1, 2, 3]
    >>> balanced([1.0] * 4 + [0.41] * 4, 2, last=1.0)
    [3, 5]
    """
    total = [0.0, *accumulate(costs)]
    count, best = len(costs), {(0, 0): (0.0, 0.0, ())}  # (stages, layers) so far -> (most, squares, counts)
    for stage in range(1, stages + 1):
        ends = (first if stage == 1 else 0.0) + (last if stage == stages else 0.0)
        for layers in range(stage, count - (stages - stage) + 1):
            options = []
            for before in range(stage - 1, layers):
                if (stage - 1, before) in best:
                    most, squares, counts = best[stage - 1, before]
                    own = total[layers] - total[before] + ends
                    options.append((max(most, own), squares + own * own, (*counts, layers - before)))
            best[stage, layers] = min(options)
    return list(best[stages, count][2])
