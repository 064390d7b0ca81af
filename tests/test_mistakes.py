# SPDX-License-Identifier: Apache-2.0
"""What users get wrong, and what they read then: one message that says what, where and what to do, and an exit code.

The table is the test. Each row runs a command as `run_main` does, in this process for speed, in a folder with good and
bad files (see `messy`); further down, a few real processes show that a shell sees the same.
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest

import merge_datasets
import preprocess_data
import pretrain_gpt
from megatron import errors
from megatron.data.indexed import write_index
from megatron.data.json_input import find_sources
from megatron.errors import DataError, SettingsError, explain, no_such_file, run_main
from megatron.model.lora import with_adapters
from megatron.settings.parse import parse_pretrain
from megatron.tools import (
    checkpoint,
    create_pretraining_data,
    dump_samples,
    evaluate,
    generate,
    get_sample_data,
    report,
    supervise,
    train_tokenizer,
    verify_layout,
)
from megatron.training.datasets import build_vocabulary
from megatron.training.rules import resolve

VOC = "--vocab-file vocab.json --merge-file merges.txt"
NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 1000"
MODEL = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --device cpu"
STEPS = f"{MODEL} --lr 1e-2 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 0 --num-workers 0"
MOCK = f"{STEPS} --mock-data --vocab-size 100"
REAL = f"{STEPS} {VOC} --split 100"
CREATE = f"--input_path corpus.jsonl --output_prefix out/x --tokenizer_name GPTTokenizer {VOC}"
PRE = f"--input corpus.jsonl --output-prefix out/x {VOC}"
COMMANDS = {
    "pretrain_gpt": pretrain_gpt.main,
    "preprocess_data": preprocess_data.main,
    "merge_datasets": merge_datasets.main,
    **{
        tool.__name__.rpartition(".")[2]: tool.main
        for tool in (
            checkpoint,
            create_pretraining_data,
            dump_samples,
            evaluate,
            generate,
            get_sample_data,
            report,
            supervise,
            train_tokenizer,
            verify_layout,
        )
    },
}

USAGE = [  # exit code 2: the command line cannot be understood
    (
        "pretrain_gpt",
        "--mock-data --load ck-hf-weights",
        "--load ck-hf-weights: ck-hf-weights is in Hugging Face's format; convert it with python -m "
        "megatron.tools.checkpoint from-hf ck-hf-weights OUT, then --load OUT --finetune",
    ),
    ("pretrain_gpt", "", "missing: --num-layers, --hidden-size, --num-attention-heads (or a whole shape:"),
    ("pretrain_gpt", "--load ck --lr 1 --train-iters 1", "missing: --num-layers|--finetune for a new run with its"),
    (
        "pretrain_gpt",
        f"{MOCK} --num-layer 2",
        "unknown flag --num-layer; did you mean --num-layers or --mtp-num-layers?",
    ),
    ("pretrain_gpt", f"{MOCK} --lr-decay-style cosin", "inverse-square-root, WSD, none; did you mean cosine?"),
    ("pretrain_gpt", f"{MOCK} --lr-decay-style wds", "did you mean WSD?"),
    ("pretrain_gpt", f"{MOCK} --model-name-or-path gpt2-medum", "did you mean gpt2-medium?"),
    ("pretrain_gpt", f"{MOCK} --num-layers", "--num-layers takes one value (a whole number), got none"),
    ("pretrain_gpt", f"{MOCK} --num-layers two", "--num-layers 'two' is not a whole number"),
    ("pretrain_gpt", f"{MOCK} --lr nan", "--lr 'nan' is not a finite number"),
    ("pretrain_gpt", f"{MOCK} --clip-grad inf", "--clip-grad 'inf' is not a finite number"),
    ("pretrain_gpt", f"{MOCK} --lr 1e-3x", "--lr '1e-3x' is not a number"),
    ("pretrain_gpt", f"{MOCK} --hidden-size=", "--hidden-size is empty (a shell variable that is not set?)"),
    (
        "pretrain_gpt",
        f"{MOCK} \u2014lr 3",
        "'\u2014lr' begins with a typographic dash, as copied from a web page; type --lr",
    ),
    ("pretrain_gpt", f"{MOCK} ' '", "a blank word: is there a space after a backslash at the end of a line?"),
    ("pretrain_gpt", f"{MOCK} '--lr 3'", "unknown flag --lr 3; did you mean --lr?"),
    ("pretrain_gpt", f"{MOCK} --bf16 --fp16", "--bf16 and --fp16 contradict each other (both set --precision)"),
    ("pretrain_gpt", f"{MOCK} --precision fp8", "--precision 'fp8' is none of auto, fp32, bf16, fp16"),
    ("pretrain_gpt", f"{MOCK} --device gpu:0", "--device 'gpu:0' is none of auto, cpu, cuda"),
    ("pretrain_gpt", f"{MOCK} --model-name-or-path gpt5", "gpt5: neither a folder nor a known shape (gpt2-small,"),
    ("pretrain_gpt", f"{MOCK} --config nope.yaml", "--config nope.yaml: no such file"),
    ("pretrain_gpt", f"{MOCK} --config indented.yaml", "indented.yaml:2: not YAML: this line is not indented"),
    (
        "pretrain_gpt",
        f"{MOCK} --config misspelled.yaml",
        "misspelled.yaml:1: unknown key num_layer; did you mean num_la",
    ),
    ("pretrain_gpt", f"{MOCK} --config twice.yaml", "twice.yaml:2: num_layers is given twice (also in line 1)"),
    ("pretrain_gpt", f"{MOCK} --config list.yaml", "list.yaml: expected lines of `key: value`"),
    ("pretrain_gpt", f"{MOCK} --override colour --load ck", "--override colour: this setting needs no override, or"),
    (
        "pretrain_gpt",
        "--mock-data --load ck-megatron --use-checkpoint-args",
        "ck-megatron/iter_0000100 is in Megatron-LM's own format",
    ),
    ("preprocess_data", "", "missing: --input, --output-prefix"),
    ("preprocess_data", f"{PRE} --worker 3", "unknown flag --worker; did you mean --workers?"),
    ("preprocess_data", f"{PRE} --num-layers 3", "--num-layers is a setting of pretraining; this command has no use"),
    ("preprocess_data", f"{PRE} --tokenizer-type BertWordPiece", "is none of GPT2BPETokenizer, HuggingFace"),
    ("preprocess_data", f"{PRE} --input ''", "--input is empty (a shell variable that is not set?)"),
    ("create_pretraining_data", "--model_name gpt2-en", "missing: --input, --output-prefix"),
    ("create_pretraining_data", f"{CREATE} --cn_seg_func pkuseg", "--cn-seg-func 'pkuseg' is none of jieba, lac, seg"),
    ("merge_datasets", "--input tokens --output-prefix out/x --output-format numpy", "is none of megatron, paddle"),
    ("merge_datasets", "", "missing: --input, --output-prefix"),
    ("dump_samples", "--data-path tokens --seq-length 16", "missing: --train-samples"),
    ("evaluate", "", "missing: --load|--load-exported"),
    (
        "evaluate",
        "--load ck --data-path tokens --hidden-dropout 0",
        "--hidden-dropout is a setting of pretraining; leave it out: it is read from the checkpoint",
    ),
    ("generate", "--load ck", "there is no text to continue"),
    (
        "generate",
        "--load ck --prompts-file nope",
        "unknown flag --prompts-file; did you mean --prompt-file or --prompts?",
    ),
    (
        "checkpoint",
        "inspekt ck",
        "'inspekt' is not a command; there are: inspect, verify, repair, diff, reshard, prune",
    ),
    ("checkpoint", "inspect", "inspect takes PATH; got nothing"),
    ("checkpoint", "reshard ck new", "say what the new files are"),
    ("supervise", "", "the command to supervise is missing"),
    (
        "verify_layout",
        "-- python -m pretrain_gpt --bf16",
        "takes the flags alone: leave '-- python -m pretrain_gpt' out",
    ),
]
SETTINGS = [  # exit code 3: understood, and cannot work
    ("create_pretraining_data", f"{CREATE} --cn_splited", "has no use without --cn-whole-word-segment"),
    ("create_pretraining_data", f"{CREATE} --cn_whole_word_segment", "needs a WordPiece vocabulary"),
    ("create_pretraining_data", "--input corpus.jsonl --output-prefix out/x", "no tokenizer is given"),
    (
        "pretrain_gpt",
        MODEL + " --mock-data --vocab-size 9",
        "2 settings cannot work:|the length of training is missing",
    ),
    (
        "pretrain_gpt",
        f"{MOCK} --hidden-size 30",
        "--hidden-size 30 is not a multiple of --num-attention-heads 4; nearest",
    ),
    (
        "pretrain_gpt",
        f"{MOCK} --global-batch-size 5",
        "--global-batch-size 5 is not a multiple of --micro-batch-size 2",
    ),
    ("pretrain_gpt", f"{MOCK} --tp 2", "--tp 2: 2 ranks are needed, and this process is alone"),
    ("pretrain_gpt", f"{MOCK} --lr 0", "--lr 0.0 must be above 0"),
    (
        "pretrain_gpt",
        f"{MOCK} --use-recompute --no-recompute-layers first --dry-run",
        "--no-recompute-layers first must be numbers",
    ),
    ("pretrain_gpt", f"{MOCK} --min-lr 1", "--min-lr 1 must lie between 0 and --lr 0.01"),
    ("pretrain_gpt", f"{MOCK} --lr-warmup-fraction 2", "--lr-warmup-fraction 2.0 must be at least 0 and below 1"),
    ("pretrain_gpt", f"{MOCK} --lr-warmup-iters 10", "warm-up of 10 iters is not shorter than the decay length of 4"),
    ("pretrain_gpt", f"{MOCK} --train-samples 100", "--train-iters 4 and --train-samples 100: give one of them"),
    ("pretrain_gpt", f"{MOCK} --rampup-batch-size 2 2", "expected START INCREMENT SAMPLES, three numbers above zero"),
    ("pretrain_gpt", f"{MOCK} --rampup-batch-size 2 2 100", "needs --train-samples instead of --train-iters"),
    ("pretrain_gpt", f"{MOCK} --step-batch-size-schedule 0:2,1Q:4", "'1Q' is not a number, such as 0, 250000 or 1.5B"),
    ("pretrain_gpt", f"{MOCK} --rampup-batch-size 8 2 100", "start 8 is above --global-batch-size 4"),
    (
        "pretrain_gpt",
        f"{MOCK} --seq-length 32 --max-position-embeddings 16",
        "--seq-length 32 is longer than --max-pos",
    ),
    ("pretrain_gpt", f"{MOCK} --save-interval 2", "--save-interval needs --save: there is no folder to save into"),
    ("pretrain_gpt", f"{MOCK} --data-path tokens", "--mock-data reads no files, and files are given (--data-path)"),
    ("pretrain_gpt", STEPS, "no data is given; --data-path PREFIX"),
    (
        "pretrain_gpt",
        f"{STEPS} --data-path tokens",
        "no vocabulary is given; --vocab-file vocab.json --merge-file merg",
    ),
    (
        "pretrain_gpt",
        f"{STEPS} --data-path tokens --load ck --finetune",
        "no vocabulary is given|or that of ck: its shape and vocabulary are taken where no size of the model is given",
    ),
    ("evaluate", "--load ck --data-path numbers --seq-length 99", "the model can look at 16 tokens|-> give 16 or less"),
    ("pretrain_gpt", f"{REAL} --data-path 0.5 tokens 0.5", "these are neither pairs of weight and prefix nor pref"),
    ("pretrain_gpt", f"{REAL} --data-path -1 tokens", "weight -1 of tokens; weights are above zero"),
    (
        "pretrain_gpt",
        f"{REAL} --data-path tokens --split 0,1",
        "--split 0,1 leaves nothing to train on; raise its first",
    ),
    ("pretrain_gpt", f"{REAL} --data-path tokens --vocab-size 9", "--vocab-size 9 is smaller than the tokenizer's 300"),
    (
        "pretrain_gpt",
        f"{MOCK} --load ck --hidden-size 64",
        "the checkpoint is of another model than the settings|--hidden",
    ),
    ("pretrain_gpt", f"{MOCK} --load ck --seed 5", "--seed: 1234 in the checkpoint, 5 now|--override seed"),
    (
        "pretrain_gpt",
        f"{MOCK} --load ck --seq-length 8",
        "max-position-embeddings: 16 in the checkpoint, 8 now, as --seq-length 8 is given|add --max-position-embeddings 16",
    ),
    (
        "pretrain_gpt",
        f"{STEPS} --data-path tokens --vocab-file merges.txt",
        "--vocab-file merges.txt: of which kind? Add --merge-file merges.txt (byte-level BPE), or --tokenizer-type Bert",
    ),
    ("pretrain_gpt", f"{MOCK} --recompute-method block", "--recompute-method block: goes with|is not given; add it"),
    ("preprocess_data", "--input corpus.jsonl --output-prefix out/x", "no tokenizer is given"),
    ("preprocess_data", f"{PRE} --workers 0", "--workers 0: at least 1 is needed"),
    ("train_tokenizer", "--input corpus.jsonl --vocab-size 10 --output out", "--vocab-size 10 is too small|258"),
    ("get_sample_data", "--output out/s.jsonl --kinds poems", "--kinds poems: unknown"),
    ("dump_samples", "--data-path tokens --seq-length 16 --train-samples 9 --text", "--text needs a tokenizer"),
    (
        "dump_samples",
        "--data-path tokens --seq-length 16 --train-samples 9 --first -2",
        "--first -2: has to be 0 or more",
    ),
    ("generate", "--load ck --prompt 5 --temperature -1", "--temperature -1.0: has to be 0 (always the most likely"),
    ("generate", "--load ck --prompt 5 --tokens-to-generate 0", "--tokens-to-generate 0: has to be at least 1"),
]
DATA = [  # exit code 4: data or vocabulary missing or damaged
    ("pretrain_gpt", f"{REAL} --input_dir folder", "no token files in the folder folder"),
    ("pretrain_gpt", f"{REAL} --input_dir alone", "alone/b.bin has no b.idx next to it"),
    (
        "create_pretraining_data",
        "--input corpus.jsonl --output-prefix out/x --tokenizer_name GPTTokenizer --model_name gpt2-none",
        "there is no vocabulary 'gpt2-none'|nothing is downloaded|put vocab.json and merges.txt into",
    ),
    ("create_pretraining_data", f"{CREATE} --json_key body", "no text in corpus.jsonl|no key 'body'"),
    ("preprocess_data", f"{PRE} --input nope.jsonl", "--input nope.jsonl: no such file"),
    ("preprocess_data", f"{PRE} --input 'nope*.jsonl'", "--input nope*.jsonl: no such file"),
    ("preprocess_data", f"{PRE} --input empty.jsonl", "no text in empty.jsonl|0 lines, 0 rejected"),
    ("preprocess_data", f"{PRE} --input folder", "--input folder: the folder holds no JSON lines"),
    ("preprocess_data", f"{PRE} --json-keys content", "the first: corpus.jsonl, line 1: no key 'content' (keys: text)"),
    (
        "preprocess_data",
        f"{PRE} --input twice.yaml",
        "2 rejected; the first: twice.yaml, line 1: not JSON|ends in .txt",
    ),
    ("preprocess_data", f"{PRE} --input cut.jsonl.gz", "cut.jsonl.gz: the compressed data is damaged or cut short"),
    (
        "preprocess_data",
        f"{PRE} --input bad.jsonl --on-bad-line stop",
        "bad.jsonl, line 2: not JSON|nothing was written",
    ),
    ("preprocess_data", f"{PRE} --vocab-file nope", "--vocab-file nope: no such file"),
    ("preprocess_data", f"{PRE} --vocab-file merges.txt", "--vocab-file merges.txt: not JSON"),
    ("preprocess_data", f"{PRE} --merge-file vocab.json", "--merge-file vocab.json: not a list of merges|line 1 is"),
    ("preprocess_data", f"{PRE} --vocab-file other.json", "merges.txt does not belong to other.json"),
    (
        "preprocess_data",
        "--input corpus.jsonl --output-prefix x --tokenizer-type HuggingFaceTokenizer --tokenizer-model gpt2",
        "there is no vocabulary 'gpt2'|nothing is downloaded|put tokenizer.json into no-cache/gpt2",
    ),
    ("train_tokenizer", "--input empty.jsonl --vocab-size 300 --output out", "no pair of bytes occurs 2 times"),
    ("merge_datasets", "--input nope --output-prefix out/m", "nope.idx: no such file"),
    ("merge_datasets", "--input folder --output-prefix out/m", "nothing to merge in folder"),
    ("merge_datasets", "--input tokens --output-prefix tokens", "nothing to merge in tokens|it is the --output-prefix"),
    ("merge_datasets", "--input alone --output-prefix out/m", "alone/b.bin has no b.idx next to it"),
    ("pretrain_gpt", f"{REAL} --data-path nope", "nope.idx: no such file|a prefix is the path without .bin/.idx"),
    ("pretrain_gpt", f"{REAL} --data-path far/away", "far/away.idx: no such file|there is no folder far"),
    (
        "pretrain_gpt",
        f"{REAL} --data-path corpus.jsonl",
        "corpus.jsonl is a file, not a prefix of token files|preprocess_data.py --input",
    ),
    ("pretrain_gpt", f"{REAL} --data-path tok", "tok.idx: no such file|there is: tokens"),
    ("pretrain_gpt", f"{REAL} --data-path cut", "cut.bin holds 20 tokens, its .idx describes 400"),
    ("pretrain_gpt", f"{REAL} --data-path swapped", "swapped.bin holds 400 tokens, its .idx describes 3"),
    ("pretrain_gpt", f"{REAL} --data-path text", "text.idx: not a Megatron .idx file"),
    ("pretrain_gpt", f"{REAL} --data-path tokens --split 969,30,1 --eval-iters 1", "--split leaves nothing for"),
    (
        "pretrain_gpt",
        f"{REAL} --data-path foreign",
        "foreign was made with another vocabulary|GPT2BPETokenizer with 7 ids",
    ),
    (
        "pretrain_gpt",
        f"{STEPS} --split 100 --tokenizer-type NullTokenizer --vocab-size 50 --data-path tokens",
        "tokens.bin holds token|outside of the vocabulary of 51|which starts in document",
    ),
    ("pretrain_gpt", f"{STEPS} {NUMBERS} --split 100 --data-path empty", "empty: has no tokens"),
    ("dump_samples", "--data-path nope --seq-length 16 --train-samples 10", "nope.idx: no such file"),
    (
        "dump_samples",
        f"--data-path foreign --seq-length 16 --train-samples 10 --text {VOC}",
        "foreign was made with another vocabulary",
    ),
    ("evaluate", "--load ck --data-path nope", "nope.idx: no such file"),
    ("evaluate", "--load ck --data-path tokens", "tokens holds token|the model knows ids below 101"),
    ("evaluate", "--load ck --task WIKITEXT103 --valid-data nope", "--valid-data nope: no such file"),
    ("evaluate", "--load ck --task WIKITEXT2 --valid-data latin1.txt", "latin1.txt: 'utf-8' codec|check --valid-data"),
    ("evaluate", "--load ck --task WIKITEXT2 --valid-data empty.jsonl", "empty.jsonl holds fewer than two words"),
    (
        "pretrain_gpt",
        f"{STEPS} --mock-data --vocab-size 500 --tokenizer-model nope.json",
        "--tokenizer-model nope.json: no such file",
    ),
    (
        "generate",
        "--load ck --prompt hello",
        "NullTokenizer: the text is not numbers|--tokenizer-model, or --vocab-file",
    ),
    ("generate", "--load ck --prompt-file nope", "--prompt-file nope: no such file"),
    ("report", "--run nope --output out/r.html", "nope: no such file or folder|-> name the --save folders of runs"),
    ("report", "--run folder --output out/r.html", "folder: no metrics.jsonl in it|-> name the --save folders of runs"),
    ("create_pretraining_data", "--input corpus.jsonl --output-prefix out/x --model-name gpt2", "~/.cache/ppfleetx"),
    ("report", "--run empty.jsonl --output out/r.html", "empty.jsonl: holds no training step yet"),
]
CHECKPOINTS = [  # exit code 5
    ("pretrain_gpt", f"{MOCK} --load nope", "nope holds no checkpoint|there is no such folder|--auto-resume"),
    ("pretrain_gpt", f"{MOCK} --load folder", "folder holds no checkpoint|check --load"),
    (
        "pretrain_gpt",
        f"{MOCK} --load ck --ckpt-step 3",
        "ck has no checkpoint of iteration 3|it has: 2, 4|give one of these",
    ),
    ("pretrain_gpt", f"{MOCK} --load ck-damaged", "holds no valid checkpoint|has 1,000 bytes instead of"),
    ("pretrain_gpt", f"{MOCK} --load ck-no-index", "holds no valid checkpoint|index.json cannot be read"),
    ("pretrain_gpt", f"{MOCK} --load ck-megatron", "is in Megatron-LM's own format|checkpoint from-megatron"),
    ("pretrain_gpt", f"{MOCK} --load ck-dcp", "is in torch's distributed format|checkpoint from-megatron"),
    ("checkpoint", "verify corpus.jsonl", "corpus.jsonl holds no checkpoint|it is a file, and no folder"),
    ("pretrain_gpt", f"{MOCK} --load ck-hf", "is a model of Hugging Face transformers|checkpoint from-hf ck-hf OUT"),
    (
        "pretrain_gpt",
        f"{MOCK} --save of/hf",
        "--save of/hf holds a model of Hugging Face transformers|folder of its own",
    ),
    ("pretrain_gpt", f"{MOCK} --save ck --save-copy of/peft", "--save-copy of/peft holds adapters of PEFT"),
    ("pretrain_gpt", f"{MOCK} --save of/export --dry-run", "--save of/export holds an export"),
    ("pretrain_gpt", f"{MOCK} --save of/megatron", "--save of/megatron holds checkpoints of Megatron-LM"),
    (
        "pretrain_gpt",
        f"{MOCK} --save ck --train-iters 3",
        "--save ck holds checkpoints of another run, up to iteration 4",
    ),
    (
        "pretrain_gpt",
        f"{MOCK} --load ck --save ck --finetune",
        "--save ck holds checkpoints, up to iteration 4, and --fine",
    ),
    ("pretrain_gpt", f"{MOCK} --pretrained-checkpoint nope", "--pretrained-checkpoint nope holds no checkpoint"),
    (
        "pretrain_gpt",
        f"{MOCK} --pretrained-checkpoint ck-hf",
        "is a model of Hugging Face transformers|from-hf ck-hf OUT",
    ),
    ("evaluate", "--load nope --data-path tokens", "nope holds no checkpoint"),
    ("generate", "--load nope --prompt hello", "nope holds no checkpoint"),
    ("checkpoint", "inspect nope", "nope holds no checkpoint"),
    ("checkpoint", "verify ck-flipped", "1 problem in 2 checkpoints of ck-flipped"),
]
STORAGE = [  # exit code 6; a path below a file cannot be written, not by root either
    ("preprocess_data", f"{PRE} --output-prefix empty.jsonl/x", "cannot write empty.jsonl/x.partial: Not a directory"),
    ("merge_datasets", "--input tokens --output-prefix empty.jsonl/x", "cannot write empty.jsonl/x.partial"),
    ("get_sample_data", "--output empty.jsonl/s --kinds topics", "empty.jsonl"),
    (
        "train_tokenizer",
        "--input corpus.jsonl --vocab-size 300 --output empty.jsonl/v",
        "empty.jsonl/v: Not a directory",
    ),
    ("pretrain_gpt", f"{MOCK} --save empty.jsonl", "empty.jsonl: cannot be written"),
    ("pretrain_gpt", f"{MOCK} --metrics-file empty.jsonl/m", "empty.jsonl"),
    ("pretrain_gpt", f"{MOCK} --metrics-file /dev/full", "No space left on device|free some space"),
    ("pretrain_gpt", f"{REAL} --data-path tokens --data-cache-path empty.jsonl", "empty.jsonl: cannot keep index maps"),
    ("evaluate", "--load ck --data-path numbers --output empty.jsonl/e", "empty.jsonl is a file, not a folder"),
    ("report", "--run ck/metrics.jsonl --output empty.jsonl/r.html", "empty.jsonl"),
]
TABLE = [
    pytest.param(command, flags, code, words, id=f"{code}-{command}-{number}")
    for code, rows in ((2, USAGE), (3, SETTINGS), (4, DATA), (5, CHECKPOINTS), (6, STORAGE))
    for number, (command, flags, words) in enumerate(rows, 1)
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("command, flags, code, words", TABLE)
def test_a_mistake_is_one_message_and_an_exit_code(command, flags, code, words, messy, monkeypatch, capfd):
    monkeypatch.chdir(messy)
    monkeypatch.setenv("MEGATRON_CACHE", "no-cache")
    monkeypatch.setenv("HOME", "no-home")  # which may have a vocabulary of PaddleFleetX
    before = contents(messy)
    with pytest.raises(SystemExit) as left:
        run_main(COMMANDS[command], shlex.split(flags))
    said = capfd.readouterr().err
    assert [part for part in words.split("|") if part not in said] == [], said
    assert left.value.code == code
    assert is_one_message(said), said
    assert {path: found for path, found in contents(messy).items() if path in before} == before  # nothing is lost


@pytest.mark.parametrize("fails", [False, True])
def test_a_command_ends_without_a_last_look_for_cycles(fails):
    code = f"""import gc, weakref; from megatron.errors import run_main
