# SPDX-License-Identifier: Apache-2.0
"""The generation engine: a text is what it is alone, whatever its neighbours are, and all memory comes back."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megatron.errors import DataError, SettingsError
from megatron.fused_kernels import cpu_ops
from megatron.inference.blocks import BlockPool, Table
from megatron.inference.engine import COMPUTE, WAIT, Engine, SharedEngine, bytes_of_a_state, bytes_of_a_token
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.inference.scheduler import NONE, Scheduler, Snapshots
from tests.inference.engine_mixes import alone, check_mix, requests_of

LLAMA = dict(
    position_embedding_type="rope",
    swiglu=True,
    normalization="RMSNorm",
    num_query_groups=2,
    group_query_attention=True,
    untie_embeddings_and_output_weights=True,
    disable_bias_linear=True,
)
WINDOWED = dict(LLAMA, window_size="5,0", attn_logit_softcapping=20.0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", [{}, LLAMA, WINDOWED], ids=["gpt2", "llama", "windowed"])
def test_a_text_does_not_depend_on_its_neighbours(small_gpt, layout):
    """Random mixes with small caches, cancellations and common beginnings, against each request alone without a cache."""
    model, mixes = small_gpt(**layout), 12 if layout else 40
    requests = requests_of(1, 12 if layout else 24, model.vocab_size)
    wanted, sums = [alone(model, request) for request in requests], {}
    assert len({tuple(one.tokens) for one in wanted}) > len(requests) // 2
    for seed in range(mixes):
        found = check_mix(model, requests, wanted, seed)
        sums = {name: sums.get(name, 0) + number for name, number in found.items()}
    assert min(sums.values()) > 3, sums  # everything has happened


@pytest.mark.full
def test_many_mixes(small_gpt):
    model = small_gpt()
    requests = requests_of(2, 400, model.vocab_size)
    wanted = [alone(model, request) for request in requests]
    for seed in range(10_000):
        check_mix(model, requests, wanted, 1000 + seed)


def run(engine: Engine, requests) -> dict[int, list]:
    """All outputs of requests that come together."""
    found = {engine.add(request): [] for request in requests}
    while engine.busy:
        for output in engine.step():
            found[output.request].append(output)
    return found


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.mark.sampled(10)
@pytest.mark.plain_cpu
@DTYPES
def test_log_probabilities_are_equal_to_the_bit(small_gpt, dtype):
    """As long as nothing is shared or computed again: prompts have no common beginning, and the cache has room."""
    if dtype not in cpu_ops.FORMATS or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("products whose rows do not depend on their number are known of oneDNN with AVX2 and AVX-512")
    model = small_gpt().to(dtype)
    model.dtype, draw = dtype, random.Random(1)
    sizes = dict(longest=32, max_batch=8, block_size=4, chunk=8, packed=True)
    texts = [tuple(draw.randrange(512) for _ in range(draw.randint(1, 25))) for _ in range(8)]
    requests = [Request(text, Sampling(7), index, logprobs=4) for index, text in enumerate(texts)]
    together = list(run(Engine(model, **sizes), requests).values())
    for request, outputs in zip(requests, together, strict=True):
        [single] = run(Engine(model, **sizes), [request]).values()
        assert [output.new for output in single] == [output.new for output in outputs]


def test_texts_share_the_blocks_of_their_beginning(small_gpt):
    """In one pass, and after it; a scored prompt is computed whole; after new weights nothing is shared."""
    model = small_gpt()
    engine = Engine(model, longest=32, block_size=4)
    beginning, sampling = tuple(range(20, 31)), Sampling(3, greedy=True)
    requests = [Request((*beginning, last), sampling) for last in (1, 2, 2)]
    found = run(engine, requests)
    assert [outputs[0].cached for outputs in found.values()] == [0, 8, 8]
    assert found[1] == [output.__class__(**{**vars(output), "request": 1}) for output in found[2]]
    wanted = alone(model, requests[1])
    assert [output.new.token for output in found[2]] == wanted.tokens
    [again] = run(engine, [requests[0]]).values()
    assert again[0].cached == 8 and engine.stats().cached_tokens == 24
    [scored] = run(engine, [Request((*beginning, 1), sampling, prompt_logprobs=True)]).values()
    assert scored[0].cached == 0 and len(scored[0].prompt) == 12
    engine.weights_changed()
    [new] = run(engine, [requests[0]]).values()
    assert new[0].cached == 0 and [one.new.token for one in new] == [one.new.token for one in again]
    assert engine.pool.free == engine.pool.blocks


def test_new_weights_leave_no_copies_of_states(small_gpt, monkeypatch):
    monkeypatch.setattr("megatron.inference.engine.bytes_of_a_state", lambda model: 8)
    engine = Engine(small_gpt(), longest=32, max_batch=2)
    numbers = [engine._scheduler.snapshots.keep(name) for name in (b"one", b"other")]
    engine.weights_changed()
    copies = engine._scheduler.snapshots
    assert sorted(copies.dropped()) == sorted(numbers) and copies.longest([b"one", b"other"]) == 0
    engine.close()


def test_new_tokens_are_counted_without_the_one_that_ends_a_text(small_gpt):
    model, request = small_gpt(), Request((3, 1, 4), Sampling(8, greedy=True))
    plain = alone(model, request).tokens
    engine, counted = Engine(model, longest=32), 0
    for end in (None, plain[0], plain[5]):
        [outputs] = run(engine, [replace(request, end=end)]).values()
        tokens = plain if end is None else plain[: plain.index(end)]
        assert [one.new.token for one in outputs if one.new] == tokens
        counted += len(tokens)
        assert engine.stats().generated_tokens == counted
    assert engine.stats().prompt_tokens == 9


@pytest.mark.plain_cpu
@DTYPES
def test_new_weights_are_used(small_gpt, dtype):
    model, other = (small_gpt(scale=scale).to(dtype) for scale in (8.0, 7.0))
    model.dtype = other.dtype = dtype
    request = Request((3, 1, 4, 1, 5), Sampling(8, greedy=True))
    engine = Engine(model, longest=32, packed=True)
    packed = [layer.packed is not None for layer in model.modules() if hasattr(layer, "packed")]
    assert packed and all(packed) == any(packed) == (dtype in cpu_ops.FORMATS)
    run(engine, [request])
    model.load_state_dict(other.state_dict())
    engine.weights_changed()
    [outputs] = run(engine, [request]).values()
    assert [output.new.token for output in outputs] == alone(other, request).tokens
    engine.close()
    assert all(layer.packed is None for layer in model.modules() if hasattr(layer, "packed"))


@pytest.mark.plain_cpu
@pytest.mark.parametrize("more, packs", [(0, False), (2, True)])
def test_weights_are_packed_if_that_takes_less_than_half_of_the_memory_that_is_left(
    small_gpt, more, packs, monkeypatch
):
    model = small_gpt()
    size = sum(weight.nbytes for weight in model.parameters())
    monkeypatch.setattr("megatron.inference.engine.available_memory", lambda: 2 * size + more)
    engine = Engine(model, longest=32)
    packed = [layer.packed is not None for layer in model.modules() if hasattr(layer, "packed")]
    assert any(packed) == (packs and torch.float32 in cpu_ops.FORMATS)
    engine.close()


def test_cancelled_texts_end(small_gpt):
    """Waiting, running or unknown; each is reported once, and its blocks are free."""
    engine = Engine(small_gpt(), longest=32, max_batch=1)
    running, waiting = (engine.add(Request((1, 2, 3), Sampling(20, greedy=True))) for _ in range(2))
    assert [output.request for output in engine.step()] == [running]
    for number in (running, waiting, running, 99):
        engine.cancel(number)
    assert engine.busy and engine.pool.free == engine.pool.blocks
    outputs = engine.step()
    assert [(output.request, output.new, output.finish) for output in outputs] == [
        (running, None, "cancelled"),
        (waiting, None, "cancelled"),
    ]
    assert not engine.busy and engine.step() == []
    engine.cancel(running)
    assert not engine.busy


def test_a_stage_forgets_texts_that_have_ended(small_gpt):
    """With the next pass: those that ended, were cancelled while they ran, and were cancelled while they waited."""
    engine = Engine(small_gpt(), longest=32, max_batch=2)
    for count in range(6):
        numbers = [engine.add(Request((1, 2, 3 + index), Sampling(20))) for index in range(2)]
        engine.add(Request((5,), Sampling(1)))
        engine.step()
        assert set(engine.stage.states) == set(numbers)
        for number in (numbers[0], numbers[1], numbers[1] + 1)[: 1 + count % 3]:
            engine.cancel(number)
        while engine.busy:
            engine.step()


@pytest.mark.parametrize("longest, blocks", [(15, 1), (16, 1), (17, 2), (30, 2)])
def test_the_cache_has_room_for_as_many_texts_of_the_greatest_length_as_run(small_gpt, longest, blocks):
    """Whether or not blocks divide it; one text has to fit."""
    model = small_gpt()
    assert Engine(model, longest=longest, max_batch=3).pool.blocks == 3 * blocks
    assert Engine(model, longest=longest, blocks=blocks).pool.blocks == blocks
    with pytest.raises(SettingsError, match=f"the cache has room for {16 * (blocks - 1)} tokens"):
        Engine(model, longest=longest, blocks=blocks - 1)


@pytest.mark.parametrize("state", [0, 1000])
@pytest.mark.parametrize("more", [0, 16 * 512 - 1, 16 * 512])
def test_memory_that_is_given_has_room_for_states_and_blocks(small_gpt, state, more, monkeypatch):
    """Of each of 3 texts a state and two snapshots; then blocks of 16 tokens, of two layers with 32 numbers of 4 bytes."""
    monkeypatch.setattr("megatron.inference.engine.bytes_of_a_state", lambda model: state)
    engine = Engine(small_gpt(), longest=32, max_batch=3, memory=3 * 3 * state + 5 * 16 * 512 + more)
    assert engine.pool.blocks == 5 + (more == 16 * 512)
    assert (engine._scheduler.snapshots.most if state else engine._scheduler.snapshots) == (6 if state else None)


@pytest.mark.parametrize("layers", [[range(0, 1), range(1, 2)], [range(0, 2), range(2, 2)], [range(0), range(0, 2)]])
def test_memory_of_a_token_is_that_of_the_stage_with_most_layers(small_gpt, layers):
    model = small_gpt()
    stages = SimpleNamespace(
        pipeline=SimpleNamespace(layers=layers), chunks=[model], facts=model.facts, parameters=model.parameters
    )
    each = 2 * model.facts.settings.hidden_size * 4  # a key and a value of all heads, in fp32
    assert bytes_of_a_token(model) == 2 * each
    assert bytes_of_a_token(stages) == max(map(len, layers)) * each


def test_other_ranks_are_told_to_wait_once_in_a_while(monkeypatch):
    """After a minute without a message, and not again before another one."""
    clock, told = [0.0], []

    class Idle(SharedEngine):
        link = SimpleNamespace(alone=False, tell=lambda kind, *message: told.append((clock[0], kind)))
        _cancelled, _told = [], 0.0

        def __init__(self):
            pass

        def _computed(self):
            return []

    idle = Idle()
    monkeypatch.setattr("megatron.inference.engine.time.monotonic", lambda: clock[0])
    for clock[0] in range(0, 200, 10):
        idle.step()
        if clock[0] == 100:
            idle._tell(COMPUTE)
    assert told == [(70, WAIT), (100, COMPUTE), (170, WAIT)]


def test_requests_that_cannot_be_answered(small_gpt):
    engine = Engine(small_gpt(), longest=32)
    for prompt, what in (
        ((), "the prompt has 0 tokens"),
        ((1,) * 32, "the prompt has 32 tokens; the model can look at 32"),
        ((1, 520), "the prompt has the token 520; the model knows those from 0 to 519"),
        ((1, -1), "the token -1"),
    ):
        with pytest.raises(DataError, match=what):
            engine.add(Request(prompt, Sampling()))
    with pytest.raises(SettingsError, match="--temperature -1"):
        engine.add(Request((1,), Sampling(temperature=-1.0)))
    with pytest.raises(SettingsError, match="log-probabilities of 521 tokens: has to be 0 to 520"):
        engine.add(Request((1,), Sampling(), logprobs=521))
    assert not engine.busy
    # The last token, the longest prompt, all log-probabilities
    engine.add(Request((519,) * 31, Sampling(), logprobs=520))
    assert engine.busy
    with pytest.raises(SettingsError, match="the cache has room for 16 tokens, and a text may have 32"):
        Engine(small_gpt(), longest=32, memory=16 * 2 * 2 * 32 * 4 + 100)


def test_blocks_follow_each_other():
    """Texts that grow in turns have one run of blocks each, as long as there is room."""
    pool = BlockPool(40, 4)
    tables = [Table() for _ in range(4)]
    for tokens in range(1, 41):
        for table in tables:
            assert pool.grow(table, tokens, 40)
    assert [len(table.runs) for table in tables] == [1] * 4 and pool.free == 0
    assert not pool.grow(Table(), 1, 1)
    pool.release(tables[2])
    late = Table()
    assert pool.grow(late, 30, 30) and len(late.runs) == 1 and pool.free == 2


def test_least_recently_used_blocks_are_taken_first():
    pool, texts = BlockPool(6, 2), [[n, n + 1, n + 2, n + 3] for n in (0, 10, 20)]
    for text in texts:
        table = Table()
        pool.grow(table, 4, 4)
        pool.remember(table, text)
        pool.release(table)
    found = lambda: [pool.found(text, 2)[0] for text in texts]
    assert found() == [2, 2, 2] and pool.free == 6
    used = Table()
    assert pool.share(used, texts[0], 2) == 4  # the oldest becomes the newest
    pool.release(used)
    pool.grow(Table(), 4, 4)
    assert found() == [2, 0, 2]
    pool.grow(Table(), 4, 4)
    assert found() == [2, 0, 0]


def test_every_text_ends_and_prompts_do_not_overtake():
    """Of a hundred random schedules, without a model: with too small a cache, in any number of passes under way."""
    for seed in range(100):
        draw = random.Random(seed)
        stages, size = draw.randint(1, 3), draw.choice([1, 3, 8])
        pool = BlockPool(-(-24 // size) + draw.randint(0, 8), size)
        scheduler = Scheduler(pool, longest=24, max_batch=draw.randint(1, 8), chunk=draw.choice([2, 8]), stages=stages)
        texts, under_way, begun, passes = [], [], [], 0
        while len(texts) < 20 or scheduler.busy or under_way:
            if len(texts) < 20 and draw.random() < 0.3:
                prompt = tuple(draw.randrange(3) for _ in range(draw.randint(1, 23)))
                texts.append(scheduler.add(Request(prompt, Sampling(draw.randint(1, 23)))))
            rows = scheduler.plan() if len(under_way) < stages else []
            assert sum(row.stop - row.start for row in rows if row.stop - row.start > 1) <= scheduler.chunk
            assert len({row.text.number for row in rows}) == len(rows)
            assert all(row.stop % scheduler.chunk == 0 or row.stop == len(row.text.tokens) for row in rows)
            begun += [row.text.number for row in rows if row.text.number not in begun]
            under_way += [rows] if rows else []
            if under_way and (len(under_way) == stages or not rows):
                for row in under_way.pop(0):
                    if row.chooses:
                        scheduler.chosen(row.text, 5)
            passes += 1
            assert passes < 20_000
        assert [text.finish for text in texts] == ["length"] * 20 and begun == sorted(begun)
        assert pool.free == pool.blocks


class CopiesInAList:
    """What `Snapshots` says of its copies, by a list in the order of their last use."""

    def __init__(self, most: int):
        self.most, self.order, self.new, self.dropped, self.numbers = most, [], set(), [], {}

    def leave(self, name: bytes) -> None:
        self.order.remove(name)
        self.new.discard(name)
        self.dropped.append(self.numbers.pop(name))

    def use(self, name: bytes) -> None:
        self.order.append(self.order.pop(self.order.index(name)))

    def keep(self, name: bytes, replaced: bytes, number: int) -> None:
        if replaced in self.order:
            self.leave(replaced)
        if name in self.order:
            assert number == NONE
            self.use(name)
            return
        assert number not in [NONE, *self.numbers.values(), *self.dropped]
        self.order.append(name)
        self.new.add(name)
        self.numbers[name] = number
        for oldest in self.order[: -self.most]:
            self.leave(oldest)


def test_copies_of_states_are_those_of_a_plain_list():
    """Random uses of at most so many copies: which are there, which can be used, and which are dropped."""
    names, dropped = [bytes([n]) for n in range(6)], 0
    for seed in range(60):
        draw = random.Random(seed)
        most = draw.randint(1, 4)
        copies, plain = Snapshots(most), CopiesInAList(most)
        for count in range(80):
            kind, name = (
                draw.choice(["keep", "keep", "keep", "number", "longest", "pass", "forget"]),
                draw.choice(names),
            )
            if kind == "pass":
                assert sorted(copies.dropped()) == sorted(plain.dropped)
                dropped += len(plain.dropped)
                plain.dropped.clear()
                plain.new.clear()
                copies.begin_pass()
            elif kind == "forget" and count % 4 == 0:
                copies.forget()
                for one in list(plain.order):
                    plain.leave(one)
            elif kind == "number" and name in plain.order:
                assert copies.number(name) == plain.numbers[name]
                plain.use(name)
            elif kind == "longest":
                some = draw.sample(names, 3)
                usable = [n for n, one in enumerate(some, 1) if one in plain.order and one not in plain.new]
                assert copies.longest(some) == max(usable, default=0)
            elif kind == "keep":
                replaced = draw.choice([b"", *(one for one in names if one != name)])
                plain.keep(name, replaced, copies.keep(name, replaced))
    assert dropped > 100


@pytest.mark.parametrize("length", range(1, 10))
def test_of_new_tokens_the_last_copy_of_states_is_kept(length):
    """And each one of the prompt, where its chunks end with a block: other texts may begin there."""
    copies, size = Snapshots(99), 4
    scheduler = Scheduler(BlockPool(12, size), longest=40, max_batch=1, chunk=8, snapshots=copies)
    text = scheduler.add(Request(tuple(range(length)), Sampling(20)))
    kept = {}  # number of a copy -> its tokens
    while scheduler.busy:
        for row in scheduler.plan():
            if row.keep != NONE:
                kept[row.keep] = row.stop
            for number in copies.dropped():
                del kept[number]
            ends = {stop for stop in (8, length) if stop <= min(length, row.stop) and stop % size == 0}
            last = row.stop // size * size
            assert set(kept.values()) == ends | ({last} if last > length else set()), row.stop
            if row.chooses:
                scheduler.chosen(text, 3)


@pytest.mark.parametrize("length", [8, 9, 11, 12])
def test_a_scored_prompt_that_is_begun_again_is_not_scored_again(length):
    """What the cache has of it up to the last scored token is taken; the rest is computed, so that it is scored once."""
    pool, size = BlockPool(8, 4), 4
    scheduler = Scheduler(pool, longest=32, max_batch=1, chunk=8)
    text, scored, starts = scheduler.add(Request(tuple(range(length)), Sampling(9), prompt_logprobs=True)), [], []
    while scheduler.busy:
        for row in scheduler.plan():
            starts.append(row.start)
            scored += row.scores
            if row.chooses:
                scheduler.chosen(text, 3)
        if len(starts) in (1, 3) and scheduler.running:  # as if an older text took its blocks
            pool.release(text.table)
            text.computed = 0
            scheduler.waiting.append(scheduler.running.pop())
    assert scored == list(range(length - 1))
    assert starts[:2] == [0, min(8, length - 1) // size * size] and starts[3] == (length - 1) // size * size


@pytest.mark.parametrize("prompt, new", [(5, 3), (5, 4), (5, 5), (1, 1), (8, 1), (4, 5)])
def test_blocks_are_set_aside_for_all_tokens_but_the_last_new_one(prompt, new):
    """Whose keys and values nobody reads."""
    pool = BlockPool(12, 4)
    scheduler = Scheduler(pool, longest=32, max_batch=1, chunk=8)
    text = scheduler.add(Request(tuple(range(prompt)), Sampling(new)))
    scheduler.plan()
    assert len(text.table.aside) == -(-(prompt + new - 1) // 4)


def test_a_scored_prompt_that_is_cancelled_leaves_nothing(small_gpt):
    engine = Engine(small_gpt(), longest=32, chunk=4)
    number = engine.add(Request(tuple(range(20)), Sampling(4), prompt_logprobs=True))
    engine.step()
    assert list(engine._scores) == [number]
    engine.cancel(number)
    assert not engine._scores and not engine._texts
    engine.close()


@pytest.mark.parametrize("ranks", [1, 4])
def test_memory_of_a_state_is_that_of_a_rank(small_gpt, ranks):
    """In the model's format, of the stage that has most."""
    model, asked = small_gpt(), []
    facts = SimpleNamespace(
        state_bytes=lambda layers, tp, element: asked.append((tp, element)) or 100 * len(layers) // tp
    )
    chunk = SimpleNamespace(tp=SimpleNamespace(size=ranks))
    stages = SimpleNamespace(
        pipeline=SimpleNamespace(layers=[range(1), range(1, 4)]),
        chunks=[chunk],
        facts=facts,
        parameters=model.parameters,
    )
    assert bytes_of_a_state(stages) == 300 // ranks and set(asked) == {(ranks, 4)}


def test_texts_that_give_their_blocks_back_are_counted():
    """Of two that grow in a cache for one and a half, the newer one does, once for each time."""
    pool, given = BlockPool(6, 4), 0
    scheduler = Scheduler(pool, longest=20, max_batch=2, chunk=8)
    texts = [scheduler.add(Request(tuple(range(10 * n, 10 * n + 4)), Sampling(16))) for n in range(2)]
    while scheduler.busy:
        before = set(scheduler.running)
        rows = scheduler.plan()
        given += len(before - set(scheduler.running))
        for row in rows:
            if row.chooses:
                scheduler.chosen(row.text, 3)
    assert scheduler.preemptions == given >= 1 and [text.finish for text in texts] == ["length"] * 2
