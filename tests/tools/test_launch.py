# SPDX-License-Identifier: Apache-2.0
"""The launcher: real ranks, without torch where they do not train. Its own process is forked from this one, which has
torch in memory."""

import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from argparse import Namespace
from datetime import datetime

import pytest
from torch.distributed import TCPStore

from megatron import errors
from megatron.guard import run_state
from megatron.guard.processes import descendants
from megatron.storage.processes import state
from megatron.telemetry.events import read_events
from megatron.tools import launch

# What a rank does, by its first argument, when it has come to life; rank 0 stays until it is ended.
RANK = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, os.environ["ROOT"])
from megatron import errors

def main(argv):
    rank, what = int(os.environ["RANK"]), argv[0]
    if what in ("slow to save", "goes on"):
        signal.signal(signal.SIGINT, lambda *_: Path(f"asked-{rank}").touch())
    Path(f"alive-{rank}-{os.environ['TORCHELASTIC_RESTART_COUNT']}").touch()
    print("rank", rank, "is there", flush=True)
    if what == "all fail":
        raise errors.CheckpointError("nope holds no checkpoint", f"rank {rank} has looked", "look elsewhere")
    if what == "many problems":
        raise errors.SettingsError("problems:" + errors.numbered(f"problem {n}" for n in range(30)), do="mend them")
    if what == "slow to save":
        while not Path(f"asked-{rank}").exists():
            time.sleep(0.01)
        time.sleep(0.3)
        raise errors.Interrupted("stopped", "the last checkpoint: x", "go on")
    if what == "raises once" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        return
    if rank == 1:
        act(what)
    while what == "stopped":
        if Path("stopped").exists():
            raise errors.PeerLost("rank 0 waited 2 s for another rank", "in all_reduce", "the last checkpoint is x")
        time.sleep(0.01)
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        raise
    finally:
        print("rank", rank, "is ended", flush=True)

def act(what, depth=9):
    if depth:
        return act(what, depth - 1)
    if what == "stopped":
        Path("stopped").touch()
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "peer and cause":
        raise errors.DataError("the cause")
    if what == "raises":
        raise RuntimeError("kaboom\\nand more of it")
    if what == "raises once":
        raise RuntimeError("kaboom")
    if what == "exits":
        os._exit(77)
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))

errors.run_main(main)
"""


class Launched:
    """A launcher at work in a folder, in a session of its own as a shell's job has a group of its own."""

    def __init__(self, root, folder, *words):
        import torch.distributed.run  # noqa: F401  (here once, not in each launcher)

        self.folder = folder
        script = folder / "rank.py"
        script.write_text(RANK)
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                self.launch(root, words)
            except SystemExit as end:
                code = end.code
            except BaseException:
                traceback.print_exc()
            finally:  # this is no second run of the tests
                sys.stderr.flush()
                os._exit(code)

    def launch(self, root, words):
        """In the forked process."""
        os.setsid()
        os.chdir(self.folder)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
        for name in ("torch", "torch.distributed"):  # torch has taken the stderr of the tests
            logging.getLogger(name).handlers[:] = [logging.StreamHandler(sys.stderr)]
        os.environ.update(ROOT=str(root))
        tempfile.tempdir = str(self.folder)
        for name in ("RANK", "WORLD_SIZE"):
            os.environ.pop(name, None)
        errors.run_main(launch.main, ["--nproc-per-node", "2", *words])

    def wait_for(self, name, text=""):
        """Until there is such a file, with this text in it."""
        deadline, path = time.monotonic() + 100, self.folder / name
        while not (path.exists() and text in path.read_text()):
            assert time.monotonic() < deadline and os.waitpid(self.pid, os.WNOHANG)[0] == 0, self.said
            time.sleep(0.01)

    def alive(self):
        for rank in range(2):
            self.wait_for(f"alive-{rank}-0")

    def interrupt(self):
        """As Ctrl-C does: to the terminal's group of processes, of which the ranks are none."""
        os.killpg(self.pid, signal.SIGINT)

    def end(self):
        """(exit code, lines of stderr); nothing of the job may be left, but for what the kernel still ends."""
        left = descendants(self.pid)
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        deadline = time.monotonic() + 5
        while alive := [pid for pid in left if pid in descendants(os.getpid()) and state(pid) != "Z"]:
            assert time.monotonic() < deadline, alive
            time.sleep(0.01)
        return code, self.said.splitlines()

    @property
    def said(self):
        return (self.folder / "err").read_text()


