# SPDX-License-Identifier: Apache-2.0
"""Hooks: called where they say, in order, with what the run's own files say; they change nothing, and fail by name."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain_gpt
from megatron.entry import start
from megatron.errors import Failure, NumericsError, SettingsError, exit_code
from megatron.settings.parse import parse_pretrain
from megatron.training.hooks import PLACES, Hook, Hooks, hook_makers, make_hooks

HERE = __name__
CALLS, ENDS = [], []


class Recorder(Hook):
    """Keeps what it was called with."""

    def before_training(self, run):
        CALLS.append(("before_training", run.iteration, run.train_iters))

    def before_step(self, run):
        CALLS.append(("before_step", run.iteration, run.consumed_samples))

    def before_update(self, run, update):
        CALLS.append(("before_update", run.iteration, update.iteration, update.learning_rate, dict(update.buffers)))

    def after_step(self, run, step):
        CALLS.append(("after_step", step.iteration, step.consumed_samples, dict(step.losses), step.learning_rate))

    def after_evaluation(self, run, evaluation):
        CALLS.append(("after_evaluation", run.iteration, evaluation.split, evaluation.final, dict(evaluation.losses)))

    def after_save(self, run, save):
        CALLS.append(("after_save", save.iteration, save.folder, save.in_background))

    def end(self, run):
        CALLS.append(("end", run.iteration, self.config.batch.train_iters))
        ENDS.append((run.code, run.why))


class First(Hook):
    def before_step(self, run):
        CALLS.append("the recipe's")


class Asks(Hook):
    """For an end, as somebody at the machine would."""

    def before_step(self, run):
        Path(self.config.guard.kill_switch_file).touch()


class Sums(Hook):
    """A collective in a hook, and a random number."""

    def after_step(self, run, step):
        import torch
        import torch.distributed as dist

        torch.rand(3)
        ranks = torch.tensor([run.rank])
        dist.all_reduce(ranks)
        assert ranks.item() == sum(range(run.world_size))


class Remembers(Hook):
    """Every loss of the run, whoever starts it."""

    losses = ()

    def before_training(self, run):
        CALLS.append(("before", list(self.losses)))

    def after_step(self, run, step):
        self.losses = [*self.losses, step.losses["lm loss"]]

    def state_dict(self):
        return {"losses": list(self.losses)} if self.losses else None

    def load_state_dict(self, state):
        self.losses = state["losses"]


class Unspeakable(Remembers):
    def state_dict(self):
        return {"file": Path()}


class Halved(Hook):
    def state_dict(self):
        return {}


class Fails(Hook):
    def after_step(self, run, step):
        if step.iteration == 2:
            return step.losses["lm los"]


class Stops(Hook):
    def before_step(self, run):
        raise NumericsError("enough", "of it")


class Orders(Hook):
    def before_step(self, run):
        return run.iteration == 1


class Writes(Hook):
    def after_step(self, run, step):
        step.iteration = 0


class WritesInside(Hook):
    def after_evaluation(self, run, evaluation):
        evaluation.losses["lm loss"] = 0.0


class Misspelt(Hook):
    def after_eval(self, run, evaluation):
        pass


class Silent(Hook):
    def on_step_end(self, run, step):
        pass


def nothing(config):
    return None


@pytest.fixture(autouse=True)
def found_by_name(monkeypatch):
    monkeypatch.setitem(sys.modules, HERE, sys.modules[__name__])
    CALLS.clear()
    ENDS.clear()


def hooks(*names):
    return "--hooks " + " ".join(f"{HERE}:{name}" for name in names)


EVALUATED = "--eval-interval 2 --eval-iters 1 --train-iters 4 --save-interval 3"


def test_places_in_order(command, read, tmp_path):
    recipe = replace(pretrain_gpt.recipe(), hooks=(First,))
    start(command(f"{EVALUATED} --save {tmp_path} {hooks('Recorder')}"), recipe)
    found = read(tmp_path)
    steps, evals = found.steps, found.evals
    step = lambda n: ("after_step", n, 4 * n, {"lm loss": steps[n - 1]["lm loss"]}, steps[n - 1]["learning_rate"])
    validation = lambda n, split="validation", final=False: (
        "after_evaluation",
        min(2 * n + 2, 4),
        split,
        final,
        {"lm loss": evals[n]["lm loss"]},
    )
    rate = lambda n: steps[n - 1]["learning_rate"]
    before = lambda n: ["the recipe's", ("before_step", n - 1, 4 * (n - 1)), ("before_update", n - 1, n, rate(n), {})]
    saved = lambda n: ("after_save", n, str(tmp_path), False)
    expected = [("before_training", 0, 4), *before(1), step(1), *before(2), step(2), validation(0)]
    expected += [*before(3), step(3), saved(3), *before(4), step(4), saved(4), validation(1)]
    assert CALLS == expected + [validation(2, final=True), validation(3, "test", True), ("end", 4, 4)]
    assert {name for name, *_ in CALLS if name in PLACES} == set(PLACES)


def test_an_early_end_and_the_start_behind_it(command, tmp_path):
    flags = f"--train-iters 4 --save {tmp_path} --load {tmp_path} {hooks('Recorder')}"
    pretrain_gpt.main(command(f"{flags} --exit-interval 2"))
    assert [call[:2] for call in CALLS[-3:]] == [("after_step", 2), ("after_save", 2), ("end", 2)]
    CALLS.clear()
    pretrain_gpt.main(command(flags))
    assert [call[:2] for call in CALLS[:3]] == [("before_training", 2), ("before_step", 2), ("before_update", 2)]
    CALLS.clear()
    flags = f"{flags} {HERE}:Asks --kill-switch-file {tmp_path / 'stop'}"
    pretrain_gpt.main(command(f"{flags} --train-iters 9"))
    assert [call[:2] for call in CALLS[-2:]] == [("after_save", 5), ("end", 5)]
    assert ENDS == [(0, "--exit-interval 2"), (0, ""), (0, f"--kill-switch-file {tmp_path / 'stop'} has appeared")]


def test_a_state_goes_on_with_the_run(command, read, tmp_path, capsys):
    """Two hooks of one class have a state each. Another start takes it; what is not there, or new, is named."""
    flags = f"--train-iters 4 --save {tmp_path} --load {tmp_path}"
    pretrain_gpt.main(command(f"{flags} --exit-interval 2 {hooks('Remembers', 'Remembers')}"))
    pretrain_gpt.main(command(f"{flags} {hooks('Remembers', 'Remembers')}"))
    losses = [step["lm loss"] for step in read(tmp_path).steps]
    assert [call for call in CALLS if call[0] == "before"] == [("before", [])] * 2 + [("before", losses[:2])] * 2
    capsys.readouterr()
    pretrain_gpt.main(command(f"{flags} --train-iters 5 {hooks('Remembers', 'Recorder')}"))
    assert (
        f"note: the checkpoint has a state of hook {HERE}:Remembers#2, which this run does not have"
        in capsys.readouterr().out
    )
    CALLS.clear()
    pretrain_gpt.main(command(f"--load {tmp_path} --finetune --train-iters 1 {hooks('Remembers')}"))
    assert CALLS == [("before", [])]


def test_training_is_the_same_on_all_ranks(command, read, run_ranks, tmp_path):
    def pretrain(rank, flags):
        pretrain_gpt.main(command(flags))

    dropout = "--hidden-dropout 0.1"
    for name, flags in {"without": "", "with": hooks("Sums", "Recorder")}.items():
        run_ranks(2, pretrain, f"{dropout} --save {tmp_path / name} {flags}")
    assert read(tmp_path / "with").losses == read(tmp_path / "without").losses


@pytest.mark.parametrize(
    "name, code, words",
    [
        ("Fails", 1, "Fails, after_step at iteration 2: KeyError: 'lm los'"),
        ("Stops", NumericsError.code, "Stops, before_step at iteration 0: NumericsError: enough\n    of it"),
        ("Orders", 1, "Orders, before_step at iteration 0: it returned False"),
        ("Writes", 1, "Writes, after_step at iteration 1: FrozenInstanceError"),
        ("Unspeakable", 1, "Unspeakable, state_dict: it must consist of JSON values: TypeError"),
        ("WritesInside", 1, "WritesInside, after_evaluation at iteration 2: TypeError"),
    ],
)
def test_failures_name_the_hook(name, code, words, command, tmp_path):
    with pytest.raises(Failure) as caught:
        pretrain_gpt.main(command(f"{hooks(name)} {EVALUATED} --save {tmp_path}"))
    assert words in str(caught.value) and name in str(caught.value) and exit_code(caught.value) == code


class FailsAtTheEnd(Hook):
    def end(self, run):
        raise KeyError("lost")


def test_the_end_of_a_run_that_failed(command, tmp_path, capsys):
    """Each hook hears of it once, with the reason; one that fails there does not hide it."""
    with pytest.raises(Failure, match="enough"):
        pretrain_gpt.main(command(f"--train-iters 3 {hooks('FailsAtTheEnd', 'Recorder', 'Stops')}"))
    assert CALLS[-1] == ("end", 0, 3) and len(ENDS) == 1
    assert ENDS[0][0] == NumericsError.code and "Stops, before_step at iteration 0: NumericsError: enough" in ENDS[0][1]
    assert (
        "warning: hook " in (said := capsys.readouterr().out) and "FailsAtTheEnd, end at iteration 0: KeyError" in said
    )
    with pytest.raises(Failure, match="FailsAtTheEnd, end at iteration 1: KeyError"):
        pretrain_gpt.main(command(f"--train-iters 1 {hooks('Recorder', 'FailsAtTheEnd')}"))
    assert ENDS[1:] == [(0, "")]


@pytest.mark.parametrize(
    "name, words",
    [
        ("Misspelt", "has after_eval, and nothing calls it; did you mean after_evaluation?"),
        ("Silent", "has none of the loop's methods (on_step_end): it would do nothing"),
        ("nothing", "nothing is no Hook"),
        ("CALLS", "CALLS is []"),
        ("Missing", "has no attribute 'Missing'"),
        ("Halved", "has state_dict, and no load_state_dict"),
    ],
)
def test_what_is_no_hook(name, words, command):
    config = parse_pretrain(command(hooks(name)))
    with pytest.raises(SettingsError) as caught:
        make_hooks(hook_makers(config), config)
    assert words in str(caught.value)


def test_names_are_checked_with_the_other_settings(command):
    for wrong in ("my_hooks", "my hooks:A", "my_hooks:"):
        with pytest.raises(SettingsError, match="each is a module and a name in it"):
            pretrain_gpt.main(command(f"--hooks {wrong}"))
    with pytest.raises(SettingsError, match="no_such_module_here:A: No module named"):
        pretrain_gpt.main(command("--hooks no_such_module_here:A"))
    assert parse_pretrain(command()).logging.hooks is None and not any(Hooks().called.values())
