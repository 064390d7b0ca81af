# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of an export of any format: files that transformers reads, with the ids of the run's own tokenizer.

| the run's tokenizer     | its files in the folder                                                  |
|-------------------------|--------------------------------------------------------------------------|
| HuggingFaceTokenizer    | tokenizer.json, as AutoTokenizer reads the run's                         |
| GPT2BPETokenizer        | vocab.json and merges.txt, and tokenizer.json of them                    |
| SentencePieceTokenizer  | tokenizer.model, and tokenizer.json of it                                |

With them are tokenizer_config.json, which names the special tokens, the chat template, and generation_config.json.
"""

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Optional

from megatron.checkpoint.lineage import imported_config
from megatron.convert import hf_files, sentence_piece
from megatron.data.vocabulary import learned_vocabulary
from megatron.errors import DataError
from megatron.inference.load import Loaded, text_tokenizer, tokenizer_settings
from megatron.model.bert.facts import BertFacts
from megatron.settings.schema import TokenizerSettings
from megatron.tokenizer.base import SPECIAL, Tokenizer
from megatron.tokenizer.byte_level import describe, parse_merges, read_text
from megatron.tokenizer.chat_template import FILE as TEMPLATE
from megatron.tokenizer.chat_template import ChatTemplate, find_template
from megatron.tokenizer.transformers_files import CONFIG, TOKENIZER, TokenizerFiles, read_files, write_files

SENTENCE_PIECE_MODEL = "tokenizer.model"
SENTENCE_PIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
TEMPLATES = (TEMPLATE, "chat_template.json", "additional_chat_templates")  # beside a tokenizer


@dataclass(frozen=True)
class ExportedTokenizer:
    """The tokenizer of an export.

    own: of the run; None: its tokens are numbers. there: the settings of the files in the folder; None: there are none
    end_of_turn: the token that ends an answer in a conversation. notices: for the user
    """

    own: Optional[Tokenizer]
    there: Optional[TokenizerSettings]
    notices: tuple[str, ...]
    end_of_turn: Optional[int] = None
    by_transformers: bool = False  # whether transformers can read the files
    # Entries of the config.json that the model was imported with
    imported: Mapping[str, Any] = field(default_factory=dict)

    @property
    def end(self) -> Optional[int]:
        """The end of document."""
        return self.own.eod if self.own else None

    def with_ids(self, config: dict[str, Any]) -> dict[str, Any]:
        """A config.json with the special ids of the one that the model was imported with.

        Without one, it begins texts with the token that the tokenizer puts before prompts, or else after an end.
        """
        first = self.own.prefix[:1] if self.own else []
        ids = dict(bos_token_id=first[0]) if first else {}
        return config | {name: value for name, value in {**ids, **self.imported}.items() if name in config}


def write_tokenizer(
    folder: Path,
    run: Loaded,
    given: Mapping[str, Any],
    trained: Path,
    theirs: Callable[[Optional[int]], dict[str, Any]],
) -> ExportedTokenizer:
    """Write the tokenizer, the chat template and generation_config.json of a run into the folder of an export.

    given: tokenizer flags. trained: the checkpoint of the run. theirs: end-of-document id -> ids as in config.json
    """
    made = _write_files(folder, run, given, trained)
    words = made.own and learned_vocabulary(made.own)["vocabulary"]
    made = replace(made, imported=imported_config(run.record, words))
    if not isinstance(run.facts, BertFacts):  # which generates nothing
        ids = made.with_ids(theirs(made.end))
        hf_files.write_generation_config(folder, ids, Path(trained), made.end_of_turn)
    return made


def _write_files(folder: Path, run: Loaded, given: Mapping[str, Any], trained: Path) -> ExportedTokenizer:
    tokenizer = text_tokenizer(run, given)
    if tokenizer is None:
        return ExportedTokenizer(None, None, ("the run had no tokenizer, so the export has none",))
    settings = tokenizer_settings(run, given)
    kind, longest = settings.tokenizer_type, run.config.model.position_table
    files = hf_files.TOKENIZER_FILES.get(kind)
    if files is None:
        return ExportedTokenizer(tokenizer, None, (f"other programs have no tokenizer like {kind}: none was exported",))
    there, notices = _settings_in(folder, settings), []
    place = Path(getattr(settings, next(iter(files))))
    if kind == "HuggingFaceTokenizer":
        made = _with_more_tokens(read_files(place, notices.append), tokenizer)
        write_files(made, folder)
        # A template may name tokens: a given config says which there are
        more = {} if made.config else _around(tokenizer)
        _name(folder, dict(model_max_length=longest, **more) | hf_files.read_json(folder / CONFIG))
        place = place if place.is_dir() else place.parent
        if (place / SENTENCE_PIECE_MODEL).is_file():  # for programs that read no tokenizer.json
            shutil.copyfile(place / SENTENCE_PIECE_MODEL, folder / SENTENCE_PIECE_MODEL)
    else:
        place = place.parent
        for setting, name in files.items():
            shutil.copyfile(getattr(settings, setting), folder / name)
        try:
            _write_json(folder / TOKENIZER, _described(settings, tokenizer))
        except ValueError as error:
            why = f"transformers has no tokenizer like this model of SentencePiece: {error}"
            return ExportedTokenizer(tokenizer, there, (f"{why}; {SENTENCE_PIECE_MODEL} is there alone",))
        _name(folder, dict(model_max_length=longest, **_names(tokenizer, kind)))
    _copy_templates(place, folder)
    end_of_turn = export_chat_template(trained, tokenizer, folder)
    return ExportedTokenizer(tokenizer, there, tuple(notices), end_of_turn, by_transformers=True)


def _settings_in(folder: Path, own: TokenizerSettings) -> TokenizerSettings:
    """The settings of a run's tokenizer, with the files of an export."""
    files = hf_files.TOKENIZER_FILES[own.tokenizer_type]
    return replace(own, **{setting: str(folder / name) for setting, name in files.items()})


