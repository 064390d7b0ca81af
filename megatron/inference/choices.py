# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of each text of a batch from the model's scores.

Each text (a *row*) has settings of its own, and its choice depends on nothing else: not on the other rows, not on their
number. The settings apply in this order:

    adjusted       1. logit bias: added to scores
                   2. repetition penalty (arXiv:1909.05858, section 4.1): tokens of the prompt and the new text
                   3. frequency and presence penalties, as OpenAI's API defines them: tokens of the new text
                   4. bad words: the last token of a sequence is impossible after the others
                   5. minimum length: tokens that end a text are impossible
                   6. forced first or last token: all others are impossible
    probabilities  7. temperature   8. top-k   9. top-p (arXiv:1904.09751, section 3.1)   10. min-p (arXiv:2407.01082)

A greedy row takes the largest adjusted score, the first one of several. Any other row draws from its probabilities.
Legend: n rows, v vocabulary, k candidates.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Optional

import torch

from megatron.inference.sampling import Ends, Sampling

# Likeliest tokens among which a nucleus is looked for, before more of them: a tenth of the time of a sort
CANDIDATES = 256


class RowState:
    """One text while it is generated: its settings and its tokens so far.

    prompt  token ids that the repetition penalty counts beside the new ones
    limit   new tokens after which the text is cut, at most --tokens-to-generate: the model's context may end earlier
    end     the token that ends it, or several; None: only its length does
    index   the number of this text among those with the same seed
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int] = (),
        *,
        limit: Optional[int] = None,
        end: Ends = None,
        index: int = 0,
        new: Iterable[int] = (),
    ):
        self.sampling, self.prompt, self.index = sampling, prompt, index
        self.limit = sampling.tokens_to_generate if limit is None else limit
        self.ends, self.biases, self.bad_words = sampling.ends(end), sampling.biases, sampling.bad_words
        self.is_greedy = sampling.is_greedy
        self.counts_new = bool(sampling.frequency_penalty or sampling.presence_penalty)
        self.waits = bool(self.ends) and sampling.min_tokens_to_generate > 0
        forced = sampling.forced_bos_token_id is not None or sampling.forced_eos_token_id is not None
        # Whether the scores are taken as the model has them.
        changed = self.biases or self.bad_words or sampling.repetition_penalty != 1 or self.counts_new
        self.is_plain = not (changed or self.waits or forced)
        self.new: list[int] = []
        self.occurred = dict.fromkeys(prompt) if sampling.repetition_penalty != 1 else {}  # in order, each once
        self.counts: Counter[int] = Counter()
        for token in new:
            self.append(token)

    def append(self, token: int) -> None:
        """Append a new token."""
        self.new.append(token)
        if self.sampling.repetition_penalty != 1:
            self.occurred[token] = None
        if self.counts_new:
            self.counts[token] += 1

    @property
    def impossible(self) -> list[int]:
        """The tokens that would complete a bad word."""
        most = max(map(len, self.bad_words), default=1) - 1
        last = (*self.prompt[max(0, len(self.prompt) - most) :], *self.new)
        return [word[-1] for word in self.bad_words if last[len(last) - len(word) + 1 :] == word[:-1]]

    @property
    def forced(self) -> Optional[int]:
        """The token that has to be next; None if any may be."""
        first, last = self.sampling.forced_bos_token_id, self.sampling.forced_eos_token_id
        if last is not None and len(self.new) == self.limit - 1:
            return last
        return None if self.new else first

    @property
    def draw(self) -> float:
        """The random number that the next token is drawn with."""
        return uniform_draw(self.sampling.sampling_seed, self.index, len(self.new))


def choose(logits: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    """The next token of each row: logits [n, v] -> [n] int64."""
    scores = adjusted(logits, rows)
    drawn = [place for place, row in enumerate(rows) if not row.is_greedy]
    if not drawn:
        return _likeliest(scores)
    if len(drawn) == len(rows):
        return _drawn(scores, rows)
    chosen, places = _likeliest(scores), torch.tensor(drawn, device=scores.device)
    chosen[places] = _drawn(scores[places], [rows[place] for place in drawn])
    return chosen


def _likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The first greatest score of each row. NumPy finds it in a tenth of torch's time on a CPU."""
    if scores.device.type == "cpu" and scores.dtype == torch.float32:
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(dim=-1)


