# SPDX-License-Identifier: Apache-2.0
"""A model that the core does not know, defined in `mlp_language_model.py` alone: trained in all kinds of layouts against a
plain torch loop, with a second sum that is logged or minimised; saved, resumed, resharded, planned and checked.
"""

import io
import json
import math
import re
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron.checkpoint.reader import Reader
from megatron.data.indexed import write_index
from megatron.data.mock import MockDataset
from megatron.entry import start
from megatron.errors import SettingsError, UsageError
from megatron.guard import changes, command
from megatron.model.command_line import parse_any
from megatron.model.recipe import facts_of, named_recipe
from megatron.mpu.forked import run_ranks
from megatron.mpu.mesh import Mesh
from megatron.mpu.random import seed_of
from megatron.planner.activations import stage_saved_bytes
from megatron.planner.command import training_flags
from megatron.planner.layout import Job, Layout
from megatron.planner.memory import state
from megatron.planner.parity import laid_out, parse_layout
from megatron.planner.traffic import totals, transfers
from megatron.settings.schema import setting
from megatron.tools import checkpoint as checkpoint_tool
from megatron.tools import evaluate, generate, plan, verify_layout
from megatron.tools import shrink as shrink_tool
from megatron.training.rules import resolve
from tests.models import mlp_language_model as mlp
from tests.planner.test_activations import bytes_kept
from tests.planner.test_truth import counted_step
from tests.ranks import on_ranks

pytestmark = pytest.mark.sampled(10)

TYPE = "tests.models.mlp_language_model"
LAYERS, HIDDEN, LENGTH, WINDOW, STEPS = 4, 24, 16, 3, 4
EOD, VOCABULARY = 100, 101
SIZES = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --seq-length {LENGTH} --mlp-window {WINDOW} --mock-data "
    "--vocab-size 100 --device cpu --num-workers 0"
)
FLAGS = (
    f"{SIZES} --micro-batch-size 2 --global-batch-size 8 --train-iters {STEPS} --eval-iters 0 --hidden-dropout 0 --lr 1e-2 "
    "--lr-decay-style constant --adam-eps 1e-4 --eod-mask-loss --log-interval 1 --peak-tflops 1"
)
TP, PP, SP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", "--sequence-parallel"
ZERO3, AGAIN = "--sharding-stage 3", "--recompute-granularity full"


# ---- the same in plain torch -----------------------------------------------------------------------------------------


def initial_weights() -> dict[str, torch.Tensor]:
    drawn = {"embedding.word.weight": ((VOCABULARY, HIDDEN), 0.02)}
    weights = {}
    for n in range(LAYERS):
        drawn[f"blocks.{n}.up.weight"] = (4 * HIDDEN, HIDDEN), 0.02
        drawn[f"blocks.{n}.down.weight"] = (HIDDEN, 4 * HIDDEN), 0.02 / math.sqrt(2 * LAYERS)
        weights[f"blocks.{n}.up.bias"] = torch.zeros(4 * HIDDEN)
        weights[f"blocks.{n}.down.bias"] = torch.zeros(HIDDEN)
        weights[f"blocks.{n}.mix.weight"] = torch.full((WINDOW, 4 * HIDDEN), 1 / WINDOW)
    for name in ["final_norm", *(f"blocks.{n}.norm" for n in range(LAYERS))]:
        weights |= {f"{name}.weight": torch.ones(HIDDEN), f"{name}.bias": torch.zeros(HIDDEN)}
    for name, (shape, std) in drawn.items():
        generator = torch.Generator().manual_seed(seed_of(1234, name, 0))
        weights[name] = torch.empty(shape).normal_(0.0, std, generator=generator)
    return {name: values.double() for name, values in weights.items()}