class Cycle: pass
def main(argv):
    cycle = Cycle(); cycle.itself = cycle
    weakref.finalize(cycle, print, 'collected').atexit = False
    assert not {fails}
try: run_main(main, [])
finally: print(gc.get_freeze_count() > 0)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("True\n", int(fails))


def test_rows_that_no_token_has_are_told(messy, monkeypatch, capsys):
    """A script's --vocab-size beside a smaller vocabulary: by the run, and by its dry run."""
    monkeypatch.chdir(messy)
    run_main(COMMANDS["pretrain_gpt"], shlex.split(f"{REAL} --data-path tokens --vocab-size 5000 --dry-run"))
    said = " ".join(capsys.readouterr().out.split())
    assert "note: --vocab-size 5000 is larger than the vocabulary: 4700 rows of the embedding belong to none" in said
    heard = []
    config = resolve(parse_pretrain(shlex.split(f"{REAL} --data-path tokens --vocab-size 5000")), 1)
    assert build_vocabulary(config, heard.append)[1] == 5000
    assert sum("4700 rows" in line for line in heard) == 1


def is_one_message(text: str) -> bool:
    """Notes, then one error of a few lines."""
    lines = [line for line in text.splitlines() if not line.startswith("note: ")]
    return lines[0].startswith("error: ") and all(line.startswith("  ") for line in lines[1:]) and len(lines) <= 12


