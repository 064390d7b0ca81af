# SPDX-License-Identifier: Apache-2.0
"""Chat templates: the messages of a conversation as tokens, by the Jinja template of a Hugging Face tokenizer.

    template = find_template([folder], tokenizer)
    ids = template.encode([dict(role="user", content="Hello")])           # a prompt, for an answer
    ids, counted, ends = template.encode_answers(messages)                # a conversation, and which tokens are answers

Templates are programs of whoever made the model, so they run in Jinja's sandbox, and a long loop is refused there.
Names of special tokens are special where the template writes them. In a message they are ordinary text, so that no message
can end itself and begin another one.
"""

import json
import re
import traceback
import zlib
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, Optional, Union

from megatron.errors import DataError, SettingsError, did_you_mean
from megatron.settings.schema import TokenizerSettings
from megatron.settings.statements import NONE
from megatron.storage.urls import UrlPath, location
from megatron.tokenizer.base import Part, Tokenizer
from megatron.tokenizer.transformers_files import CONFIG, content_of

FILE = "chat_template.jinja"
RESERVED = (
    "messages",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "unk_token",
    "tools",
    "documents",
)
ASSISTANT = "assistant"  # the role whose messages are answers
OF_ANSWERS = ("reasoning_content", "tool_calls")  # parts of an answer: the text of its thinking, which precedes it
MARKS = range(0xE000, 0xF900)  # Unicode's private characters: they mark names of special tokens, and answers
TEMPLATE = "<template>"  # Jinja's name of a template's file in tracebacks
EDGES = "answer_edges"  # the template's variable with the marks around answers

MARKED = (  # what a template can be that writes earlier answers in another way than the last one
    "--chat-template FILE, a copy of the template with {% generation %} and {% endgeneration %} around answers "
    "(docs/chat.md#the-loss)"
)
WITH_TOOLS = f"no template with a name writes calls of tools: give a model's own template that does, or {MARKED}"

