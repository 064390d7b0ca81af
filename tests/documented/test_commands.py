# SPDX-License-Identifier: Apache-2.0
"""Every command line of the documented files, as it is printed: run on a CPU, shrunk, or answered with one sentence.

What is shrunk stands behind `--then`, which lets words behind it win: the documented words are all read before.
"""

import importlib.util
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import merge_datasets
import preprocess_data
import pretrain_gpt
from megatron.errors import DataError, UsageError
from megatron.settings.from_checkpoint import saved_record
from megatron.settings.parse import parse_pretrain
from megatron.tools import evaluate, translate
from megatron.tools import pretrain as searched_pretrain

pytestmark = pytest.mark.sampled(5)

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SCRIPTS = sorted((ROOT / "scripts").glob("*.sh"))
DIFFER = [path.name for path in SCRIPTS if "\n# Differs: " in path.read_text()]
PRINTED = sorted(
    path.name for path in HERE.iterdir() if path.suffix in (".sh", ".txt", ".yaml") or path.name[:2] == "B_"
)
TEXTS = ["The quick brown fox.", "A stitch in time", "To be or not to be?"]
SMALL = """--then --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
    --train-iters 2 --eval-iters 0 --device cpu --num-workers 0 --log-interval 1""".split()
NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 60".split()
MOCK = [*NUMBERS, "--mock-data"]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """A working folder with a corpus and a vocabulary of single bytes, as the pages suppose."""
    monkeypatch.chdir(tmp_path)
    vocabulary = {letter: number for number, letter in enumerate([*letters_of_bytes(), "zz", "<|endoftext|>"])}
    Path("gpt2-vocab.json").write_text(json.dumps(vocabulary))
    Path("gpt2-merges.txt").write_text("#version: 0.2\nz z\n")
    Path("my-corpus.json").write_text("".join(json.dumps(dict(text=text, id=1)) + "\n" for text in TEXTS))
    return tmp_path


def letters_of_bytes() -> list[str]:
    """GPT-2's letter for each byte: itself where it prints, else the next letter behind the first 256."""
    printing = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]


def ids_of(texts: list[str]) -> list[int]:
    return [number for text in texts for number in [*text.encode(), 257]]


def behind(words: list[str], program: str) -> list[str]:
    """The words behind a script, which may stand in a folder, or a module."""
    at = next(number for number, word in enumerate(words) if word == program or word.endswith(f"/{program}"))
    return words[at + 1 :]


def numbers_as_data() -> list[str]:
    """Token files of numbers, and the flags that name them."""
    Path("n.jsonl").write_text("".join(f'{{"text": "{n} {n + 1} {n + 2}"}}\n' for n in range(50)) * 40)
    preprocess_data.main(["--input", "n.jsonl", "--output-prefix", "n", *NUMBERS, "--append-eod"])
    return [*NUMBERS, "--data-path", "n_text_document"]


def losses(text: str) -> int:
    return text.count("loss")


def test_the_list_is_whole():
    assert PRINTED == sorted(
        """A_create_data.sh A_train.sh B_gpt2_zero3.py B_train.sh B_webtext.sh D_corpus.sh D_gpt22b.sh D_llmacc.sh
        D_parameters.txt D_wiki.sh E_config.yaml E_scripts.txt""".split()
    )


# A: PaddleNLP ---------------------------------------------------------------------------------------------------------


def test_a_makes_data(calls, desk, monkeypatch, capsys):
    [words] = calls("A_create_data.sh")
    own = behind(words, "create_pretraining_data.py")
    assert own[own.index("--input_path") + 1] == "/path/to/openwebtext/"
    if importlib.util.find_spec("megatron.tools.create_pretraining_data") is None:
        translate.main(["--from", "paddlenlp", str(HERE / "A_create_data.sh")])
        assert "preprocess_data.py --input PATH --output-prefix P" in capsys.readouterr().out
        return
    from megatron.tools import create_pretraining_data

    (desk / "cache" / "gpt2-en").mkdir(parents=True)
    for name, target in (("gpt2-vocab.json", "vocab.json"), ("gpt2-merges.txt", "merges.txt")):
        (desk / "cache" / "gpt2-en" / target).write_bytes(Path(name).read_bytes())
    monkeypatch.setenv("MEGATRON_CACHE", str(desk / "cache"))
    create_pretraining_data.main([*own, "--then", "--input_path", "my-corpus.json", "--workers", "2"])
    assert np.load("gpt_openwebtext_ids.npy").tolist() == ids_of(TEXTS)


