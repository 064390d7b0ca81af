# SPDX-License-Identifier: Apache-2.0
"""A real GPT, cut into stages of any kind, gives the loss and the gradients of the whole: dropout on, tied or not."""

import pytest
import torch

from megatron.data.loader import MicroBatch
from megatron.errors import SettingsError
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.module import GPT
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import Constant, Placement, placements
from megatron.mpu.random import init_parameter
from megatron.pipeline.build import build_stages, check_model_complete
from megatron.pipeline.execute import P2PCommunicator, execute
from megatron.pipeline.stages import Pipeline
from megatron.settings.schema import Model, Parallel

S, B, VOCABULARY = 6, 2, 29


def _model(**more) -> Model:
    return Model(
        num_layers=5,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=S,
        init_method_std=0.3,
        make_vocab_size_divisible_by=4,
        **more,
    )


def _batches(num_microbatches: int) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(3)
    made = []
    for micro in range(num_microbatches):
        tokens = torch.randint(VOCABULARY, (S + 1, B), generator=generator)
        made.append(MicroBatch(tokens[:-1], tokens[1:].contiguous(), torch.arange(B) + B * micro))
    return made


def _stages(model, pipeline, mesh):
    def build(**part):
        return GPT(model, mesh, VOCABULARY, **part)

    stages = build_stages(build, pipeline, mesh)
    for name, (parameter, placement) in placements(stages).items():
        init_parameter(name, parameter, placement, mesh.coordinates, seed=5)
    return stages


def _run(rank, model, parallel, num_microbatches):
    """(sums, name -> (gradient, axes over which it is partial), name -> weight)"""
    mesh = Mesh(rank, pp=parallel.pipeline_model_parallel_size)
    pipeline = Pipeline.of(parallel, model.num_layers, num_microbatches)
    stages = _stages(model, pipeline, mesh)
    wire = P2PCommunicator(
        mesh.pp, (S, B, model.hidden_size), torch.float32, torch.device("cpu"), stages=pipeline.stages
    )
    ops = pipeline.ops(rank, num_microbatches)
    sums = execute(
        ops,
        stages,
        _batches(num_microbatches),
        wire,
        lambda sums, batch: sums["lm loss"] / (sums["tokens"] * num_microbatches),
    )
    with torch.no_grad():
        for stage in stages:
            stage.eval()
        evaluated = execute(
            pipeline.ops(rank, num_microbatches, training=False), stages, _batches(num_microbatches), wire
        )
    found = placements(stages)
    return (
        sums,
        evaluated,
        {name: (parameter.grad, placement.partial) for name, (parameter, placement) in found.items()},
    )


LAYOUTS = [
    dict(pp=2, pipeline_schedule="gpipe", pipeline_stage_layers="3,2"),
    dict(pp=2, pipeline_schedule="1f1b", decoder_first_pipeline_num_layers=1),
    dict(pp=2, num_virtual_stages_per_pipeline_rank=2, pipeline_stage_layers="1,2,1,1"),
    dict(pp=4, pipeline_schedule="1f1b", pipeline_stage_layers="2,1,1,1"),
    dict(pp=3, pipeline_schedule="zb-h1", pipeline_stage_layers="2,2,1"),
    dict(pp=2, pipeline_schedule="zb-v", pipeline_stage_layers="0,2,2,1"),
    dict(pp=3, pipeline_schedule="v-half", pipeline_stage_layers="1,1,1,1,1,0"),
    dict(pp=1, pipeline_schedule="zb-v", pipeline_stage_layers="2,3"),
]
MODELS = {
    "tied": {},
    "untied": dict(
        untie_embeddings_and_output_weights=True,
        position_embedding_type="rope",
        swiglu=True,
        disable_bias_linear=True,
        normalization="RMSNorm",
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout['pp']}-{layout.get('pipeline_schedule', 'vp')}"
)
def test_stages_of_a_gpt_equal_the_whole(layout, kind, run_ranks):
    model, num_microbatches = _model(**MODELS[kind]), 4
    layout = dict(layout)
    parallel = Parallel(pipeline_model_parallel_size=layout.pop("pp"), **layout)
    whole_sums, whole_eval, whole = _run(0, model, Parallel(), num_microbatches)
    results = run_ranks(parallel.pipeline_model_parallel_size, _run, model, parallel, num_microbatches)
    torch.testing.assert_close(sum(sums for sums, _, _ in results), whole_sums, rtol=1e-6, atol=0)
    torch.testing.assert_close(sum(sums for _, sums, _ in results), whole_eval, rtol=1e-6, atol=0)
    assert whole_sums[0] != whole_eval[0]  # dropout was on
    gradients, copies = {}, {}
    for _, _, own in results:
        for name, (gradient, partial) in own.items():
            assert name not in gradients or partial == copies[name] == ("tied",), name
            gradients[name], copies[name] = gradients.get(name, 0.0) + gradient, partial
    assert gradients.keys() == whole.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, whole[name][0], rtol=2e-5, atol=2e-6), name


