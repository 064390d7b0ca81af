# SPDX-License-Identifier: Apache-2.0
"""What users of T5, BERT, mixtures and their tools get wrong, and what they read then. As test_mistakes.py: the table is
the test.
"""

import json
import re
import shlex
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

import preprocess_data
import pretrain_bert
import pretrain_gpt
import pretrain_t5
from megatron.errors import SettingsError, run_main
from megatron.tools import checkpoint, dump_samples, evaluate, generate, lm_eval, tasks
from tests.test_mistakes import contents, is_one_message

TEXT = """The old man walks home slowly. A young dog follows him there! The night is cold and nobody talks. It rains.
The boy runs to the house of his father. His mother waits there with bread and milk. They eat. Then all go to sleep.
In the morning the sun is warm again. The dog barks at the door. The old man laughs. Everybody is glad.""".split("\n")
WORDS = sorted(set(re.findall(r"\w+|[^\w\s]", " ".join(TEXT).lower())))
VOC = "--tokenizer-type BertWordPieceLowerCase --vocab-file vocab.txt"
RUN = """--hidden-size 16 --num-attention-heads 2 --seq-length 32 --device cpu --num-workers 0 --precision fp32 --lr 1e-2
    --micro-batch-size 2 --global-batch-size 4 --train-iters 2 --eval-iters 0"""
MOCK = "--mock-data --vocab-size 64"
DATA = "--data-path text_text_sentence --split 1,0,0"
SHAPE = f"--encoder-num-layers 2 --decoder-seq-length 24 {RUN}"
T5, BERT = f"{SHAPE} {MOCK}", f"--num-layers 2 {RUN} {VOC} {DATA}"
READS = f"{SHAPE} {VOC} --vocab-extra-ids 20 {DATA}"
MIXED = f"{READS} --task-mixture masked=1"
FILL = "--load t5 --prompt 'the <extra_id_0>'"
PRE = f"--input text.jsonl --output-prefix out/x --workers 1 {VOC} --split-sentences"
DUMP = f"{VOC} {DATA} --train-samples 4 --model-type"
TWO = "--dry-run --world-size 2 --pipeline-model-parallel-size 2"
COMMANDS = dict(
    t5=pretrain_t5.main,
    bert=pretrain_bert.main,
    gpt=pretrain_gpt.main,
    pre=preprocess_data.main,
    checkpoint=checkpoint.main,
    dump=dump_samples.main,
    evaluate=evaluate.main,
    generate=generate.main,
    lm_eval=lm_eval.main,
    tasks=tasks.main,
)