def test_a_is_planned_for_its_eight_ranks(calls, desk, capsys):
    [words] = calls("A_train.sh", task_name="gpt3")
    own = behind(words, "run_pretrain_static.py")
    pretrain_gpt.main([*own, *SMALL, *numbers_as_data(), "--dry-run", "--world-size", "8"])
    said = capsys.readouterr().out
    assert "tensor" in said and "8 ranks" in said


def test_a_trains_on_what_it_has_made(calls, desk, monkeypatch, capsys):
    """Data, then training, by one name for the vocabulary, which lies in the cache. Shrunk, and without its ranks."""
    (desk / "cache" / "gpt2").mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        (desk / "cache" / "gpt2" / name).write_bytes(Path(f"gpt2-{name}").read_bytes())
    monkeypatch.setenv("MEGATRON_CACHE", str(desk / "cache"))
    from megatron.tools import create_pretraining_data

    Path("my-corpus.json").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS * 40))
    Path("data").mkdir()
    [made], [words] = calls("A_create_data.sh"), calls("A_train.sh", task_name="gpt3")
    here = "--then --input_path my-corpus.json --workers 1 --output_prefix data/gpt_openwebtext".split()
    create_pretraining_data.main([*behind(made, "create_pretraining_data.py"), *here])
    ranks = "--sharding-degree 1 --mp-degree 1 --precision fp32 --micro-batch-size 2 --save out --lr-decay-iters 2"
    pretrain_gpt.main([*behind(words, "run_pretrain_static.py"), *SMALL, *ranks.split()])
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    tokenizer = lines[0]["config"]["tokenizer"]
    assert Path(tokenizer["vocab_file"]) == desk / "cache" / "gpt2" / "vocab.json"  # of gpt2-en
    assert [line["iteration"] for line in lines if line["kind"] == "step"] == [1, 2]
    assert saved_record("out")[1]["vocab_size"] == 258
    evaluate.main("--load out --data-path data/gpt_openwebtext --device cpu".split())
    assert "validation results on data/gpt_openwebtext" in capsys.readouterr().out
    given = "--model_name_or_path gpt2-en --vocab-file v.json --merge-file m.txt --micro-batch-size 1 --lr 1".split()
    assert parse_pretrain([*given, "--train-iters", "1"]).tokenizer.tokenizer_model is None  # what is given goes first


def test_a_name_is_a_vocabulary_in_preprocessing(desk, monkeypatch, capsys):
    """--tokenizer-model without a type: that of the model's name. Without the files it says where to put them."""
    monkeypatch.setenv("MEGATRON_CACHE", str(desk / "cache"))
    common = "--input my-corpus.json --append-eod --workers 1 --output-prefix".split()
    named = [*common, "named", "--tokenizer-model", "gpt2-en"]
    with pytest.raises(DataError) as error:
        preprocess_data.main(named)
    assert f"put vocab.json and merges.txt into {desk}/cache/gpt2-en" in str(error.value)
    (desk / "cache" / "gpt2-en").mkdir(parents=True)
    for name in ("vocab.json", "merges.txt"):
        (desk / "cache" / "gpt2-en" / name).write_bytes(Path(f"gpt2-{name}").read_bytes())
    preprocess_data.main(named)
    assert np.fromfile("named_text_document.bin", np.uint16).tolist() == ids_of(TEXTS)


