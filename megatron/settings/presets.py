# SPDX-License-Identifier: Apache-2.0
"""Named model shapes, for `--model-name-or-path`, and the rows of their embeddings.

    >>> preset("gpt2-medium")["num_layers"], preset("gpt3-6.7B")["hidden_size"], preset("7B") == preset("6.7B")
    (24, 4096, True)
    >>> published_rows("gpt2-medium"), published_rows("Qwen2.5-7B"), published_rows("gpt5")
    (50257, 152064, None)

GPT-2: Radford et al. 2019; GPT-3: Brown et al. 2020 (arXiv:2005.14165), table 2.1; 22B: Korthikanti et al. 2022
(arXiv:2205.05198), table 3; 39B to 1T: Narayanan et al. 2021 (arXiv:2104.04473), table 1; CPM: Zhang et al. 2020
(arXiv:2012.00413). PaddleNLP's 170B is the 175B.
The 1.3B has 16 heads, as in suites that train it; the paper's 24 do not divide 2048.
A name also selects a vocabulary, if $MEGATRON_CACHE has a folder of this name.
"""

import os
from pathlib import Path
from typing import Any

from megatron.errors import did_you_mean
from megatron.settings.decoder_shapes import DECODERS, ROWS

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

# Rows of the embedding where they are not those of GPT-2: of CPM, and of the papers of Megatron-LM, which pad them.
GPT2_ROWS = 50257
OTHER_ROWS = dict.fromkeys(("cpm-large-cn", "cpm-small-cn-distill"), 30000)
OTHER_ROWS |= dict.fromkeys(("22B", "39B", "76B", "145B", "310B", "530B", "1T"), 51200)
ALIASES = {"gpt2": "gpt2-small", "7b": "6.7B", "mistral-7b": "mistral-7b-v0.1"}

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
    """The folder of a named vocabulary, in the cache or in PaddleFleetX's; None if there is none."""
    own = cache_folder() / name, cache_folder() / shared(name)
    of_fleetx = Path.home() / ".cache" / "ppfleetx"  # where PaddleFleetX puts GPT-2's
    there = shared(name) == "gpt2" and all(
        (of_fleetx / f"gpt2-{file}").is_file() for file in ("vocab.json", "merges.txt")
    )
    return next((path for path in own if path.is_dir()), of_fleetx if there else None)


def not_elsewhere(name: str) -> str:
    """Where else `cached` looks for a named vocabulary, to follow a message that it is not there."""
    return ", and no gpt2-vocab.json and gpt2-merges.txt in ~/.cache/ppfleetx" * (shared(name) == "gpt2")


def where_to_put(name: str | None) -> str:
    """The remedy for a vocabulary that is not in the cache, for a message; "" for a name without one."""
    files = FILES.get(shared(name)) if name else None
    return f", or put {files} into {cache_folder() / name}" if files else ""


NAMES = (*SHAPES, *DECODERS)


def known(name: str) -> str | None:
    """The name in `NAMES`; None for an unknown one. `gpt3-`, `gpt-` and a trailing `-en` are optional."""
    short = name.lower().removesuffix("-en").removeprefix("gpt3-").removeprefix("gpt-")
    tried = [ALIASES.get(one, one).lower() for one in (name.lower(), short)]
    return next((one for one in NAMES if one.lower() in tried), None)


def preset(name: str) -> dict[str, Any] | None:
    """The settings of a named shape; None for an unknown name."""
    name = known(name)
    if name is None or name in DECODERS:
        return DECODERS.get(name)
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
    return dict(zip(sizes, SHAPES[name]), max_position_embeddings=SHAPES[name][-1])


def published_rows(name: str | None) -> int | None:
    """The rows of the embedding of a named shape, as published; None for an unknown name."""
    name = known(name) if name else None
    return None if name is None else ROWS.get(name) or OTHER_ROWS.get(name, GPT2_ROWS)


def nearest(name: str) -> str:
    """A suggestion for an unknown name: those that end with the same size, else one that is spelled alike.

    >>> nearest("70B"), nearest("qwen2-7b"), nearest("gpt2-medum")
    ('; did you mean llama-2-70b, llama-3-70b, llama-3.1-70b, llama-3.3-70b?', '; did you mean qwen2.5-7b?', \
'; did you mean gpt2-medium?')
    """
    same = [one for one in NAMES if one.lower().endswith(f"-{name.lower()}")]
    return f"; did you mean {', '.join(same)}?" if same else did_you_mean(name, NAMES)
