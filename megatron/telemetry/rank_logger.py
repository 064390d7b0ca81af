# SPDX-License-Identifier: Apache-2.0
"""A logger for your own code, which writes on some ranks only.

    log = get_logger(ranks=[0])
    log.info("a line of rank 0")
    log.warning("a line of two ranks", ranks=[0, 3])

Lines go to standard output, where the progress bar and the short lines of a terminal give way to them.
"""

import logging
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Optional

from megatron.settings import rank_env

NAME = "megatron.own"


class RankLogger(logging.LoggerAdapter):
    """A logger of the standard library whose methods take `ranks`, as Colossal-AI's: the ranks that write the line.

    ranks: those that write lines without `ranks` of their own; None: all
    """

    def __init__(self, logger: logging.Logger, ranks: Optional[Sequence[int]] = None):
        super().__init__(logger, {})
        self.ranks = ranks

    def log(self, level: int, msg: object, *args: Any, ranks: Optional[Sequence[int]] = None, **more: Any) -> None:
        """Write a line on this rank, if it is one of `ranks`."""
        wanted = self.ranks if ranks is None else ranks
        if wanted is None or rank_env.ranks().rank in wanted:
            more["stacklevel"] = more.get("stacklevel", 1) + 1  # the line that called, and not this one
            super().log(level, msg, *args, **more)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        extra: Mapping[str, Any] = dict(rank=rank_env.ranks().rank, **(kwargs.get("extra") or {}))
        return msg, {**kwargs, "extra": extra}


class _StandardOutput(logging.StreamHandler):
    """Writes to what `sys.stdout` is at the moment: a console may stand in its place."""

    def __init__(self):
        logging.Handler.__init__(self)

    @property
    def stream(self):
        return sys.stdout


def get_logger(name: str = "", ranks: Optional[Sequence[int]] = None) -> RankLogger:
    """A logger whose lines have time, rank, level and place.

    name: shown in its lines, below `megatron.own`. ranks: that write; None: all
    """
    top = logging.getLogger(NAME)
    if not any(isinstance(one, _StandardOutput) for one in top.handlers):
        handler = _StandardOutput()
        form = " [%(asctime)s] rank %(rank)s %(levelname)s %(name)s %(filename)s:%(lineno)d: %(message)s"
        handler.setFormatter(logging.Formatter(form, "%Y-%m-%d %H:%M:%S"))
        top.addHandler(handler)
        top.setLevel(logging.INFO)
        top.propagate = False
    return RankLogger(top.getChild(name) if name else top, ranks)
