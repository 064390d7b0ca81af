# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention, gated delta nets, Mamba-2 and multi-token prediction from and to Megatron-LM's checkpoints.

`megatron_kinds.json` and `megatron_kinds.tar.xz` are what Megatron-Core itself computed and wrote
(`make_megatron_kinds.py`): names, logits, and which elements of each weight two tensor parallel ranks have.
"""

import json
import tarfile
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron.checkpoint.reader import Reader
from megatron.convert.megatron_arguments import settings_of
from megatron.convert.megatron_dist import RankStage, Reading, _module_order
from megatron.convert.megatron_names import Dictionary
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.model.gpt.facts import GPTFacts
from megatron.tools import checkpoint as tool
from tests.inference.make_megatron_kinds import LAST, S, V, arguments, drawn, tokens
from tests.inference.test_convert import GPT2, LLAMA, assert_same, loaded, save

pytestmark = pytest.mark.sampled(10)

NAMES = ("latent", "hybrid")


@cache
def recorded() -> dict:
    return json.loads(Path(__file__).with_name("megatron_kinds.json").read_text())


def weights(name: str) -> dict[str, torch.Tensor]:
    return drawn(recorded()[name]["parameters"])


def write(folder: Path, name: str, ranks: dict[str, dict], more=None, **args) -> Path:
    """Write files: name of a rank's folder -> its tensors."""
    for rank, (place, model) in enumerate(ranks.items()):
        path = folder / "iter_0000003" / place
        path.mkdir(parents=True)
        content = dict(args=arguments(name, **args), checkpoint_version=3.0, iteration=3, model=model)
        torch.save(content | (more[rank] if more else {}), path / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


def imported(folder: Path, name: str, ranks: dict[str, dict], **args) -> dict[str, torch.Tensor]:
    write(folder / "theirs", name, ranks, **args)
    tool.main(["from-megatron", str(folder / "theirs"), str(folder / "ours")])
    return loaded(folder / "ours")


def of_ranks(name: str, whole: dict[str, torch.Tensor]) -> dict[str, dict]:
    """The files of two tensor parallel ranks, with the elements that Megatron-Core gives them."""
    ranks = {}
    for rank, own in enumerate(recorded()[name]["ranks"]):
        numbers = {one: [torch.arange(a, a + n) for a, n in part["runs"]] for one, part in own.items()}
        ranks[f"mp_rank_{rank:02d}"] = {
            one: whole[one].flatten()[torch.cat(numbers[one])].view(part["shape"]) for one, part in own.items()
        }
    return ranks


@torch.no_grad()
def logits_of_depths(model) -> list[torch.Tensor]:
    """[b, s, v] of the network, and of each depth."""
    places, found = torch.arange(S).unsqueeze(1), []
    batch = tokens().t()
    context = model._context(S, places, None, None)
    x = model.embedding(batch, places, None)
    x = model.final_norm(model.run_layers(x, context)[0])
    for depth in range(1 + len(model.mtp)):
        found.append((x @ model.output_weight.t()).transpose(0, 1)[..., : model.vocab_size])
        if depth < len(model.mtp):
            ahead = batch.roll(-depth - 1, 0)
            x, _ = model.mtp[depth](x, model.embedding.embed(ahead, places), context)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_megatron_core(name, tmp_path):
    imported(tmp_path, name, {"mp_rank_00": weights(name)})
    found = logits_of_depths(load_model(str(tmp_path / "ours")).model)
    for depth, (ours, theirs) in enumerate(zip(found, recorded()[name]["logits"], strict=True)):
        theirs = torch.tensor(theirs)
        assert theirs.abs().max() > 0.3
        torch.testing.assert_close(ours[:, S - depth - LAST : S - depth], theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_two_ranks_are_the_same_model(name, tmp_path):
    (tmp_path / "whole").mkdir()
    whole = imported(tmp_path / "whole", name, {"mp_rank_00": weights(name)})
    assert_same(imported(tmp_path, name, of_ranks(name, weights(name)), tensor_model_parallel_size=2), whole)


@pytest.mark.parametrize("name", NAMES)
def test_a_distributed_checkpoint_is_the_same_model(name, tmp_path):
    with tarfile.open(Path(__file__).with_name("megatron_kinds.tar.xz")) as archive:
        archive.extractall(tmp_path, filter="data")
    shapes = recorded()[name]["parameters"]
    numbered = {one: torch.arange(torch.Size(shape).numel()).view(shape).float() for one, shape in shapes.items()}
    classic = imported(tmp_path, name, {"mp_rank_00": numbered})
    tool.main(["from-megatron", str(tmp_path / name), str(tmp_path / "back")])
    assert_same(loaded(tmp_path / "back"), classic)


@pytest.mark.parametrize("name", NAMES)
def test_an_export_is_what_megatron_core_asks_for(name, tmp_path):
    imported(tmp_path, name, {"mp_rank_00": weights(name)})
    words = ["--transformer-impl", "local", "--tp", "2"]
    tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "out"), *words])
    for place, asked in of_ranks(name, weights(name)).items():
        path = tmp_path / "out" / "release" / place / "model_optim_rng.pt"
        content = torch.load(path, weights_only=False)
        found = {one: x for one, x in content["model"].items() if x is not None}
        assert set(content["model"]) == {*asked, *recorded()[name]["others"]}
        for one, x in asked.items():
            padded = "word_embeddings" in one or "output_layer" in one  # to 128 rows on each rank
            assert padded or torch.equal(found[one], x), one
        args = vars(content["args"])
        for one, value in vars(arguments(name)).items():
            assert one == "group_query_attention" or args.get(one) == value, (one, args.get(one), value)


