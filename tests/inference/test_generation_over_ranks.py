# SPDX-License-Identifier: Apache-2.0
"""Ranks that share a model write what one process writes, token for token: greedy, drawn and by beams; out of checkpoints
that another layout has written.
"""

import contextlib
import io
import json
import os
import signal
import time

import pytest
import torch

from megatron.entry import start
from megatron.errors import PeerLost, SettingsError
from megatron.guard.endings import guarded
from megatron.inference import engine, sequence_engine
from megatron.inference.engine import Engine
from megatron.inference.generation import generate, generate_targets
from megatron.inference.load import load_model
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling, Search
from megatron.inference.sequence_engine import SequenceEngine
from megatron.inference.stages import T5Stages, stages_of
from megatron.model.recipe import named_recipe
from megatron.model.t5.facts import T5Facts
from megatron.model.t5.settings import T5Settings
from megatron.mpu.mesh import Mesh
from megatron.settings.schema import Guard, Model
from megatron.tools import generate as tool
from tests.inference import test_sequence_engine as pairs
from tests.inference.engine_mixes import LONGEST, alone, check_mix, requests_of, sizes_of

pytestmark = pytest.mark.sampled(10)

COMMON = """--hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 64 --lr 1e-2
    --init-method-std 0.6 --global-batch-size 4 --micro-batch-size 2 --train-iters 1 --eval-iters 0 --precision fp32
    --device cpu --num-workers 0
    --tokenizer-type NullTokenizer"""
T5 = """--encoder-num-layers 4 --decoder-num-layers 3 --decoder-seq-length 12 --position-embedding-type relative
    --normalization RMSNorm --disable-bias-linear --unscaled-attention --feed-forward-proj gated-gelu"""
ROPE = """--encoder-num-layers 3 --decoder-num-layers 4 --decoder-seq-length 12 --position-embedding-type rope
    --group-query-attention --num-query-groups 2 --swiglu --untie-embeddings-and-output-weights"""
SOURCES, START, END = [list(range(5, 21)), [7, 9, 11], list(range(60, 50, -1))], 0, 1
WAYS = {
    "greedy": (Sampling(10, greedy=True), Search()),
    "drawn": (Sampling(10, top_k=30, temperature=1.5, repetition_penalty=1.2, sampling_seed=3), Search()),
    "beams": (Sampling(10), Search(4)),
}


def trained(run_ranks, folder, kind: str, flags: str, ranks: int, layout: str):
    def body(rank):
        start(f"{COMMON} {flags} {layout} --save {folder}".split(), named_recipe(kind))

    run_ranks(ranks, body)
    return folder


@pytest.fixture(scope="module")
def encoder_decoder(run_ranks, tmp_path_factory):
    """Trained by two stages, of which the first has three encoder layers and the second all else."""
    layout = "--pipeline-model-parallel-size 2 --pipeline-stage-layers 3,4"
    return trained(run_ranks, tmp_path_factory.mktemp("t5"), "T5", T5, 2, layout)


@pytest.fixture(scope="module")
def rotary(run_ranks, tmp_path_factory):
    """Trained by four ranks, each of which has a half of each matrix."""
    layout = "--sharding-stage 3 --tensor-model-parallel-size 2 --sequence-parallel"
    return trained(run_ranks, tmp_path_factory.mktemp("rope"), "T5", ROPE, 4, layout)


@pytest.fixture(scope="module")
def decoder(run_ranks, tmp_path_factory):
    flags = "--num-layers 4 --max-position-embeddings 32"
    return trained(run_ranks, tmp_path_factory.mktemp("gpt"), "GPT", flags, 2, "--pipeline-model-parallel-size 2")


@pytest.fixture(scope="module")
def hybrid(run_ranks, tmp_path_factory):
    """Two of its four layers have states."""
    flags = """--hybrid-layer-pattern MG-* --max-position-embeddings 32 --linear-num-key-heads 2 --linear-num-value-heads 4
        --linear-key-head-dim 8 --linear-value-head-dim 6 --mamba-num-groups 2 --mamba-num-heads 4 --mamba-head-dim 8
        --mamba-state-dim 6"""
    return trained(run_ranks, tmp_path_factory.mktemp("hybrid"), "GPT", flags, 2, "--tensor-model-parallel-size 2")


