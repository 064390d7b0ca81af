# SPDX-License-Identifier: Apache-2.0
"""Every script of a model: its head, dry run, pre-flight and shrunk job; and what the launcher makes of the world."""

import contextlib
import copy
import importlib
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.errors import CheckpointError, UsageError
from megatron.inference.sampling import Sampling, Search
from megatron.model.command_line import parse_any
from megatron.model.pruning import PruningOptions, TargetSizes, target_sizes
from megatron.planner.shrink import original, shrunk_jobs_of
from megatron.settings.parse import parse, parse_pretrain
from megatron.settings.schema import GROUPS
from megatron.settings.spelling import spellings_of
from megatron.tools import evaluate, generate, prune
from megatron.tools.script_heads import FOLDER, OWN_VARIABLES, command, head, model_scripts, with_head

pytestmark = pytest.mark.sampled(2)

SCRIPTS = {path.stem: path for path in model_scripts()}
PROMISED = """prune_gpt_345M_single_card qat_gpt_345M_single_card qat_gpt_345M_mp8 qat_gpt_6.7B_sharding16
    pretrain_gpt2_small_zero3 pretrain_gpt_125M_single pretrain_gpt_345M_single pretrain_gpt_1.3B_single
    pretrain_gpt_1.3B_dp8 pretrain_gpt_2.7B pretrain_gpt_6.7B_sharding16 pretrain_gpt_13B pretrain_gpt_22B_auto
    pretrain_gpt_39B pretrain_gpt_76B pretrain_gpt_175B_tp8_pp16 pretrain_gpt_530B pretrain_gpt_1T auto_gpt_345M_single
    auto_gpt_1.3B_single auto_gpt_1.3B_dp8 auto_gpt_6.7B_sharding16 pretrain_llama_1B pretrain_llama_8B
    pretrain_llama_70B pretrain_mixtral_8x7B pretrain_qwen3_30B_a3B pretrain_gpt_oss_20B pretrain_nemotron_h_8B""".split()
LAUNCHERS = """RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT NNODES NODE_RANK NPROC SUPERVISE
    LOG_DIR PRINT OMP_NUM_THREADS""".split()
README = (FOLDER.parent / "README.md").read_text()
GUIDE = (FOLDER.parent / "docs" / "launching.md").read_text()
FLEETX_FILES = FOLDER.parent / "tests" / "documented" / "others" / "fleetx_files.txt"
CLEAN = {
    name: value
    for name, value in os.environ.items()
    if name not in (*OWN_VARIABLES, *LAUNCHERS) and not name.startswith("SLURM")
}
CLEAN |= dict(PYTHON=sys.executable, CUDA_VISIBLE_DEVICES="")


def bash(script, *words, timeout=250, cwd=None, **env):
    """A script through bash, in an environment that no launcher has touched."""
    path = script if isinstance(script, Path) else FOLDER / f"{script}.sh"
    return subprocess.run(
        ["bash", str(path), *words], env=CLEAN | env, capture_output=True, text=True, timeout=timeout, cwd=cwd
    )


def test_every_promised_script_is_there():
    assert sorted(SCRIPTS) == sorted(PROMISED)


def test_all_tasks_of_clue_that_are_there(tmp_path):
    """In their order, whatever the case of their folders; CLUEWSC's is published as CLUEWSC2020."""
    stub = tmp_path / "python"
    stub.write_text('#!/bin/sh\nwhile [ "$1" != --task ]; do shift; done; echo "$2"\n')
    stub.chmod(0o755)
    data = tmp_path / "clue"
    data.mkdir()
    nothing = bash("finetune_clue", PYTHON=str(stub), DATA=str(data))
    assert nothing.returncode == 4 and "no folder of a task" in nothing.stderr
    for folder in ("csl", "Tnews", "CLUEWSC2020", "afqmc2019", "chid.json"):
        (data / folder).mkdir()
    assert bash("finetune_clue", PYTHON=str(stub), DATA=str(data)).stdout.split() == ["TNEWS", "CLUEWSC", "CSL"]
    (data / "CLUEWSC2020").rename(data / "cluewsc")
    assert bash("finetune_clue", PYTHON=str(stub), DATA=str(data)).stdout.split() == ["TNEWS", "CLUEWSC", "CSL"]


# ---- each script -----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_head_is_what_the_planner_says(name):
    text = SCRIPTS[name].read_text()
    assert text == with_head(text, head(SCRIPTS[name])), "python -m megatron.tools.script_heads"
    assert "# needs    " in text and max(map(len, text.splitlines())) <= 120
    commands = [line for line in text.splitlines() if line and not line.startswith(("#", "prune_first "))]
    assert commands[0].startswith("source ") and commands[1].startswith("launch ")
    assert all(line.startswith("    ") for line in commands[2:]), "only flags"