def contents(folder) -> dict:
    """Size of every file that a mistake must not touch: all but logs, and lists of lines that were set aside."""
    said = ("metrics.jsonl", "events.jsonl", "x.rejected.jsonl")
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file() and path.name not in said}


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    """A folder as it looks after a long week: a corpus, a vocabulary, tokens, checkpoints, and damaged ones of each."""
    folder = tmp_path_factory.mktemp("messy")
    handlers = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_texts(folder)
        train_tokenizer.main("--input corpus.jsonl --vocab-size 300 --output .".split())
        make_tokens(folder)
        make_checkpoints(folder)
    signal.signal(signal.SIGTERM, handlers)
    return folder


def make_texts(folder):
    sentences = ["the quick brown fox jumps over the lazy dog", "a stitch in time saves nine", "to be or not to be"]
    lines = [json.dumps(dict(text=" ".join(sentences[n % 3 :] + [str(n)] * 5))) for n in range(30)]
    files = {
        "corpus.jsonl": "\n".join(lines) + "\n",
        "empty.jsonl": "",
        "bad.jsonl": '{"text": "good"}\n{bad\n{"text": 5}\n',
        "other.json": '{"a": 0, "b": 1, "<|endoftext|>": 2}',
        "indented.yaml": "num_layers: 2\n  hidden_size: 3\n",
        "misspelled.yaml": "num_layer: 2\n",
        "twice.yaml": "num_layers: 2\nnum_layers: 3\n",
        "list.yaml": "- num_layers\n",
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "latin1.txt").write_bytes("a caf\u00e9 and a b\u00fccher".encode("latin-1"))
    packed = subprocess.run(["gzip", "-c", "corpus.jsonl"], cwd=folder, capture_output=True, check=True).stdout
    (folder / "cut.jsonl.gz").write_bytes(packed[:100])
    (folder / "folder").mkdir()