@pytest.fixture
def start(root, tmp_path):
    return lambda *words: Launched(root, tmp_path, *words)


def test_a_failure_of_all_ranks_is_told_once_and_last(start):
    code, said = start("rank.py", "all fail").end()
    assert code == errors.CheckpointError.code
    assert said[0] == "error: nope holds no checkpoint" and re.fullmatch(r"  rank [01] has looked", said[1])
    assert said[2:] == ["  -> look elsewhere"]


def test_an_exception_ends_in_few_lines_and_is_kept_whole(start, tmp_path):
    code, said = start("rank.py", "raises").end()
    assert code == 1 and len(said) <= 12 and said[-2:] == ["RuntimeError: kaboom", "and more of it"]
    assert said[0].startswith("error: rank 1 raised an exception; the last 4 of its 12 calls")
    [whole] = re.findall(r"all of them: (.+?)\)", said[0])
    text = open(whole).read()
    assert text.startswith("Traceback") and text.count("in act") >= 3 and text.endswith("and more of it\n")
    assert [path.name for path in tmp_path.glob("launch-*/*")] == ["rank_1.txt"]


def test_a_long_message_is_cut_and_keeps_its_last_line(start, tmp_path):
    code, said = start("rank.py", "many problems").end()
    assert (code, len(said), said[0], said[-1]) == (3, 12, "error: problems:", "  -> mend them")
    [whole] = re.findall(r"21 more lines in (.+)", said[-2])
    assert open(whole).read().count("problem ") == 30


@pytest.mark.parametrize(
    "what, code, text",
    [
        ("peer and cause", 4, "error: the cause"),
        ("exits", 77, "error: rank 1 ended with exit code 77 and left no message"),
        ("SIGKILL", 137, "error: rank 1 was ended by SIGKILL"),
    ],
)
def test_the_exit_code_is_that_of_the_rank(what, code, text, start, tmp_path):
    found, said = start("rank.py", what).end()
    assert (found, said[0]) == (code, text) and len(said) <= 3
    assert not list(tmp_path.glob("launch-*"))


def test_a_rank_that_the_launcher_has_killed_itself_is_no_cause(start):
    """SIGTERM does not wake a stopped rank; the launcher's own SIGKILL looks like that of a system without memory."""
    code, said = start("--shutdown-timeout", "1", "rank.py", "stopped").end()
    assert (code, said) == (
        errors.PeerLost.code,
        [
            "error: rank 0 waited 2 s for another rank",
            "  in all_reduce",
            "  rank 1 did not answer SIGTERM within 1 s and was killed by the launcher: it was stopped or hangs",
            "  -> the last checkpoint is x",
        ],
    )


def test_a_killed_rank_is_told_with_the_last_checkpoint(start, tmp_path):
    """On the terminal, and as the end of the run: the first rank has only seen that another is gone."""
    saved = tmp_path / "saved"
    (saved / "iter_0000007").mkdir(parents=True)
    (saved / "iter_0000007" / "index.json").touch()
    lines = [dict(kind="run", iteration=0, time=datetime.now().astimezone().isoformat())]
    lines += [{"kind": "step", "iteration": 8, "lm loss": 1.0, "consumed_samples": 8}]
    (saved / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "pretrain_own.py").write_text(
        "import json, os, signal, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    while not os.path.exists('saved/events.jsonl'):\n        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "common = dict(time=time.time(), level='error', rank=None, host='here', source='run', message='a')\n"
        "start = dict(common, event='start', iteration=0, ranks=2, resumed=False)\n"
        "end = dict(common, event='end', iteration=8, code=7, why='another rank is gone or silent')\n"
        "with open('written', 'w') as file:\n"
        "    file.write(json.dumps(start) + '\\n' + json.dumps(end) + '\\n')\n"
        "os.rename('written', 'saved/events.jsonl')\ntime.sleep(60)\n"
    )
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data --vocab-size 50 --save saved".split()
    code, said = start("pretrain_own.py", *flags).end()
    assert (code, said[:2]) == (
        137,
        ["error: rank 1 was ended by SIGKILL", "  the last checkpoint: saved/iter_0000007"],
    )
    *_, end = read_events(saved)
    assert (end["source"], end["rank"], end["iteration"], end["code"]) == ("launcher", 1, 8, 137)
    assert end["message"] == "ended with exit code 137: rank 1 was ended by SIGKILL"
    [line] = run_state.look_at(str(saved))
    assert (line.state, line.why) == ("failed", "rank 1 was ended by SIGKILL")


