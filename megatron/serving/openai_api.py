# SPDX-License-Identifier: Apache-2.0
"""OpenAI's endpoints: /v1/completions, /v1/chat/completions and /v1/models."""

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import orjson

from megatron.errors import Failure
from megatron.inference.requests import Request, TokenScore
from megatron.inference.text_stream import RunningText, TextPart, TextStream
from megatron.serving.answers import EventStream, read_json, unless_gone
from megatron.serving.engine_thread import TextJob
from megatron.serving.errors import ApiError, in_one_line
from megatron.serving.openai_requests import Chat, Completion, TextBody, parse
from megatron.serving.served_model import ServedModel, named
from megatron.serving.settings import ServeLimits
from megatron.serving.texts import TokenTexts, parts_of
from megatron.serving.tool_calls import CallPart, CallReader

SHORT_ANSWER = 16  # tokens of a completion for which no length is given, as OpenAI's
LEAST = -9999.0  # stands for a log-probability of -inf, which JSON does not have
NEAR = 8  # characters that a tokenizer drops or changes in one place of a text


@dataclass(frozen=True)
class TextRequest:
    """A body in the engine's terms. requests: `each` texts for each prompt, of which the `n` best are the answer."""

    model: ServedModel
    body: TextBody
    prompts: Sequence[tuple[int, ...]]
    requests: Sequence[Request]
    each: int


class OpenAI:
    """The endpoints for some models, by name."""

    def __init__(self, models: Mapping[str, ServedModel], limits: ServeLimits):
        self._models, self.limits = models, limits

    async def models(self, request):
        return _json(dict(object="list", data=[self._about(model) for model in self._models.values()]))

    async def model(self, request):
        return _json(self._about(named(self._models, request.path_params["name"])))

    def _about(self, model: ServedModel) -> dict[str, Any]:
        sizes = dict(
            max_model_len=model.longest, max_answer_len=min(model.longest_answer, self.limits.max_answer_tokens)
        )
        kind = dict(chat=model.template is not None, encoder_decoder=model.targets is not None)
        who = dict(id=model.name, object="model", created=model.created, owned_by="megatron")
        return dict(**who, **sizes, **kind, root=model.thread.version)

    async def completions(self, request):
        body = parse(Completion, await read_json(request, self.limits))
        model = named(self._models, body.model)
        if model.targets and (body.echo or body.max_tokens == 0):
            what = f"{model.name} is an encoder-decoder: its answers do not continue their prompts"
            raise ApiError(
                400, f"echo: {what}" if body.echo else f"max_tokens: 0 scores prompts, and {what}", param="echo"
            )
        texts = body.prompts
        names = ["prompt"] if len(texts) == 1 else [f"prompt[{number}]" for number in range(len(texts))]
        prompts = [await model.encode(text, name) for text, name in zip(texts, names)]
        each = body.best_of or body.n
        scores = body.logprobs if body.logprobs is not None or each == body.n else 0
        more = dict(logprobs=scores, prompt_logprobs=bool(body.echo) and body.logprobs is not None)
        work = self._work(model, body, prompts, SHORT_ANSWER, each, model.end, more)
        shown = [text if isinstance(text, str) else model.tokenizer.decode(text) for text in texts]
        return await self._answer(request, work, Completions(work, shown if body.echo else [""] * len(shown)))

    async def chat(self, request):
        body = parse(Chat, await read_json(request, self.limits))
        model = named(self._models, body.model)
        messages = [message.plain() for message in body.messages]
        prompt = await model.conversation(messages, body.chat_template_kwargs or {}, body.callable)
        scores = (body.top_logprobs or 0) if body.logprobs else None
        work = self._work(model, body, [prompt], model.longest_answer, body.n, model.end_of_turn, dict(logprobs=scores))
        return await self._answer(request, work, Chats(work))

    def _work(
        self, model: ServedModel, body: TextBody, prompts, default: int, each: int, end, more: dict
    ) -> TextRequest:
        most = self.limits.max_answer_tokens
        lengths = [model.answer_length(body.max_tokens, default, len(prompt), most) for prompt in prompts]
        requests = []
        for name in ("logit_bias", "stop_token_ids"):
            for token in getattr(body, name) or ():
                if int(token) >= model.tokenizer.vocab_size:
                    raise ApiError(400, f"{name}: there is no token {token}", param=name, code="invalid_value")
        for prompt, length in zip(prompts, lengths):
            if (body.min_tokens or 0) > length:
                what = f"min_tokens: {body.min_tokens} is more than the longest answer, {length}"
                raise ApiError(400, what, param="min_tokens")
            sampling = body.sampling(length, model.defaults)
            try:
                sampling.check()
            except Failure as error:
                raise ApiError(400, in_one_line(error)) from None
            own = dict(sampling=sampling, end=end, start=model.start, **more)
            requests += [Request(prompt, index=number, **own) for number in range(each)]
        return TextRequest(model, body, prompts, requests, each)

    async def _answer(self, request, work: TextRequest, form: "Form"):
        """Generate, and answer with the whole or with a stream."""
        request.scope["label"] = work.body.label
        seconds = self.limits.request_timeout
        job = await work.model.thread.add(work.requests)
        words = dict(stop=work.body.stop or [], least=work.body.min_tokens or 0)
        continues = form.continues and not work.model.targets
        befores = [one.prompt if continues else () for one in work.requests]
        streams = [TextStream(work.model.tokenizer, **words, after=before) for before in befores]
        texts = [RunningText(stream, only_prompt=work.body.max_tokens == 0) for stream in streams]
        form.version = job.version
        if work.body.stream:
            return EventStream(_events(job, work, texts, form), seconds, job.cancel)
        async with job:
            return _json(await unless_gone(request.receive, _whole(job, work, texts, form), seconds))