def make_tokens(folder):
    import numpy as np

    def write(prefix, tokens, lengths):
        np.asarray(tokens, np.uint16).tofile(f"{prefix}.bin")
        write_index(f"{prefix}.idx", np.uint16, np.asarray(lengths), np.arange(len(lengths) + 1))

    write("tokens", np.arange(400) % 290, [40] * 10)
    write("numbers", np.arange(400) % 90, [40] * 10)
    write("empty", [], [])
    write("foreign", np.arange(400) % 290, [40] * 10)
    identity = dict(type="GPT2BPETokenizer", vocab_size=7, eod=6, fingerprint="0" * 32)
    (folder / "foreign.stats.json").write_text(json.dumps(dict(tokenizer=identity)))
    write("three", [1, 2, 3], [3])
    for prefix, binary, index in (("swapped", "tokens", "three"), ("cut", "tokens", "tokens")):
        shutil.copy(f"{binary}.bin", f"{prefix}.bin")
        shutil.copy(f"{index}.idx", f"{prefix}.idx")
    os.truncate("cut.bin", 40)
    for kind in ("bin", "idx"):
        shutil.copy("corpus.jsonl", f"text.{kind}")
    (folder / "alone").mkdir()
    shutil.copy("tokens.bin", "alone/b.bin")