@pytest.mark.full
def test_a_trains_on_eight_ranks(calls, desk):
    """As printed, but for its size: fp16, recomputation, and sharding 4 x mp 2. Its data are token files here."""
    [words] = calls("A_train.sh", task_name="gpt3")
    own = behind(words, "run_pretrain_static.py")
    more = [*SMALL, *numbers_as_data(), "--save", "out", "--lr-decay-iters", "2"]
    launch = [sys.executable, "-m", "megatron.tools.launch", "--nproc-per-node", "8", str(ROOT / "pretrain_gpt.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*launch, *own, *more], capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines if line["kind"] == "step"] == [1, 2]


# B: Colossal-AI -------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_b_trains_by_zero_3_with_offload(calls, desk, capsys):
    (desk / "gpt2_configs").mkdir()
    (desk / "gpt2_configs" / "gpt2_zero3.py").write_bytes((HERE / "B_gpt2_zero3.py").read_bytes())
    [words] = calls("B_train.sh")
    translate.main(["--from", "colossalai", *words])
    text = capsys.readouterr().out
    assert 'torchrun --standalone --nproc_per_node=1 pretrain_gpt.py "${FLAGS[@]}"' in text
    flags = shlex.split(text[text.index("FLAGS=(") + 7 : text.index("\n)")], comments=True)
    at = flags.index("--train-epochs")  # SMALL says steps
    flags = flags[:at] + flags[at + 2 :]
    pretrain_gpt.main([*flags, *SMALL, *MOCK, "--fp16"])
    assert losses(capsys.readouterr().out) >= 2


def test_b_is_read_by_the_entry_as_it_is(calls, desk, capsys):
    """Its Python file and words at pretrain_gpt.py; its data, which are lines of text here, are answered with the way."""
    (desk / "gpt2_configs").mkdir()
    (desk / "gpt2_configs" / "gpt2_zero3.py").write_bytes((HERE / "B_gpt2_zero3.py").read_bytes())
    [words] = calls("B_train.sh")
    own = [*behind(words, "train_gpt.py"), *SMALL[:-1], "1", "--dataset-type", "webtext", *NUMBERS]
    own[own.index("--train-iters") : own.index("--train-iters") + 2] = []
    lines = "".join(f'{{"text": "{n} {n + 1}", "url": "u{n}"}}\n' for n in range(40))
    Path("train_data.json").write_text(lines)
    with pytest.raises(DataError, match="(?s)file, not a prefix.*--input train_data.json --output-prefix train_data "):
        pretrain_gpt.main([*own, "--data-path", "train_data.json"])
    preprocess_data.main(["--input", "train_data.json", "--output-prefix", "train_data", *NUMBERS, "--append-eod"])
    capsys.readouterr()
    pretrain_gpt.main([*own, "--data-path", "train_data_text_document", "--train-epochs", "1", "--split", "100,0,0"])
    said = capsys.readouterr()
    assert "consumed samples:           40" in said.out and "ZeRO" not in said.err
    assert "gpt2_zero3.py:7: zero.model_config.shard_strategy has no effect" in said.err
    Path("gpt2_configs/gpt2_zero3.py").write_text(
        "from colossalai.x import y\nBATCH_SIZE = 2\nif y:\n    SEQ_LEN = 3\nz = 1\n"
    )
    with pytest.raises(UsageError, match="(?s)gpt2_zero3.py:3: if y:: it would have to be run.*gpt2_zero3.py:5: z = 1"):
        pretrain_gpt.main(own)


def test_b_data_of_the_environment_are_named(calls, desk, capsys, monkeypatch):
    """`export DATA=train_data.json`, which its train_gpt.py reads: the two commands that train on it."""
    (desk / "gpt2_configs").mkdir()
    (desk / "gpt2_configs" / "gpt2_zero3.py").write_bytes((HERE / "B_gpt2_zero3.py").read_bytes())
    [words] = calls("B_train.sh")
    own = behind(words, "train_gpt.py")
    monkeypatch.setenv("DATA", "texts/train_data.json")
    parse_pretrain(own)
    told = capsys.readouterr().err
    assert "python preprocess_data.py --input texts/train_data.json --output-prefix train_data --append-eod" in told
    assert "--data-path train_data_text_document --dataset-type webtext" in told
    Path("tokens_document.idx").touch()
    monkeypatch.setenv("DATA", "tokens_document")
    parse_pretrain(own)
    assert (
        "DATA=tokens_document of the environment is not read: say --data-path tokens_document"
        in capsys.readouterr().err
    )
    parse_pretrain([*own, "--data-path", "other"])
    assert "DATA=" not in capsys.readouterr().err
    with open("gpt2_configs/gpt2_zero3.py", "a") as config:
        config.write("DATA = 'x.json'\n")
    parse_pretrain([*own, "--input_dir", "other"])
    line = len(Path("gpt2_configs/gpt2_zero3.py").read_text().splitlines())
    assert f"DATA (line {line}): --input-dir says the data" in capsys.readouterr().err
    with pytest.raises(UsageError, match=f"gpt2_zero3.py:{line}: DATA = 'x.json': lines of text become tokens first"):
        parse_pretrain(own)


@pytest.mark.sampled(5)
def test_b_ranks_by_hand_are_one_job(desk):
    """Colossal-AI's words in two shells: both have the losses of one training."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = [
        sys.executable,
        str(ROOT / "pretrain_gpt.py"),
        *SMALL[1:],
        *MOCK,
        "--micro-batch-size",
        "2",
        "--lr",
        "1e-3",
    ]
    words = [*common, "--world_size", "2", "--host", "127.0.0.1", "--port", port, "--global-batch-size", "8"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen([*words, "--rank", str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
        for rank in (0, 1)
    ]
    first, second = (one.communicate(timeout=120)[0] for one in started)
    assert [one.returncode for one in started] == [0, 0]
    assert "using world size: 2" in first and losses(first) >= 2 and losses(second) == 0


def test_b_web_pages_are_translated(capsys):
    """Seven commands, each one of ours with the same words. They are run in test_webtext_flow.py."""
    translate.main(["--from", "colossalai", str(HERE / "B_webtext.sh")])
    said = [line for line in capsys.readouterr().out.splitlines() if line[:1] not in ("#", "")]
    printed = (HERE / "B_webtext.sh").read_text().splitlines()
    assert len(said) == len(printed) == 7
    for ours, theirs in zip(said, printed, strict=True):
        name, *words = shlex.split(theirs.removeprefix("python ").replace("<", "").replace(">", ""))
        module = "shuf" if name == "shuf" else f"openwebtext.{Path(name).stem}"
        assert shlex.split(ours.replace("<", "").replace(">", "")) == [
            "python",
            "-m",
            f"megatron.tools.{module}",
            *words,
        ]


# D: PAI ---------------------------------------------------------------------------------------------------------------


def test_d_corpus(calls, desk, capsys):
    [words] = calls("D_corpus.sh")
    preprocess_data.main(behind(words, "preprocess_data.py"))
    assert np.fromfile("my-gpt2_text_document.bin", np.uint16).tolist() == ids_of(TEXTS)
    said = capsys.readouterr().out
    for line in ("Opening my-corpus.json", "> building GPT2BPETokenizer tokenizer ...", "Output prefix: my-gpt2"):
        assert line in said


SHIM = """#!/bin/bash
# what `python` of the page is: the extractor has run, the tools are this suite's
for word in "$@"; do case $word in
    wikiextractor.WikiExtractor) exit 0 ;;
    */preprocess_data.py | */merge_datasets.py) program=${word##*/} ;;
    *) [[ $program ]] && words+=("$word") ;;
