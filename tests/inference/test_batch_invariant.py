# SPDX-License-Identifier: Apache-2.0
"""--batch-invariant-mode: generation and scoring give the log-probabilities of training, to the bit. Expected values are
losses of single tokens, from the pass of a training run with its loss and gradients enabled.
"""

import contextlib
import io
import math
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import pretrain_gpt
from megatron.data.loader import MicroBatch
from megatron.errors import SettingsError
from megatron.fused_kernels import explicit_attention
from megatron.inference import batch_invariant, scoring
from megatron.inference.batch_invariant import refuse_uncovered
from megatron.inference.engine import Engine
from megatron.inference.load import load_model
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.inference.scoring import score, windows
from megatron.model.quantization import PLAIN as PLAIN_WEIGHTS
from megatron.model.quantization import QuantizeOptions
from megatron.mpu.forked import run_ranks
from megatron.mpu.initialize import join_job
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Kernels, Parallel
from megatron.training.build import build_run
from megatron.training.rules import resolve

PLAIN = """--num-layers 3 --hidden-size 32 --mock-data --vocab-size 96 --lr 1e-2 --init-method-std 0.3
    --global-batch-size 4 --train-iters 2 --eval-iters 0 --batch-invariant-mode --device cpu --num-workers 0"""
MODELS = {
    "gpt": "--num-attention-heads 4 --seq-length 48",
    "llama": """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 144
        --num-attention-heads 8 --group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights""",
    "windowed": """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --seq-length 160
        --num-attention-heads 4 --window-size 37,0 --attn-logit-softcapping 20 --final-logit-softcapping 8
        --qk-layernorm""",
}
MODELS["experts"] = f"""{MODELS["windowed"]} --num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 48
    --moe-shared-expert-intermediate-size 32"""
OVER_RANKS = (dict(tp=2), dict(tp=4, pp=2), dict(pp=3, at_once=2))
FORMATS = {"fp32": "--precision fp32", "bf16": "--bf16"}
START = (5, 9, 2, 60, 61, 3, 3, 3, 17, 40, 41, 42, 43, 44, 45, 46, 47, 48)  # that texts have in common


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory):
    """A function (model, format) -> folder of a checkpoint that two tensor parallel ranks have trained in the mode."""

    @cache
    def folder_of(model, form):
        folder = tmp_path_factory.mktemp(f"{model}-{form}")
        layout = "--expert-model-parallel-size 2" if model == "experts" else "--tp 2"
        flags = f"{PLAIN} {MODELS[model]} {FORMATS[form]} --micro-batch-size 1 {layout} --save {folder}".split()
        run_ranks(2, lambda rank: quietly(pretrain_gpt.main, flags))
        return folder

    return folder_of


def quietly(function, *args):
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args)


def losses_of_training(folder, model, form, texts):
    """Minus the loss of each token but the first, of a run that goes on in one process: one pass for each token, whose loss
    alone counts. Texts are padded to a sample.
    """
    flags = f"{PLAIN} {MODELS[model]} {FORMATS[form]} --micro-batch-size 1 --load {folder}".split()
    run = quietly(build_run, resolve(parse_pretrain(flags), 1), pretrain_gpt.recipe())
    assert run.state.iteration == 2
    [chunk], s = run.stages, run.config.model.seq_length
    chunk.eval()  # without dropout
    found = []
    for text in texts:
        row = torch.tensor([*text, *[33] * (s + 1 - len(text))])
        found.append([])
        for place in range(len(text) - 1):
            mask = torch.zeros(s, 1)
            mask[place] = 1.0
            batch = MicroBatch(row[:-1].unsqueeze(1), row[1:].unsqueeze(1), torch.tensor([0]), loss_mask=mask)
            _, sums = chunk(None, batch)
            assert sums["lm loss"].requires_grad
            found[-1].append(-sums["lm loss"].item())
    return found


def generated(folder, parallel, requests, at_once, form, **engine):
    """For each request (its text, log-probabilities of all tokens but the first), generated with `at_once` of them."""
    context = join_job(parallel, Kernels(device="cpu"))
    loaded = load_model(folder, mesh=context.mesh, precision=form, batch_invariant=parallel.batch_invariant_mode)
    engine, found = Engine(loaded.model, longest=loaded.longest, max_batch=at_once, **engine), []
    if parallel.batch_invariant_mode:
        engine.model.logits = with_rows_enough(engine.model.logits)
    if not engine.link.is_first:
        return engine.follow()
    numbers = {engine.add(request): place for place, request in enumerate(requests)}
    found = [([*request.prompt], []) for request in requests]
    while engine.busy:
        for output in engine.step():
            text, scores = found[numbers[output.request]]
            scores += [score.logprob for score in output.prompt[1:]]
            if output.new is not None:
                text.append(output.new.token)
                scores.append(output.new.logprob)
    engine.close()
    return found


