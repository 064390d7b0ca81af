# SPDX-License-Identifier: Apache-2.0
"""Multi-latent attention over a cache of latents (arXiv:2405.04434, section 2.1.2 and appendix C).

The cache has a row of each token, its latent and its rotated key: kv + ro numbers, equal on all ranks of tp. Queries
attend to rows in one of two forms with the same result. Absorbed: with q Wuk for q, the row is the key of all heads, and
its latent their value; Wuv comes after the softmax. Expanded: Wukv makes keys and values of all heads from the rows, as in
training.

Legend: s new tokens, t all tokens of a text, g heads of this rank, of a head's keys d = ro + no channels, of its values v,
kv channels of the latent.
"""

from collections.abc import Callable
from typing import Optional

import torch

from megatron.model.context import ForwardContext
from megatron.model.kinds.attention.module import Attention


class CachedLatents:
    """What a cache needs of a `LatentAttention`: queries [s, 1, g, 1, d], rows [t, 1, 1, kv + ro] -> [s, 1, g v]."""

    def __init__(self, of: Attention):
        self.of, self.layer, self.window, self.value_dim = of, of.layer, of.window, of.value_dim

    def decode_kernel(self, like: torch.Tensor) -> Optional[Callable]:
        """See `Attention.decode_kernel`."""
        if self.of.kv_up.product is not None:  # its weight is not the one that it multiplies with
            return None
        kernel = self.of.decode_kernel(like.new_empty((0, 1, 1, self.of.groups, self.of.row_width)))
        if kernel is None:
            return None
        return lambda query, rows, _, places: self.results(kernel(self.absorbed(query), rows, rows, places))

    def core(self, query, rows, _, layer: "CachedLatents", context: ForwardContext) -> torch.Tensor:
        """Attention of the last s of a text's t tokens, by the form that takes fewer products."""
        of, (s, t) = self.of, (len(query), len(rows))
        if of.kv_up.product is not None or self.expanding_is_less(s, t):
            latent, shared = rows.squeeze(2).split((of.latent, of.row_width - of.latent), -1)
            return of.core(query, *of.keys_and_values(latent, shared.unsqueeze(2)), of, context)
        return self.results(of.core(self.absorbed(query), rows, rows, of, context))

    def expanding_is_less(self, s: int, t: int) -> bool:
        """Whether all keys and values take fewer multiplications than absorbed queries and results."""
        of = self.of
        weights = of.latent * (of.key_width + of.value_dim)  # of a head's part of Wukv
        channels = of.row_width - of.latent + of.key_width + of.value_dim
        return t * weights + s * t * channels < s * weights + s * t * (of.row_width + of.latent)

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """[..., g, 1, d] -> [..., 1, g, kv + ro]: the channels of a row, for one key that all heads share."""
        of = self.of
        turned, own = query.squeeze(-2).split((of.row_width - of.latent, of.key_width), -1)
        key = of.kv_up.weight[:, : of.key_width]  # [g, no, kv]
        own = torch.einsum("...gn,gnk->...gk", own.to(key.dtype), key).to(query.dtype)
        return torch.cat((own, turned), -1).unsqueeze(-3)

    def results(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of rows [..., g (kv + ro)] -> [..., g v]."""
        of = self.of
        latents = attended.unflatten(-1, (of.groups, -1))[..., : of.latent]
        value = of.kv_up.weight[:, of.key_width :]  # [g, v, kv]
        return torch.einsum("...gk,gvk->...gv", latents.to(value.dtype), value).flatten(-2).to(attended.dtype)
