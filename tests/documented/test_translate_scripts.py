# SPDX-License-Identifier: Apache-2.0
"""Scripts as their users have them, translated: words after a file, variables of the shell, folders, wrong values."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from megatron.errors import SettingsError, UsageError, run_main
from megatron.guard.changes import refuse_another_model
from megatron.planner.choose import _global_batch, space_of
from megatron.planner.target import cluster_of
from megatron.settings.dialects.hints import failing_in_users_words
from megatron.settings.parse import parse_pretrain
from megatron.tools import evaluate, export, generate
from megatron.tools import translate as tool
from megatron.training.rules import resolve

TINY = """Global: {local_batch_size: 2, micro_batch_size: 2}
Engine: {max_steps: 3, mix_precision: {enable: true}}
Model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2, use_recompute: true}
"""
TRAIN = "python run_pretrain.py"


@pytest.fixture
def translated(tmp_path, monkeypatch, capsys):
    """`translated("fleetx tiny.yaml --strict")` -> (exit code, what is printed, the error), beside a tiny.yaml."""
    monkeypatch.chdir(tmp_path)
    Path("cache/gpt2").mkdir(parents=True)  # which PaddleFleetX's commands take their vocabulary from
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path / "cache"))
    Path("tiny.yaml").write_text(TINY)

    def run(line: str, **scripts: str) -> tuple[int, str, str]:
        for name, text in scripts.items():
            Path(f"{name}.sh").write_text(text)
        code = 0
        try:
            run_main(tool.main, ["--from", *shlex.split(line)])
        except SystemExit as left:
            code = left.code
        return (code, *capsys.readouterr())

    return run


def started(text: str, **environment: str) -> list[str]:
    """The words of what bash starts where this text is a script."""
    catch = "".join(
        f"{name}() {{ echo; printf '%s\\0' ${{CUDA_VISIBLE_DEVICES-}} {name} \"$@\"; }}\n" for name in STARTERS
    )
    done = subprocess.run(["bash", "-euc", catch + text], capture_output=True, env=environment, check=True)
    return done.stdout.decode().strip("\n\0").split("\0")


STARTERS = ("python", "torchrun")


def value(words: list[str], flag: str) -> str | None:
    return words[words.index(flag) + 1] if flag in words else None


def lost(text: str) -> str:
    return text.partition("# no equivalent")[2]


# Words after a file ---------------------------------------------------------------------------------------------------


def test_words_after_a_file_are_applied_and_its_own_switches_are_read(translated):
    code, text, _ = translated("fleetx tiny.yaml -o Model.hidden_size=64 --strict")
    words = started(text)
    assert code == 0 and (value(words, "--hidden-size"), value(words, "--num-layers")) == ("64", "2")
    code, text, _ = translated("fleetx tiny.yaml --format yaml")
    assert code == 0 and "hidden_size: 16 " in text and "FLAGS" not in text
    code, text, _ = translated("paddlenlp run.sh --strict", run=f"{TRAIN} --max_lr 1e-3 --nothing 1\n")
    assert code == 2 and "--lr 1e-3 " in text and "--strict" not in text
    code, text, _ = translated(f'paddlenlp "{TRAIN} --max_lr 1e-3" --format=yaml')
    assert code == 0 and "lr: 1e-3" in text


@pytest.mark.parametrize(
    "line",
    (
        "paddlenlp run.sh --max_steps 5",
        "paddlenlp run.sh run.sh",
        "fleetx tiny.yaml tiny.yaml",
        "nemo tiny.yaml model.x=1",
        f"paddlenlp '{TRAIN} --max_lr 1' --max_steps 5",
    ),
)
def test_other_words_after_a_file_are_refused(translated, line):
    code, text, told = translated(line, run=f"{TRAIN} --max_lr 1e-3\n")
    assert code == 2 and text == "" and "nothing is read after it" in told


def test_a_file_that_is_not_there_is_an_error(translated):
    code, text, _ = translated("fleetx nothere.yaml -o Model.hidden_size=64")
    assert code == 2 and text == ""


def test_a_script_of_python_is_a_command_where_it_is_a_file_too(translated):
    Path("run_pretrain.py").write_text("")
    assert value(started(translated("paddlenlp run_pretrain.py --max_lr 0.25")[1]), "--lr") == "0.25"


def test_short_flags_with_their_values_in_one_word(translated):
    words = started(translated("fleetx 'python tools/train.py -ctiny.yaml -oModel.hidden_size=64'")[1])
    assert (value(words, "--hidden-size"), value(words, "--num-layers")) == ("64", "2")
    config = parse_pretrain(["-ctiny.yaml", "-oModel.hidden_size=64"])
    assert (config.model.hidden_size, config.model.num_layers) == (64, 2)


# Where files are ------------------------------------------------------------------------------------------------------


def test_a_config_is_where_a_shell_finds_it(translated):
    """Here, behind a `cd`, in the folder of the script; `$CFG` where the script says what it is."""
    for folder, size in (("aa", 32), ("projects", 48)):
        Path(folder).mkdir()
        Path(folder, "tiny.yaml").write_text(TINY.replace("16", str(size)))
    Path("projects/own.yaml").write_text(TINY.replace("16", "64"))
    line = "python tools/train.py -c"
    for text, size in (
        (f"{line} ./tiny.yaml", "16"),
        (f"{line} own.yaml", "64"),
        (f"cd aa\n{line} ./tiny.yaml", "32"),
        (f"CFG=./tiny.yaml\n{line} ${{CFG}}", "16"),
    ):
        Path("projects/run.sh").write_text(f"{text}\n")
        code, out, _ = translated("fleetx projects/run.sh")
        assert (code, value(started(out), "--hidden-size")) == (0, size), text
    assert "aa/tiny.yaml is read, and not" in translated("fleetx x.sh", x=f"cd aa\n{line} tiny.yaml\n")[1]
    assert value(started(translated(f"fleetx '{line} tiny.yaml'")[1]), "--hidden-size") == "16"


@pytest.mark.parametrize("before", ("", "for CFG in a b; do :; done\n", "CFG=tiny.yaml\nCFG=$1\n", "[ x ] && CFG=a\n"))
def test_a_config_that_is_not_known_is_named(translated, before):
    code, text, _ = translated(
        "fleetx x.sh --strict", x=f"{before}python tools/train.py -c $CFG -o Model.num_layers=3\n"
    )
    assert code == 3 and "what $CFG holds is not read" in lost(text) and "--num-layers 3 " in text


# Variables of the shell -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ('"$@"', "$EXTRA", '"${MORE[@]}"', "$*", "$(words)"))
def test_a_variable_after_a_value_is_named_and_takes_nothing(translated, more):
    for line, flag, wanted in (
        (f"{TRAIN} --max_lr 3e-4 {more}", "--lr", "3e-4"),
        (f"{TRAIN} --max_steps 2 {more} --max_lr 1", "--train-iters", "2"),
        (f"{TRAIN} --use_amp true {more}", "--amp-level", "O1"),
    ):
        code, text, _ = translated("paddlenlp x.sh --strict", x=f"{line}\n")
        named = [row for row in lost(text).splitlines() if "a variable of the shell" in row]
        assert code == 3 and len(named) == 1 and value(started(text), flag) == wanted
    code, text, _ = translated("fleetx x.sh", x=f"python tools/train.py -c tiny.yaml {more}\n")
    assert code == 0 and "a variable of the shell" in lost(text) and value(started(text), "--num-layers") == "2"


def test_a_list_of_values_may_hold_variables(translated):
    text = translated("megatron-deepspeed x.sh", x="python pretrain_gpt.py --data-path 0.3 $A 0.7 $B\n")[1]
    words = started(text, A="a", B="b")
    assert words[words.index("--data-path") + 1 :][:4] == ["0.3", "a", "0.7", "b"]


@pytest.mark.parametrize("flag", ("--gpus", "--devices"))
def test_devices_that_a_variable_holds(translated, flag):
    run = f"GPUS=4,5,6\npython -m paddle.distributed.launch {flag} $GPUS run_pretrain.py --max_lr 1\n"
    words = started(translated("paddlenlp x.sh --strict", x=run)[1])
    assert words[:4] == ["4,5,6", "torchrun", "--nproc-per-node", "gpu"]


def test_machines_that_variables_hold(translated):
    start = "python -m paddle.distributed.launch --nnodes 2 --master=$ip:$port run_pretrain.py --max_lr 1\n"
    words = started(translated("paddlenlp x.sh", x=start)[1], ip="node0", port="77")
    assert value(words, "--rdzv-endpoint") == "node0:77" and value(words, "--nnodes") == "2"
    words = started(translated("paddlenlp x.sh", x=start.replace("$ip:$port", "$M"))[1], M="node0:77")
    assert value(words, "--rdzv-endpoint") == "node0:77"
    code, text, _ = translated("paddlenlp x.sh --strict", x=start.replace("--nnodes 2", "--ips $IPS"))
    assert code == 3 and "what $IPS holds is not read" in lost(text)


def test_quotes_stay_as_they_are(translated):
    run = f"{TRAIN} --input_dir '$X' --output_dir \"$X\" --device cpu --max_lr 1 --split \\$X\n"
    words = started(translated("paddlenlp x.sh", x=run)[1], X="y")
    assert [value(words, flag) for flag in ("--data-path", "--save", "--split")] == ["$X", "y", "$X"]
    run = "python create_pretraining_data.py --input_path '$X' $MORE\n"
    words = started(translated("paddlenlp x.sh", x=run)[1], X="y", MORE="--a b")
    assert words[-4:] == ["--input_path", "$X", "--a", "b"]
    run = "torchrun $RANKS run_pretrain.py --max_lr 1\n"
    assert started(translated("paddlenlp x.sh", x=run)[1], RANKS="--nnodes 2")[:3] == ["torchrun", "--nnodes", "2"]


def test_ten_times_a_variable(translated):
    words = started(translated("paddlenlp x.sh", x=f"{TRAIN} --eval_iters $E\n")[1], E="3")
    assert (value(words, "--eval-iters"), value(words, "--test-iters")) == ("3", "30")


def test_a_switch_of_fleetx_that_is_a_variable_says_nothing(translated):
    code, text, _ = translated("fleetx x.sh --strict", x="train.py -c tiny.yaml -o Model.use_recompute=$RC\n")
    assert code == 3 and "what $RC holds is not read" in lost(text) and "use-recompute" not in text


# What counts ----------------------------------------------------------------------------------------------------------


def test_a_wrong_value_becomes_no_default(translated):
    line = f"paddlenlp --strict {TRAIN} --max_lr abc --grad_clip --lr_decay_style wave --eval_iters x"
    code, text, _ = translated(line)
    words = started(text)
    assert code == 3 and not {"--lr", "--clip-grad", "--lr-decay-style", "--eval-iters"} & set(words)
    assert all(
        f"--{word}" in lost(text) for word in ("max_lr abc", "grad_clip:", "lr_decay_style wave", "eval_iters x")
    )


def test_the_loser_of_two_words_of_fleetx_is_named(translated):
    Path("other.yaml").write_text("Model: {num_layers: 5, hidden_size: 8}\nEngine: {max_steps: 9}\n")
    line = "train.py -c tiny.yaml -c other.yaml -o Model.num_layers=4 -o Model.num_layers=6"
    text = translated(f"fleetx {line}")[1]
    words = started(text)
    assert (value(words, "--num-layers"), value(words, "--hidden-size")) == ("6", "8")
    assert "--micro-batch-size" not in words  # the last file stands alone, as there
    assert "-o Model.num_layers: 4: -o Model.num_layers: 6 says another value" in text
    assert "-c tiny.yaml: command: -c other.yaml says another value" in text


def test_paddlenlps_rate_without_a_schedule(translated):
    """lr_scheduler = None there: neither warm-up nor decay."""
    text = translated(f"paddlenlp {TRAIN} --lr_decay_style none --decay_steps 9 --warmup_rate 0.5")[1]
    words = started(text)
    assert value(words, "--lr-decay-style") == "constant"
    assert not {"--lr-decay-iters", "--lr-warmup-fraction", "--min-lr"} & set(words)
    assert "--decay_steps 9: --lr_decay_style none: the rate is --max_lr" in text and lost(text) == ""


def test_checked_accuracy_has_no_dropout_in_any_order(translated):
    for line in ("--check_accuracy true --hidden_dropout_prob 0.3", "--hidden_dropout_prob 0.3 --check_accuracy true"):
        text = translated(f"paddlenlp {TRAIN} {line}")[1]
        assert value(started(text), "--hidden-dropout") == "0"
        assert "--hidden_dropout_prob 0.3: --check_accuracy true: training has no dropout" in text


def test_without_a_folder_nothing_is_said_of_saving(translated):
    assert "--save-interval" not in translated(f"paddlenlp {TRAIN} --max_lr 1")[1]
    assert value(started(translated(f"paddlenlp {TRAIN} --output_dir x")[1]), "--save-interval") == "500"


# PaddleFleetX's engine ------------------------------------------------------------------------------------------------


def test_fleetxs_defaults_are_lines_and_a_note(translated, capsys):
    words = started(translated("fleetx tiny.yaml")[1])
    told = {"--log-interval": "1", "--eval-iters": "0", "--initial-loss-scale": "32768"}
    assert {flag: value(words, flag) for flag in told} == told and value(words, "--train-iters") == "3"
    said = parse_pretrain(["-c", "tiny.yaml", "--log-interval", "7"])
    err = capsys.readouterr().err
    assert "PaddleFleetX's defaults, where the file says nothing: --eval-iters 0, --initial-loss-scale 32768\n" in err
    assert (said.logging.log_interval, said.batch.eval_iters) == (7, 0)
    taken = parse_pretrain(["-c", "tiny.yaml"])
    assert (taken.logging.log_interval, taken.batch.eval_iters, taken.precision.initial_loss_scale) == (1, 0, 32768)
    Path("engine.yaml").write_text(
        "Model: {num_layers: 2, hidden_size: 16, num_attention_heads: 2}\nEngine: {verbose: 1}\n"
    )
    taken = parse_pretrain(["-c", "engine.yaml"])
    assert (taken.batch.train_iters, taken.batch.eval_iters) == (500000, 0)
    asked = parse_pretrain(["-c", "engine.yaml", "--train-samples", "50", "--eval-interval", "9"]).batch
    assert (asked.train_iters, asked.eval_interval, asked.eval_iters) == (None, 9, 100)  # asked for in our own words
    Path("all.yaml").write_text(f"_base_: tiny.yaml\n{ALL}")
    assert not any(f"{flag} {word}  " in translated("fleetx all.yaml")[1] for flag, word in told.items())
    parse_pretrain(["-c", "all.yaml"])
    assert "PaddleFleetX's defaults" not in capsys.readouterr().err


ALL = "Engine: {logging_freq: 3, eval_freq: 4, eval_iters: 5, mix_precision: {scale_loss: 64}}\n"


def test_an_empty_section_is_named(translated, capsys):
    Path("child.yaml").write_text("_base_: tiny.yaml\nModel:\n")
    told = "child.yaml:2: Model is empty, and leaves out what its base says: num_layers, hidden_size"
    assert told in translated("fleetx child.yaml")[1]
    parse_pretrain(
        ["-c", "child.yaml", "-o", "Model.num_layers=2", "-o", "Model.hidden_size=8", "--num-attention-heads=2"]
    )
    assert told in capsys.readouterr().err


def test_a_section_without_a_value_is_named_once(translated, capsys):
    parse_pretrain(["-c", "tiny.yaml", "-o", "Engine.mix_precision="])
    told = capsys.readouterr().err
    assert (
        "-o Engine.mix_precision is empty, and leaves out what its base says: " in told and told.count("is empty") == 1
    )


def test_words_of_which_a_flag_is_made_are_parts_of_it(translated):
    """Two blocks of skip_tensor_map are one flag: neither is a word that asks for nothing."""
    blocks = "{block_0: ['linear1'], block_1: ['linear2']}"
    Path("q.yaml").write_text(
        f"_base_: tiny.yaml\nCompress: {{Quantization: {{enable: True, skip_tensor_map: {blocks}}}}}\n"
    )
    text = translated("fleetx q.yaml")[1]
    assert value(started(text), "--quantization-skip") == "blocks.0.mlp.up,blocks.1.mlp.down"
    assert "block_1: linear2: a part of --quantization-skip" in text


def test_the_checkpoint_that_is_missing_has_their_name(translated, capsys):
    for command, words in ((evaluate, []), (generate, ["--prompt", "x"]), (export, ["--output", "x"])):
        with pytest.raises(UsageError, match="missing: --load(.|\\n)*-o Engine.save_load.ckpt_dir=FOLDER"):
            command.main(["-c", "tiny.yaml", *words])


def test_the_batch_that_a_search_needs_has_their_name(translated):
    own = "--num-layers=2 --hidden-size=8 --num-attention-heads=2 --seq-length=8 --train-iters=2".split()
    for words, named in ((["-c", "tiny.yaml"], True), (own, False)):
        config = parse_pretrain([*words, "--mock-data", "--vocab-size", "100", "--lr", "1e-3"])
        with pytest.raises(SettingsError, match="needs to know the batch") as told:
            with failing_in_users_words(config.statements):
                _global_batch(config)
        assert ("-o Global.global_batch_size=N" in str(told.value)) is named


@pytest.mark.parametrize(
    "words, batch",
    [("Distributed.sharding.sharding_degree=4", 8), ("Distributed.mp_degree=2", 4), ("Distributed.dp_degree=2", 4)],
)
def test_a_search_takes_the_batch_that_the_file_has(translated, words, batch):
    """local_batch_size 2 of 4 ranks: 2 x 4 where each has its own samples, 2 x 2 where two share them."""
    own = (
        f"-c tiny.yaml -o Distributed.mp_degree=1 -o Distributed.pp_degree=1 -o {words} --auto-parallel --world-size 4"
    )
    config = parse_pretrain(
        [*own.split(), "--dry-run", "--mock-data", "--vocab-size", "100", "--device-name", "A100-80GB"]
    )
    assert space_of(config, cluster_of(config, {})[0]).global_batch == batch


@pytest.mark.parametrize(
    "do, added",
    [
        (
            "--load ./output resumes that run; otherwise give another --save, or move them away",
            "-o Engine.save_load.ckpt_dir=./output, -o Engine.save_load.output_dir=...",
        ),
        ("use --device cpu, or check the driver", "-o Global.device=cpu"),
        ("lower --micro-batch-size or --workers", "-o Global.micro_batch_size=..."),
        ("copy it again", ""),
    ],
)
def test_what_to_do_is_said_in_their_words(translated, do, added):
    for words, named in ((["-c", "tiny.yaml"], True), (["--num-layers", "2", *OTHERS_OF_SHAPE], False)):
        with pytest.raises(SettingsError) as told, failing_in_users_words(parse_pretrain(words).statements):
            raise SettingsError("wrong", do=do)
        assert told.value.do == do + (f" (of a PaddleFleetX file: {added})" if named and added else "")


OTHERS_OF_SHAPE = "--hidden-size 8 --num-attention-heads 2".split()


def test_another_shape_in_the_checkpoint_is_told_in_their_words(translated):
    config = resolve(parse_pretrain(["-c", "tiny.yaml", "--mock-data", "--vocab-size", "100", "--lr", "1e-3"]), 1)
    saved = config.to_record()
    saved["model"]["ffn_hidden_size"] = 56
    saved["model"]["num_layers"] = 4
    with pytest.raises(SettingsError, match="-> say -o Model.num_layers=4; or give the checkpoint's settings"):
        refuse_another_model(config, saved)


def test_the_command_for_automatic_layouts_runs(translated):
    """It makes the layout of its file; without one --auto-parallel searches it, for a whole batch."""
    Path("auto.yaml").write_text("_base_: tiny.yaml\nDistributed: {dp_degree: 2, mp_degree: 1, pp_degree: 1}\n")
    text = translated("fleetx tools/auto.py -c auto.yaml")[1]
    assert "--auto-parallel" not in started(text) and "its file has a layout" in text and lost(text) == ""
    code, text, _ = translated("fleetx --strict tools/auto.py -c tiny.yaml")
    words = started(text)
    assert code == 3 and "--auto-parallel" in words and "--local-batch-size" not in words
    assert re.search("local_batch_size: 2: .*--global-batch-size N", lost(text))
    code, text, _ = translated("fleetx --strict tools/auto.py -c tiny.yaml -o Global.global_batch_size=8")
    assert code == 3 or value(started(text), "--global-batch-size") == "8"


def test_a_part_of_a_word_that_another_one_overrules_is_named_as_a_part(translated):
    text = translated(f"paddlenlp {TRAIN} --use_amp true --amp_level O2")[1]
    words = started(text)
    assert "--fp16" in words and value(words, "--amp-level") == "O2"
    assert "--use_amp true: its --amp-level O1: command: --amp_level O2 says another value" in text


def test_what_is_said_of_names_is_true(translated):
    text = translated(f"paddlenlp {TRAIN} --model_name_or_path ./output/model --model_type ernie")[1]
    assert "(a shape, or a folder to --load" in text
    assert "--model_type ernie: a GPT is trained; the vocabulary of gpt-cn is" in text and "did you mean" not in text


def test_an_override_without_a_value_is_refused_or_named(translated):
    code, _, error = translated("fleetx --strict tiny.yaml -o Model.num_layers 4")
    assert code == 2 and "-o Model.num_layers: Section.key=value is wanted" in error
    assert (
        "# -o Model.num_layers= is empty: Model.num_layers is left out"
        in translated("fleetx tiny.yaml -o Model.num_layers=")[1]
    )
    assert (
        "--num-layers 4 "
        in translated("fleetx 'python tools/train.py --config tiny.yaml --override Model.num_layers=4'")[1]
    )


@pytest.mark.parametrize(
    "start", ["$PY", "${PYTHON_BIN}", "$PYTHON -u", "$PY -m paddle.distributed.launch --devices 0"]
)
def test_an_interpreter_in_a_variable(translated, start):
    text = translated("paddlenlp run.sh", run=f"PY=python PYTHON=python PYTHON_BIN=python\n{start} run_pretrain.py\n")[
        1
    ]
    words = started(text)
    assert ("torchrun" if "-m" in start else "python") in words[:2] and "pretrain_gpt.py" in words
    assert not {"-m", "run_pretrain.py"} & set(words[: words.index("pretrain_gpt.py")])


@pytest.mark.parametrize("inside", ["$(python run_pretrain.py --max_steps 6)", "`python run_pretrain.py`"])
def test_a_command_inside_another_one_is_named(translated, inside):
    code, text, _ = translated("paddlenlp --strict run.sh", run=f"{TRAIN} --max_steps 5\nOUT={inside}\n")
    assert code == 3 and "run.sh:2: not translated: run_pretrain.py in OUT=" in text


def test_a_tilde_is_the_home_folder(translated):
    text = translated("paddlenlp run.sh", run=f"{TRAIN} --output_dir ~/out --input_dir 'a~b' --max_steps 5\n")[1]
    words = started(text, HOME="/users/somebody")
    assert (value(words, "--save"), value(words, "--data-path")) == ("/users/somebody/out", "a~b")


def test_an_empty_section_is_named_where_its_settings_are_missing(translated):
    Path("child.yaml").write_text("_base_: ./tiny.yaml\nModel:\n")
    with pytest.raises(Exception, match="missing: --num-layers.*child.yaml:2: Model is empty, and leaves out"):
        parse_pretrain(["-c", "child.yaml"])


def test_a_launcher_that_mpirun_starts_on_each_machine(translated):
    line = "mpirun -np 2 python -m paddle.distributed.launch --gpus 2,3 run_pretrain.py --max_steps 2"
    code, text, _ = translated(f"paddlenlp --strict '{line}'")
    assert (
        code == 0 and 'mpirun -np 2 env CUDA_VISIBLE_DEVICES=2,3 torchrun --nproc-per-node 2 pretrain_gpt.py "$' in text
    )
    text = translated("fleetx 'mpirun -np 16 -H a,b python tools/train.py -c tiny.yaml'")[1]
    assert "-H a,b" in text and "-H a,b python" not in text


def test_a_yaml_file_has_one_run_and_no_variables(translated):
    script = f"{TRAIN} --max_steps 5 --output_dir out/$name\n"
    code, text, _ = translated("paddlenlp --strict --format yaml run.sh", run=script)
    assert code == 3 and "run.sh:1: --output_dir" in lost(text)
    code, text, error = translated("paddlenlp --format yaml run.sh", run=script * 2)
    assert (code, text) == (2, "") and "2 runs cannot be one YAML file" in error