@pytest.mark.parametrize("name", SCRIPTS)
def test_figures_of_a_head_are_marked_as_predictions(name):
    """Memory, times and speeds stand behind `predicted`, and a line says what they assume."""
    lines = [line for line in SCRIPTS[name].read_text().splitlines() if line.startswith("# ")]
    figures = [line for line in lines if re.search(r"\d (GB|m?s|min|tokens/s|TFLOP/s)\b", line)]
    assert len(figures) == 2 and all(line.startswith("# predicted  ") for line in figures), figures
    assert all(line.endswith(" (speeds assumed)") for line in figures if "a step" in line), figures
    assumed = next(line for line in lines if line.startswith("# assumed "))
    assert "not measured" in assumed and (FOLDER.parent / "docs" / "planning.md").exists()


def test_the_head_that_the_guide_shows():
    shown = re.search(r"```\n(# needs.*?)```", GUIDE, re.S)[1]
    assert shown in SCRIPTS["pretrain_gpt_175B_tp8_pp16"].read_text()


SEARCHED = ("auto_gpt_1.3B_dp8", "pretrain_gpt_22B_auto")  # another search is long enough to see that it needs no torch


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.full) if name in SEARCHED else name
        for name in [*SCRIPTS, "pretrain_gpt_175B_mp8_pp16", "pretrain_gpt_345M"]
    ],
)
def test_dry_run_without_torch(name, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch was imported')\n")
    done = bash(name, "--dry-run", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "dry run: no problems found" in done.stdout and "synthetic samples" in done.stdout


@pytest.fixture(scope="module", autouse=True)
def searches_once():
    """The tests of a script, and what they call, search the same layouts up to five times: here once."""
    from megatron.planner import choose

    search, found = choose.search, {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "search", lambda *asked: once(found, search, asked))
        yield


def once(found: dict, function, asked: tuple):
    """The result for these arguments: in `found`, or of a call. A copy, for callers that change it."""
    if (key := repr(asked)) not in found:
        found[key] = function(*asked)
    return copy.deepcopy(found[key])


def configured(name):
    return parse_pretrain(command(SCRIPTS[name]))


@pytest.fixture(scope="session")
def first_with():
    """`first_with(kind, name)`: the script whose shrunk jobs are the same and were met first: nothing is run twice."""
    seen = {}

    def find(kind, name):
        config, world_size = original(configured(name), lambda text: None)
        model = replace(config.model, init_method_std=0.02)  # neither this nor learning rates make another shrunk job
        alike = [
            (found.world_size, replace(found.config, optimizer=None, planner=None))
            for found in shrunk_jobs_of(replace(config, model=model), world_size)
        ]
        return seen.setdefault((kind, repr(alike)), name)

    return find


# The larger ones' shrunk jobs take longest: with `--full` alone. That of 175B is run as the guide has it.
LARGE = """pretrain_gpt_39B pretrain_gpt_76B pretrain_gpt_530B pretrain_gpt_1T pretrain_llama_70B pretrain_mixtral_8x7B
    pretrain_qwen3_30B_a3B pretrain_gpt_oss_20B pretrain_nemotron_h_8B""".split()


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LARGE else name for name in SCRIPTS]
)
def test_preflight(name, first_with, monkeypatch):
    """With shrunk jobs in fp32; those in bf16 train below."""
    if f"bash scripts/{name}.sh --preflight" in GUIDE:
        pytest.skip("run through bash: it is in the guide")
    from megatron.planner.preflight import shrunk_job as shrunk_jobs
    from megatron.planner.preflight.run import preflight
    from megatron.planner.preflight.verdict import Check
    from pretrain_gpt import recipe

    other, told, check_shrunk_job = first_with("preflight", name), [], shrunk_jobs.check_shrunk_job

    def exact(config, *rest):
        if other != name:
            return [Check("shrunk", f"that of {other}")]
        return check_shrunk_job(replace(config, precision=replace(config.precision, precision="fp32")), *rest)

    monkeypatch.setattr(shrunk_jobs, "check_shrunk_job", exact)
    preflight(configured(name), recipe(), told.append, {})
    assert "checks passed" in told[-1] and any(line.split()[:2] == ["PASS", "shrunk"] for line in told), told


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in LARGE else name for name in SCRIPTS]
)
def test_the_shrunk_job_trains(name, first_with, capfd):
    if f"SHRINK=1 bash scripts/{name}.sh" in GUIDE:
        pytest.skip("run through bash: it is in the guide")
    if first_with("training", name) != name:
        pytest.skip(f"the same shrunk job as that of {first_with('training', name)}")
    from megatron.tools import shrink as shrunk

    shrunk.main([*(word for word in command(SCRIPTS[name]) if word != "--dry-run"), "--steps", "2"])
    out = capfd.readouterr().out
    assert "iteration        2/       2" in out and "nan" not in out.replace("number of nan iterations:   0", "")


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "line",
    [  # tests/scripts/test_readme.py runs those of the README and looks for the same words
        pytest.param(line, marks=pytest.mark.full) if f"\n{line}  " in README else line
        for block in re.findall(r"```bash\n(.*?)```", GUIDE.replace("\\\n", ""), re.S)
        for line in block.splitlines()
    ],
)
def test_commands_of_the_guide_run_as_written(line):
    env = CLEAN | dict(PATH=f"{Path(sys.executable).parent}:{CLEAN['PATH']}", OMP_NUM_THREADS="1")
    done = subprocess.run(
        ["bash", "-euc", line], cwd=FOLDER.parent, env=env, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    steps = "iteration        3/       3"
    said = {
        "SHRINK": steps,
        "PRINT": "--mock-data",
        "--preflight": "checks passed",
        "--dry-run": "dry run: no problems found",
        "megatron.pretrain": "layouts searched",
        "--train-iters": steps,
    }
    assert next(words for mark, words in said.items() if mark in line) in done.stdout


TRAINED = """export_gpt_345M export_gpt_345M_tp2 export_gpt_345M_mp2 export_gpt_345M_single_card export_gpt_6.7B
    export_gpt_175B_tp8 auto_export_gpt_345M_mp2 auto_export_gpt_345M_single_card auto_export_gpt_6.7B_mp1
    auto_export_gpt_175B_mp8 inference_gpt_345M inference_gpt_345M_single_card inference_gpt_6.7B inference_gpt_175B_tp8
    inference_gpt_175B_mp8 inference_gpt_multigpu auto_inference_gpt_345M_single_card
    inference_gpt_single_card inference_gpt_6.7B_single_card auto_export_gpt_fp16_single_card auto_qat_export_gpt_345M_mp2
    run_benchmark""".split()
EVALUATED = "evaluate_gpt_345M eval_qat_gpt_345M_single_card eval_prune_gpt_345M_single_card".split()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", [*EVALUATED, *(name for name in TRAINED if "175B" not in name and "multi" not in name)]
)
def test_scripts_of_tools_say_flags_that_exist(name, tmp_path):
    data = ["--data-path", "held_out"] if name in EVALUATED else []
    done = bash(name, *data, PRINT="1", MP="1", CHECKPOINTS=str(tmp_path / "none"))  # MP: ranks of run_benchmark
    python, dash_m, module, *words = shlex.split(done.stdout)
    assert (python, dash_m) == (sys.executable, "-m")
    with pytest.raises(CheckpointError, match="none"):
        importlib.import_module(module).main(words)


