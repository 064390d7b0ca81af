# SPDX-License-Identifier: Apache-2.0
"""How the settings of the network are declared, and lists of layers in settings."""

import ast
from functools import lru_cache, partial
from typing import Optional

from megatron.settings.declare import Needs, shown_by

Network = partial(Needs, of_network=True)  # a condition that the network decides
PLAIN = "test_a_network_is_the_plain_one"  # the test that shows effects of most of them
shape = shown_by(PLAIN, on_resume="another model")
formula = shown_by(PLAIN, on_resume="refused")


@lru_cache
def layer_pattern(text: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers have experts, from --moe-layer-freq: every N-th, or sums and multiples of lists of 0 and 1.

    Raises ValueError.

    >>> layer_pattern("[0]*1+[1]*2", 3), layer_pattern("2", 3), layer_pattern("([1]+[0])*2", 4)
    ((False, True, True), (True, False, True), (True, False, True, False))
    """
    words = text.strip(" '\"")
    if words.isdecimal() and int(words):
        return tuple(n % int(words) == 0 for n in range(num_layers))
    try:
        result = _listed(ast.parse(words, mode="eval").body, num_layers)
    except (SyntaxError, RecursionError, MemoryError):
        result = None
    if result is None:
        raise ValueError("no list of 0 and 1")
    if len(result) != num_layers:
        raise ValueError(f"it is for {len(result)} layers")
    return result


@lru_cache
def last_of_each(text: str, num_layers: int) -> tuple[bool, ...]:
    """Which layers a list of 0 and 1 selects, as in `layer_pattern`; a number N: the last of each N layers.

    Raises ValueError.

    >>> last_of_each("4", 8) == last_of_each("([0]*3+[1])*2", 8) == (False, False, False, True) * 2
    True
    """
    words = text.strip(" '\"")
    if not words.isdecimal() or not int(words):
        return layer_pattern(text, num_layers)
    if num_layers % int(words):
        raise ValueError(f"{num_layers} layers are not a multiple of {int(words)}")
    return tuple((n + 1) % int(words) == 0 for n in range(num_layers))


def _listed(node: ast.expr, most: int) -> Optional[tuple[bool, ...]]:
    """The value of an expression of lists of 0 and 1, + and *; None: it is another one. Raises ValueError above `most`."""
    match node:
        case ast.List(elements):
            values = [element.value if isinstance(element, ast.Constant) else None for element in elements]
            return tuple(map(bool, values)) if all(value in (0, 1) for value in values) else None
        case ast.BinOp(left, ast.Add(), right):
            parts = _listed(left, most), _listed(right, most)
            return None if None in parts else parts[0] + parts[1]
        case ast.BinOp(left, ast.Mult(), ast.Constant(int(times))):
            once = _listed(left, most)
            if once and len(once) * times > most:
                raise ValueError(f"it is for {len(once) * times} layers")
            return None if once is None else once * times
    return None
