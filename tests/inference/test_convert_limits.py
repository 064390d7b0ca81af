# SPDX-License-Identifier: Apache-2.0
"""Conversions exactly at a limit, and their small parts against plain loops: settings, whole numbers in words, pairs of
PEFT, orders of rows.
"""

import argparse
import itertools
import json
import math
import os
import re
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.store import Piece
from megatron.convert import (
    compressed_tensors,
    dcp,
    dcp_files,
    families,
    fitted,
    hf_blocks,
    hf_files,
    megatron_arguments,
    megatron_dist,
    megatron_dist_export,
    megatron_export,
    megatron_lm,
    megatron_metadata,
    megatron_optimizer,
    megatron_pickle,
    peft,
    same_ids,
    torchtitan_names,
    upcycled,
)
from megatron.convert.compressed_tensors import options_of, pack, unpack
from megatron.convert.export import card, gguf_file
from megatron.convert.export.load_exported import load_exported
from megatron.convert.hf_blocks import dequantized
from megatron.convert.imported import check_complete
from megatron.convert.megatron_metadata import Chunk
from megatron.convert.megatron_names import Dictionary, OurTensor
from megatron.convert.megatron_optimizer import PREFIX
from megatron.convert.megatron_pieces import boxes_of_rows, local_parts, with_ones
from megatron.errors import CheckpointError, SettingsError
from megatron.inference import quantize
from megatron.model.command_line import parse_any
from megatron.model.facts import AHEAD
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.hf_families import kind_of
from megatron.model.gpt.hf_rope import our_rope
from megatron.model.gpt.hf_settings import our_settings, their_settings
from megatron.model.hf_match import Match
from megatron.model.kinds.experts.hf import _groups, our_experts, pattern_of
from megatron.model.megatron_form import RowOrder, in_parts
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.placement import Constant, Normal, Placement
from megatron.settings.schema import Model
from megatron.tokenizer.sentence_piece import SentencePieceTokenizer
from tests.inference.test_hf_settings import BASES, GEMMA_2_2B, V

# ---- config.json --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [0, 1, 2])
def test_a_window_of_a_token_is_its_own_key(window):
    theirs = GEMMA_2_2B | dict(sliding_window=window)
    if window:
        assert our_settings(theirs)[1].window_size == f"{window - 1},0"
    else:
        with pytest.raises(CheckpointError, match="sliding_window 0"):
            our_settings(theirs)


@pytest.mark.parametrize("layers, every", [(1, None), (2, 2), (3, 2)])
def test_each_second_layer_sees_all_if_there_is_one(layers, every):
    assert our_settings(GEMMA_2_2B | dict(num_hidden_layers=layers))[1].window_attn_skip_freq == every


@pytest.mark.parametrize("step, first, k, number", list(itertools.product((1, 2, 3), (0, 1, 2), (1, 4), (2, 4))))
def test_which_layers_have_experts_and_how_many_a_token_may_have(step, first, k, number):
    """As the modelling code of transformers and of DeepSeek says it."""
    common = dict(num_hidden_layers=5, num_experts_per_tok=k, moe_intermediate_size=8, num_experts=number)
    qwen = dict(common, decoder_sparse_step=step, mlp_only_layers=[4])
    deepseek = dict(common, n_routed_experts=number, first_k_dense_replace=first, moe_layer_freq=step)
    wanted = {
        "qwen3_moe": [n != 4 and (n + 1) % step == 0 for n in range(5)],
        "deepseek": [n >= first and n % step == 0 for n in range(5)],
    }
    for kind, theirs in (("qwen3_moe", qwen), ("deepseek", deepseek)):
        if k > number:
            with pytest.raises(CheckpointError, match=f"{number} of width 8, {k} for each token"):
                our_experts(kind, theirs)
        else:
            found = our_experts(kind, theirs)
            assert (found["moe_layer_freq"], found["moe_router_topk"]) == (pattern_of(wanted[kind]), k)


@pytest.mark.parametrize("groups, chosen", [(2, 2), (4, 4), (2, 1)])
def test_a_choice_of_all_groups_is_none(groups, chosen):
    model = Model(**BASES["dots1"] | dict(num_experts=8, moe_router_num_groups=groups, moe_router_group_topk=chosen))
    theirs = their_settings(model, V, None, "float32")
    assert kind_of(model) == "dots1" and (theirs["n_group"], theirs["topk_group"]) == (groups, chosen)
    back = our_settings(theirs)[1]
    assert (back.moe_router_num_groups, back.moe_router_group_topk) == (
        (groups, chosen) if groups > chosen else (None, None)
    )


@pytest.mark.parametrize("best, members, chosen", list(itertools.product((1, 2), (1, 2, 3), (1, 2))))
def test_groups_have_as_many_experts_as_are_looked_at(best, members, chosen):
    """And the chosen ones as many as a token goes to; just as many are enough."""
    c, number = dict(n_group=4, topk_group=chosen), 4 * members
    for k in range(1, number + 1):
        if members >= best and k <= chosen * members:
            found = _groups(c, number, k, best)
            usual = k // chosen if k % chosen == 0 else None
            assert found.pop("moe_router_group_score_topk", usual) == best
            assert found == dict(moe_router_num_groups=4, moe_router_group_topk=chosen)
        else:
            with pytest.raises(CheckpointError, match=f"4 groups of {number} experts"):
                _groups(c, number, k, best)


def test_entries_of_yarn_and_which_of_two_counts():
    """YaRN's own values where none are given: 32 and 1; its factor follows from the lengths (arXiv:2309.00071)."""
    rope = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=8, attention_factor=1.3)
    found = our_rope(dict(max_position_embeddings=64), rope)
    assert (found["yarn_beta_fast"], found["yarn_beta_slow"], found["yarn_original_max_position_embeddings"]) == (
        32,
        1,
        8,
    )
    assert Model(1, 8, 1, **found).yarn_stretch == pytest.approx(1.3)
    without = {name: value for name, value in rope.items() if name not in ("attention_factor", "factor")}
    assert our_rope(dict(max_position_embeddings=64), without)["rotary_scaling_factor"] == 8.0
    assert Model(
        1, 8, 1, **our_rope(dict(max_position_embeddings=64), rope | dict(attention_factor=None))
    ).yarn_stretch == (pytest.approx(0.1 * math.log(4.0) + 1))
    own = our_rope(dict(max_position_embeddings=64, original_max_position_embeddings=16), rope)
    assert own["yarn_original_max_position_embeddings"] == 16  # that of the whole file counts, as in transformers
    theirs = their_settings(Model(**BASES["llama"]), V, None, "float32")
    both = theirs | dict(
        rope_scaling=dict(type="linear", factor=3.0), rope_parameters=dict(rope_type="linear", factor=2.0)
    )
    assert our_settings(both)[1].rotary_seq_len_interpolation_factor == 3.0


# ---- Megatron-LM --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0.0, 0.9, 1.0, 1.9, 2.0, 3.0])
def test_rows_of_queries_keys_and_values_of_each_version(version):
    """0: [3, heads, d], 1: [heads, d, 3], 2 on: [heads, 3, d]. Each row is a number that says what it is."""
    heads, d = 2, 4
    row = lambda kind, head, at: 100 * kind + 10 * head + at
    orders = {
        0: [row(kind, head, at) for kind in range(3) for head in range(heads) for at in range(d)],
        1: [row(kind, head, at) for head in range(heads) for at in range(d) for kind in range(3)],
        2: [row(kind, head, at) for head in range(heads) for kind in range(3) for at in range(d)],
    }
    x = torch.tensor(orders[min(2, int(version))]).unsqueeze(1)
    model = Model(num_layers=1, hidden_size=heads * d, num_attention_heads=heads)
    placed = Placement((heads, 3, d, 1), Normal(1.0), cut={"tp": 0})
    target = Dictionary(GPTFacts(model, 8), version).ours("decoder.layers.0.self_attention.linear_qkv.weight")
    [(_, found)] = local_parts(target, placed, x, 0, 1, "model.pt")
    found = found.reshape(heads, 3, d)
    assert found.tolist() == [[[row(kind, head, at) for at in range(d)] for kind in range(3)] for head in range(heads)]


ORDERS = {
    "ours": RowOrder(),
    "in parts": in_parts("xB", (2, 1)),
    "turned": RowOrder(lambda lead: torch.arange(math.prod(lead)).flip(0)),
}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name, shape", [("a.weight", (4, 3, 2)), ("a.bias", (4, 3)), ("a.scale", (4, 3))])
def test_rows_that_their_ranks_divide_and_ours_do_not(name, shape, order, ranks):
    """Each rank has as many of their rows, one after the other: all of them together are the tensor."""
    ours = torch.arange(float(math.prod(shape))).view(shape)
    rows = ours.flatten(0, 1)
    theirs = rows[[0, 1, 3, 4, 6, 7, 9, 10, 2, 5, 8, 11]] if order == "in parts" else rows
    theirs = rows.flip(0) if order == "turned" else theirs
    placed, found = Placement(shape, Normal(1.0)), torch.full(shape, -1.0)
    for rank, x in enumerate(theirs.chunk(ranks)):
        for box, part in local_parts(OurTensor(name, ORDERS[order]), placed, x, rank, ranks, "file"):
            assert (found[box.slices()] == -1).all()
            found[box.slices()] = part
    assert torch.equal(found, ours)


