# SPDX-License-Identifier: Apache-2.0
"""The settings of a step: how many samples, which rate, which update; against closed forms and torch's AdamW."""

import math

import pytest
import torch

from megatron.training import step as training_step

pytestmark = pytest.mark.sampled(5)

SMALL = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 4"


@pytest.fixture
def fed(monkeypatch):
    """For each step of a run: the widths of its micro-batches."""
    steps, passes = [], training_step.forward_backward

    def spy(run, batches, *rest):
        steps.append([batch.tokens.shape[1] for batch in batches])
        return passes(run, batches, *rest)

    monkeypatch.setattr(training_step, "forward_backward", spy)
    return steps


# ---- how much, how long ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, widths",
    [
        ("--micro-batch-size 3", [3]),
        ("--micro-batch-size 3 --global-batch-size 6", [3, 3]),
        ("--micro-batch-size 2 --local-batch-size 6", [2, 2, 2]),
        ("--micro-batch-size 2 --gradient-accumulation-steps 4", [2, 2, 2, 2]),
    ],
)
def test_micro_batches_of_a_step(flags, widths, fed, train):
    run = train(f"{SMALL} {flags}")
    assert fed == [widths] * 2
    assert [step["batch_size"] for step in run.steps] == [sum(widths)] * 2


def test_the_batch_grows_as_its_ramp_says(fed, train):
    """2, 4, 6: each increment after its share, half of 8 samples."""
    train(f"{SMALL} --micro-batch-size 2 --global-batch-size 6 --rampup-batch-size 2 2 8 --train-samples 24")
    assert [sum(widths) for widths in fed] == [2, 2, 4, 6, 6]


def test_the_batch_has_the_sizes_of_its_schedule(fed, train):
    length = int(SMALL.split("--seq-length ")[1].split()[0])
    schedule = f"--step-batch-size-schedule 0:2,{4 * length}:6,{9 * length + 1}:4"
    run = train(f"{SMALL} --micro-batch-size 2 {schedule} --train-samples 24")
    assert [sum(widths) for widths in fed] == [2, 2, 6, 4, 4, 4]
    assert run.steps[-1]["consumed_samples"] == 22  # the seventh step would need 26


@pytest.mark.parametrize("flags, steps", [("--train-iters 3", 3), ("--train-samples 14", 3)])
def test_length_of_training(flags, steps, train):
    assert len(train(f"{SMALL} {flags}").steps) == steps  # of 4 samples each: what is left of 14 is no batch


@pytest.mark.parametrize("interval, at", [(2, [2, 4, 5]), (0, [5])])  # 0: at the end alone
def test_evaluations(interval, at, train):
    run = train(f"{SMALL} --train-iters 5 --eval-interval {interval} --eval-iters 3")
    found = [(record["iteration"], record["split"]) for record in run.evals]
    assert found == [*((one, "validation") for one in at), (5, "test")]
    # When it was saved, before the last one
    assert run.state(5)["state"]["consumed_valid_samples"] == len(at[:-1]) * 3 * 4


def test_test_data_have_a_number_of_batches_of_their_own(train):
    flags = f"{SMALL} --train-iters 2 --eval-interval 2"
    run = train(f"{flags} --eval-iters 3 --test-iters 5")
    assert [(one["split"], one["samples"]) for one in run.evals][-2:] == [("validation", 3 * 4), ("test", 5 * 4)]
    run = train(f"{flags} --eval-iters 0 --test-iters 2", "test_alone")
    assert [(one["split"], one["samples"]) for one in run.evals] == [("test", 2 * 4)]
    assert {one["split"] for one in train(f"{flags} --eval-iters 1 --test-iters 0", "none").evals} == {"validation"}


@pytest.mark.parametrize(
    "flags, last", [("--exit-interval 3", 3), ("--exit-duration-in-mins 1e-9", 1), ("--exit-duration-in-mins 1000", 5)]
)
def test_a_run_stops_early_with_a_checkpoint(flags, last, train):
    run = train(f"{SMALL} --train-iters 5 {flags}")
    assert (len(run.steps), run.saved) == (last, [last])


