# SPDX-License-Identifier: Apache-2.0
"""Generation of models whose layers keep a state of each text (gated delta nets, Mamba-2): equal to full passes, however
prompts are cut, texts are mixed, preempted and searched.
"""

import pytest
import torch

from megatron.inference.engine import Engine, bytes_of_a_state
from megatron.inference.generation import generate
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling, Search
from megatron.model.cache import PagedCache
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model
from tests.inference.engine_mixes import alone, check_mix, requests_of

LONGEST, VOCABULARY = 40, 60
COMMON = dict(hidden_size=32, num_attention_heads=4, seq_length=LONGEST, hidden_dropout=0.0, attention_dropout=0.0)
COMMON |= dict(position_embedding_type="rope", init_method_std=0.3)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=6)
MAMBA = dict(mamba_num_groups=2, mamba_num_heads=4, mamba_head_dim=8, mamba_state_dim=6)
SHAPES = {
    "gated delta nets": dict(
        num_layers=3, experimental_attention_variant="gated_delta_net", linear_attention_freq="[1,0,1]", **DELTA
    ),
    "Mamba-2": dict(num_layers=5, hybrid_layer_pattern="M*-M-", **MAMBA),
    "Mamba-2 beside attention": dict(num_layers=5, hybrid_layer_pattern="P-P*P", mamba_rms_norm=False, **MAMBA),
    "both": dict(num_layers=4, hybrid_layer_pattern="MG-*", **MAMBA, **DELTA),
}


@pytest.fixture(scope="module", params=SHAPES)
def model(request):
    made = GPT(Model(**COMMON, **SHAPES[request.param]), Mesh(), VOCABULARY).eval()
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.normal_(0, 0.3, generator=torch.Generator().manual_seed(number))
    return made


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def continued(model, prompt: list[int], count: int) -> list[int]:
    """By full passes."""
    text = list(prompt)
    for _ in range(count):
        text.append(model.logits(torch.tensor(text)[:, None])[-1, 0].argmax().item())
    return text[len(prompt) :]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cuts", [[20], [1] * 20, [7, 1, 1, 11], [1, 19], [3, 3, 3, 11]])
def test_scores_do_not_depend_on_where_a_text_is_cut(model, cuts):
    """Beside another text, whose tokens are between its own."""
    one, other = (torch.tensor(text) for text in prompts(20, 20))
    cache, found, done = PagedCache(blocks=8, block_size=5), [], 0
    with torch.inference_mode():
        for number, count in enumerate(cuts):
            stop, more = done + count, min(20, number + 1)
            cache.begin([(stop, [(0, 4)]), (more, [(4, 4)])], [done, more - 1], names=[5, 2])
            tokens = torch.cat((one[done:stop], other[more - 1 : more]))
            found.append(model.logits(tokens[:, None], cache=cache)[:count, 0])
            done = stop
        whole = model.logits(one[:, None])[:, 0]
    assert whole.abs().max() > 1
    torch.testing.assert_close(torch.cat(found), whole, rtol=1e-5, atol=1e-5 * whole.abs().max().item())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("sizes", [dict(max_batch=3), dict(max_batch=4, blocks=14, block_size=4, chunk=8)])
def test_texts_that_come_and_go_are_those_of_full_passes(model, sizes):
    """With few blocks, texts are preempted and computed again; one begins as another does."""
    texts = prompts(9, 1, 17, 5, 12)
    texts.append(texts[2][:16] + texts[0])
    engine, wanted = Engine(model, longest=LONGEST, **sizes), {}
    for text in texts:
        wanted[engine.add(Request(tuple(text), Sampling(12, greedy=True)))] = continued(model, text, 12)
    found = {number: [] for number in wanted}
    while engine.busy:
        for output in engine.step():
            found[output.request] += [output.new.token] if output.new else []
    assert found == wanted
    if "blocks" in sizes:
        assert engine.stats().preemptions > 0
    assert len(engine.stage.cache._states) <= len(texts)
    assert len(engine.stage.cache._snapshots) <= 2 * sizes["max_batch"] + 2
    engine.close()


@pytest.mark.sampled(5)
def test_mixes_are_as_each_text_is_alone(model):
    """Random lengths, draws, cancellations, beginnings in common, small caches."""
    requests = requests_of(5, 12, VOCABULARY)
    wanted = [alone(model, request) for request in requests]
    for seed in range(4):
        check_mix(model, requests, wanted, seed)


@pytest.mark.sampled(2)
def test_a_beginning_is_taken_over_with_its_state(model):
    """Of a text that has ended, at the last block whose state was copied; and not after a change of the weights."""
    first, more = prompts(21, 6)
    engine = Engine(model, longest=LONGEST, max_batch=2, block_size=4, chunk=8)

    def answer(prompt: list[int], count: int) -> tuple[list[int], int]:
        engine.add(Request(tuple(prompt), Sampling(count, greedy=True)))
        new, before = [], engine.stats().cached_tokens
        while engine.busy:
            new += [output.new.token for output in engine.step() if output.new]
        return new, engine.stats().cached_tokens - before

    reply, cached = answer(first, 6)
    assert (reply, cached) == (continued(model, first, 6), 0)
    second = first + reply + more
    again, cached = answer(second, 6)
    assert again == continued(model, second, 6)
    assert cached in (20, 24)  # the end of a chunk, or of a block of the reply
    other = first[:8] + more  # a part of it
    found, cached = answer(other, 6)
    assert found == continued(model, other, 6) and cached in (0, 8)  # the first copies may have gone
    with torch.no_grad():
        model.embedding.word.weight.mul_(-1)
    engine.weights_changed()
    found, cached = answer(second, 6)
    assert (found, cached) == (continued(model, second, 6), 0)
    with torch.no_grad():
        model.embedding.word.weight.mul_(-1)
    engine.close()


def test_beams_go_on_from_the_states_of_their_texts(model):
    [prompt] = prompts(6)
    beams, sampling = Search(num_beams=3), Sampling(8)
    cached, again = (
        generate(model, [prompt], sampling, beams, longest=LONGEST, use_cache=use) for use in (True, False)
    )
    assert cached == again


def test_memory_of_a_state_is_that_of_its_tensors(model):
    cache = PagedCache(blocks=2, block_size=4)
    cache.begin([(3, [(0, 1)])], [0])
    with torch.inference_mode():
        model.logits(torch.tensor([1, 2, 3])[:, None], cache=cache)
    held = sum(one.numel() * one.element_size() for state in cache._states[0].values() for one in state)
    assert held == bytes_of_a_state(model) > 0
