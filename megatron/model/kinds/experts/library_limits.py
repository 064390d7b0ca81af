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
# Ranks of ep for which DeepEP has settings and kernels.
DEEPEP_RANKS = 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160


class Sizes(NamedTuple):
    """ep, of which `inner` are on a node, experts of a rank, and the width of a token."""

    ep: int
    inner: int
    own: int
    width: int


class Library(NamedTuple):
    """buffer: its class in the package deep_ep. source: where it comes from. problem: why it cannot serve sizes, or "" """

    buffer: str
    source: str
    problem: Callable[[Sizes], str]


def _of_deepep(of: Sizes) -> str:
    if of.ep not in DEEPEP_RANKS:
        return f"DeepEP has kernels for {', '.join(map(str, DEEPEP_RANKS))} ranks of ep, not for {of.ep}"
    together = min(of.ep, NODE)
    if of.inner != together:
        return (
            f"DeepEP needs {together} ranks of ep with NVLink between them, and {of.inner} are on a node here; "
            f"--expert-tensor-parallel-size 1, and {NODE} ranks a node (--moe-ranks-per-node)"
        )
    return ""


def _of_hybridep(of: Sizes) -> str:
    if of.own * of.inner % 4:
        return f"HybridEP needs a multiple of 4 experts on a node, not {of.inner} x {of.own}"
    return f"HybridEP serves up to 72 ranks with NVLink between them, not {of.inner}" if of.inner > 72 else ""


LIBRARIES = dict(
    deepep=Library("Buffer", "DeepEP (github.com/deepseek-ai/DeepEP)", _of_deepep),
    hybridep=Library("HybridEPBuffer", "HybridEP (github.com/deepseek-ai/DeepEP, branch hybrid-ep)", _of_hybridep),
)


def library_problem(backend: Optional[str], of: Sizes) -> str:
    """Why a library cannot send the tokens of a layout; "" if it can, or none is asked for.

    >>> library_problem("deepep", Sizes(64, 8, 4, 7168)), library_problem(None, Sizes(6, 6, 1, 5))
    ('', '')
    >>> library_problem("hybridep", Sizes(2, 2, 1, 4096))
    'HybridEP needs a multiple of 4 experts on a node, not 2 x 1'
    """
    if not backend or of.ep == 1:
        return ""
    if of.width % MULTIPLES[backend]:
        return f"it sends tokens of a multiple of {MULTIPLES[backend]} numbers, not of {of.width}"
    return LIBRARIES[backend].problem(of)