@given(st.tuples(*[st.integers(1, 3)] * 3), st.data())
def test_rows_in_any_order_are_boxes_of_ours(lead, data):
    """Each row once, at its own place; some or none of them may be there."""
    numbers = data.draw(st.lists(st.sampled_from(range(math.prod(lead))), unique=True))
    x, found = torch.tensor([[float(n), -float(n)] for n in numbers]).view(-1, 2), torch.full((*lead, 2), math.nan)
    for box, part in boxes_of_rows(lead, torch.tensor(numbers, dtype=torch.long), x):
        assert found[box.slices()].isnan().all()
        found[box.slices()] = part
    wanted = torch.full((math.prod(lead), 2), math.nan)
    for n in numbers:
        wanted[n] = torch.tensor([n, -n])
    assert torch.equal(found.view(-1, 2).nan_to_num(99.0), wanted.nan_to_num(99.0))


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_orders_of_experts_in_their_modules(kind):
    """One expert after the other; or one matrix after the other, with the bias of each, or all biases after it."""
    weights = dict.fromkeys(f"m.{matrix}.{one}" for matrix in ("up", "down") for one in ("weight", "bias"))
    of = lambda words: [f"m.{word[:-1]}@{word[-1]}" for word in words.split()]
    wanted = [
        "up.weight0 up.bias0 down.weight0 down.bias0 up.weight1 up.bias1 down.weight1 down.bias1",
        "up.weight0 up.bias0 up.weight1 up.bias1 down.weight0 down.bias0 down.weight1 down.bias1",
        "up.weight0 up.weight1 up.bias0 up.bias1 down.weight0 down.weight1 down.bias0 down.bias1",
    ]
    assert megatron_dist._expert_order("m", kind, 2, weights) == of(wanted[kind])
    plain = {name: None for name in weights if "bias" not in name}
    found = megatron_dist._expert_order("m", kind, 2, plain)
    assert found == [name for name in of(wanted[kind]) if "bias" not in name]


@pytest.mark.parametrize("ends", ["well", "signal", "error"])
def test_what_a_process_that_reads_ends_with(ends, tmp_path):
    def read():
        if ends == "signal":
            os.kill(os.getpid(), signal.SIGKILL)
        if ends == "error":
            raise ValueError("a  strange\nfile")

    if ends == "well":
        megatron_pickle.refused_in_child(Path("a.pt"), tmp_path, read)
        return
    words = dict(signal="a.pt was refused: reading it ended with SIGKILL", error="a.pt was refused: a strange file")
    with pytest.raises(CheckpointError) as told:
        megatron_pickle.refused_in_child(Path("a.pt"), tmp_path, read)
    assert str(told.value) == words[ends]


@pytest.mark.parametrize(
    "value, number",
    [(3, 3), (0, 0), (2.5, 2.5), (True, None), ("3", None), (None, None), (torch.tensor([7]), 7)]
    + [(torch.tensor(0.5), 0.5), (torch.tensor([1, 2]), None), (torch.tensor(True), None)],
)
def test_numbers_of_a_run_are_plain_ones_or_tensors_of_one(value, number):
    assert megatron_pickle._number(value) == number and (number is None) == (megatron_pickle._number(value) is None)
    assert megatron_pickle._numbers(dict(a=value)) == ({} if number is None else dict(a=number))


@pytest.mark.parametrize("content, good", [(torch.ones(2, 3), True), (torch.ones(3, 2), False), ([1], False)])
def test_a_chunk_has_the_shape_that_is_said(content, good, tmp_path):
    torch.save(content, tmp_path / "a.distcp")
    length = (tmp_path / "a.distcp").stat().st_size
    chunk = Chunk("w", "", (4, 3), Box((0, 0), (2, 3)), None, "a.distcp", 0, length)
    if good:
        assert torch.equal(megatron_metadata._chunk(tmp_path / "a.distcp", chunk), content)
    else:
        with pytest.raises(ValueError, match=r"w at \(0, 0\) is not there with shape \(2, 3\)"):
            megatron_metadata._chunk(tmp_path / "a.distcp", chunk)


