# SPDX-License-Identifier: Apache-2.0
"""Optimizer state of Megatron-LM's checkpoints, against files and losses of Megatron-Core itself.

`megatron_core.tar.xz` holds checkpoints of tiny GPTs that megatron-core 0.16.1 (in places 0.12.0) trained for three steps
and saved on CPUs, by its own optimizers and writers. `numbered` is the plain optimizer's state, which has the parameters'
shapes; the other forms are of the same training, so all have to be the same state.
"""

import json
import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint.choose import checkpoints
from megatron.checkpoint.reader import Reader
from megatron.convert.megatron_optimizer import LocalParameter, from_buffer, locate, position_of
from megatron.errors import CheckpointError
from megatron.settings.parse import parse_pretrain
from megatron.tools import checkpoint as tool
from megatron.training.loop import pretrain
from megatron.training.rules import resolve
from tests.inference.test_convert import assert_same, loaded

pytestmark = pytest.mark.sampled(10)

FORMS = [
    ("dp2", "dp_reshardable"),
    ("dp2", "buffers"),
    ("dp2", "fully_reshardable"),
    ("dp2", "flattened"),
    ("llama", "buffers"),
    ("llama_0.12", "flattened"),
    ("pp2", "dp_reshardable"),
    ("pp2", "buffers"),
    ("llama", "dp_reshardable"),
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("theirs")
    with tarfile.open(Path(__file__).with_name("megatron_core.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


def convert(source: Path, out: Path, *words: str) -> dict[str, torch.Tensor]:
    tool.main(["from-megatron", str(source), str(out), *words])
    return loaded(out)


def record_of(out: Path) -> dict:
    [path] = checkpoints(out).values()
    with Reader(path) as reader:
        return reader.state


@pytest.mark.sampled(10)
@pytest.mark.parametrize("layout, form", FORMS)
def test_each_form_is_the_same_state_to_the_bit(theirs, tmp_path, layout, form):
    state = convert(theirs / layout / form, tmp_path / "ours")
    assert_same(state, convert(theirs / layout / "numbered", tmp_path / "numbered"))
    weights = convert(theirs / layout / form, tmp_path / "weights", "--no-load-optim")
    prefixes = ("", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    assert set(state) == {prefix + name for prefix in prefixes for name in weights}
    assert all(torch.equal(state[name].bfloat16().float(), values) for name, values in weights.items())
    record = record_of(tmp_path / "ours")
    assert record["optimizer_steps"] == record["state"]["iteration"] == 3
    assert record["state"]["consumed_samples"] == record["state"]["scheduled_samples"] == 12
    assert record["config"]["optimizer"]["lr"] == 0.01 and record["vocab_size"] == 15
    assert record_of(tmp_path / "weights")["optimizer_steps"] is None


def test_the_next_losses_are_theirs(theirs, tmp_path, monkeypatch):
    """A run goes on where Megatron-Core left it. It trained 20 steps more on the same samples, in fp32."""
    source = theirs / "one" / "numbered"
    convert(source, tmp_path / "ours")
    rows = torch.load(source / "tokens.pt", weights_only=True).numpy()

    class Samples:
        def __len__(self):
            return len(rows)

        def __getitem__(self, index):
            return rows[index]

    own = replace(pretrain_gpt.recipe(), build_datasets=lambda *_: (Samples(), None, None), own_data=True)
    monkeypatch.setattr(pretrain_gpt, "recipe", lambda: own)
    flags = (
        f"--use-checkpoint-args --load {tmp_path / 'ours'} --vocab-size 15 --global-batch-size 4 --train-iters 23 "
        "--lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --weight-decay .1 --precision fp32 --eval-iters 0 "
        f"--log-interval 1 --device cpu --num-workers 0 --metrics-file {tmp_path / 'metrics.jsonl'}"
    )
    pretrain(resolve(parse_pretrain(flags.split(), own.groups, defaults={"model_type": own.model_type}), 1), own)
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    records = [record for record in records if "lm loss" in record]
    theirs = json.loads((source / "losses.json").read_text())
    known = [(step + 1, loss, norm) for step, loss, norm in theirs if step >= 3]
    assert [record["iteration"] for record in records] == [step for step, *_ in known] == list(range(4, 24))
    for record, (_, loss, norm) in zip(records, known, strict=True):
        assert record["lm loss"] == pytest.approx(loss, abs=1e-6)
        assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)


def test_settings_of_the_run_are_recorded_for_the_comparison_on_resume(theirs, tmp_path):
    """Settings of the run are compared, as those of a run of this suite are."""
    convert(theirs / "one" / "numbered", tmp_path / "ours")
    assert record_of(tmp_path / "ours")["config"]["logging"] == {"seed": 1234}
    assert record_of(tmp_path / "ours")["config"]["batch"] == {"global_batch_size": 4}


# ---------------------------------------------------------------------------------------------------- buffers


def parameter(*values: float) -> LocalParameter:
    """A parameter in bf16."""
    own = torch.tensor(values).bfloat16()
    return LocalParameter("name", tuple(own.shape), lambda x: torch.equal(x.bfloat16(), own), None)


@pytest.mark.sampled(1)
def test_parameters_start_at_multiples_of_64_in_their_bucket_or_begin_one():
    a, b, c = parameter(1.0, 2.0), parameter(3.0), parameter(4.0, 5.0, 6.0)
    gap = [0.0] * 62
    for values, starts in (
        ([1, 2, *gap, 3, *gap, 0, 4, 5, 6], [[0], [64], [128]]),  # one bucket
        ([1, 2, 3, 4, 5, 6], [[0], [2], [3]]),  # three
        ([1, 2, 3, *gap, 0, 4, 5, 6], [[0], [2], [66]]),  # the second has two parameters
        ([1, 2, *gap, 3, 4, 5, 6], [[0], [64], [65]]),  # the first has two
        ([1, 2, 0, 3, 4, 5, 6], []),
        ([1, 2, 3, 4, 5], []),
        ([1, 2, 3, 4, 5, 6, 0], []),  # something is left
    ):
        assert locate([a, b, c], torch.tensor(values, dtype=torch.float32), slack=1) == starts
    assert locate([a], torch.tensor([1.0, 2.0, 7.0]), slack=2) == [[0]]


@pytest.mark.sampled(1)
def test_a_buffer_that_fits_in_two_ways_needs_the_same_moments_in_both():
    """Zeros may be a bias or padding. Moments tell, or do not matter."""
    bias = LocalParameter("bias", (1,), lambda x: not x.any(), lambda prefix, x: [(prefix, x.tolist())])
    first = LocalParameter("first", (1,), torch.ones(1).equal, lambda prefix, x: [(prefix, x.tolist())])
    main = torch.zeros(65)
    main[0] = 1.0
    moment = torch.zeros(65)
    buffer = dict(param=main, exp_avg=moment, exp_avg_sq=moment)
    found = list(from_buffer("buffer", [[bias, first]], buffer, slack=64))
    assert found[3:] == [("", [0.0]), ("optimizer.exp_avg.", [0.0]), ("optimizer.exp_avg_sq.", [0.0])]
    moment[64] = 0.5
    with pytest.raises(CheckpointError, match="fits the parameters in several ways"):
        list(from_buffer("buffer", [[bias, first]], buffer, slack=64))


# ---------------------------------------------------------------------------------------------------- wrong inputs


def changed(theirs, tmp_path, layout: str, form: str, name: str, change) -> Path:
    """A copy of a checkpoint in which `change` edits the content of one file."""
    folder = shutil.copytree(theirs / layout / form, tmp_path / "theirs")
    [path] = folder.glob(f"*/{name}")
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)
    return folder


def main_of(content: dict) -> torch.Tensor:
    [buffer] = content[0].values()
    return buffer["param"]


@pytest.mark.parametrize(
    "name, change, told",
    [
        ("mp_rank_00/distrib_optim.pt", lambda c: main_of(c)[70:80].mul_(2), "are not those of the model"),
        ("mp_rank_00/distrib_optim.pt", lambda c: c.pop(0), "holds nothing, not the state of Adam"),
        ("mp_rank_00/distrib_optim.pt", lambda c: next(iter(c[0].values())).pop("exp_avg"), "not the state of Adam"),
        ("mp_rank_01/distrib_optim.pt", lambda c: c[0].update(other={}), "several number formats"),
        ("mp_rank_00/model_optim_rng.pt", lambda c: c.pop("optimizer"), "does not say how many updates"),
    ],
)
def test_state_that_does_not_belong_to_the_model_is_refused(theirs, tmp_path, name, change, told):
    folder = changed(theirs, tmp_path, "llama", "buffers", name, change)
    with pytest.raises(CheckpointError, match=told) as error:
        convert(folder, tmp_path / "ours")
    assert "--no-load-optim" in str(error.value) or "was refused" in str(error.value)
    assert not (tmp_path / "ours").exists()
    assert convert(folder, tmp_path / "ours", "--no-load-optim")


@pytest.mark.parametrize(
    "change, told",
    [
        (lambda c: c["optimizer"]["optimizer"]["state"][0].pop("exp_avg_sq"), "state of Adam for parameter 0"),
        (lambda c: c["optimizer"]["fp32_from_fp16_params"][0][0].mul_(2), "parameter 0 in .* is none of the model's"),
        (lambda c: c["optimizer"]["optimizer"]["param_groups"][1]["params"].pop(), "lacks the state of"),
    ],
)
def test_numbered_state_that_is_not_whole_is_refused(theirs, tmp_path, change, told):
    folder = changed(theirs, tmp_path, "llama", "numbered", "mp_rank_00/model_optim_rng.pt", change)
    with pytest.raises(CheckpointError, match=told):
        convert(folder, tmp_path / "ours")


def test_no_state_in_one_file_of_several_is_refused(theirs, tmp_path):
    folder = shutil.copytree(theirs / "llama" / "buffers", tmp_path / "theirs")
    [path] = folder.glob("*/mp_rank_01/distrib_optim.pt")
    path.unlink()
    with pytest.raises(CheckpointError, match="has no optimizer state, unlike the first file"):
        convert(folder, tmp_path / "ours")


@pytest.mark.sampled(1)
def test_each_number_of_the_position_is_its_own():
    """No two are equal, so none can stand for another: samples after skipped steps, for example, are two numbers."""
    facts = dict(
        args=dict(consumed_train_samples=120, consumed_valid_samples=31, hysteresis=5),
        schedule=dict(num_steps=112),
        scale=dict(scale=4096.0, growth_tracker=17, hysteresis_tracker=3),
        iteration=15,
        updates=[14],
    )
    position, updates = position_of(facts, dict(valid_order=9))
    assert updates == 14 and position == dict(
        scaler=dict(scale=4096.0, good_steps=17, overflows=2),
        iteration=15,
        consumed_samples=120,
        scheduled_samples=112,
        consumed_valid_samples=31,
        valid_order=9,
    )
