# SPDX-License-Identifier: Apache-2.0
"""Import the optimizer state of Megatron-LM's checkpoints: main weights, Adam's moments, and the position of the run.

Megatron-LM stores this state in one of three ways:

    per parameter   a tensor of the parameter's shape, with its name (torch_dist) or its number in the optimizer (classic)
    flat parts      the same in flattened ranges of a tensor parallel rank's part (torch_dist, "fully_sharded_model_space")
    buffers         one flat buffer for each tensor and pipeline parallel rank: the distributed optimizer's classic
                    `distrib_optim.pt`, and torch_dist's default, "dp_reshardable"

A buffer holds the parameters of a rank in reverse order of its module. Each starts at a multiple of 64 elements from the
start of its bucket, and buckets follow each other without padding. The sizes of buckets are not stored. So `locate` finds
the parameters by their values: a main weight must round to the weight of the model. A state that fits in no way, or in two
ways with different moments, is refused.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from megatron.checkpoint.reshard import OPTIMIZER
from megatron.checkpoint.store import Piece
from megatron.errors import CheckpointError
from megatron.mpu.placement import Placement
from megatron.optimizer.resumed_schedule import is_value
from megatron.settings import schema
from megatron.settings.spelling import settings_of

# Their names of the state of one parameter -> prefixes of ours. The main weight replaces the weight of the model.
PREFIX = {"param": "", "fp32_param": "", "exp_avg": f"{OPTIMIZER}exp_avg.", "exp_avg_sq": f"{OPTIMIZER}exp_avg_sq."}
MOMENTS = ("exp_avg", "exp_avg_sq")
LEAVE_OUT = "add --no-load-optim to import the weights alone"
ALIGNMENT = 64  # elements, of the start of a parameter in its bucket

# Settings of the run, by group, that its arguments have under our names. A resumed run compares them with its own.
_COMPARED = dict(
    batch=("global_batch_size",),
    optimizer=(
        "lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_iters lr_warmup_samples lr_warmup_fraction "
        "lr_warmup_init weight_decay start_weight_decay end_weight_decay weight_decay_incr_style clip_grad adam_beta1 "
        "adam_beta2 adam_eps"
    ).split(),
    logging=("seed",),
)


class LocalParameter(NamedTuple):
    """A parameter of one of their ranks.

    key:      their name, for messages
    shape:    of their tensor
    matches:  whether main weights of that shape round to the parameter
    pieces:   (prefix, tensor of that shape) -> pieces of our tensors; none if another rank has the same parameter
    of_expert: whether it is one of experts. is_buffer: whether it is none, and has no state
    """

    key: str
    shape: tuple[int, ...]
    matches: Callable[[torch.Tensor], bool]
    pieces: Callable[[str, torch.Tensor], Iterable[Piece]]
    of_expert: bool = False
    is_buffer: bool = False

    def state_pieces(self, state: Mapping[str, torch.Tensor]) -> Iterator[Piece]:
        """The pieces of this parameter's state. state: kind -> tensor of its number of elements."""
        for kind, values in state.items():
            yield from self.pieces(PREFIX[kind], values.float().reshape(self.shape))


def no_pieces(prefix: str, values: torch.Tensor) -> Iterable[Piece]:
    """The `pieces` of a parameter that another rank has, too."""
    return ()


def with_moments(weights: Mapping[str, Placement]) -> list[str]:
    """The names of all tensors of a checkpoint with the state of Adam. Buffers, such as the bias of experts, have none."""
    trained = [name for name, placed in weights.items() if not placed.buffer]
    return [*weights, *(PREFIX[kind] + name for kind in MOMENTS for name in trained)]


# ---- buffers ---------------------------------------------------------------------------------------------------------


def from_buffer(
    source: str, orders: Iterable[Sequence[LocalParameter]], buffer: Mapping[str, torch.Tensor], slack: int = ALIGNMENT
) -> Iterator[Piece]:
    """The pieces of a rank's buffer.

    source: of the buffer, for messages. orders: possible orders of the rank's parameters in its module
    buffer: kind -> flat tensor; `param` has the main weights. slack: elements that may follow the last parameter
    Raises CheckpointError if the buffer does not fit the parameters, or fits in several ways.
    """
    if set(buffer) != {"param", *MOMENTS}:
        held = ", ".join(sorted(buffer)) or "nothing"
        raise CheckpointError(f"{source} holds {held}, not the state of Adam", do=LEAVE_OUT)
    sizes = {kind: values.numel() for kind, values in buffer.items()}
    if len(set(sizes.values())) != 1:
        raise CheckpointError(f"{source} is damaged: its parts have different sizes ({sizes})")
    for order in orders:
        parameters = list(reversed(order))
        starts = locate(parameters, buffer["param"], slack)
        if starts:
            for parameter, possible in zip(parameters, starts):
                yield from parameter.state_pieces(_cut(source, parameter, possible, buffer))
            return
    raise CheckpointError(
        f"the main weights in {source} are not those of the model",
        "it belongs to another checkpoint, is damaged, or has its parameters in an unknown order",
        LEAVE_OUT,
    )


