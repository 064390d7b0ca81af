# SPDX-License-Identifier: Apache-2.0
"""Ask a server for continuations, one prompt after the other, in a terminal: Megatron-LM's client.

    python -m megatron.tools.text_generation_cli localhost:8000
    echo "Once upon a time" | python -m megatron.tools.text_generation_cli localhost:8000 --tokens-to-generate 20

It speaks to `PUT /api` of `megatron.tools.serve`, and of Megatron-LM's text generation server. In a terminal it asks for
prompts and lengths, as Megatron-LM's does. From a pipe each line is a prompt, and all answers have the same length.
"""

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Optional

from megatron.errors import DataError, Failure, SettingsError, UsageError, run_main
from megatron.settings.positional import divide, expect, parse_one
from megatron.settings.schema import setting

PROG = "python -m megatron.tools.text_generation_cli"
PIPED = 64  # tokens of answers to prompts from a pipe, as `PUT /api` has it without a length


@dataclass(frozen=True)
class ClientOptions:
    """What is asked for."""

    tokens_to_generate: Optional[int] = setting(
        "length of answers, in tokens (default: asked for in a terminal; 64 for prompts from a pipe or file)", None
    )
    temperature: Optional[float] = setting("below 1: closer to greedy; above 1: more surprising", None)
    top_k: Optional[int] = setting("choose among this many most likely tokens; 1: greedy", None)
    top_p: Optional[float] = setting("choose among the fewest tokens that together have this probability", None)
    random_seed: Optional[int] = setting("the same seed gives the same text", None, "--seed")
    api_key_file: Optional[str] = setting("file whose first line is the server's key", None)
    timeout: float = setting("seconds to wait for an answer", 600.0)


def main(argv: list[str]) -> None:
    """Print an answer to each prompt."""
    words, flags = divide(argv, ClientOptions)
    about = "Ask a server for continuations in a terminal: HOST:PORT is the server's address."
    asked = parse_one(flags, ClientOptions, f"{PROG} HOST:PORT", about)
    [address] = expect(words, "HOST:PORT", PROG)
    if asked.timeout <= 0:
        raise SettingsError(f"--timeout {asked.timeout:g}: has to be above 0")
    url = address_of(address)
    names = ("temperature", "top_k", "top_p", "random_seed")
    settings = {name: getattr(asked, name) for name in names if getattr(asked, name) is not None}
    key = key_of(asked.api_key_file)
    for prompt, length in prompts(asked.tokens_to_generate):
        body = dict(prompts=[prompt], tokens_to_generate=length, **settings)
        try:
            answer = put(url, body, key, asked.timeout)
        except ServerRefused as error:
            if not sys.stdin.isatty():
                raise
            print(f"Error: {error.what}")
            continue
        print(f"Megatron Response:\n{answer['text'][0]}" if sys.stdin.isatty() else answer["text"][0], flush=True)


class ServerRefused(Failure):
    """The server did not answer the request."""


def address_of(address: str) -> str:
    """The URL of a server's interface.

    >>> address_of("localhost:5000"), address_of("https://example.org/models/")
    ('http://localhost:5000/api', 'https://example.org/models/api')
    """
    url = address if "://" in address else f"http://{address}"
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"{address}: not an address of a server", do="HOST:PORT, as localhost:8000")
    return url.rstrip("/") + "/api"


def key_of(path: Optional[str]) -> str:
    if path is None:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").split("\n")[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--api-key-file {path}: cannot be read", str(error)) from None


def prompts(length: Optional[int]) -> Iterator[tuple[str, int]]:
    """(prompt, length of its answer), until the end of the input."""
    if not sys.stdin.isatty():
        if length is None:
            print(f"note: answers have up to {PIPED} tokens; --tokens-to-generate N: another length", file=sys.stderr)
        yield from ((line.rstrip("\n"), PIPED if length is None else length) for line in sys.stdin if line.strip())
        return
    while True:
        try:
            prompt = input("Enter prompt: ")
            given = length if length is not None else input("Enter number of tokens to generate: ")
        except EOFError:
            print()
            return
        if not prompt or not str(given).strip().isdecimal():
            print("a prompt and a number are needed")
            continue
        yield prompt, int(given)


def put(url: str, body: dict, key: str, seconds: float) -> dict:
    """The server's answer. Raises ServerRefused with its message."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, json.dumps(body).encode(), headers, method="PUT")
    try:
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        raise ServerRefused(f"{url} answers {error.code}: {_message(error.read())}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise ServerRefused(
            f"{url} does not answer: {reason}", do="check the address; start it: python -m megatron.tools.serve"
        ) from None


def _message(raw: bytes) -> str:
    """The message of an error: a text, or an object with `message` or `error`."""
    try:
        body = json.loads(raw)
    except ValueError:
        return raw.decode("utf-8", "replace")[:500]
    if isinstance(body, dict):
        inner = body.get("error")
        body = body.get("message") or (inner.get("message") if isinstance(inner, dict) else inner) or body
    return str(body)[:500]


if __name__ == "__main__":
    run_main(main)
