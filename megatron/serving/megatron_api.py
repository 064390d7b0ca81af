# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's endpoint: `PUT /api`, as its text generation server answers it.

    {"prompts": ["Once upon"], "tokens_to_generate": 8, "logprobs": true}
    -> {"text": ["Once upon a time ..."], "segments": [["Once", " upon", ...]], "logprobs": [[-3.1, ...]]}

    {"prompts": ["Once upon"], "tokens_to_generate": 8, "beam_width": 2}
    -> {"text": ["Once upon a time ...", "Once upon the ..."], "segments": [...], "scores": [-1.2, -1.4]}

Texts, segments and log-probabilities are those of prompt and answer together. The first token has no log-probability.
Those of an encoder-decoder are the answer's alone, whose tokens all have one.
Beams are answered best first; a score is the sum of the new tokens' log-probabilities, divided by a power of their number.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Optional

from pydantic import Field, model_validator

from megatron.errors import Failure
from megatron.inference.requests import Request, TokenScore
from megatron.inference.sampling import Sampling, Search
from megatron.inference.text_stream import RunningText, TextStream
from megatron.serving.answers import read_json, unless_gone
from megatron.serving.engine_thread import TextJob
from megatron.serving.errors import ApiError, in_one_line
from megatron.serving.openai_requests import MOST_TEXTS, SEEDS, Strict, parse
from megatron.serving.served_model import ServedModel, named
from megatron.serving.settings import ServeLimits
from megatron.serving.texts import encoded, parts_of

RENAMED = {"max_len": "tokens_to_generate", "sentences": "prompts"}  # as in its versions of long ago
DRAWS = ("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound")


