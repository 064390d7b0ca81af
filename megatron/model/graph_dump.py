# SPDX-License-Identifier: Apache-2.0
"""The graphs that `--torch-compile` makes of layers, as code to read (`--dump-graph DIR`)."""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path


@cache  # of a process: its pipeline chunks count their graphs together
def dumping_backend(folder: str, rank: int, then: Callable | None = None) -> Callable:
    """A backend for torch.compile that writes each graph to DIR/rank_R/graph_NNN.py and compiles it as torch does without.

    A file has the forward pass of a graph with the shapes of its tensors, as it was traced: one for each piece of code,
    and one more whenever shapes or modes are others. Those of an earlier run go. Raises OSError.

    then: a backend instead of torch's default, inductor
    """
    own, numbers = Path(folder) / f"rank_{rank}", itertools.count()
    own.mkdir(parents=True, exist_ok=True)
    for old in own.glob("graph_*.py"):
        old.unlink()

    def backend(graph, inputs):
        compile_graph = then
        if compile_graph is None:
            from torch._inductor.compile_fx import compile_fx as compile_graph
        code = graph.print_readable(print_output=False)
        (own / f"graph_{next(numbers):03d}.py").write_text(f"{code.rstrip()}\n", encoding="utf-8")
        return compile_graph(graph, inputs)

    return backend