def targets(folder, mesh=None, halves=(None, None)):
    """Those of each way of generating, on one process or on ranks of a mesh."""
    mesh = mesh or Mesh()
    model = load_model(str(folder), mesh=mesh, halves=halves).model
    more = dict(longest=(16, 12), start=START, end=END)
    return {name: generate_targets(model, SOURCES, *way, **more) for name, way in WAYS.items()}


def over_ranks(run_ranks, folder, tp: int, pp: int, halves=(None, None)):
    """What each rank has found."""
    return run_ranks(tp * pp, lambda rank: targets(folder, Mesh(rank, tp=tp, pp=pp), halves))


LAYOUTS = [(2, 2, (None, None)), (1, 3, (1, 2))]
FULL = [
    (1, 3, (None, None)),
    (2, 1, (None, None)),
    (1, 2, (None, None)),
    (1, 2, (1, 1)),
    (1, 4, (4, 3)),
    (1, 4, (2, 3)),
    (2, 3, (3, 1)),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("tp, pp, halves", [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.full) for one in FULL)])
def test_ranks_write_the_targets_of_one_process(tp, pp, halves, encoder_decoder, run_ranks):
    wanted = targets(encoder_decoder)
    found = over_ranks(run_ranks, encoder_decoder, tp, pp, halves)
    assert found == [wanted] * (tp * pp)
    assert len({str(answers) for answers in wanted.values()}) == 3  # the ways differ
    assert all(len({tuple(target) for target in answers}) == 3 for answers in wanted.values())  # and so do sources


@pytest.mark.full
def test_rotary_positions_and_grouped_queries(rotary, run_ranks):
    wanted = targets(rotary)
    assert over_ranks(run_ranks, rotary, 2, 2) == [wanted] * 4 and len(set(map(str, wanted.values()))) == 3
    assert over_ranks(run_ranks, rotary, 1, 1, (1, 1)) == [wanted]  # two stages of one process


@pytest.mark.parametrize("tp, pp", [(1, 3), *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, 2), (1, 4)))])
def test_ranks_continue_texts_as_one_process_does(tp, pp, decoder, run_ranks):
    def written(mesh):
        model, found = load_model(str(decoder), mesh=mesh).model, {}
        for name, way in WAYS.items():
            for cached in (True, False):
                texts = generate(model, SOURCES, *way, longest=32, end=END, use_cache=cached, pp=mesh.pp)
                found[name, cached] = texts
        return found

    wanted = written(Mesh())
    assert run_ranks(tp * pp, lambda rank: written(Mesh(rank, tp=tp, pp=pp))) == [wanted] * (tp * pp)
    assert wanted["greedy", True] == wanted["greedy", False] != wanted["drawn", True]
    assert wanted["beams", True] == wanted["beams", False] != wanted["greedy", True]
    assert all(map(any, wanted.values()))


@pytest.mark.parametrize(
    "tp, pp", [(2, 2), (1, 3), *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, 1), (1, 2), (1, 4)))]
)
def test_ranks_serve_mixes_as_each_text_is_alone(tp, pp, decoder, run_ranks):
    """With cancellations, small caches and several passes under way; other ranks follow until the first one closes."""
    sums = check_mixes(decoder, tp, pp, run_ranks)
    assert min(sums.values()) > 0, sums


@pytest.mark.parametrize("tp, pp", [(2, 2), *(pytest.param(*one, marks=pytest.mark.full) for one in ((2, 1), (1, 4)))])
def test_ranks_serve_mixes_of_layers_with_states(tp, pp, hybrid, run_ranks):
    """These magnify rounding: log-probabilities of two tp ranks and of one differ by 2e-4 without an engine, too."""
    sums = check_mixes(hybrid, tp, pp, run_ranks, within=1e-3)
    # Few begin where a state was copied
    assert min(sums[name] for name in ("preempted", "cancelled", "texts")) > 0, sums


