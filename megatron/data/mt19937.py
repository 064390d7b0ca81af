# SPDX-License-Identifier: Apache-2.0
"""The random number streams of C++'s std::mt19937 and std::mt19937_64, which Megatron-LM uses to order sentences.

>>> mt19937_64(5489, 10000)[-1]  # the C++ standard gives this value, [rand.predef]
np.uint64(9981545732273789042)
"""

from collections.abc import Iterator

import numpy as np

# Constants of mt19937_64, in the names of Matsumoto and Nishimura, "Mersenne Twister" (1998) and [rand.eng.mers].
N, M = 312, 156
SEED_MULTIPLIER = 6364136223846793005
UPPER, LOWER = np.uint64(0xFFFFFFFF80000000), np.uint64(0x7FFFFFFF)
A = np.uint64(0xB5026F5AA96619E9)
TEMPERING = (  # shift to the right (positive) or left, mask
    (29, np.uint64(0x5555555555555555)),
    (-17, np.uint64(0x71D67FFFEDA60000)),
    (-37, np.uint64(0xFFF7EEE000000000)),
    (43, np.uint64(0xFFFFFFFFFFFFFFFF)),
)
ONE = np.uint64(1)


def mt19937(seed: int, block: int = 1 << 16) -> Iterator[np.ndarray]:
    """Blocks of the 32-bit stream, uint32 [block]: numpy's legacy generator has the seeding of the C++ standard."""
    state = np.random.RandomState(seed % 2**32)
    while True:
        yield state.randint(0, 2**32, block, np.uint32)  # the whole range: the generator's raw numbers


def mt19937_64(seed: int, count: int) -> np.ndarray:
    """The first `count` numbers of the 64-bit stream, uint64 [count]. numpy has no such generator."""
    state = np.array(_seeded(seed % 2**64), np.uint64)
    out = np.empty(-(-count // N) * N, np.uint64)
    for start in range(0, len(out), N):
        state = _next_state(state)
        out[start : start + N] = _tempered(state)
    return out[:count]


def _seeded(seed: int) -> list[int]:
    state = [seed]
    for i in range(1, N):
        last = state[-1]
        state.append((SEED_MULTIPLIER * (last ^ (last >> 62)) + i) % 2**64)
    return state


def _next_state(old: np.ndarray) -> np.ndarray:
    """The N words of the next state. A word needs the one M positions on, which for later words is already new."""
    new = np.empty_like(old)
    new[: N - M] = _twist(old[: N - M], old[1 : N - M + 1], old[M:])
    new[N - M : -1] = _twist(old[N - M : -1], old[N - M + 1 :], new[: M - 1])
    new[-1:] = _twist(old[-1:], new[:1], new[M - 1 : M])
    return new


def _twist(upper: np.ndarray, lower: np.ndarray, far: np.ndarray) -> np.ndarray:
    y = (upper & UPPER) | (lower & LOWER)
    return far ^ (y >> ONE) ^ ((y & ONE) * A)


def _tempered(x: np.ndarray) -> np.ndarray:
    for shift, mask in TEMPERING:
        x = x ^ ((x >> np.uint64(shift) if shift > 0 else x << np.uint64(-shift)) & mask)
    return x