OF_OTHERS = {
    "hf/config.json": '{"model_type": "qwen3"}',
    "peft/adapter_config.json": "{}",
    "export/export.json": "{}",
    "megatron/latest_checkpointed_iteration.txt": "100",
    "megatron/iter_0000100/mp_rank_00/model_optim_rng.pt": "",
}


def make_checkpoints(folder):
    pretrain_gpt.main(f"{MOCK} --save ck --save-interval 2".split())
    for name in ("damaged", "no-index", "flipped"):
        shutil.copytree("ck", f"ck-{name}")
    for step in ("iter_0000002", "iter_0000004"):
        os.truncate(f"ck-damaged/{step}/shard_00000.safetensors", 1000)
        os.remove(f"ck-no-index/{step}/index.json")
    with open("ck-flipped/iter_0000004/shard_00000.safetensors", "r+b") as file:
        file.seek(-5000, os.SEEK_END)
        file.write(b"flip")
    for name, file in (
        ("ck-megatron", "iter_0000100/mp_rank_00/model_optim_rng.pt"),
        ("ck-dcp", "iter_0000100/__0_0.distcp"),
        ("ck-hf", "config.json"),
        ("ck-hf-weights", "config.json"),
        ("ck-hf-weights", "model.safetensors"),
    ):
        path = folder / name / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for name, text in OF_OTHERS.items():
        path = folder / "of" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# ---- what a shell sees ---------------------------------------------------------------------------------------------


