# SPDX-License-Identifier: Apache-2.0
"""The planner's model of data parallelism as lists for the simulator: each message of a chunk is in two parts, one that
has to be over before computation goes on, and one beside the pass.
"""

from megatron.pipeline.schedule import Op


def coarse(plan, times, cost):
    """(lists, cost of any (rank, op)) of a plan with `ShardingTimes`. cost: kind or (rank, op) -> time of a pass."""
    time_of = cost if callable(cost) else lambda rank, op: cost[op.kind]
    share = dict(G=times.gather_overlap, H=times.gather_overlap, R=times.reduce_overlap)
    whole = dict(G=times.gather, H=times.gather, R=times.reduce)

    def seconds(rank, op):
        if op.kind in "GHR":  # what is beside the pass is the second part of a gather, and the first of a reduction
            beside = (op.piece == "b") == (op.kind != "R")
            return whole[op.kind] * (share[op.kind] if beside else 1 - share[op.kind])
        return time_of(rank, op.whole) if op.piece == "y" else 0.0

    return [_rank(ops, times) for ops in plan], seconds


def _rank(ops, times):
    first = {op.chunk: op for op in reversed(ops) if op.kind == "F"}
    last = {op.chunk: op for op in ops if op.kind in "BW"}
    once = [op for op in ops if first.get(op.chunk) == op and times.zero in (1, 2)]
    found = [Op("G", 0, op.chunk, part) for op in once for part in "ab"]
    if not times.gather_overlap:
        found += [Op("g", 0, op.chunk, part) for op in once for part in "ab"]
    for op in ops:
        message = lambda kind, part, op=op: Op(kind, op.micro, op.chunk, part)
        found.append(op._replace(piece="x"))
        each, ends = times.reduces(op.kind), times.zero < 2 and times.reduce_overlap and last.get(op.chunk) == op
        after = []
        if times.gathers(op.kind):
            start, wait = ("G", "g") if op.kind == "F" else ("H", "h")
            found += [message(start, "a"), message(wait, "a"), message(start, "b")]
            after = [message(wait, "b")]
        elif times.gather_overlap and op in once:
            found.append(Op("g", 0, op.chunk, "a"))
            after = [Op("g", 0, op.chunk, "b")]
        found += [message("R", "a")] * bool(each or ends) + [op._replace(piece="y"), *after]
        found += [message("r", "a"), message("R", "b"), message("r", "b")] if each else []
        found += [op._replace(piece="z")] + [message("R", "b")] * bool(ends)
    if times.zero < 2 and not times.reduce_overlap:
        found += [Op("R", op.micro, op.chunk, "b") for op in last.values()]
    return found