def tokenizer_in(folder: Path, record: Mapping[str, Any], of_gpt2: bool) -> Optional[TokenizerSettings]:
    """The settings of the tokenizer in the folder of an export; None if there is none.

    record: the tokenizer's settings in the record of the export; empty for other folders of transformers. of_gpt2: see
    `hf_files.tokenizer_of`
    """
    files = hf_files.TOKENIZER_FILES.get(record.get("tokenizer_type") or "", {})
    if not files or not all((folder / name).is_file() for name in files.values()):
        return hf_files.tokenizer_of(folder, of_gpt2)
    known = {one.name for one in fields(TokenizerSettings)}
    return _settings_in(folder, TokenizerSettings(**{name: record[name] for name in known & record.keys()}))


def _with_more_tokens(files: TokenizerFiles, tokenizer: Tokenizer) -> TokenizerFiles:
    """The files, with the tokens that --vocab-extra-ids adds."""
    description = json.loads(files.text)
    vocab, added = description["model"]["vocab"], description.get("added_tokens") or []
    known = {*(vocab if isinstance(vocab, dict) else (piece for piece, _ in vocab)), *(one["content"] for one in added)}
    more = {name: id for name, id in tokenizer.pieces.items() if name not in known}
    if not more:
        return files
    description["added_tokens"] = [*added, *sentence_piece.added_tokens(more)]
    return replace(files, text=json.dumps(description, ensure_ascii=False))


# ---- files -----------------------------------------------------------------------------------------------------------


def _described(settings: TokenizerSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    """The content of a tokenizer.json with the tokenizer's special tokens. Raises ValueError if it cannot express it."""
    if settings.tokenizer_type in SENTENCE_PIECE:
        proto = sentence_piece.read_model(Path(settings.tokenizer_model).read_bytes())
        return sentence_piece.tokenizer_json(proto, tokenizer.special_tokens, tokenizer.prefix)
    merges = parse_merges(read_text(settings.merge_file, "--merge-file"), settings.merge_file)
    description = json.loads(describe(read_text(settings.vocab_file, "--vocab-file"), merges))
    return description | dict(added_tokens=sentence_piece.added_tokens(tokenizer.special_tokens))


def _around(tokenizer: Tokenizer) -> dict[str, str]:
    """Entries of tokenizer_config.json for a tokenizer without names: what ends texts, and what begins prompts."""
    texts = {id: name for name, id in tokenizer.special_tokens.items()}
    first = tokenizer.prefix[0] if tokenizer.prefix else None
    return {name: texts[id] for name, id in dict(bos_token=first, eos_token=tokenizer.eod).items() if id in texts}


def _names(tokenizer: Tokenizer, kind: str) -> dict[str, str]:
    """Entries of tokenizer_config.json by the names in the vocabulary. The end of document is what ends a text."""
    texts = {id: name for name, id in tokenizer.special_tokens.items()}
    ids = {name: tokenizer.special(name) for name in (*SPECIAL, "unk")}
    ids["eos"] = ids["eos"] if tokenizer.eod is None else tokenizer.eod
    own = dict(tokenizer_class="PreTrainedTokenizerFast")
    if kind == "GPT2BPETokenizer":  # whose only special token is all of these, as in transformers
        own = dict(tokenizer_class="GPT2Tokenizer")
        ids |= dict.fromkeys(("bos", "unk"), ids["eos"])
    return own | {f"{name}_token": texts[id] for name, id in ids.items() if id in texts}


def _name(folder: Path, content: dict[str, Any]) -> None:
    """Write entries of tokenizer_config.json."""
    own = hf_files.read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    _write_json(folder / CONFIG, own | content)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


# ---- chat templates --------------------------------------------------------------------------------------------------


def _copy_templates(source: Path, folder: Path) -> None:
    """Copy the chat templates beside a tokenizer."""
    for name in TEMPLATES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
        elif (source / name).is_dir():
            shutil.copytree(source / name, folder / name, dirs_exist_ok=True)
    if (source / CONFIG).is_file() and (template := hf_files.read_json(source / CONFIG).get("chat_template")):
        _name(folder, dict(chat_template=template))


def own_template(folders: Sequence[Path], tokenizer: Tokenizer) -> Optional[ChatTemplate]:
    """`find_template`, for commands without --chat-template."""
    try:
        return find_template(folders, tokenizer)
    except DataError as error:
        raise DataError(error.what, error.why, "repair or remove it") from None


def export_chat_template(checkpoint: Path, tokenizer: Tokenizer, folder: Path) -> Optional[int]:
    """Write the chat template beside a checkpoint into a folder of transformers, in place of the tokenizer's own.

    Returns the token that ends an answer; None without such a template.
    """
    template = own_template([checkpoint, checkpoint.parent], tokenizer)
    if template is None:
        return None
    files = template.files()
    config = hf_files.read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    config.pop("chat_template", None)
    (folder / TEMPLATE).write_text(files[TEMPLATE], encoding="utf-8")
    _write_json(folder / CONFIG, config | json.loads(files[CONFIG]))
    return template.special.get(template.tokens.get("eos_token"))