def shell(root, folder, *command, **environment):
    """A real process in the messy folder."""
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("flags, code", [(f"{MOCK} --hidden-size 30", 3), (f"{MOCK} --num-layer 2", 2)])
def test_a_process_ends_with_the_code_and_says_nothing_else(flags, code, root, messy):
    done = shell(root, messy, root / "pretrain_gpt.py", *flags.split())
    assert (done.returncode, done.stdout) == (code, "")
    assert is_one_message(done.stderr)


@pytest.mark.parametrize("command", [f"pretrain_gpt.py {MOCK}", "finetune.py", "-m megatron.tools.generate"])
def test_a_python_without_the_packages(command, root, messy):
    """Also where the file of the command imports them."""
    first, *words = command.split()
    done = shell(root, messy, "-S", root / first if first.endswith(".py") else first, *words)
    assert done.returncode == 3
    assert (
        re.search("the package (torch|xxhash|numpy) is missing in", done.stderr) and ".venv/bin/activate" in done.stderr
    )
    assert is_one_message(done.stderr)


@pytest.mark.sampled(2)
def test_a_rank_that_does_not_exist(root, messy):
    done = shell(root, messy, root / "pretrain_gpt.py", *MOCK.split(), RANK="5", WORLD_SIZE="2")
    assert (done.returncode, is_one_message(done.stderr)) == (3, True)
    assert "RANK=5 is not one of WORLD_SIZE=2 ranks" in done.stderr


