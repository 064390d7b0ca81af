# SPDX-License-Identifier: Apache-2.0
"""Settings of single layers, as --layer-settings lists them: LAYERS: NAME=VALUE NAME=VALUE; LAYERS: ...

    >>> read_layer_settings("3,7-8: ffn_hidden_size=1024 num_query_groups=2; 0: no_op=mlp")[8]
    {'ffn_hidden_size': '1024', 'num_query_groups': '2'}

Layers count from 0; 7-9 are three of them. `no_op` is attention or mlp: the layer has no such part. Pure.
"""

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache

FLAG, NO_OP, PARTS = "--layer-settings", "no_op", ("attention", "mlp")
MOST = 1 << 16  # layers that a range may reach
_NAME = re.compile(r"(?:^|[\s,])(?:--)?([A-Za-z][\w-]*)\s*=")


@lru_cache
def read_layer_settings(text: str) -> Mapping[int, Mapping[str, str]]:
    """Layer -> name -> value. Raises ValueError with what is wrong, in words."""
    found: dict[int, dict[str, str]] = {}
    for entry in filter(str.strip, text.split(";")):
        layers, colon, words = entry.partition(":")
        if not colon:
            raise ValueError(f"{entry.strip()!r} has no colon between layers and settings")
        for layer in _numbers(layers):
            own = found.setdefault(layer, {})
            for name, value in _pairs(words):
                if own.get(name, value) != value:
                    raise ValueError(f"layer {layer} has {name} {own[name]} and {value}")
                own[name] = value
    if not found:
        raise ValueError("it lists no layer")
    return found


def written(settings: Mapping[int, Mapping[str, object]]) -> str:
    """The text of settings of layers; layers with equal ones stand together.

    >>> written({0: {"no_op": "mlp"}, 2: {"ffn_hidden_size": 8}, 3: {"ffn_hidden_size": 8}})
    '0: no_op=mlp; 2-3: ffn_hidden_size=8'
    """
    alike: dict[str, list[int]] = {}
    for layer, own in sorted(settings.items()):
        if own:
            alike.setdefault(" ".join(f"{name}={value}" for name, value in sorted(own.items())), []).append(layer)
    return "; ".join(f"{numbers(layers)}: {words}" for words, layers in alike.items())


def numbers(layers: Sequence[int]) -> str:
    """Ascending numbers, with ranges.

    >>> numbers([0, 2, 3, 4, 9])
    '0,2-4,9'
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][1] == layer - 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def _numbers(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if not match or match[2] and int(match[2]) < int(match[1]):
            raise ValueError(f"{part.strip()!r} is no layer, and no range of layers such as 7-9")
        if int(match[2] or match[1]) > MOST:
            raise ValueError(f"{part.strip()!r} is beyond the layers of any model")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return found


def _pairs(text: str) -> list[tuple[str, str]]:
    matches = list(_NAME.finditer(text))
    if not matches or text[: matches[0].start()].strip(" ,"):
        raise ValueError(f"{text.strip()!r} are no settings such as ffn_hidden_size=1024")
    ends = [*(match.start() for match in matches[1:]), len(text)]
    pairs = [(match[1].replace("-", "_"), text[match.end() : end].strip(" ,")) for match, end in zip(matches, ends)]
    for name, value in pairs:
        if not value or " " in value:
            raise ValueError(f"{name} has the value {value!r}")
    return pairs