DECODER = dict(LLAMA, norm_epsilon=1e-5, make_vocab_size_divisible_by=8)
ROTATED = dict(DECODER, num_query_groups=None, group_query_attention=False, kv_channels=None)
LATENT = dict(
    ROTATED,
    multi_latent_attention=True,
    rope_type="yarn",
    kv_lora_rank=12,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=8,
)
DELTA = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=4, linear_value_head_dim=6)
SCANS = DELTA | dict(mamba_num_groups=2, mamba_num_heads=4, mamba_head_dim=4, mamba_state_dim=6)
MIXED = dict(num_experts=4, moe_ffn_hidden_size=24)
SHAPES = {
    "queries without a latent": LATENT,
    "a latent of queries, experts, depths": LATENT
    | MIXED
    | dict(q_lora_rank=8, qk_layernorm=True, moe_layer_freq="[0]*1+[1]*3", mtp_num_layers=2),
    "gated delta nets in turn": DECODER
    | DELTA
    | dict(experimental_attention_variant="gated_delta_net", linear_attention_freq="2", attention_output_gate=True),
    "a pattern": DECODER | SCANS | MIXED | dict(num_layers=8, hybrid_layer_pattern="MEG*-M-G", moe_latent_size=10),
    "a pattern with latents and depths": LATENT
    | SCANS
    | dict(num_layers=4, hybrid_layer_pattern="M+-G/+-/+-", mtp_num_layers=2),
    "tied, with depths": dict(GPT2, make_vocab_size_divisible_by=8, mtp_num_layers=1, position_embedding_type="rope"),
}


@pytest.mark.parametrize("words", ["", "--tp 2 --pp 2", "--transformer-impl local --tp 2 --dtype bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_there_and_back_in_any_layout(shape, words, tmp_path):
    save(tmp_path / "ours", SHAPES[shape])
    tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "theirs"), *words.split()])
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "back")])
    before, after = loaded(tmp_path / "ours"), loaded(tmp_path / "back")
    if "bf16" in words:
        exact = ("A_log", "dt_bias", ".D", "router.load", "router.scored_load", "expert_bias")
        before = {name: x if name.endswith(exact) else x.bfloat16().float() for name, x in before.items()}
    assert_same(before, after)
    with Reader(tmp_path / "back" / "iter_0000000") as reader:
        saved = reader.state["config"]["model"]
    for one, value in SHAPES[shape].items():
        assert value is None or saved[one] == value or one == "make_vocab_size_divisible_by", one