esac; done
exec @PYTHON@ "@ROOT@/$program" "${words[@]}"
"""


def test_d_wiki_by_bash(desk):
    """The page's pipeline as it is printed, pipes and xargs included. Its fifth step names folders that are not there."""
    for name, texts in (("AA/wiki_00", TEXTS[:2]), ("AB/wiki_01", TEXTS[2:])):
        (desk / "text" / name).parent.mkdir(parents=True)
        (desk / "text" / name).write_text("".join(json.dumps(dict(text=text)) + "\n" for text in texts))
    (desk / "bin").mkdir()
    shim = SHIM.replace("@PYTHON@", shlex.quote(sys.executable)).replace("@ROOT@", str(ROOT))
    (desk / "bin" / "python").write_text(shim)
    (desk / "bin" / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{desk}/bin:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", str(HERE / "D_wiki.sh")], capture_output=True, text=True, env=environment, timeout=120
    )
    assert np.fromfile("datasets/text/AB/wiki_01_text_document.bin", np.uint16).tolist() == ids_of(TEXTS[2:])
    assert "cannot create regular file" in done.stderr  # of the page's own `cp`
    assert done.returncode == DataError.code and "error: nothing to merge in flatten_datasets/" in done.stderr
    # Needs no step 5
    merge_datasets.main(["--output-prefix", "./enwiki-latest-pages-articles", "--input", "datasets/"])
    assert np.fromfile("enwiki-latest-pages-articles.bin", np.uint16).tolist() == ids_of(TEXTS)


