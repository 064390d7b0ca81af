# SPDX-License-Identifier: Apache-2.0
"""The scripts, run as a newcomer runs them, shrunk to a few steps."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from tests.scripts.test_readme import BLOCKS, README


def test_from_corpus_to_report(copy, quickstart):
    run = copy / "runs" / "quickstart"
    for name in "train.jsonl vocab.json train_text_document.idx evaluation.jsonl samples.txt report.html".split():
        assert (run / name).stat().st_size > 0, name
    assert re.search(r"iteration +4/ +4 \|.* lm loss: ", quickstart) and "ppl:" in quickstart
    assert "OMP_NUM_THREADS environment variable" not in quickstart
    assert "report.html" in quickstart.splitlines()[-3]
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<svg" in page or "base64" in page


def test_a_misspelt_flag_ends_before_the_first_step(copy, bash):
    done = bash("scripts/quickstart.sh", "--txt", "FILE", check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: unknown flag --txt") and "flags of quickstart.sh: --text" in done.stderr


@pytest.mark.sampled(10)
def test_it_goes_on_where_it_stopped(copy, bash, quickstart):
    reached = int((copy / "runs/quickstart/checkpoints/latest_checkpointed_iteration.txt").read_text())
    again = bash("scripts/quickstart.sh", "--train-iters", str(reached)).stdout
    assert f"already trained to step {reached}" in again and again.count("already there") >= 6
    # What its last lines recommend reads the text more often, so in another order; here it stops behind its first step.
    assert (command := "bash scripts/quickstart.sh --train-iters 2000") in quickstart.splitlines()[-2]
    more = bash(*command.split()[1:], "--exit-interval", str(reached + 1), "--log-interval", "1").stdout
    assert re.search(rf"iteration +{reached + 1}/ +2000 ", more) and "ppl:" in more
    assert "the text in a new order" in more and not re.search(rf"iteration +{reached}/ ", more)


def test_every_step_that_works_says_how_long_it_takes(quickstart):
    parts = re.split(r"\n\[(?=\d/7\])", quickstart)[1:]
    assert [part[:4] for part in parts] == [f"{number}/7]" for number in range(1, 8)]
    for part in parts:
        seconds = re.search(r"^  about (\d+) s\b", part, re.MULTILINE)
        assert seconds and 1 <= int(seconds[1]) < 100, part


def test_the_log_of_training_is_kept_as_it_was_said(copy, quickstart):
    kept = (copy / "runs/quickstart/train.log").read_text().splitlines()
    said = [line for line in quickstart.splitlines() if "| consumed samples: " in line]
    assert said and said == [line for line in kept if line in said]


def test_the_quickstart_edits_no_lines_of_training(root):
    """What people read comes from the suite itself: no `sed` or `grep` stands behind the training."""
    script = (root / "scripts/_steps.sh").read_text(encoding="utf-8")
    launched = script[(start := script.index("megatron.tools.launch")) : script.index("}\n", start)]
    training = script[(start := script.index('gpt "$WIDTH"')) : script.index("rm -f", start)]
    assert "|" not in launched + training and "--log-file" in training


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "seconds, widths, size",
    [
        ({256: 0.17}, "256 128", "256 600"),  # the machine of README's figures
        ({256: 0.2}, "256 128", "256 600"),  # nearly
        ({256: 0.3}, "256 128", "256 340"),
        ({256: 1.64, 128: 0.6}, "256 128", "128 170"),  # two cores that are shared, without bf16
        ({256: 9.0, 128: 5.0}, "256 128", "128 50"),
        ({256: 0.9}, "256", "256 110"),  # of one size
    ],
)
def test_training_takes_two_minutes_of_the_machine(copy, bash, tmp_path, seconds, widths, size):
    """Steps are measured, and the choice stays: a second call goes on with it."""
    times = " ".join(f"[{width}]={time}" for width, time in seconds.items())
    (tmp_path / "choose.sh").write_text(
        f"source {shlex.quote(str(copy / 'scripts/_steps.sh'))}\nflags=() ITERATIONS=600\n"
        f"MOST=600 RUN={shlex.quote(str(tmp_path))}\ndeclare -A times=({times})\n"
        'gpt() { echo "$@" >>"$RUN/calls"; for n in 9 1 1 1 1 1; do\n'
        'echo "{\\"kind\\": \\"step\\", \\"seconds\\": $(awk "BEGIN { print $n * ${times[$1]} }")}"; '
        'done >"$RUN/measured.jsonl"; }\n'
        f'choose_size gpt "{widths}" --more; echo "$WIDTH $ITERATIONS $SECONDS_A_STEP"\n'
        f'ITERATIONS=600 WIDTH=; choose_size gpt "{widths}" --more; echo "$WIDTH $ITERATIONS $SECONDS_A_STEP"\n'
    )
    width, steps = size.split()
    said = bash(str(tmp_path / "choose.sh")).stdout.splitlines()
    assert [said[-2], said[-1]] == [f"{size} {seconds[int(width)]:g}"] * 2
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [int(call.split()[0]) for call in calls] == [*seconds] and all(call.endswith("--more") for call in calls)
    within = int(steps) * seconds[int(width)]
    assert within <= 130 or int(steps) == 50


def test_sigterm_to_a_quickstart_reaches_what_it_has_started(copy, tmp_path):
    """The launcher passes it on to the ranks, which save (tests/tools/test_launch.py)."""
    (tmp_path / "term.sh").write_text(
        f"cd {shlex.quote(str(copy))}; source scripts/_steps.sh\n"
        f"with_script python -c 'import pathlib, signal, time; signal.signal(signal.SIGTERM, lambda *_: "
        f'pathlib.Path("{tmp_path}/told").touch() or exit(9)); pathlib.Path("{tmp_path}/alive").touch(); time.sleep(60)\'\n'
        "echo not reached\n"
    )
    script = subprocess.Popen(["bash", str(tmp_path / "term.sh")], stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not (tmp_path / "alive").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    script.terminate()
    assert script.communicate(timeout=30)[0] == b"" and script.returncode == -signal.SIGTERM
    while not (tmp_path / "told").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (tmp_path / "told").exists()


def test_a_wait_is_not_silent(copy, bash, tmp_path):
    """`wait_for` speaks at least every 5 seconds of the shell's clock, and ends with the code of what it has waited for."""
    (tmp_path / "slow.sh").write_text(
        f"source {shlex.quote(str(copy / 'scripts/_env.sh'))}\n"
        "sleep() { SECONDS=$((SECONDS + 1)); command sleep 0.001; }\n"  # a clock that runs fast
        "(until [ -e ended ]; do command sleep 0.01; done; exit 7) &\n"
        'far() { echo "at $SECONDS"; [ "$SECONDS" -lt 40 ] || touch ended; }\n'
        'rm -f ended; SECONDS=0; code=0; wait_for $! far || code=$?; echo "code $code"\n'
    )
    said = bash(str(tmp_path / "slow.sh")).stdout.splitlines()
    times = [int(line.split()[1]) for line in said if "at " in line]
    assert times[-1] >= 40 and max(b - a for a, b in zip([0, *times], times, strict=False)) <= 5
    assert said[-1] == "code 7"


