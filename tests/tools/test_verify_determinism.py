# SPDX-License-Identifier: Apache-2.0
"""The check of repeatability and restarts: right runs pass, and a run that does not repeat is named with its first step."""

import os
import subprocess
import sys

import pytest
import torch

import pretrain_gpt
from megatron.checkpoint import reader
from megatron.errors import SettingsError, UsageError
from megatron.optimizer.zero import DistributedOptimizer
from megatron.tools import verify_determinism
from megatron.tools.verify_determinism import RunFailed

FLAGS = """--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 50 --lr 1e-2
    --micro-batch-size 2 --global-batch-size 4 --train-iters 8 --eval-iters 0 --device cpu --num-workers 0"""


@pytest.fixture
def check(monkeypatch, capsys):
    """check("--steps 3", "flags") -> (whether all are equal, output). The runs are made in this process, to save time."""
    monkeypatch.setattr(verify_determinism.RepeatedRuns, "_run", lambda self, words, name: pretrain_gpt.main(words[2:]))

    def run(options: str, more: str = "") -> tuple[bool, str]:
        words = [*options.split(), "--", sys.executable, "pretrain_gpt.py", *FLAGS.split(), *more.split()]
        try:
            verify_determinism.main(words)
        except SystemExit as leaving:
            assert leaving.code == 1
            return False, capsys.readouterr().out
        return True, capsys.readouterr().out

    return run


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(("the same", "stopped"))]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("every, compared", [(1, 4), (2, 2)])
def test_a_run_that_repeats_passes(every, compared, check):
    good, text = check(f"--steps 4 --every {every}", "--hidden-dropout .1")
    assert (
        good
        and [line.split()[-8:] for line in rows(text)]
        == [f"PASS {compared} checkpoints are equal to the bit".split()] * 2
    )


def test_a_run_from_a_checkpoint_begins_there(check, tmp_path):
    pretrain_gpt.main([*FLAGS.split(), "--save", str(tmp_path / "given"), "--exit-interval", "3"])
    good, text = check(f"--steps 2 --folder {tmp_path / 'runs'}", f"--load {tmp_path / 'given'}")
    assert good and f"the checkpoints of the runs are in {tmp_path / 'runs'}" in text
    for run in ("first", "again", "restarts"):
        assert sorted(path.name for path in (tmp_path / "runs" / run).glob("iter_*")) == [
            "iter_0000004",
            "iter_0000005",
        ]


def test_another_sum_is_named_with_its_step_and_tensor(check, monkeypatch):
    """The least change of one element, at the third step of the second run."""
    real, steps = DistributedOptimizer.step, []

    def step(self, *words, **more):
        steps.append(1)
        real(self, *words, **more)
        if len(steps) == 4 + 3:
            main = self.states[0].main
            main[5] = torch.nextafter(main[5], main.new_tensor(9.0))

    monkeypatch.setattr(DistributedOptimizer, "step", step)
    good, text = check("--steps 4")
    again, restarts = rows(text)
    assert not good and "FAIL  first after step 3: " in again and "1 of" in again and "PASS" in restarts, text


@pytest.mark.parametrize("lost", ["--no-load-optim", "--clip-grad .1"])
def test_a_restart_that_loses_something_is_named(lost, check, monkeypatch):
    """The first save is that of a run without a restart."""
    real = verify_determinism.resumed
    after = lambda words, save: real(words, save) + lost.split() * (real(words, save) != words)
    monkeypatch.setattr(verify_determinism, "resumed", after)
    good, text = check("--steps 3")
    again, restarts = rows(text)
    assert not good and "PASS" in again and "FAIL  first after step 2: " in restarts and "differ" in restarts, text


def test_where_the_data_is_is_compared(check, monkeypatch):
    real = verify_determinism.RepeatedRuns.differences

    def differences(self, name):
        path = self.folder / name / "iter_0000001"
        opened = reader.Reader.__init__

        def init(own, folder, *more):
            opened(own, folder, *more)
            if str(folder) == str(path):
                own.state["state"]["consumed_samples"] += 4

        with monkeypatch.context() as patch:
            patch.setattr(reader.Reader, "__init__", init)
            yield from list(real(self, name))

    monkeypatch.setattr(verify_determinism.RepeatedRuns, "differences", differences)
    good, text = check("--steps 1")
    assert not good and all("FAIL  first after step 1: consumed_samples" in line for line in rows(text))


@pytest.mark.parametrize(
    "options, more, error, said",
    [
        ("--steps 0", "", SettingsError, "--steps 0 must be at least 1"),
        ("--steps 5 --every 2", "", SettingsError, "--steps 5 is not a multiple of --every 2"),
        ("--steps 9", "", SettingsError, "the training ended before step 9(.|\n)*--steps 8"),
        ("--folder .", "", SettingsError, "--folder . is not empty"),
    ],
)
def test_what_cannot_be_checked_is_refused(options, more, error, said, check):
    with pytest.raises(error, match=said):
        check(options, more)


def test_there_is_a_command():
    for words in ([], ["--"], ["--", "no-such-launcher", "pretrain_gpt.py"]):
        with pytest.raises(UsageError, match="missing|no-such-launcher: there is no such command"):
            verify_determinism.main(words)


@pytest.mark.sampled(5)
def test_a_run_that_fails_gives_its_code_and_its_last_lines(monkeypatch):
    code = "import sys; print('what was wrong'); sys.exit(5)"
    monkeypatch.setattr(verify_determinism.commands, "without", lambda words, *flags: [sys.executable, "-c", code])
    with pytest.raises(RunFailed, match="exit code 5(.|\n)*what was wrong") as failed:
        verify_determinism.main(["--", sys.executable, "pretrain_gpt.py", *FLAGS.split()])
    assert failed.value.code == 5


@pytest.mark.full
def test_over_two_ranks_stopped_after_each_of_twenty_steps(root):
    words = "--steps 20 -- torchrun --nproc-per-node 2 pretrain_gpt.py --tensor-model-parallel-size 2"
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "megatron.tools.verify_determinism",
            *words.split(),
            *FLAGS.replace("--train-iters 8", "").split(),
        ],
        cwd=root,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and done.stdout.count("PASS  20 checkpoints are equal to the bit") == 2, done.stdout
