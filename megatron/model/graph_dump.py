# SPDX-License-Identifier: Apache-2.0
"""Dump the graphs that `--torch-compile` makes of layers as readable code (`--dump-graph DIR`)."""

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path


@cache  # per process: its pipeline chunks share one count of graphs
def dumping_backend(folder: str, rank: int, then: Callable | None = None) -> Callable:
    """A backend for torch.compile that writes each graph to DIR/rank_R/graph_NNN.py, then compiles it as usual.

    A file holds the traced forward pass of a graph with the shapes of its tensors. There is one for each piece of code,
    and another for each new shape or mode. Files of an earlier run are removed. Raises OSError.

    then: the backend to compile with (default: torch's default, inductor)
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
