# SPDX-License-Identifier: Apache-2.0
"""Rules for events: thresholds, levels, and events that are not wanted, from the file of `--event-rules`.

    slow_steps: {threshold: 0.5, level: error}    # below half of the usual throughput: an error, not only a warning
    high_grad_norm: 20                            # only the threshold
    loss_above_guess: off
    save: off                                     # every kind of event can be switched off

`RecordRules` applies the rules that need only the records of metrics.jsonl, so a recorded run can be judged again.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import Any, Optional

from megatron.errors import SettingsError, did_you_mean
from megatron.telemetry.directions import SMALLER, is_better
from megatron.telemetry.events import KINDS, LEVELS


@dataclass(frozen=True)
class EventRule:
    """When an event is recorded, and how urgent it is. None: there is no such limit for this kind."""

    threshold: Optional[float] = None
    seconds: Optional[float] = None  # shortest time to which the rule applies
    bytes_per_second: Optional[float] = None  # a lower rate is always an event; 0: there is no such rate
    level: Optional[str] = None  # None: that of the kind
    off: bool = False


DEFAULTS = {
    "high_grad_norm": EventRule(10),  # times the median of the last steps
    "slow_steps": EventRule(0.7, seconds=30),  # share of the median throughput
    "slow_rank": EventRule(1.25),  # times the own time of the ranks that do the same work
    "slow_data": EventRule(0.25),  # share of a step in which all ranks wait for data
    "slow_disk": EventRule(0.3, seconds=10, bytes_per_second=0),  # share of the median bytes per second of saves
    "loss_above_guess": EventRule(10),  # steps in a row after the warm-up
    "validation_worse": EventRule(3),  # validations in a row
    "skipped_step": EventRule(50),  # steps in a row after which an adjusting loss scale is a warning
    "no_step": EventRule(10, seconds=60),  # times the median duration of a step
    "restart_storm": EventRule(3),  # restarts within an hour
    "disk_nearly_full": EventRule(2),  # checkpoints that have to fit
}
ABOVE = {"slow_rank": 1}  # thresholds must be larger than this, all others larger than 0
Rules = Mapping[str, EventRule]


def rule_of(rules: Rules, kind: str) -> EventRule:
    """The rule of a kind of event: the file's, or the default."""
    return rules.get(kind) or DEFAULTS.get(kind) or EventRule()


