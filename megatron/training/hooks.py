# SPDX-License-Identifier: Apache-2.0
"""Hooks: code of one's own that is called at named places of the loop, with facts to read.

    class Told(Hook):
        def after_step(self, run, step):
            if run.rank == 0 and step.skipped:
                print(f"step {step.iteration} was skipped")

    python ... --hooks my_hooks:Told

A hook sees and does nothing of the loop itself: it returns nothing, and what it is given cannot be changed, but for the
values of buffers (`UpdateFacts`). Whatever it raises ends the run, with its name. All ranks call the same hooks at the same
places. What a hook has to know when the run goes on, checkpoints keep: `Hook.state_dict`. docs/extending.md has an example.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Optional

from megatron.errors import Failure, SettingsError, did_you_mean
from megatron.guard.endings import peer_lost
from megatron.settings.schema import Config
from megatron.telemetry.own_code import import_callable
from megatron.telemetry.step_metrics import StepMetrics


@dataclass(frozen=True)
class RunFacts:
    """Where a run is. iteration: steps that are done; consumed_samples: by them."""

    iteration: int
    train_iters: int
    consumed_samples: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class StepFacts:
    """What a step did, the same on all ranks. iteration: from 1. A step that was left out has no losses."""

    iteration: int
    consumed_samples: int
    batch_size: int
    losses: Mapping[str, float]
    learning_rate: float
    grad_norm: Optional[float]  # before clipping
    loss_scale: float
    skipped: bool  # no update was made


@dataclass(frozen=True)
class UpdateFacts:
    """What the optimizer is about to do. iteration: of the step, from 1.

    buffers: name -> this rank's values of the buffers that training changes, the same on all ranks that hold them by now.
    They may be changed in place, by what all ranks know alike: a checkpoint keeps what they become.
    """

    iteration: int
    learning_rate: float
    buffers: Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationFacts:
    """Mean losses over a split, "validation" or "test". final: one of those at the end of training."""

    split: str
    losses: Mapping[str, float]
    final: bool


@dataclass(frozen=True)
class SaveFacts:
    """A checkpoint, written or, in the background, begun. folder: --save."""

    iteration: int
    folder: str
    in_background: bool


class Hook:
    """What is called where. A hook is a subclass with the methods that it wants, made with the settings of the run.

    On GPUs the numbers of a step may be read behind the next one's passes: `after_step` is called then, and
    `step.iteration` says of which step.
    """

    def __init__(self, config: Config):
        self.config = config

    def before_training(self, run: RunFacts) -> None:
        """Once, when all is built and loaded."""

    def before_step(self, run: RunFacts) -> None:
        """Before each step, the one after `run.iteration`."""

    def before_update(self, run: RunFacts, update: UpdateFacts) -> None:
        """Before the optimizer's update of each step that is to have one, when gradients are reduced. On GPUs the device
        may still find that there is none: then nothing counts of what was done to buffers.
        """

    def after_step(self, run: RunFacts, step: StepFacts) -> None:
        """When it is known what came of a step, and the log has it."""

    def after_evaluation(self, run: RunFacts, evaluation: EvaluationFacts) -> None:
        """Behind each evaluation, those at the end too."""

    def after_save(self, run: RunFacts, save: SaveFacts) -> None:
        """Behind each checkpoint."""

    def end(self, run: RunFacts) -> None:
        """Once, when training has ended: with its last step, or where it was asked to stop; not behind a failure."""

    def state_dict(self) -> Optional[dict[str, Any]]:
        """What `load_state_dict` is given when a run goes on from a checkpoint, as JSON has it: numbers, texts, lists and
        dicts; that of the first rank. None: nothing.
        """

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Once before `before_training`, on all ranks, in a run that goes on; and where a run goes back to a checkpoint."""


STATE = ("state_dict", "load_state_dict")
PLACES = tuple(name for name in vars(Hook) if not name.startswith("_") and name not in STATE)
Maker = Callable[[Config], Hook]