# ---- the learning rate -----------------------------------------------------------------------------------------------

RATE, LOW, N = 1e-3, 1e-4, 10


def between(share):
    return LOW + share * (RATE - LOW)


def warm(i, until=4, start=0.0):
    return start + (RATE - start) * i / until


def annealed(i, share):
    return RATE if i <= 5 else between(share((i - 5) / 5))


RATES = [  # flags, rate of the step behind i others
    ("--lr-decay-style constant", lambda i: RATE),
    ("", lambda i: RATE * (1 - i / N)),
    ("--min-lr 1e-4", lambda i: between(1 - i / N)),
    ("--min-lr 1e-4 --lr-decay-style cosine", lambda i: between((1 + math.cos(math.pi * i / N)) / 2)),
    ("--min-lr 1e-4 --lr-decay-iters 5", lambda i: between(max(0, 1 - i / 5))),
    ("--lr-decay-samples 20 --train-samples 40", lambda i: RATE * max(0, 1 - i / 5)),
    ("--lr-warmup-iters 4", lambda i: warm(i) if i <= 4 else RATE * (1 - (i - 4) / 6)),
    ("--lr-warmup-samples 16 --train-samples 40", lambda i: warm(i) if i <= 4 else RATE * (1 - (i - 4) / 6)),
    ("--lr-warmup-fraction 0.4", lambda i: warm(i) if i <= 4 else RATE * (1 - (i - 4) / 6)),
    ("--lr-warmup-iters 4 --lr-warmup-init 5e-4 --lr-decay-style constant", lambda i: warm(min(i, 4), start=5e-4)),
    (
        "--lr-warmup-iters 4 --lr-decay-style inverse-square-root",
        lambda i: warm(i) if i <= 4 else RATE * (4 / i) ** 0.5,
    ),
    (
        "--min-lr 1e-4 --lr-warmup-iters 4 --lr-decay-style linear-from-start",
        lambda i: warm(i) if i < 4 else between(1 - i / N),
    ),
    *(
        (
            f"--min-lr 1e-4 --lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-wsd-decay-style {style}",
            lambda i, share=share: annealed(i, share),
        )
        for style, share in (
            ("linear", lambda x: 1 - x),
            ("cosine", lambda x: (1 + math.cos(math.pi * x)) / 2),
            ("exponential", lambda x: 2 * 0.5**x - 1),
            ("minus_sqrt", lambda x: 1 - x**0.5),
        )
    ),
    (
        "--min-lr 1e-4 --lr-decay-style WSD --lr-wsd-decay-samples 20 --train-samples 40",
        lambda i: annealed(i, lambda x: 2 * 0.5**x - 1),
    ),
]


@pytest.mark.parametrize("flags, rate", RATES, ids=[flags.replace("--", "") or "default" for flags, _ in RATES])
def test_learning_rates_are_the_closed_forms(flags, rate, train):
    length = "" if "--train-samples" in flags else f"--train-iters {N}"
    found = [step["learning_rate"] for step in train(f"{SMALL} --lr {RATE} {length} {flags}").steps]
    assert found == pytest.approx([rate(i) for i in range(N)], rel=1e-6, abs=1e-12)


# ---- the update ------------------------------------------------------------------------------------------------------


