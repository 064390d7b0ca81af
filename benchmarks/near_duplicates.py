# SPDX-License-Identifier: Apache-2.0
"""Near-duplicates: signing beside datasketch, the whole stage beside datatrove's four MinHash stages, memory over size.

    python benchmarks/near_duplicates.py --input corpus.jsonl
    python benchmarks/near_duplicates.py --input corpus.jsonl.zst --size-mb 1000 --memory-sizes-mb 1000 4000

The input's documents are repeated to the size wanted, each time with more or fewer words replaced: copies of every
similarity. Signing: CPU seconds for the same texts (datasketch: a part of them), default preset, the median of rounds in
turn. Stages: the parameters of FineWeb (5 words, 14 bands of 8) for both, one process each, the same shards; CPU and wall
seconds and the peak of memory of each. datatrove needs spaCy for its own English words; here it divides at white space,
which is faster. It compares no pairs; the stage does so here by signatures and texts, its default.
"""

import argparse
import json
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from megatron.corpus import near_duplicates
from megatron.corpus.duplicates.shards import blocks_of_lines, shard_writer, text_of
from megatron.corpus.duplicates.signatures import Signing, band_keys, sign_texts
from megatron.corpus.stage import flat

RATES = (0.0, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0)  # shares of words that a copy has replaced


def texts_of(path: Path, limit: int) -> list[str]:
    """Texts of the first documents of a file, about `limit` characters of them."""
    texts, size = [], 0
    for lines in blocks_of_lines(path):
        for line in lines:
            text = text_of(line)
            if text and size < limit:
                texts.append(text)
                size += len(text)
        if size >= limit:
            break
    return texts


def write_corpus(source: Path, folder: Path, size: int, shard: int) -> list[Path]:
    """`size` bytes of lines, of the source's documents over and over, in shards of about `shard` bytes."""
    rng, numbers = random.Random(1), np.random.default_rng(1)
    originals = [text.split(" ") for text in texts_of(source, min(size, 100_000_000))]
    vocabulary = [word for words in originals[:500] for word in words][:100_000]
    folder.mkdir(parents=True)
    paths, done, number = [], 0, 0
    while done < size:
        paths.append(folder / f"{len(paths):05d}.jsonl.zst")
        with shard_writer(paths[-1]) as write:
            written = 0
            while written < shard and done < size:
                words, copy = originals[number % len(originals)], number // len(originals)
                if copy:
                    words, count = list(words), int(len(words) * rng.choice(RATES))
                    for at in numbers.integers(0, len(words), count).tolist():
                        words[at] = vocabulary[(at * 7919 + copy * 104729) % len(vocabulary)]
                line = json.dumps(dict(id=f"{number}", text=" ".join(words))).encode()
                write([line])
                written, done, number = written + len(line), done + len(line), number + 1
    return paths


# ------------------------------------------------------------------------------------------------------------ signing