@pytest.mark.parametrize(
    "name, words, wanted",
    [
        ("inference_gpt_345M", "--max_dec_len 4 --topp 0.5", dict(tokens_to_generate=4, top_p=0.5, temperature=0.8)),
        (
            "inference_gpt_345M",
            "--num_beams 2 --prompt-file p",
            dict(num_beams=2, top_p=0, prompt=None, prompt_file="p"),
        ),
        ("evaluate_gpt_345M", "--data-path x --batch_size 2", dict(micro_batch_size=2)),
    ],
)
def test_words_after_a_script_of_a_tool_win(name, words, wanted):
    """In the spelling of another suite, too, and where the script's own words have no place beside them."""
    python, dash_m, module, *said = shlex.split(bash(name, *words.split(), PRINT="1").stdout)
    groups = [generate.GenerateOptions, Sampling, Search] if "generate" in module else [evaluate.EvaluateOptions]
    made = parse(said, {group.__name__: group for group in groups})
    values = {name: value for group in made.values() for name, value in vars(group).items()}
    assert {name: values[name] for name in wanted} == wanted


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", [*TRAINED, *EVALUATED])
def test_scripts_of_trained_models_predict(name):
    """--dry-run: memory of the ranks that they are made for, and time per token; nothing is read or written."""
    done = bash(name, "--dry-run")
    ranks = (
        8 if "175B" in name or "multi" in name or "benchmark" in name else 2 if "mp2" in name or "tp2" in name else 1
    )
    layout = f"tp{ranks}" if ranks > 1 else "one rank"
    what, plan = done.stdout.split("\n", 1)
    assert re.match(rf"predicted: generation with the model of [\d.]+[MB] on {ranks} ranks? of A100-80GB", what)
    done_here = (
        "export" if "export" in name else "evaluation" if "eval" in name else "benchmark" if "bench" in name else ""
    )
    assert what.endswith(f"; not the {done_here} itself" if done_here else " A100-80GB")
    assert plan.startswith(f"the best layout: {layout}\n") and "(assumed)" in plan, done.stderr


@pytest.mark.parametrize("name", [*EVALUATED, "finetune_gpt_345M", "finetune_clue"])
def test_scripts_without_a_shrunk_job_say_so(name, tmp_path):
    (tmp_path / "afqmc").mkdir()
    done = bash(name, *["AFQMC"] * ("finetune" in name), SHRINK="1", PRINT="1", DATA=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.startswith("error: SHRINK=1 is for training, texts and exports: ") and done.stderr.count("\n") == 1
    )


CONFIGS = "ppfleetx/configs/nlp/gpt"


