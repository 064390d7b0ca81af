# SPDX-License-Identifier: Apache-2.0
"""Random mixes of requests for the generation engine, and what each of them gives alone, without a cache.

python -m tests.inference.engine_mixes 10000     # mixes: lengths, seeds, cancellations, small caches; all equal
"""

import random
import sys
from dataclasses import dataclass, replace

import torch

from megatron.inference.choices import RowState, choose
from megatron.inference.engine import Engine
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling

LONGEST = 32
STARTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8], [2, 7, 1, 8, 2, 8, 1, 8]]  # that several prompts have in common


@dataclass
class Alone:
    """What a request gives by itself: its new tokens, why it ended, log-probabilities [tokens, v] of the next."""

    tokens: list[int]
    finish: str
    logprobs: torch.Tensor


@torch.no_grad()
def alone(model, request: Request) -> Alone:
    """The text of one request, each token from a pass over the whole text so far."""
    text, limit = list(request.prompt), min(request.sampling.tokens_to_generate, LONGEST - len(request.prompt))
    state = RowState(request.sampling, request.prompt, limit=limit, end=request.end, index=request.index)
    finish = "length"
    while len(state.new) < limit:
        logits = model.logits(torch.tensor(text).unsqueeze(1))[:, 0]  # [t, v]
        token = choose(logits[-1:], [state]).item()
        if token in state.ends:
            finish = "stop"
            break
        state.append(token)
        text.append(token)
    return Alone(state.new, finish, model.logits(torch.tensor(text).unsqueeze(1))[:, 0].double().log_softmax(-1))


def requests_of(seed: int, count: int, vocabulary: int) -> list[Request]:
    """Requests of all kinds."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        start = draw.choice([[], *STARTS])[: draw.randint(0, 12)]
        prompt = (*start, *(draw.randrange(vocabulary) for _ in range(draw.randint(0 if start else 1, 16))))
        sampling = draw.choice(
            [
                Sampling(greedy=True),
                Sampling(temperature=0.8, top_k=40, top_p=0.95),
                Sampling(temperature=1.5, repetition_penalty=1.3),
                Sampling(top_k=1),
            ]
        )
        sampling = replace(sampling, tokens_to_generate=draw.choice([1, 2, 5, 12, 40]), sampling_seed=draw.randrange(3))
        end = draw.choice([None, *range(0, vocabulary, vocabulary // 40)])
        more = dict(logprobs=draw.choice([None, None, 0, 3]), prompt_logprobs=draw.random() < 0.3)
        found.append(Request(prompt[:28], sampling, index=draw.randrange(4), end=end, **more))
    return found


def sizes_of(seed: int) -> dict[str, int]:
    """The sizes of the engine of a mix."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4, 7, 16])
    one = -(-LONGEST // size)
    blocks = one + draw.choice([0, 1, one, 4 * one])
    return dict(block_size=size, blocks=blocks, chunk=draw.choice([1, 3, 8, 64]), max_batch=draw.randint(1, 6))


def check_mix(model, requests: list[Request], wanted: list[Alone], seed: int, within: float = 1e-4) -> dict[str, int]:
    """Run a random mix of these requests; each text has to be the one that it is alone. Returns counts of events.

    within: how far log-probabilities may be off
    """
    draw, engine = random.Random(seed), Engine(model, longest=LONGEST, **sizes_of(seed))
    to_come = [draw.randrange(len(requests)) for _ in range(draw.randint(1, 10))]
    running, ended, cancelled = {}, {}, set()
    while to_come or engine.busy:
        while to_come and draw.random() < 0.4:
            place = to_come.pop()
            running[engine.add(requests[place])] = place, []
        if running and draw.random() < 0.05:
            number = draw.choice(list(running))
            engine.cancel(number)
            cancelled.add(number)
        for output in checked_step(engine):
            place, outputs = running[output.request]
            outputs.append(output)
            if output.finish:
                ended[output.request] = running.pop(output.request)
    assert not running and engine.pool.free == engine.pool.blocks
    assert engine.step() == []
    engine.close()
    if engine.link.answers:
        assert len(engine.stage.states) <= len(ended)
    for number, (place, outputs) in ended.items():
        check(requests[place], wanted[place], outputs, number in cancelled, within)
    stats = engine.stats()
    return dict(cached=stats.cached_tokens, preempted=stats.preemptions, cancelled=len(cancelled), texts=len(ended))


def checked_step(engine: Engine) -> list:
    """A step, in which each text may write only into its own, unfinished block, and into blocks that it gets now."""
    scheduler, pool = engine._scheduler, engine.pool
    plan, following = scheduler.plan, pool._next

    def checked():
        tables, full, got = {text: set(text.table.blocks) for text in scheduler.running}, set(pool._digest), []
        pool._next = lambda *arguments: got.append(following(*arguments)) or got[-1]
        rows, everything = plan(), []
        for row in rows:
            blocks = row.text.table.blocks[row.start // pool.size : -(-row.stop // pool.size)]
            assert set(blocks) <= tables.get(row.text, set()) - full | set(got), "a shared block is rewritten"
            everything += blocks
        assert len(set(everything)) == len(everything), "two texts write into a block"
        return rows

    scheduler.plan = checked
    try:
        return engine.step()
    finally:
        scheduler.plan, pool._next = plan, following


def check(request: Request, wanted: Alone, outputs: list, cancelled: bool, within: float) -> None:
    """The outputs of a request have to say what it gives alone."""
    *before, last = outputs
    assert all(output.finish is None and output.new for output in before)
    tokens = [output.new.token for output in outputs if output.new]
    if cancelled:
        assert last.finish == "cancelled" and last.new is None and tokens == wanted.tokens[: len(tokens)]
    else:
        assert (tokens, last.finish) == (wanted.tokens, wanted.finish), (tokens, wanted)
    first = len(request.prompt) - 1
    for place, output in enumerate(outputs):
        if output.new:
            check_score(output.new, wanted.logprobs[first + place], request.logprobs, within)
    if request.prompt_logprobs and tokens:
        assert [score.token for score in outputs[0].prompt] == list(request.prompt)
        assert outputs[0].prompt[0].logprob is None and outputs[0].prompt[0].top == ()
        for place, score in enumerate(outputs[0].prompt[1:]):
            check_score(score, wanted.logprobs[place], request.logprobs or 0, within)
    else:
        assert not any(output.prompt for output in outputs)


def check_score(score, logprobs: torch.Tensor, count, within: float) -> None:
    """A token's log-probability and the likeliest ones against log-probabilities [v]."""
    if count is None:
        assert score.logprob is None and score.top == ()
        return
    assert abs(score.logprob - logprobs[score.token].item()) < within
    best = logprobs.topk(count)
    assert len(score.top) == count
    for (token, logprob), value in zip(score.top, best.values.tolist(), strict=True):
        assert abs(logprob - value) < within and abs(logprobs[token].item() - value) < within


def main(mixes: int) -> None:
    from tests.inference.conftest import make_small_gpt

    torch.set_num_threads(1)
    model = make_small_gpt()
    requests = requests_of(0, 400, model.vocab_size)
    wanted, sums = [alone(model, request) for request in requests], {}
    for seed in range(mixes):
        found = check_mix(model, requests, wanted, seed)
        sums = {name: sums.get(name, 0) + number for name, number in found.items()}
    print(f"{mixes} mixes, all equal: {sums}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
