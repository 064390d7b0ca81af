# SPDX-License-Identifier: Apache-2.0
"""What clients may send to OpenAI's endpoints, and to Megatron-LM's.

    body = parse(Completion, json)          # raises ApiError that names the parameter
    body.sampling(longest_answer)           # the engine's settings

No parameter is dropped: an unknown one, and one that this server cannot honour, is refused by name. Those of OpenAI that
ask for nothing at one value (`functions: []`) may have that value. Names that OpenAI does not have (`top_k`, `min_p`,
`repetition_penalty`, `min_tokens`, `stop_token_ids`,
`ignore_eos`) are those of other servers.
"""

import re
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Optional, TypeVar, Union

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from megatron.errors import did_you_mean
from megatron.inference.sampling import Sampling
from megatron.serving.errors import ApiError
from megatron.serving.tool_calls import Tool, ToolCall
from megatron.settings.statements import NONE
from megatron.tokenizer.chat_template import ASSISTANT

SEEDS = 1 << 43  # `choices.uniform_draws` multiplies them by a million
# Of a request: continuations of a prompt, stop strings, likeliest tokens
MOST_TEXTS, MOST_STOPS, MOST_TOP = 128, 16, 20
# Settings for which a model may have defaults of its own.
DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
# Parameters of OpenAI that this server has no use for -> values that ask for nothing.
WITHOUT_EFFECT: Mapping[str, tuple] = {
    "suffix": (None, ""),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "parallel_tool_calls": (None, True, False),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "store": (None, False),
    "metadata": (None, {}),
    "service_tier": (None, "auto", "default"),
    "reasoning_effort": (None, "none"),
    "verbosity": (None,),
    "web_search_options": (None,),
    "prompt_cache_key": (None,),
    # of other servers
    "use_beam_search": (None, False),
    "length_penalty": (None, 1, 1.0),
    "early_stopping": (None, False),
    "include_stop_str_in_output": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "prompt_logprobs": (None,),
    "truncate_prompt_tokens": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "structured_outputs": (None,),
    "priority": (None, 0),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
}
# What to use in place of some of them.
INSTEAD = {
    "use_beam_search": "PUT /api has beam_width",
    "length_penalty": "PUT /api has it, with beam_width",
    "prompt_logprobs": "echo with logprobs, and max_tokens 0, scores a prompt",
}
Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Prompt = Union[str, list[Token]]
Body = TypeVar("Body", bound="Strict")


