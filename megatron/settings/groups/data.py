# SPDX-License-Identifier: Apache-2.0
"""The settings of datasets."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, Optional

from megatron.settings.declare import Natural, Needs, setting, shown_by
from megatron.settings.groups.batch import TEST, VALIDATION

PARTS = ("train", "valid", "test")
FILES = Needs("--data-path or another data path", lambda s: s.settings.data.files)

# Tests that show effects
PATHS = "test_each_split_has_its_own_path"

sample = partial(setting, on_resume="refused")


@dataclass(frozen=True)
class Data:
    """Datasets, and the order of their samples."""

    data_path: Optional[list[str]] = shown_by("test_data_path_mixes_by_weight")(
        "dataset prefix (a path or an s3:// URL), or weight prefix weight prefix ...; a folder: all its datasets, by "
        "size; --data-args-path FILE reads these words from a file",
        None,
        "--input-dir",
        replaces=("train_data_path", "valid_data_path", "test_data_path", "mock_data"),
        on_resume="refused",
    )
    train_data_path: Optional[list[str]] = shown_by(PATHS)(
        "dataset or blend for training only; --per-split-data-args-path FILE reads those of each split from JSON",
        None,
        replaces=("data_path", "mock_data"),
        on_resume="refused",
    )
    valid_data_path: Optional[list[str]] = shown_by(PATHS)(
        "dataset or blend for validation only", None, needs=VALIDATION
    )
    test_data_path: Optional[list[str]] = shown_by(PATHS)("dataset or blend for testing only", None, needs=TEST)
    split: str = shown_by("test_split_divides_the_documents_in_order")(
        "proportions of train,valid,test in each dataset", "969,30,1", needs="data_path", on_resume="refused"
    )
    data_cache_path: Optional[str] = shown_by("test_index_maps_lie_where_they_are_wanted")(
        "folder for index maps (default: next to the data), and for data downloaded from an object store",
        None,
        needs=FILES,
        on_resume="irrelevant",
    )
    object_storage_cache_path: Optional[str] = shown_by("test_samples_by_ranges_are_those_of_the_local_files")(
        "folder in which each machine keeps the index of token files in an object store and those ranges of their tokens "
        "that its samples need; nothing else is downloaded",
        None,
        "--s3-cache-path",
        needs=Needs("a data path that is a URL", lambda s: s.settings.data.in_a_store),
        on_resume="irrelevant",
    )
    mmap_bin_files: bool = shown_by("test_reading_by_pread_gives_the_same_tokens")(
        "read token files by pread, not through a memory map: for file systems on which page faults are slow",
        True,
        needs=FILES,
        on_resume="irrelevant",
    )
    verify_data: bool = shown_by("test_verify_data_reads_every_byte_first")(
        "verify the checksums of the token files before training", False, needs=FILES
    )
    mock_data: bool = shown_by("test_mock_data_needs_no_files_and_is_the_same_each_time")(
        "train on deterministic synthetic samples, without files",
        False,
        replaces=("data_path", "train_data_path", "valid_data_path", "test_data_path"),
        on_resume="refused",
    )
    full_validation: bool = shown_by("test_a_whole_set_is_each_sample_once_in_any_layout")(
        "validate on the whole validation set, each sample once, instead of --eval-iters batches", False
    )
    dataset_type: Literal["gpt", "webtext"] = shown_by("test_an_epoch_is_each_document_once")(
        "kind of samples. gpt: --seq-length tokens of concatenated documents; webtext: one document, truncated, or padded "
        "with end-of-document tokens that have no loss",
        "gpt",
        also=dict(WebtextDataset="webtext"),
        needs=FILES,
        on_resume="refused",
    )
    dataloader_type: Literal["single", "cyclic"] = shown_by("test_cyclic_shuffles_each_epoch_anew")(
        "single: in index order; cyclic: shuffled each epoch",
        "single",
        "--dataloader-shuffle~=cyclic/single",
        on_resume="refused",
    )
    collate_fn: Optional[str] = shown_by("test_a_flag_names_the_function")(
        "your own function that turns the items of a dataset into the samples of a micro-batch: MODULE:FUNCTION "
        "(docs/extending.md)",
        None,
        on_resume="logged",
    )
    num_workers: Natural = shown_by("test_workers_prepare_batches_in_threads")(
        "number of threads that prefetch batches; 0: load them in the training loop", 2, on_resume="irrelevant"
    )
    reset_position_ids: bool = shown_by("test_positions_alone_start_again")(
        "reset position ids after each end of document",
        False,
        needs=Needs(
            "--position-embedding-type learned_absolute or rope",
            lambda s: s.position_embedding_type != "none",
            of_network=True,
        ),
        on_resume="refused",
    )
    reset_attention_mask: bool = shown_by("test_documents_are_alone")(
        "mask attention between documents", False, on_resume="refused"
    )
    eod_mask_loss: bool = shown_by("test_ends_of_documents_have_no_loss")(
        "mask the loss of end-of-document tokens in the input", False, on_resume="refused"
    )

    @property
    def files(self) -> bool:
        """Whether any token files are given."""
        return any((self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path))

    @property
    def in_a_store(self) -> bool:
        """Whether any token files lie in an object store."""
        paths = (self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path)
        return any("://" in word for words in paths for word in words or ())

    def has(self, part: str) -> bool:
        """Whether there are data for "train", "valid" or "test", as far as --split is readable."""
        paths = [name for name in PARTS if getattr(self, f"{name}_data_path")]
        if paths or not self.data_path:
            return not paths or part in paths
        shares = self.split.replace("/", ",").split(",")
        try:
            return float(shares[PARTS.index(part)]) > 0
        except IndexError:
            return False
        except ValueError:
            return True  # a bad number is reported elsewhere
