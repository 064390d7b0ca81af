# SPDX-License-Identifier: Apache-2.0
"""Frozen parameters: a GPT of which --freeze leaves some out, and one with adapters on a frozen base, against the same
networks in plain torch, in all kinds of layouts; what is saved of them, what they take, and what is said of mistakes.
"""

import re
from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import load_model
from megatron.model.command_line import parse_any
from megatron.model.recipe import recipe_of
from megatron.mpu.forked import run_ranks
from megatron.mpu.placement import placements
from megatron.tools import checkpoint as tool
from megatron.training import build
from megatron.training.rules import resolve
from megatron.training.step import train_step
from tests.models import adapters
from tests.models.plain_state import LINE, WIDTH, compare, freezing, initial_weights, read_all, scores, train
from tests.ranks import trains
from tests.training.test_plain_loop import records

pytestmark = pytest.mark.sampled(10)

TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one process": (1, ""),
    "dp2": (2, ""),
    "tp2": (2, TP),
    "tp2 with sequence parallelism": (2, f"{TP} --sequence-parallel --recompute-granularity full_attn"),
    "pp2": (2, PP),
    "pp2 with zb-h1": (2, f"{PP} --pipeline-schedule zb-h1"),
    "pp2 in a V": (2, f"{PP} --pipeline-schedule zb-v"),
    "zero1": (2, "--sharding-stage 1 --overlap-grad-reduce --overlap-param-gather"),
    "zero2": (2, "--sharding-stage 2 --recompute-granularity full"),
    "zero3": (2, "--sharding-stage 3"),
    "zero3 with recomputation": (2, "--sharding-stage 3 --recompute-granularity full --recompute-num-layers 2"),
    "zero3 in two stages": (4, f"{PP} --sharding-stage 3 --pipeline-schedule zb-h1 --overlap-param-gather"),
}
# What is frozen, and what of a network that leaves without a gradient.
PARTS = {
    "the first half": ("embedding.*", "blocks.0.*", "blocks.1.*"),
    "the last half": ("blocks.2.*", "blocks.3.*", "final_norm.*"),
    "the middle": ("blocks.1.*", "*.mlp.*"),
    "the tied table": ("embedding.word.weight",),
    "all but biases": ("*weight",),
}


pretrain = trains(pretrain_gpt, LINE)


adapt = trains(adapters, f"{LINE} --adapter-width {WIDTH}")


@cache
def plain(part: str):
    if part == "adapters":
        return train(initial_weights(adapters=True), lambda name: "adapter" in name)
    return train(initial_weights(), freezing(*PARTS[part]))


def check(folder, part: str) -> None:
    """Against the plain loop: every step, every weight; and no state of what is frozen, which has not changed."""
    steps, weights = plain(part)
    tensors = compare(folder, steps, weights)
    first = initial_weights(adapters=part == "adapters")
    still = {name for name, values in first.items() if torch.equal(values, tensors[name].double())}
    trained = (lambda name: "adapter" in name) if part == "adapters" else freezing(*PARTS[part])
    assert still == {name for name in weights if not trained(name)}
    moments = {name.split(".", 2)[2] for name in tensors if name.startswith("optimizer.")}
    assert moments == set(weights) - still


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("part", PARTS)
def test_any_layout_is_the_plain_loop(part, layout, tmp_path):
    world, words = LAYOUTS[layout]
    run_ranks(world, pretrain, f"{words} --save {tmp_path} --freeze {' '.join(PARTS[part])}")
    check(tmp_path, part)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_adapters_are_trained_alone(layout, tmp_path):
    world, words = LAYOUTS[layout]
    run_ranks(world, adapt, f"{words} --save {tmp_path} --check-replicas-interval 1")
    check(tmp_path, "adapters")


@pytest.mark.parametrize("flags", ["", "--sharding-stage 3 --bf16", f"{PP} --pipeline-schedule zb-h1"])
def test_nothing_is_made_for_what_is_frozen(flags):
    """No gradient, no main weights, no moments; and first stages whose inputs nobody learns from send zeros back."""

    def step(rank):
        config = resolve(parse_any(f"{LINE} --freeze embedding.* blocks.[012].* {flags}".split()), 1 + bool(flags))
        run = build.build_run(config, recipe_of(config))
        train_step(run)
        run.optimizer.weights.end_step()
        found = placements(run.stages)
        assert not any(
            parameter.requires_grad or parameter.grad is not None for parameter, p in found.values() if p.frozen
        )
        sizes, held = run.optimizer.memory(), run.optimizer.units
        trained = sum(unit.size for unit in held if not unit.frozen)
        element, shards = (2, 2) if "bf16" in flags else (4, 1)
        assert sizes["gradients"] == 4 * trained // shards
        if PP not in flags:
            assert sizes["state"] == 4 * 3 * trained // shards
            whole = sizes["shards"] if shards > 1 else sizes["parameters"]
            assert whole == element * sum(unit.size for unit in held) // shards
        return run.passes.needs_gradient

    found = run_ranks(1 + bool(flags), step)
    assert found == ([[False], [False]] if PP in flags else [[False]] * (1 + bool(flags)))


