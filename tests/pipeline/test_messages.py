# SPDX-License-Identifier: Apache-2.0
"""Messages of data parallelism as ops: every list is proved, a planted mistake is named before anything runs, and the
simulator's times are those that one can count.
"""

import pytest

from megatron.pipeline.data_parallel_messages import (
    ChunkPieces,
    Listed,
    Sharding,
    list_messages,
    pairs_of,
    passes_of,
    verify_messages,
)
from megatron.pipeline.schedule import BrokenSchedule, Op, parse_op, problems, stage_map
from megatron.pipeline.simulate import make_rank_schedules, simulate

SCHEDULES = [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2)]
SCHEDULES += [("1f1b &", 1), ("interleaved &", 2), ("zb-v &", 2)]
LAYERS = ("0", "1")
FROZEN = {  # of a chunk: pieces with weights, those that are trained, whether something before it is
    "all": (("in", *LAYERS, "out"), ("in", *LAYERS, "out"), True),
    "the last layer and behind": (("in", *LAYERS, "out"), ("1", "out"), False),
    "nothing": (("in", *LAYERS, "out"), (), False),
    "all but what is behind": (LAYERS, LAYERS, False),
}


def ops(text):
    return [parse_op(word) for word in text.split()]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("ahead, beside", [(False, False), (True, False), (False, True), (True, True)])
def test_every_list_is_proved_and_keeps_its_passes(zero, ahead, beside):
    """All schedules, also with frozen parts, and with a table that the two chunks of a rank share."""
    how, proved = Sharding(zero, zero > 0, ahead, beside), 0
    for name, chunks in SCHEDULES:
        for pp in (1, 2, 3):
            for frozen in FROZEN.values():
                for tied in (None, True, False) if chunks == 2 else (None,):
                    if problems(name, pp, 4, chunks):
                        continue
                    for passes in make_rank_schedules(name, pp, 4, chunks):
                        pieces = [ChunkPieces(2, *frozen, tied)] * chunks
                        listed = list_messages(passes, pieces, how)
                        assert passes_of(listed.ops) == passes_of(passes) and pairs_of(listed.ops) == pairs_of(passes)
                        assert sum(op.kind == "R" for part in listed for op in part) >= 1
                        proved += 1
    assert proved > 100


def test_passes_in_turns_gather_for_themselves():
    """What comes before or after one of them is in no turn; a layer of both is freed by both."""
    chunk, how = ChunkPieces(1, ("in", "0"), ("in", "0")), Sharding(3, gather_ahead=True)
    listed = list_messages(ops("F0 F1 & B0 B1"), [chunk], how)
    assert " ".join(map(str, listed.ops)) == (
        "G0:in G0:0 g0:in F0:in g0:0 F0:0 D0:0 F0:out "
        "G1:0 H0:0 F1:in g1:0 F1:0 D1:0 F1:out & B0:out h0:0 B0:0 R0:0 r0:0 E0:0 B0:in R0:in r0:in "
        "H1:0 B1:out h1:0 B1:0 R1:0 r1:0 E1:0 B1:in R1:in r1:in E1:in"
    )
    text = " ".join(map(str, listed.ops)).replace("& ", "")  # without turns the layer is there when H0:0 comes
    with pytest.raises(BrokenSchedule, match="H0:0 needs weights of chunk 0, layer 0 that are not there; they are on"):
        verify_messages(Listed([], ops(text), listed.after), [chunk], how)
    text = " ".join(map(str, listed.ops)).replace(" E0:0", "")
    with pytest.raises(
        BrokenSchedule, match="H1:0 needs weights of chunk 0, layer 0 that are not there; they are there"
    ):
        verify_messages(Listed([], ops(text), listed.after), [chunk], how)


def test_an_evaluation_gathers_and_frees():
    chunk = ChunkPieces(1, ("in", "0"), ("in", "0"))
    listed = list_messages(ops("F0 F1"), [chunk], Sharding(3))
    assert " ".join(map(str, listed.ops)) == (
        "G0:in g0:in F0:in G0:0 g0:0 F0:0 D0:0 F0:out D0:in G1:in g1:in F1:in G1:0 g1:0 F1:0 D1:0 F1:out D1:in"
    )
    assert not listed.after


