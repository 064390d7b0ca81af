# SPDX-License-Identifier: Apache-2.0
"""A whole corpus recipe: MB of input a second by stage and end to end, by the local runner and by Ray on the same cores.

    python benchmarks/corpus.py --input corpus.jsonl --vocab-file vocab.json --merge-file merges.txt --mb 256 --workers 2 \
        --evaluation-set lambada_test.jsonl
    python benchmarks/corpus.py --recipe recipe.yaml --runners local ray

The input is repeated with changes until it has --mb of text; each runner starts in an empty folder, as a command of its
own, in turn. Ray's start is told apart: its overhead counts from its first task to the end. Both have to make the same
bytes.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

RECIPE = """input: {input}
shard-mb: {shard_mb}
stages:
  - filter: [gate, language, ftfy, gopher]
  - near-duplicates: {{preset: fineweb}}
{decontaminate}  - shuffle: {{seed: 7}}
  - tokenize: {{tokenizer-type: GPT2BPETokenizer, vocab-file: {vocab}, merge-file: {merges}, append-eod: true}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--input", type=Path, help="JSON lines that are repeated")
    parser.add_argument("--vocab-file")
    parser.add_argument("--merge-file")
    parser.add_argument("--evaluation-set", type=Path, help="JSON lines whose n-grams are cut out of the corpus")
    parser.add_argument("--recipe", type=Path, help="another recipe, with its own input")
    parser.add_argument("--mb", type=float, default=256, help="text, in 10^6 bytes")
    parser.add_argument("--shard-mb", type=float, default=64)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--runners", nargs="+", default=["local", "ray"])
    parser.add_argument("--repeats", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        recipe = asked.recipe or make_recipe(asked, Path(folder))
        seconds: dict[str, list[float]] = {runner: [] for runner in asked.runners}
        digests = {}
        for repeat in range(asked.repeats):
            for runner in asked.runners:
                output = Path(folder) / f"{runner}-{repeat}"
                took, first = run(recipe, output, runner, asked.workers)
                seconds[runner].append(took - first)
                digests[runner] = final_digest(output)
                print(f"{runner}: {took:.1f} s, {first:.1f} s of them before its first task was done", flush=True)
                if repeat == 0:
                    tell_stages(output)
                shutil.rmtree(output)
        best = {runner: min(rows) for runner, rows in seconds.items()}
        print("behind the first task: " + ", ".join(f"{runner} {took:.1f} s" for runner, took in best.items()))
        if {"local", "ray"} <= best.keys():
            print(f"Ray's overhead: {best['ray'] / best['local'] - 1:+.1%}")
        print("same bytes" if len(set(digests.values())) == 1 else f"DIFFERENT BYTES: {digests}")


def make_recipe(asked, folder: Path) -> Path:
    """The recipe over a corpus made of the input: each copy of a document has some words of its own changed."""
    rng = random.Random(1)
    with open(asked.input) as file:
        documents = [json.loads(line) for line in file]
    path, size, copy = folder / "corpus.jsonl", 0, 0
    with open(path, "w") as out:
        while size < asked.mb * 1e6:
            for document in documents:
                words = document["text"].split(" ")
                for _ in range(copy and max(1, len(words) // 4)):
                    words[rng.randrange(len(words))] = f"w{rng.randrange(10**6)}"
                text = " ".join(words)
                size += len(text.encode())
                out.write(json.dumps(dict(document, text=text)) + "\n")
                if size >= asked.mb * 1e6:
                    break
            copy += 1
    decontaminate = ""
    if asked.evaluation_set:
        words = [sys.executable, "-m", "megatron.tools.contamination", "register", "TEST", asked.evaluation_set]
        subprocess.run([*words, "--index", folder / "test.ngrams"], cwd=ROOT, env=environment(), check=True)
        decontaminate = f"  - decontaminate: {{index: {folder / 'test.ngrams'}, action: cut}}\n"
    recipe = folder / "recipe.yaml"
    shown = dict(input=path, shard_mb=asked.shard_mb, vocab=asked.vocab_file, merges=asked.merge_file)
    shown["decontaminate"] = decontaminate
    recipe.write_text(RECIPE.format(**shown))
    return recipe


def run(recipe: Path, output: Path, runner: str, workers: int) -> tuple[float, float]:
    """(seconds from start to exit, seconds until the first task was committed)."""
    words = [sys.executable, "-m", "megatron.tools.corpus", "run", str(recipe), "--output", str(output)]
    words += ["--runner", runner, "--workers", str(workers)]
    started, first = time.perf_counter(), 0.0
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=said, stderr=subprocess.STDOUT)
        while process.poll() is None:
            if not first and next(output.glob("tasks/*/*/receipt.json"), None):
                first = time.perf_counter() - started
            time.sleep(0.05)
        took = time.perf_counter() - started
        if process.returncode:
            said.seek(0)
            sys.exit(said.read())
    return took, first


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


def tell_stages(output: Path) -> None:
    from megatron.corpus.driver import counts_by_phase
    from megatron.corpus.plan import load_plan

    plan = load_plan(output)
    counts = counts_by_phase(plan, output)
    size = next(iter(counts.values()))["bytes"] / 1e6
    print(f"  {size:.1f} MB of text, {len(plan.tasks)} tasks")
    for name, found in counts.items():
        speed = size / max(found["seconds"], 1e-3)
        print(f"  {name:<28} {found['tasks']:>5} tasks {found['seconds']:>8.1f} core-s {speed:>8.1f} MB/core-s")


def final_digest(output: Path) -> str:
    """Of the token files or shards: what names paths of its own is left out."""
    state = hashlib.sha256()
    for path in sorted((output / "final").glob("*")):
        if path.suffix in (".bin", ".idx", ".zst"):
            state.update(path.read_bytes())
    return state.hexdigest()


if __name__ == "__main__":
    main()