@pytest.mark.parametrize(
    "events, code, supervised, recorded",
    [
        ([("start", None), ("end", 7)], 137, False, True),
        ([("start", None)], 137, False, True),  # the first rank was killed
        ([("start", None), ("end", 4)], 137, False, False),  # it knows the cause
        ([("start", None), ("end", 7)], 7, False, False),
        ([("start", None), ("end", 7)], 137, True, False),  # the supervisor tells it
        ([("start", None), ("save", None)], 10, False, False),  # another job writes there
        ([], 137, False, False),
    ],
)
def test_what_a_launcher_adds_to_the_events_of_a_run(events, code, supervised, recorded, tmp_path, monkeypatch):
    (tmp_path / "pretrain_gpt.py").touch()
    flags = "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --mock-data --vocab-size 50".split()
    words = [str(tmp_path / "pretrain_gpt.py"), *flags, "--save", str(tmp_path)]
    args = Namespace(module=False, training_script=words[0], training_script_args=words[1:])
    of = lambda event, time, iteration, code: (
        dict(event=event, time=time, iteration=iteration, level="info", message="a")
        | (dict(code=code) if code is not None else {})
    )
    lines = [of(event, 100.0 + n, 3, end) for n, (event, end) in enumerate(events)]
    old = [of("start", 5.0, 0, None), of("end", 6.0, 9, 0)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*old, *lines]))
    monkeypatch.setenv("MEGATRON_SUPERVISOR" if supervised else "OTHER", "x")
    launch.record_cause(args, 99.0, "error: rank 2 was ended by SIGKILL\n  -> dmesg\n", code, 2)
    found = read_events(tmp_path)[len(old) + len(lines) :]
    assert [(one["why"], one["rank"], one["iteration"]) for one in found] == [
        ("rank 2 was ended by SIGKILL", 2, 3)
    ] * recorded


def test_ranks_that_are_started_again_speak_for_themselves(start):
    code, said = start("--max-restarts", "1", "rank.py", "raises once").end()
    assert (code, said[-1], said.count("RuntimeError: kaboom")) == (0, "RuntimeError: kaboom", 1)


def test_files_of_ranks_are_paddlepaddles(start, tmp_path):
    """workerlog.N has all that rank N prints, and the error that ended it; earlier files are kept, and nothing else."""
    job = start("--log_dir", "logs", "rank.py", "slow to save")
    job.alive()
    job.interrupt()
    assert job.end() == (130, ["stopped", "  the last checkpoint: x", "  -> go on"])
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["workerlog.0", "workerlog.1"]
    first, second = ((tmp_path / "logs" / f"workerlog.{rank}").read_text() for rank in (0, 1))
    assert (first.splitlines()[0], second.splitlines()[0]) == ("rank 0 is there", "rank 1 is there")
    seen = (tmp_path / "out").read_text()
    assert seen.count("rank 0 is there") == 1 and "rank 1" not in seen
    assert start("--log_dir", "logs", "--max-restarts", "1", "rank.py", "raises once").end()[0] == 0
    files = {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()}
    kept = ["rank_1.txt"]  # the whole traceback
    assert sorted(files) == kept + [f"workerlog.{rank}{old}" for rank in (0, 1) for old in ("", ".1", ".2")]
    assert (files["workerlog.1.1"], "kaboom" in files["workerlog.1.2"]) == (second, True)
    assert start("--log_dir", "logs", "rank.py", "all fail").end()[0] == errors.CheckpointError.code
    assert any(
        "error: nope holds no checkpoint" in (tmp_path / f"logs/workerlog.{rank}").read_text() for rank in (0, 1)
    )


def test_ctrl_c_ends_a_job_whose_ranks_would_be_started_again(start, tmp_path):
    job = start("--max-restarts", "3", "rank.py", "slow to save")
    job.alive()
    job.interrupt()
    assert job.end() == (130, ["stopped", "  the last checkpoint: x", "  -> go on"])
    assert not (tmp_path / "alive-0-2").exists()