def network(weights, tokens: torch.Tensor, apart: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [b, s] -> (logits [b, s, vocabulary], sum over layers of the squares of their outputs [b, s]).

    apart: a token sees no token of a document before its own; documents end with EOD.
    """

    def norm(name, x):
        return F.layer_norm(x, (HIDDEN,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)

    document = (tokens == EOD).cumsum(1) - (tokens == EOD).long()
    x, activity = weights["embedding.word.weight"][tokens], 0
    for n in range(LAYERS):
        own = {name: weights[f"blocks.{n}.{name}"] for name in ("up.weight", "up.bias", "down.weight", "down.bias")}
        u = norm(f"blocks.{n}.norm", x) @ own["up.weight"].T + own["up.bias"]
        mixed = torch.zeros_like(u)
        for t in range(tokens.shape[1]):
            for k in range(min(WINDOW, t + 1)):
                seen = (document[:, t] == document[:, t - k]).double()[:, None] if apart else 1.0
                mixed[:, t] += seen * weights[f"blocks.{n}.mix.weight"][k] * u[:, t - k]
        x = x + F.gelu(mixed) @ own["down.weight"].T + own["down.bias"]
        activity = activity + x.square().sum(-1)
    return norm("final_norm", x) @ weights["embedding.word.weight"].T, activity


@cache
def plain(averaging: str = "token", weight: float = 0.0, apart: bool = False):
    """([{lm loss, activity, grad_norm} of each step], final weights) of the training of FLAGS."""
    weights = {name: values.requires_grad_() for name, values in initial_weights().items()}
    matrices = [v for name, v in weights.items() if re.search(r"(word|up|down)\.weight", name)]
    others = [v for v in weights.values() if all(v is not matrix for matrix in matrices)]
    groups = [dict(params=matrices, weight_decay=0.01), dict(params=others, weight_decay=0.0)]
    adam = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.999), eps=1e-4)
    data, steps = MockDataset(1 << 20, LENGTH, VOCABULARY, EOD, 1234, 0), []
    for number in range(STEPS):
        samples = torch.from_numpy(np.stack([data[place] for place in range(8 * number, 8 * number + 8)]))
        adam.zero_grad()
        tokens, loss, activity, minimised = 0, 0.0, 0.0, 0.0
        for micro in samples.split(2):
            logits, squares = network(weights, micro[:, :-1], apart)
            counts = micro[:, :-1] != EOD
            losses = F.cross_entropy(logits.flatten(0, 1), micro[:, 1:].flatten(), reduction="none").view(counts.shape)
            total = losses[counts].sum() + weight * squares[counts].sum()
            minimised = minimised + (total / counts.sum() / 4 if averaging == "micro-batch" else total)
            tokens += counts.sum().item()
            loss, activity = loss + losses[counts].sum().item(), activity + squares[counts].sum().item()
        (minimised if averaging == "micro-batch" else minimised / tokens).backward()
        norm = torch.nn.utils.clip_grad_norm_(weights.values(), 1.0).item()
        adam.step()
        steps.append({"lm loss": loss / tokens, "activity": activity / tokens, "grad_norm": norm})
    return steps, {name: values.detach() for name, values in weights.items()}


# ---- runs ------------------------------------------------------------------------------------------------------------


def main(rank: int, flags: str, weight: float = 0.0) -> None:
    start(flags.split(), replace(mlp.recipe(), sums={"lm loss": 1.0, "activity": weight}))


def train(folder, flags: str = "", world: int = 1, weight: float = 0.0, load=None):
    """Train FLAGS and `flags` on so many ranks, saving into `folder`."""
    words = f"{FLAGS} {flags} --save {folder}" + (f" --load {load}" if load else "")
    on_ranks(world, main, words, weight)
    return folder


def steps_of(folder) -> list[dict]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "step"]


def tensors_of(folder, iteration: int = STEPS) -> dict[str, torch.Tensor]:
    with Reader(folder / f"iter_{iteration:07d}") as reader:
        return {name: reader.read(name) for name in reader.tensors}


def compare(folder, expected) -> None:
    """Every step and every final weight with those of the plain loop."""
    wanted, weights = expected
    found = [{name: step[name] for name in wanted[0]} for step in steps_of(folder)]
    assert len(found) == STEPS and wanted[0]["activity"] != wanted[-1]["activity"]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours == {name: pytest.approx(value, rel=2e-5) for name, value in theirs.items()}
    tensors = {name: x for name, x in tensors_of(folder).items() if not name.startswith("optimizer.")}
    assert set(tensors) == set(weights)
    for name, values in weights.items():
        difference = (tensors[name].double() - values).abs().max().item()
        assert difference < 2e-5, f"{name} is off by {difference}"


LAYOUTS = {
    "one": (1, ""),
    "recompute": (1, f"{AGAIN} --recompute-num-layers 2"),
    "tp": (2, TP),
    "tp recompute": (2, f"{TP} {AGAIN}"),
    "tp sp": (2, f"{TP} {SP}"),
    "pp": (2, PP),
    "pp zb-h1": (2, f"{PP} --pipeline-schedule zb-h1"),
    "pp zb-v, no layer on the last": (2, f"{PP} --pipeline-schedule zb-v --pipeline-stage-layers 1,1,2,0"),
    "zero 3": (2, ZERO3),
    "zero 3 recompute": (2, f"{ZERO3} {AGAIN}"),
    "tp sp pp recompute": (4, f"{TP} {SP} {PP} {AGAIN}"),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("averaging", ["token", "micro-batch"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_any_layout_is_the_plain_loop_with_both_sums_minimised(tmp_path, name, averaging):
    world, flags = LAYOUTS[name]
    train(tmp_path, f"{flags} --loss-averaging {averaging}", world, weight=0.01)
    compare(tmp_path, plain(averaging, 0.01))


@pytest.mark.parametrize("name", ["one", "tp sp", "pp"])
def test_a_sum_of_no_weight_is_logged_alone(tmp_path, capfd, name):
    world, flags = LAYOUTS[name]
    train(tmp_path, flags, world)
    compare(tmp_path, plain())
    [last] = re.findall(rf"iteration +{STEPS}/.* lm loss: (\S+) \| activity: (\S+) \|", capfd.readouterr().out)
    wanted = plain()[0][-1]
    assert list(map(float, last)) == pytest.approx([wanted["lm loss"], wanted["activity"]], rel=1e-4)


def test_the_weight_of_the_second_sum_and_the_way_of_averaging_matter():
    """Otherwise the tests above would pass for a sum that is ignored."""
    norms = [
        plain(averaging, weight)[0][0]["grad_norm"] for averaging in ("token", "micro-batch") for weight in (0, 0.01)
    ]
    assert min(abs(a / b - 1) for at, a in enumerate(norms) for b in norms[:at]) > 2e-4


def test_documents_apart(tmp_path):
    train(tmp_path, "--reset-attention-mask")
    compare(tmp_path, plain(apart=True))
    assert abs(plain(apart=True)[0][-1]["grad_norm"] / plain()[0][-1]["grad_norm"] - 1) > 1e-3


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_resumes_bit_for_bit_also_in_another_layout_and_from_resharded_files(tmp_path, capsys):
    whole = train(tmp_path / "whole")
    half = train(tmp_path / "half", "--exit-interval 2")
    again = train(tmp_path / "half", load=half)
    assert all(torch.equal(x, tensors_of(again)[name]) for name, x in tensors_of(whole).items())
    assert [s["activity"] for s in steps_of(again)] == [s["activity"] for s in steps_of(whole)]

    source, cut = half / "iter_0000002", tmp_path / "cut" / "iter_0000002"
    checkpoint_tool.main(["reshard", str(half), str(tmp_path / "cut"), "--ckpt-step", "2", "--tp", "2", "--pp", "2"])
    with Reader(source) as before, Reader(cut) as after:
        assert {name: before.read(name).tolist() for name in before.tensors} == {
            name: after.read(name).tolist() for name in after.tensors
        }
    assert len(list(cut.glob("*.safetensors"))) == 4
    compare_last = train(tmp_path / "other", f"{TP} {PP}", 4, load=tmp_path / "cut")
    for name, x in tensors_of(whole).items():
        assert (x - tensors_of(compare_last)[name]).abs().max() < 2e-5, name
    capsys.readouterr()
    checkpoint_tool.main(["inspect", str(whole)])
    said = capsys.readouterr().out
    assert TYPE in said and "mlp_window" in said and "blocks.3.mix.weight" in said


def test_evaluate_is_the_plain_loss_of_all_tokens(tmp_path, capsys):
    train(tmp_path)
    tokens = np.random.RandomState(0).randint(0, 100, 75)
    tokens.astype(np.uint16).tofile(tmp_path / "held_out.bin")
    write_index(tmp_path / "held_out.idx", np.uint16, np.array([75], np.int32), np.array([0, 1], np.int64))
    evaluate.main(["--load", str(tmp_path), "--data-path", str(tmp_path / "held_out"), "--device", "cpu"])
    with pytest.raises(SettingsError, match=f"a model of type {TYPE}, which generates nothing"):
        generate.main(["--load", str(tmp_path), "--prompt", "1 2", "--device", "cpu"])
    [found] = re.findall(r"avg loss: (\S+) .* tokens: 74", capsys.readouterr().out)
    total, weights = 0.0, plain()[1]
    for first in range(0, 74, LENGTH):
        inputs, labels = (torch.from_numpy(tokens[: 75 - 1 + at][first + at :][:LENGTH]) for at in (0, 1))
        total += F.cross_entropy(network(weights, inputs[None])[0][0], labels, reduction="sum").item()
    assert float(found) == pytest.approx(total / 74, rel=2e-4)


# ---- its setting -----------------------------------------------------------------------------------------------------


def test_its_setting_is_a_setting_like_others(tmp_path, capsys):
    for asked, wanted in {
        "--help": r"(?m)^mlp:\n  --mlp-window N .*tokens that a layer mixes(.|\n)*\n\nmodel:\n  --num-layers N",
        "--help-all": r"--mlp-window N .*tokens that a layer mixes",
        "--print-config": rf"mlp:\n  mlp_window: {WINDOW} +# --mlp-window",
    }.items():
        with pytest.raises(SystemExit) as done:
            mlp.main(f"{FLAGS} {asked}".split())
        assert done.value.code == 0 and re.search(wanted, capsys.readouterr().out)
    (tmp_path / "run.yaml").write_text("mlp_window: 5\n")
    assert (
        parse_any(f"--model-type {TYPE} {SIZES} --config {tmp_path}/run.yaml".split()).extra["mlp"].mlp_window == WINDOW
    )
    (tmp_path / "whole.yaml").write_text(f"model_type: {TYPE}\nmlp_window: 5\nnum_layers: 2\nhidden_size: 8\n")
    assert parse_any(f"--config {tmp_path}/whole.yaml".split()).extra["mlp"].mlp_window == 5
    for wrong, words in {
        "--mlp-window 0": "--mlp-window 0 must be at least 1",
        "--swiglu": "this model has none",
        "--squared-relu": "this model has none",
        "--window-size 4,0": "this model has none",
        "--attn-logit-softcapping 4": "this model has none",
        "--recompute-granularity full_attn": "--recompute-granularity full_attn: the layers of",
        "--recompute-granularity selective --recompute-modules mlp": "they have layernorm, mlp_act",
        "--mlp-window x": "'x' is not a whole number",
    }.items():
        with pytest.raises((SettingsError, UsageError), match=re.escape(words)):
            mlp.main(f"{FLAGS} {wrong}".split())


def test_its_setting_belongs_to_the_checkpoint(tmp_path):
    train(tmp_path, "--train-iters 1")
    record = json.loads((tmp_path / "iter_0000001" / "state.json").read_text())
    assert record["config"]["extra"] == {"mlp": {"mlp_window": WINDOW}}
    for flags in ("", "--finetune", "--no-load-optim"):
        with pytest.raises(SettingsError, match=rf"--mlp-window: {WINDOW} in the checkpoint, 2 now"):
            mlp.main(f"{FLAGS} {flags} --mlp-window 2 --load {tmp_path}".split())
    with pytest.raises(SettingsError, match=rf"--model-type: {TYPE} in the checkpoint, GPT now"):
        import pretrain_gpt

        shared = FLAGS.replace(f"--mlp-window {WINDOW}", "")
        pretrain_gpt.main(f"{shared} --num-attention-heads 4 --load {tmp_path}".split())


@dataclass(frozen=True)
class Kinds:
    silent: int = setting("a setting of which the recipe says nothing", 1)
    shape: int = setting("one that changes the weights", 1, on_resume="another model")
    wish: int = setting("one that may change", 1, on_resume="logged")


def test_what_a_change_of_a_recipes_setting_is():
    def config(override=None, **values):
        made = parse_any(f"--model-type {TYPE} {SIZES}".split())
        return replace(made, extra={"kinds": Kinds(**values)}, guard=replace(made.guard, override=override))

    def refused(function, **values):
        try:
            function(config(**values), dict(extra=dict(kinds=dict(silent=1, shape=1, wish=1))))
        except SettingsError:
            return True
        return False

    run, model = changes.refuse_another_run, changes.refuse_another_model
    assert [refused(f, silent=2) for f in (run, model)] == [True, False]
    assert [refused(f, shape=2) for f in (run, model)] == [True, True]
    assert [refused(f, wish=2) for f in (run, model)] == [False, False]
    assert [refused(f, silent=2, override="silent") for f in (run, model)] == [False, False]
    assert [refused(f, shape=2, override="--shape") for f in (run, model)] == [False, False]
    with pytest.raises(UsageError, match="--override wish"):
        changes.refuse_another_run(config("wish"), {})
    assert changes.change_messages(config(wish=2), dict(extra=dict(kinds=dict(wish=1)))) == [
        "--wish was 1 in the checkpoint, is 2 now"
    ]


# ---- before the launch -----------------------------------------------------------------------------------------------


def said_by(function, words: str) -> str:
    out = io.StringIO()
    with redirect_stdout(out):
        function(words.split())
    return out.getvalue()


@pytest.mark.sampled(10)
def test_dry_run_preflight_verify_layout_and_the_search():
    said = said_by(mlp.main, f"{FLAGS} --dry-run --world-size 4 {TP} {PP}")
    assert "no problems found" in said and f"mlp: mlp_window={WINDOW}" in said
    said = said_by(mlp.main, f"{FLAGS} --preflight --world-size 4 {TP} {SP} {PP}")
    assert "FAIL" not in said and "PASS" in said and "shrunk" in said and "shapes" in said
    said = said_by(verify_layout.main, f"--model-type {TYPE} {FLAGS} --steps 3 --layouts tp2,pp2-zbh1,dp2-zero3")
    assert said.count("PASS") == 3
    said = said_by(plan.main, f"--model-type {TYPE} {FLAGS} --world-size 4")
    assert f"-m {TYPE}" in said and said.count(f"--mlp-window {WINDOW}") == 1
    assert "_attn" not in said  # there is none that could be recomputed


def test_facts_are_those_of_the_network():
    found = mlp.MLPFacts(parse_any(f"--model-type {TYPE} {SIZES}".split()).model, VOCABULARY, WINDOW)
    weights = initial_weights()
    assert {name: placed.shape for name, placed in found.weights.items()} == {
        name: tuple(values.shape) for name, values in weights.items()
    }
    assert found.parameters == sum(values.numel() for values in weights.values())
    multiplied = LAYERS * 2 * 4 * HIDDEN * HIDDEN + VOCABULARY * HIDDEN
    assert found.flops() == 3 * 2 * multiplied


def test_flags_written_out_are_read_back_as_the_same_settings():
    for words in (SIZES, f"{SIZES} --position-embedding-type learned_absolute --mlp-window 4"):
        config = parse_any(f"--model-type {TYPE} {words}".split())
        again = parse_any(["--model-type", TYPE, *training_flags(config)])
        assert again == config and again.extra == config.extra


def test_the_shrunk_job_trains_and_says_how_to_train_it(capfd):
    shrink_tool.main(f"--model-type {TYPE} {FLAGS} {TP} --world-size 2 --steps 2".split())
    said = capfd.readouterr().out
    assert re.search(rf"torchrun --nproc-per-node 2 -m {TYPE} .*--mlp-window {WINDOW}", said) and "lm loss" in said


CASES = ["", "tp2", "tp2sp", "dp2-zero3", "dp2-zero1", "pp2", "pp2-zbh1"]


@pytest.mark.parametrize("text", CASES)
def test_the_ledgers_of_memory_and_messages_are_exact(text):
    layout = parse_layout(text)
    words = f"--model-type {TYPE} {FLAGS}".replace("--hidden-dropout 0", "")
    config = resolve(laid_out(parse_any(words.split()), layout), layout.world_size)
    job = Job.of(config, facts_of(config, VOCABULARY), dp=layout.dp, device="cpu")
    planned = Layout.of(config, layout.world_size)
    for place, memory, _, sent in run_ranks(layout.world_size, lambda rank: counted_step()(config)):
        held, _ = state(job, planned, place["pp"])
        shared = 0 if held["main weights"] else memory["parameters"]
        assert sum(held.values()) == sum(memory.values()) - shared
        messages = totals(transfers(job, planned, place["pp"], place))
        if layout.sp:  # this model's own: a number for each layer and micro-batch
            messages["all_reduce", "tp"] = messages.get(("all_reduce", "tp"), 0) + 4 * LAYERS * 4
        assert messages == sent


@pytest.mark.parametrize("granularity", [None, "full", "selective --recompute-modules layernorm mlp_act"])
@pytest.mark.parametrize("flags", ["", "--hidden-dropout 0 --normalization RMSNorm --disable-bias-linear"])
@pytest.mark.parametrize("tp, sp", [(1, False), (2, False), (2, True)])
def test_kept_activations_are_planned_within_5_percent(tp, sp, flags, granularity):
    words = f"--model-type {TYPE} {SIZES} {flags}" + (f" --recompute-granularity {granularity}" if granularity else "")
    config = resolve(parse_any([*words.split(), "--lr", "1", "--train-iters", "1"]), 1)
    config = replace(config, parallel=replace(config.parallel, sequence_parallel=sp))
    layout = Layout(tp=tp, sp=sp, micro_batch_size=2, recompute=config.recompute)

    def measured(rank):
        kind = dict(dtype=torch.float32, device="cpu")
        return bytes_kept(mlp.build_model(config, Mesh(rank, tp=tp), VOCABULARY, **kind), layout)

    planned = stage_saved_bytes(Job(facts_of(config, VOCABULARY), 2, "fp32", "cpu"), layout, range(LAYERS), True, True)
    planned.pop("output layer and loss")
    found = measured(0) if tp == 1 else run_ranks(tp, measured)[0]
    assert sum(planned.values()) == pytest.approx(found, rel=0.05)


def test_a_supervised_command_of_a_module_is_understood():
    words = f"torchrun --nproc-per-node 2 -m {TYPE} {SIZES} --save somewhere".split()
    assert command.flags_of(words)[0] == "--num-layers" and command.ranks_of(words) == 2
    config = command.config_of(words)
    assert config.checkpoint.save == "somewhere" and config.extra["mlp"].mlp_window == WINDOW
    assert command.config_of(["python", "-m", "torch.distributed.run", *words[1:]]) == config
    script = "python -m torch.distributed.launch pretrain_gpt.py --save a".split()
    assert command.flags_of(script) == ["--save", "a"] == command.flags_of(["srun", "-m", "cyclic.block", *script])


def test_a_model_type_that_is_none_is_told():
    for name in ("tests.models.nothing", "json", "", ".x", 5, ["GPT"]):
        with pytest.raises(SettingsError, match=f"--model-type {re.escape(str(name))}: there is no such model"):
            named_recipe(name)