async def _whole(job: TextJob, work: TextRequest, texts: list[RunningText], form: "Form") -> dict[str, Any]:
    wholes = [TextPart() for _ in texts]
    async for place, part in parts_of(job, texts):
        wholes[place] = _joined(wholes[place], part)
    n, choices = work.body.n, []
    for first in range(0, len(texts), work.each):
        places = range(first, first + work.each)
        best = sorted(places, key=lambda place: -texts[place].logprob / max(1, len(texts[place].tokens)))[:n]
        for place in sorted(best, key=lambda place: place) if work.each == n else best:
            choices.append(form.choice(len(choices), wholes[place], first // work.each, whole=True))
    return form.frame(form.whole) | dict(choices=choices, usage=_usage(work, texts))


async def _events(job: TextJob, work: TextRequest, texts: list[RunningText], form: "Form") -> AsyncIterator[Any]:
    options = work.body.stream_options
    usage = dict(usage=None) if options and options.include_usage else {}
    frame = form.frame(form.chunk)
    async with job:
        for place in range(len(texts)):
            for choice in form.start(place):
                yield frame | dict(choices=[choice]) | usage
        async for place, part in parts_of(job, texts):
            yield frame | dict(choices=[form.choice(place, part, place // work.each)]) | usage
        if usage:
            yield frame | dict(choices=[], usage=_usage(work, texts))
        yield b"[DONE]"


def _joined(one: TextPart, other: TextPart) -> TextPart:
    return TextPart(one.text + other.text, one.scores + other.scores, other.finish, one.prompt + other.prompt)


def _usage(work: TextRequest, texts: list[RunningText]) -> dict[str, Any]:
    prompt = sum(map(len, work.prompts))
    cached = sum(text.cached for text in texts[:: work.each])
    new = sum(len(text.tokens) for text in texts)
    work.model.thread.meter.prompts(prompt, cached)
    details = dict(prompt_tokens_details=dict(cached_tokens=cached))
    return dict(prompt_tokens=prompt, completion_tokens=new, total_tokens=prompt + new, **details)


class Form:
    """How an endpoint writes its answers.

    whole, chunk  names of the objects
    letters       the beginning of their ids
    continues     an answer continues the text of its prompt, and is not a text of its own
    """

    whole = chunk = letters = ""
    continues = False

    def __init__(self, work: TextRequest):
        self.model, self.version, self.scored = work.model, "", bool(work.body.logprobs is not None)
        self.id, self.created = f"{self.letters}-{uuid.uuid4().hex}", int(time.time())

    def frame(self, kind: str) -> dict[str, Any]:
        fingerprint = dict(system_fingerprint=self.version)
        return dict(id=self.id, object=kind, created=self.created, model=self.model.name, **fingerprint)

    def start(self, place: int) -> list[dict[str, Any]]:
        """What a stream begins with."""
        return []

    def choice(self, place: int, part: TextPart, prompt: int, whole: bool = False) -> dict[str, Any]:
        raise NotImplementedError


class Completions(Form):
    """texts: what is repeated before the answers to each prompt (echo)."""

    whole = chunk = "text_completion"
    letters = "cmpl"
    continues = True

    def __init__(self, work: TextRequest, texts: Sequence[str]):
        super().__init__(work)
        self.texts, self.echo, self.prompts = texts, bool(work.body.echo), work.prompts
        self.streams: dict[int, TextStream] = {}
        self.repeated: set[int] = set()
        self.longer: dict[int, int] = {}  # characters that a prompt has more than what it is decoded to

    def choice(self, place: int, part: TextPart, prompt: int, whole: bool = False) -> dict[str, Any]:
        text, scores = part.text, list(part.scores)
        if self.echo and place not in self.repeated:
            self.repeated.add(place)
            text, scores = self.texts[prompt] + text, [*part.prompt, *scores]
        logprobs = self._logprobs(place, prompt, scores) if self.scored else None
        return dict(index=place, text=text, logprobs=logprobs, finish_reason=part.finish)

    def _logprobs(self, place: int, prompt: int, scores: Sequence[TokenScore]) -> dict[str, list]:
        names = self.model.token_texts.of
        tokens = [names(score.token) for score in scores]
        offsets = self._offsets(place, prompt, [score.token for score in scores])
        top = []
        for score in scores:
            likely = {names(token): _finite(value) for token, value in score.top}
            top.append(None if score.logprob is None else likely | {names(score.token): _finite(score.logprob)})
        values = [None if score.logprob is None else _finite(score.logprob) for score in scores]
        return dict(tokens=tokens, token_logprobs=values, top_logprobs=top, text_offset=offsets)

    def _offsets(self, place: int, prompt: int, tokens: Sequence[int]) -> list[int]:
        """Where each token begins in the text, in characters. What the tokenizer puts before a prompt is not in it."""
        tokenizer, ids, offsets = self.model.tokenizer, self.prompts[prompt], []
        if place not in self.streams:
            self.streams[place] = TextStream(tokenizer, after=() if self.echo else ids)
            hidden = (
                len(tokenizer.prefix) if self.echo and ids[: len(tokenizer.prefix)] == tuple(tokenizer.prefix) else 0
            )
            tokens, offsets = tokens[hidden:], [0] * hidden
        for token in tokens:
            offsets.append(self.streams[place].position + self.longer.get(place, 0))
            self.streams[place].feed(token)
        if self.echo and place not in self.longer:
            text, decoded = self.texts[prompt], tokenizer.decode(ids[hidden:])
            places = places_in(text, decoded) if decoded != text else range(len(text) + 1)
            self.longer[place] = more = len(text) - len(decoded)
            of_prompt, others = offsets[hidden : len(ids)], offsets[len(ids) :]
            moved = [places[offset] for offset in of_prompt] + [offset + more for offset in others]
            offsets[hidden:] = moved
        return offsets


def places_in(text: str, decoded: str) -> list[int]:
    """For each place in a decoded prompt, and for its end, the place in the text that was encoded.

    They differ where a tokenizer drops spaces or normalizes: the nearest three characters that are the same follow.

    >>> places_in("<a> b", "<a>b"), places_in("e\u0301 for", "\xe9 for")
    ([0, 1, 2, 4, 5], [0, 2, 3, 4, 5, 6])
    """
    places: list[int] = []
    steps = [(total - right, right) for total in range(1, NEAR) for right in range(total + 1)]
    at = 0
    while (here := len(places)) < len(decoded):
        left = right = 1
        if decoded[here] != text[at : at + 1]:
            ahead, below = decoded[here : here + NEAR + 3], text[at : at + NEAR + 3]
            same = (step for step in steps if ahead[step[0] : step[0] + 3] == below[step[1] : step[1] + 3])
            left, right = next(same, (1, 1))
        places += [min(at, len(text))] * left
        at += right
    return [*places, min(at, len(text))]


class Chats(Form):
    whole, chunk, letters = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, work: TextRequest):
        super().__init__(work)
        self.scored = bool(work.body.logprobs)
        self.readers = [CallReader() if work.body.callable else None for _ in work.requests]

    def start(self, place: int) -> list[dict[str, Any]]:
        delta = dict(role="assistant", content="")
        return [dict(index=place, delta=delta, logprobs=None, finish_reason=None)]

    def choice(self, place: int, part: TextPart, prompt: int, whole: bool = False) -> dict[str, Any]:
        reader, new, finish = self.readers[place], CallPart(part.text), part.finish
        if reader:
            first = reader.count
            new = reader.feed(part.text, last=finish is not None)
            finish = "tool_calls" if finish == "stop" and reader.count else finish
        if whole:
            calls = dict(tool_calls=new.calls) if new.calls else {}
            content = None if calls and not new.text else new.text
            said = dict(message=dict(role="assistant", content=content, refusal=None, **calls))
        else:
            calls = [dict(call, index=number) for number, call in enumerate(new.calls, first)] if new.calls else None
            said = dict(delta=dict(content=new.text) if new.text else {})
            said["delta"] |= dict(tool_calls=calls) if calls else {}
        scores = [_chat_score(self.model.token_texts, score) for score in part.scores]
        logprobs = dict(content=scores, refusal=None) if self.scored and (scores or whole) else None
        return dict(index=place, **said, logprobs=logprobs, finish_reason=finish)


def _chat_score(texts: TokenTexts, score: TokenScore) -> dict[str, Any]:
    top = [_named_score(texts, token, value) for token, value in score.top]
    return _named_score(texts, score.token, score.logprob) | dict(top_logprobs=top)


def _named_score(texts: TokenTexts, token: int, logprob: Optional[float]) -> dict[str, Any]:
    text = texts.of(token)
    known = not text.startswith("token_id:")
    return dict(token=text, logprob=_finite(logprob), bytes=list(text.encode()) if known else None)


def _finite(value: Optional[float]) -> float:
    return max(LEAST, LEAST if value is None else value)


def _json(value: Any, status: int = 200):
    from starlette.responses import Response

    return Response(orjson.dumps(value), status, media_type="application/json")