@pytest.mark.parametrize(
    "zero, wanted, after",
    [  # with both overlaps, F0 B0 F1 B1
        (0, "F0:in g0:0 F0:0 g0:1 F0:1 F0:out B0 F1 B1:out B1:1 R1:1 B1:0 R1:0", "r1:1 r1:0 R0:all"),
        (1, "F0:in g0:0 F0:0 g0:1 F0:1 F0:out B0 F1 B1:out B1:1 R1:1 B1:0 R1:0", "r1:1 r1:0 R0:all"),
        (
            2,
            "F0:in g0:0 F0:0 g0:1 F0:1 F0:out B0:out B0:1 R0:1 B0:0 R0:0 r0:1 F1 B1:out B1:1 R1:1 r0:0 B1:0 R1:0 r1:1",
            "r1:0 R0:all",
        ),
    ],
)
def test_what_is_listed_for_each_stage(zero, wanted, after):
    chunk = ChunkPieces(2, LAYERS, LAYERS)
    listed = list_messages(ops("F0 B0 F1 B1"), [chunk], Sharding(zero, zero > 0, True, True))
    assert " ".join(map(str, listed.before)) == "G0:0 G0:1"
    assert (" ".join(map(str, listed.ops)), " ".join(map(str, listed.after))) == (wanted, after)


# ---- mistakes ----------------------------------------------------------------------------------------------------------

CHUNK = ChunkPieces(2, ("in", *LAYERS), ("in", *LAYERS))
THREE = (
    "G0:in g0:in F0:in G0:0 g0:0 F0:0 D0:0 G0:1 g0:1 F0:1 D0:1 F0:out "
    "B0:out H0:1 h0:1 B0:1 R0:1 r0:1 E0:1 H0:0 h0:0 B0:0 R0:0 r0:0 E0:0 B0:in R0:in r0:in E0:in"
)
LISTS = {
    3: ("", THREE, "R0:all"),
    2: (
        "G0:in G0:0 G0:1 g0:in g0:0 g0:1",
        "F0 B0:out B0:1 R0:1 r0:1 B0:0 R0:0 r0:0 B0:in R0:in r0:in "
        "F1 B1:out B1:1 R1:1 r1:1 B1:0 R1:0 r1:0 B1:in R1:in r1:in",
        "R0:all",
    ),
    1: ("G0:in G0:0 G0:1 g0:in g0:0 g0:1", "F0 F1 B0 B1", "R0:in R0:0 R0:1 r0:in r0:0 r0:1 R0:all"),
}


@pytest.mark.parametrize("zero", LISTS)
def test_the_lists_without_mistakes(zero):
    listed = Listed(*map(ops, LISTS[zero]))
    verify_messages(listed, [CHUNK], Sharding(zero))
    assert list_messages(passes_of(listed.ops), [CHUNK], Sharding(zero)) == listed


@pytest.mark.parametrize(
    "zero, was, now, words",
    [
        (3, "R0:1 r0:1", "R0:1 r0:1 R0:1", "R0:1 is there twice"),
        (3, "R0:1 r0:1", "R0:1 r0:1 R1:1 r1:1", "R1:1 reduces gradients that are not complete, or that were"),
        (3, "B0:0 R0:0 r0:0", "R0:0 r0:0 B0:0", "R0:0 reduces gradients that are not complete"),
        (3, "R0:0 r0:0", "", "gradients of chunk 0, layer 0 are never reduced"),
        (3, "R0:0 r0:0", "R0:0", "r0:in waits for a reduction that is not the oldest"),
        (3, "R0:in r0:in", "R0:in", "R0:all comes before R0:in is waited for"),
        (
            3,
            "G0:1 g0:1 F0:1 D0:1",
            "F0:1 G0:1 g0:1 D0:1",
            "F0:1 uses the weights of chunk 0, layer 1, which are not there",
        ),
        (3, "g0:1 F0:1", "F0:1 g0:1", "F0:1 uses the weights of chunk 0, layer 1, which are on their way"),
        (3, "B0:0 R0:0 r0:0 E0:0", "E0:0 B0:0 R0:0 r0:0", "B0:0 uses the weights of chunk 0, layer 0, which are not"),
        (3, "D0:0", "", "H0:0 needs weights of chunk 0, layer 0 that are not there; they are there"),
        (3, "E0:0", "", "the weights of chunk 0, layer 0 are never freed"),
        (3, "E0:in", "", "the weights of chunk 0, in are never freed"),
        (3, "F0:out B0:out", "F0:out E0:in B0:out", "B0:out uses the weights of chunk 0, in, which are not there"),
        (3, "B0:out H0:1", "H0:1", "the pieces of B0 are 1 0 in instead of out 1 0 in"),
        (3, "F0:0 D0:0 G0:1 g0:1 F0:1", "G0:1 g0:1 F0:1 F0:0 D0:0", "the pieces of F0 are in 1 0 out instead of"),
        (3, "G0:1", "G0:7", "G0:7: the rank has no weights of that name"),
        (2, "R1:0 r1:0", "R0:0 r0:0", "R0:0 is there twice"),
        (2, "R0:1 r0:1 B0:0", "B0:0 R0:1 r0:1", None),  # later is not wrong
        (2, "F1", "", "R1:1 reduces"),
        (1, "R0:0 R0:1", "R0:0 R0:1 R1:1", "R1:1 reduces gradients that are not complete, or that were reduced before"),
        (1, "B1", "R0:0 B1", "R0:0 reduces gradients that are not complete"),
        (1, "R0:all", "", "R0:all is missing"),
    ],
)
def test_a_planted_mistake_is_named(zero, was, now, words):
    text = " | ".join(LISTS[zero])
    if words and was == "F1":
        was, now = "B1:out B1:1 R1:1", "R1:1 B1:out B1:1"
    assert was in text
    listed = Listed(*(ops(part) for part in text.replace(was, now, 1).split("|")))
    if words is None:
        verify_messages(listed, [CHUNK], Sharding(zero))
        return
    with pytest.raises(BrokenSchedule) as found:
        verify_messages(listed, [CHUNK], Sharding(zero))
    assert words in str(found.value)


