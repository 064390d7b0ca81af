# SPDX-License-Identifier: Apache-2.0
"""Other suites' files and commands in the flags of this one: values by hand, nothing dropped, and what is printed runs."""

import json
import re
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path

import pytest
import yaml

from megatron.errors import SettingsError, UsageError, run_main
from megatron.settings.dialects import fleetx
from megatron.settings.dialects.runs import DIALECTS
from megatron.settings.dialects.table import TheirSetting, flags_of, sentence
from megatron.settings.dialects.translate import back, spellings, translate
from megatron.settings.files import read_python, read_tree
from megatron.settings.parse import parse_pretrain
from megatron.settings.rules import range_problem
from megatron.settings.spelling import spellings_of
from megatron.tools import translate as tool

HERE = Path(__file__).parent
SIZES = "num_layers: 2, hidden_size: 64, num_attention_heads: 4, ffn_hidden_size: 256, vocab_size: 128"
SHAPE = "--num-layers 2 --hidden-size 8 --num-attention-heads 2".split()


def printed(capsys, *argv: str, unknown: str = "") -> str:
    """What a translation prints; unknown: the error that it ends with."""
    with pytest.raises(UsageError, match=unknown) if unknown else nullcontext():
        tool.main([*argv])
    return capsys.readouterr().out


def run_by_bash(text: str) -> list[list[str]]:
    """What bash starts where this text is a script: the words of each python and torchrun."""
    catch = "".join(
        f"{name}() {{ printf '%s\\0' {name} \"$@\"; printf '\\1\\0'; }}\n" for name in ("python", "torchrun")
    )
    done = subprocess.run(
        ["bash", "-euc", catch + text],
        capture_output=True,
        env=dict(task_name="x", WORLD_SIZE="2", RANK="0", MASTER_ADDR="a", MASTER_PORT="1"),
        check=True,
    )
    return [found.split("\0")[:-1] for found in done.stdout.decode().split("\1\0")[:-1]]


def flags_printed(text: str) -> list[str]:
    [words] = run_by_bash(text)
    return words[words.index("pretrain_gpt.py") + 1 :]


def pairs(words: list[str]) -> dict[str, str]:
    """--flag value --switch as {flag: value}; several words joined by blanks."""
    found, flag = {}, ""
    for word in words:
        if re.match("--[a-z]", word):
            flag = word
            found[flag] = ""
        else:
            found[flag] = f"{found[flag]} {word}".strip()
    return found


# Values, by hand ------------------------------------------------------------------------------------------------------

A = {
    "--model-name-or-path": "gpt2-en",
    "--data-path": "./data",
    "--save": "output/x",
    "--seq-length": "1024",
    "--micro-batch-size": "8",
    "--global-batch-size": "32",
    "--sharding-degree": "4",
    "--tensor-model-parallel-size": "2",
    "--dp-degree": "1",
    "--pipeline-model-parallel-size": "1",
    "--sharding-stage": "1",
    "--fp16": "",
    "--amp-level": "O1",
    "--initial-loss-scale": "32768",
    "--recompute-granularity": "full",
    "--lr": "0.00015",
    "--min-lr": "0.00001",
    "--train-iters": "500000",
    "--save-interval": "100000",
    "--lr-decay-iters": "320000",
    "--weight-decay": "0.01",
    "--lr-warmup-fraction": "0.01",
    "--clip-grad": "1.0",
    "--log-interval": "1",
    "--eval-interval": "10000",
    "--device": "cuda",
    "--lr-decay-style": "cosine",
    "--eval-iters": "10",
    "--test-iters": "100",
    "--split": "949,50,1",
}
B = {
    "--sharding-stage": "3",
    "--fp16": "",
    "--param-cpu-offload": "",
    "--optimizer-cpu-offload": "",
    "--micro-batch-size": "2",
    "--seq-length": "1024",
    "--optimizer": "adam",
    "--lr": "0.00015",
    "--weight-decay": "0.01",
    "--model-name-or-path": "gpt2-small",
    "--recompute-granularity": "full",
    "--seed": "1024",
    "--clip-grad": "0",
    "--train-epochs": "60",
}
D22 = {
    "--num-layers": "48",
    "--num-attention-heads": "64",
    "--hidden-size": "6144",
    "--seq-length": "2048",
    "--max-position-embeddings": "2048",
    "--train-iters": "100",
    "--lr": "2.0e-4",
    "--min-lr": "2.0e-4",
    "--vocab-file": "/mnt/data/gpt2-vocab.json",
    "--merge-file": "/mnt/data/gpt2-merges.txt",
    "--data-path": "/mnt/data/enwiki-20230526-pages-articles",
    "--log-interval": "10",
    "--max-global-batch-size": "32",
    "--auto-parallel": "",
}
ZERO2 = {
    "--global-batch-size": "256",
    "--micro-batch-size": "4",
    "--gradient-accumulation-steps": "8",
    "--log-interval": "100",
    "--clip-grad": "0.5",
    "--timing-log-level": "2",
    "--fp16": "",
    "--initial-loss-scale": "65536",
    "--loss-scale-window": "500",
    "--hysteresis": "2",
    "--min-loss-scale": "1",
    "--sharding-stage": "2",
    "--overlap-grad-reduce": "",
    "--optimizer-cpu-offload": "",
    "--optimizer-offload-fraction": "0.3",
    "--optimizer": "adam",
    "--lr": "0.0003",
    "--adam-beta1": "0.9",
    "--adam-beta2": "0.95",
    "--adam-eps": "1e-8",
    "--weight-decay": "0",
    "--lr-decay-style": "cosine",
    "--lr-decay-iters": "10000",
    "--lr-warmup-iters": "500",
    "--min-lr": "3e-05",
    "--tensorboard-dir": "logs/tb",
}
ZERO3 = {
    "--sharding-stage": "3",
    "--nvme-offload-fraction": "1",
    "--nvme-offload-dir": "/local_nvme",
    "--param-cpu-offload": "",
    "--clip-grad": "0",
}
TRAINER = {
    "--save": "runs/gpt2",
    "--micro-batch-size": "4",
    "--gradient-accumulation-steps": "16",
    "--train-iters": "20000",
    "--lr": "6e-4",
    "--weight-decay": "0.1",
    "--adam-beta2": "0.95",
    "--clip-grad": "1.0",
    "--lr-decay-style": "cosine",
    "--min-lr": "6e-5",
    "--lr-warmup-fraction": "0.02",
    "--bf16": "",
    "--amp-level": "O1",
    "--recompute-granularity": "full",
    "--optimizer": "adam",
    "--log-interval": "10",
    "--eval-interval": "500",
    "--save-interval": "1000",
    "--keep-last": "3",
    "--seed": "7",
    "--num-workers": "4",
    "--wandb-project": "huggingface",
    "--wandb-exp-name": "gpt2-small",
    "--sharding-stage": "3",
    "--distributed-timeout-minutes": "120",
    "--dataloader-type": "cyclic",
}
NEMO = {
    "--device": "cuda",
    "--bf16": "",
    "--amp-level": "O2",
    "--train-iters": "100000",
    "--log-interval": "10",
    "--eval-interval": "2000",
    "--eval-iters": "50",
    "--clip-grad": "1.0",
    "--save": "runs/nemo",
    "--load": "runs/nemo",
    "--test-iters": "500",
    "--wandb-project": "nemo_gpt",
    "--wandb-exp-name": "gpt_1b",
    "--auto-resume": "",
    "--keep-last": "5",
    "--micro-batch-size": "4",
    "--global-batch-size": "256",
    "--tensor-model-parallel-size": "4",
    "--pipeline-model-parallel-size": "2",
    "--max-position-embeddings": "2048",
    "--seq-length": "2048",
    "--num-layers": "24",
    "--hidden-size": "2048",
    "--ffn-hidden-size": "8192",
    "--num-attention-heads": "16",
    "--hidden-dropout": "0.0",
    "--attention-dropout": "0.0",
    "--norm-epsilon": "1e-5",
    "--normalization": "RMSNorm",
    "--swiglu": "",
    "--disable-bias-linear": "",
    "--untie-embeddings-and-output-weights": "",
    "--position-embedding-type": "rope",
    "--rotary-percent": "0.5",
    "--tokenizer-type": "GPT2BPETokenizer",
    "--vocab-file": "gpt2-vocab.json",
    "--merge-file": "gpt2-merges.txt",
    "--initial-loss-scale": "4294967296",
    "--seed": "1234",
    "--gradient-accumulation-fusion": "",
    "--recompute-granularity": "core_attn",
    "--sequence-parallel": "",
    "--data-path": "0.3 data/a_text_document 0.7 data/b_text_document",
    "--data-cache-path": "data/maps",
    "--split": "980,15,5",
    "--num-workers": "2",
    "--dataloader-type": "single",
    "--reset-position-ids": "false",
    "--eod-mask-loss": "",
    "--optimizer": "adam",
    "--sharding-stage": "1",
    "--lr": "2e-4",
    "--weight-decay": "0.1",
    "--adam-beta1": "0.9",
    "--adam-beta2": "0.95",
    "--lr-decay-style": "cosine",
    "--lr-warmup-iters": "500",
    "--lr-decay-iters": "80000",
    "--min-lr": "2e-5",
}
CASES = {
    "A_train.sh": ("paddlenlp", A),
    "B_gpt2_zero3.py": ("colossalai", B),
    "D_gpt22b.sh": ("llmacc", D22),
    "others/zero2.json": ("deepspeed", ZERO2),
    "others/zero3_auto.json": ("deepspeed", ZERO3),
    "others/trainer.json": ("hf-trainer", TRAINER),
    "others/megatron_gpt.yaml": ("nemo", NEMO),
}


