# SPDX-License-Identifier: Apache-2.0
"""Hooks: code of one's own that is called at named places of the loop, with facts to read.

    class Told(Hook):
        def after_step(self, run, step):
            if run.rank == 0 and step.skipped:
                print(f"step {step.iteration} was skipped")

    python ... --hooks my_hooks:Told

A hook sees and does nothing of the loop itself: it returns nothing, and what it is given cannot be changed. Whatever it
raises ends the run, with its name. All ranks call the same hooks at the same places. docs/extending.md has an example.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Optional

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

    def after_step(self, run: RunFacts, step: StepFacts) -> None:
        """When it is known what came of a step, and the log has it."""

    def after_evaluation(self, run: RunFacts, evaluation: EvaluationFacts) -> None:
        """Behind each evaluation, those at the end too."""

    def after_save(self, run: RunFacts, save: SaveFacts) -> None:
        """Behind each checkpoint."""

    def end(self, run: RunFacts) -> None:
        """Once, when training has ended: with its last step, or where it was asked to stop; not behind a failure."""


PLACES = tuple(name for name in vars(Hook) if not name.startswith("_"))
Maker = Callable[[Config], Hook]


@dataclass
class Hooks:
    """The hooks of a run, by the places that they want to be called at."""

    called: dict[str, list[tuple[str, Callable]]] = field(default_factory=lambda: {place: [] for place in PLACES})

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