@pytest.mark.sampled(10)
def test_from_a_text_to_samples(copy, bash):
    """A part of the one document is held out, from the vocabulary too; samples go on from what was held out."""
    book = "".join(f"The {number}th line of the book. " + "And on. " * (number % 7) + "\n" for number in range(3000))
    text = copy / "docs" / "my book.txt"
    text.write_text(book + "zzzz\n" * 300)  # what the vocabulary would learn
    flags = ["--train-iters", "2", "--log-interval", "2"]
    said = bash("-c", 'cd docs && exec bash ../scripts/quickstart.sh "$@"', "-", "--text", "my book.txt", *flags).stdout
    run = copy / "runs" / "quickstart_my_book"
    [train], [held_out] = ((run / f"{part}.jsonl").read_text().splitlines() for part in ("train", "held_out"))
    train, held_out = json.loads(train)["text"], json.loads(held_out)["text"]
    assert train + held_out == text.read_text() and "zzzz" in held_out and 0.05 <= len(held_out) / len(train) <= 0.06
    assert "zz" not in (run / "vocab.json").read_text()
    assert "ppl:" in said and "| The 2" in said and (run / "report.html").stat().st_size > 0
    assert "bash scripts/quickstart.sh --text " in said.splitlines()[-2]
    text.write_text(book)
    done = bash("scripts/quickstart.sh", "--text", str(text), *flags, check=False)
    assert done.returncode == 1 and "has changed" in done.stderr


