# SPDX-License-Identifier: Apache-2.0
"""The settings that change when a run resumes from a checkpoint, for the log and the run's record."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.guard import changes
from megatron.optimizer.lr_schedule import Lengths
from megatron.optimizer.resumed_schedule import drift, drift_message, follow
from megatron.settings.schema import Config


@dataclass(frozen=True)
class ResumeChanges:
    """Settings that differ from the settings of the checkpoint's run.

    settings  a sentence for each setting that the user changed
    schedule  a sentence for lengths of the schedule that changed although the user did not set them, or empty
    followed  settings of the schedule from the checkpoint (--resume-schedule checkpoint): name -> value
    decided   whether --resume-schedule is given: the log then has a note instead of a warning
    """

    settings: tuple[str, ...] = ()
    schedule: str = ""
    followed: Mapping[str, Any] = None
    decided: bool = False

    @property
    def notes(self) -> list[str]:
        return [*self.settings, *([self.schedule] if self.schedule and self.decided else [])]

    @property
    def warnings(self) -> list[str]:
        return [self.schedule] if self.schedule and not self.decided else []

    def to_record(self) -> dict[str, Any]:
        """The changes as JSON values, for metrics.jsonl."""
        return dict(settings=list(self.settings), schedule=self.schedule, followed=dict(self.followed or {}))


def resume(
    config: Config, record: Mapping[str, Any], dp: int, vocabulary: Sequence[str]
) -> tuple[Config, Lengths, ResumeChanges]:
    """The settings with the schedule of the resumed run, its lengths, and the changes.

    record: a checkpoint's state. vocabulary: fingerprints of this run's vocabulary.
    """
    same = changes.same_vocabulary(record, vocabulary)
    settings, chosen = changes.change_messages(config, record["config"], same), config.checkpoint.resume_schedule
    drifts = [] if config.batch.skip_train else drift(config, record, dp)  # an evaluation has no schedule
    if chosen == "checkpoint":
        drifts = [one for one in drifts if not one.of_schedule]
    following, lengths = follow(config, record, dp)
    followed = {name: one.value for name, one in following.statements.items() if config.said(name) is not one}
    words = drift_message(drifts, chosen) if drifts else ""
    return following, lengths, ResumeChanges(tuple(settings), words, followed, chosen == "command")