def with_rows_enough(logits):
    """`logits`, if no product has so few rows that another CPU's kernels may add up in another order: also the output
    layer's, whose rows are those of wanted tokens.
    """

    def checked(tokens, cache, wanted):
        assert len(tokens) % 16 == len(wanted) % 16 == 0 < len(wanted), (len(tokens), len(wanted))
        return logits(tokens, cache=cache, wanted=wanted)

    return checked


def requests_of(s):
    """Texts that grow over the borders of blocks of queries, at 64 and 128 tokens. s: tokens of a sample"""
    prompts, draws = [START[:3], (7,), (*START, 50), (80, 1) * 11], Sampling(10, temperature=1.0, sampling_seed=7)
    prompts += [tuple(place * 7 % 96 for place in range(near)) for near in (58, 120, s - 6) if near < s]
    return [Request(prompt, draws, index, logprobs=0, prompt_logprobs=True) for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("window", [None, 37])
def test_attention_of_a_text_that_grows_has_the_keys_of_its_block_in_training(monkeypatch, window):
    """Products of which this CPU's kernels have the same bits for any number of keys, and of rows, tell them apart here."""
    real, (s, g, q, d) = explicit_attention.bmm, (160, 2, 2, 8)
    told_apart = lambda weights, values: real(weights, values) + weights.shape[2] + 1000 * (weights.shape[1] < 16)
    monkeypatch.setattr(explicit_attention, "bmm", told_apart)
    draws = torch.Generator().manual_seed(4)
    query, key, value = (torch.randn(s, 1, g, *more, d, generator=draws) for more in ((q,), (), ()))
    how = dict(scale=d**-0.5, window=window)
    whole = explicit_attention.in_blocks(query, key, value, causal=True, **how)
    for first, stop in ((0, s), (3, 70), *((place, place + 1) for place in range(s))):
        own = explicit_attention.of_sample(query[first:stop], key[:stop], value[:stop], first=first, s=s, **how)
        torch.testing.assert_close(own, whole[first:stop], rtol=0, atol=1e-3)


def test_each_window_is_scored_in_a_pass_of_its_own():
    passes, tokens = [], torch.arange(60).view(20, 3)

    def token_losses(_, batch):
        passes.append(tuple(batch.tokens.shape))
        return (batch.labels - batch.tokens).float()

    model = SimpleNamespace(ordered=True, facts=SimpleNamespace(settings=SimpleNamespace(seq_length=48)))
    model.token_losses = token_losses
    losses = scoring.token_losses(model, MicroBatch(tokens, 3 * tokens, torch.arange(3)))
    assert passes == [(48, 1)] * 3 and losses.equal(2.0 * tokens)
    model.ordered, passes[:] = None, []
    assert scoring.token_losses(model, MicroBatch(tokens, 3 * tokens, torch.arange(3))).equal(2.0 * tokens)
    assert passes == [(20, 3)]


def in_layout(folder, form, requests, tp=1, pp=1, at_once=4, **more):
    parallel = Parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, batch_invariant_mode=True)
    return run_ranks(tp * pp, lambda rank: generated(folder, parallel, requests, at_once, form, **more))[0]


def scored(folder, parallel, form, tokens, **how):
    context = join_job(parallel, Kernels(device="cpu"))
    loaded = load_model(folder, mesh=context.mesh, precision=form, batch_invariant=True)
    return score(loaded.model, tokens, length=loaded.longest, axis=context.mesh.dp, **how).loss_sum


CASES = "gpt-fp32 gpt-bf16 llama-fp32 llama-bf16 windowed-fp32 windowed-bf16 experts-fp32 experts-bf16".split()