def test_what_pip_says_goes_to_the_log(copy, tmp_path):
    """And how long the tests take is said before they begin."""
    shutil.copytree(copy / "scripts", tmp_path / "scripts")
    for name in ("requirements.txt", "requirements-test.txt"):
        shutil.copy(copy / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    pip = '*"pip --version"*) ;; *"-m pip"*) echo "WARNING: odd" >&2; [ -z "$NO_PIP" ] ;;'
    cases = f'{pip} *pytest*) echo "tests: $*" ;; *) exec {sys.executable} "$@" ;;'
    python.write_text(f'#!/bin/bash\ncase "$*" in {cases} esac')
    python.chmod(0o755)
    (python.parent / "activate").write_text(f'export PATH="{python.parent}:$PATH"\n')
    run = lambda *words, **more: subprocess.run(
        ["bash", "scripts/test.sh", *words], cwd=tmp_path, capture_output=True, text=True, env=os.environ | more
    )
    first, log = run(), (tmp_path / ".venv/install.log").read_text()
    assert first.returncode == 0 and "WARNING" not in first.stdout + first.stderr
    assert log.count("WARNING: odd") == 3  # the packages, this project, those of the tests
    minutes = re.search(r"`make test` .*\| (about \d+ minutes on two cores)", (copy / "CONTRIBUTING.md").read_text())[1]
    assert first.stdout.splitlines()[-2].startswith(f"All tests: {minutes}")
    assert "minutes" not in run("tests/data").stdout and "slow ones" in run("--full").stdout
    (tmp_path / ".venv/requirements-test.installed").unlink()
    without = run(NO_PIP="1")
    assert without.returncode == 0 and ".venv/install.log" in without.stderr and "WARNING" not in without.stderr


def fake_project(tmp_path, root, code=0):
    """A project whose pip writes its arguments to pip.txt, and a call of _env.sh in it."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(root / "scripts" / "_env.sh", tmp_path / "scripts")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name in ("requirements.txt", ".venv/requirements.installed", ".venv/bin/activate"):
        (tmp_path / name).touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/bash\necho "$*" >>"{tmp_path}/pip.txt"\nexit {code}\n')
    python.chmod(0o755)
    command = ["bash", "-euc", "source scripts/_env.sh"]
    return lambda: subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stderr


def test_the_project_is_installed_once_and_not_into_another_checkouts_environment(tmp_path, root):
    (tmp_path / "one").mkdir()
    call = fake_project(tmp_path / "one", root)
    assert call() == call() == ""
    [line] = (tmp_path / "one" / "pip.txt").read_text().splitlines()
    assert line.startswith("-m pip install ") and line.endswith("-e .")
    assert {"--no-index", "--no-deps", "--no-build-isolation"} <= set(line.split())
    (tmp_path / "two").mkdir()
    call = fake_project(tmp_path / "two", root, code=1)
    assert "commands work in this folder alone" in call() and call() == ""
    (tmp_path / "two" / ".venv" / "project.installed").unlink()
    (tmp_path / "two" / ".venv").rename(tmp_path / "theirs")
    (tmp_path / "two" / ".venv").symlink_to(tmp_path / "theirs")
    before = (tmp_path / "two" / "pip.txt").read_text()
    assert call() == "" and (tmp_path / "two" / "pip.txt").read_text() == before


@pytest.mark.full
def test_commands_work_from_any_folder_after_the_set_up(tmp_path, root):
    """In an environment of its own, which has this one's packages; no file of the project changes."""
    ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", "build", "dist", ".*_cache", ".hypothesis")
    project = tmp_path / "a project"
    shutil.copytree(root, project, ignore=ignored)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=project, check=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(project / ".venv")], check=True)
    [packages] = (project / ".venv").glob("lib/python*/site-packages")
    (packages / "packages.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    shutil.copy(project / "requirements.txt", project / ".venv" / "requirements.installed")
    subprocess.run(["bash", "-euc", "source scripts/_env.sh"], cwd=project, check=True)
    away = dict(cwd=tmp_path, capture_output=True, text=True, check=True)
    for module in ("megatron", "megatron.tools.status", "pretrain_gpt"):
        done = subprocess.run([project / ".venv" / "bin" / "python", "-m", module, "--help"], **away)
        assert "usage" in done.stdout or "Commands:" in done.stdout
    where = [project / ".venv" / "bin" / "python", "-c", "import megatron; print(megatron.__file__)"]
    assert subprocess.run(where, **away).stdout.strip() == str(project / "megatron" / "__init__.py")
    assert subprocess.run(["git", "status", "--short"], **away | dict(cwd=project)).stdout == ""


def test_help_and_mistakes(copy, bash):
    assert "--fresh" in bash("scripts/quickstart.sh", "--help").stdout
    done = bash("scripts/quickstart.sh", "--text", "nowhere.txt", check=False)
    assert done.returncode == 4 and "--text 'nowhere.txt' is not a file" in done.stderr
    done = bash("scripts/quickstart_t5.sh", "--text", str(copy / "requirements.txt"), check=False)
    assert done.returncode == 1 and "bash scripts/quickstart.sh --text FILE" in done.stderr
    shutil.copytree(copy / "scripts", copy / "elsewhere" / "scripts")
    (copy / "elsewhere" / "requirements.txt").write_text("nothing\n")
    done = bash("elsewhere/scripts/test.sh", check=False, PYTHON="/bin/false")
    assert done.returncode == 1 and "PYTHON=/bin/false does not run" in done.stderr


def test_shell_syntax(root):
    scripts = sorted((root / "scripts").rglob("*.sh")) + [root / ".ci" / "run"]
    assert len(scripts) >= 3
    for script in scripts:
        assert subprocess.run(["bash", "-n", str(script)], capture_output=True).returncode == 0, script
        assert script.name.startswith("_") or os.access(script, os.X_OK), f"{script} is not executable"


# ---- the README's commands, which follow the quickstart -------------------------------------------------------------

SAID = [  # by each further block, in their order
    ["iteration       20/      20", "validation results", "Return the"],
    ["dry run: no problems found", "checks passed", "iteration        3/       3"],
    re.findall(r"^```\n(the best of .*?)\.\.\.\n```", README, re.S | re.M)[0].splitlines(),
    ["iteration       20/      20", "3 of 3 pass", "ended: finished", "iter_0000020", ": good", "done"],
]

SERVER = "python -m megatron.tools.dashboard"  # the only command of the blocks that does not end by itself


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "block, said", list(zip(BLOCKS[2:], SAID, strict=True)), ids=["own text", "look", "plan", "layouts"]
)
def test_commands_run_as_written(bash, quickstart, block, said):
    commands = "".join(line for line in block.splitlines(keepends=True) if not line.startswith(SERVER))
    out = bash("-euc", commands).stdout
    assert [words for words in said if words not in out] == []


