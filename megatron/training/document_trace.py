# SPDX-License-Identifier: Apache-2.0
"""Traces documents to the steps that read them, with the run's datasets, its steps and its source files."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Optional

import numpy as np

from megatron.data.launches import RunHistory
from megatron.errors import DataError, Failure
from megatron.settings.schema import Config, TokenizerSettings

SPLITS = ("train", "valid", "test")


@dataclass
class DocumentTrace:
    """Positions in a run's order of samples, the steps that read them, and their documents.

    split:    "train", or the split of the evaluations
    sources:  folders of source files that have moved
    """

    history: RunHistory
    split: str
    tokenizer_settings: TokenizerSettings
    log: Callable[[str], None]
    sources: Sequence[str] = ()
    built: dict[Any, Any] = field(default_factory=dict)  # datasets by settings of launches
    origins: dict[str, Any] = field(default_factory=dict)  # data.origin.Origins of prefixes, or None

    # -- the run -------------------------------------------------------------------------------------------------------

    @property
    def launches(self) -> list:
        """The launches whose data is traced. For evaluations this is only the last one."""
        return self.history.launches if self.split == "train" else self.history.launches[-1:]

    def dataset(self, launch):
        """The samples of the traced split in a launch."""
        from megatron.data.gpt_dataset import SampleCounts
        from megatron.training.datasets import dataset_sizes

        config: Config = launch.config
        sizes = dataset_sizes(config.batch, launch.dp, config.data.full_validation)
        key = repr((config.data, config.model.seq_length, config.logging.seed, sizes, config.extra))
        if key not in self.built:
            self._refuse_own_data(config)
            which = SPLITS.index(self.split)
            size = sizes[which] if self.split == "train" else max(sizes[which], self._evaluated())
            counts = [size if number == which else 0 for number in range(3)]
            record = self.history.record  # of a launch, or of a checkpoint
            order = record.get("valid_order") or (record.get("state") or {}).get("valid_order")
            sizes = SampleCounts(counts, valid_order=order)
            dataset = self._splits(config, sizes)[which]
            if dataset is None:
                raise DataError(f"this run has no {self.split} data", do="see --split and --eval-iters of the run")
            self.built[key] = dataset
        return self.built[key]

    def _splits(self, config: Config, sizes: tuple[int, ...]) -> tuple:
        """(train, valid, test): rows of tokens, or arrays from the recipe of a masked model."""
        from megatron.data.gpt_dataset import build_datasets
        from megatron.model.recipe import recipe_of

        recipe, log = recipe_of(config), self.log
        if recipe.arrays is not None:
            return recipe.build_datasets(config, *self._vocabulary(config), sizes, log)
        length, seed = config.model.seq_length, config.logging.seed
        return build_datasets(config.data, length, sizes, seed, eod=self._eod(config), log=log)

    def _vocabulary(self, config: Config) -> tuple[Any, int]:
        """(tokenizer, vocabulary size) of a run. Samples of masked models contain its special tokens."""
        from megatron.training.datasets import build_vocabulary

        return build_vocabulary(replace(config, tokenizer=self.tokenizer_settings), lambda line: None)

    def places(self, launch, prefix: str, sequences: range) -> np.ndarray:
        """The positions in the order of training (or of a split) with some sequences of a token file."""
        from megatron.data.find_documents import find_places
        from megatron.data.loader import cyclic_order

        dataset = self.dataset(launch)
        samples = find_places(dataset, prefix, sequences)
        if launch.config.data.dataloader_type != "cyclic" or not len(samples):
            return samples
        ends = launch.bounds()[[0, -1]] if self.split == "train" else [0, self._evaluated()]
        wanted, size, places = np.zeros(len(dataset), bool), len(dataset), []
        wanted[samples] = True
        for epoch in range(int(ends[0]) // size, -(-int(ends[1]) // size)):
            places.append(np.flatnonzero(wanted[cyclic_order(epoch, size)]) + epoch * size)
        return np.concatenate(places) if places else samples[:0]

    def index(self, launch, dataset, place: int) -> int:
        """The dataset's sample at a position."""
        from megatron.data.loader import cyclic_order
        from megatron.data.sampler import cyclic_position

        if launch.config.data.dataloader_type != "cyclic":
            if place >= len(dataset):
                raise DataError(f"sample {place:,} is past the end: there are {len(dataset):,}")
            return place
        epoch, index = cyclic_position(place, len(dataset))
        return int(cyclic_order(epoch, len(dataset))[index])

    def when(self, places: np.ndarray, launches=None) -> list[tuple[Any, Any, int]]:
        """Find all steps and evaluations that read some positions: (launch, step or evaluation, position)."""
        if self.split == "train":
            return [
                (launch, step, place)
                for launch in launches or self.launches
                for step, place in self.history.steps_with(launch, places)
            ]
        launch = self.history.launches[-1]
        return [
            (launch, one, int(place))
            for one in self.history.passes(self.split)
            for place in places
            if one.first <= place < one.first + one.size
        ]

    def ledger(self, launch, step) -> str:
        """Compare the hash of a step's tokens with the recorded one: "agrees", "differs", or "" without a record."""
        if not (step.ledger and step.done):
            return ""
        from megatron.data.loader import MicroBatchLoader
        from megatron.data.sampler import sum_hashes, to_hex
        from megatron.model.recipe import recipe_of

        config, recipe = launch.config, recipe_of(launch.config)
        named = {}
        if recipe.arrays is not None:
            named = dict(arrays=recipe.arrays(config, self._vocabulary(config)[1]), collate=recipe.collate)
        batch, eod = replace(config.data, num_workers=0), self._eod(config)
        with MicroBatchLoader(self.dataset(launch), batch, micro_batch_size=1, eod=eod, **named) as loader:
            hashes = [loader.sample_hash(place) for place in range(step.first, step.first + step.size)]
        return "agrees" if to_hex(sum_hashes(hashes)) == step.ledger else "differs"

    def _refuse_own_data(self, config: Config) -> None:
        from megatron.model.recipe import recipe_of

        if config.data.mock_data:
            raise DataError("this run was trained on synthetic samples (--mock-data): there are no documents")
        if recipe_of(config).own_data:
            raise DataError(f"{config.model.model_type} builds its samples itself: their sources are unknown")
        if any(getattr(group, "task_mixture", None) for group in config.extra.values()):
            raise DataError("this run mixes tasks (--task-mixture), whose samples cannot be traced to texts")

    def _eod(self, config: Config) -> Optional[int]:
        """The end-of-document token, from preprocessing's record or the tokenizer."""
        from megatron.data.blend import parse_blend
        from megatron.data.vocabulary import identity_of

        words = config.data.data_path or config.data.train_data_path or config.data.valid_data_path
        for prefix in parse_blend(words, "--data-path").prefixes if words else ():
            if (identity := identity_of(prefix)) and identity.get("eod") is not None:
                return identity["eod"]
        return None if self.tokenizer is None else self.tokenizer.eod

    def _evaluated(self) -> int:
        return max((one.first + one.size for one in self.history.passes(self.split)), default=0)

    # -- documents -----------------------------------------------------------------------------------------------------

    @cached_property
    def files(self) -> dict[str, Any]:
        """The token files of all launches: prefix -> files."""
        from megatron.data.find_documents import files_of

        return {key: files for launch in self.launches for key, files in files_of(self.dataset(launch)).items()}

    @cached_property
    def tokenizer(self):
        """The run's tokenizer; None if it has none or its files are missing."""
        from megatron.tokenizer import build_tokenizer

        try:
            return build_tokenizer(self.tokenizer_settings, lambda line: None)
        except (Failure, OSError) as error:
            self.log(f"note: no tokenizer, so no text of tokens: {str(error).splitlines()[0]}")
            return None

    def origin(self, prefix: str, document: int) -> Optional[dict]:
        """Source file, byte offset and hash of a document; None if unknown."""
        from megatron.data.origin import open_origins

        if prefix not in self.origins:
            self.origins[prefix] = open_origins(prefix, self.files[prefix].num_documents)
        origins = self.origins[prefix]
        return None if origins is None else origins[document]._asdict()

    def decoded(self, prefix: str, document: int, most: Optional[int] = None) -> str:
        """The text of a document's tokens."""
        tokens = self.files[prefix]
        first, last = tokens.document_indices[document : document + 2].tolist()
        ids = [id for sequence in range(first, last) for id in tokens.get(sequence).tolist()]
        return self.tokenizer.decode(ids[:most])

    def source_text(self, prefix: str, document: int) -> Optional[str]:
        """The text of a document in its source; None if that is missing or has changed, or if only a part was used."""
        from megatron.data.json_input import BadLine, parse_line
        from megatron.data.origin import find_file, lines_at, text_hash

        origin = self.origin(prefix, document)
        path = origin and find_file(origin["file"], self.sources or ())
        if not path or origin["piece"]:
            return None
        try:
            line = lines_at(path, [origin["offset"]], origin["separator"], origin.get("columns"))[origin["offset"]]
            record = json.loads(line)
            for key in record if isinstance(record, dict) else ():
                value = parse_line(line, [key])[0] if isinstance(record[key], (str, list)) else ""
                if f"{text_hash(value):016x}" == origin["hash"]:
                    return value if isinstance(value, str) else "\n".join(value)
        except (BadLine, ValueError, OSError, DataError):
            return None
        return None