def read_rules(path: Optional[str]) -> dict[str, EventRule]:
    """The rules of a file; none without a path. Raises SettingsError that names the file and the wrong key."""
    if path is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--event-rules {path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingsError(f"--event-rules {path}: not valid YAML", " ".join(str(error).split())) from None
    if not isinstance(content or {}, dict):
        raise SettingsError(
            f"--event-rules {path}: it must be a table", do="a line is a kind of event: high_grad_norm: 20"
        )
    return {kind: _rule(f"--event-rules {path}: {kind}", kind, value) for kind, value in (content or {}).items()}


def _rule(where: str, kind: Any, value: Any) -> EventRule:
    if kind not in KINDS:
        raise SettingsError(
            f"{where}: there is no such kind of event{did_you_mean(str(kind), KINDS)}", do=f"one of {', '.join(KINDS)}"
        )
    default = DEFAULTS.get(kind, EventRule())
    if isinstance(value, bool):  # on, off
        return replace(default, off=not value)
    given = value if isinstance(value, dict) else {"threshold": value}
    for key, limit in given.items():
        known = [one.name for one in fields(EventRule) if one.name == "level" or getattr(default, one.name) is not None]
        known = [name for name in known if name != "off"]
        if key not in known:
            does = "has no threshold: on, off, or {level: error}" if key == "threshold" else f"has no {key}"
            raise SettingsError(f"{where}: it {does}{did_you_mean(str(key), known)}", do=f"it has {', '.join(known)}")
        if key == "level" and limit not in LEVELS:
            raise SettingsError(f"{where}: level {limit!r} must be one of {', '.join(LEVELS)}")
        least = ABOVE.get(kind, 0) if key == "threshold" else 0
        if key != "level" and not (type(limit) in (int, float) and math.isfinite(limit) and limit > least):
            raise SettingsError(f"{where}: {key} {limit!r} must be a number above {least}, or the line off")
    return replace(default, **given)


WINDOW = 200  # steps whose median is the reference
ENOUGH = 32  # steps before the first one is judged
INTERVAL = 10  # fewest steps whose throughput is judged together
EARLIER = 5  # fewest intervals that are the reference for the next one


class RecordRules:
    """Records events about the records of metrics.jsonl, in order. Each event is recorded once until its condition ends.

    record:  `EventLog.record`
    loss:    name of the loss of a language model; None: there is none
    guess:   loss of a uniform guess, ln(vocabulary)
    warmup:  samples of the warm-up
    figure:  (name, direction) of the validation's value; the loss if there is no other
    """

    def __init__(
        self,
        rules: Rules,
        record: Callable[..., None],
        *,
        loss: Optional[str] = "lm loss",
        guess: float = math.inf,
        warmup: int = 0,
        figure: Optional[tuple[str, str]] = None,
    ):
        self.rules = {kind: rule for kind in DEFAULTS if not (rule := rule_of(rules, kind)).off}
        self.record, self.loss, self.guess, self.warmup = record, loss, guess, warmup
        self.figure, self.direction = figure or (loss, SMALLER)
        self.on: set[str] = set()  # kinds whose condition holds
        self.norms: deque[float] = deque(maxlen=WINDOW)
        self.above = 0  # consecutive steps with a loss above a guess
        self.interval, self.rates = [0, 0.0, 0.0], deque(maxlen=WINDOW)  # steps, seconds, tokens; tokens per second
        self.validations: list[float] = []  # the last improvement, and the worse values after it

    def __call__(self, record: Mapping[str, Any]) -> None:
        """Judge a record."""
        if record["kind"] == "step":
            self._judge_norm(record)
            self._judge_loss(record)
            self._judge_speed(record)
        elif record["kind"] == "eval" and record.get("split") == "validation":
            self._judge_validation(record)

    def _judge_norm(self, step: Mapping[str, Any]) -> None:
        rule, norm = self.rules.get("high_grad_norm"), step.get("grad_norm")
        if rule is None or step.get("skipped") or norm is None or not math.isfinite(norm):
            return
        if len(self.norms) >= ENOUGH:
            middle = median(self.norms)
            ratio = norm / middle if middle else 0.0
            if self._begins("high_grad_norm", ratio > rule.threshold):
                # The log has a warning about a spike of the loss already.
                logged = {} if step.get("spike") is None else dict(logged=False)
                self.record(
                    "high_grad_norm",
                    f"iteration {step['iteration']}: gradient norm {norm:.4g} is {ratio:.1f} times the median "
                    f"{middle:.4g} of the last {len(self.norms)} steps",
                    iteration=step["iteration"],
                    value=norm,
                    median=middle,
                    times=ratio,
                    **logged,
                )
        self.norms.append(norm)

    def _judge_loss(self, step: Mapping[str, Any]) -> None:
        rule, loss = self.rules.get("loss_above_guess"), step.get(self.loss)
        if rule is None or loss is None or step.get("skipped") or step["consumed_samples"] <= self.warmup:
            return
        self.above = self.above + 1 if loss > self.guess else 0
        if self._begins("loss_above_guess", self.above >= rule.threshold):
            self.record(
                "loss_above_guess",
                f"the {self.loss} of each of the last {self.above} steps was above {self.guess:.3f}, which is "
                f"ln({math.exp(self.guess):.0f}): a uniform guess is better (iteration {step['iteration']}: {loss:.3f}); "
                "if this continues, lower --lr or warm up for longer",
                iteration=step["iteration"],
                loss=loss,
                limit=self.guess,
                steps=self.above,
            )

    def _judge_speed(self, step: Mapping[str, Any]) -> None:
        """Compare the throughput of an interval with the median of the earlier ones: single steps are too noisy."""
        rule, seconds = self.rules.get("slow_steps"), step.get("seconds") or 0.0
        if rule is None or step.get("skipped") or not step.get("tokens_per_second"):
            return
        steps, took, tokens = self.interval
        steps, took, tokens = steps + 1, took + seconds, tokens + seconds * step["tokens_per_second"]
        self.interval = [steps, took, tokens]
        if steps < INTERVAL or took < rule.seconds:
            return
        self.interval, rate = [0, 0.0, 0.0], tokens / took
        usual = median(self.rates) if len(self.rates) >= EARLIER else 0.0
        slow = rate < rule.threshold * usual
        if self._begins("slow_steps", slow):
            self.record(
                "slow_steps",
                f"the last {steps} steps up to iteration {step['iteration']} had {rate:.0f} tokens per second, "
                f"{rate / usual:.0%} of the median {usual:.0f}",
                iteration=step["iteration"],
                tokens_per_second=rate,
                median=usual,
                share=rate / usual,
                steps=steps,
            )
        if not slow:  # slow intervals must not become the reference
            self.rates.append(rate)

    def _judge_validation(self, evaluation: Mapping[str, Any]) -> None:
        rule, value = self.rules.get("validation_worse"), evaluation.get(self.figure)
        if rule is None or value is None or not math.isfinite(value) or value in self.validations[-1:]:
            return
        if self.validations and is_better(value, self.validations[-1], self.direction):
            self.validations = []
        self.validations.append(value)
        worse = len(self.validations) - 1
        if self._begins("validation_worse", worse >= rule.threshold):
            self.record(
                "validation_worse",
                f"{self.figure} in validation got worse {worse} times in a row, up to iteration "
                f"{evaluation['iteration']}: {', '.join(f'{one:.4g}' for one in self.validations)}",
                iteration=evaluation["iteration"],
                figure=self.figure,
                values=self.validations,
                times=worse,
            )

    def _begins(self, kind: str, holds: bool) -> bool:
        """Whether the condition of a kind begins to hold now."""
        began = holds and kind not in self.on
        (self.on.add if holds else self.on.discard)(kind)
        return began
