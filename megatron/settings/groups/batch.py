# SPDX-License-Identifier: Apache-2.0
"""The settings of batches, lengths and evaluation."""

from dataclasses import dataclass, replace
from typing import Optional

from megatron.settings.declare import Count, Natural, Needs, Positive, shown_by

AUTO = -1  # --micro-batch-size auto, --save-interval auto

TEST = Needs("--test-iters or --eval-iters above 0", lambda s: s.settings.batch.tested_batches)
VALIDATION = Needs("--eval-iters above 0, or --full-validation", lambda s: s.eval_iters or s.full_validation)


# Tests that show effects
MICRO = "test_micro_batches_of_a_step"


@dataclass(frozen=True)
class Batch:
    """Batch sizes, the length of training, and evaluation."""

    micro_batch_size: Count = shown_by(MICRO)(
        "samples per forward pass and rank; auto: the planner chooses", 1, "--batch-size", also=dict(auto=AUTO)
    )
    global_batch_size: Optional[Count] = shown_by(MICRO)(
        "samples per step (default: micro batch x data parallel)", None
    )
    local_batch_size: Optional[Count] = shown_by(MICRO)(
        "--global-batch-size / data parallel size; sets or checks it", None
    )
    gradient_accumulation_steps: Optional[Count] = shown_by(MICRO)(
        "micro-batches per step; sets or checks --global-batch-size", None, "--accumulate-steps"
    )
    rampup_batch_size: Optional[list[int]] = shown_by("test_the_batch_grows_as_its_ramp_says")(
        "START INCREMENT SAMPLES: ramp up the global batch size", None
    )
    step_batch_size_schedule: Optional[str] = shown_by("test_the_batch_has_the_sizes_of_its_schedule")(
        'global batch sizes from numbers of tokens on: "0:768 250B:1536 500B:3072" (suffixes K, M, B, T)', None
    )
    train_iters: Optional[Natural] = shown_by("test_length_of_training")(
        "number of steps to train; 0 only with --skip-train", None, "--max-steps"
    )
    train_samples: Optional[Count] = shown_by("test_length_of_training")(
        "number of samples to train on, instead of steps", None
    )
    train_epochs: Optional[Count] = shown_by("test_a_run_of_epochs")(
        "epochs to train, instead of steps; schedule lengths may then be in steps or samples",
        None,
        "--num-train-epochs",
        "--num-epochs",
        "--epochs",
    )
    eval_interval: Natural = shown_by("test_evaluations")(
        "number of steps between evaluations; 0: at the end alone", 1000, "--eval-freq", needs=VALIDATION
    )
    eval_epoch: Optional[Count] = shown_by("test_validation_behind_every_second_epoch")(
        "also evaluate every so many epochs (--train-epochs)", None
    )
    eval_iters: Natural = shown_by("test_evaluations")(
        "number of batches per evaluation; 0: no evaluation",
        100,
        needs=Needs(
            "validation data and no --full-validation, or test data and no --test-iters",
            lambda s: (
                (s.test_iters is None and s.settings.data.has("test"))
                or (not s.full_validation and (s.settings.data.has("valid") or not s.eval_iters))
            ),
        ),
    )
    test_iters: Optional[Natural] = shown_by("test_test_data_have_a_number_of_batches_of_their_own")(
        "number of batches of the final evaluation on test data; 0: no evaluation (default: --eval-iters)",
        None,
        needs=Needs(
            "test data (a third part of --split, or --test-data-path)",
            lambda s: s.settings.data.has("test") or not s.test_iters,
        ),
    )
    eval_same_samples: bool = shown_by("test_the_same_samples_each_time")(
        "validate on the first --eval-iters batches each time; otherwise each validation continues after the last",
        False,
        needs=Needs(
            "--eval-iters above 0, and not --full-validation", lambda s: s.eval_iters and not s.full_validation
        ),
    )
    eval_requests: Optional[str] = shown_by("test_requests_in_the_loop_are_those_of_the_plain_network")(
        "file of multiple-choice requests (JSON lines: context, continuations, gold), whose accuracy each evaluation logs",
        None,
    )
    stop_at_loss: Optional[float] = shown_by("test_a_loss_that_is_reached_ends_training")(
        "stop training when the validation loss (the first in the log) is at most this",
        None,
        needs=Needs(
            "validations before the end (--eval-iters or --full-validation, --eval-interval or --eval-epoch)",
            lambda s: s.settings.validates_early(s.dp),
        ),
        on_resume="logged",
    )
    skip_train: bool = shown_by("test_the_last_evaluation_of_training_in_another_layout")(
        "do not train; evaluate on --eval-iters batches of validation and test data",
        False,
        needs=Needs(
            "--eval-iters or --test-iters above 0, or --full-validation",
            lambda s: s.settings.batch.tested_batches or s.eval_iters or s.full_validation,
        ),
        on_resume="irrelevant",
    )
    exit_interval: Optional[Count] = shown_by("test_a_run_stops_early_with_a_checkpoint")(
        "save and exit after a step divisible by this", None, on_resume="irrelevant"
    )
    exit_duration_in_mins: Optional[Positive] = shown_by("test_a_run_stops_early_with_a_checkpoint")(
        "save and exit after this many minutes", None, on_resume="irrelevant"
    )

    @property
    def size_flag(self) -> str:
        """The flag by which the global batch size changes during training; "": it does not."""
        if self.rampup_batch_size:
            return "--rampup-batch-size"
        return "--step-batch-size-schedule" if self.step_batch_size_schedule else ""

    @property
    def tested_batches(self) -> int:
        """Number of batches of the evaluation on test data."""
        return self.eval_iters if self.test_iters is None else self.test_iters

    @property
    def has_length(self) -> bool:
        """Whether the length of training is given, in steps or samples."""
        return self.train_iters is not None or self.train_samples is not None

    def smallest(self) -> "Batch":
        """The batch with `--micro-batch-size auto` replaced by 1, without a number of micro-batches."""
        if self.micro_batch_size != AUTO:
            return self
        return replace(self, micro_batch_size=1, gradient_accumulation_steps=None)

    def full_size(self, dp: int) -> int:
        """The global batch size at the end of a ramp-up or schedule, on `dp` data parallel ranks.

        `--global-batch-size`, else from `--local-batch-size` or the number of micro-batches, else one micro-batch per rank.
        """
        if self.global_batch_size:
            return self.global_batch_size
        return (self.local_batch_size or self.micro_batch_size * (self.gradient_accumulation_steps or 1)) * dp

    def steps(self, dp: int) -> int:
        """The number of steps of a run that does not resume, at the last batch size; 0 if unknown."""
        return self.train_iters or (self.train_samples or 0) // max(1, self.full_size(dp))
