# SPDX-License-Identifier: Apache-2.0
"""The token ids of a text, and the text of token ids, as vLLM's server gives them.

POST /tokenize {"prompt": "Once upon"}      -> {"count": 2, "max_model_len": 1024, "tokens": [7454, 2402]}
POST /detokenize {"tokens": [7454, 2402]}   -> {"prompt": "Once upon"}
"""

from collections.abc import Mapping
from typing import Annotated, Any, Optional

from pydantic import Field

from megatron.serving.answers import read_json
from megatron.serving.errors import ApiError
from megatron.serving.openai_requests import Message, Strict, Token, parse
from megatron.serving.served_model import ServedModel, named
from megatron.serving.settings import ServeLimits
from megatron.serving.tool_calls import Tool


class Tokenize(Strict):
    """The body of POST /tokenize: a prompt, or the messages of a conversation."""

    model: Optional[str] = None
    prompt: Optional[str] = None
    messages: Optional[Annotated[list[Message], Field(min_length=1)]] = None
    tools: Optional[list[Tool]] = None


class Detokenize(Strict):
    """The body of POST /detokenize."""

    model: Optional[str] = None
    tokens: list[Token]


class TokensApi:
    """Both endpoints."""

    def __init__(self, models: Mapping[str, ServedModel], limits: ServeLimits):
        self.models, self.limits = models, limits

    async def tokenize(self, request):
        from starlette.responses import JSONResponse

        body = parse(Tokenize, await read_json(request, self.limits))
        model = named(self.models, body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "prompt and messages: give one of them", param="prompt")
        if body.messages is not None:
            tokens = await model.conversation(
                [message.plain() for message in body.messages], tools=[tool.plain() for tool in body.tools or ()]
            )
        else:
            tokens = await model.encode(body.prompt, "prompt") if body.prompt else ()
        found: dict[str, Any] = dict(count=len(tokens), max_model_len=model.longest, tokens=list(tokens))
        return JSONResponse(found)

    async def detokenize(self, request):
        from starlette.responses import JSONResponse

        body = parse(Detokenize, await read_json(request, self.limits))
        model = named(self.models, body.model)
        tokens = await model.encode(body.tokens, "tokens") if body.tokens else ()
        return JSONResponse(dict(prompt=model.tokenizer.decode(list(tokens))))
