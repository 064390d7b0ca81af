# SPDX-License-Identifier: Apache-2.0
"""What the libraries of --moe-flex-dispatcher-backend serve. Needs neither torch nor them.

Read in their sources: DeepEP 2.1.0 (`deep_ep/buffers/legacy.py`, `csrc/kernels/legacy/launch.cuh`), and the branch
hybrid-ep (`csrc/hybrid_ep/config.cuh`).
"""

from collections.abc import Callable
from typing import NamedTuple, Optional

FORMATS = ("bf16",)  # of tokens; both libraries have fp8 as well, which this suite does not send
LEAVE_OUT = "leave --moe-flex-dispatcher-backend out: tokens go in two hops by torch.distributed then"
NODE = 8  # GPUs of a node in DeepEP
MULTIPLES = dict(deepep=8, hybridep=16)  # of numbers of a token: 16 and 32 bytes
# Ranks of ep for which DeepEP has settings and kernels -> tokens from each rank of a node that its buffer has room for.
DEEPEP_RANKS = dict.fromkeys((2, 4, 8), 256) | dict.fromkeys((16, 24, 32, 48, 64), 288)
DEEPEP_RANKS |= {96: 480, 128: 560, 144: 720, 160: 720}
BETWEEN_NODES = 128  # the same from each node
MULTIPROCESSORS = 20  # of DeepEP; two are a channel, which has room of its own


class DispatchSizes(NamedTuple):
    """ep, of which `inner` are on a node, experts of a rank, and the width of a token."""

    ep: int
    inner: int
    own: int
    width: int


class Library(NamedTuple):
    """buffer: its class in the package deep_ep. source: where it comes from. problem: why it cannot serve sizes, or "".
    memory: bytes of its buffer, for its multiprocessors and the tokens of a rank
    """

    buffer: str
    source: str
    problem: Callable[[DispatchSizes], str]
    memory: Callable[[DispatchSizes, int, int], int]


def _of_deepep(of: DispatchSizes) -> str:
    if of.ep not in DEEPEP_RANKS:
        return f"DeepEP has kernels for {', '.join(map(str, DEEPEP_RANKS))} ranks of ep, not for {of.ep}"
    together = min(of.ep, NODE)
    if of.inner != together:
        return (
            f"DeepEP needs {together} ranks of ep with NVLink between them, and {of.inner} are on a node here; "
            f"--expert-tensor-parallel-size 1, and {NODE} ranks a node (--moe-ranks-per-node)"
        )
    return ""


def _of_hybridep(of: DispatchSizes) -> str:
    if of.own * of.inner % 4:
        return f"HybridEP needs a multiple of 4 experts on a node, not {of.inner} x {of.own}"
    return f"HybridEP serves up to 72 ranks with NVLink between them, not {of.inner}" if of.inner > 72 else ""


def _room_of_deepep(of: DispatchSizes, multiprocessors: int, n: int) -> int:
    """It does not depend on the tokens: a channel sends them in turn. A place has room for 128 experts and 128 scales."""
    channels, near, nodes = multiprocessors // 2, min(of.ep, NODE), -(-of.ep // NODE)
    token = 2 * of.width + 8 + 128 * (8 + 4 + 4)
    room = channels * near * (DEEPEP_RANKS.get(of.ep, 0) * token + 4 * (2 * nodes + 3))
    if nodes > 1:
        room += 2 * channels * nodes * (BETWEEN_NODES * (token + 16) + 4 * (2 * NODE + 2))
    return room


def _room_of_hybridep(of: DispatchSizes, multiprocessors: int, n: int) -> int:
    """As if all tokens came to one rank; between nodes there are those of this rank, and sums for those of the others."""
    nodes = of.ep // of.inner
    near = n * of.ep * (2 * of.width + 4 * (of.own * of.inner + of.width // 128))
    return near + (n * (1 + 3 * (nodes - 1)) * (2 * of.width + 4 * of.own * of.inner) if nodes > 1 else 0)


LIBRARIES = dict(
    deepep=Library("Buffer", "DeepEP (github.com/deepseek-ai/DeepEP)", _of_deepep, _room_of_deepep),
    hybridep=Library(
        "HybridEPBuffer", "HybridEP (github.com/deepseek-ai/DeepEP, branch hybrid-ep)", _of_hybridep, _room_of_hybridep
    ),
)


def library_problem(backend: Optional[str], of: DispatchSizes) -> str:
    """Why a library cannot send the tokens of a layout; "" if it can, or none is asked for.

    >>> library_problem("deepep", DispatchSizes(64, 8, 4, 7168)), library_problem(None, DispatchSizes(6, 6, 1, 5))
    ('', '')
    >>> library_problem("hybridep", DispatchSizes(2, 2, 1, 4096))
    'HybridEP needs a multiple of 4 experts on a node, not 2 x 1'
    """
    if not backend or of.ep == 1:
        return ""
    if of.width % MULTIPLES[backend]:
        return f"it sends tokens of a multiple of {MULTIPLES[backend]} numbers, not of {of.width}"
    return LIBRARIES[backend].problem(of)


def library_bytes(backend: str, multiprocessors: Optional[int], of: DispatchSizes, n: int) -> int:
    """Bytes of a library's buffer on a rank, which all layers share. n: tokens of a rank"""
    return LIBRARIES[backend].memory(of, multiprocessors or MULTIPROCESSORS, n)
