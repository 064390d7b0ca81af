# SPDX-License-Identifier: Apache-2.0
"""A small corpus of sentences for tests of masked data, and the recording of what Megatron-LM makes of it.

    pip download megatron-core==0.16.1 --no-deps && unzip -d mcore megatron_core-0.16.1-*.whl
    PYTHONPATH=mcore python tests/data/masked_corpus.py > tests/data/megatron_masked.jsonl

The second line runs where torch is, and where this suite's `megatron` is not installed. Each line of the recording
is a case, and digests of its sample index and of some samples.
"""

import hashlib
import json
import struct
import sys
from itertools import product
from pathlib import Path

import numpy as np

WORDS = 300  # of the vocabulary; behind them stand [BOS], [EOS] and the sentinels
SENTINELS = 40
TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
TOKENS += [f"##w{i}" if i % 3 == 0 else f"w{i}" for i in range(len(TOKENS), WORDS)]
CASES = [
    dict(kind=kind, seq=seq, short=short, prob=prob, seed=seed, size=size)
    for kind, (seq, size), (short, prob, seed) in product(
        ("t5", "bert", "bert-no-nsp"),
        ((32, 300), (64, 40), (128, 25)),
        ((0.1, 0.15, 1234), (0.0, 0.3, 7), (0.5, 0.15, 99)),
    )
]


def sentences() -> tuple[np.ndarray, np.ndarray]:
    """(tokens of each sentence, first sentence of each document and their end): some documents break each rule."""
    state = np.random.RandomState(42)
    per_document = state.randint(0, 14, 120)
    bounds = np.concatenate([[0], np.cumsum(per_document)]).astype(np.int64)
    lengths = state.randint(1, 40, bounds[-1]).astype(np.int32)
    lengths[state.choice(len(lengths), 4, replace=False)] = 600
    return lengths, bounds


def write_sentences(prefix) -> None:
    """The corpus as .bin/.idx."""
    lengths, bounds = sentences()
    tokens = np.random.RandomState(5).randint(5, WORDS, int(lengths.sum())).astype("<u2")
    pointers = np.cumsum(np.concatenate([[0], lengths[:-1]]), dtype="<i8") * 2
    tokens.tofile(f"{prefix}.bin")
    with open(f"{prefix}.idx", "wb") as file:
        file.write(struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(bounds)))
        for array, dtype in ((lengths, "<i4"), (pointers, "<i8"), (bounds, "<i8")):
            file.write(array.astype(dtype).tobytes())


def digest(*arrays) -> str:
    """Of values, whatever their type."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(f"{np.shape(array)}".encode() + np.asarray(array, np.int64).tobytes())
    return found.hexdigest()[:12]


def sample_digest(sample: dict) -> str:
    """Labels that do not count have no meaning: Megatron-LM gives -1. A random token that happens to be [PAD] is padding to
    Megatron-LM, here it is not: all up to the last [SEP] is none.
    """
    known = {**sample, "labels": np.where(np.asarray(sample["loss_mask"]) > 0, sample["labels"], 0)}
    if "padding_mask" in sample:
        last = np.flatnonzero(sample["padding_mask"])[-1]
        known["padding_mask"] = np.arange(len(sample["text"])) <= last
    return digest(*(known[name] for name in sorted(known)))


def some(count: int) -> list[int]:
    return sorted({*range(0, count, max(1, count // 12)), count - 1})


def recorded(dataset, index) -> dict:
    return dict(
        length=len(dataset),
        index=digest(index),
        samples={str(place): sample_digest(dataset[place]) for place in some(len(dataset))},
    )


def main() -> None:
    import tempfile
    from types import SimpleNamespace

    import torch
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

    names = [*TOKENS, "[BOS]", "[EOS]", *(f"<extra_id_{i}>" for i in range(SENTINELS))]
    tokenizer = SimpleNamespace(
        cls=2, sep=3, mask=4, pad=0, bos=WORDS, eos=WORDS + 1, eod=WORDS + 1, inv_vocab=dict(enumerate(names))
    )
    tokenizer.additional_special_tokens_ids = list(range(WORDS + 2, WORDS + 2 + SENTINELS))
    tokenizer.unique_identifiers = {"class": "test"}
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        write_sentences(Path(folder, "corpus"))
        for case in CASES:
            t5 = case["kind"] == "t5"
            own = dict(sequence_length_decoder=64) if t5 else dict(classification_head=case["kind"] == "bert")
            kind, config = (
                (T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig)
                if t5
                else (BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig)
            )
            settings = _settings(config, case, folder, tokenizer, t5, own)
            train = BlendedMegatronDatasetBuilder(kind, [case["size"], 5, 0], lambda: True, settings).build()[0]
            print(json.dumps(dict(case=case, expected=recorded(train, train.sample_index))), flush=True)


def _settings(config, case, folder, tokenizer, t5, own):
    return config(
        random_seed=case["seed"],
        sequence_length=case["seq"],
        blend=([f"{folder}/corpus"], None),
        split="80,20,0",
        path_to_cache=f"{folder}/cache",
        tokenizer=tokenizer,
        masking_probability=case["prob"],
        short_sequence_probability=case["short"],
        masking_max_ngram=10 if t5 else 3,
        masking_do_full_word=True,
        masking_do_permutation=False,
        masking_use_longer_ngrams=False,
        masking_use_geometric_distribution=t5,
        **own,
    )


if __name__ == "__main__":
    sys.exit(main())
