# SPDX-License-Identifier: Apache-2.0
"""What the planner says of encoder-decoders against runs: bytes of state and of messages, kept activations; and how layers
are cut into stages.
"""

import pytest
import torch

from megatron.data.mock import MockPairs
from megatron.errors import SettingsError
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of, recipe_of
from megatron.model.t5.facts import T5Facts
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.planner.activations import stage_saved_bytes
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import state
from megatron.planner.parity import laid_out, parse_layout
from megatron.planner.traffic import totals, transfers
from megatron.training.rules import resolve
from tests.planner.test_activations import saved_by_autograd
from tests.planner.test_truth import counted_step

SIZES = """--model-type T5 --hidden-size 32 --num-attention-heads 4 --seq-length 24 --decoder-seq-length 8
    --encoder-num-layers 2 --decoder-num-layers 2 --mock-data --vocab-size 90 --make-vocab-size-divisible-by 8 --lr 1e-3
    --global-batch-size 8 --train-iters 10 --eval-iters 0 --micro-batch-size 2"""
PLAIN = "--hidden-dropout 0 --attention-dropout 0"
T5 = f"""{PLAIN} --position-embedding-type relative --normalization RMSNorm --disable-bias-linear --unscaled-attention
    --feed-forward-proj gated-gelu --untie-embeddings-and-output-weights"""
AGAIN = "--recompute-granularity full"
QUICK = [("tp2sp", f"{T5} {AGAIN}"), ("pp2", T5)]
CASES = [
    *QUICK,
    ("tp2", ""),
    ("tp2", f"{PLAIN} {AGAIN} --recompute-num-layers 2"),
    ("tp2sp", "--recompute-granularity full_attn --no-recompute-layers 1"),
    ("tp2sp", "--recompute-granularity selective --recompute-modules layernorm mlp"),
    ("pp2-zbv", "--bf16"),
    ("dp2-zero3", T5),
    ("tp2sp-pp2", T5),
]


def settings_of(case):
    layout = parse_layout(case[0])
    return laid_out(parse_any(f"{SIZES} {case[1]}".split()), layout), layout.world_size


def found_on(world, chosen):
    """case -> what each rank found, for those of the chosen cases that are for as many ranks."""
    cases = [case for case in chosen if parse_layout(case[0]).world_size == world]
    settings = [settings_of(case)[0] for case in cases]
    answers = run_ranks(world, lambda rank: list(map(counted_step(), settings)), timeout=300)
    return {case: list(ranks) for case, *ranks in zip(cases, *answers, strict=True)}


@pytest.mark.parametrize(
    "world, chosen",
    [(2, QUICK), pytest.param(2, CASES, marks=pytest.mark.full), pytest.param(4, CASES, marks=pytest.mark.full)],
)
def test_ledgers_are_exact(world, chosen):
    for case, ranks in found_on(world, chosen).items():
        config = settings_of(case)[0]
        facts = facts_of(config, config.tokenizer.vocab_size + 1)
        layout, job = Layout.of(config, world), Job.of(config, facts, dp=world, device="cpu")
        for place, memory, _, sent in ranks:
            held, _ = state(job, layout, place["pp"], place)
            shared = 0 if held["main weights"] else memory["parameters"]
            assert sum(held.values()) == sum(memory.values()) - shared, (case, place)
            assert totals(transfers(job, layout, place["pp"], place)) == sent, (case, place)