@dataclass
class Hooks:
    """The hooks of a run, by the places that they want to be called at."""

    called: dict[str, list[tuple[str, Callable]]] = field(default_factory=lambda: {place: [] for place in PLACES})
    keeping: dict[str, Hook] = field(default_factory=dict)  # those with a state, by name; a second of a name is name#2

    def call(self, place: str, run, *facts: Callable[[], object]) -> None:
        """Call all hooks of a place, one after the other. run: `training.state.Run`; facts: what makes further facts."""
        if self.called[place]:
            given = [run_facts(run), *(make() for make in facts)]
            for name, method in self.called[place]:
                _guarded(f"hook {name}, {place} at iteration {run.state.iteration}", method, *given)

    def add(self, name: str, hook: object) -> None:
        """Add a hook. Raises SettingsError for what is none."""
        if not isinstance(hook, Hook):
            raise SettingsError(
                f"hook {name} is {hook!r}",
                do="give a subclass of megatron.training.hooks.Hook: docs/extending.md#a-hook",
            )
        methods = [method for method in dir(hook) if method.startswith(("before_", "after_"))]
        for method in methods:
            if method not in PLACES:
                raise SettingsError(
                    f"hook {name} has {method}, and nothing calls it{did_you_mean(method, PLACES)}",
                    do=f"the places are {', '.join(PLACES)}; begin the names of other methods with _",
                )
        for place in PLACES:
            if getattr(type(hook), place) is not getattr(Hook, place):
                self.called[place].append((name, getattr(hook, place)))
        defined = [getattr(type(hook), method) is not getattr(Hook, method) for method in STATE]
        if any(defined) and not all(defined):
            raise SettingsError(
                f"hook {name} has {STATE[defined.index(True)]}, and no {STATE[defined.index(False)]}",
                "a checkpoint keeps what the one gives, and the other is given it",
                "define both: docs/extending.md#a-hook",
            )
        if all(defined):
            same = sum(other.partition("#")[0] == name for other in self.keeping)
            self.keeping[f"{name}#{same + 1}" if same else name] = hook

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of hooks, by name. Raises Failure for what JSON cannot hold."""
        found = {}
        for name, hook in self.keeping.items():
            where = f"hook {name}, state_dict"
            state = _guarded(where, hook.state_dict, returns=True)
            _guarded(f"{where}: it has to be what JSON can hold", json.dumps, state, returns=True)
            if state is not None:
                found[name] = state
        return found

    def load(self, saved: Mapping[str, Any]) -> list[str]:
        """Give hooks what `state` found when a checkpoint was saved. Returns what the user should hear."""
        for name, state in saved.items():
            if name in self.keeping:
                _guarded(f"hook {name}, load_state_dict", self.keeping[name].load_state_dict, state)
        notices = [
            f"the checkpoint keeps a state of hook {name}, which is not here"
            for name in saved
            if name not in self.keeping
        ]
        return notices + [
            f"hook {name} begins anew: the checkpoint keeps no state of it"
            for name in self.keeping
            if name not in saved
        ]


def hook_makers(config: Config, own: Sequence[Maker] = ()) -> list[tuple[str, Maker]]:
    """(name of a hook, what makes it) from the settings of a run: the recipe's `own`, then those of --hooks.

    Raises SettingsError for a name that cannot be imported.
    """
    makers = [(f"{maker.__module__}:{maker.__qualname__}", maker) for maker in own]
    what = "a class, or a function that makes a Hook from the settings"
    return makers + [(name, import_callable("--hooks", name, what)) for name in config.logging.hooks or ()]


def make_hooks(makers: Sequence[tuple[str, Maker]], config: Config) -> Hooks:
    """The hooks of a run with these settings, to be called in this order."""
    hooks = Hooks()
    for name, maker in makers:
        hooks.add(name, _guarded(f"hook {name}, when it was made", maker, config, returns=True))
    return hooks


def step_facts(step: StepMetrics) -> StepFacts:
    return StepFacts(
        step.iteration,
        step.consumed_samples,
        step.batch_size,
        _floats(step.losses),
        step.learning_rate,
        None if step.grad_norm is None else float(step.grad_norm),
        float(step.loss_scale),
        step.skipped,
    )


def update_facts(run, learning_rate: float) -> UpdateFacts:
    return UpdateFacts(run.state.iteration + 1, learning_rate, MappingProxyType(run.optimizer.buffers.named()))


def evaluation_facts(split: str, losses: Mapping[str, float], final: bool) -> EvaluationFacts:
    return EvaluationFacts(split, _floats(losses), final)


def run_facts(run) -> RunFacts:
    mesh, state = run.context.mesh, run.state
    return RunFacts(state.iteration, run.train_iters, state.consumed_samples, mesh.rank, mesh.world_size)


def _floats(losses: Mapping[str, float]) -> Mapping[str, float]:
    return MappingProxyType({name: float(value) for name, value in losses.items()})


def _guarded(where: str, function: Callable, *given, returns: bool = False):
    """Call what is not ours. Raises Failure that says where, but for a lost rank, which is told as everywhere."""
    try:
        found = function(*given)
    except Exception as error:
        if peer_lost(error):
            raise
        told = "\n  ".join(str(error).splitlines()) or "without a message"
        failure = Failure(f"{where}: {type(error).__name__}: {told}", do="mend the hook (--debug shows the line)")
        if isinstance(error, Failure):
            failure.code = error.code
        raise failure from error
    if found is not None and not returns:
        raise Failure(f"{where}: it returned {found!r}", "hooks return nothing: the loop takes no orders from them")
    return found