class Strict(BaseModel):
    """A body whose fields have exactly their types, and no other fields."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class TextBody(Strict):
    """The parameters of both endpoints."""

    model: Optional[str] = None
    max_tokens: Optional[Annotated[int, Field(ge=0, lt=1 << 31)]] = None
    n: Annotated[int, Field(ge=1, le=MOST_TEXTS)] = 1
    stream: Optional[bool] = False
    stream_options: Optional[StreamOptions] = None
    stop: Union[None, str, list[str]] = None
    seed: Optional[Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]] = None
    temperature: Optional[Annotated[float, Field(ge=0, le=100)]] = None
    top_p: Optional[Annotated[float, Field(gt=0, le=1)]] = None
    presence_penalty: Optional[Annotated[float, Field(ge=-2, le=2)]] = None
    frequency_penalty: Optional[Annotated[float, Field(ge=-2, le=2)]] = None
    logit_bias: Optional[dict[str, Annotated[float, Field(ge=-100, le=100)]]] = None
    user: Optional[Annotated[str, Field(max_length=256)]] = None  # a label for the server's log
    safety_identifier: Optional[Annotated[str, Field(max_length=256)]] = None  # the newer name of `user`
    # of other servers
    top_k: Optional[Annotated[int, Field(ge=-1, lt=1 << 31)]] = None
    min_p: Optional[Annotated[float, Field(ge=0, le=1)]] = None
    repetition_penalty: Optional[Annotated[float, Field(gt=0, le=100)]] = None
    min_tokens: Optional[Annotated[int, Field(ge=0, lt=1 << 31)]] = None
    stop_token_ids: Optional[Annotated[list[Token], Field(max_length=128)]] = None
    ignore_eos: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_effect(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, neutral in WITHOUT_EFFECT.items():
            if name in body and name not in cls.model_fields:
                if not any(type(body[name]) is type(value) and body[name] == value for value in neutral):
                    other = f"; {INSTEAD[name]}" if name in INSTEAD else ""
                    what = f"{name}: not supported by this server{other}"
                    raise ApiError(400, what, param=name, code="unsupported_parameter")
                body = {key: value for key, value in body.items() if key != name}
        return body

    @field_validator("stop")
    @classmethod
    def _stops(cls, stop):
        found = [stop] if isinstance(stop, str) else stop or []
        if not all(found):
            raise ValueError("a stop string has to have at least one character")
        if len(found) > MOST_STOPS:
            raise ValueError(f"at most {MOST_STOPS} stop strings")
        return found

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, bias):
        for token in bias or {}:
            if not re.fullmatch("[0-9]{1,9}", token):
                raise ValueError(f"{token!r} is no token id")
        return bias

    @model_validator(mode="after")
    def _together(self):
        if self.stream_options is not None and not self.stream:
            raise ApiError(400, "stream_options: only with stream", param="stream_options")
        return self

    @property
    def label(self) -> Optional[str]:
        return self.user or self.safety_identifier

    def sampling(self, length: int, defaults: Mapping[str, Any] = NONE) -> Sampling:
        """The settings of the engine for answers of at most `length` tokens. defaults: those of the model."""
        value = {name: getattr(self, name) for name in DEFAULTS}
        value = {name: defaults.get(name) if given is None else given for name, given in value.items()}
        greedy = value["temperature"] == 0
        words = dict(
            tokens_to_generate=max(1, length),
            min_tokens_to_generate=self.min_tokens or 0,
            temperature=1.0 if value["temperature"] is None else float(value["temperature"]),
            top_p=0.0 if greedy or value["top_p"] in (None, 1) else float(value["top_p"]),
            top_k=0 if greedy else max(0, value["top_k"] or 0),
            min_p=0.0 if greedy else float(value["min_p"] or 0),
            repetition_penalty=float(value["repetition_penalty"] or 1.0),
            presence_penalty=float(self.presence_penalty or 0),
            frequency_penalty=float(self.frequency_penalty or 0),
            logit_bias=[f"{token}:{bias}" for token, bias in (self.logit_bias or {}).items()] or None,
            stop_token_ids=self.stop_token_ids or None,
            ignore_eos=self.ignore_eos,
            sampling_seed=(secrets.randbits(43) if self.seed is None else self.seed) % SEEDS,
        )
        return Sampling(**words)


class Completion(TextBody):
    """The body of POST /v1/completions."""

    prompt: Union[Prompt, list[Prompt]]
    best_of: Optional[Annotated[int, Field(ge=1, le=MOST_TEXTS)]] = None
    echo: Optional[bool] = False
    logprobs: Optional[Annotated[int, Field(ge=0, le=MOST_TOP)]] = None

    @field_validator("prompt")
    @classmethod
    def _some(cls, prompt):
        if prompt == []:
            raise ValueError("an empty list has no prompt")
        return prompt

    @model_validator(mode="after")
    def _best(self):
        if self.best_of is not None and self.best_of < self.n:
            raise ApiError(400, f"best_of: {self.best_of} is less than n, {self.n}", param="best_of")
        if self.best_of is not None and self.best_of > self.n and self.stream:
            raise ApiError(
                400, "best_of: the best are known at the end only, so they cannot be streamed", param="best_of"
            )
        return self

    @property
    def prompts(self) -> list[Union[str, list[int]]]:
        """A list of prompts, of whatever form the body has."""
        several = isinstance(self.prompt, list) and not isinstance(self.prompt[0], int)
        return self.prompt if several else [self.prompt]


EMPTY_IN_ANSWERS = ("refusal", "annotations", "audio", "function_call", "tool_calls")


class MessagePart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    """Of a conversation. An answer that calls tools needs no content."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Union[str, Annotated[list[MessagePart], Field(min_length=1)]]
    tool_calls: Optional[Annotated[list[ToolCall], Field(min_length=1)]] = None
    tool_call_id: Optional[str] = None
    name: Optional[str] = None
    reasoning_content: Optional[str] = None  # of the assistant: its thinking before the content

    @model_validator(mode="before")
    @classmethod
    def _as_answered(cls, body: Any) -> Any:
        """An answer may be sent back as it came, with what it does not have."""
        if not isinstance(body, dict) or body.get("role") != ASSISTANT:
            return body
        body = {key: value for key, value in body.items() if value or key not in EMPTY_IN_ANSWERS}
        return dict(body, content="") if body.get("tool_calls") and body.get("content") is None else body

    def plain(self) -> dict[str, Any]:
        """The message as chat templates take it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        calls = [call.plain() for call in self.tool_calls or ()] or None
        more = dict(name=self.name, reasoning_content=self.reasoning_content)
        more |= dict(tool_calls=calls, tool_call_id=self.tool_call_id)
        return dict(role=self.role, content=text) | {name: value for name, value in more.items() if value is not None}


class Chat(TextBody):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Optional[Annotated[int, Field(ge=1, lt=1 << 31)]] = None
    logprobs: Optional[bool] = False
    top_logprobs: Optional[Annotated[int, Field(ge=0, le=MOST_TOP)]] = None
    chat_template_kwargs: Optional[dict[str, Any]] = None
    tools: Optional[Annotated[list[Tool], Field(max_length=128)]] = None
    tool_choice: Literal[None, "none", "auto"] = None
    parallel_tool_calls: Optional[bool] = None

    @property
    def callable(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as chat templates take them."""
        return [] if self.tool_choice == "none" else [tool.plain() for tool in self.tools or ()]

    @model_validator(mode="after")
    def _once(self):
        if self.max_completion_tokens is not None:
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise ApiError(400, "max_tokens and max_completion_tokens differ: give one of them", param="max_tokens")
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError(400, "top_logprobs: only with logprobs", param="top_logprobs")
        if self.callable and self.parallel_tool_calls is False:
            what = "parallel_tool_calls: false is not supported: an answer may have several calls"
            raise ApiError(400, what, param="parallel_tool_calls", code="unsupported_parameter")
        if self.max_tokens == 0:
            raise ApiError(400, "max_tokens: has to be at least 1", param="max_tokens")
        return self