def _cut(
    source: str, parameter: LocalParameter, starts: Sequence[int], buffer: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """A parameter's state at one of its possible starts. Raises CheckpointError if it differs between them."""
    size = math.prod(parameter.shape)
    state, *others = [{kind: flat[start : start + size] for kind, flat in buffer.items()} for start in starts]
    if any(not torch.equal(state[kind], other[kind]) for other in others for kind in state):
        why = f"all values of {parameter.key} are the same"
        raise CheckpointError(f"{source} fits the parameters in several ways", why, LEAVE_OUT)
    return state


def locate(parameters: Sequence[LocalParameter], main: torch.Tensor, slack: int) -> list[list[int]]:
    """The possible starts of each parameter in a buffer, given in the buffer's order; empty if they do not fit.

    A parameter starts at the next multiple of 64 elements from the start of its bucket, or directly after the one before
    it, as the first of a new bucket. Starts at which no complete sequence matches are left out.

    >>> like = lambda *values: LocalParameter("", (len(values),), torch.tensor(values).equal, None)
    >>> locate([like(1.0, 2.0), like(3.0)], torch.tensor([1.0, 2.0] + [0.0] * 62 + [3.0]), slack=1)
    [[0], [64]]
    >>> locate([like(1.0, 2.0), like(3.0)], torch.tensor([1.0, 2.0, 3.0]), slack=1)
    [[0], [2]]
    """
    # Of each parameter: (start, start of its bucket modulo 64) -> the same of the parameters before it
    levels: list[dict[tuple[int, int], set]] = []
    before, size = {(0, 0): set()}, 0
    for parameter in parameters:
        nodes: dict[tuple[int, int], set] = {}
        ends, size = [(start + size, bucket) for start, bucket in before], math.prod(parameter.shape)
        for node, (end, bucket) in zip(before, ends):
            for start, own in {(end + (bucket - end) % ALIGNMENT, bucket), (end, end % ALIGNMENT)}:
                part = main[start : start + size]
                if (start, own) in nodes or part.numel() == size and parameter.matches(part.view(parameter.shape)):
                    nodes.setdefault((start, own), set()).add(node)
        levels.append(nodes)
        before = nodes
    complete = {node for node in before if 0 <= main.numel() - node[0] - size < slack}
    starts = []
    for nodes in reversed(levels):
        starts.append(sorted({start for start, _ in complete}))
        complete = set().union(*(nodes[node] for node in complete))
    return starts[::-1] if all(starts) else []


# ---- numbered parameters ---------------------------------------------------------------------------------------------


def from_groups(
    source: str,
    parameters: Sequence[LocalParameter],
    groups: Sequence[Sequence[int]],
    state: Mapping[str, torch.Tensor],
) -> Iterator[Piece]:
    """The pieces of a classic checkpoint's optimizer, which numbers its parameters, one group after another.

    parameters: of the rank, in the order of its module
    groups: the numbers in each group, in the same order
    state: `KIND/NUMBER` -> tensor; `param` has the main weights, if the model has another number format
    Raises CheckpointError if a parameter has no state or a state no parameter.
    """
    left = list(parameters)
    for number in (number for group in groups for number in group):
        own = {kind: state[f"{kind}/{number}"] for kind in ("param", *MOMENTS) if f"{kind}/{number}" in state}
        if not set(MOMENTS) <= set(own):
            raise CheckpointError(f"{source} does not hold the state of Adam for parameter {number}", do=LEAVE_OUT)
        fits = lambda parameter, own=own: (
            parameter.shape == tuple(own["exp_avg"].shape)
            and ("param" not in own or parameter.matches(own["param"].float()))
        )
        parameter = next(filter(fits, left), None)
        if parameter is None:
            raise CheckpointError(f"parameter {number} in {source} is none of the model's", do=LEAVE_OUT)
        left.remove(parameter)
        yield from parameter.state_pieces(own)
    if left:
        raise CheckpointError(f"{source} lacks the state of {left[0].key}", do=LEAVE_OUT)


# ---- the run ---------------------------------------------------------------------------------------------------------


def position_of(facts: Mapping[str, Any], fresh: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """(position of the run as checkpoints record it, number of updates), from `facts.json` of `megatron_pickle`.

    fresh: the position of a run that has not begun. Raises CheckpointError if the number of updates was not saved.
    """
    args, schedule, scale = facts["args"], facts["schedule"], facts["scale"]
    if len(facts["updates"]) != 1:
        why = f"its parameters have several: {facts['updates'][:4]}" if facts["updates"] else ""
        raise CheckpointError("the checkpoint does not say how many updates its optimizer made", why, LEAVE_OUT)
    samples = _count(args, "consumed_train_samples")
    spent = _count(args, "hysteresis", 2) - _count(scale, "hysteresis_tracker", 2)
    scaler = dict(
        scale=float(scale.get("scale", 1.0)), good_steps=_count(scale, "growth_tracker"), overflows=max(0, spent)
    )
    position = dict(
        scaler=scaler,
        iteration=_count(facts, "iteration"),
        consumed_samples=samples,
        scheduled_samples=_count(schedule, "num_steps", samples),
        consumed_valid_samples=_count(args, "consumed_valid_samples"),
    )
    return {**fresh, **position}, int(facts["updates"][0])


def state_notices(facts: Mapping[str, Any], asked: bool, has_state: bool) -> list[str]:
    """A notice for the user if weights alone are imported. asked: the optimizer's state is wanted"""
    why = "the checkpoint has no optimizer state" if asked else "optimizer state was left out (--no-load-optim)"
    return [] if has_state else [f"weights of iteration {facts['iteration']}; {why}"]


def _count(values: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = values.get(name)
    return int(value) if isinstance(value, (int, float)) and 0 <= value < 1 << 63 else default


def compared_settings(args: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Settings of the run by group, from its arguments. A run that resumes compares them with its own."""
    found = {}
    for group, names in _COMPARED.items():
        kinds = {setting.name: setting for setting in settings_of({group: schema.GROUPS[group]})}
        values = {
            name: args[name] for name in names if args.get(name) is not None and is_value(kinds[name], args[name])
        }
        found[group] = values
    return found