@pytest.mark.parametrize("name", CASES)
def test_values_of_each_config(name, capsys):
    """What bash makes of the printed command is the translation by hand, and this suite reads it."""
    dialect, expected = CASES[name]
    words = flags_printed(printed(capsys, "--from", dialect, str(HERE / name)))
    assert pairs(words) == expected
    parse_pretrain([*SHAPE, "--then", *words])


@pytest.mark.parametrize("name", CASES)
def test_the_yaml_says_the_same_as_the_command(name, capsys, tmp_path):
    dialect, _ = CASES[name]
    words = flags_printed(printed(capsys, "--from", dialect, str(HERE / name)))
    (tmp_path / "run.yaml").write_text(printed(capsys, "--from", dialect, "--format", "yaml", str(HERE / name)))
    run = {name: "x" for name in "task_name WORLD_SIZE RANK MASTER_ADDR MASTER_PORT".split()}
    text = (tmp_path / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(re.sub(r"\$(\w+)", lambda found: run[found[1]], text))
    needed = [] if "--num-layers" in words or "--model-name-or-path" in words else SHAPE
    assert parse_pretrain([*needed, "--config", str(tmp_path / "run.yaml")]) == parse_pretrain([*needed, *words])


def test_steps_win_over_epochs_and_the_output_says_so(capsys):
    text = printed(capsys, "--from", "paddlenlp", "python run_pretrain.py --num_train_epochs 3 --max_steps 5")
    assert "# no effect here:\n#   command:1: --num_train_epochs 3: --max_steps 5 says how long training is" in text
    words = flags_printed(text)
    batch = parse_pretrain([*SHAPE, *words]).batch
    assert (batch.train_iters, batch.train_epochs) == (5, None)


def test_paddlenlps_defaults_are_lines(capsys):
    """As model_zoo/gpt/args.py has them; test_iters is ten times eval_iters there, and a switch alone is false."""
    text = printed(capsys, "--from", "paddlenlp", "python run_pretrain.py --device cpu --use_amp --use_recompute")
    assert pairs(flags_printed(text)) == {
        "--device": "cpu",
        "--lr": "1e-4",
        "--min-lr": "1e-5",
        "--lr-decay-style": "cosine",
        "--lr-decay-iters": "360000",
        "--lr-warmup-fraction": "0.01",
        "--weight-decay": "0",
        "--clip-grad": "0",
        "--micro-batch-size": "8",
        "--train-iters": "500000",
        "--log-interval": "1",
        "--eval-interval": "500",
        "--eval-iters": "10",
        "--test-iters": "100",
        "--split": "949,50,1",
    }
    assert "--use_amp: PaddleNLP reads it as false where no value follows" in text
    parse_pretrain(
        [*SHAPE, "--mp_degree", "1", "--max_lr", "1e-4", "--max_steps", "9", "--use_amp", "--grad_clip", "1"]
    )
    told = capsys.readouterr().err
    assert "note: --use-amp without a value is true here, and false in PaddleNLP" in told
    assert "PaddleNLP's defaults, where this suite has others: --min-lr 1e-5, --lr-decay-style cosine" in told
    assert "--weight-decay 0" in told and "--clip-grad" not in told and "--lr 1e-4" not in told
    parse_pretrain([*SHAPE, "--max-lr", "1e-4", "--mp-degree", "1", "--lr-warmup-iters", "3"])
    assert "PaddleNLP" not in capsys.readouterr().err


def test_words_of_paddlenlp_that_are_no_flags_have_an_answer(capsys):
    parse_pretrain([*SHAPE, "--fuse_transformer", "true", "--share_folder", "false"])
    told = capsys.readouterr().err
    assert "--fuse-transformer has no effect: kernels are chosen" in told and "--share-folder has no effect" in told
    with pytest.raises(UsageError) as refused:
        parse_pretrain([*SHAPE, "--micro_bsz", "3", "--to_static", "true", "--continue_training", "true"])
    for words in (
        "--micro-bsz has another name here: --micro-batch-size",
        "--to-static is not supported: layers are compiled by --torch-compile",
        "--continue-training is not supported: say --load DIR to resume",
    ):
        assert words in str(refused.value)


def test_variables_of_a_shell_stay(capsys):
    line = 'python run_pretrain.py --mp_degree $MP --max_lr "$lr" --max_steps ${STEPS:-100} --bf16 $BF --use_amp $AMP'
    line += " --seed $((1+2)) --eval_freq `echo 7`"
    text = printed(capsys, "--from", "paddlenlp", line)
    found = pairs(flags_printed(f"MP=2 lr=1e-3 BF=true AMP=x\n{text}"))
    wanted = {
        "--tensor-model-parallel-size": "2",
        "--lr": "1e-3",
        "--train-iters": "100",
        "--bf16": "true",
        "--seed": "3",
    }
    assert wanted.items() <= found.items() and found["--eval-interval"] == "7"
    assert (
        '--use_amp "$AMP": what $AMP holds is not read: say its value or, if it is true, --fp16 --amp-level O1'
        " --initial-loss-scale 32768" in text
    )
    text = printed(capsys, "--from", "paddlenlp", "--format", "yaml", line)
    assert "tensor_model_parallel_size: '$MP'" in text and "which YAML has not: write its value" in text
    text = printed(capsys, "--from", "hf-trainer", "python run_clm.py --learning_rate $LR --warmup_steps $W")
    assert '--lr "$LR"' in text and '--warmup_steps "$W": what $W holds is not read: say its value' in text


def test_notes_of_what_has_no_effect_are_true(capsys, tmp_path):
    text = printed(
        capsys, "--from", "paddlenlp", "python run_pretrain.py --check_accuracy yes --hidden_dropout_prob 0.0"
    )
    assert "says another value" not in text and "--attention-dropout 0 " in text
    text = printed(capsys, "--from", "paddlenlp", "python run_pretrain.py --use_recompute None")
    assert "--use_recompute None: 'None' is neither true nor false" in text
    text = printed(capsys, "--from", "hf-trainer", "accelerate launch --mixed_precision bf16 run_clm.py --bf16 true")
    assert (
        text.count("--mixed_precision bf16: command:1: --bf16 true says the same") == 1
        and "says another value" not in text
    )
    text = printed(capsys, "--from", "nemo", str(HERE / "others/megatron_gpt.yaml"))
    assert text.count("precision: bf16-mixed") == 1


def test_fleetx_is_what_its_file_is_read_as(capsys):
    direct = parse_pretrain(["-c", str(HERE / "E_config.yaml")])
    words = flags_printed(printed(capsys, "--from", "fleetx", str(HERE / "E_config.yaml")))
    assert parse_pretrain(words) == direct
    text = printed(
        capsys, "--from", "fleetx", f"python tools/train.py -c {HERE / 'E_config.yaml'} -o Engine.max_steps=-1"
    )
    assert ("--train-epochs 1" in text) == ("--train-epochs" in spellings()) and "num_train_epochs: 1" in text
    command = f"python tools/train.py -c {HERE / 'E_config.yaml'} -o Model.hidden_size=512 -o Engine.max_steps=7"
    words = flags_printed(printed(capsys, "--from", "fleetx", command))
    assert (pairs(words)["--hidden-size"], pairs(words)["--train-iters"]) == ("512", "7")


@pytest.mark.parametrize(
    "text, program, flags",
    [
        (
            "Data: {Train: {dataset: {name: CoLA, root: glue}}}",
            "finetune.py",
            {"--task": "CoLA", "--data-path": "glue"},
        ),
        ("Model: {module: GPTFinetuneModule, pretrained: x}", "finetune.py", {"--pretrained-checkpoint": "x"}),
        (
            "Model: {module: GPTGenerationModule}\nGeneration: {decode_strategy: beam_search, num_beams: 4, top_k: 5}",
            "megatron.tools.generate",
            {"--num-beams": "4", "--length-penalty": "0"},
        ),
        (
            "Model: {module: GPTEvalModule}\nOffline_Eval: {eval_path: x}",
            "megatron.tools.evaluate",
            {"--valid-data": "x"},
        ),
        ("Model: {num_layers: 2}", "pretrain_gpt.py", {"--num-layers": "2"}),
    ],
)
def test_fleetx_names_the_command_that_a_file_is_for(text, program, flags, tmp_path, capsys, monkeypatch):
    (tmp_path / "gpt2").mkdir()
    monkeypatch.setenv("MEGATRON_CACHE", str(tmp_path))
    (tmp_path / "run.yaml").write_text(text)
    out = printed(capsys, "--from", "fleetx", str(tmp_path / "run.yaml"))
    [words] = run_by_bash(out)
    found = pairs(words[words.index(program) + 1 :])
    assert flags.items() <= found.items() and "no equivalent" not in out


def test_launchers(capsys):
    """Each starts as many ranks as before."""
    for words, started in (
        ('python -m paddle.distributed.launch --gpus "0,1,2" run_pretrain.py', "torchrun --nproc-per-node 3"),
        (
            "python -m paddle.distributed.launch --devices=0,1 --nnodes 2 run_pretrain.py",
            "torchrun --nproc-per-node 2 --nnodes 2",
        ),
        ("deepspeed --num_gpus 4 --num_nodes 2 run_pretrain.py", "torchrun --nproc-per-node 4 --nnodes 2"),
        ("accelerate launch --num_processes 8 run_pretrain.py", "torchrun --nproc-per-node 8"),
        ("python -m torch.distributed.launch --nproc_per_node=8 run_pretrain.py", "torchrun --nproc_per_node=8"),
        ("python run_pretrain.py", "python"),
    ):
        [found] = run_by_bash(printed(capsys, "--from", "paddlenlp", f"{words} --max_lr 1e-4"))
        assert found[: found.index("pretrain_gpt.py")] == started.split()


STARTED = {
    "deepspeed run_pretrain.py": "torchrun --nproc-per-node gpu",
    "python -u -m paddle.distributed.launch --gpus 0,1 run_pretrain.py": "PYTHONUNBUFFERED=1 torchrun --nproc-per-node 2",
    "CUDA_VISIBLE_DEVICES=0,1 python -u run_pretrain.py": "CUDA_VISIBLE_DEVICES=0,1 python -u",
    "A=4 nohup torchrun --nproc_per_node 2 run_pretrain.py": "A=4 nohup torchrun --nproc_per_node 2",
    "srun --ntasks-per-node 8 python run_pretrain.py": "srun --ntasks-per-node 8 python",
    "python -m paddle.distributed.launch --ips a,b --gpus 0 run_pretrain.py": "torchrun --nnodes 2 --nproc-per-node 1 "
    "--rdzv-backend c10d --rdzv-endpoint a:29500",
}


@pytest.mark.parametrize("command", STARTED)
def test_what_stands_before_a_script_arrives(command, capsys):
    text = printed(capsys, "--from", "paddlenlp", f"{command} --max_lr 1e-4")
    [line] = [line for line in text.splitlines() if "FLAGS[@]" in line]
    assert line == f'{STARTED[command]} pretrain_gpt.py "${{FLAGS[@]}}"'


def test_the_environment_of_a_script_and_what_stands_behind_it_arrive(capsys, tmp_path):
    (tmp_path / "run.sh").write_text(
        "export NCCL_DEBUG=INFO FLAGS_x=1\ntask_name=a\nHOSTS=$(cat hosts | wc -l)\nls\n"
        "cd x && PADDLE_Y=1 python run_pretrain.py --output_dir $task_name --max_lr 1e-4 2>&1 | tee $task_name.log\n"
    )
    text = printed(capsys, "--from", "paddlenlp", str(tmp_path / "run.sh"))
    assert text.splitlines()[:3] == ["export NCCL_DEBUG=INFO", "export FLAGS_x=1", "task_name=a"]
    assert (
        "HOSTS=$(cat hosts | wc -l)" in text and "run.sh:5: PADDLE_Y=1: it is kept, and nothing here reads it" in text
    )
    assert text.splitlines()[-1] == 'PADDLE_Y=1 python pretrain_gpt.py "${FLAGS[@]}" 2>&1 | tee "$task_name.log"'
    assert '--save "$task_name"' in text and "--lr 1e-4" in text


SCRIPT = """#!/bin/bash
set -e
[ -z "$X" ] && X=3
rm -rf output/*
run() {
  if [ "$1" = 1 ] && [ "$X" = 3 ]; then
    python run_pretrain.py --max_lr 1e-4 --output_dir out$1
  else python run_eval.py --eval_path "a b"; fi
}
for i in 1 2; do run $i; done 2>&1
case $X in
  3) lr=2e-4 ;;
  *) lr=$X
esac
cd x && python run_pretrain.py --max_lr 2e-4 --output_dir last || exit 1
function go {
  if true && python run_pretrain.py --output_dir condition; then :; fi
}
again ()
{
  name=$(printf '%s' "in  again") && python run_pretrain.py --output_dir "$name"
}
go; again
(X=1; python run_pretrain.py --output_dir $X$(echo "(2)"))
LIST=(1 2)
"""


def test_a_script_keeps_its_shell_and_names_every_other_command(capsys, tmp_path):
    """Conditions and loops run what they ran; each line that is neither translated nor the shell's own is named."""
    (tmp_path / "run.sh").write_text(SCRIPT)
    with pytest.raises(SettingsError, match="^10 commands are not translated"):
        tool.main(["--from", "paddlenlp", "--strict", str(tmp_path / "run.sh")])
    text = capsys.readouterr().out
    named = [line.partition("run.sh:")[2] for line in text.splitlines() if "not translated" in line]
    assert named == [
        "4: not translated: rm -rf output/*",
        '8: not translated: python run_eval.py --eval_path "a b": python -m megatron.tools.evaluate --load DIR takes'
        " --eval_path and --overlapping_eval",
        "11: not translated: case $X in",
        "12: not translated: 3 ) lr=2e-4",
        "13: not translated: * ) lr=$X",
        "14: not translated: esac",
        "15: not translated: cd x &&",
        "15: not translated: || exit 1",
        "17: not translated: python run_pretrain.py --output_dir condition",
        "25: not translated: LIST= ( 1 2 )",
    ]
    saved = [pairs(words[2:]).get("--save") for words in run_by_bash(f"X=\n{text}")]
    assert saved == ["out1", "last", None, "in  again", "1(2)"]


def test_what_a_tools_launcher_cannot_say_is_not_translated(tmp_path, capsys):
    (tmp_path / "run.sh").write_text("python -m paddle.distributed.launch --elastic_level 1 tools/eval.py -c x.yaml\n")
    with pytest.raises(SettingsError, match="^1 commands are not translated"):
        tool.main(["--from", "fleetx", "--strict", str(tmp_path / "run.sh")])
    assert "run.sh:1: --elastic_level 1: not translated: python -m megatron.tools.supervise" in capsys.readouterr().out


def test_a_script_as_yaml_is_yaml(capsys, tmp_path):
    (tmp_path / "run.sh").write_text("export A=1\nls\nif true; then python run_pretrain.py --max_lr 1e-4; fi\n")
    text = printed(capsys, "--from", "paddlenlp", "--format", "yaml", str(tmp_path / "run.sh"))
    assert float(yaml.safe_load(text)["lr"]) == 1e-4 and "# export A=1" in text


def test_loops_and_yaml(capsys, tmp_path):
    (tmp_path / "run.sh").write_text(
        "for i in 1 2; do python run_pretrain.py --recompute-activations false --seed $i; done\n"
    )
    text = printed(capsys, "--from", "paddlenlp", "--format", "yaml", str(tmp_path / "run.sh"))
    assert "# python pretrain_gpt.py --config FILE" in text and "recompute_granularity: null  " in text


def test_accelerates_file_is_read(capsys, tmp_path):
    (tmp_path / "a.yaml").write_text(
        "distributed_type: DEEPSPEED\nnum_machines: 2\nmachine_rank: 1\nmain_process_ip: node0\nnum_processes: 16\n"
        "mixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    )
    line = f"accelerate launch --config_file {tmp_path / 'a.yaml'} --machine_rank 0 run_clm.py --learning_rate 1e-4"
    text = printed(capsys, "--from", "hf-trainer", line)
    [started] = [line for line in text.splitlines() if "FLAGS[@]" in line]
    wanted = {"--nproc-per-node": "8", "--nnodes": "2", "--master-addr": "node0", "--node-rank": "0"}
    assert all(f"{flag} {word} " in started for flag, word in wanted.items())
    assert pairs(flags_printed(text))["--sharding-stage"] == "3" and "--bf16" in text


def test_words_of_trl_beside_trainers_are_answered(capsys, tmp_path):
    (tmp_path / "args.json").write_text(json.dumps(dict(seed=1, max_seq_length=64, packing=True, packin=True)))
    text = printed(
        capsys, "--from", "hf-trainer", str(tmp_path / "args.json"), unknown="args.json:1: packin: true: no key"
    )
    assert "max_seq_length: 64: say --seq-length\n" in text and "packing: true: say --packing, with finetune.py" in text
    assert "packin: true: no key that is known of Hugging Face Trainer" in text


def test_fleetxs_auto_and_tools_keep_their_words(capsys):
    config = HERE / "E_config.yaml"
    launch = "python -m paddle.distributed.launch --log_dir log --devices 0,1 ./tools/"
    text = printed(capsys, "--from", "fleetx", f"{launch}auto.py -c {config} --seed 3", unknown="--seed 3: no word")
    assert "--auto-parallel" in flags_printed(text) and "--seed 3: no word of PaddleFleetX's tools" in text
    assert "torchrun --log-dir log -r 3 --nproc-per-node 2 pretrain_gpt.py" in text
    text = printed(capsys, "--from", "fleetx", f"{launch}eval.py -c {config} -o Offline_Eval.batch_size=3")
    last = text.splitlines()[-1]
    assert last.startswith("torchrun --log-dir log -r 3 --nproc-per-node 2") and last.endswith(
        "-o Offline_Eval.batch_size=3"
    )
    assert "-m megatron.tools.evaluate" in last
    text = printed(capsys, "--from", "fleetx", f"{launch}train.py -c {config} -o Model.module=GPTGenerationModule")
    [words] = run_by_bash(text)
    assert words[:9] == "torchrun --log-dir log -r 3 --nproc-per-node 2 -m megatron.tools.generate".split()


def test_colossal_ais_data_and_losses_are_named(capsys, tmp_path):
    (tmp_path / "c.py").write_text(
        "import os\nBATCH_SIZE = 2**3\nSEQ_LEN = 4 * 256\nloss_fn = dict(type=GPTLMLoss)\n"
        "zero = dict(model_config=dict(tensor_placement_policy='cpu'))\nif os:\n    x = 1\nscale = 2\n"
    )
    (tmp_path / "run.sh").write_text(
        f"export DATA=train_data.json\ntorchrun train_gpt.py --config={tmp_path / 'c.py'} --from_torch --backend nccl\n"
    )
    text = printed(
        capsys, "--from", "colossalai", str(tmp_path / "run.sh"), unknown="c.py:8: scale = 2: no key that is"
    )
    found = pairs(flags_printed(text))
    assert (found["--micro-batch-size"], found["--seq-length"]) == ("8", "1024")
    assert {"--param-cpu-offload", "--optimizer-cpu-offload"} <= set(found) and found["--distributed-backend"] == "nccl"
    for words in (
        "run.sh:1: export DATA=train_data.json: lines of text become tokens first: preprocess_data.py",
        "--dataset-type webtext",
        "c.py:6: if os:: it would have to be run",
        "c.py:8: scale = 2: no key that is known",
        "loss_fn = dict(type=GPTLMLoss): the loss is the next token's",
        "--from_torch: it is done anyway",
    ):
        assert words in text


PIPELINE = """PIPELINE = 2
MODE = '1d'
BATCH_SIZE = 8
NUM_MICRO_BATCHES = 4
gradient_accumulation = 2
NUM_EPOCHS = 3
fp16 = dict(mode=AMP_TYPE.NAIVE)
parallel = dict(pipeline=PIPELINE, tensor=dict(mode=MODE, size=2))
optimizer = dict(type=Adam, lr=0.1, bets=(0.9, 0.95))
model = dict(type=gpt2_small, dtype=torch.half, num_chunks=1, hidden=3)
cudnn_benchmark = False
"""


def test_colossal_ais_pipelines(capsys, tmp_path):
    """BATCH_SIZE holds the micro-batches; names that other lines use are no settings; each setting has one place."""
    (tmp_path / "c.py").write_text(PIPELINE)
    text = printed(capsys, "--from", "colossalai", str(tmp_path / "c.py"))
    found, lost = pairs(flags_printed(text)), text.partition("# no equivalent")[2]
    assert (found["--micro-batch-size"], found["--gradient-accumulation-steps"]) == ("2", "8")
    assert [line.partition("c.py:")[2] for line in lost.splitlines()[1:]] == [
        "9: optimizer.bets = 0.9, 0.95: an optimizer has --lr, --weight-decay, --adam-beta1 ..."
        " (docs/flags.md); did you mean optimizer.betas?",
        "10: model.hidden = 3: a shape is --num-layers, --hidden-size ..., or a name: --model-name-or-path gpt2-small",
    ]
    assert "cudnn_benchmark = False: no layer here is one that cuDNN computes" in text
    assert "warms up over 5 epochs" in text and text.count("parallel.pipeline = 2") == 1
    (tmp_path / "c.py").write_text(PIPELINE.replace(", bets=(0.9, 0.95)", "").replace(", hidden=3", ""))
    config = parse_pretrain(["--config", str(tmp_path / "c.py")])
    assert (config.batch.micro_batch_size, config.batch.gradient_accumulation_steps) == (2, 8)
    assert config.said("clip_grad").where == "what Colossal-AI does where nothing is said"
    assert "warms up over 5 epochs" in capsys.readouterr().err


def test_llmacc_launches_and_plans(capsys):
    """Both commands of the page: one trains, one asks; the comments in them do not end them here, and are told of."""
    text = printed(capsys, "--from", "llmacc", str(HERE / "D_llmacc.sh"))
    train, plan = run_by_bash(text)
    assert (
        train[:3] == ["torchrun", "--nnodes", "2"]
        and train[-4:] == "pretrain_gpt.py --max-global-batch-size 16 --auto-parallel".split()
    )
    assert plan[:3] == ["python", "-m", "megatron.tools.plan"] and pairs(plan[3:])["--world-size"] == "64"
    assert text.count("for a shell the command ends here, in the comment") == 2
    text = printed(capsys, "--from", "llmacc", str(HERE / "D_parameters.txt"), unknown="--global batch size: no flag")
    assert pairs(flags_printed(text)) == {
        "--fp16": "",
        "--sharding-stage": "1",
        "--sequence-parallel": "",
        "--recompute-granularity": "core_attn",
        "--attention-backend": "flash",
    }
    assert "--global batch size: no flag that is known" in text


def test_a_command_that_names_a_config(capsys, tmp_path):
    (tmp_path / "gpt2_configs").mkdir()
    (tmp_path / "gpt2_configs" / "gpt2_zero3.py").write_bytes((HERE / "B_gpt2_zero3.py").read_bytes())
    (tmp_path / "train.sh").write_bytes((HERE / "B_train.sh").read_bytes())
    assert pairs(flags_printed(printed(capsys, "--from", "colossalai", str(tmp_path / "train.sh")))) == B
    text = printed(capsys, "--from", "colossalai", str(HERE / "B_train.sh"))
    assert "gpt2_configs/gpt2_zero3.py: no such file; translate it by itself" in text
    line = "python megatron_gpt_pretraining.py --config-path={} --config-name=megatron_gpt model.num_layers=3 +model.seed=5"
    found = pairs(flags_printed(printed(capsys, "--from", "nemo", line.format(HERE / "others"))))
    assert found == {**NEMO, "--num-layers": "3", "--seed": "5"}
    assert "lost/megatron_gpt.yaml: no such file" in printed(capsys, "--from", "nemo", line.format("lost"))
    line = f"deepspeed pretrain_gpt.py --deepspeed_config {HERE / 'others/zero2.json'} --zero-stage 1 --num-layers 3"
    found = pairs(flags_printed(printed(capsys, "--from", "megatron-deepspeed", line)))
    assert found == {**ZERO2, "--sharding-stage": "1", "--num-layers": "3"}


# Nothing is dropped ---------------------------------------------------------------------------------------------------


def leaves(tree, prefix="") -> list[str]:
    if isinstance(tree, dict):
        return [leaf for key, value in tree.items() for leaf in leaves(value, f"{prefix}{key}.")]
    return [] if tree in (None, "") else [prefix[:-1]]


@pytest.mark.parametrize("name", [name for name in CASES if "others" in name])
def test_every_key_is_a_line_or_is_told(name):
    dialect = DIALECTS[CASES[name][0]]
    found = translate(dialect, read_tree(str(HERE / name)))
    told = {line.source.key for line in found.lines if line.source} | {
        source.key for source, _ in found.idle + found.lost + found.unknown
    }
    told |= {line.source.key for line in found.start}
    load = json.loads if name.endswith("json") else yaml.safe_load
    assert set(leaves(load((HERE / name).read_text()))) <= told
    assert all(text for _, text in found.idle + found.lost)


def test_every_key_of_fleetx_is_told(capsys):
    text = printed(capsys, "--from", "fleetx", str(HERE / "E_config.yaml"))
    lines = (HERE / "E_config.yaml").read_text().splitlines()
    wanted = [number for number, line in enumerate(lines, 1) if re.search(r": \S", line)]
    text += "".join(f" E_config.yaml:{one}" for one in re.findall(r"(?<=#     |....; )\d+: ", text))  # of lists
    assert len(wanted) > 50 and [number for number in wanted if f"E_config.yaml:{number}:" not in text] == []


def test_what_runs_of_a_script_share_is_printed_once(tmp_path, capsys):
    """Nine branches of a fine-tuning: the same commands, in a third of the lines."""
    (tmp_path / "base.yaml").write_text(f"Model: {{module: GPTFinetuneModule, pretrained: x, {SIZES}, name: GPT}}")
    tasks = {"CoLA": "cola_public", "SST2": "SST-2", "RTE": "$ROOT"}
    branches = [
        f"if [ $1 == {name} ]; then\n  python tools/train.py -c {tmp_path}/base.yaml "
        f"-o Data.Train.dataset.name={name} -o Data.Train.dataset.root={root} -o Model.hidden_dropout_prob=$DROP\nfi\n"
        for name, root in tasks.items()
    ]
    (tmp_path / "all.sh").write_text("".join(branches))
    text = printed(capsys, "--from", "fleetx", str(tmp_path / "all.sh"))
    assert text.count("--hidden-size 64") == 1 and text.count("Model.name: GPT") == 1
    assert text.count('--hidden-dropout "$DROP"') == 3  # the shell may change it between them
    for branch, name in zip(branches, tasks, strict=True):
        (tmp_path / "one.sh").write_text(branch)
        alone = run_by_bash(
            f"set {name}; ROOT=r DROP=0.1\n{printed(capsys, '--from', 'fleetx', str(tmp_path / 'one.sh'))}"
        )
        [words], [of_all] = alone, run_by_bash(f"set {name}; ROOT=r DROP=0.1\n{text}")
        assert words[:2] == of_all[:2] == ["python", "finetune.py"] and len(words) > 18
        assert pairs(of_all[2:]) == pairs(words[2:])


def test_a_reason_is_one_of_two(capsys, tmp_path):
    """What is done here as well, and what asks for nothing."""
    (tmp_path / "a.yaml").write_text(
        "Model:\n  module: GPTModule\n  name: GPT\n  use_flash_attn: False\nOptimizer:\n  tensor_fusion: False\n"
    )
    text = printed(capsys, "--from", "fleetx", str(tmp_path / "a.yaml"))
    assert "a.yaml: it is done anyway:\n#     2: Model.module: GPTModule; 3: Model.name: GPT\n" in text
    assert re.search(r"a.yaml: it asks for nothing:\n#     .*6: Optimizer.tensor_fusion: False", text)


def test_every_flag_of_a_command_is_told(capsys):
    text = printed(capsys, "--from", "paddlenlp", str(HERE / "A_train.sh"))
    for flag in re.findall(r"(?<![\w-])--\w+|(?<=[41])--\w+", (HERE / "A_train.sh").read_text()):
        assert flag in text or flag in ("--gpus", "--log_dir"), flag
    assert text.count("no blank before the backslash") == 3 and "--log-dir" in text
    assert "A_train.sh:2: --gpus 0,1,2,3,4,5,6,7: --nproc-per-node 8" in text and "A_train.sh:3: --log_dir" in text


def test_what_has_no_equivalent_is_said_with_what_there_is(capsys, tmp_path):
    content = json.loads((HERE / "others/zero3_auto.json").read_text())
    (tmp_path / "ds.json").write_text(json.dumps(content | {"gradient_cliping": 1.0}))
    near = "no key that is known of DeepSpeed; did you mean gradient_clipping?"
    text = printed(capsys, "--from", "deepspeed", str(tmp_path / "ds.json"), unknown=near[:-1])
    assert near in text.partition("FLAGS=")[0]
    lost = text[text.index("# no equivalent") :]
    for words in (
        "scheduler.type: OneCycle: there is --lr-decay-style constant, linear",
        "auto: the program that starts DeepSpeed fills it in",
    ):
        assert words in lost
    curve = dict(type="WarmupDecayLR", params=dict(warmup_type="log", total_num_steps=9))
    (tmp_path / "log.json").write_text(json.dumps(dict(scheduler=curve)))
    text = printed(capsys, "--from", "deepspeed", str(tmp_path / "log.json"))
    assert "warmup_type: log: warm-up is linear" in text and pairs(flags_printed(text))["--lr-warmup-iters"] == "1000"
    assert "activations are kept on the device" in printed(
        capsys, "--from", "deepspeed", str(HERE / "others/zero2.json")
    )


@pytest.mark.parametrize(
    "suite, words, wanted",
    [
        (
            "fleetx",
            "python tools/train.py -o Model.hiden_size=3",
            "-o Model.hiden_size: 3 is no known key; did you mean",
        ),
        ("fleetx", "python tools/train.py -o Model.lr=", "-o Model.lr is no known key"),
        (
            "fleetx",
            "python -m paddle.distributed.launch --device 0 tools/train.py -o Model.num_layers=3",
            "--device 0: no",
        ),
        ("paddlenlp", "python run_pretrain.py --max_lr 1e-4 --micro_bach_size 3", "--micro_bach_size 3: no flag"),
        ("megatron-deepspeed", "python pretrain_gpt.py --zero-stag 1", "--zero-stag 1: no flag"),
        ("nanogpt", "python train.py --batch_sise=3", "no key that is known of nanoGPT; did you mean batch_size"),
        ("nemo", "nemo llm pretrain --factory llama3_8b trainer.max_step=3", "did you mean trainer.max_steps"),
        ("megatron-bridge", "python run_recipe.py --recipe llama32_1b_pretrain_config --foo 3", "--foo: no flag"),
        ("hf-trainer", "python run_clm.py --learning_rat 3", "did you mean learning_rate"),
        ("llmacc", "torchrun -m llmacc.pretrain --num-layer 3", "--num-layer 3: no flag"),
    ],
)
def test_a_misspelled_setting_is_an_error(suite, words, wanted, capsys):
    """As for the commands here, with exit code 2. The command that is printed says first that something is left out."""
    with pytest.raises(SystemExit) as left:
        run_main(tool.main, ["--from", suite, words])
    out, told = capsys.readouterr()
    assert left.value.code == 2 and wanted in told and wanted in out.partition("FLAGS=")[0]


NLP, DS = "run_pretrain.py --mp_degree 4 --pp_degree 4", "pretrain_gpt.py --tensor-model-parallel-size 4"
NEMO2 = "nemo llm pretrain --factory"
RANKS = [  # started, needed, by hand; None: nothing is said
    ("paddlenlp", f"python -m paddle.distributed.launch --gpus 0,1,2,3,4,5,6,7 {NLP}", 8, "16 or a multiple"),
    (
        "paddlenlp",
        f"python -m paddle.distributed.launch --nnodes 2 --master a:1 --gpus 0,1,2,3,4,5,6,7 {NLP}",
        16,
        None,
    ),
    ("paddlenlp", f"python -m paddle.distributed.launch --nnodes 2 --gpus 0,1,2,3 {NLP} --dp_degree 2", 8, "32 "),
    ("paddlenlp", f"python -m paddle.distributed.launch --gpus $GPUS {NLP}", 0, None),
    ("paddlenlp", f"fleetrun --gpus 0,1 {NLP.replace(' 4', ' 1')} --sharding_degree 4", 2, "4 or a multiple"),
    ("paddlenlp", "python run_pretrain.py --mp_degree 2", 1, "2 or a multiple"),
    ("megatron-deepspeed", f"deepspeed --num_nodes 1 --num_gpus 2 {DS}", 2, "4 or a multiple"),
    ("megatron-deepspeed", f"torchrun --nproc_per_node=8 {DS}", 8, None),
    ("megatron-deepspeed", f"torchrun --nproc_per_node=6 {DS}", 6, "4 or a multiple"),
    ("nemo", f"{NEMO2} llama3_70b", 8, "32 or a multiple"),
    ("nemo", f"{NEMO2} llama3_70b(num_nodes=4)", 32, None),
]


@pytest.mark.parametrize("suite, words, here, wanted", RANKS)
def test_a_launch_of_other_ranks_than_the_layout_needs_is_named(suite, words, here, wanted, capsys):
    words = words.split() if suite == "nemo" else [words]
    told = [line for line in printed(capsys, "--from", suite, *words).splitlines() if "this layout needs" in line]
    if wanted is None:
        assert told == []
    else:
        assert re.match(f"# {here} ranks? starts? here, and this layout needs {wanted}", told[0]), told


# Round trips ----------------------------------------------------------------------------------------------------------


def sample(meaning: str, known) -> list[str]:
    """A value that the flags of a row take; none where the row says it."""
    words = meaning.split()
    if not all(word.startswith("--") for word in words):
        return []
    kinds = [known[flag].setting.kind for flag in words]
    if any(range_problem(known[flag].setting.name, 0.25) for flag in words):
        return ["3"] * len(words)
    return [{bool: "true", int: "3", float: "0.25", str: "word"}.get(kind) or str(kind[-1]) for kind in kinds]


@pytest.mark.parametrize("name", [name for name in DIALECTS if name != "fleetx"])
def test_round_trips_of_every_row(name):
    """Their key to our flag, back to a key that says the same, and from that to our flag again."""
    dialect, known, tried = DIALECTS[name], spellings(), 0

    def mine(sources: dict[str, list[str]]) -> list[tuple[str, list[str]]]:
        found = translate(dialect, [TheirSetting(key, words, "here", "") for key, words in sources.items()])
        return [(line.flag, line.words) for line in found.lines if line.source and line.source.key in sources]

    for row, meaning in dialect.table.items():
        flags = [word for word in meaning.split() if word.startswith("--")]
        if meaning == "-" or ";" in meaning or any(flag not in known for flag in flags):
            continue
        key, _, value = row.partition("=")
        lines = mine({key: [value] if value else sample(meaning, known)})
        theirs, lost = back(dialect, lines)
        assert lines and lost == [] and mine(theirs) == lines, row
        tried += 1
    assert tried > 2 or name == "llmacc"  # all of its flags but two are Megatron-LM's


def test_a_command_of_this_suite_in_other_words(capsys):
    line = "pretrain_gpt.py --bf16 --sharding-stage 2 --adam-beta2 0.95 --lr 1e-4 --swiglu --micro-batch-size 4".split()
    tool.main(["--to", "deepspeed", *line])
    out, err = capsys.readouterr()
    assert yaml.safe_load(out) == {
        "bf16.enabled": True,
        "zero_optimization.stage": 2,
        "optimizer.params.betas": "0.9, 0.95",
        "optimizer.params.lr": "1e-4",
        "train_micro_batch_size_per_gpu": 4,
    }
    assert "no word for it: --swiglu" in err
    assert printed(capsys, "--to", "paddlenlp", "--tensor-model-parallel-size", "2").split() == ["--mp_degree", "2"]
    out = printed(capsys, "--to", "fleetx", "pretrain_gpt.py", "--tensor-model-parallel-size", "2", "--lr", "1e-4")
    assert out.split() == ["Distributed.mp_degree:", "2", "Optimizer.lr.max_lr:", "1e-4"]
    assert printed(capsys, "--to", "megatron-deepspeed", "--sharding-stage", "2", "--num-layers", "3").split() == [
        "--zero-stage",
        "2",
        "--num-layers",
        "3",
    ]


# Against the suites themselves ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_hugging_faces_own_arguments():
    """Every field of transformers' TrainingArguments is known, and what is said of its defaults is true."""
    transformers = pytest.importorskip("transformers")
    from dataclasses import fields

    dialect = DIALECTS["hf-trainer"]
    theirs = {one.name: one.default for one in fields(transformers.TrainingArguments)}
    unknown = [
        name
        for name in theirs
        if not (dialect.knows(name) or name in dialect.computed or sentence({**dialect.idle, **dialect.lost}, name))
    ]
    assert unknown == []
    names = dict(
        lr="learning_rate",
        micro_batch_size="per_device_train_batch_size",
        log_interval="logging_steps",
        save_interval="save_steps",
        train_epochs="num_train_epochs",
    )
    for default in dialect.defaults:
        name = default.flag[2:].replace("-", "_")
        if name not in ("eval_iters", "dataloader_type"):
            assert float(default.word) == float(theirs[names.get(name, name)]), name
    assert (
        theirs["lr_scheduler_type"] == "linear" and theirs["max_grad_norm"] == 1.0 and theirs["eval_strategy"] == "no"
    )


def test_python_is_read_and_not_run(tmp_path):
    (tmp_path / "c.py").write_text(
        "import os\nopen('made', 'w')\nBATCH = 4\nBATCH_SIZE = BATCH * 2\nSEQ_LEN = os.getpid()\n"
        "betas = (0.9, 0.95)\noptimizer = {'lr': 1e-4, 'betas': [0.9, 0.95]}\nmodel = dict(type=gpt2_medium)\n"
    )
    found = {one.key: one.words for one in read_python(str(tmp_path / "c.py"))}
    assert (
        found["BATCH_SIZE"] == ["8"] and found["optimizer.lr"] == ["0.0001"] and found["model.type"] == ["gpt2_medium"]
    )
    assert found["optimizer.betas"] == ["0.9", "0.95"] and found["SEQ_LEN"] == ["os.getpid"]
    assert not Path("made").exists()


def test_fleetx_has_one_table():
    """The flags of its table are flags."""
    for purpose, table in fleetx.TABLES.items():
        flags = {flag for meaning in table.table.values() for flag, _ in flags_of(meaning, [""]) if flag}
        assert flags <= set(spellings_of(tool.command_for(purpose)[1])), purpose


# Wrong uses -----------------------------------------------------------------------------------------------------------

WRONG = [
    ("", 2, "a suite and what to translate are wanted"),
    ("--from deepspeed", 2, "a suite and what to translate are wanted"),
    ("bad.json", 2, "a suite and what to translate are wanted"),
    ("--from deepsped bad.json", 2, "'deepsped' is no suite that is known.*did you mean deepspeed"),
    ("--from megatron run.sh", 2, "Megatron-LM.s flags are this suite.s(.|\\n)*start its command as it is"),
    ("--from deepspeed --to nemo bad.json", 2, "--from and --to: give one of them"),
    ("--from deepspeed missing.json", 2, "missing.json: no such file"),
    ("--from deepspeed bad.json", 2, "bad.json:2: neither YAML nor JSON"),
    ("--from deepspeed list.json", 2, "list.json: no settings in it"),
    ("--from deepspeed empty.json", 2, "empty.json: no settings in it"),
    ("--from colossalai bad.py", 2, "bad.py:1: not Python"),
    ("--from nemo latin.yaml", 2, "latin.yaml: not UTF-8 text"),
    ("--from nemo folder", 2, "folder: no such file"),
    ("--from paddlenlp binary.sh", 2, "binary.sh: not UTF-8 text"),
    ("--from colossalai zero.py", 2, "zero.py.*not Python"),
    ("--from paddlenlp other.sh", 2, "other.sh: no command of PaddleNLP in it"),
    ("--from fleetx circle.yaml", 2, "builds on itself"),
    ("--from fleetx --format toml circle.yaml", 2, "'toml' is none of command, yaml"),
    ("--from fleetx --formt yaml circle.yaml", 2, "did you mean --format"),
    ("--to deepspeed pretrain_gpt.py --zero 2", 2, "no flags of this suite: --zero"),
    ("--to deepspeed pretrain_gpt.py --lr fast", 2, "--lr 'fast' is not a number"),
    ("--from deepspeed fleetx.yaml", 2, "fleetx.yaml: no setting of DeepSpeed in it(.|\\n)*--from fleetx"),
    ("--from colossalai other.py", 2, "other.py: no setting of Colossal-AI in it"),
    ("--from fleetx bases.yaml", 2, "bases.yaml:1: _base_ names one file, and there are 2: a.yaml, b.yaml"),
    ("--from deepspeed --strict lost.json", 3, "1 settings of DeepSpeed have no equivalent"),
]


@pytest.mark.parametrize("line, code, told", WRONG)
def test_wrong_uses_have_one_message_and_their_code(line, code, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.json").write_text('{"a": 1,\n"b": [}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "lost.json").write_text('{"moe": {"enabled": true}}')
    (tmp_path / "bad.py").write_text("x = = 1")
    (tmp_path / "other.py").write_text("x = 1\nprint(x)\n")
    (tmp_path / "fleetx.yaml").write_text("Model: {num_layers: 2}\nGlobal: {seed: 3, other: null}\n")
    (tmp_path / "bases.yaml").write_text("_base_: [a.yaml, b.yaml]\n")
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    (tmp_path / "binary.sh").write_bytes(bytes(range(256)))
    (tmp_path / "zero.py").write_bytes(b"x = 1\0")
    (tmp_path / "circle.yaml").write_text("_base_: circle.yaml\nModel: {num_layers: 1}\n")
    (tmp_path / "other.sh").write_text("ls -l\npython other.py --x 1\n")
    (tmp_path / "folder").mkdir()
    with pytest.raises(SystemExit) as left:
        run_main(tool.main, shlex.split(line))
    err = capsys.readouterr().err
    assert left.value.code == code and re.search(told, err) and err.count("error:") == 1


@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_references_of_omegaconf_are_to_the_neighbour_or_from_the_root(kind, depth, tmp_path):
    """`x` differs on each level: each level's `${.x}` is its own, `${..x}` the one above; `${x}` is the root's."""
    tree: dict = {}
    for level in range(4, -1, -1):
        tree = dict(x=level, near="${.x}", far="${x}", nearer="${.near}", up="${..x}") | (
            dict(below=tree) if tree else {}
        )
    dump = yaml.safe_dump if kind == "yaml" else json.dumps
    (tmp_path / f"a.{kind}").write_text(dump(tree))
    found = {one.key: one.value for one in read_tree(str(tmp_path / f"a.{kind}"))}
    own = {name: found["below." * depth + name] for name in ("x", "near", "far", "nearer", "up")}
    assert own == dict(x=str(depth), near=str(depth), far="0", nearer=str(depth), up=str(max(0, depth - 1)))


def test_a_config_of_nanogpt_among_its_words(tmp_path, monkeypatch, capsys):
    """Its configurator runs files and --key=value in their order: the last one counts."""
    (tmp_path / "small.py").write_text("n_layer = 4\nbatch_size = 8\ngradient_accumulation_steps = 5 * 8\n")
    monkeypatch.chdir(tmp_path)
    start = "torchrun --standalone --nproc_per_node=8 train.py"
    after = printed(capsys, "--from", "nanogpt", f"{start} small.py --batch_size=4 --n_head=2")
    assert "--global-batch-size 160 " in after and "--num-layers 4 " in after and "--num-attention-heads 2 " in after
    assert f'{start.replace("train.py", "pretrain_gpt.py")} "${{FLAGS[@]}}"' in after
    before = printed(capsys, "--from", "nanogpt", f"{start} --batch_size=4 small.py")
    assert "--global-batch-size 320 " in before and "small.py:2: batch_size = 8 says another value" in before
