# SPDX-License-Identifier: Apache-2.0
"""A suspicious step that only other devices can judge: kept in --save, and compared when a launch comes to it again.

    keep(folder, step)                      # then the run ends with exit code 16
    before = kept(folder)                   # the next launch, from the last checkpoint, on other nodes or in another layout
    judged(before, now)                     # ("software or data", "... has the same bits on ...")

A resumed run is exact, so it comes to the step with the bits of the run before: in the same layout, and in any with
--batch-invariant-mode. Needs no torch.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.storage.durable import replace_file

NAME = "rerun.json"
SOFTWARE, EARLIER, OPEN = "software or data", "earlier devices", "not transient"


class DisputedStep(NamedTuple):
    """The result of a step, and where it was computed.

    numbers: loss and gradient norm, as `float.hex` writes them; places: of each rank in order, its machine and device;
    layout: sizes of the axes; invariant: bits do not depend on the layout
    """

    iteration: int
    numbers: list[str]
    places: list[str]
    layout: dict[str, int]
    invariant: bool


def judged(before: DisputedStep, now: DisputedStep) -> tuple[str, str]:
    """(verdict, in words) on a step that was computed twice on the same devices, in each of two launches.

    >>> one = DisputedStep(4, ["nan", "nan"], ["n1", "n2"], dict(tp=2), False)
    >>> judged(one, one._replace(places=["n3", "n4"]))
    ('software or data', 'computed again on n3, n4, it has the same bits as on n1, n2')
    >>> judged(one, one._replace(places=["n3", "n4"], numbers=["0x1p+2", "0x1p+0"]))[0]
    'earlier devices'
    >>> judged(one, one._replace(places=["n3", "n2"]))[1]
    'computed again, it has the same bits, and n2 has the same part of it as before'
    """
    if before.layout != now.layout and not (before.invariant and now.invariant):
        return OPEN, "computed again in another layout, where bits are others (--batch-invariant-mode keeps them)"
    here, there = (", ".join(dict.fromkeys(one.places)) for one in (now, before))
    if before.numbers != now.numbers:
        return EARLIER, f"it has other bits on {here} than on {there} before, twice on each: a device there is wrong"
    alike = zip(before.places, now.places) if before.layout == now.layout else ()
    same = dict.fromkeys(one for one, other in alike if one == other)
    if before.layout != now.layout:  # in parts of other sizes
        same = dict.fromkeys(now.places) if set(now.places) == set(before.places) else {}
    if not same:
        return SOFTWARE, f"computed again on {here}, it has the same bits as on {there}"
    if before.layout != now.layout:
        return SOFTWARE, f"computed again on {here} in another layout, it has the same bits"
    return OPEN, f"computed again, it has the same bits, and {', '.join(same)} has the same part of it as before"


def kept(folder: Path) -> Optional[DisputedStep]:
    """The step that an earlier launch has kept; None: none, or it cannot be read."""
    with suppress(OSError, ValueError, TypeError):
        return DisputedStep(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    return None


def keep(folder: Path, step: DisputedStep) -> None:
    """Keep a step for the next launch. Raises OSError where the folder cannot be written."""
    replace_file(folder / NAME, json.dumps(step._asdict()).encode())


def forget(folder: Path) -> None:
    """Remove what is kept."""
    (folder / NAME).unlink(missing_ok=True)
