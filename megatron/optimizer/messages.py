# SPDX-License-Identifier: Apache-2.0
"""Messages of data parallelism in a step: gathers of weights and reductions of gradients, as the schedule lists them.

`Messages` inserts them between the passes of a rank (`pipeline/data_parallel_messages.py`), verifies the list, and runs
it. The executor calls it between passes. Inside a pass, messages run where a piece of the pass begins; three kinds of
hooks report this:

- a layer's forward pre-hook, and the hook of the last layer's output: pieces of a forward pass;
- the gradient of a layer's output: pieces of a backward pass;
- the gradient of a parameter: pieces of passes that reduce gradients.

The first two are registered only if weights are gathered inside passes. A layer that runs out of order (one that is
recomputed for another, or used twice) gathers its weights immediately, and keeps them until the list frees them. In a
custom training loop, without a schedule, each pass has a list.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Optional

import torch

from megatron.mpu.two_passes import swap_attribute
from megatron.optimizer.gradients import GradientBuffers, PassKey, UnitGradients
from megatron.optimizer.units import FlatUnit
from megatron.optimizer.weights import ParameterBuffers, UnitParameters, User
from megatron.pipeline.data_parallel_messages import (
    ALL,
    FORWARD,
    IN,
    MESSAGES,
    OUT,
    TIED,
    ChunkPieces,
    Group,
    Listed,
    Sharding,
    group_of,
    list_messages,
)
from megatron.pipeline.schedule import Op


class Messages:
    """Lists and runs the messages of a rank.

    chunks: the rank's model chunks. first: whether the first chunk is the first stage of the pipeline
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        weights: ParameterBuffers,
        gradients: GradientBuffers,
        how: Sharding,
        first: bool,
    ):
        self.weights, self.gradients, self.how = weights, gradients, how
        self.units: dict[Group, list[FlatUnit]] = {}
        self.layers = [self._group(number, chunk, first and number == 0) for number, chunk in enumerate(chunks)]
        self.chunks = self._chunks([False] * len(chunks))
        self.groups = {unit.name: group for group, units in self.units.items() for unit in units}
        self.lists: dict[tuple, Listed] = {}
        before = list_messages([], self.chunks, how).before
        self.unlisted = Listed(before, [], [Op("R", 0, 0, ALL)])  # the messages around passes that run without a list
        self.listed = self.unlisted  # the list of the present step
        self.now: Optional[_Passing] = None  # the present pass
        self.alone = None  # in a custom training loop: the messages after the pass, and its context
        gradients.arrived, gradients.passing = self._arrived, lambda: _pass_of(self.now.op) if self.now else PassKey()
        self.gathers = how.zero == 3 or how.gather_ahead  # inside passes
        for number, chunk in enumerate(chunks) if self.gathers or how.zero == 2 else ():
            self._register_hooks(number, chunk)

    # ---- lists -----------------------------------------------------------------------------------------------------

    def _group(self, number: int, chunk: torch.nn.Module, first: bool) -> list[str]:
        """Assign the units of a chunk to its pieces. Returns the names of its layers in order."""
        units = [memory.unit for memory in self.weights.memory.values() if number in memory.unit.chunks]
        places = {name: place for place, (name, _) in enumerate(chunk.named_modules())}
        layers = sorted({unit.part for unit in units if unit.layer}, key=places.__getitem__)
        ends = {unit.name: unit.ends for unit in getattr(chunk, "units", ())}
        for unit in units:
            if unit.layer:
                group = number, str(layers.index(unit.part))
            elif len(unit.chunks) > 1:
                group = 0, TIED
            else:
                behind = places.get(unit.part, 0) > max(map(places.__getitem__, layers), default=len(places))
                group = number, OUT if behind or not first and "last" in ends.get(unit.part, ()) else IN
            own = self.units.setdefault(group, [])
            own += [unit] * (unit not in own)
        return layers

    def _chunks(self, learns: Sequence[bool]) -> list[ChunkPieces]:
        trained = {group for group, units in self.units.items() if not all(unit.frozen for unit in units)}
        chunks = []
        for number, layers in enumerate(self.layers):
            pieces = ChunkPieces(len(layers), (), ()).pieces
            held, own = ([name for name in pieces if (number, name) in groups] for groups in (self.units, trained))
            shares = any(number in unit.chunks for unit in self.units.get((0, TIED), ()))
            chunks.append(ChunkPieces(len(layers), held, own, learns[number], (0, TIED) in trained if shares else None))
        return chunks

    def plan(self, ops: Sequence[Op], learns: Optional[Sequence[bool]] = None) -> list[Op]:
        """The ops of a step, or of an evaluation, with their messages (`list_messages`).

        learns: for each chunk, whether any parameter before it is trained (default: yes)
        """
        key = tuple(ops)
        if key not in self.lists:
            chunks = self._chunks(learns or [True] * len(self.layers))
            listed = list_messages(ops, chunks, self.how)
            self.lists = {**dict(list(self.lists.items())[-7:]), key: listed}
        if any(op.kind != "F" for op in ops):
            self.listed = self.lists[key]
            self.gradients.num_microbatches = len({op.micro for op in ops})
        return self.lists[key].ops

    def start_step(self) -> None:
        """Run the messages after an update: the gathers of weights that are kept, the same in each list."""
        for op in self.unlisted.before:
            self.run(op)

    def finish(self) -> None:
        """Run the messages after the last pass: all gradients are reduced."""
        for op in self.listed.after:
            self.run(op)
        self.listed = self.unlisted

    # ---- running ---------------------------------------------------------------------------------------------------

    def run(self, op: Op) -> None:
        """Run a message."""
        if op.piece == ALL:
            self.gradients.sum_all()
        elif op.kind in "Rr":
            tallies = [self.gradients.tallies[unit.name] for unit in self.units[group_of(op)] if not unit.frozen]
            self._reduce(tallies, _pass_of(op)) if op.kind == "R" else self.gradients.wait_for(tallies)
        else:
            act = {"G": self._gather, "g": self._finish, "D": self._release}[FORWARD.get(op.kind, op.kind)]
            user = None if op.piece in (IN, OUT, TIED) else (op.micro, op.chunk, op.kind in FORWARD)
            for unit in self.units[group_of(op)]:
                act(self.weights.memory[unit.name], user)

    def _gather(self, memory: UnitParameters, user: Optional[User]) -> None:
        self.weights.start(memory)
        if user and self.how.zero == 3:
            memory.users.add(user)

    def _finish(self, memory: UnitParameters, user: Optional[User]) -> None:
        self.weights.finish(memory)

    def _release(self, memory: UnitParameters, user: Optional[User]) -> None:
        """Free weights, unless the other one of two passes that take turns uses them, too."""
        memory.users.discard(user)
        if not memory.users:
            self.weights.free(memory)

    def _reduce(self, tallies: Sequence[UnitGradients], passing: PassKey) -> None:
        for tally in tallies:
            if self.now and not self.gradients.complete(tally):
                self.now.late.append(tally)
            else:
                self.gradients.start(tally, passing)

    @property
    def running(self) -> str:
        """The kind of the present pass; "": there is none."""
        return self.now.op.kind if self.now else ""

    @contextmanager
    def passing(self, op: Op, inside: Sequence[Op]) -> Iterator[None]:
        """A context around a pass that runs the messages inside it. Of two passes that take turns each has its own."""
        now = _Passing(op, inside)
        with swap_attribute(self, "now", now):
            yield
            self._run_until(len(inside))
        for name in now.on_the_spot:  # a layer that was not run to its end: the list frees it
            self.weights.memory[name].users.discard(now.user)
        for tally in now.late:
            self.gradients.start(tally, _pass_of(op))
            self.gradients.wait_for([tally])

    def _run_until(self, end: int) -> None:
        while self.now.at < end:
            op = self.now.inside[self.now.at]
            self.now.at += 1
            if op.kind in MESSAGES:
                self.run(op)

    def _reach(self, group: Group) -> None:
        """Run the messages before a piece of the present pass. Does nothing for a piece that is done or not listed."""
        self._run_until(self.now.places.get(group, -1) + 1)

    def _arrived(self, tally: UnitGradients) -> None:
        """Called when a parameter has got a gradient: its piece has begun, and may now be reduced."""
        group = self.groups[tally.own.unit.name]
        if self.running not in ("B", "W") or group[1] in (IN, TIED):
            return
        self._reach(group)
        now = self.now
        while now.at < len(now.inside) and self._may_run(now.inside[now.at]):
            self._run_until(now.at + 1)

    def _may_run(self, op: Op) -> bool:
        """Whether everything that a message sends has been computed."""
        if op.kind != "R":
            return op.kind == "r"
        tallies = [self.gradients.tallies[unit.name] for unit in self.units[group_of(op)] if not unit.frozen]
        return all(map(self.gradients.complete, tallies))

    # ---- hooks -----------------------------------------------------------------------------------------------------

    def _register_hooks(self, number: int, chunk: torch.nn.Module) -> None:
        def pre_forward(module, args):
            if not self.running or self.alone:
                self._begin_alone(Op("F", 0, number))

        def post_forward(module, args, output):
            if self.alone:
                self._end_alone()
                for tensor in _backward_roots(output):
                    tensor.register_hook(begin_backward)

        def begin_backward(gradient):
            if not self.running:
                self._begin_alone(Op("B", 0, number))
                torch.autograd.Variable._execution_engine.queue_callback(self._end_alone)

        chunk.register_forward_pre_hook(pre_forward)
        chunk.register_forward_hook(post_forward)
        for place, name in enumerate(self.layers[number]) if self.gathers else ():
            following = (number, OUT) if place + 1 == len(self.layers[number]) else None
            self._register_layer(chunk.get_submodule(name), (number, str(place)), following)

    def _begin_alone(self, op: Op) -> None:
        """Begin a pass in a custom training loop, with the messages of a step that has only this micro-batch."""
        passes = [op] if op.kind == "F" and not torch.is_grad_enabled() else [op._replace(kind=kind) for kind in "FB"]
        key = "alone", *passes
        if key not in self.lists:
            how = replace(self.how, reduce_beside=self.how.reduce_beside and self.how.zero > 1)
            self.lists[key] = list_messages(passes, self._chunks([True] * len(self.layers)), how)
        ops = self.lists[key].ops
        places = [place for place, one in enumerate(ops) if one.kind == op.kind]
        begun = 1 + max(place for place, one in enumerate(ops) if one.kind == "F") if op.kind == "B" else 0
        for one in ops[begun : places[0]]:
            self.run(one)
        ends = len(ops) if op == passes[-1] else places[-1] + 1
        self.alone = ops[places[-1] + 1 : ends], self.passing(op, ops[places[0] : places[-1] + 1])
        self.alone[1].__enter__()
        roots = [unit for group in self.chunks[op.chunk].roots(op.chunk) for unit in self.units[group]]
        # Another micro-batch may have freed them
        self.weights.need(*(self.weights.memory[unit.name] for unit in roots))

    def _end_alone(self) -> None:
        (behind, passing), self.alone = self.alone, None
        passing.__exit__(None, None, None)
        for op in behind:
            self.run(op)

    def _register_layer(self, module: torch.nn.Module, group: Group, following: Optional[Group]) -> None:
        memory = [self.weights.memory[unit.name] for unit in self.units[group]]

        def begin(kinds: str) -> None:
            if self.running and self.running in kinds:
                self._reach(group)
            for one in memory if self.now else ():
                of_others = one.users and self.now.user not in one.users
                if of_others or not (one.ready or one.under_way):
                    self.now.on_the_spot.add(one.unit.name)
                    one.users.add(self.now.user)
            self.weights.need(*memory)

        def pre_forward(module, args):
            begin("F")

        def post_forward(module, args, output):
            if following and self.running == "F":
                self._reach(following)
            for one in (one for one in memory if self.now and one.unit.name in self.now.on_the_spot):
                self.now.on_the_spot.remove(one.unit.name)
                self._release(one, self.now.user)
            for tensor in _backward_roots(output):
                tensor.register_hook(lambda gradient: begin("BI"))

        module.register_forward_pre_hook(pre_forward)
        if self.how.zero == 3:
            module.register_forward_hook(post_forward)


class _Passing:
    """A pass that runs, and its messages.

    inside: the pieces of the pass, and the messages between them
    """

    def __init__(self, op: Op, inside: Sequence[Op]):
        self.op, self.inside, self.at = op, inside, 0  # index of the next op of `inside`
        self.places = {group_of(one): place for place, one in enumerate(inside) if one.kind not in MESSAGES}
        self.late: list[UnitGradients] = []  # gradients that were not complete when the list reduced them
        self.user = op.micro, op.chunk, op.kind != "F"
        self.on_the_spot: set[str] = set()  # units that a layer has gathered out of order


def _pass_of(op: Op) -> PassKey:
    return PassKey(op.micro, op.chunk)


def _backward_roots(output) -> list[torch.Tensor]:
    """The tensors of a module's output where its backward pass begins."""
    x, sums = output if isinstance(output, tuple) else (output, {})
    return [tensor for tensor in (x, *sums.values()) if isinstance(tensor, torch.Tensor) and tensor.requires_grad]
