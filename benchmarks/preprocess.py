# SPDX-License-Identifier: Apache-2.0
"""preprocess_data.py beside plain pipelines around Hugging Face `tokenizers` and `tiktoken`, and beside
create_pretraining_data, which makes PaddlePaddle's files; alternating in one run.

    python benchmarks/preprocess.py                                   # a sample made of Python's own library
    python benchmarks/preprocess.py --input corpus.jsonl --vocab-file vocab.json --merge-file merges.txt --workers 2

A plain pipeline is what one writes first: a pool of processes takes lines, parses and encodes them, and hands ids back
to the parent, which writes them. The bare pipeline is what could be had of the fastest libraries if nothing could go wrong:
processes take halves of one file, and the parent joins theirs; no check of ids, lines, disk or memory, no sums.

All run from start to exit as commands of their own, on the same number of processes,
and those that write .bin/.idx must write the same bytes. Times are medians; MB are of JSON text; memory is that of the
largest process.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

PADDLE = "create_pretraining_data"  # takes the white space off the ends of texts, so that its bytes are its own
OURS = "import sys; sys.modules.update(dict.fromkeys({hidden})); import preprocess_data; preprocess_data.main(sys.argv[1:])"
CONTENDERS = {  # name -> libraries that it may not see, or the engine of a plain pipeline
    "preprocess_data.py": [],
    "preprocess_data.py, tiktoken alone": ["gigatoken"],
    "create_pretraining_data": [],
    "bare pipeline, gigatoken": "gigatoken",
    "plain pipeline, tiktoken": "tiktoken",
    "plain pipeline, tokenizers": "tokenizers",
}


def main() -> None:
    arguments = parse_arguments()
    if arguments.plain:
        return plain_pipeline(arguments)
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        if arguments.input is None:
            arguments.input = make_sample(Path(folder), arguments.sample_mb)
        if arguments.vocab_file is None:
            train = multiprocessing.get_context("spawn").Process(
                target=train_vocabulary, args=(folder, arguments.input)
            )
            train.start()
            train.join()
            arguments.vocab_file, arguments.merge_file = f"{folder}/vocab.json", f"{folder}/merges.txt"
        compare(arguments, folder)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--input", help="plain JSON lines with a text each (default: a sample is made)")
    parser.add_argument("--vocab-file", help="default: a vocabulary is trained")
    parser.add_argument("--merge-file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sample-mb", type=float, default=20)
    parser.add_argument("--only", nargs="*", help=f"some of: {'; '.join(CONTENDERS)}")
    parser.add_argument("--plain", help=argparse.SUPPRESS)
    parser.add_argument("--output-prefix", help=argparse.SUPPRESS)
    return parser.parse_args()


def compare(arguments: argparse.Namespace, folder: str) -> None:
    size = os.path.getsize(arguments.input) / 1e6
    names = [name for name in CONTENDERS if not arguments.only or name in arguments.only]
    times, memory, digests = {name: [] for name in names}, {}, {}
    for _ in range(arguments.repeats):
        for name in names:
            prefix = os.path.join(folder, "out")
            seconds, memory[name] = run(command(name, arguments, prefix))
            times[name].append(seconds)
            if name == PADDLE:
                continue
            digests[name] = [digest(f"{prefix}_text_document{suffix}") for suffix in (".bin", ".idx")]
            first = next(iter(digests))
            if digests[name] != digests[first]:
                sys.exit(f"{name} wrote other bytes than {first}")
    print(
        f"{size:.1f} MB, {arguments.workers} processes, {os.cpu_count()} cores, median of {arguments.repeats}; same bytes"
    )
    print(f"{'':36} {'seconds':>8} {'MB/s':>8} {'memory':>8}   speed of {names[0]} over it")
    for name in names:
        seconds = statistics.median(times[name])
        ratio = statistics.median(other / ours for other, ours in zip(times[name], times[names[0]]))
        print(f"{name:36} {seconds:8.2f} {size / seconds:8.1f} {memory[name]:5.0f} MB   {ratio:.2f} x")


def digest(path: str) -> str:
    """A file's hash, read in pieces: a child's peak memory starts from that of this process."""
    result = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            result.update(piece)
    return result.hexdigest()


def command(name: str, arguments: argparse.Namespace, prefix: str) -> list[str]:
    hidden = CONTENDERS[name]
    files = ["--vocab-file", arguments.vocab_file, "--merge-file", arguments.merge_file]
    shared = ["--input", arguments.input, "--output-prefix", prefix, "--workers", str(arguments.workers), *files]
    if isinstance(hidden, str):
        return [sys.executable, __file__, "--plain", hidden, *shared]
    more = ["--tokenizer-type", "GPT2BPETokenizer", "--append-eod"]
    if name == PADDLE:
        return [sys.executable, "-m", "megatron.tools.create_pretraining_data", *shared, *more]
    return [sys.executable, "-c", OURS.format(hidden=hidden), *shared, *more]


def run(words: list[str]) -> tuple[float, float]:
    """Seconds from start to exit, and the MB of its largest process (children included)."""
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT)
    errors = process.stderr.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(errors.decode())
    unit = 1 if sys.platform == "darwin" else 1024
    return seconds, max(usage.ru_maxrss, 0) * unit / 1e6


def plain_pipeline(arguments: argparse.Namespace) -> None:
    """Lines to a pool, ids back, written by the parent."""
    import numpy as np

    from megatron.data.indexed import token_dtype, write_index

    if arguments.plain == "gigatoken":
        return bare_pipeline(arguments)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    vocab = json.loads(Path(arguments.vocab_file).read_text(encoding="utf-8"))
    dtype, eod = token_dtype(len(vocab)), vocab["<|endoftext|>"]
    lengths, counts = [], [0]
    names = (arguments.vocab_file, arguments.merge_file, arguments.plain)
    with (
        multiprocessing.get_context("fork").Pool(arguments.workers, start_encoder, names) as pool,
        open(arguments.input, encoding="utf-8", newline="\n") as lines,
        open(f"{arguments.output_prefix}_text_document.bin", "wb") as file,
    ):
        for ids in pool.imap(encode_line, lines, chunksize=32):
            if len(ids):
                file.write(np.array([*ids, eod], dtype).tobytes())
                lengths.append(len(ids) + 1)
            counts.append(len(lengths))
    write_index(f"{arguments.output_prefix}_text_document.idx", dtype, np.array(lengths), np.array(counts))


def bare_pipeline(arguments: argparse.Namespace) -> None:
    """Every process reads its share of one file and writes a part; the parent appends the parts to the first."""
    import shutil

    import numpy as np

    from megatron.data.indexed import write_index

    size, workers = os.path.getsize(arguments.input), arguments.workers
    cuts = [size * share // workers for share in range(workers + 1)]
    prefix = f"{arguments.output_prefix}_text_document"
    parts = [f"{prefix}.bin", *(f"{prefix}.{share}" for share in range(1, workers))]
    context = multiprocessing.get_context("fork")
    with context.Pool(workers) as pool:
        tasks = [(arguments, start, stop, part) for start, stop, part in zip(cuts, cuts[1:], parts)]
        lengths = np.concatenate(pool.starmap(encode_share, tasks, chunksize=1))
    with open(parts[0], "ab") as file:
        for part in parts[1:]:
            with open(part, "rb") as more:
                shutil.copyfileobj(more, file, 1 << 24)
            os.unlink(part)
    ends = np.append(0, np.cumsum(lengths > 0))
    write_index(f"{prefix}.idx", np.dtype("<u2"), lengths[lengths > 0], ends)


def encode_share(arguments: argparse.Namespace, start: int, stop: int, part: str):
    """The lines that begin in [start, stop) of the input, encoded into a file; returns their numbers of tokens."""
    import gigatoken
    import numpy as np
    import orjson
    from awkward import flatten, num

    from megatron.tokenizer.byte_level import describe, parse_merges

    vocab = Path(arguments.vocab_file).read_text(encoding="utf-8")
    merges = parse_merges(Path(arguments.merge_file).read_text(encoding="utf-8"), arguments.merge_file)
    tokenizer, eod = gigatoken.Tokenizer.from_json(describe(vocab, merges)), json.loads(vocab)["<|endoftext|>"]
    lengths = []
    with open(arguments.input, "rb") as source, open(part, "wb", buffering=0) as file:
        if start:
            source.seek(start - 1)
            source.readline()
        while (here := source.tell()) < stop and (lines := source.readlines(min(4 << 20, stop - here))):
            ids = tokenizer.encode_batch([orjson.loads(line)["text"] for line in lines], parallel=False)
            counts = np.asarray(num(ids, axis=1), np.int64)
            file.write(np.insert(np.asarray(flatten(ids)).astype("<u2"), np.cumsum(counts)[counts > 0], eod))
            lengths.append(counts + (counts > 0))
    return np.concatenate(lengths)


def start_encoder(vocab_file: str, merge_file: str, engine: str) -> None:
    """Runs in each process of the pool, which finds the function as an attribute of `encode_line`."""
    if engine == "tokenizers":
        from tokenizers import ByteLevelBPETokenizer

        model = ByteLevelBPETokenizer(vocab_file, merge_file)
        encode_line.encode = lambda text: model.encode(text).ids
    else:
        from megatron.tokenizer.byte_level import parse_merges, ranks
        from megatron.tokenizer.engines import tiktoken_engine

        vocab = json.loads(Path(vocab_file).read_text(encoding="utf-8"))
        merges = parse_merges(Path(merge_file).read_text(encoding="utf-8"), merge_file)
        encode = tiktoken_engine(*ranks(vocab, merges))
        encode_line.encode = lambda text: encode(text).tolist()


def encode_line(line: str) -> list[int]:
    return encode_line.encode(json.loads(line)["text"])


def make_sample(folder: Path, megabytes: float) -> str:
    """JSON lines of the sources and docstrings that come with Python, repeated to the size asked."""
    texts = [path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))]
    lines = [json.dumps(dict(text=text)) + "\n" for text in texts]
    path = folder / "sample.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.writelines(lines)
    return str(path)


def train_vocabulary(folder: str, corpus: str) -> None:
    from tokenizers import ByteLevelBPETokenizer

    with open(corpus, encoding="utf-8") as file:
        texts = [json.loads(line)["text"] for line in file.readlines(4_000_000)]
    model = ByteLevelBPETokenizer()
    model.train_from_iterator(texts, vocab_size=8192, special_tokens=["<|endoftext|>"], show_progress=False)
    model.save_model(folder)


if __name__ == "__main__":
    main()
