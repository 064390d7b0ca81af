# SPDX-License-Identifier: Apache-2.0
"""The ops of a layer's experts, for memory, FLOPs and messages (`model.layer_ops`). Needs no torch.

All experts of a rank are assumed to get equally many tokens, and all ranks but for `RankSetup.busiest`.
"""

from dataclasses import replace
from typing import Any

from megatron.model.kinds.experts.expert_rules import RULES
from megatron.model.kinds.experts.parts import capacity, expected_parts, expert_sums, ways_of
from megatron.model.kinds.experts.settings import SYMBOL, ExpertSettings
from megatron.model.kinds.experts.weights import experts
from megatron.model.kinds.mixer import Mixer
from megatron.model.kinds.mlp.kind import activation_of, kinds_of, mlp_ops
from megatron.model.layer_ops import ACTIVATION, MLP, ONCE, Collective, Kernel, LayerOp, Product, Residual
from megatron.settings.schema import Model


def expert_ops(x: Residual) -> tuple[LayerOp, ...]:
    """Router, dispatch, experts, and the way back; then the shared expert."""
    words, width = kinds_of(x.model), x.model.moe_shared_expert_intermediate_size
    latent = x.model.moe_latent_size
    kept = x.share.tp == 1 and (x.share.element == 4 or bool(latent))  # by the router, or the product to latents
    shared = mlp_ops(x, *words, width=width, keeps=not kept) if width else ()
    activation = activation_of(x.share, x.model.expert_ffn_size // x.share.etp, *words)  # of one token
    m, share, h, e, again = x.model, x.share, x.h, x.share.element, (MLP,)
    w, own = m.expert_hidden_size, replace(x, share=replace(share, sp=True))  # a rank's own tokens, in any case
    down, up = (), ()
    if latent:
        down = own.whole("experts", w, keeps=e < 4, again=again, layer="mlp.latent_down")
        up = replace(own, width=w).whole("experts", h, again=again, layer="mlp.latent_up")
    n, k, experts = x.tokens // share.tp, m.moe_router_topk, m.num_experts
    gathered = n * share.etp
    pairs = gathered * k  # sent by a rank, and on average as many arrive
    more = share.busiest if share.ep > 1 else 1.0  # without ep a rank has all rows
    rows = int(pairs * more)
    if m.moe_pad_expert_input_to_capacity:
        rows, more = experts * share.etp * capacity(n, k, experts, m.moe_expert_capacity_factor), 1.0
    halves = ("all_gather",), ("reduce_scatter",)
    over = lambda axis, size, *calls, again=again: Collective(
        "experts", axis, getattr(share, axis), size, *calls, again=again
    )
    there, back, order_bytes = _exchanges(x, gathered, rows, more)
    cuts = share.tp > 1 and not share.sp  # each rank of tp takes its part of the rows
    ours = x.tokens * h * e * cuts
    cut, join = (
        Collective("experts", "tp", share.tp, ours, *calls, again=again) for calls in (((), halves[0]), halves[:1])
    )
    loads = [over(axis, 8 * experts * share.micro_batch_size, ("all_reduce",), again=(ONCE,)) for axis in ("cp", "tp")]
    sums = over("tp", 4 * len(expert_sums(m)), ("all_reduce",))
    wide = 8 if m.moe_router_dtype == "fp64" else 4
    exchanged = [  # for the gradient of the router's weight, over a sample's tokens (`mpu/ordered_tokens.py`)
        Collective("sums over tokens", "tp", share.tp, size * wide, back=(call,))
        for call, size in (("all_to_all", n * h), ("all_gather", n * share.tp * experts))
    ]
    of_tokens = 4 * n * h if e < 4 else n * h * e  # the router's input in fp32
    return (
        cut,
        Product("router", n, h, experts, kept=of_tokens, given=n * h * e, again=again),
        *exchanged * share.ordered,
        Kernel("routing", kept=4 * n * experts * 2 + 16 * n * k, moved=4 * n * experts, again=again),
        *loads * any(way.label for way in ways_of(m).values()),
        sums,
        *shared,
        *down,
        over("etp", gathered * w * e, *halves),
        over("etp", 8 * pairs, ("all_gather",)),  # the experts of each token
        over("etp", 4 * pairs, *halves),  # and their weights
        Kernel("routing", kept=order_bytes, moved=2 * rows * w, again=again),
        *there,
        *_mlp_ops(x, activation, rows, more * pairs * share.ep / experts),
        *back,
        Kernel("experts", moved=2 * rows * w, again=again),
        over("etp", gathered * w * e, *reversed(halves)),
        *up,
        join,
    )


def _exchanges(x: Residual, tokens: int, rows: int, more: float) -> tuple[list[LayerOp], list[LayerOp], int]:
    """(exchanges of so many tokens to their experts, and back, bytes that say which row is whose).

    rows: of this rank's experts; more: as a multiple of the mean
    """
    m, share, again = x.model, x.share, (MLP,)
    width, k, both = m.expert_hidden_size * share.element, m.moe_router_topk, (("all_to_all",), ("all_to_all",))
    over = lambda axis, ranks, size, calls, again=again: Collective("experts", axis, ranks, size, *calls, again=again)
    counted = m.num_experts
    if not share.ep_inner:
        there = [over("ep", share.ep, rows * (width + 4), both)]  # with the weights of rows
        back, orders = [over("ep", share.ep, rows * width, both)], rows + tokens * k + 2 * rows * (share.ep > 1)
    else:
        there, back, orders, arrived = [], [], rows, tokens
        outer, inner = share.ep // share.ep_inner, share.ep_inner
        for axis, ranks, parts in (("ep_outer", outer, outer), ("ep_inner", inner, share.ep)):
            if ranks > 1:
                reached = int(tokens * more * expected_parts(m, parts))  # as many arrive, on average
                there += [
                    over(axis, ranks, reached * (width + 4 * k), both),
                    over(axis, ranks, reached * 2 * k, both[:1]),
                ]
                back.insert(0, over(axis, ranks, reached * width, both))
                orders, arrived = orders + arrived * ranks + reached, reached
        orders += arrived * k
        counted += share.ep * (inner + 1)
    if not m.moe_pad_expert_input_to_capacity:
        there.insert(0, over("ep_counts", share.ep, 8 * counted, both[:1], again=(ONCE,)))
    return there, back, 8 * orders


def _mlp_ops(x: Residual, activation: Kernel, rows: int, each: float) -> tuple[LayerOp, ...]:
    """The MLPs of a rank's experts. rows: of all of them; each: rows of one expert, without padding."""
    m, share, w = x.model, x.share, x.model.expert_hidden_size
    own, f, matrices = m.num_experts // share.ep, m.expert_ffn_size // share.etp, 2 if m.gated else 1
    product = lambda name, inputs, outputs, times: x.product_of_experts(
        f"mlp.experts.{name}", rows, each, inputs, outputs, times, again=(MLP,)
    )
    return (
        *product("up", w, f, own * matrices),
        Kernel(  # times the weights of rows: its input and these are kept, and it is computed again for their gradient
            "experts",
            kept=rows * (activation.given + 4),
            given=rows * (activation.given + 4),
            moved=rows * (activation.moved + 3 * f),
            workspace=rows * (activation.workspace + 8 * f),
            again=(ACTIVATION, MLP),
        ),
        *product("down", f, w, own),
    )


def _has_shape(model: Model) -> bool:
    return len(model.expert_layers) >= 0 and (model.mixture or SYMBOL not in model.all_letters)


def _shrunk(model: Model, small: Model, tp: int) -> dict[str, Any]:
    """As many experts, narrow ones; a dense layer first if some are dense."""
    if not model.mixture:
        return {}
    dense = small.num_layers > 1 and len(model.expert_layers) < model.num_layers and not model.letters
    return dict(
        moe_layer_freq=f"[0]+[1]*{small.num_layers - 1}" if dense else "1",
        moe_ffn_hidden_size=small.hidden_size,
        moe_latent_size=small.hidden_size // 2 if model.moe_latent_size else None,
        moe_shared_expert_intermediate_size=small.hidden_size if model.moe_shared_expert_intermediate_size else None,
    )


KIND = Mixer(
    "experts",
    "mlp",
    "megatron.model.kinds.experts.layer:MoELayer",
    weights=lambda facts, model, sequence_parallel: experts(model, sequence_parallel),
    ops=lambda facts, x: expert_ops(x),
    symbol=SYMBOL,
    place="mlp",
    takes=lambda model, layer: model.has_experts(layer),
    chooses=lambda layers: dict(
        moe_layer_freq="1" if all(layers) or not any(layers) else str([int(has) for has in layers]).replace(" ", "")
    ),
    asked=lambda model: f"--num-experts {model.num_experts}" if model.mixture else "",
    settings=ExpertSettings,
    rules=RULES,
    hf_matches="megatron.model.kinds.experts.hf:matches",
    in_megatron="megatron.model.kinds.experts.megatron:FORM",
    sums=expert_sums,
    recomputes=(ACTIVATION, MLP),
    divided=lambda model: {"shared expert": width} if (width := model.moe_shared_expert_intermediate_size) else {},
    used=lambda model: (model.moe_router_topk, model.num_experts),
    has_shape=_has_shape,
    shrunk=_shrunk,
)
