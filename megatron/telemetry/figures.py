# SPDX-License-Identifier: Apache-2.0
"""Format numbers, tables and sentences in one style for all commands, in 80 columns by default.

Counts are `22.1 B`, `5.3 M`, `12.3 k`; sizes are multiples of 10^9, 10^6 and 10^3 bytes (`38.50 GB`), as --device-memory-gb
is; times have two decimals (`3.62 s`). No torch.
"""

import math
import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 80  # columns of an output
WIDE = 100_000  # with --wide: nothing is cut or wrapped


def count(number: float) -> str:
    """Format a number of parameters, tokens or samples.

    >>> count(950), count(9_999), count(12_345), count(5_300_000), count(22.068e9), count(999_960_000)
    ('950', '9,999', '12.3 k', '5.3 M', '22.1 B', '1.0 B')
    """
    if number < 9_999.5:
        return f"{number:,.0f}"
    for factor, unit in ((1e3, "k"), (1e6, "M"), (1e9, "B")):
        if number < 999.95 * factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1e12:,.1f} T"


def size(number: float) -> str:
    """Format a number of bytes.

    >>> size(38.5e9), size(618e6), size(1536), size(40), size(999.7), size(0), size(2.664e12), size(1.0476e15)
    ('38.50 GB', '618.0 MB', '1.5 kB', '40 B', '1.0 kB', '0', '2.66 TB', '1.05 PB')
    """
    if number < 999.5:
        return f"{number:.0f} B" if number else "0"
    factor, unit, digits = _unit(number)
    return f"{number / factor:,.{digits}f} {unit}"


def part_of(used: float, whole: float) -> str:
    """Format two sizes in the unit of the second one.

    >>> part_of(39.04e9, 85.9e9), part_of(0.2e6, 1e6)
    ('39.0 of 85.9 GB', '0.2 of 1.0 MB')
    """
    factor, unit, _ = _unit(whole)
    return f"{used / factor:,.1f} of {whole / factor:,.1f} {unit}"


def _unit(number: float) -> tuple[float, str, int]:
    """(bytes of the unit, its name, decimals)."""
    if number < 0.99995e6:
        return 1e3, "kB", 1
    if number < 0.99995e9:
        return 1e6, "MB", 1
    if number < 0.999995e12:
        return 1e9, "GB", 2
    return (1e12, "TB", 2) if number < 0.999995e15 else (1e15, "PB", 2)


def seconds(number: float) -> str:
    """Format a duration in the most suitable unit.

    >>> seconds(3.6234), seconds(0.0123), seconds(2.5e-5), seconds(146.35), seconds(1800), seconds(90_000), seconds(9e5)
    ('3.62 s', '12.30 ms', '0.03 ms', '146.35 s', '30.0 min', '25.0 h', '10.4 days')
    """
    if number < 0.999995:
        return f"{1000 * number:.2f} ms"
    if number < 999.995:
        return f"{number:.2f} s"
    if number < 7200:
        return f"{number / 60:.1f} min"
    return f"{number / 3600:.1f} h" if number < 100 * 3600 else f"{number / 86400:,.1f} days"


def since(number: float) -> str:
    """Format an age in the most suitable unit.

    >>> since(119), since(600), since(9_000), since(200_000), since(-1)
    ('119 s', '10 min', '2 h', '2 d', '0 s')
    """
    for length, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if number >= 2 * length:
            return f"{number / length:.0f} {unit}"
    return f"{max(0.0, number):.0f} s"


def short_duration(seconds: float) -> str:
    """Format a duration in few characters.

    >>> [short_duration(seconds) for seconds in (42.4, 261, 7500, 900000, math.inf)]
    ['42s', '4m21s', '2h05m', '10d10h', '?']
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d{hours:02d}h"
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{rest:02d}s" if minutes else f"{rest}s"


def duration(seconds: float) -> str:
    """Format a duration as hours, minutes and seconds.

    >>> duration(59.6), duration(3725), duration(200000)
    ('0:01:00', '1:02:05', '2d 07:33:20')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02d}:{minutes:02d}:{seconds:02d}" if days else f"{hours}:{minutes:02d}:{seconds:02d}"


def several(number: int, what: str, many: str = "") -> str:
    """Format a number with its noun, in the plural if needed.

    >>> several(1, "run"), several(2, "run"), several(2, "launch", "launches")
    ('1 run', '2 runs', '2 launches')
    """
    return f"{number:,} {what if number == 1 else many or f'{what}s'}"


def shortened(text: str, width: int) -> str:
    """Shorten a text to one line of at most `width` characters.

    >>> shortened("a backend's long message", 12), shortened("short", 12)
    ('a backend...', 'short')
    """
    return _cut(" ".join(text.split()), width)


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[: max(1, width - 3)].rstrip()}..."


def sentence(text: str, width: int = WIDTH) -> str:
    """Wrap a sentence to `width`; later lines are indented by two more than the first.

    >>> print(sentence("  note: a sentence that does not fit", 24))
      note: a sentence that
        does not fit
    """
    indent = " " * (len(text) - len(text.lstrip()))
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False
    )


def labelled(label: str, text: str, width: int = WIDTH, indent: int = 24) -> str:
    """Format a label and its text. All lines of the text start at column `indent`.

    >>> print(labelled("InfiniBand", "none: NCCL uses TCP", width=24, indent=14))
      InfiniBand  none: NCCL
                  uses TCP
    """
    start = f"  {label}".ljust(indent - 1) + " "
    return textwrap.fill(
        " ".join(text.split()), width, initial_indent=start, subsequent_indent=" " * indent, break_on_hyphens=False
    )


def table(
    rows: Sequence[Sequence],
    head: Sequence[str],
    left: Iterable[int] = (0,),
    width: int = WIDTH,
    spare: Sequence[str] = (),
) -> str:
    """Format a table with columns as wide as needed. Columns in `left` are aligned left, others right.

    If the table is wider than `width`, columns in `spare` (given by their heads, the first one first) are left out as
    needed. Then the longest texts are cut.

    >>> print(table([["tp2", "3.62 s", "yes"], ["pp4-zb-h1", "12.30 s", "-"]], ["layout", "a step", "offload"]))
    layout      a step  offload
    tp2         3.62 s      yes
    pp4-zb-h1  12.30 s        -
    >>> print(table([["pp4-zb-h1", "12.30 s", "-"]], ["layout", "a step", "offload"], width=15, spare=["offload"]))
    layout    a step
    pp4-...  12.30 s
    """
    cells = [list(map(str, row)) for row in [head, *rows]]
    kept, left = list(range(len(head))), set(left)
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]

    def excess() -> int:
        return sum(widths[n] + 2 for n in kept) - 2 - width

    for name in spare:
        if excess() > 0 and name in head:
            kept.remove(list(head).index(name))
    for n in sorted(left & set(kept), key=lambda n: -widths[n]):
        widths[n] = max(min(widths[n], LEAST), widths[n] - max(0, excess()))
    return "\n".join(
        "  ".join(
            _cut(row[n], widths[n]).ljust(widths[n]) if n in left else row[n].rjust(widths[n]) for n in kept
        ).rstrip()
        for row in cells
    )


LEAST = 7  # characters to keep of a text that is cut
