# SPDX-License-Identifier: Apache-2.0
"""Megatron-LM's endpoint: `PUT /api`, as its text generation server answers it.

    {"prompts": ["Once upon"], "tokens_to_generate": 8, "logprobs": true}
    -> {"text": ["Once upon a time ..."], "segments": [["Once", " upon", ...]], "logprobs": [[-3.1, ...]]}

Texts, segments and log-probabilities are those of prompt and answer together. The first token has no log-probability.
"""

import secrets
from typing import Annotated, Any, Optional

from pydantic import Field, model_validator

from megatron.errors import Failure
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.inference.text_stream import TextStream
from megatron.serving.answers import read_json, unless_gone
from megatron.serving.engine_thread import TextJob
from megatron.serving.errors import ApiError, in_one_line
from megatron.serving.openai_requests import SEEDS, Strict, length_of, parse
from megatron.serving.served_model import ServedModel
from megatron.serving.settings import ServeLimits

RENAMED = {"max_len": "tokens_to_generate", "sentences": "prompts"}  # as in its versions of long ago
MISSING = {  # name -> what to use instead
    "beam_width": "beams are not served: python -m megatron.tools.generate --num-beams",
    "length_penalty": "it is of beam search: python -m megatron.tools.generate --num-beams",
    "prevent_newline_after_colon": "not supported by this server",
}


class MegatronBody(Strict):
    """The body of PUT /api."""

    prompts: Annotated[list[str], Field(min_length=1, max_length=128)]
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
    stop_token: Optional[Annotated[int, Field(ge=0, lt=1 << 31)]] = None
    random_seed: Annotated[int, Field(ge=-1, lt=1 << 63)] = -1
    no_log: bool = False  # bodies are never logged

    @model_validator(mode="before")
    @classmethod
    def _not_here(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name, other in RENAMED.items():
            if name in body:
                raise ApiError(400, f"{name} is no longer used; its name is {other}", param=name)
        for name, why in MISSING.items():
            if body.get(name) not in (None, False):
                raise ApiError(400, f"{name}: {why}", param=name, code="unsupported_parameter")
        return {name: value for name, value in body.items() if name not in MISSING}

    @model_validator(mode="after")
    def _together(self):
        if self.top_k and self.top_p:
            raise ApiError(400, "top_k and top_p: give one of them", param="top_p")
        if self.top_p_decay and not self.top_p:
            raise ApiError(400, "top_p_decay: only with top_p", param="top_p_decay")
        if self.top_p_bound and not 0 < self.top_p_bound <= self.top_p:
            raise ApiError(400, "top_p_bound: has to be at most top_p", param="top_p_bound")
        if not all(self.prompts):
            raise ApiError(400, "prompts: one of them is empty", param="prompts")
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise ApiError(400, "tokens_to_generate: 0 only with logprobs", param="tokens_to_generate")
        return self

    @property
    def stop(self) -> list[str]:
        return ["\n"] if self.stop_on_eol else ["\n\n"] if self.stop_on_double_eol else []


class MegatronApi:
    """The endpoint for one model."""

    def __init__(self, model: ServedModel, limits: ServeLimits):
        self.model, self.limits = model, limits

    async def generate(self, request):
        from starlette.responses import JSONResponse

        body = parse(MegatronBody, await read_json(request, self.limits))
        prompts = [await self._encode(text, body.add_BOS) for text in body.prompts]
        requests = self._requests(body, prompts)
        async with await self.model.thread.add(requests) as job:
            seconds = self.limits.request_timeout
            return JSONResponse(await unless_gone(request.receive, self._answer(job, body, prompts), seconds))

    async def _encode(self, text: str, bos: bool) -> tuple[int, ...]:
        ids = await self.model.encode(text, "prompts")
        if not bos:
            return ids
        first = self.model.tokenizer.special("bos")
        first = self.model.tokenizer.eod if first is None else first
        if first is None:
            raise ApiError(400, "add_BOS: the tokenizer has neither a bos nor an end of document", param="add_BOS")
        return (first, *ids)

    def _requests(self, body: MegatronBody, prompts: list[tuple[int, ...]]) -> list[Request]:
        most, asked = self.limits.max_answer_tokens, body.tokens_to_generate
        seed = secrets.randbits(43) if body.random_seed < 0 else body.random_seed % SEEDS
        names = ("temperature", "top_k", "top_p", "top_p_decay", "top_p_bound")
        words = {name: getattr(body, name) for name in names} | dict(sampling_seed=seed)
        requests = []
        for number, prompt in enumerate(prompts):
            length_of(asked, asked, len(prompt), self.model.longest, most)
            sampling = Sampling(tokens_to_generate=max(1, asked), **words)
            try:
                sampling.check()
            except Failure as error:
                raise ApiError(400, in_one_line(error)) from None
            end = self.model.end if body.stop_token is None else body.stop_token
            scores = dict(logprobs=0 if body.logprobs else None, prompt_logprobs=body.logprobs)
            requests.append(Request(prompt, sampling, index=number, end=end, **scores))
        return requests

    async def _answer(self, job: TextJob, body: MegatronBody, prompts: list[tuple[int, ...]]) -> dict[str, Any]:
        tokenizer, shown = self.model.tokenizer, self.model.token_texts.shown
        tokens = [list(prompt) for prompt in prompts]
        values: list[list[Optional[float]]] = [[] for _ in prompts]
        streams = [TextStream(tokenizer, body.stop) for _ in prompts]
        cached = 0
        async for place, output in job:
            if output.finish == "cancelled" and not streams[place].stopped:
                raise ApiError(503, "the text was cancelled by the server", code="cancelled")
            cached += output.cached
            values[place] += [score.logprob for score in output.prompt[1:]]
            if output.new is not None and body.tokens_to_generate and not streams[place].stopped:
                tokens[place].append(output.new.token)
                values[place].append(output.new.logprob)
                if streams[place].feed(output.new.token).stopped:
                    job.cancel(place)
        self.model.thread.meter.prompts(sum(map(len, prompts)), cached)
        answer: dict[str, Any] = dict(text=[tokenizer.decode(ids) for ids in tokens])
        answer["segments"] = [[tokenizer.decode(ids[:1]), *map(shown, ids[1:])] for ids in tokens]
        answer["logprobs"] = values if body.logprobs else None
        return answer