@pytest.mark.parametrize("cuts", [(1, 1), (2, 1), (1, 3), (2, 3)])
def test_flattened_chunks_come_to_their_place_in_the_tensor(cuts):
    """Of each part of a tensor, chunks may begin and end anywhere."""
    whole = torch.arange(24.0).view(4, 6)
    size = (4 // cuts[0], 6 // cuts[1])
    found, elements = torch.full_like(whole, -1.0), math.prod(size)
    for part in itertools.product(*map(range, cuts)):
        inside = tuple(slice(at * n, at * n + n) for at, n in zip(part, size, strict=True))
        for start, stop in itertools.pairwise(sorted({0, 1, elements - 1, elements})):
            box = Box((*part, start), (1, 1, stop - start))
            chunk = Chunk("w", "", (*cuts, elements), box, (4, 6), "a.distcp", 0, 0)
            for one, x in chunk.parts(whole[inside].reshape(1, 1, -1)[..., start:stop]):
                assert one.shape == (4, 6) and one.whole is None and (found[one.box.slices()] == -1).all()
                found[one.box.slices()] = x
    assert torch.equal(found, whole)


@pytest.mark.parametrize("layers", [1, 3])
def test_layers_that_predict_further_tokens_follow_the_others(layers):
    names = Dictionary(GPTFacts(Model(layers, 4, 1, mtp_num_layers=2), 8))
    for ours, place in {
        f"blocks.{layers - 1}.mlp.up.weight": (layers - 1, "mlp.up.weight"),
        f"{AHEAD}.0.layers.0.mlp.up.weight": (layers, "mlp.up.weight"),
        f"{AHEAD}.1.layers.1.mlp.up.weight": (layers + 1, "mlp.up.weight"),
        f"{AHEAD}.1.projection.weight": (None, f"{AHEAD}.1.projection.weight"),
    }.items():
        assert names._place(ours) == place


@pytest.mark.parametrize("taps, shape", [(True, (6, 1, 4)), (True, (6, 4)), (False, (6, 4))])
def test_parts_of_a_convolution_or_a_matrix_come_to_their_rows(taps, shape):
    """Chunks may end anywhere, in rows and in columns."""
    ours, whole = torch.arange(24.0).view(2, 3, 4), torch.full((2, 3, 4), -1.0)
    target = OurTensor("a.weight", RowOrder(taps=taps))
    weights = {"a.weight": Placement((2, 3, 4), Normal(1.0))}
    names = SimpleNamespace(ours=lambda theirs: target, model=SimpleNamespace(untie_embeddings_and_output_weights=True))
    reading = megatron_dist.Reading(names, weights, False)
    for rows, columns in itertools.product(((0, 1), (1, 5), (5, 6)), ((0, 1), (1, 4))):
        place = [rows, *[(0, 1)] * (len(shape) - 2), columns]
        box = Box(tuple(start for start, _ in place), tuple(end - start for start, end in place))
        x = ours.view(6, 4).view(shape)[box.slices()]
        for piece in megatron_dist._in_tensor("theirs", shape, box, x, reading):
            assert (whole[piece.box.slices()] == -1).all()
            whole[piece.box.slices()] = piece.tensor
    assert torch.equal(whole, ours)


@pytest.mark.parametrize("groups, queries, d", list(itertools.product((1, 2), (1, 2), (2, 6))))
def test_rows_of_torchtitan_are_pairs_that_rotate_together_and_may_be_one_tensor(groups, queries, d):
    """Row (head, i, half) there is row (head, half, i) of ours; wqkv has queries, key and value of each group."""
    heads, h = groups * queries, groups * queries * d
    theirs = torch.arange(float(h)).unsqueeze(1)
    ours = [theirs[head * d + 2 * i + half] for head in range(heads) for half in range(2) for i in range(d // 2)]
    assert torch.equal(torchtitan_names._halves(theirs, heads), torch.stack(ours))
    assert torch.equal(torchtitan_names._pairs(torch.stack(ours), heads), theirs)
    q, k, v = (torch.randn(size * d, h) for size in (heads, groups, groups))
    model, form = SimpleNamespace(query_groups=groups, hidden_size=h), SimpleNamespace(attention="attention.")
    model.num_attention_heads, model.head_dim = heads, d
    match = Match("ours", ("layers.0.attention.wq.weight", "k", "v"), lambda own: own, lambda ours: ours)
    fused = torchtitan_names._fused(match, model, form)
    row = lambda x, at: x[at * d : (at + 1) * d]
    each = [[*(row(q, g * queries + n) for n in range(queries)), row(k, g), row(v, g)] for g in range(groups)]
    [whole] = fused.to_theirs([q, k, v])
    assert torch.equal(whole, torch.cat([part for group in each for part in group]))
    assert all(map(torch.equal, fused.to_ours([whole]), (q, k, v)))


@pytest.mark.parametrize(
    "expected, found, place", [("abc", "abd", 2), ("xbc", "abc", 0), ("ab", "abc", 2), ("abc", "ab", 2), ("", "a", 0)]
)
def test_the_first_token_that_differs(expected, found, place):
    """Also where one text goes on after the other has ended."""
    theirs = SimpleNamespace(convert_ids_to_tokens=list)
    said = same_ids._first_difference(theirs, list(expected), list(found))
    there, here = list(expected)[place:], list(found)[place:]
    assert said == f"token {place}: transformers has {there}, here are {here}"


@pytest.mark.parametrize("formats, good", [(0, False), (1, True), (2, False)])
@pytest.mark.parametrize("optimizers", [1, 2, 3])
def test_buffers_of_one_number_format_and_of_two_optimizers_at_most(formats, good, optimizers, tmp_path):
    """The second one is that of experts; buckets of older files are joined."""
    state = dict(param=[torch.ones(2), torch.zeros(1)], exp_avg=torch.arange(3.0))
    own = {0: {f"format {n}": state for n in range(formats)}, "buckets_coalesced": True}
    content = own if optimizers == 1 else [own] * optimizers
    if not good or optimizers > 2:
        with pytest.raises(ValueError, match="several number formats" if optimizers < 3 else "state of 3 optimizers"):
            megatron_pickle._write_buffers(content, tmp_path)
        return
    megatron_pickle._write_buffers(content, tmp_path)
    found = {name: x.tolist() for name, x in load_file(tmp_path / "tensors.safetensors").items()}
    prefixes = ["", megatron_pickle.EXPERTS][:optimizers]
    wanted = dict(param=[1.0, 1.0, 0.0], exp_avg=[0.0, 1.0, 2.0])
    assert found == {f"{prefix}0/{kind}": values for prefix in prefixes for kind, values in wanted.items()}
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts == dict(coalesced=True, apart=optimizers == 2)


@pytest.mark.parametrize("size, good", [(None, 1), (0, 0), (1, 1), (64, 1), (65, 0)])
def test_a_vocabulary_of_at_most_all_rows(size, good):
    if good:
        assert megatron_arguments._vocabulary_of({}, 64, size)[0] == (size or 64)
    else:
        with pytest.raises(SettingsError, match="does not fit the 64 rows"):
            megatron_arguments._vocabulary_of({}, 64, size)


def test_arguments_that_were_not_saved_have_megatrons_defaults():
    made = megatron_arguments._model_of({}, num_layers=1, hidden=8, heads=2, positions=(16, 8))
    assert (made.rotary_base, made.norm_epsilon, made.ffn_hidden_size) == (10000.0, 1e-5, 32)
    assert (made.seq_length, made.max_position_embeddings, made.position_embedding_type) == (16, 16, "learned_absolute")


@pytest.mark.parametrize("kind, added", [(None, 1), ("param", 1), ("fp32_param", 1), ("exp_avg", 0), ("exp_avg_sq", 0)])
def test_norms_less_one_are_weights_and_no_moments(kind, added):
    """Of --apply-layernorm-1p: weights and main weights of norms are stored less 1, and their moments are the same."""
    prefix, x = PREFIX[kind] if kind else "", torch.tensor([0.25, -0.5])
    norm, bias = Placement((2,), Constant(1.0)), Placement((2,), Constant(0.0))
    assert with_ones(True, norm, prefix, x).tolist() == (x + added).tolist()
    assert with_ones(False, norm, prefix, x).tolist() == with_ones(True, bias, prefix, x).tolist() == x.tolist()


@pytest.mark.parametrize("experts", [None, 0, 1, 2, 4])
def test_a_mixture_has_two_experts_at_least_and_its_first_layer_has_some(experts):
    args = dict(num_experts=experts, moe_layer_freq=2)
    made = megatron_arguments._model_of(args, num_layers=5, hidden=8, heads=2, positions=None)
    assert made.mixture == ((experts or 0) >= 2)
    if made.mixture:
        assert made.moe_layer_freq == "[1]*1+[0]*1+[1]*1+[0]*1+[1]*1"
        listed = megatron_arguments._model_of(
            args | dict(hybrid_layer_pattern="*-*E"), num_layers=4, hidden=8, heads=2, positions=None
        )
        # The pattern counts, and no rule is broken
        assert listed.expert_layers == (3,) and listed.moe_layer_freq == "1"


# ---- tensors ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 2), st.sampled_from([4, 8]), st.data())
def test_whole_numbers_in_words_are_those_of_plain_arithmetic(rows, bits, data):
    low, high, each = -(1 << bits - 1), (1 << bits - 1) - 1, 32 // bits
    length = data.draw(st.integers(1, 2 * each + 1))
    number = st.sampled_from([low, low + 1, -1, 0, 1, high])
    values = [data.draw(st.lists(number, min_size=length, max_size=length)) for _ in range(rows)]
    packed = pack(torch.tensor(values), bits)
    for row, words in zip(values, packed.tolist(), strict=True):
        wanted = [0] * -(-length // each)
        for place, value in enumerate(row):
            wanted[place // each] |= (value - low) << bits * (place % each)
        assert [word % (1 << 32) for word in words] == wanted
    assert packed.dtype == torch.int32 and unpack(packed, bits, length).tolist() == values


INPUTS = [None] + [
    dict(num_bits=bits, dynamic=dynamic, strategy=strategy, symmetric=symmetric)
    for bits, dynamic, strategy, symmetric in itertools.product(
        (4, 8), (True, False), ("token", "tensor"), (True, False)
    )
]


@pytest.mark.parametrize("strategy", ["channel", "group", "tensor"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [None, True, False])
def test_formats_of_compressed_tensors_that_are_read(bits, strategy, symmetric):
    """int8 by channels, with inputs as they are or in 8 bits of each token, without zeros; int4 in groups."""
    weights = dict(num_bits=bits, strategy=strategy, type="int", group_size=32)
    weights |= {} if symmetric is None else dict(symmetric=symmetric)
    for inputs in INPUTS:
        wanted = None
        if (bits, strategy) == (4, "group") and inputs is None:
            wanted = QuantizeOptions("int4", 32, quantize_symmetric=symmetric is not False)
        if (bits, strategy) == (8, "channel") and symmetric is not False:
            wanted = QuantizeOptions("int8") if inputs is None else wanted
            of_tokens = dict(num_bits=8, dynamic=True, strategy="token", symmetric=True)
            wanted = QuantizeOptions("int8-dynamic") if inputs == of_tokens else wanted
        group = dict(weights=weights, input_activations=inputs)
        forms = ["int-quantized", "pack-quantized"]
        own = forms.pop(0 if inputs else 1)  # inputs in whole numbers, and weights alone
        config = dict(quant_method="compressed-tensors", format=own, config_groups=dict(a=group))
        others = [dict(quant_method="gptq"), dict(format=forms[0]), dict(config_groups=dict(a=group, b=group))]
        others += [dict(config_groups=dict(a=dict(group, weights=weights | dict(type="float"))))]
        for change in [{}, *others] if wanted else [{}]:
            if wanted and not change:
                assert options_of(config, "here") == wanted
            else:
                with pytest.raises(SettingsError, match="here has weights of another format"):
                    options_of(config | change, "here")


@pytest.mark.parametrize("byte", range(256))
def test_each_byte_of_mxfp4_is_two_numbers(byte):
    """A sign, two bits of exponent with a bias of 1, one of mantissa; the first number is in the low bits."""

    def plain(bits):
        exponent, mantissa = bits >> 1 & 3, bits & 1
        size = mantissa * 0.5 if exponent == 0 else (1 + mantissa * 0.5) * 2 ** (exponent - 1)
        return -size if bits & 8 else size

    found = dequantized(torch.full((1, 1, 16), byte, dtype=torch.uint8), torch.full((1, 1), 129, dtype=torch.uint8))
    assert found.tolist() == [[4 * plain(byte & 15), 4 * plain(byte >> 4)] * 16]


@pytest.mark.parametrize("limit", [32, 33, 47, 48, 49, 64, 80, 127, 128, 129])
def test_files_are_filled_as_those_of_hugging_face(limit, tmp_path):
    """Up to just as many bytes, in order."""
    sizes = [4, 4, 8, 4, 8, 4]
    state = {f"t{n}": torch.full((size,), float(n)) for n, size in enumerate(sizes)}
    split = split_torch_state_dict_into_shards(state, max_shard_size=limit)
    groups = [hf_files.TensorGroup((name,), (tuple(x.shape),), lambda x=x: [x]) for name, x in state.items()]
    assert hf_files.write_tensors(tmp_path, groups, torch.float32, limit) == list(split.filename_to_tensors)
    for name, own in split.filename_to_tensors.items():
        found = load_file(tmp_path / name)
        assert list(found) == own and all(torch.equal(x, state[one]) for one, x in found.items())


@pytest.mark.parametrize("letters", range(1, 10))
def test_the_data_of_a_file_begins_at_a_multiple_of_8_bytes(letters, tmp_path):
    """As the format of safetensors wants it, for headers of any length."""
    group = hf_files.TensorGroup(("x" * letters,), ((2,),), lambda: [torch.ones(2)])
    [name] = hf_files.write_tensors(tmp_path, [group], torch.float32)
    content = (tmp_path / name).read_bytes()
    header = int.from_bytes(content[:8], "little")
    assert header % 8 == 0 and len(content) == 8 + header + 8
    assert json.loads(content[8 : 8 + header])["x" * letters]["data_offsets"] == [0, 8]


@pytest.mark.parametrize("count", [0, 1, 5, 6, 7, 12, 13, 30])
@pytest.mark.parametrize("what", ["left out", "unknown", "missing"])
def test_names_of_tensors_that_are_too_many_to_list(what, count):
    """A dozen that are left out, half a dozen that are wrong; the others are counted."""
    names = [f"{'b' if what == 'left out' else 'c'}{n:02d}" for n in range(count)]
    family = SimpleNamespace(
        copies={}, optional={}, kind="llama", constants=re.compile("a.*"), unused=re.compile("b.*")
    )
    family.facts = SimpleNamespace(settings=Model(**BASES["llama"]))
    files = SimpleNamespace(shapes=dict.fromkeys([] if what == "missing" else [*names, "a"], ()))
    wanted = dict.fromkeys(names) if what == "missing" else {}
    check = lambda: fitted._check_complete(Path("x"), files, family, {name: name for name in wanted}, frozenset(), "do")
    if what == "left out" or not count:
        notice = "".join(check())
        assert [name in notice for name in names] == [n < 12 for n in range(count)]
        assert (f"and {count - 12} more" in notice) == (count > 12) == ("more" in notice)
        return
    with pytest.raises(CheckpointError) as told:
        check()
    assert f": {count} tensor{'s are' if count > 1 else ' is'} {what}\n" in str(told.value)
    assert (f"{count - 6} more: {what}" in str(told.value)) == (count > 6) == ("more: " in str(told.value))
    assert [f"{name}: {what}" in str(told.value) for name in names] == [n < 6 for n in range(count)]


END = dict(content="<|endoftext|>")
GPT2_FOLDERS = {  # files beside vocab.json and merges.txt -> whether these are the whole tokenizer
    "nothing": ({}, True),
    "its end of text": ({"tokenizer.json": dict(added_tokens=[END])}, True),
    "an added token": ({"tokenizer.json": dict(added_tokens=[END, dict(content="<x>")])}, False),
    "names": ({"tokenizer_config.json": dict(eos_token=END, unk_token="<|endoftext|>", pad_token=None)}, True),
    "another name": ({"tokenizer_config.json": dict(pad_token="<pad>")}, False),
    "a token of the configuration": (
        {"tokenizer_config.json": dict(added_tokens_decoder={"7": dict(content="<x>")})},
        False,
    ),
    "a begin": ({"tokenizer_config.json": dict(add_bos_token=True)}, False),
    "an end": ({"tokenizer_config.json": dict(add_eos_token=True)}, False),
    "a space": ({"tokenizer_config.json": dict(add_prefix_space=True)}, False),
    "no space": ({"tokenizer_config.json": dict(add_prefix_space=False, add_bos_token=False)}, True),
    "a file of tokens": ({"added_tokens.json": {}}, False),
}


@pytest.mark.parametrize("what", GPT2_FOLDERS)
def test_a_vocabulary_of_gpt2_is_its_tokenizer_if_nothing_adds_to_it(what, tmp_path):
    more, whole = GPT2_FOLDERS[what]
    for name, content in {"vocab.json": {}, "merges.txt": "", "tokenizer.json": {}, **more}.items():
        (tmp_path / name).write_text(json.dumps(content))
    kinds = {of_gpt2: hf_files.tokenizer_of(tmp_path, of_gpt2).tokenizer_type for of_gpt2 in (True, False)}
    assert kinds == {True: "GPT2BPETokenizer" if whole else "HuggingFaceTokenizer", False: "HuggingFaceTokenizer"}


@pytest.mark.parametrize("end, known", [(0, True), (8, True), (9, False), (-1, False)])
def test_an_end_of_texts_is_a_token_of_the_model(end, known, tmp_path):
    (source := tmp_path / "theirs").mkdir()
    (source / "generation_config.json").write_text(json.dumps(dict(eos_token_id=[3, end])))
    notices = hf_files.import_generation_config(source, tmp_path, {}, 9)
    assert [f"eos_token_id {end} is no token" in notice for notice in notices] == [True] * (not known)
    assert (tmp_path / "generation_config.json").read_text() == (source / "generation_config.json").read_text()


@pytest.mark.parametrize("limit", [1, 15])
def test_tensors_larger_than_a_file_have_one_each(limit, tmp_path):
    groups = [hf_files.TensorGroup((name,), ((4,),), lambda: [torch.ones(4)]) for name in "ab"]
    names = hf_files.write_tensors(tmp_path, groups, torch.float32, limit)
    assert [list(load_file(tmp_path / name)) for name in names] == [["a"], ["b"]]


@pytest.mark.parametrize("cached", [None, "org--first"])
@pytest.mark.parametrize("named", [None, "other/second", "./second", "/models/second"])
def test_the_name_of_a_model_is_that_of_its_repository(cached, named, tmp_path):
    """The cache of a hub says it; else config.json, if it is such a name; else the folder."""
    folder = tmp_path / (f"models--{cached}/snapshots/abc" if cached else "folder")
    folder.mkdir(parents=True)
    wanted = "org/first" if cached else named if named == "other/second" else "folder"
    assert hf_files.about(folder, dict(_name_or_path=named))["name"] == wanted


@pytest.mark.parametrize("names", [["step-9", "step-10", "step-100"], ["epoch_0_step_9", "epoch_1_step_10"]])
def test_the_newest_step_is_the_one_with_the_largest_number(names, tmp_path):
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / ".metadata").touch()
    assert dcp.find_place(tmp_path, None).model.name == names[-1]
    assert dcp.find_place(tmp_path, 9).model.name == names[0]


@pytest.mark.parametrize(
    "groups, wanted",
    [
        ([dict(lr=1.0, initial_lr=2.0, weight_decay=0.1), dict(lr=1.0, initial_lr=2.0, weight_decay=0.0)], (2.0, 0.1)),
        ([dict(lr=1.0, weight_decay=0.0), dict(lr=1.0, weight_decay=0.2)], (1.0, 0.2)),
        ([dict(lr=1.0, initial_lr=2.0), dict(lr=1.0, initial_lr=3.0)], (1.0, 0.0)),  # of several, none
        ([dict(lr=1.0), dict(lr=2.0)], (None, 0.0)),
        ([], (None, None)),
    ],
)
def test_settings_of_an_optimizer_of_another_trainer(groups, wanted):
    """The rate of the schedule, not that of the last step, if it is there; the decay of matrices, not that of norms."""
    betas = dict(betas=[0.8, 0.9], eps=1e-7)
    state = SimpleNamespace(folder="x", groups={f"p{n}": group | betas for n, group in enumerate(groups)})
    args = dcp._facts(state, 30, 4)["args"]
    assert (args.get("lr"), args.get("weight_decay")) == wanted and args["consumed_train_samples"] == 120
    assert [args.get(name) for name in ("adam_beta1", "adam_beta2", "adam_eps")] == (
        [0.8, 0.9, 1e-7] if groups else [None] * 3
    )
    for batch in (None, 0):
        with pytest.raises(CheckpointError, match="does not say how many samples a step has"):
            dcp._facts(state, 30, batch)


def test_which_config_describes_the_model(tmp_path):
    """One that is given, or its folder; else the nearest to the weights."""
    place, given = dcp.DCPPlace(tmp_path / "step-3" / "model", None), tmp_path / "given"
    nearest_last = [given, tmp_path, tmp_path / "step-3", place.model / "consolidated", place.model / ".hf_metadata"]
    with pytest.raises(CheckpointError, match="does not say how many heads"):
        dcp.find_config(None, place, tmp_path)
    for folder in (*nearest_last, place.model):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").touch()
        if folder != given:
            assert dcp.find_config(None, place, tmp_path) == folder / "config.json"
        for one in (given, given / "config.json"):
            assert dcp.find_config(one, place, tmp_path) == given / "config.json"


class StoredTables(dict):
    """In the place of a `Reader`: tables by their names."""

    tensors = property(lambda self: self)

    def read(self, name, box=None, dtype=torch.float32):
        x = self[name]
        return (x if box is None else x[box.slices()]).to(dtype)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("prefix", [None, "", "optimizer.exp_avg."])
def test_rows_of_padding_are_the_mean_of_their_own_table(prefix, rows):
    """Read in blocks of any number of rows; moments have means of their own."""
    model = Model(1, 4, 1, make_vocab_size_divisible_by=4)
    export = megatron_export.Export(model, 5, 2, 1, "transformer_engine", torch.float32)
    name = "embedding.word.weight"
    placed, tables = export.facts.weights[name], StoredTables({name: torch.arange(20.0).view(5, 4).square()})
    tables["optimizer.exp_avg." + name] = 7 - tables[name]
    padding = megatron_export._padding_rows(tables, rows)
    parts = [megatron_export.local_part(export, tables, padding, name, placed, rank, prefix) for rank in range(2)]
    own = tables[(prefix or "") + name]
    torch.testing.assert_close(torch.cat(parts), torch.cat([own, own.mean(0).expand(3, 4)]))


def exported(ep=1, pp=1, **more):
    """An export of a model, and tables of its weights in the place of a `Reader`, each number another one."""
    model = Model(2, 8, 2, seq_length=4, make_vocab_size_divisible_by=4, **more)
    export = megatron_export.Export(model, 8, 1, pp, "transformer_engine", torch.float32, ep)
    draw = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(one.shape, generator=draw) for name, one in export.facts.weights.items()}
    return export, StoredTables(weights)


@pytest.mark.parametrize("ep", [1, 2, 4])
def test_experts_are_divided_in_their_order(ep):
    export, tables = exported(ep, num_experts=4, moe_ffn_hidden_size=4)
    found = [megatron_export.rank_tensors(export, tables, None, 0, 0, rank) for rank in range(ep)]
    for layer, number in itertools.product(range(2), range(4)):
        rank, own = divmod(number, 4 // ep)
        for theirs, ours in ("linear_fc1", "up"), ("linear_fc2", "down"):
            x = found[rank][f"decoder.layers.{layer}.mlp.experts.{theirs}.weight{own}"]
            assert torch.equal(x, tables[f"blocks.{layer}.mlp.experts.{ours}.weight"][number].flatten(0, -2))


@pytest.mark.parametrize("depths", [0, 1])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pp", [1, 2])
def test_the_last_stage_has_the_embedding_for_what_reads_it(pp, tied, depths):
    """Multi-token prediction looks tokens up again, and a tied output layer multiplies by the table."""
    export, tables = exported(pp=pp, untie_embeddings_and_output_weights=not tied, mtp_num_layers=depths or None)
    first, last = (megatron_export.rank_tensors(export, tables, None, 0, stage) for stage in (0, pp - 1))
    table = tables["embedding.word.weight"]
    assert torch.equal(first["embedding.word_embeddings.weight"], table)
    assert ("embedding.word_embeddings.weight" in last) == (pp == 1 or depths > 0)
    assert ("output_layer.weight" in last) == (not tied or pp > 1)
    if not tied or pp > 1:
        assert torch.equal(last["output_layer.weight"], table if tied else tables["output.weight"])


@pytest.mark.parametrize("samples", [0, 100, 400])
def test_the_ends_of_weight_decay_and_its_present_value(samples):
    """In Megatron-LM's scheduler it goes from start_wd to end_wd, here along a line."""
    own = dict(start_weight_decay=0.1, end_weight_decay=0.3, weight_decay_incr_style="linear", lr=1e-3)
    config = parse_any("--num-layers 1 --hidden-size 4 --num-attention-heads 1 --seq-length 4".split())
    config = replace(config, optimizer=replace(config.optimizer, **own))
    position = dict(scheduled_samples=samples, scaler=dict(scale=1.0, good_steps=0))
    lengths = dict(warmup=0, decay=400, anneal=None, total=400)
    reader = SimpleNamespace(state=dict(state=position, lengths=lengths), needed=lambda name: 7)
    common = megatron_dist_export._common(config, reader, SimpleNamespace(fp16=False, iteration=7))
    schedule, groups = common["opt_param_scheduler"], common["optimizer"]["optimizer"]["param_groups"]
    assert (schedule["start_wd"], schedule["end_wd"], schedule["wd_incr_steps"]) == (0.1, 0.3, 400)
    assert (schedule["num_steps"], schedule["wd_incr_style"]) == (samples, "linear")
    assert [group["weight_decay"] for group in groups] == pytest.approx([0.1 + 0.2 * samples / 400, 0.0])


class Written(dict):
    """In the place of a `GGUFWriter`: what is added, by name."""

    def __getattr__(self, name):
        return lambda *values: self.__setitem__(name.removeprefix("add_"), values)


@pytest.mark.parametrize("factor, attention", [(4.0, 1.0), (4.0, 0.1 * math.log(4.0) + 1), (32.0, 1.3)])
def test_yarn_stretches_as_much_in_llama_cpp(factor, attention):
    """It multiplies the factor of the file by 1 + 0.1 log(1 / freq_scale) (`rope_yarn` of ggml)."""
    pytest.importorskip("gguf")
    rope = dict(rope_type="yarn", factor=factor, attention_factor=attention, original_max_position_embeddings=16)
    gguf_file._describe_rope(
        writer := Written(), dict(rope_theta=1e4, rope_parameters=rope | dict(beta_fast=32.0, beta_slow=1.0))
    )
    [of_file], [scale] = writer["rope_scaling_attn_factors"], writer["rope_scaling_factor"]
    assert of_file * (1 + 0.1 * math.log(scale)) == pytest.approx(attention)


@pytest.mark.parametrize("d", [2, 4, 6, 8])
def test_rows_of_heads_that_llama_cpp_rotates_together(d):
    """i and i + d/2 become neighbours, in each head of queries and keys; values stay."""
    config = dict(num_attention_heads=4, num_key_value_heads=2)
    for name, heads in (("q_proj", 4), ("k_proj", 2), ("v_proj", 0)):
        x = torch.arange(float((heads or 2) * d)).unsqueeze(1)
        wanted = [h * d + i + half * d // 2 for h in range(heads) for i in range(d // 2) for half in (0, 1)]
        found = gguf_file._llama(f"model.layers.0.self_attn.{name}.weight", x, config)
        assert found.flatten().tolist() == (wanted if heads else x.flatten().tolist())


@pytest.mark.parametrize("layers", [1, 2])
def test_routers_of_a_mixture_are_not_each_others(layers):
    """Their initial values are a seed's and a name's, as in a run: other tokens go to other experts in each layer."""
    model = Model(layers, 8, 2, num_experts=4, moe_ffn_hidden_size=16)
    dense = GPTFacts(replace(model, num_experts=None), 8).weights
    stored = {name: SimpleNamespace(dtype=torch.float32, shape=one.shape) for name, one in dense.items()}
    state = dict(vocab_size=8, config=dict(model={}))
    config = replace(parse_any("--num-layers 1 --hidden-size 8 --num-attention-heads 2".split()), model=model)
    made = {
        seed: upcycled.upcycled(SimpleNamespace(state=state, tensors=stored), config, seed).compute for seed in (1, 2)
    }
    found = [compute(f"blocks.{n}.mlp.router.weight") for compute in made.values() for n in range(layers)]
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(found, 2))


@pytest.mark.parametrize("device, wanted", [("cpu", torch.float32), ("meta", torch.float16)])
def test_half_precision_is_left_to_devices_that_have_it(device, wanted, tmp_path):
    """A folder in fp16 is loaded in fp32 on a CPU alone."""
    model = Model(**BASES["llama"])
    config = their_settings(model, V, None, "float16")
    (tmp_path / "config.json").write_text(json.dumps(config))
    family = families.imported(config)
    tensors = {}
    for match in family.matches:
        parts = match.to_theirs(torch.zeros(family.facts.weights[match.ours].shape))
        tensors |= {name: x.half().contiguous() for name, x in zip(match.theirs, parts, strict=True)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for precision in (None, "fp16"):
        loaded = load_exported(str(tmp_path), device=device, precision=precision)
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {wanted}


def test_the_last_loss_of_a_card_is_that_of_the_checkpoints_step():
    """A run that went on has later ones, and its file may lack some."""
    steps = [dict(iteration=n, loss=10.0 - n) for n in (1, 2, 3, 4)]
    history = SimpleNamespace(steps=steps, loss="loss")
    facts = GPTFacts(Model(1, 8, 2), 8)
    for step, line in ((3, "7.0000 at step 3"), (4, "6.0000 at step 4"), (9, "6.0000 at step 4"), (0, None)):
        rows = dict(card._training(dict(config={}, iteration=step), history, facts))
        assert rows.get("last training loss") == line


class Tensors(dict):
    get = dict.__getitem__


@pytest.mark.parametrize("rows", [1, 2, 3, 4096])
def test_tensors_that_are_the_same(rows, monkeypatch):
    """Compared in blocks of any number of rows; shapes count, and what only fp64 tells apart."""
    monkeypatch.setattr(fitted, "ROWS", rows)
    x = torch.arange(12.0).view(4, 3)
    other = x.clone()
    other[3, 2] = -1
    tenth = torch.full((4, 3), 0.1)
    files = Tensors(x=x, half=x.half(), less=x[:2], other=other, tenth=tenth, exact=torch.full((4, 3), 0.1).double())
    files |= dict(tenths=torch.full((4, 3), 0.1, dtype=torch.float64))
    assert fitted._same(files, "x", "x") and fitted._same(files, "x", "half") and fitted._same(files, "tenth", "exact")
    for one, two in (("x", "less"), ("less", "x"), ("x", "other"), ("tenth", "tenths")):
        assert not fitted._same(files, one, two), (one, two)


WEIGHT = Placement((6, 4), Normal(1.0))
MATCH = Match("blocks.0.mlp.up.weight", ("layers.0.up.weight",))


@given(st.integers(1, 6), st.booleans())
@example(4, False)
@example(5, True)
def test_pairs_up_to_the_rank_of_their_inputs_go_and_come_back(rank, transposed):
    model = Model(1, 8, 1, lora_rank=rank)
    a, b = torch.randn(rank, 4), torch.randn(6, rank)
    match = Match(*MATCH[:2], lambda t: t[0].t(), lambda x: [x.t()]) if transposed else MATCH
    if rank > 4:
        with pytest.raises(SettingsError, match="is larger than its 4 inputs"):
            peft._to_theirs(match, WEIGHT, model, a, b, transposed)
        with pytest.raises(CheckpointError, match="is larger than its 4 inputs"):
            peft._to_ours("x", match, WEIGHT, model, [peft.PeftPair(a, b)], transposed)
        return
    [pair] = peft._to_theirs(match, WEIGHT, model, a, b, transposed).values()
    assert torch.equal(pair.a, a) and torch.equal(pair.b, b)
    found = peft._to_ours("x", match, WEIGHT, model, [pair], transposed)
    assert torch.equal(found[0], a) and torch.equal(found[1], b)


@pytest.mark.parametrize("a, b, norms, moved", list(itertools.product((0, 1), (0, 1), (False,), (False, True))))
def test_a_pair_that_has_anything_is_written(a, b, norms, moved):
    assert peft.PeftPair(torch.full((1,), a), torch.full((1,), b), norms or None, moved).moved == bool(a or b or moved)


@pytest.mark.parametrize("alpha", [None, 0.5, 7.0])
@pytest.mark.parametrize("rank", [1, 2])
def test_alpha_is_the_rank_where_none_was_given(alpha, rank):
    model = Model(1, 8, 1, lora_rank=rank, lora_alpha=alpha)
    pairs = {f"layers.{n}.up": peft.PeftPair(torch.ones(rank, 4), torch.ones(6, rank)) for n in range(2)}
    theirs = peft._their_config(model, pairs, list(pairs), "llama", None)
    assert (theirs["lora_alpha"], theirs["r"]) == (rank if alpha is None else alpha, rank)
    peft.refuse_others(theirs)
    for wrong in (0, -1):
        with pytest.raises(CheckpointError, match="no valid r"):
            peft.refuse_others(theirs | dict(r=wrong))


@pytest.mark.parametrize("layers", [(0,), (1,), (0, 1), (0, 1, 2)])
def test_adapters_of_some_layers_name_them(layers):
    """PEFT adapts each module whose name is a target, or ends in a dot and one."""
    model = Model(3, 8, 1, lora_rank=1)
    names = [f"layers.{n}.{name}" for n in range(3) for name in ("attn.q", "mlp.up", "mlp.down")]
    wanted = {name for name in names if int(name.split(".")[1]) in layers and not name.endswith("down")}
    pairs = {name: peft.PeftPair(torch.ones(1, 4), torch.ones(6, 1)) for name in names if name in wanted}
    targets = peft._their_config(model, pairs, names, "llama", None)["target_modules"]
    found = {name for name in names if any(name == one or name.endswith(f".{one}") for one in targets)}
    assert found == wanted and (targets == ["attn.q", "mlp.up"]) == (layers == (0, 1, 2))


@pytest.mark.parametrize("length, cut", [(3, 2), (48, 32), (7, 4)])
def test_two_thirds_of_a_prompt_are_the_source(length, cut):
    source, target = families._halves(torch.arange(length))
    assert source.tolist() == list(range(cut)) and target.tolist() == list(range(cut, length))
    assert families._types(torch.zeros(length, 2))[:, 0].tolist() == [0] * (length // 2) + [1] * (length - length // 2)


@pytest.mark.parametrize("a_stage", [1, 2])
@pytest.mark.parametrize("pp, chunks", [(1, 1), (2, 1), (1, 3), (2, 2), (3, 2)])
def test_layers_of_interleaved_stages(pp, chunks, a_stage):
    """Megatron-LM gives a rank's chunk n the n-th of as many runs of layers, and of it the rank's part."""
    layers, name = a_stage * pp * chunks, "decoder.layers.{}.self_attention.linear_proj.bias"
    names = Dictionary(GPTFacts(Model(layers, 4, 1), 8))
    wanted = {f"blocks.{n}.attention.output.bias": Placement((4,), Constant(0.0)) for n in range(layers)}
    for rank in range(pp):
        keys = {f"{chunk}/{name.format(n)}": n + a_stage * chunk for chunk in range(chunks) for n in range(a_stage)}
        first = {chunk: chunk * (layers // chunks) + rank * a_stage for chunk in range(chunks)}
        file = megatron_lm.OpenFile(
            megatron_lm.RankFile(0, rank, Path("model.pt"), 0),
            dict(chunks=chunks, version=3.0, args={}),
            {key: (4,) for key in keys},
            lambda key, keys=keys: torch.full((4,), float(keys[key])),
            [],
            None,
        )
        for own in megatron_lm._parameters(file, names, wanted, (1, pp), 0):
            [piece] = own.pieces("", file.get(own.key))
            chunk, layer = divmod(keys[own.key], a_stage)
            assert piece.name == f"blocks.{first[chunk] + layer}.attention.output.bias"


@pytest.mark.parametrize("largest", [0.5, 1.0, 40.0])
@pytest.mark.parametrize("millionths, same", [(0.0, True), (0.9, True), (1.1, False), (math.nan, False)])
def test_a_mixture_computes_what_its_dense_model_does(largest, millionths, same, monkeypatch):
    """To a millionth of the largest logit, or of 1 if all are smaller."""
    before = torch.tensor([largest, -largest / 2], dtype=torch.float64)
    logits = dict(dense=before, mixture=before + torch.tensor([0.0, millionths * 1e-6 * max(largest, 1.0)]))
    found = lambda path, precision: SimpleNamespace(model=SimpleNamespace(logits=lambda prompts: logits[path]))
    monkeypatch.setattr(upcycled, "load_model", found)
    monkeypatch.setattr(upcycled, "prompts_for", lambda facts: None)
    monkeypatch.setattr(upcycled, "facts_of", lambda config, vocab_size: None)
    if same:
        assert "the same function" in upcycled._compared("dense", "mixture", None, 1)
    else:
        with pytest.raises(CheckpointError, match="something else"):
            upcycled._compared("dense", "mixture", None, 1)


# ---- files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [None, "blocks", "scales", "dims"])
def test_files_of_mxfp4_are_tensors_with_inputs_before_rows(damage):
    """32 numbers of a row share a scale. What has blocks alone stays as it is."""
    experts, rows, blocks = 2, 3, 2
    shapes = {"x_blocks": (experts, rows, blocks, 16), "x_scales": (experts, rows, blocks), "y": (4,), "z_blocks": (1,)}
    shapes["x_blocks"] = dict(blocks=(2, 3, 2, 8), dims=(2, 3, 32)).get(damage, shapes["x_blocks"])
    shapes["x_scales"] = (2, 3, 3) if damage == "scales" else shapes["x_scales"]
    draw = torch.Generator().manual_seed(0)
    stored = {name: torch.randint(0, 256, shape, generator=draw).to(torch.uint8) for name, shape in shapes.items()}
    stored["x_scales"] = stored["x_scales"] % 4 + 126
    files = SimpleNamespace(shapes=shapes, get=stored.__getitem__)
    if damage:
        with pytest.raises(CheckpointError, match="x_blocks is .*: no MXFP4"):
            hf_blocks.MXFP4Files(files)
        return
    made = hf_blocks.MXFP4Files(files)
    assert made.shapes == {"x": (experts, 32 * blocks, rows), "y": (4,), "z_blocks": (1,)}
    assert made.get("y") is stored["y"]
    found, values = made.get("x"), (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for e, r, i in itertools.product(range(experts), range(rows), range(32 * blocks)):
        byte = int(stored["x_blocks"][e, r, i // 32, i % 32 // 2])
        bits = byte >> 4 if i % 2 else byte & 15
        value = values[bits & 7] * (-1 if bits & 8 else 1) * 2.0 ** (int(stored["x_scales"][e, r, i // 32]) - 127)
        assert found[e, i, r] == value


def test_other_files_of_a_tokenizer_are_copied_once(tmp_path):
    """Those that are there stay; folders of templates are joined."""
    (source := tmp_path / "a").mkdir()
    (folder := tmp_path / "b").mkdir()
    for name in ("special_tokens_map.json", "added_tokens.json", "other.txt"):
        (source / name).write_text("new")
    (folder / "added_tokens.json").write_text("old")
    for place, name in ((source, "x.jinja"), (folder, "y.jinja")):
        (place / "additional_chat_templates").mkdir()
        (place / "additional_chat_templates" / name).write_text(name)
    hf_files._copy_others(source, folder)
    assert (folder / "special_tokens_map.json").read_text() == "new"
    assert (folder / "added_tokens.json").read_text() == "old" and not (folder / "other.txt").exists()
    assert sorted(path.name for path in (folder / "additional_chat_templates").iterdir()) == ["x.jinja", "y.jinja"]


@pytest.mark.parametrize("levels", [1, 2, 7, 8, 9])
def test_weights_are_found_in_dictionaries_of_eight_levels(levels):
    content = torch.ones(1)
    for level in range(levels):
        content = {f"l{level}": content, "number": 3}
    found = list(megatron_pickle._flat(content, "", megatron_pickle._DEPTH))
    name = ".".join(f"l{level}" for level in reversed(range(levels)))
    assert [one for one, _ in found] == [name] * (levels <= 8)


def test_what_a_checkpoint_says_of_its_run():
    """Numbers and words, also out of tensors; updates in their order, each once, from any depth."""
    optimizer = dict(state={3: dict(step=torch.tensor(9.0)), 1: dict(step=2)}, param_groups=[dict(step=9, lr=0.1)])
    optimizer["grad_scaler"] = dict(scale=torch.tensor([8.0]), on=True)
    args = SimpleNamespace(lr=0.5, names=["a", 1], odd=object(), nested=[[1]])
    content = dict(args=argparse.Namespace(**vars(args)), iteration=9, checkpoint_version=3.0, optimizer=optimizer)
    content["opt_param_scheduler"] = dict(num_steps=11, style="linear")
    facts = megatron_pickle.facts_of(content)
    assert facts == dict(
        iteration=9, version=3.0, args=dict(lr=0.5, names=["a", 1]), schedule=dict(num_steps=11), scale=dict(scale=8.0),
        updates=[2, 9.0],
    )  # fmt: skip
    assert megatron_pickle.facts_of(dict(lr_scheduler=dict(num_steps=2)))["schedule"] == dict(num_steps=2)


def test_the_state_of_numbered_parameters():
    """Of one optimizer, or of two, of which experts have the second; with main weights of half precision."""
    x = lambda value: torch.full((2,), float(value))
    own = dict(
        state={0: dict(exp_avg=x(1), step=3), 1: dict(exp_avg=x(2))}, param_groups=[dict(params=[1]), dict(params=[0])]
    )
    whole, facts = dict(optimizer=own, fp32_from_fp16_params=[[x(3)], [x(4)]]), {}
    found = megatron_pickle._numbered_state([whole, own], facts)
    wanted = {"exp_avg/0": x(1), "exp_avg/1": x(2), "param/1": x(3), "param/0": x(4)}
    wanted |= {f"{megatron_pickle.EXPERTS}exp_avg/{n}": x(n + 1) for n in range(2)}
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], one) for name, one in wanted.items())
    assert facts == dict(groups=[[1], [0]], groups_of_experts=[[1], [0]])
    assert megatron_pickle._numbered_state(None, facts) == {} and facts["groups"] == []


@pytest.mark.parametrize("growth, hysteresis", [(None, None), (5, 1), (0, 2)])
def test_the_position_of_a_run_that_is_imported(growth, hysteresis):
    """The loss scale's state, and samples of the schedule, which may differ from those of the data."""
    scale = {} if growth is None else dict(scale=64.0, growth_tracker=growth, hysteresis_tracker=hysteresis)
    args = dict(consumed_train_samples=80, consumed_valid_samples=8, hysteresis=2)
    facts = dict(
        args=args, schedule={} if growth is None else dict(num_steps=72), scale=scale, updates=[9], iteration=10
    )
    position, updates = megatron_optimizer.position_of(facts, dict(fresh=1))
    state = dict(scale=1.0, good_steps=0, overflows=0)
    state = dict(scale=64.0, good_steps=growth, overflows=2 - hysteresis) if scale else state
    samples = dict(consumed_samples=80, scheduled_samples=72 if scale else 80, consumed_valid_samples=8)
    assert (position, updates) == (dict(fresh=1, scaler=state, iteration=10, **samples), 9)
    for wrong in ([], [8, 9]):
        with pytest.raises(CheckpointError, match="does not say how many updates"):
            megatron_optimizer.position_of(facts | dict(updates=wrong), {})


def like(*values) -> megatron_optimizer.LocalParameter:
    return megatron_optimizer.LocalParameter(str(values), (len(values),), torch.tensor(values).equal, None)


@given(
    st.lists(st.tuples(st.integers(1, 70), st.booleans()), min_size=1, max_size=5),
    st.integers(0, 70),
    st.integers(1, 65),
)
def test_parameters_are_found_in_a_buffer_of_any_buckets(sizes, padding, slack):
    """Each at the next multiple of 64 from its bucket's start, or as the first of a new bucket."""
    parameters, parts, starts, at, bucket = [], [], [], 0, 0
    for number, (size, begins) in enumerate(sizes):
        if begins:
            bucket = at
        gap = -(at - bucket) % 64
        values = [float(100 * number + n + 1) for n in range(size)]
        parts += [torch.zeros(gap), torch.tensor(values)]
        at += gap
        starts.append([at])
        at += size
        parameters.append(like(*values))
    main = torch.cat([*parts, torch.zeros(padding)])
    assert megatron_optimizer.locate(parameters, main, slack) == (starts if padding < slack else [])


def test_numbered_parameters_go_to_the_first_that_fits():
    """Two of one shape and of equal main weights are taken in the order of the module, each once."""
    made = []
    pieces = lambda key: lambda prefix, x: made.append((key, prefix, x.tolist())) or []
    one = lambda key: megatron_optimizer.LocalParameter(key, (2,), lambda x: True, pieces(key))
    state = {f"{kind}/{n}": torch.tensor([n, n + 0.5]) for n in (4, 7) for kind in ("exp_avg", "exp_avg_sq")}
    list(megatron_optimizer.from_groups("s", [one("a"), one("b")], [[7], [4]], state))
    assert made == [
        (key, f"optimizer.{kind}.", [n, n + 0.5])
        for key, n in (("a", 7), ("b", 4))
        for kind in ("exp_avg", "exp_avg_sq")
    ]
    with pytest.raises(CheckpointError, match="lacks the state of b"):
        list(megatron_optimizer.from_groups("s", [one("a"), one("b")], [[7]], state))
    with pytest.raises(CheckpointError, match="parameter 4 in s is none"):
        list(megatron_optimizer.from_groups("s", [one("a")], [[7, 4]], state))
    with pytest.raises(CheckpointError, match="does not hold the state of Adam for parameter 9"):
        list(megatron_optimizer.from_groups("s", [one("a")], [[9]], state))


@pytest.mark.parametrize(
    "args, layers, stages, wanted",
    [
        ({}, 6, 3, [0, 2, 4]),
        ({}, 6, 1, [0]),
        (dict(hybrid_layer_pattern="**|*|***"), 6, 3, [0, 2, 3]),
        ({}, 6, 4, None),
        (dict(hybrid_layer_pattern="**|****"), 6, 3, None),
    ],
)
def test_the_first_layers_of_stages(args, layers, stages, wanted):
    if wanted is None:
        with pytest.raises(CheckpointError, match=f"{layers} layers on {stages} pipeline stages of unknown sizes"):
            megatron_arguments.first_layers(args, layers, stages)
    else:
        assert megatron_arguments.first_layers(args, layers, stages) == wanted


@pytest.mark.parametrize(
    "vocabulary, multiple, tp, rows", [(8, 4, 2, 8), (9, 4, 2, 16), (7, 4, 1, 8), (1, 128, 8, 1024)]
)
def test_a_vocabulary_is_padded_to_the_next_multiple(vocabulary, multiple, tp, rows):
    model = Model(1, 8, 2, make_vocab_size_divisible_by=multiple)
    assert megatron_export.Export(model, vocabulary, tp, 1, "local", torch.float32).padded_vocab == rows


@pytest.mark.parametrize("names, prefix", [
    (["model.wte.weight"], ""), (["model.embed_tokens.weight", "lm_head.weight"], ""),
    (["model.model.embed_tokens.weight", "model.lm_head.weight"], "model."), (["m.tok_embeddings.weight", "m.x"], "m."),
    (["m.tok_embeddings.weight", "x"], ""), (["tok_embeddings.weight", "x"], ""),
])  # fmt: skip
def test_what_stands_before_the_names_of_all_weights(names, prefix):
    assert dcp_files._prefix(set(names)) == prefix


@pytest.mark.parametrize(
    "entry, value", [("norm_topk_prob", False), ("topk_method", "greedy"), ("scoring_func", "softmax")]
)
@pytest.mark.parametrize("kind", ["dots1", "deepseek_v3"])
def test_routers_that_choose_otherwise_are_refused(kind, entry, value):
    theirs = their_settings(Model(**BASES[kind]), V, None, "float32")
    assert our_settings(theirs)[1].moe_router_enable_expert_bias
    with pytest.raises(CheckpointError, match=entry):
        our_settings(theirs | {entry: value})


def rank_files(folder, names, file="model_optim_rng.pt") -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / file).touch()


@pytest.mark.parametrize("named", ["step", "tracker", "release", "itself"])
def test_files_of_ranks_are_those_of_a_step_in_the_order_of_stages(named, tmp_path):
    folder = tmp_path / dict(release="release", itself=".").get(named, "iter_0000012")
    names = [f"mp_rank_{tp:02d}_{pp:03d}" for tp in range(2) for pp in range(3)]
    rank_files(folder, names, "model_rng.pt")
    tracker = dict(tracker="12\n", release="release").get(named)
    if tracker:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
    if named == "tracker":
        rank_files(tmp_path / "iter_0000003", ["mp_rank_00"])
    parts = megatron_lm.find_parts(tmp_path, 12 if named == "step" else None)
    assert [(part.pp, part.tp, part.ep) for part in parts] == list(itertools.product(range(3), range(2), [0]))
    assert all(part.path == folder / f"mp_rank_{part.tp:02d}_{part.pp:03d}" / "model_rng.pt" for part in parts)


@pytest.mark.parametrize(
    "names, told",
    [
        (["mp_rank_00", "mp_rank_02"], r"missing \(tensor, pipeline rank\): \[\(1, 0\)\]"),
        (["mp_rank_00_000_000", "mp_rank_00_001_001"], r"expert rank\): \[\(0, 0, 1\), \(0, 1, 0\)\]"),
        (["mp_rank_00", "mp_rank_1"], "mp_rank_1 is not understood"),
    ],
)
def test_files_of_ranks_that_are_missing_are_named(names, told, tmp_path):
    rank_files(tmp_path, names)
    with pytest.raises(CheckpointError) as error:
        megatron_lm.find_parts(tmp_path, None)
    assert re.search(told, str(error.value))
    with pytest.raises(CheckpointError, match="holds no mp_rank_"):
        megatron_lm.find_parts(tmp_path / "other", None)


@pytest.mark.parametrize("pp, ep", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_the_second_number_of_a_rank_is_that_of_experts_without_stages(pp, ep):
    args = dict(expert_model_parallel_size=ep, pipeline_model_parallel_size=pp)
    made = lambda *places: [megatron_lm.RankFile(0, first, Path("a"), second) for first, second in places]
    given = made(*((0, n) for n in range(1))) if pp == ep == 1 else None
    given = given or (made((0, 0), (1, 0)) if 1 in (pp, ep) else made((0, 0), (0, 1), (1, 0), (1, 1)))
    found = megatron_lm._ranks_of_experts(given, args)
    assert {(part.pp, part.ep) for part in found} == set(itertools.product(range(pp), range(ep)))


@pytest.mark.parametrize("window", [None, 7, 8, 9])
@pytest.mark.parametrize("kind", ["mistral", "gemma2", "llama"])
def test_windows_that_llama_cpp_has(kind, window):
    """It looks at all tokens, except of Gemmas: a window that a text can be longer than is another model."""
    pytest.importorskip("gguf")
    config = dict(max_position_embeddings=8, sliding_window=window)
    family = SimpleNamespace(
        kind=kind, facts=SimpleNamespace(settings=SimpleNamespace()), theirs=lambda end, dtype: config
    )
    if kind != "gemma2" and window == 7:
        with pytest.raises(SettingsError, match="without --window-size 7"):
            gguf_file.refuse_other(family)
    else:
        assert gguf_file.refuse_other(family) is gguf_file.ARCHITECTURES[kind]
    for more in (dict(activation_function="relu"), dict(query_pre_attn_scalar=3, head_dim=4)):
        family.theirs = lambda end, dtype, more=more: dict(max_position_embeddings=8) | more
        with pytest.raises(SettingsError, match="activation relu|--query-pre-attn-scalar 3"):
            gguf_file.refuse_other(family)


def test_evaluations_of_this_step_are_on_the_card(tmp_path):
    """Of the folder and of the one around it, line by line; a damaged line or one of another step is left out."""
    (run := tmp_path / "run").mkdir()
    lines = [
        "{broken",
        '{"iteration": 3, "loss": 9.0}',
        '{"iteration": 5, "data": "a/held", "loss": 2.5, "whole": true}',
        "[5]",
    ]
    (run / "evaluation.jsonl").write_text("\n".join(lines))
    (tmp_path / "evaluation.json").write_text('{"iteration": 5, "perplexity": 1234567.0, "name": "x"}')
    assert card._evaluations_of_tools(run, 5) == [("held, loss", "2.5"), ("held-out text, perplexity", "1.23457e+06")]
    assert card._evaluations_of_tools(run, 4) == []


def product_like(kind: type, **more):
    """A product of a kind without a layer."""
    made = kind.__new__(kind)
    for name, value in more.items():
        setattr(made, name, value)
    return made


OF_TRAINING = SimpleNamespace(rounds_inputs=True, observes=True)
CONFIGS = {  # product -> (format, weights, inputs)
    "int8": (lambda: product_like(quantize.Int8), "pack-quantized", dict(num_bits=8, strategy="channel"), None),
    "int8-dynamic": (
        lambda: product_like(quantize.Int8Dynamic),
        "int-quantized",
        dict(num_bits=8, strategy="channel"),
        dict(strategy="token", dynamic=True, symmetric=True),
    ),
    "int4": (
        lambda: product_like(quantize.Int4, group_size=32),
        "pack-quantized",
        dict(num_bits=4, strategy="group", group_size=32, symmetric=False),
        None,
    ),
    "int4 symmetric": (
        lambda: product_like(quantize.Int4, group_size=64, symmetric=True),
        "pack-quantized",
        dict(num_bits=4, strategy="group", group_size=64),
        None,
    ),
    "trained": (
        lambda: product_like(quantize.Int8Static, trained=OF_TRAINING),
        "int-quantized",
        dict(num_bits=8, strategy="channel"),
        dict(strategy="tensor", dynamic=False, symmetric=True),
    ),
    "trained by tokens": (
        lambda: product_like(quantize.Int8OfTokens, trained=SimpleNamespace(rounds_inputs=True, observes=False)),
        "int-quantized",
        dict(num_bits=8, strategy="channel"),
        dict(strategy="token", dynamic=True, symmetric=False),
    ),
    "trained weights": (
        lambda: product_like(quantize.Int8Static, trained=SimpleNamespace(rounds_inputs=False, observes=False)),
        "pack-quantized",
        dict(num_bits=8, strategy="channel"),
        None,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_entry_of_quantized_weights_in_a_config(kind):
    """As compressed-tensors has it; matrices that stay as they are, and the output layer, are listed."""
    make, form, weights, inputs = CONFIGS[kind]
    names = dict(a=("x.a.weight", "x.b.weight"), b=("y.weight",), c=("z.weight",))
    matches = [Match(f"{name}.weight", theirs) for name, theirs in names.items()]
    shapes = {"a.weight": (4, 2), "b.weight": (4, 2), "c.weight": (4,)}
    family = SimpleNamespace(matches=matches, facts=SimpleNamespace())
    family.facts.weights = {name: Placement(shape, Normal(1.0)) for name, shape in shapes.items()}
    found = compressed_tensors.quantization_config(family, dict(b=make()))
    group = found["config_groups"]["group_0"]
    assert (found["format"], found["quant_method"], found["ignore"]) == (
        form,
        "compressed-tensors",
        ["lm_head", "x.a", "x.b"],
    )
    assert group["weights"] == dict(type="int", symmetric=True, dynamic=False) | weights and group["targets"] == [
        "Linear"
    ]
    assert group["input_activations"] == (inputs and dict(num_bits=8, type="int") | inputs)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_pairs_of_a_model_or_of_what_is_below_its_output_layer(prefix):
    """PEFT names modules as those of the model that it was given."""
    matches = [
        Match(f"blocks.{n}.attention.qkv.weight", tuple(f"model.layers.{n}.{one}.weight" for one in "qkv"))
        for n in (0, 1)
    ]
    matches.append(Match("embedding.word.weight", ("model.embed.weight",)))
    pair = peft.PeftPair(torch.ones(1, 2), torch.ones(2, 1))
    pairs = {f"{prefix}layers.0.q": pair, f"{prefix}layers.0.v": pair}
    linear = {f"blocks.{n}.attention.qkv" for n in (0, 1)}
    found = peft._by_layer(Path("x"), pairs, matches, linear)
    assert list(found) == ["blocks.0.attention.qkv"] and found["blocks.0.attention.qkv"][1] == [pair, None, pair]
    for more, told in (
        ({"other": pair}, "pairs of modules that this model does not have: other"),
        (None, "has no pairs"),
    ):
        with pytest.raises(CheckpointError, match=told):
            peft._by_layer(Path("x"), {} if more is None else pairs | more, matches, linear)


@pytest.mark.parametrize("kept", [0, 1, 5, 6])
@pytest.mark.parametrize(
    "name, lacking", [("blocks.0.mlp.up.weight", "{} of 6 elements"), ("a.experts.up", "expert {}")]
)
def test_what_an_import_lacks_is_told(kept, name, lacking):
    """Of a tensor, to the element; of experts, their numbers."""
    whole = torch.arange(6.0).view(6, 1)
    pieces = [Piece("other", (2,), Box((0,), (2,)), torch.zeros(2))]
    pieces += [Piece(name, (6, 1), Box((at, 0), (1, 1)), whole[at : at + 1]) for at in range(kept)]
    shards = [[one] for one in pieces]
    found = check_complete(Path("x"), {name, "other"}, iter(shards))
    if kept == 6:
        assert list(found) == shards
        return
    left = ", ".join(map(str, range(kept, 6))) if "experts" in name else 6 - kept
    words = f"{name}: {lacking.format(left)}" if kept else name
    with pytest.raises(CheckpointError, match=f"x lacks 1 tensors, or parts of them(?s:.*){re.escape(words)}"):
        list(found)


@pytest.mark.parametrize(
    "there, found",
    [
        (("transformer.a.b", "a.b", "copy"), "transformer.a.b"),
        (("a.b", "copy"), "a.b"),
        (("copy", "b"), "copy"),
        (("b", "other"), "transformer.a.b"),  # which the message then names
    ],
)
def test_a_tensor_may_lack_a_prefix_or_be_under_the_name_of_a_copy(there, found):
    family = SimpleNamespace(copies=dict(copy="transformer.a.b", other="transformer.a.c"))
    assert fitted._name_in(SimpleNamespace(shapes=dict.fromkeys(there)), family, "transformer.a.b") == found


@pytest.mark.parametrize("special, strips", [*itertools.product((True, False), repeat=2)])
@pytest.mark.parametrize("after", [None, lambda text: [7] * len(text), lambda text: []])
def test_white_space_after_special_tokens_that_only_theirs_drop(special, strips, after):
    ours = SentencePieceTokenizer.__new__(SentencePieceTokenizer)
    object.__setattr__(ours, "encode_after", after)
    tokens = {0: SimpleNamespace(special=True, rstrip=False), 1: SimpleNamespace(special=special, rstrip=strips)}
    wanted = special and strips and after is not None and after("?") == [7]
    assert same_ids._drops_white_space(SimpleNamespace(added_tokens_decoder=tokens), ours) == wanted
    assert not same_ids._drops_white_space(SimpleNamespace(added_tokens_decoder=tokens), object())