def test_a_number_of_ranks_that_is_none(root, messy):
    done = shell(root, messy, root / "pretrain_gpt.py", *MOCK.split(), WORLD_SIZE="two")
    assert (done.returncode, is_one_message(done.stderr)) == (3, True)
    assert "WORLD_SIZE=two in the environment is not a number" in done.stderr


@pytest.mark.sampled(5)
def test_ranks_say_it_once_and_keep_their_exit_code(root, messy):
    """All ranks meet the same mistake after they have joined. torchrun's own report repeats it, with the exit codes."""
    command = "-m torch.distributed.run --standalone --nproc-per-node 2".split()
    done = shell(root, messy, *command, root / "pretrain_gpt.py", *f"{MOCK} --load nope".split())
    said, _, report = done.stderr.partition("torch.distributed.elastic.multiprocessing.errors.ChildFailedError")
    assert re.findall("^error: .*", said, re.M) == ["error: nope holds no checkpoint (rank 0)"], done.stderr
    assert said.count("Traceback") == 1  # torchrun's own
    assert set(re.findall(r"exitcode +: (-?\d+)", report)) <= {"5", "-15"}
    assert "nope holds no checkpoint" in report and "To enable traceback" not in report


def test_every_exit_code_is_documented(root):
    listed = re.findall(r"^\| (\d+) \|", (root / "docs" / "troubleshooting.md").read_text(), re.M)
    assert {str(kind.code) for kind in errors.Failure.__subclasses__()} <= set(listed)