ROPE = f"{PLAIN} --num-query-groups 2 --position-embedding-type rope"
CAPPED = f"{PLAIN} --attn-logit-softcapping 2"
SELECTIVE = "--recompute-granularity selective --recompute-modules"
PLAINLY = "--no-masked-softmax-fusion"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "more",
    [
        "",
        T5,
        ROPE,
        CAPPED,
        *(f"{flags} {PLAINLY}" for flags in ("", T5, ROPE, CAPPED)),
        f"{T5} --attention-backend sdpa",
        f"{SELECTIVE} core_attn",
        f"{SELECTIVE} layernorm mlp_act",
        f"{T5} {SELECTIVE} core_attn layernorm mlp",
        f"{T5} --quantization --activation-preprocess-type PACT",
    ],
)
def test_kept_activations_are_within_ten_percent(more):
    """Of what autograd's hooks see, without the tables of distances that all layers share."""
    config = resolve(parse_any(f"{SIZES} {more} --seq-length 160 --decoder-seq-length 140 --device cpu".split()), 1)
    facts = T5Facts.of(config, 91)
    model = recipe_of(config).build_model(config, Mesh(), 91, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    from megatron.data.loader import named_batch

    data = MockPairs(4, 160, 140, 91)
    arrays = {name: torch.from_numpy(array) for name, array in data[0].items()}
    arrays = {name: torch.stack([array, array], 1) for name, array in arrays.items()}
    with saved_by_autograd(model) as seen:
        kept = model(None, named_batch(arrays, torch.arange(2)))
    job = Job.of(config, facts, dp=1, device="cpu")
    expected = stage_saved_bytes(job, Layout.of(config, 1), range(facts.num_layers), True, True).total()
    found = sum(storage.nbytes() for storage in seen.values())
    assert kept and abs(found / expected - 1) < 0.1, (found, expected)


# ---- how layers are cut ----------------------------------------------------------------------------------------------

SHAPE = """--model-type T5 --hidden-size 1024 --num-attention-heads 16 --encoder-num-layers 12 --decoder-num-layers 12
    --seq-length 512 --decoder-seq-length 114 --mock-data --vocab-size 32000 --micro-batch-size 1 --global-batch-size 16
    --train-iters 1 --lr 1e-3 --pipeline-model-parallel-size 4"""


def test_the_flags_of_megatron_lm_are_stages():
    cut = lambda flags: parse_any(f"{SHAPE} {flags}".split()).parallel
    assert cut("--pipeline-model-parallel-split-rank 3").pipeline_stage_layers == "4,4,4,12"
    assert cut("--pipeline-model-parallel-split-rank 1").pipeline_stage_layers == "12,4,4,4"
    more = cut("--pipeline-model-parallel-size 1 --encoder-pipeline-model-parallel-size 3")
    assert (more.pipeline_model_parallel_size, more.pipeline_stage_layers) == (4, "4,4,4,12")
    again = parse_any(f"{SHAPE} --pipeline-model-parallel-split-rank 3".split())
    assert recipe_of(again).normalize_config(again) == again
    facts = T5Facts.of(again, 32000)
    assert [facts.decodes(n) for n in range(24)] == [False] * 12 + [True] * 12


def test_an_output_layer_makes_the_last_stage_shorter():
    layers = lambda flags: [
        int(n) for n in parse_any(f"{SHAPE} {flags}".split()).parallel.pipeline_stage_layers.split(",")
    ]
    assert layers("--vocab-size 250000")[-1] < layers("--vocab-size 2")[-1]


WRONG = {
    "--pipeline-model-parallel-split-rank 0": "give 1 to 3",
    "--pipeline-model-parallel-split-rank 4": "there are 4 pipeline ranks; the first|there are 4 pipeline ranks",
    "--pipeline-model-parallel-split-rank -1": "split-rank -1",
    "--pipeline-model-parallel-split-rank 2 --encoder-pipeline-model-parallel-size 2": "give one of them",
    "--pipeline-model-parallel-split-rank 2 --pipeline-stage-layers 6,6,6,6": "both set the layers",
    "--pipeline-model-parallel-split-rank 2 --pipeline-schedule zb-v": "several model chunks a rank",
    "--pipeline-model-parallel-split-rank 2 --encoder-num-layers 1": "gives 2 ranks to 1 encoder layers",
    "--pipeline-model-parallel-size 1 --pipeline-model-parallel-split-rank 1": "raise --pipeline-model-parallel-size",
    "--encoder-pipeline-model-parallel-size -2": "is no number of ranks",
    "--encoder-num-layers 0": "layers of both kinds.*pretrain_gpt.py",
    "--decoder-num-layers 0": "layers of both kinds.*pretrain_bert.py",
    "--num-layers 7": "--num-layers 7 and --encoder-num-layers 12",
}
REFUSED = {
    "--decoder-seq-length 0": "--decoder-seq-length",
    "--decoder-seq-length 600 --max-position-embeddings 512": "longer than --max-position-embeddings 512",
    "--tensor-model-parallel-size 2 --sequence-parallel --decoder-seq-length 113": "--decoder-seq-length 113 cannot be",
    "--context-parallel-size 2": "needs whole sequences",
    "--position-embedding-type relative --relative-attention-num-buckets 2": "at least 4",
    "--position-embedding-type relative --relative-attention-max-distance 8": "must be above 16, half of",
    "--swiglu --feed-forward-proj relu": "two activations",
    "--scale-tied-output --untie-embeddings-and-output-weights": "--scale-tied-output is for",
    "--reset-attention-mask": "--reset-attention-mask: samples",
    "--window-size 8,0": "--window-size",
    "--pipeline-stage-layers 6,6,6,5": "is 23 layers",
    "--num-attention-heads 3 --pipeline-stage-layers 6,6,6,6": "multiple of --num-attention-heads",
}


@pytest.mark.parametrize("flags", WRONG)
def test_layers_and_stages_that_cannot_be(flags):
    with pytest.raises(SettingsError, match=f"(?s){WRONG[flags]}"):
        parse_any(f"{SHAPE} {flags}".split())


@pytest.mark.sampled(10)
@pytest.mark.parametrize("flags", REFUSED)
def test_settings_that_cannot_work(flags):
    config = parse_any(f"{SHAPE} {flags}".split())
    ranks = 4 * config.parallel.tensor_model_parallel_size * config.parallel.context_parallel_size
    with pytest.raises(SettingsError, match=REFUSED[flags]) as refusal:
        resolve(config, ranks)
    assert "\n" not in refusal.value.what, "one message"


def test_layers_are_missing():
    with pytest.raises(SettingsError, match="--encoder-num-layers is missing"):
        parse_any("--model-type T5 --hidden-size 8 --num-attention-heads 1 --mock-data --vocab-size 8".split())


def test_relative_positions_belong_to_encoder_decoders():
    with pytest.raises(SettingsError, match="relative belongs to encoder-decoders"):
        resolve(
            parse_any(
                "--model-type GPT --num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data "
                "--vocab-size 8 --micro-batch-size 1 --train-iters 1 --lr 1 --position-embedding-type relative "
                "--device cpu".split()
            ),
            1,
        )
