# SPDX-License-Identifier: Apache-2.0
"""The output of preprocessing: progress lines, and totals at the end."""

import sys

from megatron.data.formats import endings_of
from megatron.telemetry.figures import size


class Reporter:
    """Prints Megatron-LM's progress lines, with tokens/s and the time left; on a terminal, updates a single line."""

    def __init__(self, interval: int):
        self.interval, self.next, self.last = interval, interval, -1.0
        self.terminal = sys.stderr.isatty()

    def __call__(self, progress) -> None:
        complete = 0 < progress.total_input <= progress.input_bytes
        if progress.documents < self.next or (progress.seconds - self.last < 0.1 and not complete):
            return
        self.next = progress.documents // self.interval * self.interval + self.interval
        self.last = seconds = progress.seconds
        line = f"Processed {progress.documents} documents ({progress.documents / seconds:.1f} docs/s, "
        line += f"{progress.text_bytes / seconds / 1e6:.1f} MB/s). {progress.tokens / seconds / 1e6:.2f} M tokens/s"
        if progress.total_input and progress.input_bytes:
            share = min(1.0, progress.input_bytes / progress.total_input)
            line += f", {share:.0%}, ETA {duration(seconds / share - seconds)}"
        print(
            f"\r{line}\033[K" if self.terminal else line, end="" if self.terminal else "\n", file=sys.stderr, flush=True
        )

    def end(self) -> None:
        if self.terminal and self.last >= 0:
            print(file=sys.stderr)


def duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"


def print_totals(totals, seconds: float) -> None:
    for key, output in totals.outputs.items():
        documents, sequences, tokens = output["documents"], output["sequences"], output["tokens"]
        print(f"{output['prefix']}{' and '.join(endings_of(output['prefix']))} (key {key!r}):")
        print(f"  Total documents num: {documents}")
        print(f"  Total sentences num: {sequences}")
        print(f"  Total tokens num: {tokens}")
        print(f"  Average tokens per document: {tokens / documents:.2f}")
        print(f"  Average tokens per sentence: {tokens / sequences:.2f}")
    if totals.rejected:
        print(
            f"WARNING: {totals.rejected} of {totals.lines} lines are no documents: see {totals.rejected_path}"
            f"{totals.first_reason}"
        )
    for words in totals.notes:
        print(f"note: {words}")
    if totals.contamination:
        print(totals.contamination)
    print(f"{size(totals.text_bytes)} in {seconds:.2f} s ({totals.text_bytes / 1e6 / seconds:.1f} MB/s)")
