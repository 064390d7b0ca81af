# SPDX-License-Identifier: Apache-2.0
"""How long the dataset side takes: index maps, blends, cache, samples, batches.

    python benchmarks/dataset_index.py [documents, default 10000000] [folder for temporary files]

Documents have a mean of 445 tokens, samples 1024, as an English corpus with GPT-2's vocabulary. The token
file is sparse: it takes address space and no disk.
"""

import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from megatron.data.blend import interleave, normalized  # noqa: E402
from megatron.data.gpt_dataset import build_datasets  # noqa: E402
from megatron.data.index_maps import build_sample_index, make_epoch_plan  # noqa: E402
from megatron.data.indexed import IndexedDataset, write_index  # noqa: E402
from megatron.data.loader import MicroBatchLoader  # noqa: E402
from megatron.settings.schema import Data  # noqa: E402

SEQ_LENGTH, MEAN_LENGTH = 1024, 445


def main(argv: list[str]) -> None:
    documents = int(argv[0]) if argv else 10_000_000
    with tempfile.TemporaryDirectory(dir=argv[1] if len(argv) > 1 else None) as folder:
        prefix, lengths = write_corpus(Path(folder), documents)
        samples = int(lengths.sum()) // SEQ_LENGTH - 1
        print(f"{documents:,} documents, {lengths.sum():,} tokens, {samples:,} samples of {SEQ_LENGTH}")
        index_maps(prefix, lengths, samples)
        blends()
        reading(prefix, samples)


def write_corpus(folder: Path, documents: int):
    """A token file of zeros with realistic lengths."""
    lengths = np.random.default_rng(0).exponential(MEAN_LENGTH, documents).astype(np.int32) + 1
    write_index(folder / "a.idx", np.uint16, lengths, np.arange(documents + 1))
    with open(folder / "a.bin", "wb") as file:
        file.truncate(2 * int(lengths.sum()))
    return str(folder / "a"), lengths


def index_maps(prefix: str, lengths: np.ndarray, samples: int) -> None:
    document = np.arange(len(lengths), dtype=np.int32)
    timed("shuffle of the documents", lambda: np.random.RandomState(1).shuffle(document))
    plan = make_epoch_plan(range(len(lengths)), lengths, SEQ_LENGTH, 1)
    timed("sample index", lambda: build_sample_index(document, lengths, SEQ_LENGTH, plan.num_samples))
    timed("opening the token file", lambda: IndexedDataset(prefix))
    data = Data(data_path=[prefix], split="1,0,0")
    build = lambda: build_datasets(data, SEQ_LENGTH, (samples, 0, 0), 1)
    timed("build_datasets, first time: build, write, check", build)
    timed("build_datasets, from the cache", build)


def blends(size: int = 10_000_000) -> None:
    for weights in ([0.3, 0.7], [0.5, 0.3, 0.15, 0.05], np.random.default_rng(0).random(20).tolist()):
        shares, limits = normalized(weights), [size] * len(weights)
        timed(f"blend of {len(weights)}, {size:,} samples", partial(interleave, shares, size, limits))


def reading(prefix: str, samples: int, count: int = 2000) -> None:
    data = Data(data_path=[prefix], split="1,0,0", num_workers=0)
    train = build_datasets(data, SEQ_LENGTH, (samples, 0, 0), 1, vocab_size=50257)[0]
    [train[i] for i in range(count)]  # page in
    seconds = timed(f"{count} samples", lambda: [train[i] for i in range(count)])
    print(f"{'':58}{seconds / count * 1e6:6.1f} us a sample")
    with MicroBatchLoader(train, data, micro_batch_size=8) as batches:
        seconds = timed("250 micro-batches of 8, inline", lambda: batches.step(0, count // 8))
    print(f"{'':58}{seconds / count * 1e6:6.1f} us a sample")


def timed(what: str, work) -> float:
    start = time.perf_counter()
    work()
    seconds = time.perf_counter() - start
    print(f"{what:55}{seconds:8.3f} s", flush=True)
    return seconds


if __name__ == "__main__":
    main(sys.argv[1:])