@pytest.mark.parametrize(
    "name, file",
    [
        ("pretrain_gpt_345M_single_card", "pretrain_gpt_345M_single_card"),
        ("pretrain_gpt_1.3B_single_card", "pretrain_gpt_1.3B_single_card"),
        ("pretrain_gpt_1.3B_dp8", "pretrain_gpt_1.3B_dp8"),
        ("pretrain_gpt_6.7B_sharding16", "pretrain_gpt_6.7B_sharding16"),
        ("pretrain_gpt_175B_mp8_pp16", "pretrain_gpt_175B_mp8_pp16"),
        ("auto_gpt_345M_single_card", "auto/pretrain_gpt_345M_single_card"),
        ("auto_gpt_1.3B_single_card", "auto/pretrain_gpt_1.3B_single_card"),
        ("auto_gpt_1.3B_dp8", "auto/pretrain_gpt_1.3B_dp8"),
        ("auto_gpt_1.3B_dp8_tuning", "auto/pretrain_gpt_1.3B_dp8_tuning"),
        ("auto_gpt_6.7B_sharding16", "auto/pretrain_gpt_6.7B_sharding16"),
    ],
)
def test_scripts_of_paddlefleetx_names_say_whose_settings_they_have(name, file):
    """And which file has PaddleFleetX's: that of its script of this name."""
    head = (FOLDER / f"{name}.sh").read_text()
    assert f"this suite's. PaddleFleetX's:\n# python pretrain_gpt.py -c {CONFIGS}/{file}.yaml\n" in head
    assert f" {file}.yaml " in FLEETX_FILES.read_text() and max(map(len, head.splitlines())) <= 120


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "name, words, said",
    [
        ("export_gpt_345M", "--format torch-export", "logits of torch differ by at most"),
        ("export_gpt_175B_tp8", "", "model-rank-0-of-2.pt2, model-rank-1-of-2.pt2"),
        ("inference_gpt_345M", "", "1 2 3"),
        ("inference_gpt_175B_tp8", "", "1 2 3"),
    ],
)
def test_shrunk_models_are_exported_and_continue_texts(name, words, said, tmp_path):
    done = bash(name, *words.split(), SHRINK="1", TMPDIR=str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0 and said in done.stdout, done.stderr


@pytest.mark.parametrize(
    "env, ranks, wanted",
    [
        ({}, 1, dict(load="checkpoints/gpt_345M", load_exported=None, tensor_model_parallel_size=1)),
        (dict(NPROC="2"), 2, dict(tensor_model_parallel_size=2)),
        (dict(EXPORT="e", NPROC="4"), 4, dict(load=None, load_exported="e", tensor_model_parallel_size=4)),
    ],
)
def test_ranks_that_share_a_model(env, ranks, wanted):
    said = shlex.split(bash("inference_gpt_345M", PRINT="1", **env).stdout)
    assert ("--nproc-per-node" in said) == (ranks > 1)
    at = said.index("megatron.tools.generate") + 1
    made = parse(said[at:], {group.__name__: group for group in (generate.GenerateOptions, Sampling, Search)})
    values = vars(made["GenerateOptions"])
    assert {name: values[name] for name in wanted} == wanted


@pytest.mark.parametrize("name", ["export_gpt_345M", "inference_gpt_345M", "evaluate_gpt_345M"])
def test_the_folder_of_a_trained_model_is_a_variable(name):
    done = bash(name)
    assert done.returncode == 5 and "no checkpoints/gpt_345M, where" in done.stderr
    assert f"-> CHECKPOINTS=FOLDER bash {FOLDER}/{name}.sh\n" in done.stderr


def test_an_evaluation_is_shared_between_ranks():
    done = bash("evaluate_gpt_345M", "--data-path", "held_out", PRINT="1", NPROC="8")
    assert done.stdout.startswith(
        f"{sys.executable} -m megatron.tools.launch --standalone --nproc-per-node 8 -m megatron."
    )


# ---- the launcher ----------------------------------------------------------------------------------------------------

TINY = """launch {ranks} A100-80GB --num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 16 \\
    --vocab-size 60 --micro-batch-size 2 --global-batch-size 8 --train-iters 2 --lr 1e-3 --eval-iters 0 --log-interval 1 \\
    --device cpu {flags} "$@"
"""


@pytest.fixture
def tiny(tmp_path):
    """`tiny(ranks=2, flags="")`: a script as those of scripts/, of a model that trains in a moment."""

    def write(ranks=2, flags=""):
        path = tmp_path / "pretrain_tiny.sh"
        path.write_text(f"source {shlex.quote(str(FOLDER))}/_launch.sh\n" + TINY.format(ranks=ranks, flags=flags))
        return path

    return write


def printed(path, *words, **env):
    """What the launcher would run: (words up to pretrain_gpt.py, its flags)."""
    done = bash(path, "--mock-data", *words, PRINT="1", **env)
    assert done.returncode == 0, done.stderr
    found = shlex.split(done.stdout)
    at = found.index(str(FOLDER.parent / "pretrain_gpt.py"))
    return " ".join(found[:at]).replace(sys.executable, "python"), found[at + 1 :]


RUN = "python -m megatron.tools.launch --nproc-per-node "
NODE = dict(MASTER_ADDR="first", MASTER_PORT="5")
STEP = dict(
    SLURM_JOB_ID="7", SLURM_STEP_ID="0", SLURM_STEP_NODELIST="n[1-4]", SLURM_STEP_NUM_NODES="4", SLURM_NODEID="2"
)
PER_NODE = STEP | dict(SLURM_STEP_NUM_TASKS="4", SLURM_GPUS_ON_NODE="8", SLURM_PROCID="2", SLURM_LOCALID="0")
PER_RANK = STEP | dict(SLURM_STEP_NUM_TASKS="32", SLURM_PROCID="21", SLURM_LOCALID="5")


@pytest.mark.parametrize(
    "ranks, env, words",
    [
        (1, {}, "python"),
        (8, {}, "python"),  # no GPU here: one process
        (8, dict(NPROC="4"), RUN + "4 --standalone"),
        (8, dict(GPUS="0,1,2"), "CUDA_VISIBLE_DEVICES=0,1,2 " + RUN + "3 --standalone"),
        (1, dict(GPUS="0,1,2", NPROC="gpu"), "CUDA_VISIBLE_DEVICES=0,1,2 " + RUN + "3 --standalone"),
        (1, dict(GPUS="0,1,2"), "CUDA_VISIBLE_DEVICES=0,1,2 python"),  # made for one
        (8, dict(NPROC="2", LOG_DIR="l"), RUN + "2 --standalone --log-dir l/ranks-of-node-0"),
        (
            16,
            dict(NNODES="2", NODE_RANK="1", NPROC="8") | NODE,
            RUN + "8 --nnodes 2 --node-rank 1 --master-addr first --master-port 5",
        ),
        (
            16,
            dict(WORLD_SIZE="2", RANK="1", LOCAL_WORLD_SIZE="8") | NODE,
            RUN + "8 --nnodes 2 --node-rank 1 --master-addr first --master-port 5",
        ),
        (
            16,
            dict(WORLD_SIZE="2", RANK="0", CUDA_VISIBLE_DEVICES="0,1,2,3", MASTER_ADDR="first"),
            RUN + "4 --nnodes 2 --node-rank 0 --master-addr first --master-port 29500",
        ),
        (16, dict(WORLD_SIZE="16", RANK="9", LOCAL_RANK="1", LOCAL_WORLD_SIZE="8") | NODE, "python"),
        (32, PER_NODE, RUN + "8 --nnodes 4 --node-rank 2 --master-addr 10.0.0.1 --master-port 20112"),
        (
            32,
            PER_NODE | dict(SLURM_RESTART_COUNT="2"),
            RUN + "8 --nnodes 4 --node-rank 2 --master-addr 10.0.0.1 --master-port 20306",
        ),
        (32, PER_NODE | NODE, RUN + "8 --nnodes 4 --node-rank 2 --master-addr first --master-port 5"),
        (32, PER_RANK, "python"),
        (
            2,
            dict(NPROC="2", SUPERVISE="--max-restarts 3"),
            f"python -m megatron.tools.supervise --max-restarts 3 -- {RUN}2 --standalone",
        ),
    ],
)
def test_what_is_started(tiny, tmp_path, ranks, env, words):
    scontrol = tmp_path / "scontrol"
    answer = '[ "$2" = hostnames ] && printf "n1\\nn2\\n" || echo "NodeName=$3 NodeAddr=10.0.0.1 NodeHostName=h"'
    scontrol.write_text(f"#!/bin/sh\n{answer}\n")
    scontrol.chmod(0o755)
    env = dict(env, PATH=f"{tmp_path}:{CLEAN['PATH']}")
    started, flags = printed(tiny(ranks), "--seed", "5", **env)
    assert started == words
    assert flags[-3:] == ["--mock-data", "--seed", "5"] and "--world-size" not in flags


def test_several_machines_over_ssh(tiny, tmp_path):
    """`ssh` is a program that runs the command here and writes down which host was meant."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        f'#!/bin/sh\nhost=$1; shift; echo "$host" >> {tmp_path}/hosts; [ "$host" != bad ] && exec sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    script = tiny(4)
    (tmp_path / "list").write_text("# ours\nfirst slots=2\nsecond\n")
    env = dict(REMOTE=str(ssh), NPROC="2", PRINT="1", VOCAB_FILE="my vocab.json")
    done = bash("pdsh_launch", str(script), "--mock-data", "--seed", "5", HOSTFILE=str(tmp_path / "list"), **env)
    assert done.returncode == 0 and sorted((tmp_path / "hosts").read_text().split()) == ["first", "second"]
    for rank, line in enumerate(sorted(done.stdout.splitlines(), key=lambda line: line.partition("--node-rank ")[2])):
        words = shlex.split(line)
        assert " ".join(words[1:]).startswith(
            f"-m megatron.tools.launch --nproc-per-node 2 --nnodes 2 --node-rank {rank} --master-addr first"
        )
        assert "my vocab.json" in words and words[words.index("--seed") + 1] == "5"
    assert bash("pdsh_launch", str(script), "--mock-data", HOSTS="first bad", **env).returncode == 1
    assert "on which machines?" in bash("pdsh_launch", str(script)).stderr
    assert "which script?" in bash("pdsh_launch").stderr


def test_a_number_of_processes_that_is_none(tiny):
    done = bash(tiny(), "--mock-data", NPROC="all", PRINT="1")
    assert done.returncode == 2 and "NPROC=all (or LOCAL_WORLD_SIZE) is neither a number nor gpu" in done.stderr


def test_two_numbers_of_processes(tiny):
    """More ranks than GPUs are refused; of two numbers for the same the one that does not count is named."""
    done = bash(tiny(), "--mock-data", NPROC="4", GPUS="0,1", PRINT="1")
    assert done.returncode == 2 and "NPROC=4 is more ranks than GPUS=0,1 has GPUs, 2" in done.stderr
    done = bash(tiny(), "--mock-data", NPROC="2", LOCAL_WORLD_SIZE="4", PRINT="1")
    assert "--nproc-per-node 2" in done.stdout and "NPROC=2 counts, and LOCAL_WORLD_SIZE=4 has no effect" in done.stderr
    done = bash(tiny(), "--mock-data", "--nproc-per-node", "4")
    assert done.returncode == 2 and "bash scripts take NPROC=N" in done.stderr


@pytest.mark.parametrize(
    "env, said",
    [
        (dict(NNODES="two") | NODE, "NNODES=two in the environment is no number from 1 on"),
        (dict(NNODES="2", NODE_RANK="x") | NODE, "NODE_RANK=x in the environment is no number from 0 on"),
        (dict(NNODES="2", NODE_RANK="2") | NODE, "NODE_RANK (or RANK) is 2, and there are nodes 0 to 1"),
        (dict(WORLD_SIZE="2", RANK="7") | NODE, "NODE_RANK (or RANK) is 7, and there are nodes 0 to 1"),
        (dict(WORLD_SIZE="", RANK="0", LOCAL_RANK="0"), "and WORLD_SIZE is not set"),
        (dict(WORLD_SIZE="2x", RANK="0", LOCAL_RANK="0"), "WORLD_SIZE=2x in the environment is no number from 1 on"),
        (dict(WORLD_SIZE="2", RANK="0", LOCAL_RANK="0", LOCAL_WORLD_SIZE="0"), "LOCAL_WORLD_SIZE=0 in the environment"),
    ],
)
def test_numbers_of_nodes_and_ranks_that_are_none(tiny, env, said):
    done = bash(tiny(), "--mock-data", PRINT="1", **env)
    assert done.returncode == 3 and done.stderr.startswith("error: ") and said in done.stderr


def test_an_interpreter_that_is_not_there(tiny):
    done = bash(tiny(), "--mock-data", PYTHON="/no/such/python")
    assert done.returncode == 1 and "PYTHON=/no/such/python is no program here" in done.stderr


def test_words_of_the_command_line_win_over_those_of_the_script_in_any_spelling():
    words = "--fp16 --tp 4 --no-sequence-parallel --sharding-degree 8 --print-config".split()
    said = bash("pretrain_gpt_13B", *words).stdout
    for line in ("precision: fp16", "tensor_model_parallel_size: 4", "sequence_parallel: false", "sharding_stage: 1"):
        assert line in said


def test_ranks_of_slurm_tasks(tiny, tmp_path):
    """With a task for each rank, the environment is torchrun's."""
    show = tmp_path / "python"
    show.write_text('#!/bin/sh\necho "$RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $MASTER_ADDR $MASTER_PORT"\n')
    show.chmod(0o755)
    told = bash(tiny(32), "--mock-data", PYTHON=str(show), **PER_RANK, **NODE).stdout.split("\n")
    assert told[0] == "21 32 5 8 first 5"
    one = PER_RANK | dict(CUDA_VISIBLE_DEVICES="3")  # SLURM has given each task its own GPU
    assert bash(tiny(32), "--mock-data", PYTHON=str(show), **one, **NODE).stdout.split("\n")[0] == "21 32 0 8 first 5"


ENVIRONMENT = dict(
    CHECKPOINTS="save", VOCAB_FILE="vocab_file", MERGE_FILE="merge_file", TOKENIZER_MODEL="tokenizer_model"
)


@pytest.mark.parametrize("variable", ENVIRONMENT)
def test_a_flag_wins_over_the_environment_in_every_spelling(variable):
    """`CHECKPOINTS=x bash script --output_dir y`: the flags of the table of settings, not those that the launcher knows."""
    name = ENVIRONMENT[variable]
    for flag, spelling in spellings_of(GROUPS).items():
        if spelling.setting.name == name:
            done = bash("pretrain_gpt_345M_single", "--mock-data", flag, "own", PRINT="1", **{variable: "other"})
            config = parse_pretrain(words_of(done))
            assert config.said(name).value == "own" and "other" not in words_of(done), flag


@pytest.mark.parametrize("word", ["--use_recompute false", "--bf16 false", "--dry-run false", "--bf16 --bf16 false"])
def test_false_counts_over_a_script(word):
    """And --dry-run false trains."""
    plain, own = (words_of(bash("pretrain_gpt_13B", "--mock-data", *more, PRINT="1")) for more in ((), word.split()))
    before, after = parse_pretrain(plain), parse_pretrain(own)
    assert after.recompute.recompute_granularity == (
        None if "recompute" in word else before.recompute.recompute_granularity
    )
    assert after.precision.precision == ("fp32" if "bf16" in word else before.precision.precision)
    assert not after.planner.dry_run and "--world-size" not in own


def words_of(done) -> list[str]:
    """The training's own flags in what PRINT=1 says."""
    words = shlex.split(done.stdout)
    return words[next(n for n, word in enumerate(words) if word.endswith("pretrain_gpt.py")) + 1 :]


def test_paths_come_from_the_environment(tiny):
    where = dict(DATA_PATH="0.3 a 0.7 b", VOCAB_FILE="my vocab.json", MERGE_FILE="m", CHECKPOINTS="my runs", PRINT="1")
    flags = shlex.split(bash(tiny(1), **where).stdout)
    told = " ".join(flags)
    assert (
        "--data-path 0.3 a 0.7 b --vocab-file my vocab.json --merge-file m --save my runs --save-interval auto" in told
    )
    assert flags[flags.index("--load") + 1] == "my runs" and "--auto-resume" not in flags and "--mock-data" not in flags
    assert "--data-path d " in bash(tiny(1), DATA="d", PRINT="1").stdout
    assert "--data-path p " in bash(tiny(1), DATA="d", DATA_PATH="p", PRINT="1").stdout
    overridden = bash(tiny(1), "-o", "Data.Train.dataset.input_dir=f", PRINT="1", DATA_PATH="p").stdout
    assert overridden.endswith("-o Data.Train.dataset.input_dir=f \n") and "--data-path" not in overridden
    own = bash(tiny(1), "--data_path=c", "--save", "s", "--save-interval", "5", **where).stdout
    assert "0.3" not in own and "runs" not in own and "--load" not in own
    looked = bash(tiny(1), "--dry-run", "--world-size", "4", PRINT="1", RANK="3", WORLD_SIZE="4").stdout
    assert looked.endswith("--dry-run --world-size 4 --mock-data --local-world-size 1 \n")


@pytest.mark.sampled(5)
def test_what_cannot_work_is_said_before_anything_starts(tiny):
    done = bash(tiny(1))
    assert done.returncode == 4 and "DATA_PATH=PREFIX bash" in done.stderr and "--mock-data" in done.stderr
    done = bash("pretrain_gpt_175B_tp8_pp16", "--mock-data", NPROC="8")
    assert done.returncode == 3 and done.stdout == ""
    assert "8 ranks cannot be divided by tensor x pipeline x context parallel size 8 x 16 x 1 = 128" in done.stderr
    assert "pretrain_gpt_175B_tp8_pp16.sh is made for 128 ranks, and here are 8 (1 nodes x 8)" in done.stderr
    done = bash(tiny(2), "--hidden-size", "17", DATA_PATH="nowhere", NPROC="2")
    assert done.returncode == 3 and "17" in done.stderr and "nowhere" in done.stderr
    done = bash(tiny(2), "--mock-data", WORLD_SIZE="2", RANK="0")
    assert done.returncode == 2 and "MASTER_ADDR" in done.stderr
    done = bash(tiny(2), "--mock-data", "--no-such-flag", NPROC="2")
    assert done.returncode == 2 and "--no-such-flag" in done.stderr


def free_port() -> int:
    """A free port below those that Linux gives out by itself: nobody gets it by chance before it is used."""
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("", port))
            return port
    raise AssertionError("no port is free")