def _drawn(scores: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    draws = torch.tensor([row.draw for row in rows], dtype=torch.float64, device=scores.device)
    return sample(probabilities(scores, rows), draws)


def uniform_draw(seed: int, index: int, step: int) -> float:
    """A random number in [0, 1) for the token number `step` of the text number `index` of a seed.

    A hash, so that it depends on nothing else: the text is the same if it is interrupted, or has other neighbours.
    """
    words = struct.pack("<qqq", seed % 2**63, index, step)
    return (int.from_bytes(hashlib.blake2b(words, digest_size=8).digest(), "little") >> 11) * 2.0**-53


# Scores ---------------------------------------------------------------------------------------------------------------


def adjusted(logits: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    """The scores [n, v] after bias, penalties, minimum length and forced tokens; `logits` itself if rows have none."""
    changed = [(place, row) for place, row in enumerate(rows) if not row.is_plain]
    if not changed:
        return logits
    scores = logits.clone()
    _add(scores, [(place, token, bias) for place, row in changed for token, bias in row.biases.items()])
    _penalise(
        scores, [(place, token, row.sampling.repetition_penalty) for place, row in changed for token in row.occurred]
    )
    _add(
        scores,
        [
            (place, token, -row.sampling.frequency_penalty * count - row.sampling.presence_penalty)
            for place, row in changed
            for token, count in row.counts.items()
        ],
    )
    _add(scores, [(place, token, -math.inf) for place, row in changed for token in dict.fromkeys(row.impossible)])
    early = [(place, row) for place, row in changed if len(row.new) < row.sampling.min_tokens_to_generate]
    _add(scores, [(place, token, -math.inf) for place, row in early for token in row.ends])
    forced = [(place, row.forced) for place, row in changed if row.forced is not None]
    if forced:
        places, tokens = (torch.tensor(column, device=scores.device) for column in zip(*forced))
        scores[places] = -math.inf
        scores[places, tokens] = 0.0
    return scores


def _columns(scores: torch.Tensor, entries: list[tuple]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Entries (row, token, number) as tensors."""
    places, tokens, numbers = zip(*entries)
    where = (torch.tensor(column, device=scores.device) for column in (places, tokens))
    return *where, torch.tensor(numbers, dtype=scores.dtype, device=scores.device)


def _add(scores: torch.Tensor, entries: list[tuple[int, int, float]]) -> None:
    """Add numbers to scores, in place. entries: (row, token, number), each token of a row once."""
    if entries:
        places, tokens, numbers = _columns(scores, entries)
        scores[places, tokens] += numbers


def _penalise(scores: torch.Tensor, entries: list[tuple[int, int, float]]) -> None:
    """Lower scores by factors, in place: positive ones are divided, negative ones multiplied."""
    if entries:
        places, tokens, factors = _columns(scores, entries)
        own = scores[places, tokens]
        scores[places, tokens] = torch.where(own > 0, own / factors, own * factors)


# Probabilities --------------------------------------------------------------------------------------------------------


def probabilities(scores: torch.Tensor, rows: Sequence[RowState]) -> torch.Tensor:
    """The probability of each token after temperature, top-k, top-p and min-p: fp64 [n, v], not normalised.

    scores: adjusted. Tokens that are left out have 0. Equal scores are treated alike by top-k and min-p; a nucleus has the
    fewest tokens, and of equal ones the first.
    """
    v = scores.shape[-1]
    column = lambda values: torch.tensor(values, dtype=scores.dtype, device=scores.device).unsqueeze(1)
    # Differences from the largest score do not overflow when they are divided by a small temperature.
    scores = (scores - scores.amax(-1, keepdim=True)) / column([row.sampling.temperature for row in rows])
    shares = scores.double().softmax(-1)
    top_k = [row.sampling.top_k if 0 < row.sampling.top_k < v else v for row in rows]
    if most := max((k for k in top_k if k < v), default=0):
        best = scores.topk(most, dim=-1).values
        last = torch.tensor([min(k, most) - 1 for k in top_k], device=scores.device).unsqueeze(1)
        limited = torch.tensor([k < v for k in top_k], device=scores.device).unsqueeze(1)
        shares = shares.masked_fill(limited & (scores < best.gather(1, last)), 0.0)
    top_p = [row.sampling.top_p_at(len(row.new)) for row in rows]
    nuclei = [place for place, p in enumerate(top_p) if 0 < p < 1]
    if nuclei:
        places = torch.tensor(nuclei, device=scores.device)
        limits = torch.tensor([top_p[place] for place in nuclei], dtype=torch.float64, device=scores.device)
        shares[places] = in_nucleus(shares[places], limits)
    min_p = [row.sampling.min_p for row in rows]
    if any(min_p):
        least = torch.tensor(min_p, dtype=torch.float64, device=scores.device).unsqueeze(1)
        shares = shares.masked_fill(shares < least * shares.amax(-1, keepdim=True), 0.0)
    return shares


def in_nucleus(shares: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Shares [n, v] with 0 for all tokens outside the nucleus: the shortest run of likeliest tokens that have `limits` [n]
    of the total. The likeliest token is always in it.
    """
    totals = shares.cumsum(-1)[:, -1]  # in order, unlike a sum, so that a row does not depend on the number of rows
    return _nucleus(shares, limits * totals, CANDIDATES)


def _nucleus(shares: torch.Tensor, limits: torch.Tensor, candidates: int) -> torch.Tensor:
    candidates = min(candidates, shares.shape[-1])
    values = shares.topk(candidates, dim=-1).values  # [n, k]
    before = values.cumsum(-1) - values  # share of the likelier tokens
    sizes = (before < limits.unsqueeze(1)).sum(-1).clamp(min=1)
    kept = _first(shares, values, sizes)
    if candidates < shares.shape[-1]:
        wider = (sizes == candidates).nonzero().squeeze(1)  # rows whose nucleus may have more tokens
        if wider.numel():
            kept[wider] = _nucleus(shares[wider], limits[wider], 16 * candidates)
    return kept


def _first(shares: torch.Tensor, values: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Keep the `sizes` [n] greatest shares of each row, of equal ones the first. values [n, k]: the greatest, in order."""
    least = values.gather(1, sizes.unsqueeze(1) - 1)
    above, equal = shares > least, shares == least
    room = sizes.unsqueeze(1) - above.sum(-1, keepdim=True)
    return torch.where(above | equal & (equal.cumsum(-1) <= room), shares, 0.0)


def sample(shares: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """Draw a token of each row by inverse transform: shares fp64 [n, v], draws [n] in [0, 1) -> [n]."""
    sums = shares.cumsum(dim=-1)
    sums = sums / sums[:, -1:]  # the last one is exactly 1, above any draw
    return torch.searchsorted(sums, draws.unsqueeze(1).contiguous(), right=True).squeeze(1)
