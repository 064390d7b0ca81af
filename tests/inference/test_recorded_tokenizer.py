# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint says of its tokenizer, with a type or, as in earlier versions, without one where files imply it."""

import json

import numpy as np
import pytest
import torch

from megatron.data.indexed import write_index
from megatron.errors import DataError
from megatron.tools import checkpoint as tool
from megatron.tools import evaluate, generate, prune
from tests.tokenizer.test_contract import THINK, earlier_fingerprint

UNTYPED = dict(tokenizer_type=None, vocab_file=None, merge_file=None)  # as --tokenizer-model FOLDER was recorded
TEXT = "the cat sat on the mat, they say.\n  A dog"


@pytest.fixture(scope="module")
def untyped(new_checkpoint, vocabulary):
    return new_checkpoint(**UNTYPED, tokenizer_model=str(vocabulary))


def test_an_export_of_a_run_without_a_type_has_the_tokenizer(untyped, vocabulary, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    from tokenizers import ByteLevelBPETokenizer

    tool.main(["to-hf", str(untyped), str(tmp_path / "hf")])
    assert "the tokenizer gives the same ids in transformers" in capsys.readouterr().out
    own = ByteLevelBPETokenizer(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt"))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == own.encode(TEXT).ids
    tool.main(["to-megatron", str(untyped), str(tmp_path / "megatron")])
    content = torch.load(tmp_path / "megatron/release/mp_rank_00/model_optim_rng.pt", weights_only=False)
    args = content["args"]
    assert (args.tokenizer_type, args.vocab_file) == ("GPT2BPETokenizer", str(vocabulary / "vocab.json"))


def test_an_export_of_a_run_of_numbers_takes_a_given_vocabulary(new_checkpoint, vocabulary, tmp_path, capsys):
    """Its files alone, without a type."""
    numbers = new_checkpoint(**UNTYPED | dict(tokenizer_type="NullTokenizer", vocab_size=282))
    tool.main(["to-hf", str(numbers), str(tmp_path / "none"), "--unchecked"])
    assert "the run had no tokenizer, so the export has none" in capsys.readouterr().out
    tool.main(["to-hf", str(numbers), str(tmp_path / "hf"), "--unchecked", "--tokenizer-model", str(vocabulary)])
    assert "no tokenizer" not in capsys.readouterr().out and (tmp_path / "hf/vocab.json").is_file()


def test_a_checkpoint_with_ids_of_an_earlier_version_is_named(new_checkpoint, vocabulary, tmp_path, capsys):
    """Added tokens that follow a special one: earlier versions gave them other ids."""
    from tokenizers import ByteLevelBPETokenizer

    whole = tmp_path / "tokenizer.json"
    ByteLevelBPETokenizer(str(vocabulary / "vocab.json"), str(vocabulary / "merges.txt")).save(str(whole))
    content = json.loads(whole.read_text())
    size = len(content["model"]["vocab"])
    content["added_tokens"] = [THINK | dict(id=size, content="<|end|>", special=True), THINK | dict(id=size + 1)]
    whole.write_text(json.dumps(content))
    words = dict(tokenizer_type="HuggingFaceTokenizer", vocab_file=None, merge_file=None, tokenizer_model=str(whole))
    load = str(new_checkpoint(**words, rows=size + 2, record=dict(vocabulary=earlier_fingerprint(tmp_path))))
    (tmp_path / "passages.jsonl").write_text(json.dumps(dict(text=TEXT)) + "\n")
    for command, more in (
        (generate, ["--prompt", "the cat", "--tokens-to-generate", "1"]),
        (evaluate, ["--task", "LAMBADA", "--valid-data", str(tmp_path / "passages.jsonl"), "--device", "cpu"]),
        (tool, []),
    ):
        command.main(["to-hf", load, str(tmp_path / "hf")] if command is tool else ["--load", load, *more])
        [note] = [line for line in capsys.readouterr().err.splitlines() if "earlier version" in line]
        assert note.startswith("note: ") and "the ids of <think> were those of other tokens" in note


@pytest.mark.parametrize(
    "record",
    [
        dict(vocabulary="a1b2c3d4"),  # of earlier versions
        dict(vocabulary="a1b2c3d4", tokenizer=dict(type="TikTokenizer", vocab_size=283, eod=0, fingerprint="a1b2c3d4")),
    ],
    ids=["untyped", "typed"],
)
def test_tokens_of_another_vocabulary_are_refused_where_its_files_are_gone(new_checkpoint, record, tmp_path, capsys):
    load = str(new_checkpoint(**UNTYPED, tokenizer_model="gone/tokenizer.json", record=record))

    def write(name: str, **identity) -> str:
        prefix = tmp_path / name
        (np.arange(90) % 50).astype(np.uint16).tofile(f"{prefix}.bin")
        write_index(f"{prefix}.idx", np.dtype("uint16"), np.array([90], np.int32), np.arange(2))
        (tmp_path / f"{name}.stats.json").write_text(json.dumps(dict(tokenizer=identity)))
        return str(prefix)

    other = write("other", type="GPT2BPETokenizer", vocab_size=283, eod=282, fingerprint="99999999")
    same = write("same", type="TikTokenizer", vocab_size=283, eod=0, fingerprint="a1b2c3d4")
    gptq, taylor = (
        "--quantize int8 --quantize-method gptq".split(),
        "--prune-ratio 0.5 --prune-criterion taylor".split(),
    )
    for command, words in (
        (evaluate, ["--data-path", other]),
        (prune, [*taylor, "--calibration-data", other, "--save", str(tmp_path / "out")]),
        (evaluate, [*gptq, "--calibration-data", other, "--data-path", same]),
    ):
        with pytest.raises(DataError, match="other was made with another vocabulary"):
            command.main([*words, "--load", load, "--device", "cpu"])
    evaluate.main(["--data-path", same, "--load", load, "--device", "cpu"])
    assert "validation results" in capsys.readouterr().out
