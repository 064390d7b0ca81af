# SPDX-License-Identifier: Apache-2.0
"""Frozen records whose hash is computed once for each object. A search of layouts looks up such keys millions of times."""

from typing import TypeVar

Record = TypeVar("Record", bound=type)


def hashed_once(cls: Record) -> Record:
    """A decorator of a frozen dataclass.

    >>> from dataclasses import dataclass
    >>> @hashed_once
    ... @dataclass(frozen=True)
    ... class Pair:
    ...     left: int
    ...     right: int
    >>> hash(Pair(1, 2)) == hash(Pair(1, 2)), Pair(1, 2) == Pair(1, 2)
    (True, True)
    """
    of_fields = cls.__hash__

    def __hash__(self) -> int:
        try:
            return self._hash
        except AttributeError:
            self.__dict__["_hash"] = of_fields(self)
            return self._hash

    def __getstate__(self) -> dict:  # a copy of another process has another hash
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    cls.__hash__, cls.__getstate__ = __hash__, __getstate__
    return cls
