# SPDX-License-Identifier: Apache-2.0
"""Named model shapes, for `--model-name-or-path`.

    >>> preset("gpt2-medium")["num_layers"], preset("gpt3-6.7B")["hidden_size"]
    (24, 4096)

GPT-2: Radford et al. 2019; GPT-3: Brown et al. 2020 (arXiv:2005.14165), table 2.1; 22B: Korthikanti et al. 2022
(arXiv:2205.05198), table 3; 39B to 1T: Narayanan et al. 2021 (arXiv:2104.04473), table 1; CPM: Zhang et al. 2020
(arXiv:2012.00413). PaddleNLP's 170B is the 175B.
The 1.3B has 16 heads, as in suites that train it; the paper's 24 do not divide 2048.
A name also selects a vocabulary, if $MEGATRON_CACHE has a folder of this name.
"""

import os
from pathlib import Path
from typing import Any

from megatron.settings.decoder_shapes import DECODERS

SHAPES = {  # layers, hidden size, heads, sequence length
    "gpt2-small": (12, 768, 12, 1024),
    "gpt2-medium": (24, 1024, 16, 1024),
    "gpt2-large": (36, 1280, 20, 1024),
    "gpt2-xl": (48, 1600, 25, 1024),
    "125M": (12, 768, 12, 1024),
    "345M": (24, 1024, 16, 1024),
    "350M": (24, 1024, 16, 1024),
    "760M": (24, 1536, 16, 1024),
    "1.3B": (24, 2048, 16, 1024),
    "2.7B": (32, 2560, 32, 1024),
    "6.7B": (32, 4096, 32, 1024),
    "13B": (40, 5120, 40, 4096),
    "22B": (48, 6144, 64, 2048),
    "39B": (48, 8192, 64, 2048),
    "76B": (60, 10240, 80, 2048),
    "145B": (80, 12288, 96, 2048),
    "170B": (96, 12288, 96, 2048),
    "175B": (96, 12288, 96, 2048),
    "310B": (96, 16384, 128, 2048),
    "530B": (105, 20480, 128, 2048),
    "1T": (128, 25600, 160, 2048),
    "cpm-large-cn": (32, 2560, 32, 1024),
    "cpm-small-cn-distill": (12, 768, 12, 1024),
}

# Models that share one vocabulary folder, if a name has no folder of its own; and the files of these folders.
SHARED = {"gpt2-": "gpt2", "gpt3-": "gpt2", "gpt-cpm-": "gpt-cpm"}
FILES = {"gpt2": "vocab.json and merges.txt", "gpt-cpm": "sentencepiece.model"}

# Settings that select a vocabulary, or none: they override the name of a model.
VOCABULARY = ("vocab_file", "merge_file", "tokenizer_model", "vocab_size", "mock_data", "use_checkpoint_args")


def cache_folder() -> Path:
    """The folder of named vocabularies."""
    return Path(os.environ.get("MEGATRON_CACHE") or Path.home() / ".cache" / "megatron")


def shared(name: str) -> str:
    """The folder name that a model shares with others, or its own name."""
    return next((folder for start, folder in SHARED.items() if name.startswith(start)), name)


def cached(name: str) -> Path | None:
    """The folder of a named vocabulary; None if the cache has none."""
    return next((path for path in (cache_folder() / name, cache_folder() / shared(name)) if path.is_dir()), None)


def where_to_put(name: str | None) -> str:
    """The remedy for a vocabulary that is not in the cache, for a message; "" for a name without one."""
    files = FILES.get(shared(name)) if name else None
    return f", or put {files} into {cache_folder() / name}" if files else ""


NAMES = (*SHAPES, *DECODERS)


def preset(name: str) -> dict[str, Any] | None:
    """The settings of a named shape; None for an unknown name. `gpt3-`, `gpt-` and a trailing `-en` are optional."""
    if name.lower() in DECODERS:
        return DECODERS[name.lower()]
    short = name.lower().removesuffix("-en").removeprefix("gpt3-").removeprefix("gpt-")
    short = "gpt2-small" if short == "gpt2" else short
    for known, (layers, hidden, heads, length) in SHAPES.items():
        if known.lower() == short:
            return dict(
                num_layers=layers,
                hidden_size=hidden,
                num_attention_heads=heads,
                seq_length=length,
                max_position_embeddings=length,
            )
    return None
