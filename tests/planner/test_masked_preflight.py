# SPDX-License-Identifier: Apache-2.0
"""`--preflight` and `--dry-run` of T5 and BERT: what is right passes, with as many parameters as Hugging Face's model of
the shape has; faults that only these models can have are found and named.
"""

import pytest
import torch

import pretrain_bert
import pretrain_t5
from megatron.model.bert.facts import BertFacts
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of, named_recipe
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.module import T5
from megatron.planner.preflight.ranks import Design, check_ranks
from megatron.training.rules import resolve

transformers = pytest.importorskip("transformers")

H, HEADS, FFN, V = 32, 4, 128, 128
RUN = f"""--hidden-size {H} --num-attention-heads {HEADS} --ffn-hidden-size {FFN} --seq-length 24 --mock-data
    --vocab-size {V - 1} --make-vocab-size-divisible-by {V} --micro-batch-size 2 --global-batch-size 16 --train-iters 4
    --lr 1e-3 --eval-iters 0 --device cpu"""
LAYERS = {"T5": "--encoder-num-layers 3 --decoder-num-layers 5 --decoder-seq-length 8", "BERT": "--num-layers 8"}
FLAGS = {
    "T5": f"""{RUN} {LAYERS["T5"]} --position-embedding-type relative --normalization RMSNorm --disable-bias-linear
        --unscaled-attention --feed-forward-proj gated-gelu --untie-embeddings-and-output-weights""",
    "BERT": f"{RUN} {LAYERS['BERT']} --post-norm",
}
LAYOUT = "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2 --sharding-stage 2"


def theirs(kind: str) -> int:
    """Parameters of Hugging Face's model."""
    with torch.device("meta"):
        if kind == "BERT":
            sizes = dict(vocab_size=V, hidden_size=H, num_hidden_layers=8, num_attention_heads=HEADS)
            config = transformers.BertConfig(**sizes, intermediate_size=FFN, max_position_embeddings=24)
            return transformers.BertForPreTraining(config).num_parameters()
        sizes = dict(vocab_size=V, d_model=H, d_kv=H // HEADS, d_ff=FFN, num_heads=HEADS)
        sizes |= dict(num_layers=3, num_decoder_layers=5, feed_forward_proj="gated-gelu")
        config = transformers.T5Config(**sizes)
        config.tie_word_embeddings = False  # transformers 5 ties them whatever it is told
        model = transformers.T5ForConditionalGeneration(config)
        model.encoder.embed_tokens = model.decoder.embed_tokens = model.shared
        return model.num_parameters()


def checks(kind: str, more: str = "", world: int = 8) -> dict:
    """Name -> check of every rank."""
    config = resolve(parse_any(f"--model-type {kind} {FLAGS[kind]} {LAYOUT} {more}".split()), world)
    design = Design(config, world, facts_of(config, V), named_recipe(kind).build_model)
    return {check.name: check for check in check_ranks(design)}


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "kind, more",
    [("T5", ""), ("T5", "--num-virtual-stages-per-pipeline-rank 2"), ("T5", "--pipeline-schedule zb-v"), ("BERT", "")],
)
def test_right_ranks_pass(kind, more):
    found = checks(kind, more)
    assert [check.line for check in found.values() if check.fault] == []
    assert list(found) == ["groups", "schedule", "layers", "parameters", "shards", "shapes"]
    assert f"{theirs(kind):,} in " in found["parameters"].line


message, packed = T5Facts.message, T5._packed
PLANTED = {  # what a model does wrong, and which check says so
    "a message without the target": ("shapes", T5Facts, "message", lambda *args: (24 // 2, *message(*args)[1:])),
    "tables that do not travel": ("shapes", T5, "_packed", lambda self, halves, tables: packed(self, halves, None)),
    "a second head that is not counted": (
        "parameters",
        BertFacts,
        "parameters",
        property(lambda facts: theirs("BERT") - 2 * H - 2),
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault, monkeypatch):
    wanted, where, name, bug = PLANTED[fault]
    monkeypatch.setattr(where, name, bug)
    found = checks("BERT" if where is BertFacts else "T5")
    assert [check.name for check in found.values() if check.fault] == [wanted]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", FLAGS)
def test_the_whole_of_it(kind, capsys):
    main = dict(T5=pretrain_t5.main, BERT=pretrain_bert.main)[kind]
    line = f"{FLAGS[kind]} --pipeline-model-parallel-size 2 --world-size 2".split()
    main([*line, "--preflight"])
    told = capsys.readouterr().out
    assert "preflight: all" in told and "pp2 on 2 rank(s) against one process" in told and "FAIL" not in told
    main([*line, "--dry-run"])
    assert "no problems found" in capsys.readouterr().out
