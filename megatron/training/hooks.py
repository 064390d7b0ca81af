# SPDX-License-Identifier: Apache-2.0
"""Hooks: user code that the training loop calls at named points.

    class SkippedSteps(Hook):
        def after_step(self, run, step):
            if run.rank == 0 and step.skipped:
                print(f"step {step.iteration} was skipped")

    python ... --hooks my_hooks:SkippedSteps

A hook observes the loop and does not control it: it returns nothing, and its arguments are read-only, except for the values
of buffers (`UpdateFacts`). An exception ends the run, with the hook's name. All ranks call the same hooks at the same
points. Checkpoints save a hook's state for resumed runs: `Hook.state_dict`. docs/extending.md has an example.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Optional

from megatron.errors import Failure, SettingsError, did_you_mean, exit_code
from megatron.guard.endings import peer_lost
from megatron.settings.schema import Config
from megatron.telemetry.own_code import import_callable
from megatron.telemetry.step_metrics import StepMetrics
from megatron.training.events import first_line


@dataclass(frozen=True)
class RunFacts:
    """The progress of a run. iteration: finished steps; consumed_samples: their samples.

    code, why: in `Hook.end` only: the exit code, and the reason if the run ends before its last step
    """

    iteration: int
    train_iters: int
    consumed_samples: int
    rank: int
    world_size: int
    code: int = 0
    why: str = ""


@dataclass(frozen=True)
class StepFacts:
    """The result of a step, the same on all ranks. iteration: counted from 1. A step that was left out has no losses."""

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
    """The upcoming update of the optimizer. iteration: of the step, counted from 1.

    buffers: name -> this rank's values of the buffers that training changes, already combined over ranks. A hook may change
    them in place, in the same way on all ranks. Checkpoints save the changed values.
    """

    iteration: int
    learning_rate: float
    buffers: Mapping[str, Any]


@dataclass(frozen=True)
class EvaluationFacts:
    """Mean losses over a split, "validation" or "test". final: whether training has ended."""

    split: str
    losses: Mapping[str, float]
    final: bool


@dataclass(frozen=True)
class SaveFacts:
    """A checkpoint that was written, or whose save in the background was started. folder: --save."""

    iteration: int
    folder: str
    in_background: bool


class Hook:
    """Base class of hooks. Subclasses define the methods that they need; the argument is the settings of the run.

    On GPUs the numbers of a step may be read after the passes of the next one. `after_step` is called then, and
    `step.iteration` is the number of its step.
    """

    def __init__(self, config: Config):
        self.config = config

    def before_training(self, run: RunFacts) -> None:
        """Called once, after everything is built and loaded."""

    def before_step(self, run: RunFacts) -> None:
        """Called before each step, which is number `run.iteration + 1`."""

    def before_update(self, run: RunFacts, update: UpdateFacts) -> None:
        """Called before the optimizer's update, after gradients are reduced.

        On GPUs the device may still skip the update: changes of buffers are then undone.
        """

    def after_step(self, run: RunFacts, step: StepFacts) -> None:
        """Called when the outcome of a step is known and logged."""

    def after_evaluation(self, run: RunFacts, evaluation: EvaluationFacts) -> None:
        """Called after each evaluation, including those at the end."""

    def after_save(self, run: RunFacts, save: SaveFacts) -> None:
        """Called after each checkpoint."""

    def end(self, run: RunFacts) -> None:
        """Called once when training has ended: after its last step, after a stop, or after a failure.

        `run.code` is the exit code, and `run.why` the reason of an early end. After a failure (a code other than 0 and 9)
        other ranks may be gone: do not communicate with them.
        """

    def state_dict(self) -> Optional[dict[str, Any]]:
        """The state to save in checkpoints, of rank 0, as JSON values: numbers, strings, lists, dicts. None: no state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Called on all ranks before `before_training` in a resumed run, and after a rollback to a checkpoint."""


STATE = ("state_dict", "load_state_dict")
PLACES = tuple(name for name in vars(Hook) if not name.startswith("_") and name not in STATE)
Maker = Callable[[Config], Hook]


@dataclass
class Hooks:
    """The hooks of a run, by the points at which they are called."""

    called: dict[str, list[tuple[str, Callable]]] = field(default_factory=lambda: {place: [] for place in PLACES})
    # Hooks with a state, by name; a second one of the same name is name#2
    keeping: dict[str, Hook] = field(default_factory=dict)

    def call(self, place: str, run, *facts: Callable[[], object]) -> None:
        """Call all hooks of a point in order. run: `training.state.Run`; facts: build further arguments."""
        if self.called[place]:
            given = [run_facts(run), *(make() for make in facts)]
            for name, method in self.called[place]:
                _guarded(f"hook {name}, {place} at iteration {run.state.iteration}", method, *given)

    def end(self, run, error: Optional[BaseException] = None) -> None:
        """Call `end` of all hooks, once. error: of a failed or stopped run; then errors of hooks are only logged."""
        called, self.called["end"] = self.called["end"], []
        error = peer_lost(error) or error
        why = first_line(error) if error is not None else run.watch.stop.why if run.watch.stop else ""
        facts = replace(run_facts(run), code=0 if error is None else exit_code(error), why=why)
        for name, method in called:
            try:
                _guarded(f"hook {name}, end at iteration {run.state.iteration}", method, facts)
            except Exception as failure:
                if error is None:
                    raise
                run.metrics.log(f"warning: {failure}")

    def add(self, name: str, hook: object) -> None:
        """Add a hook. Raises SettingsError if it is not a valid one."""
        if not isinstance(hook, Hook):
            raise SettingsError(
                f"hook {name} is no Hook",
                do=f"write class {name.rpartition(':')[2]}(Hook), after from megatron.training.hooks import Hook "
                "(docs/extending.md#a-hook)",
            )
        methods = [method for method in dir(hook) if method.startswith(("before_", "after_"))]
        for method in methods:
            if method not in PLACES:
                raise SettingsError(
                    f"hook {name} has {method}, and nothing calls it{did_you_mean(method, PLACES)}",
                    do=f"the loop calls {', '.join(PLACES)}; begin the names of other methods with _",
                )
        overridden = [place for place in PLACES if getattr(type(hook), place) is not getattr(Hook, place)]
        defined = [getattr(type(hook), method) is not getattr(Hook, method) for method in STATE]
        if not overridden and not any(defined) and type(hook) is not Hook:  # Hook itself: switched off
            others = [method for method in dir(type(hook)) if not hasattr(Hook, method) and not method.startswith("_")]
            has = f" ({', '.join(others)})" if others else ""
            raise SettingsError(
                f"hook {name} has none of the loop's methods{has}: it would do nothing",
                do=f"the loop calls {', '.join(PLACES)}",
            )
        for place in overridden:
            self.called[place].append((name, getattr(hook, place)))
        if any(defined) and not all(defined):
            raise SettingsError(
                f"hook {name} has {STATE[defined.index(True)]}, and no {STATE[defined.index(False)]}",
                "a checkpoint saves the result of state_dict for load_state_dict",
                "define both: docs/extending.md#a-hook",
            )
        if all(defined):
            same = sum(other.partition("#")[0] == name for other in self.keeping)
            self.keeping[f"{name}#{same + 1}" if same else name] = hook

    def state(self) -> dict[str, Any]:
        """The states of hooks for a checkpoint, by name. Raises Failure if one cannot be written as JSON."""
        states = {}
        for name, hook in self.keeping.items():
            where = f"hook {name}, state_dict"
            state = _guarded(where, hook.state_dict, returns=True)
            _guarded(f"{where}: it must consist of JSON values", json.dumps, state, returns=True)
            if state is not None:
                states[name] = state
        return states

    def load(self, saved: Mapping[str, Any]) -> list[str]:
        """Load the states of hooks from a checkpoint. Returns notices for the user."""
        for name, state in saved.items():
            if name in self.keeping:
                _guarded(f"hook {name}, load_state_dict", self.keeping[name].load_state_dict, state)
        notices = [
            f"the checkpoint has a state of hook {name}, which this run does not have"
            for name in saved
            if name not in self.keeping
        ]
        return notices + [
            f"hook {name} is reinitialized: the checkpoint has no state of it"
            for name in self.keeping
            if name not in saved
        ]


def hook_makers(config: Config, own: Sequence[Maker] = ()) -> list[tuple[str, Maker]]:
    """List (name, class or function) of a run's hooks: the recipe's `own` hooks, then the hooks of --hooks.

    Raises SettingsError for a name that cannot be imported.
    """
    makers = [(f"{maker.__module__}:{maker.__qualname__}", maker) for maker in own]
    what = "a class, or a function that makes a Hook from the settings"
    return makers + [(name, import_callable("--hooks", name, what)) for name in config.logging.hooks or ()]


def make_hooks(makers: Sequence[tuple[str, Maker]], config: Config) -> Hooks:
    """Build the hooks of a run, in calling order."""
    hooks = Hooks()
    for name, maker in makers:
        hooks.add(name, _guarded(f"hook {name}, when it was built", maker, config, returns=True))
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
    """Call user code. Raises Failure that names `where`. The error for a lost rank passes unchanged."""
    try:
        result = function(*given)
    except Exception as error:
        if peer_lost(error):
            raise
        message = "\n  ".join(str(error).splitlines()) or "without a message"
        failure = Failure(f"{where}: {type(error).__name__}: {message}", do="fix the hook (--debug shows the line)")
        if isinstance(error, Failure):
            failure.code = error.code
        raise failure from error
    if result is not None and not returns:
        raise Failure(f"{where}: it returned {result!r}", "hooks must return None: they do not control the loop")
    return result