@pytest.mark.sampled(5)
def test_the_server_runs_as_written(copy, quickstart):
    """It shows the run of the quickstart until Ctrl-C. Its port is a free one: another server may have the usual one."""
    [line] = [line for block in BLOCKS for line in block.splitlines() if line.startswith(SERVER)]
    words = [sys.executable, *shlex.split(line, comments=True)[1:], "--port", "0"]
    server = subprocess.Popen(words, cwd=copy, stdout=subprocess.PIPE, text=True)
    try:
        address, shown, started = re.search(r"http://\S+", server.stdout.readline())[0], [], time.monotonic()
        while "quickstart" not in shown and time.monotonic() - started < 60:  # it reads the files in the background
            with urllib.request.urlopen(f"{address}api/runs", timeout=30) as answer:
                shown = [run["name"] for run in json.load(answer)["runs"]]
            time.sleep(0.05)
        server.send_signal(signal.SIGINT)
        assert "quickstart" in shown and server.wait(60) == 0
    finally:
        server.kill()
        server.communicate()


def line_of_own_text(command: str) -> str:
    """The README's first command with one's own text that starts a script or a tool."""
    lines = BLOCKS[2].replace("\\\n", " ").splitlines()
    return next(line for line in lines if command in line and not line.startswith("#"))


@pytest.mark.full
def test_the_training_command_goes_on_as_if_it_had_never_stopped(bash, quickstart):
    """What the README says of the command that it shows: with more --train-iters the bits are those of a longer run."""
    commands = "train_tokenizer", "preprocess_data.py", "pretrain_gpt.py"
    vocabulary, tokens, train = (line_of_own_text(name).replace("runs/own", "runs/longer") for name in commands)
    longer = train.replace("--train-iters 20", "--train-iters 40")
    once = longer.replace("runs/longer/checkpoints", "runs/longer/at_once")
    assert longer != train and once != longer and "--train-iters 40" in README
    diff = "python -m megatron.tools.checkpoint diff runs/longer/checkpoints runs/longer/at_once"
    out = bash("-euc", "\n".join(["source .venv/bin/activate", vocabulary, tokens, train, longer, once, diff])).stdout
    assert "resuming at iteration 20" in out and "tensors are equal to the bit" in out


@pytest.mark.sampled(5)
def test_commands_for_gpus_are_possible_runs(bash, quickstart):
    """The README's commands that need GPUs: their settings can work on the ranks that they start."""
    [block] = [one for one in re.findall(r"```sh\n(.*?)```", README, re.S) if "--nproc-per-node 8" in one]
    block = block.replace("\\\n", " ")
    looked = ["source .venv/bin/activate", line_of_own_text("train_tokenizer"), line_of_own_text("preprocess_data.py")]
    for line in block.splitlines():
        words = line.split()
        if "--nproc-per-node" in words:
            ranks = words[words.index("--nproc-per-node") + 1]
            look = f"--dry-run --world-size {ranks} --local-world-size {ranks} --device-name A100-80GB"
            looked.append(f"python {' '.join(words[words.index('pretrain_gpt.py') :])} {look}")
        elif "bash" in words:
            looked.append(f"{line} --dry-run")
        elif "sbatch" in words:
            assert words[words.index("sbatch") + 1 : -1] == ["--nodes", "4", "scripts/slurm/pretrain.sbatch"]
            looked.append(f"bash {words[-1]} --dry-run")
        elif words and words[0] != "#":
            looked.append(line)
    out = bash("-euc", "\n".join(looked)).stdout
    assert out.count("dry run: no problems found") == 3