def test_a_missing_file_gets_the_name_of_the_one_beside_it(tmp_path):
    (tmp_path / "corpus.jsonl").touch()
    (tmp_path / "vocab.json").touch()
    with pytest.raises(DataError, match=f"no such file; did you mean {tmp_path}/corpus.jsonl[?]"):
        find_sources([str(tmp_path / "corpus.json")])
    missing = explain(FileNotFoundError(2, "No such file or directory", str(tmp_path / "vocabs.json")))
    assert missing.what.endswith(f"vocabs.json: No such file or directory; did you mean {tmp_path}/vocab.json?")
    assert no_such_file(tmp_path / "other") == no_such_file(tmp_path / "gone" / "x") == "no such file"


def test_names_of_layers_in_other_libraries(tmp_path):
    """PEFT's target_modules, as words or with commas."""
    shape = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --mock-data --vocab-size 9 --lr 1 "
    flags = shape + "--micro-batch-size 1 --train-iters 1 --dry-run --lora-rank 2 --lora-target"
    with pytest.raises(SettingsError) as error:
        pretrain_gpt.main([*flags.split(), "q_proj", "down_proj"])
    said = str(error.value)
    assert (
        "'q_proj', 'down_proj' are no linear layers of this model; here it is attention.qkv, which --lora-split" in said
    )
    assert "; here it is mlp.down; each block has" in said and said.endswith(
        "attention.qkv,mlp.down --lora-split-fused"
    )
    pretrain_gpt.main([*flags.split(), "attention.qkv", "mlp.down"])
    linears = [
        with_adapters(parse_pretrain([*flags.split()[:-1], *target])).model.linear
        for target in (["--lora-target", "all-linear"], ["--lora-target", "*"], [])
    ]
    assert linears == ["*=lora"] * 3
