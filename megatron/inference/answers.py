# SPDX-License-Identifier: Apache-2.0
"""Texts for texts: the answers of a model to prompts, with stop strings, streaming and log-probabilities.

`tools.generate` and `Loaded.generate` use it. Prompts of an encoder-decoder are its sources.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple, Optional

from megatron.errors import SettingsError, did_you_mean
from megatron.inference.batch_invariant import FLAG
from megatron.inference.engine import Engine
from megatron.inference.generation import BATCH, check_prompts, generate, generate_targets
from megatron.inference.prompts import boundaries, no_sentinels, source_of
from megatron.inference.requests import FinishReason, Request, TokenScore
from megatron.inference.sampling import Ends, Sampling, Search
from megatron.inference.scoring import ALONE
from megatron.inference.text_stream import RunningText, TextStream
from megatron.mpu.mesh import Axis


@dataclass
class GeneratedText:
    """A text that a model wrote.

    text    ends before a stop string; its tokens include those of the stop string, and not the one that ends a text
    finish  stop: at its end, or a stop string; length: at the greatest length; None: it is not finished
    scores  log-probabilities of its tokens; prompt: of those of the prompt
    """

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    finish: Optional[FinishReason] = None
    scores: list[TokenScore] = field(default_factory=list)
    prompt: tuple[TokenScore, ...] = ()


OnText = Callable[[int, str, GeneratedText], None]  # receives (number of the answer, its new text, the answer so far)


def ignored(number: int, text: str, answer: GeneratedText) -> None:
    """For callers that wait for whole texts."""


@dataclass(frozen=True)
class Asked:
    """Prompts, and how to answer them.

    samples   answers to each prompt; of beam search the best ones
    seeds     a seed for each prompt; None: that of `sampling`, and the number of the answer among all
    logprobs, prompt_logprobs: as in `Request`
    ids       the tokens of the prompts, if they are those of conversations; None: of texts
    end       the tokens that end an answer, in the place of the model's
    """

    prompts: Sequence[str]
    sampling: Sampling
    search: Search = Search()
    samples: int = 1
    seeds: Optional[Sequence[int]] = None
    use_cache: bool = True
    logprobs: Optional[int] = None
    prompt_logprobs: bool = False
    ids: Optional[Sequence[Sequence[int]]] = None
    end: Ends = None

    @property
    def alone(self) -> bool:
        """Whether an answer is a text of its own, as in a conversation, and not the rest of its prompt's text."""
        return self.ids is not None

    @property
    def draws(self) -> list[tuple[Sampling, int]]:
        """(settings with the seed, number among the texts of this seed) of each answer."""
        if self.seeds is None:
            return [(self.sampling, index) for index in range(len(self.prompts) * self.samples)]
        own = [replace(self.sampling, sampling_seed=seed) for seed in self.seeds]
        return [(sampling, index) for sampling in own for index in range(self.samples)]

    def check(self, pairs: bool, batch_invariant: bool = False) -> None:
        """Raise SettingsError for what cannot be done together. pairs: for an encoder-decoder; batch_invariant: for a model
        that computes the bits of training
        """
        beams = self.search.num_beams
        if self.seeds is not None and len(self.seeds) != len(self.prompts):
            raise SettingsError(f"{len(self.seeds)} seeds for {len(self.prompts)} prompts", do="give each prompt one")
        if beams > 1 and self.samples > beams:
            raise SettingsError(
                f"--num-samples {self.samples}: a search with --num-beams {beams} finds {beams} texts",
                do=f"--num-beams {self.samples}, or fewer samples",
            )
        if batch_invariant and (beams > 1 or not self.use_cache):
            other = f"--num-beams {beams}" if beams > 1 else "--no-use-cache"
            raise SettingsError(
                f"{FLAG} covers texts that are generated one by one with a cache, and not {other}", do="leave one out"
            )
        why = "beam search" if beams > 1 else "--no-use-cache" if not self.use_cache else "an encoder-decoder" * pairs
        if why and (self.logprobs is not None or self.prompt_logprobs):
            flag = "--prompt-logprobs" if self.logprobs is None else f"--logprobs {self.logprobs}"
            raise SettingsError(f"{flag}: there are no log-probabilities with {why}", do="leave one out")


class GeneratedTexts(NamedTuple):
    """The answers, those to one prompt after each other; the most tokens that each could have had; notices for the user."""

    answers: list[GeneratedText]
    rooms: list[int]
    notices: list[str]


