# SPDX-License-Identifier: Apache-2.0
"""An optimizer and a schedule of a recipe's own: against torch's optimizer, and in each place that names choices."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

import pretrain_gpt
from megatron.errors import SettingsError, UsageError
from megatron.model.command_line import parse_any
from megatron.model.recipe import config_of
from megatron.optimizer.kinds import Kind
from megatron.planner.command import training_flags
from megatron.planner.layout import Job as PlannedJob
from megatron.settings.own_choices import optimizer_group
from megatron.settings.parse import parse_pretrain
from megatron.training.rules import check, idle
from tests.models import own_update
from tests.ranks import on_ranks, trains
from tests.training.plain_loop import Job, train
from tests.training.test_plain_loop import FLAGS, PLAIN, SIX, compare, records

NAME = "tests.models.own_update"
OWN = f"{SIX} --optimizer adagrad --adagrad-eps 1e-4 --lr 3e-2 --min-lr 1e-3 --lr-decay-style quadratic"


def settings(flags: str, recipe=None):
    recipe = recipe or own_update.recipe()
    defaults = {"model_type": recipe.model_type, **recipe.defaults}
    return parse_pretrain(f"{FLAGS} {flags}".split(), recipe.setting_groups, defaults=defaults)


pretrain = trains(own_update, FLAGS)


@cache
def plain_adagrad():
    """48 samples in steps of 8; the rate falls as a parabola from 3e-2 to 1e-3."""
    job = PLAIN | dict(rate=lambda samples: 1e-3 + (3e-2 - 1e-3) * (1 - samples / 48) ** 2, moments=("sum",))
    return train(Job(**job, optimizer=lambda groups: torch.optim.Adagrad(groups, lr=1.0, eps=1e-4)))


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "world, layout", [(1, ""), (2, "--sharding-stage 1"), (2, "--sharding-stage 3 --overlap-param-gather")]
)
def test_a_rule_of_ones_own_is_torchs(world, layout, tmp_path):
    line = f"{OWN} {layout} --save {tmp_path}"
    on_ranks(world, pretrain, line)
    compare(tmp_path, plain_adagrad())


def test_its_names_are_choices(capsys):
    for flags in ("--help", "--help-all"):
        with pytest.raises(SystemExit):
            settings(flags)
        assert "quadratic" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        settings("--help-all")
    assert re.search(r"--adagrad-eps X +epsilon of --optimizer adagrad", capsys.readouterr().out)
    with pytest.raises(UsageError, match="'adagard' is none of .* did you mean adagrad"):
        settings("--optimizer adagard")
    with pytest.raises(UsageError, match="'cuadratic' is none of .* did you mean quadratic"):
        settings("--lr-decay-style cuadratic")
    with pytest.raises(UsageError, match="'adagrad' is none of"):
        parse_any(f"{FLAGS} --optimizer adagrad".split())
    assert settings("--optimizer ADAGRAD").optimizer.optimizer == "adagrad"


def test_files_give_them_too(tmp_path):
    (tmp_path / "run.yaml").write_text("optimizer: adagrad\nadagrad_eps: 1.0e-3\nlr_decay_style: quadratic\n")
    found = settings(f"--config {tmp_path / 'run.yaml'}").optimizer
    assert (found.optimizer, found.adagrad_eps, found.lr_decay_style) == ("adagrad", 1e-3, "quadratic")


def test_tools_read_them_and_write_them():
    """parse_any is how tools read commands, config_of how they read checkpoints, training_flags what planners print."""
    config = parse_any([*f"{FLAGS} {OWN}".split(), "--model-type", NAME])
    assert config == settings(OWN)
    words = training_flags(config)
    for flag, value in (("--optimizer", "adagrad"), ("--adagrad-eps", "0.0001"), ("--lr-decay-style", "quadratic")):
        assert words[words.index(flag) + 1] == value
    record = dict(model=dict(vars(config.model)), optimizer=dict(vars(config.optimizer)))
    assert config_of(record).optimizer == config.optimizer


def test_the_planner_counts_its_state():
    kinds = ("adagrad", "adam")
    jobs = [settings(f"{OWN} --optimizer {name}") for name in kinds]
    facts = own_update.recipe().facts(jobs[0], 100)
    assert [PlannedJob.of(config, facts, dp=1, device="cpu").moments for config in jobs] == [(4,), (4, 4)]


def test_a_setting_of_a_rule_that_is_not_taken_is_told():
    assert idle(settings(OWN), 1) == {}
    said = idle(settings(OWN.replace("--optimizer adagrad", "") + " --adam-eps 1"), 1)
    assert said == {"adagrad_eps": "--adagrad-eps 0.0001 has no effect without --optimizer adagrad"}
    assert "--optimizer adam" in idle(settings(f"{OWN} --adam-eps 1"), 1)["adam_eps"]


def test_a_run_goes_on_and_says_what_changed(tmp_path, capsys):
    line = f"{OWN} --save {tmp_path}"
    pretrain(0, f"{line} --exit-interval 3")
    pretrain(0, f"{line} --load {tmp_path}")
    compare(tmp_path, plain_adagrad())
    capsys.readouterr()
    longer = line.replace("--train-iters 6", "--train-iters 7") + f" --load {tmp_path}"
    pretrain(0, f"{longer} --adagrad-eps 1e-3 --resume-schedule checkpoint --lr-decay-style linear")
    said = capsys.readouterr().out
    assert "--adagrad-eps was 0.0001 in the checkpoint, is 0.001 now" in said
    assert "--lr-decay-style was quadratic in the checkpoint, is linear now: the checkpoint's is followed" in said
    assert records(tmp_path, "step")[-1]["learning_rate"] == pytest.approx(1e-3)
    assert (
        json.loads((tmp_path / "iter_0000007" / "state.json").read_text())["config"]["optimizer"]["optimizer"]
        == "adagrad"
    )
    with pytest.raises(SettingsError, match="--optimizer adam cannot resume from the state of adagrad"):
        pretrain(0, f"{longer} --train-iters 8 --optimizer adam")


@pytest.mark.parametrize(
    "own, said",
    [
        (dict(schedules={"linear": own_update.quadratic}), "'linear' is a built-in name"),
        (
            dict(optimizers={"fused_adam": Kind(lambda s: (), update=own_update.Adagrad)}),
            "'fused_adam' is a built-in name",
        ),
        (dict(schedules={"two words": own_update.quadratic}), "is not a valid name"),
        (dict(schedules={"flat": 1.0}), "give a function"),
        (dict(optimizers={"mine": own_update.Adagrad}), "give megatron.optimizer.kinds.Kind"),
        (dict(optimizers={"mine": Kind(lambda s: ())}), "give megatron.optimizer.kinds.Kind"),
    ],
)
def test_what_cannot_be_is_said(own, said):
    with pytest.raises(SettingsError, match=re.escape(said)) as refused:
        optimizer_group(**{"schedules": {}, "optimizers": {}, **own})
    assert refused.value.code == 3


@pytest.mark.parametrize(
    "curve, said",
    [
        (lambda done: 1 / (1 - done), r"\(1\) raised ZeroDivisionError"),
        (lambda done: float("nan"), r"\(0\) is nan"),
        (lambda done: 0.5 - done, r"\(1\) is -0.5"),
    ],
)
def test_a_schedule_that_gives_no_rate_is_refused_before_the_run(curve, said):
    recipe = replace(pretrain_gpt.recipe(), schedules={"mine": curve})
    [problem] = check(settings(f"{SIX} --lr 1 --lr-decay-style mine", recipe), 1)
    assert re.search(said, problem)