def check_mixes(decoder, tp, pp, run_ranks, within: float = 1e-4) -> dict[str, int]:
    """Counts of events, over all mixes."""
    requests = requests_of(3, 30, 64)
    model = load_model(str(decoder)).model
    wanted = [alone(model, request) for request in requests]

    def body(rank):
        mesh, sums = Mesh(rank, tp=tp, pp=pp), {}
        model = load_model(str(decoder), mesh=mesh).model
        engine.PATIENCE = 0.0  # every step without a pass says to wait
        for seed in range(12):
            if rank:
                Engine(model, longest=LONGEST, **sizes_of(seed)).follow()
            else:
                found = check_mix(model, requests, wanted, seed, within)
                sums = {name: sums.get(name, 0) + number for name, number in found.items()}
        return sums

    sums, *_ = run_ranks(tp * pp, body)
    return sums


@pytest.mark.sampled(10)
@pytest.mark.parametrize("tp, pp", [(2, 2), pytest.param(1, 3, marks=pytest.mark.full)])
def test_ranks_serve_targets_as_each_is_alone(tp, pp, encoder_decoder, run_ranks):
    """Sources that come and go, searches among them, with the layers of encoder and decoder on all ranks."""
    model = load_model(str(encoder_decoder)).model
    requests = pairs.requests_of(2, 12, 7, 64, 16)
    wanted = [pairs.alone(model, request) for request in requests]

    def body(rank):
        mesh, sums = Mesh(rank, tp=tp, pp=pp), {}
        model = load_model(str(encoder_decoder), mesh=mesh).model
        sequence_engine.PATIENCE = 0.0  # every step says to wait
        for seed in range(8):
            own = SequenceEngine(model, max_batch=1 + seed % 5)
            if rank:
                own.follow()
            else:
                found = pairs.check_mix(own, requests, wanted, seed)
                sums = {name: sums.get(name, 0) + number for name, number in found.items()}
                own.close()
        return sums

    sums, *_ = run_ranks(tp * pp, body)
    assert min(sums.values()) > 0, sums


def test_all_stages_have_work(decoder, run_ranks):
    """Of eight texts, each of two passes under way has four: the first rank begins one while the other is computed."""

    def body(rank):
        mesh, events = Mesh(rank, pp=2), []
        model = load_model(str(decoder), mesh=mesh).model
        served = Engine(model, longest=32, max_batch=8)
        if rank:
            return served.follow()
        compute, receive = served.stage.compute, served.link.receive_answer
        served.stage.compute = lambda planned: events.append(len(planned.rows)) or compute(planned)
        served.link.receive_answer = lambda size: events.append("answer") or receive(size)
        for index in range(8):
            served.add(Request((1, 2, 3 + index), Sampling(6, greedy=True)))
        while served.busy:
            served.step()
        served.close()
        return events

    events, _ = run_ranks(2, body)
    assert events == [4, 4, *["answer", 4] * 10, "answer", "answer"]


def test_an_engine_closes_in_the_middle_of_its_work(decoder, run_ranks):
    """With passes under way and texts that run and wait; the next engine of the same ranks begins anew."""
    requests = [Request((1, 2, 3 + index), Sampling(9, greedy=True)) for index in range(6)]
    wanted = alone(load_model(str(decoder)).model, requests[0]).tokens

    def body(rank):
        model = load_model(str(decoder), mesh=Mesh(rank, tp=2, pp=2)).model
        for steps in (0, 1, 4):
            served = Engine(model, longest=32, max_batch=4)
            if rank:
                served.follow()
                continue
            for request in requests:
                served.add(request)
            for _ in range(steps):
                served.step()
            served.close()
            assert not served._under_way and served.pool.free == served.pool.blocks
        return generate(model, [requests[0].prompt], requests[0].sampling, longest=32)

    assert run_ranks(4, body) == [[wanted]] * 4


@pytest.mark.full
def test_a_lost_rank_ends_the_engine_of_the_others(decoder, run_ranks, tmp_path):
    def body(rank):
        model = load_model(str(decoder), mesh=Mesh(rank, pp=3)).model
        served, began = Engine(model, longest=32), time.monotonic()
        compute, passes = served.stage.compute, []

        def dying(planned):
            passes.append(planned)
            if rank == 1 and len(passes) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return compute(planned)

        served.stage.compute = dying
        try:
            with guarded(Guard()):
                if rank:
                    served.follow()
                served.add(Request((1, 2, 3), Sampling(20, greedy=True)))
                while served.busy:
                    served.step()
        except PeerLost as lost:
            (tmp_path / f"{rank}").write_text(f"{time.monotonic() - began:.1f} {lost}")

    with contextlib.suppress(RuntimeError):  # `run_ranks` says that a rank died
        run_ranks(3, body)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told.keys() <= {"0", "2"} and told
    for text in told.values():
        assert "another rank is gone" in text and "pp group 0" in text and float(text.split()[0]) < 30


