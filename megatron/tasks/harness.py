# SPDX-License-Identifier: Apache-2.0
"""A model for lm-evaluation-harness (`pip install lm_eval`): log-likelihoods, rolling log-likelihoods, greedy generation.

All ranks of a job run the same evaluation: data parallel ranks take turns at the batches, tensor and pipeline parallel
ranks share the model, and at the end all ranks have all results.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from megatron.errors import DataError, SettingsError
from megatron.inference.answers import continued
from megatron.inference.engine import Engine
from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.mpu.initialize import RankContext

LONGEST_TEXT = 256  # default number of tokens of a generated text


class HarnessModel(TemplateLM):
    """A model for lm-evaluation-harness. model: has `logits`; longest: its context length; batch_size: texts per batch."""

    def __init__(self, model, tokenizer, context: RankContext, *, longest: int, batch_size: int):
        super().__init__()
        if tokenizer.eod is None:
            raise SettingsError(
                "the tokenizer has no end-of-document token, which has to precede texts without context"
            )
        self.model, self.words, self.context = model, tokenizer, context
        self.max_length, self.batch = longest, batch_size

    @property
    def eot_token_id(self) -> int:
        return self.words.eod

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        return self.words.begin

    def tok_encode(self, string: str, add_special_tokens: Optional[bool] = None, **kwargs) -> list[int]:
        """The ids of a text, with what the tokenizer puts before a prompt, unless add_special_tokens is False."""
        prefix = () if add_special_tokens is False else self.words.prefix
        return [*prefix, *self.words.encode_special(string)]

    def _loglikelihood_tokens(self, requests, disable_tqdm: bool = False, **kwargs) -> list[tuple[float, bool]]:
        """(sum of the continuation's log-probabilities, whether greedy decoding gives it) for each request.

        Long requests are truncated at the beginning.
        """
        pairs = [(list(before)[-self.max_length :], list(after)[-self.max_length :]) for _, before, after in requests]
        return self.shared(pairs, lambda pair: len(pair[0]) + len(pair[1]), self.score)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = False) -> list[float]:
        """Sum of the log-probabilities of all tokens of each text, after `prefix_token_id`, in disjoint windows."""
        windows = [
            [
                (None, *make_disjoint_window(window))
                for window in get_rolling_token_windows(
                    token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                    prefix_token=self.prefix_token_id,
                    max_seq_len=self.max_length,
                    context_len=1,
                )
            ]
            for request in requests
        ]
        scores = iter(self._loglikelihood_tokens([window for text in windows for window in text]))
        return [sum(next(scores)[0] for _ in text) for text in windows]

    def generate_until(self, requests, disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each context, up to the first of its `until` or the model's context length.

        Raises DataError for a context without room for a continuation.
        """
        asked = [
            (self.tok_encode(text) or [self.prefix_token_id], dict(options))
            for text, options in (one.args for one in requests)
        ]
        for context, options in asked:
            if options.get("do_sample") and options.get("temperature", 1.0):
                raise SettingsError("a task asks for texts that are drawn (do_sample)", do="give it do_sample: false")
            if len(context) >= self.max_length:
                raise DataError(
                    f"a task asks for a text after {len(context)} tokens, and the model can look at {self.max_length}",
                    do="give fewer examples before each question (--num-fewshot), or leave the task out",
                )
        short = sum(len(context) + _room(options) > self.max_length for context, options in asked)
        if short and self.context.is_rank_zero:
            print(
                f"note: {short} of {len(asked)} texts end earlier than their task allows: the model can look at "
                f"{self.max_length} tokens, context included",
                file=sys.stderr,
            )
        return self.shared(asked, lambda one: len(one[0]), self.write)

    # ---- batches ------------------------------------------------------------------------------------------------------

    def shared(self, items: Sequence[Any], size: Callable[[Any], int], work: Callable[[list], Optional[list]]) -> list:
        """Run work(batch) -> results over all items, shared among data parallel ranks; returns all results in the order of
        `items` on all ranks.

        Batches are sorted by size. work may return None if another rank returns the results.
        """
        order = sorted(range(len(items)), key=lambda place: (-size(items[place]), place))
        batches = [order[first : first + self.batch] for first in range(0, len(order), self.batch)]
        dp, by_item = self.context.mesh.dp, {}
        for own in batches[dp.rank :: dp.size]:
            results = work([items[place] for place in own])
            by_item |= {} if results is None else dict(zip(own, results, strict=True))
        whole = {place: one for part in self.context.all_gather_object(by_item) for place, one in part.items()}
        return [whole[place] for place in range(len(items))]

    @torch.no_grad()
    def score(self, pairs: list[tuple[list[int], list[int]]]) -> Optional[list[tuple[float, bool]]]:
        """`_loglikelihood_tokens` of a batch; None on ranks that are not the last pipeline stage. Texts are right-padded,
        which does not affect them.
        """
        texts = [(before + after)[-self.max_length - 1 :] for before, after in pairs]
        s, device = max(map(len, texts)) - 1, next(self.model.parameters()).device
        tokens, wanted = torch.zeros((s, len(texts)), dtype=torch.int64), torch.zeros((s, len(texts)), dtype=torch.bool)
        for row, (text, (_, after)) in enumerate(zip(texts, pairs, strict=True)):
            tokens[: len(text) - 1, row] = torch.tensor(text[:-1])
            wanted[len(text) - 1 - len(after) : len(text) - 1, row] = True
        scores = self.model.logits(tokens.to(device), wanted=wanted.to(device))  # [k, v]
        if scores is None:
            return None
        logits = scores.log_softmax(-1)
        rows = wanted.nonzero()[:, 1].to(device)  # the text of each row
        results = []
        for row, (text, (_, after)) in enumerate(zip(texts, pairs, strict=True)):
            own, labels = logits[rows == row], torch.tensor(text[len(text) - len(after) :], device=device)
            greedy = bool((own.argmax(-1) == labels).all())
            results.append((own.gather(1, labels[:, None]).double().sum().item(), greedy))
        return results

    def write(self, asked: list[tuple[list[int], dict]]) -> list[str]:
        """`generate_until` of a batch of tokenized contexts. No token is generated after one of `until`."""
        engine, tokens = Engine(self.model, longest=self.max_length, max_batch=len(asked)), None
        if engine.link.is_first:
            requests = [
                Request(
                    tuple(context), Sampling(_room(options), stop=_ends(options), greedy=True), end=self.eot_token_id
                )
                for context, options in asked
            ]
            found = continued(engine, requests, self.words, alone=True)
            tokens = [answer.tokens for answer in found]
            engine.close()
        else:
            engine.follow()
        texts = map(self.words.decode, engine.link.shared(tokens))
        return [cut(text, _ends(options)) for text, (_, options) in zip(texts, asked, strict=True)]


def _room(options: dict) -> int:
    """The most tokens that a text may have."""
    return int(options.get("max_gen_toks") or options.get("max_new_tokens") or LONGEST_TEXT)


def _ends(options: dict) -> list[str]:
    """The strings that end a text."""
    until = options.get("until") or []
    return [end for end in ([until] if isinstance(until, str) else until) if end]


def cut(text: str, ends: Sequence[str]) -> str:
    """Cut a text at the first of some strings.

    >>> cut("one. two; three", [";", "."])
    'one'
    """
    return text[: min([text.find(end) for end in ends if end in text], default=len(text))]
