# SPDX-License-Identifier: Apache-2.0
"""The MLP: its rules, weights and ops. Needs no torch."""

from dataclasses import replace
from itertools import combinations
from typing import Optional

from megatron.model.kinds.mixer import Mixer
from megatron.model.kinds.mlp.settings import MLPSettings
from megatron.model.layer_ops import ACTIVATION, MLP, Kernel, LayerOp, RankSetup, Residual
from megatron.model.weights import add_prefix, column, output_std, row
from megatron.mpu.placement import Placement
from megatron.settings.declare import dashed
from megatron.settings.rules import Rule, divisors, either, multiples
from megatron.settings.schema import Model

RULES = (
    Rule(
        lambda s: s.tp > 1 and s.num_attention_heads % s.tp == 0 and s.ffn % s.tp,
        lambda s: (
            f"--ffn-hidden-size {s.ffn} cannot be divided by --tensor-model-parallel-size {s.tp}; nearest: "
            f"{either(multiples(s.ffn, s.tp))}, or tensor parallel size {either(divisors(s.ffn, s.tp))}"
        ),
    ),
    *(
        Rule(
            lambda s, one=one, other=other: getattr(s, one) and getattr(s, other),
            lambda s, one=one, other=other: (
                f"{dashed(one)} and {dashed(other)} are two activations of the MLP; give one of them"
            ),
        )
        for one, other in combinations(("squared_relu", "swiglu", "geglu", "quick_geglu"), 2)
    ),
)


def mlp(model: Model, sequence_parallel: bool, width: Optional[int] = None) -> dict[str, Placement]:
    """The weights of a layer's MLP. With a gate its two input matrices are one, [2, ffn, h]: gate, then values.

    width: its hidden size (default: `ffn_size`)
    """
    m, f, bias = model, width or model.ffn_size, not model.disable_bias_linear
    rows, cut, parts = ((2, f), 1, (0, (1, 1))) if m.gated else ((f,), 0, None)
    return {
        **add_prefix("up", column(m.hidden_size, rows, m.init_method_std, cut=cut, bias=bias, matrices=parts)),
        **add_prefix("down", row(f, m.hidden_size, output_std(m), bias=bias, sequence_parallel=sequence_parallel)),
    }


def mlp_ops(
    x: Residual,
    gated: bool,
    squared: bool = False,
    gelu: bool = False,
    sigmoid: Optional[tuple] = None,
    *,
    width: Optional[int] = None,
    keeps: bool = True,
) -> tuple[LayerOp, ...]:
    """The products of an MLP and its activation. gelu: that of the gate, which has no fused kernel; sigmoid: its
    `sigmoid_gate`; width: its hidden size (default: `ffn_size`); keeps: whether it saves its input, which no other op does
    """
    n, e, ffn = x.tokens, x.share.element, (width or x.model.ffn_size) // x.share.tp
    up = 2 if gated else 1
    one = activation_of(x.share, ffn, gated, squared, gelu, sigmoid)
    input_ = n * x.h * (2 if x.share.sp else 1) * e  # sp: with the input, gathered
    sizes = dict(kept=n * one.kept, given=n * one.given, moved=n * one.moved, workspace=n * one.workspace + input_)
    before = x.column("mlp", ffn, up, keeps=keeps, again=(MLP,), layer="mlp.up")
    return *before, replace(one, **sizes), *x.row("mlp", ffn, again=(MLP,), layer="mlp.down")


def kinds_of(m: Model) -> tuple:
    """What `mlp_ops` needs to know of a model's activation."""
    return m.gated, m.squared_relu, m.geglu, m.sigmoid_gate


def activation_of(
    share: RankSetup, ffn: int, gated: bool, squared: bool, gelu: bool, sigmoid: Optional[tuple] = None
) -> Kernel:
    """The activation of an MLP for one token."""
    e, up = share.element, 2 if gated else 1
    fused = share.device == "cuda" and not share.plain_activation and not gelu
    kept = (2 if fused else 3) if gated else 1  # the input of GeLU; relu(x) before its square; gate, value, silu(gate)
    work = 1 + up
    if sigmoid:  # its input alone; in torch's ops also sigmoid, gate, value and clamped gate
        kept, work = (5 + (sigmoid[1] is not None), 4) if share.plain_activation else (2, 8)
    return Kernel(
        "mlp",
        kept=ffn * kept * e,
        given=ffn * up * e,
        moved=ffn * (5 if gated else 4 if squared else 2),
        workspace=work * ffn * e,
        again=(ACTIVATION, MLP),
    )


KIND = Mixer(
    "mlp",
    "mlp",
    "megatron.model.kinds.mlp.module:MLP",
    weights=lambda facts, model, sequence_parallel: mlp(model, sequence_parallel),
    ops=lambda facts, x: mlp_ops(x, *kinds_of(x.model)),
    symbol="-",
    place="mlp",
    settings=MLPSettings,
    rules=RULES,
    hf_matches="megatron.model.kinds.mlp.hf:matches",
    in_megatron="megatron.model.kinds.mlp.megatron:FORM",
    recomputes=(ACTIVATION, MLP),
    divided=lambda model: {"ffn": model.ffn_size},
    shrunk=lambda model, small, tp: dict(
        ffn_hidden_size=2 * small.hidden_size if model.ffn_hidden_size or model.gated else None
    ),
)