def test_another_pass_inside_a_pass_is_named():
    listed = Listed([], ops("F0:in F1 F0:0 F0:1 F0:out"), [])
    with pytest.raises(BrokenSchedule, match="F1 stands inside F0"):
        verify_messages(listed, [ChunkPieces(2, (), ())], Sharding(3))


# ---- times -------------------------------------------------------------------------------------------------------------


def _span(listed, message, layer=1.0):
    cost = lambda rank, op: (message if op.kind in "GHR" else layer * (1 + (op.kind == "B"))) * op.piece.isdigit()
    times = simulate([[op for part in listed for op in part]], cost=cost)
    return times, max(end for _, end in times.values())


@pytest.mark.parametrize("message", [0.5, 1.0, 3.0])
def test_times_of_stage_3_are_what_one_counts(message):
    """Four layers of 1 forward and 2 backward; gathers and reductions of a layer take the same."""
    own = tuple("0123")
    count = lambda ahead: list_messages(
        ops("F0 B0"), [ChunkPieces(4, own, own)], Sharding(3, gather_ahead=ahead, reduce_beside=ahead)
    )
    _, alone = _span(count(False), message)
    assert alone == pytest.approx(4 * 3 + 12 * message)  # 8 gathers and 4 reductions, all exposed
    times, beside = _span(count(True), message)
    if message <= 1:  # the first gather of each pass and the last reduction have nothing beside them
        assert beside == pytest.approx(4 * 3 + 3 * message)
    else:  # forward: a gather after the other, then a layer; backward: nothing but messages, and the last layer
        assert times[0, Op("F", 0)][1] == pytest.approx(4 * message + 1)
        assert beside <= alone


def test_messages_of_a_micro_batch_run_beside_products_of_another():
    """A list of one's own: the gather of F1 beside F0 and the first layer of F1."""
    chunk, how = [ChunkPieces(2, ("1",), ("1",))], Sharding(3)
    early = ops("F0:in G0:1 g0:1 F0:0 F0:1 D0:1 G1:1 F0:out F1:in F1:0 g1:1 F1:1 D1:1 F1:out")
    times, span = _span(list_messages(early, chunk, how), 1.0)
    assert times[0, Op("G", 1, 0, "1")][0] < times[0, Op("F", 1)][1] and span == pytest.approx(1 + 2 + 2)
    late = ops("F0:in G0:1 g0:1 F0:0 F0:1 D0:1 F0:out F1:in F1:0 G1:1 g1:1 F1:1 D1:1 F1:out")
    assert _span(list_messages(late, chunk, how), 1.0)[1] == pytest.approx(span + 1)


def test_ranks_of_a_pipeline_wait_for_each_other_and_for_messages():
    plan, stages = make_rank_schedules("1f1b", 2, 2), stage_map("1f1b", 2)
    chunk = ChunkPieces(1, ("0",), ("0",), learns=True)
    lists = [[op for part in list_messages(passes, [chunk], Sharding(3)) for op in part] for passes in plan]
    cost = lambda rank, op: 0.5 if op.kind in "GHR" else float(op.piece == "0") * (2 if op.kind == "B" else 1)
    times = simulate(lists, stages, cost)
    assert times[0, Op("F", 0)] == (0, 1.5)  # its gather is inside
    assert times[1, Op("F", 0)] == (1.5, 3.0)
    assert times[1, Op("B", 0)] == (3.0, 6.0)  # gather, 2, reduction