def plain_training(
    run,
    steps,
    *,
    lr=1e-2,
    betas=(0.9, 0.999),
    eps=1e-8,
    decay=lambda i: 0.01,
    clip=1.0,
    means=lambda sums: sum(loss for loss, _ in sums) / sum(count for _, count in sums),
):
    """Weights after torch's AdamW has taken the steps that `run` would take, and the gradient norms."""
    [model] = run.stages
    own = dict(model.named_parameters())
    weights = {name: torch.nn.Parameter(parameter.detach().clone()) for name, parameter in own.items()}
    matrices = [w for w in weights.values() if w.dim() > 1 and w.shape != (1, 3, 8)]  # a bias of queries, keys, values
    others = [w for w in weights.values() if all(w is not matrix for matrix in matrices)]
    groups = [dict(params=matrices), dict(params=others, weight_decay=0.0)]
    optimizer, norms = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps), []
    for step in range(steps):
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])
        sums = [
            tuple(model(None, micro)[1].values())
            for micro in run.loaders.train.step(4 * step, 4 // run.config.batch.micro_batch_size)
        ]
        for weight, gradient in zip(
            weights.values(), torch.autograd.grad(means(sums), list(own.values())), strict=True
        ):
            weight.grad = gradient
        norms.append(torch.nn.utils.clip_grad_norm_(weights.values(), clip or math.inf).item())
        groups[0]["weight_decay"] = optimizer.param_groups[0]["weight_decay"] = decay(step)
        optimizer.step()
    return {name: weight.detach() for name, weight in weights.items()}, norms


UPDATES = [  # flags, what the plain training is then told
    ("", {}),
    ("--adam-beta1 0.5", dict(betas=(0.5, 0.999))),
    ("--adam-beta2 0.7", dict(betas=(0.9, 0.7))),
    ("--adam-eps 0.01", dict(eps=0.01)),
    ("--weight-decay 3", dict(decay=lambda i: 3.0)),
    ("--start-weight-decay 1 --end-weight-decay 4 --weight-decay-incr-style linear", dict(decay=lambda i: 1 + i)),
    (
        "--start-weight-decay 1 --end-weight-decay 4 --weight-decay-incr-style cosine",
        dict(decay=lambda i: 1 + 3 * (1 - math.cos(math.pi * i / 3)) / 2),
    ),
    ("--clip-grad 0.05 --adam-eps 0.01", dict(clip=0.05, eps=0.01)),
    ("--clip-grad 0 --adam-eps 0.01", dict(clip=None, eps=0.01)),
    ("--optimizer cpu_adam", {}),
    ("--lr 3e-3", dict(lr=3e-3)),
]


@pytest.mark.parametrize("flags, told", UPDATES, ids=[flags.replace("--", "") or "default" for flags, _ in UPDATES])
def test_updates_are_those_of_torchs_adamw(flags, told, build, train):
    flags = f"{SMALL} --train-iters 3 --lr-decay-style constant {flags}"
    want, norms = plain_training(build(flags), 3, **told)
    run = train(flags)
    assert [step["grad_norm"] for step in run.steps] == pytest.approx(norms, rel=1e-5)
    found = run.tensors(3)
    moved = 0
    for name, weight in want.items():
        got = found[name]
        torch.testing.assert_close(got, weight[tuple(map(slice, got.shape))], rtol=1e-4, atol=1e-5, msg=name)
        moved += 1
    assert moved > 10


def test_losses_are_averaged_over_tokens_or_over_micro_batches(build, train):
    """With unequal numbers of unmasked tokens the two differ, in the gradient's norm."""
    flags = f"{SMALL} --micro-batch-size 1 --global-batch-size 4 --seq-length 32 --vocab-size 8 --eod-mask-loss"
    counts = [batch.loss_mask.sum().item() for batch in build(flags).loaders.train.step(0, 4)]
    assert len(set(counts)) > 1
    norms = {}
    for way, means in (("token", {}), ("micro-batch", dict(means=lambda sums: sum(loss / n for loss, n in sums) / 4))):
        norms[way] = plain_training(build(flags), 1, **means)[1]
        found = train(f"{flags} --loss-averaging {way} --train-iters 1", name=way).steps
        assert [step["grad_norm"] for step in found] == pytest.approx(norms[way], rel=1e-5)
    assert norms["token"] != pytest.approx(norms["micro-batch"], rel=2e-4)


# ---- where the optimizer's state is ----------------------------------------------------------------------------------


def test_state_on_the_host_or_in_files_changes_nothing_else(train, build, tmp_path):
    plain = train()
    for name, flags in dict(
        host="--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        files=f"--nvme-offload-fraction 0.5 --nvme-offload-dir {tmp_path}",
    ).items():
        states = build(flags).optimizer.states
        assert 0.2 < states[0].nbytes / sum(state.nbytes for state in states) < 0.8, "a half is somewhere else"
        assert train(flags, name).losses == plain.losses
    assert states[0].nbytes and not getattr(states[1], "offload", False)
