# SPDX-License-Identifier: Apache-2.0
"""What going on from a checkpoint changes: one record, which the log prints once and the run's record keeps."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from megatron.guard import changes
from megatron.optimizer.lr_schedule import Lengths
from megatron.optimizer.resumed_schedule import drift, follow, sentence
from megatron.settings.schema import Config


@dataclass(frozen=True)
class ResumeChanges:
    """Settings that are not those of the checkpoint's run.

    settings  one sentence for each that is another one, because somebody says so
    schedule  a sentence for lengths of the schedule that have changed although nobody says so, or empty
    followed  settings of the schedule that are the checkpoint's (--resume-schedule checkpoint): name -> value
    decided   whether --resume-schedule decides about the schedule: then a note is enough
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
        """As JSON has it, for metrics.jsonl."""
        return dict(settings=list(self.settings), schedule=self.schedule, followed=dict(self.followed or {}))


def resume(
    config: Config, record: Mapping[str, Any], dp: int, vocabulary: Optional[str]
) -> tuple[Config, Lengths, ResumeChanges]:
    """(settings with the schedule that the run follows, its lengths, what changes). record: a checkpoint's state;
    vocabulary: fingerprint of this run's.
    """
    same = changes.same_vocabulary(record, vocabulary)
    settings, chosen = changes.change_messages(config, record["config"], same), config.checkpoint.resume_schedule
    found = [] if config.batch.skip_train else drift(config, record, dp)  # an evaluation follows no schedule
    if chosen == "checkpoint":
        found = [one for one in found if not one.of_schedule]
    following, lengths = follow(config, record, dp)
    followed = {name: one.value for name, one in following.statements.items() if config.said(name) is not one}
    words = sentence(found, chosen) if found else ""
    return following, lengths, ResumeChanges(tuple(settings), words, followed, chosen == "command")
