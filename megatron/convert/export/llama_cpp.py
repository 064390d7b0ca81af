# SPDX-License-Identifier: Apache-2.0
"""Run a GGUF file in llama.cpp (the package xllamacpp). Needs no torch.

llama.cpp ends its process at a file that it cannot use. So `asked` runs it in a process of its own.
"""

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.errors import CheckpointError, MissingPackage

SECONDS = 3600  # for all prompts of a comparison


class LlamaCpp:
    """A GGUF file in llama.cpp, in this process: log-probabilities, and the ids of texts."""

    def __init__(self, path: Path, context: int, plain: int = 0, threads: int = 1):
        """plain: a token of ordinary text"""
        import xllamacpp as x

        self.plain = plain
        settings = x.CommonParams()
        settings.model.path, settings.n_ctx, settings.n_parallel = str(path), context, 1
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
        settings.cache_type_k = settings.cache_type_v = x.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = x.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        settings.warmup, settings.verbosity, settings.n_gpu_layers = False, 0, 0
        self.server = x.Server(settings)

    def likeliest(self, prompt: list[int], count: int) -> list[tuple[int, float]]:
        """The `count` likeliest tokens after a prompt, with their log-probabilities."""
        # It reports nothing at a token that is a part of a character: a plain one is forced. Probabilities ignore that.
        forced = dict(logit_bias=[[self.plain, 1e4]], post_sampling_probs=False)
        request = dict(prompt=prompt, n_predict=1, n_probs=count, temperature=0.0, cache_prompt=False, **forced)
        answer = self.server.handle_completions(request)
        try:
            [choice] = answer["choices"]
            return [(one["id"], one["logprob"]) for one in choice["logprobs"]["content"][0]["top_logprobs"]]
        except (KeyError, ValueError, TypeError, IndexError):
            raise CheckpointError(f"llama.cpp does not answer: {json.dumps(answer)[:300]}") from None

    def encode(self, text: str, prompt: bool = False) -> list[int]:
        """The ids of a text, without tokens around it. prompt: with those, and with special tokens where they are named"""
        body = json.dumps(dict(content=text, add_special=prompt, parse_special=prompt)).encode()
        address, kind = f"{self.server.listening_address}/tokenize", {"Content-Type": "application/json"}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(address, body, kind), timeout=60) as answer:
            return json.load(answer)["tokens"]


def asked(
    path: Path,
    *,
    context: int,
    plain: int,
    threads: int,
    prompts: Sequence[list[int]],
    count: int,
    texts: Sequence[tuple[str, bool]],
) -> tuple[list[list[tuple[int, float]]], list[list[int]]]:
    """(the likeliest tokens after each prompt, the ids of each text), by a process of its own. texts: see `encode`

    Raises CheckpointError, with llama.cpp's last words, if it cannot use the file.
    """
    work = dict(
        path=str(path), context=context, plain=plain, threads=threads, prompts=prompts, count=count, texts=texts
    )
    root = str(Path(__file__).resolve().parents[3])
    search = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-m", "megatron.convert.export.llama_cpp"],
        input=json.dumps(work),
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SECONDS,
        env=os.environ | dict(PYTHONPATH=search, GGML_NO_BACKTRACE="1"),
    )
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()][-3:]
        raise CheckpointError(
            f"llama.cpp cannot use the exported file: its process ended with {done.returncode}",
            "\n  ".join(said),
            "nothing was written",
        )
    found = json.loads(done.stdout.splitlines()[-1])
    return found["likeliest"], found["ids"]


def require() -> None:
    """Raise SettingsError where the package is not installed."""
    try:
        found = sys.modules["xllamacpp"] if "xllamacpp" in sys.modules else importlib.util.find_spec("xllamacpp")
    except ValueError:
        found = None
    if found is None:
        raise MissingPackage(
            "logits are compared with llama.cpp's before anything is written, which needs xllamacpp",
            do="pip install xllamacpp, or --no-check to export without the comparison",
        )


def main() -> None:
    """Answer the questions on standard input, as JSON; the answer is the last line."""
    work: dict[str, Any] = json.load(sys.stdin)
    client = LlamaCpp(Path(work["path"]), work["context"], work["plain"], work["threads"])
    likeliest = [client.likeliest(prompt, work["count"]) for prompt in work["prompts"]]
    print(
        "\n" + json.dumps(dict(likeliest=likeliest, ids=[client.encode(*text) for text in work["texts"]])), flush=True
    )
    os._exit(0)  # its threads wait for more


if __name__ == "__main__":
    main()