@pytest.mark.sampled(5)
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_are_those_of_training(folder_of, case):
    """Of prompts, which are scored in one pass or in parts, and of new tokens, in batches of several texts and of one, and
    over ranks of tensor and pipeline parallelism.
    """
    model, form = case.split("-")
    folder = folder_of(model, form)
    requests = requests_of(int(MODELS[model].split("--seq-length ")[1].split()[0]))
    found = in_layout(folder, form, requests)
    texts = [text for text, _ in found]
    expected = run_ranks(1, lambda rank: losses_of_training(folder, model, form, texts))[0]
    assert [scores for _, scores in found] == expected
    assert len({score for scores in expected for score in scores}) > 40
    over_ranks = [one for one in OVER_RANKS if model != "experts" or "tp" not in one]
    for more in (dict(at_once=1), dict(at_once=3, chunk=5, blocks=15), *over_ranks):
        assert in_layout(folder, form, requests, **more) == found, more


@pytest.mark.sampled(2)
def test_scores_are_those_of_training(folder_of):
    """Of windows that overlap, in batches, over ranks that share the model and over others that share the batches."""
    folder = folder_of("gpt", "bf16")
    tokens = np.random.default_rng(3).integers(0, 96, 100)
    places = [(window.start, window.length, window.counted) for window in windows(100, 48, 20)]
    texts = [[int(token) for token in tokens[start : start + length + 1]] for start, length, _ in places]
    losses = run_ranks(1, lambda rank: losses_of_training(folder, "gpt", "bf16", texts))[0]
    expected = -math.fsum(loss for row, (_, _, counted) in zip(losses, places, strict=True) for loss in row[-counted:])
    for ranks, tp, pp, size in ((1, 1, 1, 8), (1, 1, 1, 2), (4, 2, 1, 1), (2, 1, 2, 3)):
        parallel = Parallel(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, batch_invariant_mode=True)
        work = partial(scored, folder, parallel, "bf16", tokens, stride=20, batch_size=size)
        found = run_ranks(ranks, lambda rank, work=work: work())
        assert found == [expected] * ranks, (ranks, size)


REFUSED = {
    "--seq-length 24": "--seq-length 24, no multiple of 16",
    "--seq-length 32 --num-experts 4 --moe-expert-capacity-factor 1": "--moe-expert-capacity-factor 1.0",
    "--seq-length 32 --num-experts 4 --ffn-hidden-size 40": "experts of width 40, no multiple of 16",
    "--seq-length 32 --attention-backend flash --kv-channels 8 --no-masked-softmax-fusion": "by the kernel",
}


@pytest.mark.parametrize("flags, words", REFUSED.items())
def test_what_has_no_counterpart_in_training_is_refused(tmp_path, flags, words):
    flags = f"{PLAIN} --num-attention-heads 4 {flags} --train-iters 1 --save {tmp_path}".split()
    run_ranks(1, lambda rank: quietly(pretrain_gpt.main, flags))
    load_model(str(tmp_path))
    with pytest.raises(SettingsError) as error:
        load_model(str(tmp_path), batch_invariant=True)
    assert words in error.value.args[0]


def test_quantized_weights_and_half_precision_are_refused(folder_of):
    folder = folder_of("gpt", "bf16")
    with pytest.raises(SettingsError, match="--quantize int8"):
        load_model(folder, batch_invariant=True, quantize=QuantizeOptions("int8"))
    with pytest.raises(SettingsError, match="does not cover --device cuda:0"):
        refuse_uncovered(load_model(folder).config, PLAIN_WEIGHTS, "cuda:0", 1)
    with pytest.raises(SettingsError, match="3 ranks: blocks are divided by 2, 4 or 8"):
        refuse_uncovered(
            replace(load_model(folder).config, parallel=Parallel(tensor_model_parallel_size=3)), PLAIN_WEIGHTS, "cpu", 3
        )


def test_a_kernel_that_depends_on_rows_is_found(folder_of, monkeypatch):
    """As of a library that takes another order of sums for few rows."""
    plain = batch_invariant.matmul

    def by_rows(x):
        multiply = plain(x)
        few = lambda a, b, bias: (
            multiply(a[:, :16], b[:, :16].contiguous(), None) + multiply(a[:, 16:], b[:, 16:], bias)
        )
        return lambda a, b, bias=None: (few if len(a) < 40 else multiply)(a, b, bias)

    monkeypatch.setattr(batch_invariant, "matmul", by_rows)
    with pytest.raises(
        SettingsError, match="the product of .* has other bits for a few tokens than for a sample of 48"
    ):
        load_model(folder_of("gpt", "fp32"), batch_invariant=True)
