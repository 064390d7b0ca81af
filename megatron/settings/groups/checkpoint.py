# SPDX-License-Identifier: Apache-2.0
"""The settings of checkpoints."""

from dataclasses import dataclass
from typing import Literal, Optional

from megatron.settings.declare import Count, Natural, Needs, Positive, Share, shown_by
from megatron.settings.groups.batch import AUTO

RESUMING = Needs("--load, and not --finetune", lambda s: s.load and not s.finetune)

# Tests that show effects
INTERVAL = "test_checkpoints_come_at_their_interval_and_at_the_end"
MEMORY = "test_a_run_goes_on_from_memory"
NEWEST = "test_load_goes_on_from_the_newest_or_from_the_step_that_is_asked_for"
LOADED = "test_what_of_a_checkpoint_is_loaded"


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints: where and when they are saved, and what a run loads from them."""

    save: Optional[str] = shown_by(INTERVAL)(
        "folder to save checkpoints to, or its URL in an object store (s3://bucket/run)", None, "--output-dir"
    )
    load: Optional[str] = shown_by(NEWEST)("folder or URL to load a checkpoint from", None)
    save_interval: Optional[int] = shown_by(INTERVAL)(
        "number of steps between checkpoints; auto: from the cost of a save (see --mean-time-to-interruption)",
        None,
        "--save-steps",
        "--persistent-save-interval",
        also=dict(auto=AUTO),
        requires=("save", "there is no folder to save into"),
    )
    save_epoch: Optional[Count] = shown_by("test_a_run_of_epochs")(
        "also save every so many epochs (--train-epochs)", None
    )
    mean_time_to_interruption: Positive = shown_by("test_auto_interval_follows_the_time_to_interruption")(
        "mean hours between failures of the job, for --save-interval auto",
        24.0,
        needs=Needs("--save-interval auto", lambda s: s.save_interval == AUTO),
    )
    keep_last: Optional[Count] = shown_by(INTERVAL)(
        "keep only this many newest checkpoints", None, requires=("save", "there is no folder to keep checkpoints in")
    )
    save_retain_interval: Optional[Count] = shown_by(INTERVAL)(
        "also keep the checkpoints at multiples of this step, next to the --keep-last (default: 1) newest",
        None,
        requires=("save", "there is no folder to keep checkpoints in"),
    )
    verify_saves: Share = shown_by("test_a_run_reads_back_the_share_that_was_asked_for")(
        "share of a new checkpoint that its writers read back before --keep-last deletes older ones (0: nothing); other "
        "blocks have their turn at the next saves",
        1.0,
        needs=Needs("--keep-last or --save-retain-interval", lambda s: s.keep_last or s.save_retain_interval),
    )
    async_save: bool = shown_by("test_async_save_goes_on_before_it_is_written")(
        "copy the state to CPU memory and write it in the background",
        False,
        requires=("save", "there is no folder to save into"),
    )
    non_persistent_save_interval: Optional[Count] = shown_by(MEMORY)(
        "number of steps between snapshots in the memory of the nodes, from which a run goes on after a failure",
        None,
        requires=("save", "the checkpoints there are the way back when memory is lost"),
    )
    non_persistent_local_ckpt_dir: Optional[str] = shown_by(MEMORY)(
        "folder for these snapshots, in the memory or on a disk of each node (default: /dev/shm)",
        None,
        needs="non_persistent_save_interval",
    )
    replication: bool = shown_by("test_a_lost_node_is_replaced_from_copies")(
        "keep a copy of each rank's part of a snapshot in another rank's memory, of another node where there is one",
        False,
        needs="non_persistent_save_interval",
    )
    replication_jump: Optional[Count] = shown_by("test_a_jump_is_megatrons_and_reaches_another_node")(
        "copies of rank n's part are with ranks n+J, n+2J, ... (default: ranks of the next nodes)",
        None,
        needs="replication",
    )
    replication_factor: Count = shown_by("test_where_copies_are")(
        "number of memories that hold each part, the rank's own included", 2, needs="replication"
    )
    save_retries: Natural = shown_by("test_a_failed_save_is_tried_again")(
        "number of retries of a failed save; 0: none", 2, needs="save"
    )
    save_mirror: Optional[str] = shown_by("test_the_mirror_takes_what_the_folder_does_not")(
        "folder or URL to save to if --save fails after all retries",
        None,
        requires=("save", "the mirror takes what --save does not"),
    )
    save_copy: Optional[str] = shown_by("test_copies_are_checkpoints_and_a_run_goes_on_from_them")(
        "folder or URL to copy each checkpoint to, or a command that copies it, with {} for its path",
        None,
        requires=("save", "there is nothing to copy"),
    )
    save_parity: Optional[Count] = shown_by("test_a_run_rebuilds_a_lost_file")(
        "one parity file for each so many files of a checkpoint: one of them that is lost or damaged is rebuilt",
        None,
        requires=("save", "there are no files to lose"),
    )
    save_hf: Optional[str] = shown_by("test_a_run_leaves_models_for_transformers")(
        "folder for each checkpoint's model and tokenizer in Hugging Face's format too, written in the background",
        None,
        requires=("save", "it is written from checkpoints"),
    )
    save_hf_interval: Optional[Count] = shown_by("test_a_run_leaves_models_for_transformers")(
        "write --save-hf for checkpoints at multiples of this step (default: for each)", None, needs="save_hf"
    )
    max_failed_saves: Count = shown_by("test_training_ends_at_max_failed_saves_in_a_row")(
        "stop training after this many failed saves in a row", 3, needs="save"
    )
    ckpt_step: Optional[Natural] = shown_by(NEWEST)(
        "step of the checkpoint to load (default: the newest); 0: an imported model",
        None,
        requires=("load", "there is no folder to look in"),
    )
    auto_resume: bool = shown_by("test_auto_resume_allows_for_an_empty_folder")(
        "with --load: start from iteration 0 if the folder has no checkpoint; not needed if it is new and --save, too",
        False,
        requires=("load", "it says what to do when the folder is empty"),
    )
    exit_on_missing_checkpoint: bool = shown_by("test_what_needs_a_checkpoint_is_refused")(
        "exit if --load has no checkpoint, even if it is a new folder and --save, too", False, needs="load"
    )
    resume_schedule: Optional[Literal["checkpoint", "command"]] = shown_by(
        "test_a_longer_run_follows_the_schedule_that_it_is_told_to"
    )(
        "schedule of learning rate and weight decay when resuming: the checkpoint's, or this command's (the default; warns "
        "if a length that was not given has changed)",
        None,
        "--use-checkpoint-opt-param-scheduler=checkpoint",
        "--use-checkpoint-lr-scheduler=checkpoint",
        "--override-opt-param-scheduler=command",
        "--override-lr-scheduler=command",
        needs=RESUMING,
    )
    finetune: bool = shown_by(LOADED)(
        "load only the weights and start from iteration 0",
        False,
        requires=("load", "there are no weights to start from"),
    )
    pretrained_checkpoint: Optional[str] = shown_by("test_a_run_begins_with_a_pretrained_model_and_goes_on")(
        "folder of the checkpoint whose weights a run begins with while --load has none to resume from; its shape and "
        "tokenizer, too, if no flag sets the shape. --pretrained-checkpoint A --load B --save B suits every launch",
        None,
    )
    moe_use_upcycling: bool = shown_by("test_a_run_starts_from_a_dense_checkpoint")(
        "with --finetune and --num-experts: --load may be a dense model, whose MLPs become the experts (docs/experts.md)",
        False,
    )
    use_checkpoint_args: bool = shown_by("test_the_shape_is_the_checkpoints")(
        "use the model shape and tokenizer of the checkpoint at --load where no flag sets them (--finetune does if no flag "
        "sets the shape)",
        False,
        needs="load",
        on_resume="irrelevant",
    )
    load_strictness: Literal["strict", "warn-missing", "warn-extra", "warn-all"] = shown_by("test_load_strictness")(
        "tensors that the checkpoint or the model lacks: an error, or a warning for those that are missing, extra or both",
        "strict",
        "--dist-ckpt-strictness",
        also=dict(
            raise_all="strict",
            raise_unexpected="warn-extra",
            assume_ok_unexpected="warn-extra",
            log_unexpected="warn-all",
            log_all="warn-all",
            ignore_all="warn-all",
        ),
        needs="load",
    )
    no_load_optim: bool = shown_by(LOADED)("do not load optimizer state", False, needs=RESUMING)
    no_save_optim: bool = shown_by("test_no_save_optim_leaves_weights_alone")(
        "do not save optimizer state", False, needs="save"
    )