USAGE = [  # exit code 2
    ("t5", f"{T5} --feed-forward-proj silu", "'silu' is none of gelu, relu, gated-gelu"),
    ("t5", f"{T5} --position-embedding-type alibi", "is none of learned_absolute, rope, none, relative"),
    ("t5", f"{T5} --encoder-seq-length 16", "--seq-length 32 and --encoder-seq-length 16 contradict each other"),
    ("t5", f"{T5} --encoder-tensor-model-parallel-size 2", "one size of each parallel axis"),
    ("t5", f"{T5} --num-tokentypes 2", "BERT is trained by pretrain_bert.py"),
    ("t5", f"{T5} --mask-factor 1", "vision models are not part of this suite"),
    ("t5", f"{READS} --mask-spans word", "is none of ngrams, geometric, words; did you mean words?"),
    ("t5", f"{READS} --task-mixture", "--task-mixture needs at least one value"),
    ("bert", f"{BERT} --mask-strategy 70/20/10", "'70/20/10' is none of 80/10/10, all-mask"),
    ("bert", f"{BERT} --decoder-seq-length 4", "encoder-decoders are trained by pretrain_t5.py"),
    ("gpt", f"--num-layers 2 {RUN} {MOCK} --pipeline-model-parallel-split-rank 1", "trained by pretrain_t5.py"),
    ("pre", f"{PRE} --sentence-splitter nltkk", "is none of auto, nltk, sentencex; did you mean nltk?"),
    ("dump", f"--model-type T6 {VOC} {DATA} --seq-length 32 --train-samples 4", "'T6' is none of GPT, BERT, T5"),
    ("generate", f"{FILL} --length-penalty nan", "--length-penalty 'nan' is not a finite number"),
    ("checkpoint", "to-hf t5", "to-hf takes PATH and OUT; got t5"),
    ("lm_eval", "--load t5", "missing: --tasks"),
    ("tasks", "--task CLUE-CMRD --pretrained-checkpoint bert", "there is no such task; did you mean"),
]
SETTINGS = [  # exit code 3
    ("generate", f"{FILL} --pipeline-model-parallel-size 2", "pipeline 2 = 2 ranks, and this job has 1"),
    ("t5", f"{RUN} {MOCK}", "--encoder-num-layers is missing: the number of layers of the encoder"),
    ("t5", f"--encoder-num-layers 2 --decoder-num-layers 0 {RUN} {MOCK}", "has layers of both kinds|pretrain_bert.py"),
    ("t5", f"{T5} --num-layers 3", "--num-layers 3 and --encoder-num-layers 2 are two numbers of encoder layers"),
    ("t5", f"{T5} --decoder-seq-length 0", "--decoder-seq-length 0 must be at least 1"),
    ("t5", f"{T5} --seq-length 7", "--seq-length 7 is too short for a masked sample"),
    ("t5", f"{T5} --decoder-seq-length 64 --max-position-embeddings 32", "64 is longer than --max-position-embeddings"),
    ("dump", f"{DUMP} T5 --seq-length 6", "--seq-length 6 is too short for a masked sample"),
    ("dump", f"{DUMP} BERT --seq-length 32 --mask-prob 2", "--mask-prob 2.0 must be above 0 and below 1"),
    ("t5", f"{T5} --position-embedding-type relative --relative-attention-num-buckets 3", "must be at least 4"),
    ("t5", f"{T5} --feed-forward-proj gated-gelu --swiglu", "are two activations of the MLP"),
    ("t5", f"{T5} --geglu", "--geglu: say --feed-forward-proj gated-gelu"),
    ("t5", f"{T5} --norm-position post", "--norm-position post: this model's layers are pre"),
    ("bert", f"{BERT} --norm-position sandwich", "--norm-position sandwich is for GPT; --post-norm puts"),
    ("bert", f"{BERT} --scale-embedding", "--scale-embedding: this model does not have it"),
    ("bert", f"{BERT} --disable-bias-linear --add-qkv-bias", "--add-qkv-bias: this model's attention does not have it"),
    (
        "t5",
        f"{T5} --scale-tied-output --untie-embeddings-and-output-weights",
        "--scale-tied-output is for a tied output layer",
    ),
    (
        "t5",
        f"{T5} --pipeline-model-parallel-split-rank 2 {TWO}",
        "split-rank 2: there are 2 pipeline ranks|-> give 1\n",
    ),
    ("t5", f"{T5} --pipeline-model-parallel-split-rank 1", "or raise --pipeline-model-parallel-size"),
    (
        "t5",
        f"{T5} --pipeline-model-parallel-split-rank 1 --encoder-pipeline-model-parallel-size 1 {TWO}",
        "set the same thing in two ways",
    ),
    (
        "t5",
        f"{T5} --encoder-pipeline-model-parallel-size 3 --dry-run --world-size 4",
        "gives 3 ranks to 2 encoder layers",
    ),
    ("t5", f"{T5} --pipeline-model-parallel-split-rank 1 --pipeline-stage-layers 1,3 {TWO}", "both set the layers"),
    ("t5", f"{T5} --pipeline-model-parallel-size 8 --dry-run --world-size 8", "are fewer than the 8 stages"),
    ("t5", f"{T5} --context-parallel-size 2 --dry-run --world-size 2", "needs whole sequences on each rank"),
    ("t5", f"{T5} --eval-requests r.jsonl", "a model of type T5 does not continue texts"),
    ("t5", f"{SHAPE} {VOC} {DATA}", "has no sentinels <extra_id_0> ...|--vocab-extra-ids 100"),
    ("t5", f"{READS} --mask-prob 0", "--mask-prob 0.0 must be above 0 and below 1"),
    ("t5", f"{READS} --mask-prob 0.01", "less than one token with --seq-length 32, so nothing would be masked"),
    ("t5", f"{READS} --mask-spans words --mask-prob 0.9", "that takes 27 sentinels and a decoder of 55 tokens"),
    ("t5", f"{READS} --decoder-seq-length 2", "has no room for a masked token"),
    ("t5", f"{READS} --train-epochs 2", "an epoch of masked samples has no number of samples"),
    ("t5", f"{MIXED} mood=0:mood.tsv", "the weight '0' of 'mood' is no number above 0"),
    ("t5", f"{READS} --task-mixture mood=1:mood.tsv", "has no task 'masked'"),
    ("t5", f"{MIXED} mood=1", "task 'mood' has no path"),
    ("t5", f"{MIXED} mood=1:mood.tsv mood=2:mood.tsv", "names 'mood' twice"),
    ("t5", f"{MIXED} mood=1:mood.tsv --dataloader-type cyclic", "shuffles what --task-mixture keeps in its ratio"),
    ("t5", f"{READS} --load bert", "the checkpoint is of another model|--model-type: BERT in the checkpoint, T5 now"),
    ("t5", f"{READS} --load t5 --feed-forward-proj relu", "--feed-forward-proj: gelu in the checkpoint, relu now"),
    ("t5", f"{READS} --load t5 --mask-prob 0.3", "--mask-prob: 0.15 in the checkpoint, 0.3 now|--override mask-prob"),
    ("bert", f"{BERT} --task-mixture masked=1 lm=1:mood.tsv", "cannot be called 'lm'|'lm loss' is a loss of the model"),
    ("bert", f"{BERT} --task-mixture masked=1 sop=1:mood.tsv --dry-run", "cannot be called 'sop'|give it another name"),
    ("bert", f"{BERT} --num-tokentypes 1", "need 2 token types; give 2, 0"),
    ("bert", f"{BERT} --position-embedding-type relative", "relative belongs to encoder-decoders"),
    ("bert", f"{BERT} --load bert --bert-no-binary-head", "--bert-binary-head: True in the checkpoint, False now"),
    ("dump", f"--model-type T5 {DATA} --seq-length 32 --train-samples 4", "--model-type T5 needs a tokenizer"),
    ("generate", "--load bert --prompt the", "holds a model of type BERT, which generates nothing"),
    ("generate", f"{FILL} --num-beams 0", "--num-beams 0: has to be at least 1"),
    ("generate", f"{FILL} --num-beams 4 --top-k 3", "draws nothing: --top-k 3 has no place in it"),
    ("generate", f"{FILL} --decoder-start-id 500", "--decoder-start-id 500: the model knows ids from 0 to 77"),
    ("generate", f"{FILL} --decoder-end-id -1", "--decoder-end-id -1: the model knows ids from 0 to 77"),
    ("generate", f"{FILL} --num-samples 0", "--num-samples 0: has to be at least 1"),
    ("evaluate", "--load t5 --data-path text_text_sentence", "whose samples are no rows of tokens"),
    ("checkpoint", "to-hf t5 out/a", "Hugging Face's T5 is no model of this shape"),
    ("checkpoint", "to-hf bert out/a", "Hugging Face's BERT is no model of this shape|not BERT: no --post-norm"),
    ("checkpoint", "to-megatron t5 out/a", "a model with model_type T5 is not exported to Megatron-LM"),
    ("lm_eval", "--load t5 --tasks a --limit 0", "--limit 0 has to be at least 1"),
    ("lm_eval", "--load t5 --tasks a --num-fewshot -1", "--num-fewshot -1 has to be at least 0"),
]
FILES = [  # exit code 4
    ("t5", f"{MIXED} mood=1:nowhere.tsv", "nowhere.tsv: no such file"),
    ("t5", f"{MIXED} mood=1:nowhere", "nowhere.idx: no such file"),
    ("t5", f"{MIXED} mood=1:one.tsv", "all 12 rows have the label 'good'"),
    ("t5", f"{MIXED} mood=1:none.tsv", "none.tsv has no rows"),
    (
        "t5",
        f"{MIXED} mood=1:unknown.tsv",
        "labels 'smorgen' and 'tarden' are the same tokens [1]|that the vocabulary has",
    ),
    ("t5", f"{MIXED} mood=1:long.tsv", "has 25 tokens|has room for 23 and [EOS]|--decoder-seq-length 26"),
    ("t5", f"{MIXED} mood=1:columns.tsv", "columns.tsv, line 2 lacks a text"),
    ("t5", f"{MIXED} mood=1:latin.tsv", "latin.tsv is not UTF-8"),
    ("t5", f"{MIXED} mood=1:bad.jsonl", "bad.jsonl, line 2: not JSON"),
    ("t5", f"{SHAPE} --tokenizer-type BertWordPieceLowerCase --vocab-file few.txt {DATA}", "with another vocabulary"),
    (
        "bert",
        f"--num-layers 2 {RUN} {VOC} --data-path text_text_document --split 1,0,0",
        "was not split into sentences",
    ),
    ("pre", f"{PRE} --lang klingon", "--lang klingon: there are no rules for sentences"),
    ("generate", f"--load t5 --prompt '{'the old man ' * 12}'", "source 1 has 36 tokens; the encoder can look at 32"),
    ("lm_eval", "--load t5 --tasks nowhere.yaml", "--tasks nowhere.yaml: no such file"),
    ("lm_eval", "--load t5 --tasks a,nowhere.yaml", "--tasks nowhere.yaml: no such file"),
]
CHECKPOINTS = [  # exit code 5
    ("t5", f"{READS} --load hf", "hf is a model of Hugging Face transformers|from-hf hf OUT"),
    ("generate", "--load nowhere --prompt the", "nowhere holds no checkpoint"),
    ("generate", f"{FILL} --ckpt-step 9", "t5 has no checkpoint of iteration 9"),
    ("checkpoint", "from-hf hf out/a", "model_type 'mt5' in config.json is not read here"),
    ("checkpoint", "from-hf nowhere out/a", "nowhere: no such folder"),
]
TABLE = [
    pytest.param(command, flags, code, words, id=f"{code}-{command}-{number}")
    for code, rows in ((2, USAGE), (3, SETTINGS), (4, FILES), (5, CHECKPOINTS))
    for number, (command, flags, words) in enumerate(rows, 1)
]