def parse(kind: type[Body], body: Any) -> Body:
    """Check a body. Raises ApiError with the first parameter that is wrong."""
    if not isinstance(body, dict):
        raise ApiError(400, "the body has to be a JSON object")
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(kind, error) from None


def _refusal(kind: type[Strict], error: ValidationError) -> ApiError:
    """The first problem in the words of the client. Of the alternatives of a union, the one that got furthest counts."""
    problems = error.errors(include_url=False, include_input=False)
    top = problems[0]["loc"][0] if problems[0]["loc"] else ""
    problem = max((one for one in problems if one["loc"][:1] == (top,)), key=lambda one: len(one["loc"]))
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in _own(problem["loc"])).lstrip(".")
    if problem["type"] == "extra_forbidden":
        message = f"{path}: unknown parameter" + (did_you_mean(path, kind.model_fields) if "." not in path else "")
        return ApiError(400, message, param=path, code="unknown_parameter")
    if problem["type"] == "missing":
        return ApiError(400, f"{path}: is missing", param=path, code="missing_required_parameter")
    words = PROMPT if top == "prompt" and kind is Completion and problem["type"] != "value_error" else _words(problem)
    return ApiError(400, f"{path}: {words}", param=path, code="invalid_value")


def _own(place: tuple) -> list:
    """A place without the names of alternatives, which pydantic adds: ("prompt", "list[int]", 3) -> ["prompt", 3]."""
    return [
        part for part in place if isinstance(part, int) or re.fullmatch(r"[a-z_0-9]+", part) and part not in TYPE_NAMES
    ]


PROMPT = "has to be a text, a list of token ids, or a list of texts or of such lists"
TYPE_NAMES = {"str", "int", "float", "bool", "none", "constrained", "nullable"}


def _words(problem: Mapping[str, Any]) -> str:
    if problem["type"] == "too_short":
        return f"has to have at least {problem['ctx']['min_length']}, not {problem['ctx']['actual_length']}"
    if problem["type"] == "too_long":
        return f"has to have at most {problem['ctx']['max_length']}, not {problem['ctx']['actual_length']}"
    text = problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    text = text.replace("Input should", "has to").replace("has to be a valid", "has to be a")
    return text.replace("be a integer", "be an integer") or "invalid"


def length_of(asked: Optional[int], default: int, prompt: int, longest: int, most: int) -> int:
    """The number of tokens of an answer. Raises ApiError if the model or the server has no room for it.

    prompt: tokens of the prompt; longest: of prompt and answer, as the model allows; most: of answers, as the server does
    """
    if prompt >= longest:
        raise _too_long(
            f"the prompt has {prompt} tokens; the model's context has {longest}, of which the answer needs at least one",
            "prompt",
        )
    if asked is None:
        return min(default, longest - prompt, most)
    _check_limit(asked, most)
    if prompt + asked > longest:
        raise _too_long(
            f"max_tokens: {prompt} tokens of the prompt and {asked} more are {prompt + asked}; the context has {longest}"
        )
    return asked


def target_length_of(asked: Optional[int], default: int, source: int, longest: int, target: int, most: int) -> int:
    """As `length_of`, for an encoder-decoder, whose source and target have limits of their own."""
    if source > longest:
        raise _too_long(f"the prompt has {source} tokens; the encoder can look at {longest}", "prompt")
    if asked is None:
        return min(default, target, most)
    _check_limit(asked, most)
    if asked > target:
        raise _too_long(f"max_tokens: {asked} is more than the model's targets may have, {target}")
    return asked


def _check_limit(asked: int, most: int) -> None:
    if asked > most:
        raise ApiError(400, f"max_tokens: {asked} is more than the server's limit of {most}", param="max_tokens")


def _too_long(message: str, param: str = "max_tokens") -> ApiError:
    return ApiError(400, message, param=param, code="context_length_exceeded")
