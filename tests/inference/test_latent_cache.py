# SPDX-License-Identifier: Apache-2.0
"""Generation with multi-latent attention: a cache of latents gives what passes over whole texts give, in both of its forms,
for prompts cut anywhere, mixes of texts, beams, ranks, and products of other kinds.
"""

import pytest
import torch

from megatron.errors import SettingsError
from megatron.inference.engine import bytes_of_a_token
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling, Search
from megatron.model.cache import PagedCache
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.mla.decode import CachedLatents
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.linear_product import LinearProduct
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Model
from megatron.tools import export, prune
from tests.inference.engine_mixes import alone, check_mix, requests_of
from tests.inference.test_convert import save

LATENT = dict(
    position_embedding_type="rope",
    swiglu=True,
    normalization="RMSNorm",
    disable_bias_linear=True,
    qk_layernorm=True,
    multi_latent_attention=True,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_head_dim=8,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
)
SIZES = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=16, max_position_embeddings=16)
ONE_PRODUCT = dict(LATENT, q_lora_rank=None, qk_layernorm=False, v_head_dim=12, window_size="9,0")
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5, 8, 9, 7]]
FORMS = {"absorbed": lambda self, s, t: False, "expanded": lambda self, s, t: True, "either": None}


@pytest.fixture(params=FORMS)
def form(request, monkeypatch):
    if FORMS[request.param]:
        monkeypatch.setattr(CachedLatents, "expanding_is_less", FORMS[request.param])
    return request.param


@pytest.mark.sampled(2)
@pytest.mark.parametrize("settings", [LATENT, ONE_PRODUCT], ids=["two latents", "one latent"])
@pytest.mark.parametrize("cut", [1, 5, 17, 31])
def test_a_text_cut_anywhere_is_the_whole_text(small_gpt, settings, cut, form):
    """Prompts in pieces, then token by token, in blocks of any order."""
    model = small_gpt(scale=3.0, **settings)
    tokens = torch.randint(0, 40, (32, 1), generator=torch.Generator().manual_seed(cut))
    cache, found, done = PagedCache(blocks=7, block_size=5), [], 0
    blocks = [(4, 2), (0, 1), (2, 1), (6, 1), (1, 1), (3, 1)]
    with torch.inference_mode():
        for count in [cut, *[min(cut, 7)] * 2, *[1] * 32]:
            count = min(count, 32 - done)
            if count:
                cache.begin([(done + count, blocks)], [done])
                found.append(model.logits(tokens[done : done + count], cache=cache))
                done += count
        whole = model.logits(tokens)
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-5 * whole.abs().max().item(), rtol=0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("settings", [LATENT, ONE_PRODUCT], ids=["two latents", "one latent"])
def test_a_text_does_not_depend_on_its_neighbours(small_gpt, settings):
    """Mixes with small caches, cancellations and common beginnings, against each request alone without a cache."""
    model = small_gpt(**settings)
    requests = requests_of(1, 10, model.vocab_size)
    wanted, sums = [alone(model, request) for request in requests], {}
    for seed in range(6):
        found = check_mix(model, requests, wanted, seed)
        sums = {name: sums.get(name, 0) + number for name, number in found.items()}
    assert min(sums.values()) > 0, sums


@pytest.mark.parametrize("sampling", [Sampling(12, greedy=True), Sampling(12, temperature=0.8, top_k=40)])
def test_the_cache_changes_nothing(small_gpt, sampling):
    model = small_gpt(**LATENT)
    together = generate(model, PROMPTS, sampling, longest=32)
    assert together == generate(model, PROMPTS, sampling, longest=32, use_cache=False)
    assert generate(model, PROMPTS[:1], sampling, longest=32) == together[:1]


def test_beams(small_gpt):
    model, way = small_gpt(**LATENT), (PROMPTS, Sampling(6), Search(4))
    assert generate(model, *way, longest=32) == generate(model, *way, longest=32, use_cache=False)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("way", ["tp", "pp"])
def test_ranks_share_a_model(run_ranks, tmp_path, way):
    """Two ranks of tp, whose caches are equal; two stages."""
    save(tmp_path, dict(SIZES, **LATENT))
    wanted = texts_of(0, tmp_path, Mesh())
    assert run_ranks(2, lambda rank: texts_of(rank, tmp_path, Mesh(rank, **{way: 2}))) == [wanted] * 2


def texts_of(rank: int, folder, mesh: Mesh) -> list[list[int]]:
    loaded = load_model(str(folder), mesh=mesh)
    return generate(loaded.model, PROMPTS, Sampling(8, greedy=True), longest=loaded.longest)


def test_the_memory_of_a_token(small_gpt):
    """Latent and rotary key of two layers, in fp32 on a CPU; no rank of tp has less."""
    assert bytes_of_a_token(small_gpt(**LATENT)) == 2 * (16 + 4) * 4
    facts = GPTFacts(Model(2, 32, 4, 32, **LATENT), 40)
    assert [facts.cached_numbers(range(2), tp) for tp in (1, 4)] == [40, 40]


def test_up_products_of_other_kinds(small_gpt):
    """A kind of linear layer computes keys and values itself: their weight alone does not say them."""
    model = small_gpt(**LATENT)

    class Doubled(LinearProduct):
        def transform(self, weight):
            return 2 * weight

    for n, block in model.blocks.items():
        layer = block.attention.kv_up
        layer.product = Doubled(layer, f"blocks.{n}.attention.kv_up", model.facts.settings)
    tokens, cache = torch.arange(12).unsqueeze(1), PagedCache(blocks=3, block_size=4)
    with torch.inference_mode():
        whole, found = model.logits(tokens), []
        for n in range(12):
            cache.begin([(n + 1, [(0, 3)])], [n])
            found.append(model.logits(tokens[n : n + 1], cache=cache))
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_weights(tmp_path, kind):
    save(tmp_path, dict(SIZES, **LATENT))
    model = load_model(str(tmp_path), quantize=QuantizeOptions(quantize=kind, quantize_group_size=2)).model
    way = (PROMPTS, Sampling(6, greedy=True))
    assert generate(model, *way, longest=16) == generate(model, *way, longest=16, use_cache=False)


def test_a_program_with_a_cache_is_refused(tmp_path):
    save(tmp_path / "ours", dict(SIZES, **LATENT))
    with pytest.raises(SettingsError, match="--kind generation: a program's cache has keys and values of each head"):
        export.main(
            f"--load {tmp_path / 'ours'} --output {tmp_path / 'out'} --format torch-export --kind generation".split()
        )


def test_heads_are_pruned(tmp_path):
    """The smaller model has the weights of half of the heads, and writes with its cache what it writes without."""
    before = save(tmp_path / "ours", dict(SIZES, **LATENT))
    prune.main(f"--load {tmp_path / 'ours'} --save {tmp_path / 'out'} --target-num-attention-heads 2".split())
    loaded = load_model(str(tmp_path / "out"))
    up = loaded.model.blocks["0"].attention.kv_up.weight
    whole = before["blocks.0.attention.kv_up.weight"]
    assert up.shape == (2, 14, 16) and all(any(torch.equal(one, head) for head in whole) for one in up)
    way = dict(longest=loaded.longest)
    found = generate(loaded.model, PROMPTS, Sampling(6, greedy=True), **way)
    assert found == generate(loaded.model, PROMPTS, Sampling(6, greedy=True), use_cache=False, **way)