@pytest.fixture(scope="module")
def messy(tmp_path_factory):
    """A vocabulary, sentences, labelled texts, checkpoints of T5 and BERT; and damaged files of each."""
    folder = tmp_path_factory.mktemp("masked")
    files = {
        "vocab.txt": "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n",
        "few.txt": "\n".join(["[UNK]", *WORDS]) + "\n",
        "text.jsonl": "".join(json.dumps(dict(text=text)) + "\n" for text in TEXT * 4),
        "mood.tsv": "text\tlabel\n" + "".join(f"{text}\t{number % 2}\n" for number, text in enumerate(TEXT * 4)),
        "one.tsv": "text\tlabel\n" + "".join(f"{text}\tgood\n" for text in TEXT * 4),
        "none.tsv": "text\tlabel\n",
        "unknown.tsv": "text\tlabel\nIt rains.\tsmorgen\nThe sun is warm.\ttarden\n",
        "long.tsv": "text\tlabel\n" + "".join(f"It rains.\t{'the ' * 24}{end}\n" for end in ("man", "dog")),
        "columns.tsv": "body\tmood\nIt rains.\tbad\n",
        "bad.jsonl": '{"text": "It rains.", "label": "bad"}\n{broken\n',
    }
    for name, text in files.items():
        (folder / name).write_text(text)
    (folder / "latin.tsv").write_bytes("text\tlabel\nIt r\xe4ins.\tbad\n".encode("latin-1"))
    (folder / "hf").mkdir()
    (folder / "hf" / "config.json").write_text(json.dumps(dict(model_type="mt5")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for more in ("--split-sentences --sentence-splitter sentencex", ""):
            preprocess_data.main(f"--input text.jsonl --output-prefix text --workers 1 {VOC} {more}".split())
        pretrain_t5.main(f"{READS} --save t5".split())
        pretrain_bert.main(f"{BERT} --save bert".split())
    return folder


@pytest.mark.parametrize("kind", ["t5", "bert"])
def test_the_harness_asks_models_that_continue_texts(kind, messy, monkeypatch):
    monkeypatch.chdir(messy)
    if find_spec("lm_eval") is None:  # which is not asked
        monkeypatch.setitem(sys.modules, "lm_eval", SimpleNamespace())
    with pytest.raises(SettingsError, match=f"a model of type {kind.upper()}, which does not continue texts"):
        lm_eval.main(f"--load {kind} --tasks a --device cpu".split())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("command, flags, code, words", TABLE)
def test_a_mistake_is_one_message_and_an_exit_code(command, flags, code, words, messy, monkeypatch, capfd):
    monkeypatch.chdir(messy)
    kept = lambda: {path: size for path, size in contents(messy).items() if "index_cache" not in path.parts}
    before = kept()
    with pytest.raises(SystemExit) as left:
        run_main(COMMANDS[command], shlex.split(flags))
    said = capfd.readouterr().err
    assert [part for part in words.split("|") if part not in said] == [], said
    assert left.value.code == code and is_one_message(said), said
    assert kept() == before  # nothing is lost, nothing half written
