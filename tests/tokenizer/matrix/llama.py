# SPDX-License-Identifier: Apache-2.0
"""llama.cpp with a vocabulary: a file of a model without knowledge, and a process that opens one such file after the other.

llama.cpp ends its process at a file that it cannot use, so that it has one of its own.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron.convert.export import gguf_vocabulary
from megatron.convert.export.llama_cpp import LlamaCpp

WIDTH = 32
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")


def write(folder: Path, tokenizer, vocab_size: int) -> Path:
    """A GGUF file with the exported tokenizer in a folder, and a layer of zeros."""
    import gguf

    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    sizes = dict(context_length=64, embedding_length=WIDTH, block_count=1, feed_forward_length=WIDTH, head_count=1)
    for name, size in dict(sizes, head_count_kv=1, rope_dimension_count=WIDTH, vocab_size=vocab_size).items():
        getattr(writer, f"add_{name}")(size)
    writer.add_layer_norm_rms_eps(1e-5)
    gguf_vocabulary.add(writer, folder, tokenizer, vocab_size)
    shapes = dict(token_embd=(vocab_size, WIDTH), output=(vocab_size, WIDTH), output_norm=(WIDTH,))
    shapes |= {f"blk.0.{name}": (WIDTH, WIDTH) for name in MATRICES}
    shapes |= {f"blk.0.{name}": (WIDTH,) for name in ("attn_norm", "ffn_norm")}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder / "model.gguf"


class Process:
    """A process of `main`, started at the first file."""

    def __init__(self):
        self.process = None

    def ids(self, path: Path, texts: Sequence[tuple[str, bool]]) -> list[list[int]]:
        """The ids of each text in llama.cpp. texts: (text, whether it is a prompt)"""
        if self.process is None or self.process.poll() is not None:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self.process = subprocess.Popen([sys.executable, "-m", "tests.tokenizer.matrix.llama"], **pipes)
        self.process.stdin.write(json.dumps([str(path), list(texts)]) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("[["):
                return json.loads(line)
        raise AssertionError(f"llama.cpp does not open {path}")

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Answer lines of [path, texts] with a line of ids each."""
    for line in sys.stdin:
        path, texts = json.loads(line)
        client = LlamaCpp(Path(path), 64)
        print("\n" + json.dumps([client.encode(*text) for text in texts]), flush=True)


if __name__ == "__main__":
    main()