@pytest.mark.sampled(5)
def test_a_cluster_that_numbers_nodes_trains(tiny, tmp_path):
    """Two nodes of one process, as a cluster that sets WORLD_SIZE and RANK for each node starts them."""
    port = str(free_port())
    path = tiny(2, "--tensor-model-parallel-size 2")
    env = CLEAN | dict(
        WORLD_SIZE="2", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port, OMP_NUM_THREADS="1"
    )
    nodes = [
        subprocess.Popen(
            ["bash", str(path), "--mock-data"],
            env=env | dict(RANK=str(rank)),
            cwd=tmp_path,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    told = [node.communicate(timeout=250) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], told
    assert "iteration        2/       2" in told[0][0]


@pytest.mark.parametrize(
    "words, env, said",
    [
        (["start", "DIR", "0"], {}, "NODES is 0, and it must be a number from 1 to 99"),
        (["start", "DIR", "two"], {}, "NODES is two"),
        (["start", "DIR"], dict(NODE_GPUS="9"), "NODE_GPUS is 9, and it must be a number from 0 to 6"),
        (["stop", "DIR"], {}, "no cluster was started in"),
    ],
)
def test_a_cluster_of_no_nodes_is_not_waited_for(words, env, said, tmp_path):
    folder = tmp_path / "cluster"
    done = bash(FOLDER / "slurm" / "local_cluster.sh", *(str(folder) if w == "DIR" else w for w in words), **env)
    assert done.returncode == 1 and said in done.stderr and not folder.exists()


def test_shellcheck():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    files = [*FOLDER.glob("*_*.sh"), *FOLDER.glob("slurm/*")]
    files = [str(path) for path in files if path.name not in ("_env.sh",)]
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


# ---- a layout that nobody has to choose ------------------------------------------------------------------------------

ASKED = """--task-type {task} --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --vocab-size 500
    --max-global-batch-size 16 --lr 1e-3 --train-iters 2 --eval-iters 0 --log-interval 1 --mock-data"""


@pytest.mark.sampled(5)
def test_pretrain_plans_for_another_cluster_and_trains_in_a_job(capsys, monkeypatch):
    from megatron.tools import pretrain

    words = ASKED.format(task="llm.megatron.GPT").split()
    pretrain.main([*words, "--world-size", "64", "--local_world_size=8", "--device-name", "A100-80GB"], {})
    out = capsys.readouterr().out
    assert "layouts searched" in out and "torchrun --nnodes 8 --nproc-per-node 8" in out and "iteration" not in out
    monkeypatch.delenv("RANK", raising=False)
    pretrain.main([*words, "--device", "cpu"], {})
    out = capsys.readouterr().out
    assert "--auto-parallel: " in out and "iteration        2/       2" in out


def test_pretrain_refuses_other_tasks():
    from megatron.tools import pretrain

    with pytest.raises(UsageError, match="BERT"):
        pretrain.main(ASKED.format(task="BERT").split(), {})
    with pytest.raises(UsageError, match="needs a value"):
        pretrain.main(["--task-type"], {})


SKIPPED = {"block_3": ["linear2"], "block_5": ["linear1"], **{f"block_{n}": ["linear2"] for n in (6, 7, 10, 20, 21)}}
BITS = dict(weight_bits=8, activation_bits=8, onnx_format=True, weight_quantize_type="abs_max")
BITS |= dict(enable=True, activation_quantize_type="moving_average_abs_max")
QUANTIZED = {  # Compress.Quantization in the YAML file of PaddleFleetX's script
    "qat_gpt_345M_mp8": dict(BITS, freeze_embedding=True, skip_tensor_map=SKIPPED),
    "qat_gpt_345M_single_card": dict(
        BITS, activation_preprocess_type="PACT", freeze_embedding=True, skip_tensor_map=SKIPPED
    ),
    "qat_gpt_6.7B_sharding16": dict(BITS, activation_preprocess_type="PACT"),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_script_quantizes_as_its_yaml_file(name, tmp_path):
    shape = dict(num_layers=24, hidden_size=64, num_attention_heads=4)
    path = tmp_path / "qat.yaml"
    path.write_text(json.dumps(dict(Model=shape, Compress=dict(Quantization=QUANTIZED[name]))))
    theirs, ours = parse_any(["-c", str(path)]), parse_any(command(SCRIPTS[name]))
    names = """quantization linear weight_quantize_type activation_quantize_type activation_preprocess_type weight_bits
        activation_bits quantization_skip""".split()
    assert {each: getattr(ours.model, each) for each in names} == {each: getattr(theirs.model, each) for each in names}
    assert ours.optimizer.freeze == theirs.optimizer.freeze
    assert "with PaddleFleetX's settings" not in SCRIPTS[name].read_text()


def test_the_script_prunes_as_its_yaml_file(tmp_path):
    path = tmp_path / "prune.yaml"
    path.write_text(json.dumps(dict(Compress=dict(Prune=dict(enable=True, criterion="l1_norm", ratio=0.125)))))
    [line] = [line for line in SCRIPTS["prune_gpt_345M_single_card"].read_text().splitlines() if "prune_first" in line]
    groups, where = dict(tool=prune.ToolOptions, prune=PruningOptions), ["--load", "big", "--save", "small"]
    assert parse(line.split()[1:] + where, groups)["prune"] == parse(["-c", str(path), *where], groups)["prune"]


def test_a_model_is_pruned_before_its_training(tmp_path):
    """From PRETRAINED, once; a dry run and a shrunk job read no model."""
    line = dict(PRETRAINED="big", CHECKPOINTS="small", DATA_PATH="x", NPROC="1", PRINT="1")
    first, second = bash("prune_gpt_345M_single_card", **line).stdout.splitlines()
    assert "megatron.tools.prune --load big --save small-pruned --prune-criterion l1_norm --prune-ratio 0.125" in first
    assert "--load small-pruned --finetune --save small" in second
    assert "tools.prune" not in bash("prune_gpt_345M_single_card", "--dry-run", **line).stdout
    assert "tools.prune" not in bash("prune_gpt_345M_single_card", SHRINK="1", **line).stdout
    config = parse_any(command(SCRIPTS["prune_gpt_345M_single_card"]))
    whole = parse_any(command(SCRIPTS["qat_gpt_345M_single_card"])).model
    sizes = target_sizes(whole, PruningOptions(prune_ratio=0.125), TargetSizes())
    assert sizes.settings(whole).num_attention_heads == config.model.num_attention_heads
    assert (sizes.ffn, whole.head_dim) == (config.model.ffn_size, config.model.head_dim)