def signing(source: Path, rounds: int) -> None:
    import datasketch

    how = near_duplicates.read_options({}).signing
    texts = texts_of(source, 20_000_000)
    part = texts[: max(20, len(texts) // 20)]

    def ours() -> float:
        for start in range(0, len(texts), 200):
            sign_texts(texts[start : start + 200], how)
        return sum(map(len, texts))

    def theirs() -> float:
        for text in part:
            digest = datasketch.MinHash(how.numbers, seed=1)
            digest.update_batch([text[at : at + 5].encode() for at in range(len(text) - 4)])
        return sum(map(len, part))

    def theirs_of_sets() -> float:
        for text in part:
            digest = datasketch.MinHash(how.numbers, seed=1)
            digest.update_batch([shingle.encode() for shingle in {text[at : at + 5] for at in range(len(text) - 4)}])
        return sum(map(len, part))

    sign_texts(texts[:2], how)
    speeds: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, run in dict(ours=ours, datasketch=theirs, datasketch_of_sets=theirs_of_sets).items():
            began = time.process_time()
            speeds.setdefault(name, []).append(run() / 1e6 / (time.process_time() - began))
    for name, found in speeds.items():
        print(f"signing, {name}: {statistics.median(found):.2f} M characters a CPU second")
    best = statistics.median(map(max, zip(speeds["datasketch"], speeds["datasketch_of_sets"])))
    print(f"signing: {statistics.median(speeds['ours']) / best:.1f} times datasketch")


# ----------------------------------------------------------------------------------------------------------- protocol


def protocol(pairs: int) -> None:
    """Recall of planted pairs by their Jaccard similarity, in sets of 60 words, beside 1 - (1 - J^rows)^bands."""
    rng = np.random.default_rng(7)
    for name, preset in near_duplicates.PRESETS.items():
        how = Signing("words", 1, preset["bands"], preset["rows"])
        for shared in (30, 40, 46, 50, 53, 55, 57, 58, 59):
            texts = []
            for _ in range(pairs):
                words = [f"w{number:x}" for number in rng.integers(0, 2**62, 120 - shared)]
                texts += [" ".join(words[:60]), " ".join(words[60 - shared :])]
            signatures, _ = sign_texts(texts, how)
            met = np.zeros(pairs, bool)
            for keys in band_keys(signatures, how):
                met |= keys[::2] == keys[1::2]
            true = shared / (120 - shared)
            error = (signatures[::2] == signatures[1::2]).mean(1) - true
            print(
                f"protocol, {name}: J {true:.3f}: recall {met.mean():.4f}, "
                f"theory {1 - (1 - true**how.rows) ** how.bands:.4f}; "
                f"estimate off by {error.mean():+.4f} on average, {error.std():.4f} as a rule"
            )


# ------------------------------------------------------------------------------------------------------- whole stages


def run_ours(shards: list[Path], folder: Path, memory: int) -> dict:
    options = dict(preset="fineweb")
    phases = near_duplicates.phases(options, len(shards), memory)
    made: dict[str, list[Path]] = dict(documents=shards)
    for phase in phases:
        made[phase.name] = [folder / phase.name / f"{number:05d}" for number in range(len(phase.split(made)))]
    seconds, kept = {}, 0
    for phase in phases:
        began = time.process_time()
        own = phase.own(made) or [{}] * len(made[phase.name])
        for inputs, output, more in zip(phase.split(made), made[phase.name], own):
            output.mkdir(parents=True)
            counts = phase.run(flat(inputs), output, {**options, **more})
            kept += counts["documents"] if phase.name == "remove" else 0
        seconds[phase.name] = round(time.process_time() - began, 1)
    return dict(kept=kept, phases=seconds)


class _WhiteSpace:
    def word_tokenize(self, text: str) -> list[str]:
        return text.split()


def run_datatrove(shards: list[Path], folder: Path, memory: int) -> dict:
    import xxhash
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupFilter, minhash
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it logs much
    minhash.load_word_tokenizer = lambda language: _WhiteSpace()
    how = minhash.MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(precision=64))
    paths = {name: str(folder / name) for name in ("signatures", "buckets", "removed", "kept")}
    reader = JsonlReader(str(shards[0].parent), compression="zstd", glob_pattern="*.zst")
    signing = minhash.MinhashDedupSignature(paths["signatures"], config=how)
    # 0.10 hands text to xxhash, which 4 refuses
    signing._hash_func = lambda text: xxhash.xxh64_intdigest(text.encode())
    stages = {
        "sign": ([reader, signing], len(shards)),
        "buckets": ([MinhashDedupBuckets(paths["signatures"], paths["buckets"], config=how)], 14),
        "cluster": ([MinhashDedupCluster(paths["buckets"], paths["removed"], config=how)], 1),
        "filter": (
            [
                reader,
                MinhashDedupFilter(paths["removed"]),
                JsonlWriter(paths["kept"], output_filename="${rank}.jsonl.zst", compression="zstd"),
            ],
            len(shards),
        ),
    }
    seconds = {}
    for name, (steps, tasks) in stages.items():
        began = time.process_time()
        done = LocalPipelineExecutor(steps, tasks=tasks, logging_dir=str(folder / f"log-{name}"), workers=1).run()
        seconds[name] = round(time.process_time() - began, 1)
    return dict(kept=done.stats[-1].stats["total"].total if done.stats else None, phases=seconds)


def measured(run, *arguments) -> dict:
    """What `run` returns, with the CPU and wall seconds and the peak of memory (GB) of a process of its own."""

    def body(queue):
        began, before = time.perf_counter(), _peak()
        found = run(*arguments)
        cpu = sum(getattr(resource.getrusage(resource.RUSAGE_SELF), name) for name in ("ru_utime", "ru_stime"))
        queue.put(dict(found, cpu=cpu, wall=time.perf_counter() - began, peak=_peak(), before=before))

    queue = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=body, args=(queue,))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{run.__name__} ended with {process.exitcode}")
    return queue.get()


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def whole(source: Path, folder: Path, size: int, memory: int, peer: bool) -> None:
    maker = multiprocessing.get_context("fork").Pool(1)  # the texts it holds are not to count
    shards = maker.apply(write_corpus, (source, folder / "in", size, 32_000_000))
    maker.terminate()
    found = {}
    for name, run in dict(ours=run_ours, datatrove=run_datatrove).items():
        if name == "ours" or peer:
            found[name] = one = measured(run, shards, folder / name, memory)
            told = ", ".join(f"{phase} {seconds}" for phase, seconds in one["phases"].items())
            print(
                f"{size / 1e6:.0f} MB, {name}: CPU {one['cpu']:.1f} s ({told}), wall {one['wall']:.1f} s, "
                f"peak {one['peak']:.2f} GB, {one['kept']} documents kept",
                flush=True,
            )
    if peer:
        ratios = {name: found["datatrove"][name] / found["ours"][name] for name in ("cpu", "wall")}
        print(
            f"{size / 1e6:.0f} MB: {ratios['cpu']:.1f} times datatrove by CPU time, {ratios['wall']:.1f} by wall time"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, type=Path, help="JSON lines with real text")
    parser.add_argument("--size-mb", type=int, default=100, help="0: no whole stages")
    parser.add_argument(
        "--memory-sizes-mb", type=int, nargs="*", default=[], help="the stage alone, on these sizes too"
    )
    parser.add_argument("--memory-gb", type=float, default=1.0, help="budget of a task")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--protocol-pairs", type=int, default=1000, help="planted pairs of every similarity; 0: none")
    parser.add_argument("--skip-signing", action="store_true")
    parser.add_argument("--skip-peer", action="store_true")
    asked = parser.parse_args()
    if asked.protocol_pairs:
        protocol(asked.protocol_pairs)
    if not asked.skip_signing:
        signing(asked.input, asked.rounds)
    for number, size in enumerate([asked.size_mb, *asked.memory_sizes_mb] if asked.size_mb else []):
        folder = Path(tempfile.mkdtemp(prefix="near-duplicates-"))
        try:
            whole(asked.input, folder, size * 10**6, int(asked.memory_gb * 1e9), not (number or asked.skip_peer))
        finally:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