def test_ctrl_c_leaves_the_ranks_the_time_to_save(start):
    job = start("--shutdown-timeout", "0", "rank.py", "slow to save")
    job.alive()
    job.interrupt()
    assert job.end() == (130, ["stopped", "  the last checkpoint: x", "  -> go on"])


@pytest.mark.parametrize(
    "flags, hint",
    [
        ([], "  -> with --exit-signal-handler the ranks save first"),
        (
            ["--exit_signal_handler"],
            "  -> the ranks were still starting: --exit-signal-handler works from the first step on",
        ),
    ],
)
def test_sigterm_before_the_first_step(flags, hint, start):
    job = start("rank.py", "goes on", *flags)
    job.alive()
    os.kill(job.pid, signal.SIGTERM)
    code, said = job.end()
    assert code == 143 and re.fullmatch("error: rank [01] was ended by SIGTERM", said[0]) and said[-1] == hint


@pytest.mark.sampled(5)
def test_a_dry_run_of_several_ranks_reports_once(root):
    words = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --mock-data --vocab-size 90 --lr 1e-3"
    )
    command = [sys.executable, "-m", "megatron.tools.launch", "--nproc-per-node", "2", str(root / "pretrain_gpt.py")]
    command += [*words.split(), "--train-iters", "2", "--dry-run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("dry run: no problems found") == 1, done.stderr
    done = subprocess.run([*command, "--tp", "4"], capture_output=True, text=True)
    assert done.returncode == 3 and (done.stdout + done.stderr).count("dry run:") == 1


def test_trainings_save_at_sigterm(root, tmp_path):
    own = tmp_path / "own.py"
    own.write_text("from megatron.entry import start\n")
    for script in (
        own,
        *(root / f"{name}.py" for name in ("pretrain_gpt", "pretrain_t5", "pretrain_bert", "finetune")),
    ):
        assert launch.saving_at_sigterm(str(script), ["--save", "a"]) == ["--save", "a", "--exit-signal-handler"]
        assert launch.saving_at_sigterm(str(script), ["--exit_signal_handler"]) == ["--exit_signal_handler"]
    for script in (root / "preprocess_data.py", tmp_path / "missing.py", tmp_path):
        assert launch.saving_at_sigterm(str(script), ["a"]) == ["a"]
    for module in ("pretrain_gpt", "finetune", "megatron.tools.tasks"):
        assert launch.saving_at_sigterm(module, ["a"], is_module=True) == ["a", "--exit-signal-handler"]
    for module in ("preprocess_data", "no.such.module", "megatron.tools.plan"):
        assert launch.saving_at_sigterm(module, ["a"], is_module=True) == ["a"]


def test_a_second_ctrl_c_ends_ranks_that_do_not_end(start, monkeypatch):
    monkeypatch.setattr(launch, "SECOND_CTRL_C", 0.2)
    job = start("rank.py", "goes on")
    job.alive()
    job.interrupt()
    for rank in range(2):
        job.wait_for(f"asked-{rank}")  # else both would come to the launcher as one
    time.sleep(0.3)
    assert os.waitpid(job.pid, os.WNOHANG)[0] == 0  # the first one is a request
    job.interrupt()
    assert job.end() == (130, ["interrupted: ended immediately, nothing was saved"])


@pytest.mark.parametrize("name", ["finetune", "pretrain_gpt", "pretrain_t5"])
def test_entry_scripts_are_found_from_any_folder(name, tmp_path, root, monkeypatch):
    """In a folder without it the script that `python -m` would run; a file here comes first."""
    from torch.distributed.run import get_args_parser

    monkeypatch.chdir(tmp_path)
    given = lambda *words: launch.parse(get_args_parser(), [*words]).training_script
    assert os.path.samefile(given(f"{name}.py"), os.path.join(root, f"{name}.py"))
    assert given("-m", name) == name
    for other in (f"x/{name}.py", name, "json.py", "numpy.py", "preprocess_data.py", "a-b.py"):
        with pytest.raises(errors.UsageError, match="no such script"):
            given(other)
    (tmp_path / f"{name}.py").touch()
    assert given(f"{name}.py") == f"{name}.py"


@pytest.mark.parametrize(
    "words, text",
    [
        (
            ["--nproc-per-nodes", "2", "rank.py"],
            "unrecognized arguments: --nproc-per-nodes; did you mean --nproc-per-node",
        ),
        (["ranks.py"], "ranks.py: no such script; did you mean rank.py?"),
        (
            ["--ips", "10.0.0.1,10.0.0.2", "rank.py"],
            "--ips is no word of this launcher\n  -> say --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29500, "
            "the same on each machine",
        ),
        (
            ["--master=a:300", "rank.py"],
            "--master is no word of this launcher\n  -> say --master-addr a --master-port 300",
        ),
        (
            ["--master", "10.0.0.1:8090", "--nnodes", "2", "rank.py"],
            "say --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:8090, the same on each machine",
        ),
        (["--master-addr", "a:8091", "rank.py"], "say --master-addr a --master-port 8091"),
        (
            ["--gpus", "0", "run_pretrain_static.py"],
            "run_pretrain_static.py: no such script; here it is pretrain_gpt.py",
        ),
        (["--gpus", "", "rank.py"], "--gpus is empty"),
        (
            ["--num_machines", "2", "rank.py"],
            "say --nnodes 2; 2 machines: start it on each machine, with --rdzv-backend",
        ),
        (["--no-python", "no-such-program"], "no-such-program: no such program"),
        (["--max-restarts", "x", "rank.py"], "argument --max-restarts/--max_restarts: invalid int value: 'x'"),
        ([], "the following arguments are required: training_script"),
        (["--gpus", "2,x", "rank.py"], "--gpus 2,x: numbers of different GPUs are wanted"),
        (["--gpus", "2,2", "rank.py"], "--gpus 2,2: numbers of different GPUs are wanted"),
        (["--gpus", "2,3", "--nproc-per-node", "4", "rank.py"], "--gpus 2,3 is 2 ranks, one for each, and --nproc"),
        (["--nproc-per-node=1", "--gpus", "2,3", "rank.py"], "and --nproc-per-node 1 another number"),  # its default
    ],
)
def test_mistakes_of_the_launchers_own_flags(words, text, tmp_path, monkeypatch):
    (tmp_path / "rank.py").touch()
    monkeypatch.chdir(tmp_path)
    from torch.distributed.run import get_args_parser

    with pytest.raises(errors.UsageError, match=re.escape(text)):
        launch.parse(get_args_parser(), words)


@pytest.mark.parametrize("words", (["--gpus", "2,3"], ["--devices=2,3"], ["--gpus", "2, 3", "--nproc-per-node", "2"]))
def test_paddles_words_for_gpus(words, tmp_path, monkeypatch):
    """A rank for each, and ranks that see these alone."""
    (tmp_path / "rank.py").touch()
    monkeypatch.chdir(tmp_path)
    from torch.distributed.run import config_from_args, get_args_parser

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")  # what a scheduler lends: the others are somebody else's
    with pytest.raises(errors.UsageError, match="CUDA_VISIBLE_DEVICES=4,5 does not have 2, 3"):
        launch.parse(get_args_parser(), [*words, "rank.py"])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2,3")
    args = launch.parse(get_args_parser(), [*words, "rank.py"])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3" and config_from_args(args)[0].nproc_per_node == 2


def test_a_flag_of_the_launcher_that_is_given_twice(tmp_path, monkeypatch, capsys):
    """The last one counts, and a note names the other, in any spelling; the script's own flags are the script's."""
    (tmp_path / "rank.py").touch()
    monkeypatch.chdir(tmp_path)
    from torch.distributed.run import get_args_parser

    words = "--nproc_per_node 4 --node-rank=0 --nproc-per-node 2 --node_rank 0 rank.py --nproc-per-node 3"
    assert launch.parse(get_args_parser(), words.split()).nproc_per_node == "2"
    told = "note: the last value of a setting counts: --nproc-per-node 4 is overridden by --nproc-per-node 2\n"
    assert capsys.readouterr().err == told


def test_a_folder_for_logs_alone_takes_the_output_of_all_ranks(tmp_path, monkeypatch):
    """As PaddlePaddle's --log_dir: a file for each, and what the first one prints is seen as well."""
    (tmp_path / "rank.py").touch()
    monkeypatch.chdir(tmp_path)
    from torch.distributed.run import config_from_args, get_args_parser

    for words, files, seen in (
        (["--log_dir", "logs"], {0, 1}, {0}),
        (["--log_dir", "logs", "-t", "1:3"], {1}, {1}),
        (["--log_dir", "logs", "--redirects", "1:3"], {1}, set()),
        ([], set(), set()),
    ):
        args = launch.parse(get_args_parser(), [*words, "--nproc-per-node", "2", "rank.py"])
        args.log_dir = args.log_dir or str(tmp_path / "logs")
        logs = config_from_args(args)[0].logs_specs.reify({0: {}, 1: {}})
        assert {rank for rank in (0, 1) if logs.stdouts[rank]} == files, words
        assert {rank for rank, path in logs.tee_stdouts.items() if path} == seen, words


def test_ranks_that_cannot_be_started(start, tmp_path):
    """A wrong number of them, which torch notices late; the later flag counts, with a note."""
    code, said = start("--nproc-per-node", "gpux", "rank.py", "exits").end()
    assert said[0].startswith("note: ") and said[0].endswith(" 2 is overridden by --nproc-per-node gpux")
    assert (code, said[1]) == (3, "error: the ranks cannot be started: Unsupported nproc_per_node value: gpux")
    assert len(said) <= 4 and not list(tmp_path.glob("launch-*"))


@pytest.mark.sampled(5)
def test_ctrl_c_while_training_saves_and_says_how_to_go_on(root, start, tmp_path):
    flags = (
        "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --mock-data --vocab-size 50 --lr 1e-3 "
        "--micro-batch-size 1 --train-iters 1000000 --eval-iters 0 --device cpu --save saved --log-interval 1000000"
    ).split()
    job = start(str(root / "pretrain_gpt.py"), *flags)
    job.wait_for("saved/metrics.jsonl", '"kind": "step"')
    job.interrupt()
    code, said = job.end()
    [iteration] = [int(path.name[5:]) for path in (tmp_path / "saved").glob("iter_*")]
    last = f"saved/iter_{iteration:07d}"
    assert code == 130 and said[-4:-1] == [
        "Ctrl-C: stopping after this step, saving in saved; press it again to end immediately",
        f"stopped at iteration {iteration}: interrupted by Ctrl-C",
        f"  the last checkpoint: {last}",
    ]
    assert said[-1].startswith("  -> to resume: ") and said[-1].endswith(f"{' '.join(flags)} --load saved")
    assert "-m megatron.tools.launch --nproc-per-node 2 " in said[-1]
    shown = run_state.look(tmp_path / "saved")
    assert (shown.state, shown.iteration, shown.checkpoint) == ("interrupted", iteration, iteration)


@pytest.mark.sampled(5)
def test_a_layout_without_a_launcher_is_told_the_command(root, tmp_path):
    """Which trains as it stands, also where words have blanks in them."""
    flags = (
        "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 --mock-data --vocab-size 100 --lr 1e-2 "
        "--device cpu --train-iters 1 --eval-iters 0 --tp 2"
    ).split()
    words = [sys.executable, "pretrain_gpt.py", *flags, "--save", str(tmp_path / "a run")]
    lost = {name for name in os.environ if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}
    env = {name: value for name, value in os.environ.items() if name not in lost}
    alone = subprocess.run(words, cwd=root, env=env, capture_output=True, text=True)
    assert alone.returncode == 3 and "--tp 2: 2 ranks are needed, and this process is alone" in alone.stderr
    [command] = re.findall(r"start them: python (.*) \(torchrun takes the same arguments", alone.stderr)
    done = subprocess.run(f"{sys.executable} {command}", shell=True, cwd=root, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "a run" / "iter_0000001").is_dir(), done.stderr


@pytest.mark.parametrize("number", ["0", "-1"])
def test_no_ranks_are_refused(number):
    with pytest.raises(errors.UsageError, match=f"--nproc-per-node {number}: give the number of ranks on this machine"):
        launch.main(["--nproc-per-node", number, "pretrain_gpt.py"])


def test_a_port_in_use_names_its_flag():
    """torch's store says EADDRINUSE; the exit code stays that of a lost peer, which a supervisor tries again."""
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Exception, match="EADDRINUSE") as error:
            TCPStore("localhost", port, 1, True)
    said = launch.failure_of(error.value)
    assert said.what == f"--master-port {port}: another process uses this port" and said.code == 7