def answered(loaded, tokenizer, asked: Asked, pp: Axis = ALONE, on_text: OnText = ignored) -> GeneratedTexts:
    """Answer prompts. Of several ranks that share a model, at least the first one returns the answers.

    loaded:  `inference.load.Loaded`, a model that continues texts or an encoder-decoder
    pp:      ranks that share it; all of them call this
    on_text: is called as texts grow, and when they end; with beam search, without a cache and for encoder-decoders only at
             the end, once for each
    """
    if getattr(loaded.model, "is_program", False):  # of an export: its cache is its own
        asked = replace(asked, use_cache=False)
    asked.check(pairs := hasattr(loaded.model, "decode"), loaded.batch_invariant)
    asked.sampling.check_tokens(tokenizer.vocab_size)
    sampling, search, more = asked.sampling, asked.search, dict(best=asked.samples, draws=asked.draws)
    if pairs:
        sources = [source_of(tokenizer, prompt, number) for number, prompt in enumerate(asked.prompts, 1)]
        facts, (start, end) = loaded.model.facts, boundaries(tokenizer, loaded.model.facts, search)
        more |= dict(longest=(facts.source, facts.target), start=start, end=end)
        found = generate_targets(loaded.model, sources, sampling, search, **more)
        rooms = [facts.target] * len(found)
        return GeneratedTexts(
            _whole(found, rooms, tokenizer, sampling, on_text, [()] * len(found)),
            rooms,
            no_sentinels(tokenizer, sources),
        )
    own = tokenizer.eod if loaded.ends is None else loaded.ends
    end = own if asked.end is None else asked.end
    prompts = asked.ids or [tokenizer.encode_prompt(prompt) for prompt in asked.prompts]
    check_prompts(prompts, loaded.longest)
    rooms = [loaded.longest - len(prompt) for prompt in prompts for _ in range(asked.samples)]
    if search.num_beams > 1 or not asked.use_cache:
        more |= dict(longest=loaded.longest, end=end, use_cache=asked.use_cache, pp=pp)
        found = generate(loaded.model, prompts, sampling, search, **more)
        befores = [() if asked.alone else prompt for prompt in prompts for _ in range(asked.samples)]
        return GeneratedTexts(_whole(found, rooms, tokenizer, sampling, on_text, befores), rooms, [])
    scores = dict(end=end, logprobs=asked.logprobs, prompt_logprobs=asked.prompt_logprobs)
    repeated = (tuple(prompt) for prompt in prompts for _ in range(asked.samples))
    requests = [Request(prompt, *draw, **scores) for prompt, draw in zip(repeated, asked.draws, strict=True)]
    engine = Engine(loaded.model, longest=loaded.longest, max_batch=max(1, min(len(requests), BATCH)))
    if not engine.link.is_first:
        engine.follow()
        return GeneratedTexts([], [], [])
    try:
        return GeneratedTexts(continued(engine, requests, tokenizer, on_text, asked.alone), rooms, [])
    finally:
        engine.close()


def answers_to(loaded, texts: Sequence[str], **settings) -> list[GeneratedText]:
    """The answers to texts. settings: of `Sampling`, `Search` and `Asked`. Raises SettingsError for unknown ones."""
    loaded.check_words()
    if not (hasattr(loaded.model, "decode") or loaded.continues_texts):
        raise SettingsError(f"a model of type {loaded.config.model.model_type} generates nothing")
    groups = dict(asked=Asked, sampling=Sampling, search=Search)
    names = {field.name: group for group, kind in groups.items() for field in fields(kind)} | dict(prompts=None)
    own: dict[str, dict] = {group: {} for group in groups}
    for name, value in settings.items():
        if names.get(name) not in groups or name in groups:
            raise SettingsError(f"there is no setting {name} of generation{did_you_mean(name, names)}")
        own[names[name]][name] = value
    sampling, search = Sampling(**own["sampling"]), Search(**own["search"])
    sampling.check()
    search.check(sampling)
    return answered(loaded, loaded.tokenizer, Asked(texts, sampling, search, **own["asked"])).answers


def continued(
    engine, requests: Sequence[Request], tokenizer, on_text: OnText = lambda *_: None, alone: bool = False
) -> list[GeneratedText]:
    """The answers to requests, by an engine that has no others. alone: answers are decoded as texts of their own, as
    evaluation harnesses do, not as continuations of their prompts.
    """
    found = [GeneratedText() for _ in requests]
    numbers = {engine.add(request): place for place, request in enumerate(requests)}
    running = [
        RunningText(
            TextStream(
                tokenizer,
                request.sampling.stop or (),
                request.sampling.min_tokens_to_generate,
                () if alone else request.prompt,
            )
        )
        for request in requests
    ]
    while engine.busy:
        for output in engine.step():
            place = numbers[output.request]
            answer, text = found[place], running[place]
            if text.ended:  # the last words of a text that was cancelled
                continue
            part = text.take(output)
            if text.ended and not output.finish:
                engine.cancel(output.request)
            answer.prompt = answer.prompt or part.prompt
            if output.new is not None:
                answer.tokens.append(output.new.token)
                answer.scores += [output.new] * (requests[place].logprobs is not None)
            answer.text, answer.finish = answer.text + part.text, part.finish
            if part.text or part.finish:
                on_text(place, part.text, answer)
    return found


def _whole(
    found: Sequence[Sequence[int]],
    rooms: Sequence[int],
    tokenizer,
    sampling: Sampling,
    on_text: OnText,
    befores: Sequence[Sequence[int]],
) -> list[GeneratedText]:
    """The answers of tokens that are all there. befores: the tokens that each of them continues."""
    made = []
    for place, (tokens, room, before) in enumerate(zip(found, rooms, befores, strict=True)):
        stream, text = TextStream(tokenizer, sampling.stop or (), sampling.min_tokens_to_generate, before), ""
        for token in tokens:
            text += stream.feed(token).text
            if stream.stopped:
                break
        text += "" if stream.stopped else stream.finish().text
        cut = len(tokens) == min(room, sampling.tokens_to_generate) and not stream.stopped
        made.append(GeneratedText(text, list(tokens[: stream.fed]), "length" if cut else "stop"))
        on_text(place, text, made[-1])
    return made