@pytest.fixture
def llmacc(calls):
    """`llmacc("D_llmacc.sh")`: the words behind `-m llmacc.pretrain` of each command of a file."""
    environment = dict(WORLD_SIZE="2", RANK="0", MASTER_ADDR="localhost", MASTER_PORT="1")
    return lambda name: [behind(words, "llmacc.pretrain") for words in calls(name, **environment)]


def test_d_llmacc_plans(llmacc, capsys):
    """`# megatron arguments` stand for a model; for bash the second command ends in the comment behind its third word."""
    _, own = llmacc("D_llmacc.sh")
    assert own[-2:] == ["--world-size", "64"]
    rest = "--local-world-size 8 --max-global-batch-size 64 --num-layers 2 --hidden-size 64 --num-attention-heads 2"
    searched_pretrain.main([*own, *rest.split(), "--vocab-size", "50257", "--device-name", "A100-80GB"], env={})
    assert "64" in capsys.readouterr().out


@pytest.mark.full
def test_d_llmacc_trains(llmacc, desk, capsys):
    own, _ = llmacc("D_llmacc.sh")
    searched_pretrain.main([*own, *"--lr 1e-3 --micro-batch-size 1".split(), *SMALL, *MOCK], env={})
    assert losses(capsys.readouterr().out) >= 2