# ---- what the words mean ---------------------------------------------------------------------------------------------


def test_one_word_says_what_the_other_does(tmp_path, capsys):
    """--train-only is the rest of --freeze; both together; and the log counts what is trained."""
    ways = {
        "freeze": "--freeze *norm* *.bias embedding.position.* blocks.[0-2].*",
        "only": "--train-only embedding.word.weight blocks.3.mlp.*.weight blocks.3.attention.*.weight",
        "both": "--train-only embedding.word.* blocks.* --freeze *.bias *norm* blocks.[!3].*",
    }
    for name, words in ways.items():
        pretrain(0, f"{words} --save {tmp_path / name}")
    first, *others = (read_all(tmp_path / name) for name in ways)
    assert all(other.keys() == first.keys() and all(torch.equal(other[n], first[n]) for n in first) for other in others)
    first = {name: values for name, values in first.items() if not name.startswith("optimizer.")}
    chosen = re.compile(r"embedding.word.weight|blocks.3.(mlp|attention)\.\w+.weight")
    trained = sum(values.numel() for name, values in first.items() if chosen.fullmatch(name))
    frozen = sum(values.numel() for values in first.values()) - trained
    assert capsys.readouterr().out.count(f" > {trained:,} parameters are trained, {frozen:,} are frozen\n") == 3


@pytest.mark.parametrize("more", ["", "--dry-run --world-size 2"])
@pytest.mark.parametrize(
    "words, said",
    [
        ("--freeze embeding.*", "--freeze embeding.*: no parameter's name matches\n.*embedding.word.weight"),
        ("--freeze embedding", "--freeze embedding: no .*similar names: embedding.word.weight"),
        ("--freeze blocks.0.* blocks.4.*", "--freeze blocks.4.*: no .*similar names: blocks."),
        ("--train-only *.adapter.*", "--train-only .*adapter.*: no parameter"),
        ("--freeze *", r"--freeze \*: all 52 parameters are frozen"),
        ("--freeze blocks.* --train-only blocks.*", "--freeze blocks.. --train-only blocks..: all 52 parameters"),
    ],
)
def test_patterns_that_choose_nothing(words, said, more):
    with pytest.raises(SettingsError) as found:
        pretrain(0, f"{words} {more}")
    assert re.search(said, str(found.value), re.S) and found.value.code == 3, str(found.value)


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
def test_fine_tuning_begins_with_any_checkpoint(tmp_path):
    """With --freeze from a run that trained everything, in another layout and format; then all of it from there, and a
    model that generates. What is frozen stays as the checkpoint had it, rounded to the format of the run.
    """
    pretrain(0, f"--save {tmp_path / 'base'}")
    run_ranks(
        2, pretrain, f"{TP} --bf16 --freeze blocks.* --finetune --load {tmp_path / 'base'} --save {tmp_path / 'tuned'}"
    )
    run_ranks(2, pretrain, f"--sharding-stage 3 --finetune --load {tmp_path / 'tuned'} --save {tmp_path / 'all'}")
    base, tuned = read_all(tmp_path / "base"), read_all(tmp_path / "tuned")
    for name, values in tuned.items():
        if not name.startswith("optimizer."):
            frozen = name.startswith("blocks.")
            assert values.dtype == (torch.bfloat16 if frozen else torch.float32), name
            assert torch.equal(values, base[name].bfloat16()) == frozen, name
    model = load_model(str(tmp_path / "tuned"), precision="fp32").model
    tokens = torch.arange(12).view(1, -1)
    wanted = scores({name: values.double() for name, values in tuned.items()}, tokens)
    assert (model.logits(tokens.T).transpose(0, 1).double() - wanted)[..., :101].abs().max() < 1e-4
    after = read_all(tmp_path / "all")
    assert all(
        values.dtype == torch.float32 and not torch.equal(values, base[n]) for n, values in after.items() if n in base
    )


@pytest.mark.parametrize("layout", ["one process", "zero1", "zero3", "pp2"])
def test_what_is_loaded_is_what_passes_use(layout, tmp_path):
    """A base that is not this run's initial values, against the plain loop from there."""
    pretrain(0, f"--save {tmp_path / 'base'}")
    world, words = LAYOUTS[layout]
    run_ranks(
        world, pretrain, f"{words} --freeze blocks.* --finetune --load {tmp_path / 'base'} --save {tmp_path / 'tuned'}"
    )
    base = {n: values.double() for n, values in read_all(tmp_path / "base").items() if not n.startswith("optimizer.")}
    steps, wanted = train(base, freezing("blocks.*"))
    found = [{name: step[name] for name in steps[0]} for step in records(tmp_path / "tuned", "step")]
    assert found == [pytest.approx(step, rel=2e-5) for step in steps]
    tuned = read_all(tmp_path / "tuned")
    assert all((tuned[name].double() - values).abs().max() < 2e-5 for name, values in wanted.items())


