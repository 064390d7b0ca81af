# SPDX-License-Identifier: Apache-2.0
"""`Mixer`, the record of a kind. Needs no torch.

A kind's folder has its settings (`settings.py`, which `settings.groups.model` adds to `Model`), its rules, its module and
what else it needs. A recipe's own kinds are in `Recipe.kinds`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

from megatron.model.layer_ops import LayerOp, Residual
from megatron.mpu.placement import Table
from megatron.settings.rules import Rule
from megatron.settings.schema import Model

Parts = tuple[tuple[int, float], ...]  # consecutive rows of each group in a weight [groups, rows, ...], and a power

PLACES = ("attention", "mlp")  # the two branches of a transformer layer


@dataclass(frozen=True)
class Mixer:
    """What a branch computes from normalized hidden states: attention, an MLP, experts.

    name:    of its folder
    slot:    the name of its module in the layer, and of its weights
    module:  its class, or "module:class", imported when a layer is built. It is called with (weights, `LayerSetup`), its
             forward function with (x, context); that returns y, or (y, {name: sum})
    weights: (facts, settings of the layer, sequence_parallel) -> its table
    ops:     (facts, hidden states of the layer) -> its ops
    symbol:  its character in --hybrid-layer-pattern; "": it is in none
    beside:  (character, name of another kind) of layers that are both, after one norm, with the sum of what they make of it
    listed:  the (setting, value) pairs of a model whose pattern lists it
    place:   the branch of a transformer layer that it may be, one of PLACES; "": none
    takes:   (settings of the model, layer) -> whether it is that branch of a layer; None: if no other kind is
    chooses: (for each transformer layer, whether it has this kind) -> the settings that say so; {}: there are none
    asked:   settings of the model -> the words that ask for such layers; "": they have none
    settings: a frozen dataclass of its own `setting`s, whose fields `Model` has, too
    reads:   settings of other kinds that single layers may have for themselves, and that it reads, too
    rules:   invalid combinations of settings, in models that may have it
    mixes_tokens: whether a token's output depends on other tokens: `full_attn` recomputes it with its norm, `mlp` not
    sums:    settings of the model -> name of a sum over tokens that its forward function returns -> its weight in the loss
    recomputes: the words of `Recompute.modules` that select parts of it
    divided: settings of the layer -> the sizes that tensor parallelism divides, by name
    heads:   settings of the layer -> the heads that ranks of context parallelism can exchange for rows; None: it has none
    rotated: settings of the model -> the channels of each head that rotary positions turn; None: no positions
    cached:  (settings of the layer, size of tensor parallelism) -> the numbers of a token that a rank caches in generation
    scans:   whether it scans along a sequence with a state for each head: whatever --cp-comm-type says, context parallel
             ranks exchange rows for `heads` where these are enough (`mpu.chunks.exchanging`), and pass states on elsewhere
    state:   (settings of the layer, size of tensor parallelism, bytes of an activation) -> bytes of the state of earlier
             tokens that later ones of a text need, on a rank in generation
    clipped: (settings of the layer, alpha) -> weights of queries and keys, by their names in the mixer -> their `Parts`:
             --qk-clip multiplies these rows by eta to that power. Its module has `watch_logits` (`Attention`); None: it has
             no attention logits
    used:    settings of the layer -> (how many of its experts a token uses, of how many); None: it uses all weights
    has_shape: whether the settings describe a valid shape. May raise ValueError or ZeroDivisionError instead
    hf_matches: (family, settings, our prefix of its weights, their prefix of the layer, function that matches a norm) ->
             the matches of its weights in the files of Hugging Face (`hf_match.Match`), or "module:function"; None: it is
             in no family of theirs
    in_megatron: its `megatron_form.MegatronForm`, as "module:name"; "": it is in no checkpoint of Megatron-LM
    shrunk:  (settings of the model, those of a small one, size of tensor parallelism) -> its settings in the small one
    """

    name: str
    slot: str
    module: Union[str, type]
    weights: Callable[[Any, Model, bool], Table]
    ops: Callable[[Any, Residual], Sequence[LayerOp]]
    symbol: str = ""
    beside: tuple[tuple[str, str], ...] = ()
    listed: tuple[tuple[str, Any], ...] = ()
    place: str = ""
    takes: Optional[Callable[[Model, int], bool]] = None
    chooses: Callable[[Sequence[bool]], dict[str, Any]] = lambda layers: {}
    asked: Callable[[Model], str] = lambda model: ""
    settings: Optional[type] = None
    reads: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    mixes_tokens: bool = False
    sums: Callable[[Model], Mapping[str, float]] = lambda model: {}
    recomputes: tuple[str, ...] = ()
    divided: Callable[[Model], dict[str, int]] = lambda model: {}
    heads: Optional[Callable[[Model], int]] = None
    rotated: Optional[Callable[[Model], int]] = None
    cached: Callable[[Model, int], int] = lambda model, tp: 0
    scans: bool = False
    state: Callable[[Model, int, int], int] = lambda model, tp, element: 0
    clipped: Optional[Callable[[Model, float], Mapping[str, Parts]]] = None
    used: Optional[Callable[[Model], tuple[int, int]]] = None
    has_shape: Callable[[Model], bool] = lambda model: True
    hf_matches: Union[str, Callable[..., list], None] = None
    in_megatron: str = ""
    shrunk: Callable[[Model, Model, int], dict[str, Any]] = lambda model, small, tp: {}