def test_the_encoder_runs_once_and_a_step_is_one_token(encoder_decoder, run_ranks):
    """By the messages that a rank sends: [s, b, h] of sources from the first stage to the next, then one token a step."""

    def body(rank):
        mesh, sent = Mesh(rank, pp=2), []
        model = load_model(str(encoder_decoder), mesh=mesh).model
        through = model.through
        model.through = lambda numbers, shape, run: sent.append((len(numbers), shape)) or through(numbers, shape, run)
        made = generate_targets(model, SOURCES, Sampling(4, greedy=True), longest=(16, 12), start=START)
        layers = [sorted(map(int, chunk.blocks)) for chunk in model.chunks]
        return made, sent, layers

    (made, sent, first), (same, _, second) = run_ranks(2, body)
    assert sent == [(2, (16, 3, 32)), *[(3, (1, 3, 32))] * 4] and made == same
    assert (first, second) == ([[0, 1], [4, 5]], [[2, 3], [6]])  # each rank has layers of both kinds


def test_the_tool_prints_once(encoder_decoder, run_ranks, tmp_path):
    def said(words):
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            tool.main(["--load", str(encoder_decoder), "--prompt", "5 6 7", "--device", "cpu", "--json", *words])
        return [json.loads(line) for line in out.getvalue().splitlines()], err.getvalue()

    words = "--tokens-to-generate 8 --decoder-start-id 0 --decoder-end-id 1 --num-beams 3 --num-samples 2".split()
    wanted, _ = said(words)
    layout = "--tp 2 --encoder-pipeline-stages 2 --decoder-pipeline-stages 1".split()
    first, *others = run_ranks(4, lambda rank: said([*words, *layout]))
    assert first[0] == wanted and len(wanted) == 2 and "tokens/s" in first[1]
    assert others == [([], "")] * 3


def test_a_rank_that_dies_leaves_nobody_waiting(encoder_decoder, run_ranks, tmp_path):
    def body(rank):
        mesh = Mesh(rank, pp=3)
        model = load_model(str(encoder_decoder), mesh=mesh).model
        decode, calls = model.decode, []

        def dying(*arguments, **keywords):
            calls.append(1)
            if rank == 1 and len(calls) == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            return decode(*arguments, **keywords)

        model.decode = dying
        began = time.monotonic()
        try:
            with guarded(Guard()):
                generate_targets(model, SOURCES, Sampling(9), longest=(16, 12), start=START)
        except PeerLost as lost:
            (tmp_path / f"{rank}").write_text(f"{time.monotonic() - began:.1f} {lost}")

    with contextlib.suppress(RuntimeError):  # `run_ranks` says that a rank died
        run_ranks(3, body)
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told.keys() <= {"0", "2"} and told
    for text in told.values():
        assert "another rank is gone" in text and "pp group 0" in text and float(text.split()[0]) < 30


def wrong(monkeypatch, ranks, *words):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    return ["--load", "x", "--prompt", "5", *words]


@pytest.mark.parametrize(
    "ranks, words, match",
    [
        (1, "--pp 2", "tensor 1 x pipeline 2 = 2 ranks, and this job has 1(?s:.*)--nproc-per-node 2"),
        (4, "", "1 ranks, and this job has 4"),
        (4, "--tp 0", "--tp 0: has to be at least 1"),
        (2, "--encoder-pipeline-stages 0", "= 1 ranks, and this job has 2"),
        (1, "--num-samples 0", "--num-samples 0: has to be at least 1"),
        (1, "--distributed-timeout-minutes 0", "has to be above 0"),
        (2, "--encoder-pipeline-stages 1 --decoder-pipeline-stages 3", "pipeline 4 = 4 ranks, and this job has 2"),
    ],
)
def test_wrong_ranks(ranks, words, match, monkeypatch):
    with pytest.raises(SettingsError, match=match):
        tool.main(wrong(monkeypatch, ranks, *words.split()))