@pytest.mark.parametrize("name", NAMES)
def test_moments_have_the_rows_of_their_weights(name, tmp_path):
    """Adam's state of two ranks, numbered as their modules are: twice and three times the weights."""
    ranks, states = of_ranks(name, weights(name)), []
    for own in ranks.values():
        adam = {n: dict(exp_avg=2 * x, exp_avg_sq=3 * x.abs()) for n, x in enumerate(own.values())}
        groups = [dict(params=list(adam), step=7)]
        states.append(dict(optimizer=dict(optimizer=dict(state=adam, param_groups=groups))))
    write(tmp_path / "theirs", name, ranks, states, tensor_model_parallel_size=2, consumed_train_samples=21)
    tool.main(["from-megatron", str(tmp_path / "theirs"), str(tmp_path / "ours")])
    found = loaded(tmp_path / "ours")
    trained = {one: x for one, x in found.items() if not one.startswith("optimizer.")}
    assert len(found) == 3 * len(trained)
    for one, x in trained.items():
        assert torch.equal(found[f"optimizer.exp_avg.{one}"], 2 * x), one
        assert torch.equal(found[f"optimizer.exp_avg_sq.{one}"], 3 * x.abs()), one


@pytest.mark.parametrize("name", NAMES)
def test_buffers_have_the_order_of_modules(name, tmp_path):
    """The order of parameters is that of the optimizer's buffers. The norm before Mamba-2 is in `in_proj` in its runs."""
    args = vars(arguments(name))
    model, vocab_size, _ = settings_of(
        dict(args=args), {"0/embedding.word_embeddings.weight": (V, 16)}, (1, 1), V, None
    )
    facts = GPTFacts(model, vocab_size)
    names = Dictionary(facts)
    asked = [names.ours(one).name for one in recorded()[name]["parameters"] if "layers.0.norm" not in one]
    stage = RankStage(0, 1, 0, 1, V)
    found = _module_order(Reading(names, facts.weights, False), stage, norms_apart=True, experts=0)
    assert [one for one in found if "mamba_norm" not in one] == asked


@pytest.mark.parametrize("name", NAMES)
def test_norms_that_hold_what_exceeds_1(name, tmp_path):
    """--apply-layernorm-1p, of all norms but the gated ones of Mamba-2."""
    norm = lambda one: "norm" in one and "mixer.norm" not in one
    less = {one: x - 1 if norm(one) else x for one, x in weights(name).items()}
    (tmp_path / "plain").mkdir()
    plain = imported(tmp_path / "plain", name, {"mp_rank_00": weights(name)})
    found = imported(tmp_path, name, {"mp_rank_00": less}, apply_layernorm_1p=True)
    assert set(plain) == set(found)
    for one, x in plain.items():
        torch.testing.assert_close(found[one], x, rtol=0, atol=3e-7, msg=one)


def test_what_is_not_read_or_written_is_named(tmp_path):
    for n, (name, more, told) in enumerate(
        (
            ("latent", dict(position_embedding_type="learned_absolute"), "multi-latent, which rotates"),
            ("latent", dict(mla_down_proj_fusion=True), "are one tensor"),
            ("hybrid", dict(norm_epsilon=1e-6), "gated norms of its Mamba-2 layers one of 1e-05"),
            ("hybrid", dict(hybrid_layer_pattern=None, experimental_attention_variant="dsa"), "variant is dsa"),
            ("hybrid", dict(hybrid_layer_pattern="MK*-/G-"), "K is Kimi's delta attention"),
        )
    ):
        with pytest.raises(CheckpointError, match=told):
            imported(tmp_path / str(n), name, {"mp_rank_00": weights(name)}, **more)
    save(tmp_path / "ours", SHAPES["a pattern"] | dict(norm_epsilon=1e-6))
    with pytest.raises(SettingsError, match="gated norms of Mamba-2 have 1e-05"):
        tool.main(["to-megatron", str(tmp_path / "ours"), str(tmp_path / "out")])
    save(tmp_path / "beside", SHAPES["a pattern"] | dict(hybrid_layer_pattern="P-P-", num_layers=4))
    with pytest.raises(SettingsError, match="a model with mixers beside each other is not exported"):
        tool.main(["to-megatron", str(tmp_path / "beside"), str(tmp_path / "out")])
    save(tmp_path / "latent", SHAPES["queries without a latent"])
    with pytest.raises(SettingsError, match="multi_latent_attention .with --use-legacy-models"):
        tool.main(["to-megatron", str(tmp_path / "latent"), str(tmp_path / "out"), "--use-legacy-models"])