def _builder(model, mesh, **more):
    return lambda **part: GPT(model, mesh, VOCABULARY, **part, **more)


def test_one_rank_that_holds_both_ends_has_one_table():
    model, mesh = _model(), Mesh(0, pp=2, create_groups=False)
    parallel = Parallel(pipeline_model_parallel_size=2, pipeline_schedule="zb-v", pipeline_stage_layers="1,2,1,1")
    stages = build_stages(_builder(model, mesh), Pipeline.of(parallel, 5), mesh)
    assert stages[0].embedding.word is stages[1].embedding.word
    assert stages[0].embedding.word.placements["weight"].partial == ()
    looped = Pipeline.of(Parallel(pipeline_model_parallel_size=2, pipeline_stage_layers="3,2"), 5)
    for rank in range(2):
        mesh = Mesh(rank, pp=2, create_groups=False)
        (stage,) = build_stages(_builder(model, mesh), looped, mesh)
        assert stage.embedding.word.placements["weight"].partial == ("tied",)


GRIDS = [
    {},
    dict(pp=2, pipeline_stage_layers="2,3"),
    dict(pp=2, tp=2, pipeline_schedule="zb-v", pipeline_stage_layers="1,1,2,1"),
]


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("settings", GRIDS)
def test_all_ranks_together_hold_the_model_once(kind, settings):
    settings, model = dict(settings), _model(**MODELS[kind])
    pp, tp = settings.pop("pp", 1), settings.pop("tp", 1)
    pipeline = Pipeline.of(Parallel(pipeline_model_parallel_size=pp, **settings), 5)
    weights = GPTFacts(model, VOCABULARY).weights
    meshes = [Mesh(rank, pp=pp, tp=tp, replicate=2, create_groups=False) for rank in range(2 * pp * tp)]
    ranks = [(build_stages(_builder(model, mesh, device="meta"), pipeline, mesh), mesh) for mesh in meshes]

    def prove(ranks, weights=weights):
        told = [_told(*rank) for rank in ranks]
        check_model_complete(*ranks[0], lambda own: told, weights)

    prove(ranks)
    name = "blocks.4.mlp.up.weight"
    with pytest.raises(SettingsError, match=f"{name}: .* elements instead of 0"):
        prove(ranks, {other: placed for other, placed in weights.items() if other != name})
    with pytest.raises(SettingsError, match="list blocks.5.mlp.up.weight and no module creates it"):
        prove(ranks, weights | {"blocks.5.mlp.up.weight": weights[name]})
    if pp > 1:
        with pytest.raises(SettingsError, match=r"list blocks\.[123]\..* and no module creates"):
            prove([rank for rank in ranks if rank[1].pp.rank == 0])


def _told(stages, mesh):
    """What a rank sends to the others in `check_model_complete`."""
    told = []

    def all_gather_object(own):
        told.append(own)
        return [own]

    with pytest.raises(SettingsError):
        check_model_complete(stages, mesh, all_gather_object, {"of no rank": Placement((1,), Constant(0.0))})
    return told[0]