EACH = """{% for message in messages %}
{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}
{{ raise_exception('the role ' + message['role'] + ' is none of system, user, assistant and tool') }}{% endif %}
"""
CHATML = (
    EACH
    + """{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] | trim + '<|im_end|>' }}{% endgeneration %}{% else %}
{{ message['content'] | trim + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
)
PLAIN = (
    EACH
    + """{{ '### ' + message['role'] | capitalize + '\\n' }}{% if message['role'] == 'assistant' %}
{% generation %}{{ message['content'] | trim + eos_token }}{% endgeneration %}{% else %}
{{ message['content'] | trim }}{% endif %}{{ '\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '### Assistant\\n' }}{% endif %}"""
)
# Qwen3's turns, with the thinking of every answer, so that each prompt is the beginning of what is learned. Its own
# template leaves out that of earlier answers.
QWEN3 = (
    EACH
    + """{% if message['role'] == 'tool' %}
{{ raise_exception("calls of tools are written by the model's own template alone") }}{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' }}{% if message['role'] == 'assistant' %}
{% generation %}{% if '</think>' in message['content'] %}{{ message['content'] }}{% else %}
{% set thinking = message['reasoning_content'] if message['reasoning_content'] is string else '' %}
{{ '<think>\\n' + thinking.strip('\\n') + '\\n</think>\\n\\n' + message['content'].lstrip('\\n') }}{% endif %}
{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}{% if enable_thinking is defined and enable_thinking is false %}
{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""
)


class NamedTemplate(NamedTuple):
    """A template of the suite, for models that have none.

    needs: tokens that the vocabulary must have; end: the token that ends an answer; None: the end of document
    """

    source: str
    needs: tuple[str, ...] = ()
    end: Optional[str] = None


TEMPLATES = {
    "chatml": NamedTemplate(CHATML, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "plain": NamedTemplate(PLAIN),
    "qwen3": NamedTemplate(QWEN3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
}


class RefusedMessages(ValueError):
    """Messages that a template cannot write. param: the part of a request that is at fault, as `messages[2]`; do: what
    helps in training.
    """

    def __init__(self, message: str, param: str = "messages", do: Optional[str] = None):
        super().__init__(message)
        self.param, self.do = param, do


class AnsweredTokens(NamedTuple):
    """A conversation as tokens. counted: for each token, whether it belongs to an answer; ends: the last token of each
    answer.
    """

    ids: list[int]
    counted: list[bool]
    ends: list[int]


class _Span(NamedTuple):
    """The characters of an answer in a text. message: its number."""

    message: int
    start: int
    stop: int


@dataclass(frozen=True)
class ChatTemplate:
    """A template, with the tokenizer of the model.

    tokens: names of special tokens for the template, as bos_token; special: name -> id of those in its output
    """

    source: str
    place: str
    tokenizer: Tokenizer
    tokens: Mapping[str, str] = field(default_factory=dict)
    special: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def _compiled(self):
        from jinja2 import TemplateError, meta
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message):
            raise RefusedMessages(f"the chat template refuses the messages: {message}")

        extensions = [loopcontrols, _generation_blocks()]
        world = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
        world.filters["tojson"] = lambda value, indent=None, **more: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        world.globals.update(raise_exception=refuse, strftime_now=lambda form: datetime.now().strftime(form))
        try:
            names = meta.find_undeclared_variables(world.parse(self.source))
            return world.from_string(self.source), names
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            why = f"line {line}: {error.message}" if line else str(error)
            do = "repair it, or give another one: --chat-template FILE"
            raise DataError(f"{self.place}: not a chat template", why, do) from None

    def check(self) -> None:
        """Raise DataError if the template cannot be compiled."""
        self._compiled  # noqa: B018

    @property
    def marks_answers(self) -> bool:
        """Whether the template says itself what an answer is: with {% generation %}."""
        return EDGES in self._compiled[1]

    @property
    def missing(self) -> list[str]:
        """Names like <|im_end|> in the template that are no special tokens of the vocabulary."""
        return sorted(set(re.findall(r"<\|\w+\|>", self.source)) - self.special.keys())

    @property
    def end_of_turn(self) -> Optional[int]:
        """The token that ends an answer: eos_token, if it is a special token."""
        return self.special.get(self.tokens.get("eos_token", ""))

    @property
    def has_tools(self) -> bool:
        """Whether the template writes the tools that an answer may call."""
        return "tools" in self._compiled[1]

    @property
    def calls_as_json(self) -> bool:
        """Whether it asks for calls as those of Hermes and Qwen: JSON with name and arguments between <tool_call>."""
        return "<tool_call>" in self.source and "arguments" in self.source and "<function=" not in self.source

    def encode(
        self,
        messages: Sequence[Mapping[str, Any]],
        more: Mapping[str, Any] = NONE,
        tools: Optional[Sequence[Any]] = None,
    ) -> list[int]:
        """A conversation as token ids, up to where the assistant's answer begins. more: variables for the template.

        Raises RefusedMessages if the template cannot write the messages.
        """
        for name in more:
            if name in (*RESERVED, EDGES) or name not in self._compiled[1]:
                name = f"chat_template_kwargs.{name}"
                raise RefusedMessages(f"{name}: the model's chat template has no such variable", name)
        self._check_names(messages, tools)
        marks = _unused_marks([*messages, dict(tools=tools)])
        more = {**more, "tools": _marked(tools, self.names, marks[0])} if tools else more
        self._check_written(messages, more, prompt=True)
        text = self._text(_marked(messages, self.names, marks[0]), more)
        return self._tokens(text, marks[0], ()).ids

    def encode_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Optional[Sequence[Any]] = None,
        learned: Callable[[int], bool] = lambda number: True,
    ) -> AnsweredTokens:
        """A whole conversation as tokens, and which of them are answers: messages of the assistant that are learned.

        learned: the number of a message -> whether it counts

        The answers are the template's {% generation %} blocks, or else what the template adds to the prompt: the text of
        all messages up to the answer is compared with that of the messages before it. An answer ends with its last
        special token, if only white space follows.

        Raises RefusedMessages if the template cannot write the messages, or the text up to an edge of an answer has other
        tokens by itself: a prompt ends there.
        """
        self._check_names(messages, tools)
        marks = _unused_marks([*messages, dict(tools=tools)])
        messages = _marked(messages, self.names, marks[0])
        more = dict(tools=_marked(tools, self.names, marks[0])) if tools else {}
        self._check_written(messages, more, prompt=False)
        text, spans = (self._from_blocks if self.marks_answers else self._from_prefixes)(messages, more, marks)
        return self._tokens(text, marks[0], [span for span in spans if learned(span.message)])

    def _check_names(self, messages: Sequence[Mapping[str, Any]], tools: Optional[Sequence[Any]]) -> None:
        """Raise RefusedMessages if a message has a part that the template does not know, or there are tools."""
        if tools and not self.has_tools:
            raise RefusedMessages("tools: the chat template has no place for them", "tools", WITH_TOOLS)
        for number, message in enumerate(messages):
            for name, value in message.items():
                known = name in self.source and (name not in OF_ANSWERS or message["role"] == ASSISTANT)
                if name not in ("role", "content", "tool_call_id") and not known and value not in (None, [], ""):
                    where = f"messages[{number}].{name}"
                    do = WITH_TOOLS if name == "tool_calls" else None
                    raise RefusedMessages(f"{where}: the chat template has no place for it", where, do)

    @property
    def names(self) -> str:
        """A regular expression of the names of special tokens."""
        return "|".join(map(re.escape, sorted(self.special, key=len, reverse=True))) or "(?!)"

    # ---- texts -------------------------------------------------------------------------------------------------------

    def _text(self, messages, more: Mapping[str, Any], *, prompt: bool = True, edges: str = "") -> str:
        """The template's text. prompt: with the beginning of an answer; edges: two marks for answers, or none."""
        words = {name: None for name in ("tools", "documents")} | dict(self.tokens) | dict(more) | {EDGES: edges}
        try:
            text = self._compiled[0].render(messages=messages, add_generation_prompt=prompt, **words)
        except RefusedMessages:
            raise
        except Exception as error:  # a template is a program: it may raise anything
            if not messages:
                what = "the first message is an answer, and the chat template cannot write a prompt without messages"
                raise RefusedMessages(what, "messages[0]") from None
            first = "; the first message is an answer" if messages[0]["role"] == ASSISTANT else ""
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == TEMPLATE]
            where = f"{self.place}, line {lines[-1]}" if lines else self.place
            missing = "it reads what they do not have: " * (type(error).__name__ == "UndefinedError")
            why = f"{missing}{error}{first}"
            raise RefusedMessages(f"the chat template cannot write these messages ({where}): {why}") from None
        written: Counter[str] = Counter()  # how often the text must have a content
        for number, message in enumerate(messages):
            where = f"messages[{number}]"
            content = message["content"].strip()
            if content and not (prompt and message["role"] == ASSISTANT):  # of earlier answers a prompt may drop a part
                written[content] += 1
            escaped = json.dumps(content, ensure_ascii=False)[1:-1]  # as Llama 3.1's writes the answers of tools
            if max(text.count(content), text.count(escaped)) < written[content]:
                raise _left_out(number, message)
            if "name" in message and message["name"] not in text:
                raise RefusedMessages(f"{where}.name: the chat template has no place for it", f"{where}.name")
        return text

    def _check_written(self, messages, more: Mapping[str, Any], prompt: bool) -> None:
        """Raise RefusedMessages if the template leaves out a message whose text other messages, or the template, have, too.

        Written again with a text of its own in each message. A template that cannot write those is not asked.
        """
        mark = f"x{zlib.crc32(repr(messages).encode()):08x}y"
        own = [f"{mark}{number}z" if message["content"].strip() else "" for number, message in enumerate(messages)]
        others = [dict(message, content=text) for message, text in zip(messages, own)]
        try:
            self._text(others, more, prompt=prompt)
        except RefusedMessages as error:
            if found := re.fullmatch(r"messages\[(\d+)\]", error.param or ""):
                raise _left_out(int(found[1]), messages[int(found[1])]) from None

    def _from_blocks(self, messages, more: Mapping[str, Any], marks: str) -> tuple[str, list[_Span]]:
        """(text, answers) by the template's {% generation %} blocks."""
        begin, end = edges = marks[1:]
        parts = re.split(f"([{edges}])", self._text(messages, more, prompt=False, edges=edges))
        answers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
        if parts.count(begin) not in (0, len(answers)):
            raise RefusedMessages(
                f"the chat template marks {parts.count(begin)} answers with {{% generation %}}, and the assistant has "
                f"{len(answers)} messages"
            )
        text, spans, start = "", [], 0
        for part in parts:
            if part == begin:
                start = len(text)
            elif part == end:
                spans.append(_Span(answers[len(spans)], start, len(text)))
            else:
                text += part
        return text, spans

    def _from_prefixes(self, messages, more: Mapping[str, Any], marks: str) -> tuple[str, list[_Span]]:
        """(text, answers) by comparison with the prompts."""
        text, spans = self._text(messages, more, prompt=False), []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            last = number == len(messages) - 1
            before = self._text(messages[:number], more)
            through = text if last else self._text(messages[: number + 1], more, prompt=False)
            if not (text.startswith(before) and text.startswith(through) and len(before) < len(through)):
                named = "qwen3" if "</think>" in self.source else "chatml"
                named = f"--chat-template {named}, if the vocabulary has its tokens, or "
                calls = more.get("tools") or any(one["role"] == "tool" or one.get("tool_calls") for one in messages)
                raise RefusedMessages(
                    f"messages[{number}]: the chat template writes this answer, or what precedes it, in another way than "
                    "in a prompt, so the model would learn from prompts that it never gets",
                    f"messages[{number}]",
                    f"give {MARKED}" if calls else f"give {named}{MARKED}",
                )
            ends = [found.end() for found in re.finditer(self.names, through[len(before) :])]
            stop = len(before) + ends[-1] if ends else len(through)
            spans.append(_Span(number, len(before), len(through) if through[stop:].strip() else stop))
        return text, spans

    # ---- tokens ------------------------------------------------------------------------------------------------------

    def _tokens(self, text: str, mark: str, spans: Sequence[_Span]) -> AnsweredTokens:
        """The tokens of a text, and those of its answers. mark: is in names of special tokens that are ordinary text."""
        ids, places = self.tokenizer.encode_parts(self._parts(text, mark))
        special = [found.start() for found in re.finditer(self.names, text)]
        # In the text, in the ids
        anchors = [(0, 0), *zip(special, places)] if len(special) == len(places) else [(0, 0)]
        counted, ends = [False] * len(ids), []
        for span in spans:
            start, stop = (self._place(text, mark, edge, ids, anchors) for edge in (span.start, span.stop))
            if start is None or stop is None:
                side, place = ("begins", span.start) if start is None else ("ends", span.stop)
                around = text[max(0, place - 12) : place + 12].replace(mark, "")
                raise RefusedMessages(
                    f"messages[{span.message}]: the text up to where the answer {side} has other tokens by itself, at "
                    f"{around!r}; a prompt ends there: leave out white space, in the message or in the template",
                    f"messages[{span.message}]",
                )
            if stop > start:
                counted[start:stop] = [True] * (stop - start)
                ends.append(ids[stop - 1])
        return AnsweredTokens(ids, counted, ends)

    def _parts(self, text: str, mark: str) -> list[Part]:
        """A text cut at the special tokens that the template has written."""
        pieces = re.split(f"({self.names})", text)
        return [self.special.get(piece, piece.replace(mark, "")) for piece in pieces if piece]

    def _place(self, text: str, mark: str, edge: int, ids: list[int], anchors: list[tuple[int, int]]) -> Optional[int]:
        """The number of tokens up to a place in the text; None if the text up to there has other tokens by itself.

        anchors: places of special tokens in the text and in the ids: what precedes the last one before the edge is the same
        """
        start, first = anchors[bisect_right(anchors, edge, key=lambda anchor: anchor[0]) - 1]
        if start == edge:
            return first
        head = self.tokenizer.encode_parts(self._parts(text[start:edge], mark)).ids
        return first + len(head) if ids[first : first + len(head)] == head else None

    # ---- files -------------------------------------------------------------------------------------------------------

    def files(self, end: Optional[int] = None) -> dict[str, str]:
        """Name -> content of files that make a folder of checkpoints answer in this template.

        end: the token that ends an answer, if it is another one than eos_token
        """
        names = {id: name for name, id in self.special.items()}
        tokens = {**self.tokens, **({"eos_token": names[end]} if end in names else {})}
        return {FILE: self.source, CONFIG: json.dumps(tokens, ensure_ascii=False, indent=1) + "\n"}


def _generation_blocks():
    """Jinja's extension for {% generation %} ... {% endgeneration %}, which encloses an answer."""
    from jinja2 import nodes
    from jinja2.ext import Extension

    class GenerationBlocks(Extension):
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            call = self.call_method("enclose", [nodes.Name(EDGES, "load")])
            return nodes.CallBlock(call, [], [], body).set_lineno(line)

        def enclose(self, edges, caller):
            return edges[0] + caller() + edges[1] if edges else caller()

    return GenerationBlocks


def _left_out(number: int, message: Mapping[str, Any]) -> RefusedMessages:
    where = f"messages[{number}]"
    return RefusedMessages(
        f"{where}: the model's chat template leaves out this message (role {message['role']})", where
    )


def _unused_marks(messages: Sequence[Mapping[str, Any]]) -> str:
    """Three characters that no message contains: for names of special tokens, for the begin and the end of answers."""
    given = json.dumps(list(messages), ensure_ascii=False)
    unused = (chr(code) for code in MARKS if chr(code) not in given)
    return "".join(next(unused) for _ in range(3))


def _marked(value: Any, names: str, mark: str) -> Any:
    """The messages, with a mark in each name of a special token, which is ordinary text there."""
    if isinstance(value, str):
        return re.sub(names, lambda found: found[0][0] + mark + found[0][1:], value)
    if isinstance(value, Mapping):
        return {name: _marked(part, names, mark) for name, part in value.items()}
    return [_marked(part, names, mark) for part in value] if isinstance(value, (list, tuple)) else value


# ---- finding a template ----------------------------------------------------------------------------------------------


def template_folders(models: Sequence[Union[str, Path, UrlPath]], settings: TokenizerSettings) -> list[Path | UrlPath]:
    """Where a template may be: in the folders of a model, or beside the tokenizer's files."""
    files = [Path(name) for name in (settings.tokenizer_model, settings.vocab_file) if name]
    return [*map(location, models), *(file if file.is_dir() else file.parent for file in files)]


def find_template(folders: Sequence[Path], tokenizer: Tokenizer, file: Optional[str] = None) -> Optional[ChatTemplate]:
    """The template of `file`, a path or a name of TEMPLATES, else of the first folder with one; None if there is none.

    Raises DataError if there is no such file, or it is no template; SettingsError if the vocabulary does not suit it.
    """
    if file in TEMPLATES and not Path(file).is_file():  # a folder of this name is a model, and no template
        return _named(file, folders, tokenizer)
    if file and Path(file).is_dir():
        inside = Path(file, FILE)
        raise DataError(
            f"--chat-template {file}: it is a folder",
            do=f"give {inside if inside.is_file() else 'a file'}, or {' or '.join(TEMPLATES)}",
        )
    if file and not Path(file).exists():
        raise DataError(
            f"--chat-template {file}: there is no file or template of this name{did_you_mean(file, TEMPLATES)}",
            do=f"give a file, or {' or '.join(TEMPLATES)}",
        )
    places = [Path(file)] if file else [folder / name for folder in folders for name in (FILE, CONFIG)]
    for place in places:
        source = _source(place, needed=bool(file))
        if source:
            config = _json(place.parent / CONFIG) or _first_config(folders)
            template = ChatTemplate(source, str(place), tokenizer, *_tokens_of(tokenizer, config))
            template.check()
            return template
    return None


def _named(name: str, folders: Sequence[Path], tokenizer: Tokenizer) -> ChatTemplate:
    """A template of TEMPLATES. Raises SettingsError if the vocabulary lacks its tokens."""
    named = TEMPLATES[name]
    tokens, special = _tokens_of(tokenizer, _first_config(folders))
    special |= {token: tokenizer.pieces[token] for token in named.needs if token in tokenizer.pieces}
    tokens |= {"eos_token": named.end} if named.end else {}
    if lacking := [token for token in named.needs if token not in special]:
        raise SettingsError(
            f"--chat-template {name} needs the tokens {' and '.join(lacking)}, which the vocabulary lacks",
            "as ordinary text they would be several tokens each, and no answer would end",
            "take --chat-template plain, whose answers end with the end of document; or a vocabulary with these tokens",
        )
    if not named.end and not tokens.get("eos_token"):
        raise SettingsError(f"--chat-template {name}: the tokenizer has no end of document, which ends answers")
    return ChatTemplate(named.source, name, tokenizer, tokens, special)


def _first_config(folders: Sequence[Path]) -> dict:
    return next(filter(None, (_json(folder / CONFIG) for folder in folders)), {})


def _source(place: Path, needed: bool) -> Optional[str]:
    if place.name.endswith(".json"):
        found = (_json(place) or {}).get("chat_template")
        if isinstance(found, list):  # several, with names
            found = next((one["template"] for one in found if one.get("name") == "default"), None)
        if needed and not found:
            raise DataError(f"--chat-template {place}: no JSON file with a chat_template")
        if found is not None and not isinstance(found, str):
            raise DataError(f"{place}: chat_template is no text", do="repair or remove it")
        return found
    try:
        return place.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        if needed:
            why = getattr(error, "strerror", None) or "not UTF-8"
            raise DataError(f"--chat-template {place}: {why}", do=f"give a file, or {' or '.join(TEMPLATES)}") from None
        return None


def _json(place: Path) -> Optional[dict]:
    try:
        found = json.loads(place.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _tokens_of(tokenizer: Tokenizer, config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, int]]:
    """(names of special tokens for the template, name -> id of the special tokens that it may write)."""
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    own = {name: text for name in names if (text := tokenizer.token_names.get(name))}
    tokens = own | {name: text for name in names if (text := content_of(config.get(name)))}
    special = dict(tokenizer.special_tokens)
    special |= {name: tokenizer.pieces[name] for name in tokens.values() if name in tokenizer.pieces}
    special = {name: id for name, id in special.items() if len(name) > 1 and id < tokenizer.whole.vocab_size}
    if tokenizer.eod is not None:
        ends = [name for name, id in special.items() if id == tokenizer.eod]
        tokens |= {"eos_token": ends[0]} if ends and "eos_token" not in tokens else {}
    return tokens, special