def texts_as_data() -> list[str]:
    """Token files of TEXTS, and the flags that name them and their vocabulary."""
    Path("c.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in TEXTS * 40))
    vocabulary = "--vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt".split()
    preprocess_data.main(["--input", "c.jsonl", "--output-prefix", "c", *vocabulary, "--append-eod"])
    return [*vocabulary, "--data-path", "c_text_document"]


def test_d_gpt22b_is_planned(llmacc, desk, capsys):
    [own] = llmacc("D_gpt22b.sh")
    cluster = "--world-size 16 --local-world-size 8 --device-name A100-80GB --dry-run --bf16 --tp 8 --pp 2".split()
    given = [word for word in own if word not in ("--max-global-batch-size", "32")] + ["--global-batch-size", "32"]
    pretrain_gpt.main([*given[2:], "--then", *texts_as_data(), *cluster])
    assert "48 layers" in capsys.readouterr().out


@pytest.mark.full
def test_d_gpt22b_searches_and_trains(llmacc, desk, capsys):
    [own] = llmacc("D_gpt22b.sh")
    cluster = "--world-size 16 --local-world-size 8 --device-name A100-80GB --dry-run --bf16".split()
    searched_pretrain.main([*own, "--then", *texts_as_data(), *cluster], env={})
    assert "48 layers" in capsys.readouterr().out
    more = [*SMALL, *texts_as_data(), "--lr-decay-iters", "2", "--max-global-batch-size", "2"]
    searched_pretrain.main([*own, *more], env={})
    assert losses(capsys.readouterr().out) >= 2


def test_d_parameters_are_answered_each(capsys):
    with pytest.raises(UsageError, match="--global batch size: no flag that is known"):
        translate.main(["--from", "llmacc", str(HERE / "D_parameters.txt")])
    said = capsys.readouterr().out
    for number, line in enumerate((HERE / "D_parameters.txt").read_text().splitlines(), 1):
        assert f"D_parameters.txt:{number}: {line}" in said


# E: PaddleFleetX ------------------------------------------------------------------------------------------------------


def test_e_config_trains(desk, capsys):
    given = ["-c", str(HERE / "E_config.yaml"), "-o", "Global.device=cpu", "-o", "Engine.mix_precision.enable=False"]
    pretrain_gpt.main([*given, *SMALL, *MOCK, "--save", "out"])
    assert losses(capsys.readouterr().out) >= 2
    assert "iter_0000002" in os.listdir("out")


@pytest.mark.parametrize(
    "model, gigabytes", [("use_recompute=False", 30.9), ("hidden_size=2048", 26.0)], ids=["345M", "1.3B recomputed"]
)
def test_e_config_takes_the_documented_memory(model, gigabytes, capsys):
    """Of a V100, by the dry run's own table. FleetX's softmax stores scores, it keeps gradients in fp16 (as weights are),
    and it says what was allocated: no driver, no fragmentation.
    """
    given = [f"Model.{model}", "Model.fused_softmax_with_triangular=False"]
    given += ["Global.local_batch_size=8", "Global.micro_batch_size=8"]
    words = [word for one in given for word in ("-o", one)]
    pretrain_gpt.main(
        ["-c", str(HERE / "E_config.yaml"), *words, "--mock-data", "--dry-run", "--device-memory-gb", "40"]
    )
    said = capsys.readouterr().out
    table = dict(re.findall(r"^([a-z][a-z ]+?)  +([\d.]+ [GMk]B)$", said, re.M))
    sizes = {name: float(size.split()[0]) * dict(GB=1, MB=1e-3, kB=1e-6)[size[-2:]] for name, size in table.items()}
    other = sizes["device context"] + sizes["fragmentation"] + sizes["gradients"] - sizes["weights"]
    assert sizes["total"] - other == pytest.approx(gigabytes, rel=0.1), said


@pytest.mark.parametrize("name", [path.name for path in SCRIPTS if "PaddleFleetX's:" in path.read_text()] + DIFFER)
def test_scripts_of_other_recipes_say_so_first(name):
    """A script that has the name of PaddleFleetX's, and another recipe, under every name of it."""
    environment = {**os.environ, "PRINT": "1", "PYTHON": sys.executable}
    words = ["SST2"] if "finetune" in name else ["--mock-data"]
    done = subprocess.run(["bash", ROOT / "scripts" / name, *words], capture_output=True, text=True, env=environment)
    head = (ROOT / "scripts" / name).read_text()
    if "PaddleFleetX's:" in head:
        difference = "Learning rate, batch and precision are this suite's. PaddleFleetX's: python pretrain_gpt.py -c "
        assert f"ppfleetx/configs/nlp/gpt/{head.split('configs/nlp/gpt/')[1].split()[0]}\n" in done.stderr
    else:
        difference = "Differs: "
    assert done.returncode == 0 and done.stderr.startswith(f"note: {name}: {difference}"), done.stderr
    assert done.stderr.count("note: ") == 1


@pytest.mark.parametrize("name", (HERE / "E_scripts.txt").read_text().split())
def test_e_scripts_are_there(name):
    """A script of the same name: it starts what its name says (shown, not run), or says that it cannot."""
    script = ROOT / "scripts" / name
    text = script.read_text()
    if "finetune" in name:
        environment = {**os.environ, "PRINT": "1", "PYTHON": sys.executable}
        command = ["bash", str(script), "SST2", "--mock-data"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 0 and "megatron.tasks.main --task SST2" in done.stdout, done.stderr
        return
    if "# Another name for" in text:
        script = ROOT / "scripts" / text.split("# Another name for ")[1].split(".sh")[0].strip()
        script = script.with_name(f"{script.name}.sh")
    assert script.is_file()
    environment = {**os.environ, "PRINT": "1", "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / name), "--mock-data"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0 and ("pretrain_gpt.py" in done.stdout or "megatron.tools" in done.stdout), done.stderr