class MegatronBody(Strict):
    """The body of PUT /api."""

    prompts: Annotated[list[str], Field(min_length=1, max_length=128)]
    model: Optional[str] = None  # the server's own, if it has several
    tokens_to_generate: Annotated[int, Field(ge=0, lt=1 << 31)] = 64
    logprobs: bool = False
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    top_p_decay: Annotated[float, Field(ge=0, le=1)] = 0.0
    top_p_bound: Annotated[float, Field(ge=0, le=1)] = 0.0
    add_BOS: bool = False
    stop_on_double_eol: bool = False
    stop_on_eol: bool = False
    prevent_newline_after_colon: bool = False
    stop_token: Optional[Annotated[int, Field(ge=0, lt=1 << 31)]] = None
    random_seed: Annotated[int, Field(ge=-1, lt=1 << 63)] = -1
    no_log: bool = False  # bodies are never logged
    beam_width: Optional[Annotated[int, Field(ge=1, le=MOST_TEXTS)]] = None
    length_penalty: Annotated[float, Field(ge=-100, le=100)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _renamed(cls, body: Any) -> Any:
        for name, other in RENAMED.items():
            if isinstance(body, dict) and name in body:
                raise ApiError(400, f"{name} is no longer used; its name is {other}", param=name)
        return body

    @model_validator(mode="after")
    def _together(self):
        if self.top_k and self.top_p:
            raise ApiError(400, "top_k and top_p: give one of them", param="top_p")
        if self.top_p_decay and not self.top_p:
            raise ApiError(400, "top_p_decay: only with top_p", param="top_p_decay")
        if self.top_p_bound > self.top_p:
            raise ApiError(400, "top_p_bound: has to be at most top_p", param="top_p_bound")
        if not all(self.prompts) and not self.add_BOS:
            raise ApiError(400, "prompts: one of them is empty; that needs add_BOS", param="prompts")
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise ApiError(400, "tokens_to_generate: 0 only with logprobs", param="tokens_to_generate")
        if self.beam_width is None and self.length_penalty != 1:
            raise ApiError(400, "length_penalty: only with beam_width", param="length_penalty")
        if self.beam_width is not None:
            self._search()
        return self

    def _search(self) -> None:
        """Raise ApiError for what has no place in a beam search. A seed has: clients send one in any case."""
        if len(self.prompts) > 1:
            raise ApiError(400, "beam_width: a request has one prompt then", param="beam_width")
        fields = type(self).model_fields
        for name in (*DRAWS, "logprobs", "stop_on_eol", "stop_on_double_eol"):
            if getattr(self, name) != fields[name].default:
                raise ApiError(400, f"{name}: has no place in a search with beam_width", param=name)

    @property
    def stop(self) -> list[str]:
        return ["\n"] if self.stop_on_eol else ["\n\n"] if self.stop_on_double_eol else []


class MegatronApi:
    """The endpoint. A request without a model's name is answered by the first one."""

    def __init__(self, models: Mapping[str, ServedModel], limits: ServeLimits):
        self.models, self.limits = models, limits

    async def generate(self, request):
        from starlette.responses import JSONResponse

        body = parse(MegatronBody, await read_json(request, self.limits))
        model = named(self.models, body.model or next(iter(self.models)))
        if model.targets and body.tokens_to_generate == 0:
            what = f"tokens_to_generate: 0 scores prompts, and {model.name} is an encoder-decoder, which has no scores"
            raise ApiError(400, what, param="tokens_to_generate")
        prompts = [await _encoded(model, text, body.add_BOS) for text in body.prompts]
        requests = self._requests(model, body, prompts)
        answer = _answer if body.beam_width is None else _found
        async with await model.thread.add(requests) as job:
            seconds = self.limits.request_timeout
            return JSONResponse(await unless_gone(request.receive, answer(model, job, body, prompts), seconds))

    def _requests(self, model: ServedModel, body: MegatronBody, prompts: list[tuple[int, ...]]) -> list[Request]:
        most, asked = self.limits.max_answer_tokens, body.tokens_to_generate
        seed = secrets.randbits(43) if body.random_seed < 0 else body.random_seed % SEEDS
        words = {name: getattr(body, name) for name in DRAWS} | dict(sampling_seed=seed)
        if body.prevent_newline_after_colon:
            words["bad_words_ids"] = _newlines_after_colons(model.tokenizer)
        end, search = model.end if body.stop_token is None else body.stop_token, None
        if body.stop_token is not None and end >= model.tokenizer.vocab_size:
            raise ApiError(400, f"stop_token: there is no token {end}", param="stop_token")
        if body.beam_width is not None:
            search = Search(body.beam_width, body.length_penalty)
        requests = []
        for number, prompt in enumerate(prompts):
            model.answer_length(asked, asked, len(prompt), most)
            sampling = Sampling(tokens_to_generate=max(1, asked), **words)
            try:
                sampling.check()
            except Failure as error:
                raise ApiError(400, in_one_line(error)) from None
            own = dict(index=number, end=end, start=model.start, search=search)
            scores = dict(logprobs=0 if body.logprobs else None, prompt_logprobs=body.logprobs and not model.targets)
            requests.append(Request(prompt, sampling, **own, **scores))
        return requests


async def _encoded(model: ServedModel, text: str, bos: bool) -> tuple[int, ...]:
    if not bos:
        return await model.encode(text, "prompts")
    first = model.tokenizer.special("bos")
    first = model.tokenizer.eod if first is None else first
    if first is None:
        raise ApiError(400, "add_BOS: the tokenizer has neither a bos nor an end of document", param="add_BOS")
    ids = await model.encode(text, "prompts") if text else ()
    return ids if ids[:1] == (first,) else (first, *ids)


def _newlines_after_colons(tokenizer) -> list[str]:
    """The pairs of a colon's token and a newline's. Some vocabularies have others within a text than at its beginning."""
    last = lambda text: set(encoded(tokenizer, text)[-1:])
    colons, newlines = (last(sign) and last(sign) | last(f"a{sign}") for sign in ":\n")
    return sorted(f"{colon},{newline}" for colon in colons for newline in newlines)


async def _answer(
    model: ServedModel, job: TextJob, body: MegatronBody, prompts: list[tuple[int, ...]]
) -> dict[str, Any]:
    befores = [() if model.targets else prompt for prompt in prompts]
    streams = [TextStream(model.tokenizer, body.stop, after=before) for before in befores]
    texts = [RunningText(stream, only_prompt=body.tokens_to_generate == 0) for stream in streams]
    scores: list[list[TokenScore]] = [[] for _ in prompts]
    async for place, part in parts_of(job, texts):
        scores[place] += part.prompt[1:]
    model.thread.meter.prompts(sum(map(len, prompts)), sum(text.cached for text in texts))
    values = [[one.logprob for one in (*of_prompt, *text.tokens)] for of_prompt, text in zip(scores, texts)]
    whole = [[*before, *(one.token for one in text.tokens)] for before, text in zip(befores, texts)]
    return _texts(model, whole) | dict(logprobs=values if body.logprobs else None)


async def _found(
    model: ServedModel, job: TextJob, body: MegatronBody, prompts: list[tuple[int, ...]]
) -> dict[str, Any]:
    """The answer of a beam search: all of its texts, best first."""
    [prompt] = prompts
    async for _, output in job:
        if output.finish == "cancelled":
            raise ApiError(503, "the search was cancelled by the server", code="cancelled")
        model.thread.meter.prompts(len(prompt), output.cached)
        before = () if model.targets else prompt
        whole = [[*before, *text.tokens] for text in output.found]
        return _texts(model, whole) | dict(scores=[text.score for text in output.found])
    raise AssertionError("a search ends with an output")


def _texts(model: ServedModel, tokens: list[list[int]]) -> dict[str, Any]:
    decode, shown = model.tokenizer.decode, model.token_texts.shown
    segments = [[decode(ids[:1]), *map(shown, ids[1:])] for ids in tokens]
    return dict(text=[decode(ids) for ids in tokens], segments=segments)