def test_adapters_begin_with_a_gpts_checkpoint(tmp_path, capsys):
    pretrain(0, f"--save {tmp_path / 'gpt'}")
    adapt(0, f"--finetune --load {tmp_path / 'gpt'} --save {tmp_path / 'adapted'}")
    assert "new, and not out of the checkpoint: blocks.0.adapter.down, blocks.0.adapter.up" in capsys.readouterr().out
    gpt, adapted = read_all(tmp_path / "gpt"), read_all(tmp_path / "adapted")
    assert all(torch.equal(adapted[name], values) for name, values in gpt.items() if not name.startswith("optimizer."))
    start = {name: values.double() for name, values in gpt.items() if not name.startswith("optimizer.")}
    fresh = {name: values for name, values in initial_weights(adapters=True).items() if "adapter" in name}
    _, wanted = train(start | fresh, lambda name: "adapter" in name)
    assert all((adapted[name].double() - wanted[name]).abs().max() < 2e-5 for name in wanted)


@pytest.mark.parametrize(
    "then, now", [((1, ""), (2, "--sharding-stage 3")), ((2, f"{PP} --pipeline-schedule zb-h1"), (2, TP))]
)
def test_a_run_goes_on_in_another_layout(then, now, tmp_path):
    flags = f"--freeze {' '.join(PARTS['the middle'])} --save {tmp_path}"
    run_ranks(then[0], pretrain, f"{flags} {then[1]} --exit-interval 2")
    run_ranks(now[0], pretrain, f"{flags} {now[1]} --load {tmp_path}")
    check(tmp_path, "the middle")


def test_another_choice_is_another_run(tmp_path):
    """Refused as other settings are; with --override the state that is missing is to be allowed, too."""
    flags = f"--save {tmp_path} --load {tmp_path} --freeze blocks.0.*"
    pretrain(0, f"{flags} --exit-interval 2")
    for words in ("blocks.1.*", "blocks.0.* blocks.1.*"):
        with pytest.raises(SettingsError, match="--freeze: .*blocks.0.*in the checkpoint") as found:
            pretrain(0, f"--save {tmp_path} --load {tmp_path} --freeze {words}")
        assert found.value.code == 3 and "--override freeze" in found.value.do
    other = f"--save {tmp_path} --load {tmp_path} --freeze blocks.1.* --override freeze"
    with pytest.raises(CheckpointError, match="does not fit this model"):
        pretrain(0, other)
    pretrain(0, f"{other} --load-strictness warn-all")
    moments = {name for name in read_all(tmp_path) if name.startswith("optimizer.")}
    assert any("blocks.0." in name for name in moments) and not any("blocks.1." in name for name in moments)


def test_what_a_checkpoint_says(tmp_path, capsys):
    pretrain(0, f"--save {tmp_path} --freeze blocks.0.*")
    tool.main(["inspect", str(tmp_path)])
    said = capsys.readouterr().out
    assert re.search(r"blocks\.0\.mlp\.up\.weight +float32 +\[96, 24\] 1 +frozen\n", said)
    assert re.search(r"blocks\.1\.mlp\.up\.weight +float32 +\[96, 24\] 1\n", said)
    assert re.search(r"  [\d,]+ parameters, [\d,]+ of them frozen, optimizer state: exp_avg, exp_avg_sq\n", said)
    tool.main(["verify", str(tmp_path)])
    tool.main(["diff", str(tmp_path), str(tmp_path)])
    tool.main(["reshard", str(tmp_path), str(tmp_path / "new"), "--tp", "2"])
    said = capsys.readouterr().out
    assert ": good" in said and "132 tensors are equal to the bit" in said and "132 tensors in 2 files" in said


def test_figures_of_the_log(tmp_path):
    """The norm of all parameters, frozen ones too; the zeros in gradients of the others."""
    words = "--bf16 --log-params-norm --log-num-zeros-in-grad --sharding-stage 1 --freeze embedding.word.*"
    run_ranks(2, pretrain, f"{words} --save {tmp_path}")
    weights = [values for name, values in read_all(tmp_path).items() if not name.startswith("optimizer.")]
    last = records(tmp_path, "step")[-1]
    assert last["params_norm"] == pytest.approx(sum(w.double().square().sum().item() for w in weights) ** 0.5, rel=1e-5)
    assert last["num_zeros"] < 100


@pytest.mark.parametrize(
    "flags", ["--optimizer-cpu-offload --bf16", "--async-save", "--optimizer muon", "--optimizer sgd"]
)
def test_other_ways_to_keep_state(flags, tmp_path):
    """Where state lies, and which, is nothing to what is frozen."""
    run_ranks(2, pretrain, f"{flags} --sharding-stage 2 --freeze blocks.[02].* --save {tmp_path}")
    first, tensors = initial_weights(), read_all(tmp_path)
    for name, values in first.items():
        still = torch.equal(tensors[name], values.to(tensors[name].dtype))
        assert still == name.startswith(("blocks.0.", "blocks.2.")), name
    assert not any(re.search(r"^optimizer.*blocks\.[02]\.", name) for name in tensors)
