# SPDX-License-Identifier: Apache-2.0
"""The settings of distillation."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Needs, Positive, PositiveShare, shown_by

TEACHER = Needs("--teacher-load or --teacher-logits", lambda s: s.settings.distillation.distils)
HIDDEN = Needs("--teacher-load and --kd-hidden-layers", lambda s: s.teacher_load and s.kd_hidden_layers)

# Tests that show effects
PLAIN = "test_distillation::test_any_layout_is_the_plain_loop"
STATES = "test_hidden_states_are_those_of_the_plain_loop"


@dataclass(frozen=True)
class Distillation:
    """Learning from another model: docs/distillation.md."""

    teacher_load: Optional[str] = shown_by(PLAIN)(
        "folder or URL of the checkpoint of a teacher, of any size and layout: the student also learns its logits",
        None,
        "--export-kd-teacher-load",
    )
    teacher_logits: Optional[str] = shown_by("test_all_logits_equal_the_teacher")(
        "folder of a teacher's logits, from megatron.tools.teacher_logits, in place of the teacher; its seed defines the "
        "order of samples",
        None,
        "--logits-load-dir",
    )
    kd_alpha: PositiveShare = shown_by(PLAIN)(
        "share of the loss on the teacher's logits; the language model's loss has the rest", 0.5, needs=TEACHER
    )
    kd_temperature: Positive = shown_by(PLAIN)(
        "divisor of the logits of teacher and student in that loss, which is multiplied by its square",
        1.0,
        needs=TEACHER,
    )
    kd_loss: Literal["forward_kl", "reverse_kl", "js"] = shown_by(PLAIN)(
        "loss on the teacher's logits: KL(teacher || student), KL(student || teacher), or Jensen-Shannon divergence",
        "forward_kl",
        needs=TEACHER,
    )
    kd_hidden_layers: Optional[str] = shown_by(STATES)(
        "with --teacher-load, layers of the student whose output also learns that of a layer of the teacher, numbered from "
        "0: 0:1,1:3 (student:teacher); even: all of them, spread over the teacher's",
        None,
        needs="teacher_load",
    )
    kd_hidden_loss: Literal["mse", "cosine"] = shown_by(STATES)(
        "loss on hidden states: mean of the squares of differences, or 1 - cosine", "mse", needs=HIDDEN
    )
    kd_hidden_coeff: Positive = shown_by("test_even_pairs")(
        "weight of the loss on hidden states, which is added", 1.0, needs=HIDDEN
    )

    @property
    def distils(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher_load is not None or self.teacher_logits is not None

    @property
    def source(self) -> str:
        """The teacher, as a flag."""
        return f"--teacher-load {self.teacher_load}" if self.teacher_load else f"--teacher-logits {self.teacher_logits}"