@pytest.mark.parametrize(
    "world, tp, halves, pp", [(4, 1, (1, 3), 4), (3, 1, (1, 3), 3), (4, 2, (2, 1), 2), (1, 1, (1, 3), 4)]
)
def test_halves_say_how_many_ranks_a_pipeline_has(world, tp, halves, pp, monkeypatch):
    """As many as there are, where all of them have layers; otherwise those of docs/encoder_decoder.md."""
    monkeypatch.setenv("WORLD_SIZE", str(world))
    asked = dict(encoder_pipeline_stages=halves[0], decoder_pipeline_stages=halves[1], tensor_model_parallel_size=tp)
    assert tool.GenerateOptions("x", **asked).pp == pp


@pytest.mark.full
def test_layers_that_ranks_cannot_share(encoder_decoder, decoder, run_ranks):
    def refused(folder, halves, **sizes):
        def body(rank):
            with pytest.raises(SettingsError) as error:
                load_model(str(folder), mesh=Mesh(rank, **sizes), halves=halves)
            return str(error.value)

        return set(run_ranks(sizes.get("tp", 1) * sizes.get("pp", 1), body))

    assert refused(encoder_decoder, (None, None), pp=4) == {
        "--pipeline-model-parallel-size 4: the decoder has 3 layers\n  -> give at most 3"
    }
    (text,) = refused(encoder_decoder, (1, 1), pp=3)
    assert "leave 1 of 3 ranks without layers" in text
    (text,) = refused(encoder_decoder, (3, None), pp=2)
    assert "--encoder-pipeline-stages 3: there are 2 ranks" in text
    (text,) = refused(encoder_decoder, (None, None), tp=3)
    assert "--num-attention-heads 4" in text and "--tensor-model-parallel-size 3" in text
    (text,) = refused(decoder, (1, 1), pp=2)
    assert "are for encoder-decoders" in text
    (text,) = refused(decoder, (None, None), pp=5)
    assert "--pipeline-model-parallel-size 5: the model has 4 layers" in text


@pytest.mark.full
def test_stages_find_hugging_faces_targets(run_ranks):
    from tests.inference import test_sequences as whole

    pytest.importorskip("transformers")
    ours, theirs = whole.both()
    weights = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    longest = (whole.SOURCE, whole.TARGET)

    def body(rank):
        mesh = Mesh(rank, pp=2)
        keywords = dict(dtype=torch.float32, device="cpu")
        build = lambda **stage: type(ours)(ours.facts, mesh, **stage, **keywords)
        model = T5Stages(build, ours.facts, stages_of(ours.facts, 2), mesh).eval()
        with torch.no_grad():
            for chunk in model.chunks:
                for name, parameter in chunk.named_parameters():
                    parameter.copy_(weights[name])
        greedy = Sampling(tokens_to_generate=12, greedy=True)
        more = dict(longest=longest, start=START)
        return (
            generate_targets(model, whole.SOURCES, greedy, end=END, **more),
            generate_targets(model, whole.SOURCES, greedy, Search(4), **more),
        )

    wide = whole.their_targets(theirs, num_beams=4, min_new_tokens=12, early_stopping="never")
    assert run_ranks(2, body) == [(whole.their_targets(theirs), wide)] * 2


def test_a_shape_of_its_own_for_each_pipeline():
    """Every layer is on one rank, the encoder's in front, whatever the numbers."""
    for encoder in range(1, 6):
        for other in range(1, 6):
            model = Model(num_layers=encoder + other, hidden_size=8, num_attention_heads=2, seq_length=8)
            facts = T5Facts(model, 9, T5Settings(encoder_num_layers=encoder, decoder_num_layers=other))
            for pp in range(1, 6):
                if pp > min(encoder, other):
                    with pytest.raises(SettingsError, match=f"size {pp}: the (encoder|decoder) has [1-4] layers"):
                        stages_of(facts, pp)
                    continue
                found = stages_of(facts, pp)
                assert [n for own in found.layers for n in own] == list(range(encoder + other))
                assert all(sum(len(own) for own in found.layers_of(rank)) >= 2 for rank in range(pp))
