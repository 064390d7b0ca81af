# SPDX-License-Identifier: Apache-2.0
"""Gated delta net: its weights and ops. Needs no torch.

Legend: n tokens of a micro-batch (s x b), G key heads of K channels, each of r value heads of V channels, W taps of the
convolution, e bytes per element.
"""

from collections.abc import Sequence
from typing import NamedTuple

from megatron.model.kinds.gdn.settings import PRESENT, SYMBOL, VARIANT, GDNSettings, linear_layers
from megatron.model.kinds.mixer import Mixer
from megatron.model.kinds.scan_ops import SharedScan
from megatron.model.layer_ops import ATTENTION, CORE, LayerOp, Residual, Scan
from megatron.model.weights import add_prefix, column, output_std, row
from megatron.mpu.placement import Constant, LogOf, Placement, Table, Uniform
from megatron.settings.rules import Rule, divisors, either, multiples
from megatron.settings.schema import Model


def _pattern_error(s) -> str:
    if not VARIANT.met(s) or s.linear_attention_freq is None:
        return ""
    try:
        linear = linear_layers(s.linear_attention_freq, s.num_layers)
    except ValueError as error:
        return str(error)
    return "" if any(linear) else "no layer has linear attention then"


RULES = (
    Rule(
        lambda s: VARIANT.met(s) and s.linear_attention_freq is None,
        lambda s: (
            f"--experimental-attention-variant {s.experimental_attention_variant} needs --linear-attention-freq: N for all "
            "layers but every N-th, or a 1 for each layer with linear attention and a 0 for others, as ([1]*3+[0])*12"
        ),
    ),
    Rule(
        lambda s: s.settings.model.letters and s.experimental_attention_variant,
        lambda s: (
            f"--experimental-attention-variant {s.experimental_attention_variant}: --hybrid-layer-pattern lists the gated "
            f"delta nets ({SYMBOL}); leave the one or the other out"
        ),
    ),
    Rule(
        _pattern_error,
        lambda s: (
            f"--linear-attention-freq {s.linear_attention_freq} for --num-layers {s.num_layers}: {_pattern_error(s)}; give "
            "N for all layers but every N-th, or a 0 or 1 for each layer, as ([1]*3+[0])*12"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and s.linear_num_value_heads % s.linear_num_key_heads,
        lambda s: (
            f"--linear-num-value-heads {s.linear_num_value_heads} is not a multiple of --linear-num-key-heads "
            f"{s.linear_num_key_heads}; nearest: {either(multiples(s.linear_num_value_heads, s.linear_num_key_heads))}, or "
            f"{either(divisors(s.linear_num_value_heads, s.linear_num_key_heads))} key heads"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and s.linear_num_key_heads % s.tp,
        lambda s: (
            f"--linear-num-key-heads {s.linear_num_key_heads} cannot be divided by --tensor-model-parallel-size {s.tp}; "
            f"nearest: {either(multiples(s.linear_num_key_heads, s.tp))}, or tensor parallel size "
            f"{either(divisors(s.linear_num_key_heads, s.tp))}"
        ),
    ),
)


CHUNK = 64  # tokens of a chunk: `fused_kernels.delta_rule`
RATES = Uniform(1.0, 16.0)  # initial decay rates


class DeltaSizes(NamedTuple):
    """G key heads, r value heads of each, K channels of a key, V of a value."""

    groups: int
    heads: int
    keys: int
    values: int

    @classmethod
    def of(cls, m: Model) -> "DeltaSizes":
        groups = m.linear_num_key_heads
        return cls(groups, m.linear_num_value_heads // groups, m.linear_key_head_dim, m.linear_value_head_dim)

    @property
    def parts(self) -> tuple[int, ...]:
        """The rows of a key head in the first projection: query, key, values, gates, write strengths, decays."""
        inner = self.heads * self.values
        return self.keys, self.keys, inner, inner, self.heads, self.heads

    @property
    def mixed(self) -> int:
        """Channels of a key head that the convolution mixes: query, key, values."""
        return sum(self.parts[:3])


def _state(model: Model, tp: int, element: int) -> int:
    """Bytes of the rows that the convolution needs, and of the states, which are fp32."""
    sizes, g = DeltaSizes.of(model), model.linear_num_key_heads // tp
    rows = (model.linear_conv_kernel_dim - 1) * g * sizes.mixed * element
    return rows + 4 * g * sizes.heads * sizes.keys * sizes.values


def gdn(model: Model, sequence_parallel: bool) -> Table:
    """The weights of a gated delta net, in the order of key heads: a rank of tensor parallelism has whole ones.

    The numbers that decide what states keep, `A_log` and `dt_bias`, are exact: bf16 has three digits. The norm's weight is
    one for all value heads, of which a rank sees some: its gradient is partial, with and without sequence parallelism.
    """
    m, sizes, taps = model, DeltaSizes.of(model), model.linear_conv_kernel_dim
    g, inner = sizes.groups, sizes.heads * sizes.values
    own = lambda shape, init, **more: Placement((g, *shape), init, cut={"tp": 0}, decay=len(shape) > 1, **more)
    fused = column(m.hidden_size, (g, sum(sizes.parts)), m.init_method_std, bias=False, matrices=(1, sizes.parts))
    return {
        **add_prefix("in_proj", fused),
        "conv_weight": own((sizes.mixed, taps), Uniform(-(taps**-0.5), taps**-0.5)),
        "dt_bias": own((sizes.heads,), Constant(1.0), exact=True),
        "A_log": own((sizes.heads,), LogOf(RATES), exact=True),
        "norm_weight": Placement((sizes.values,), Constant(1.0), partial=("tp",), decay=False),
        **add_prefix("out_proj", row(g * inner, m.hidden_size, output_std(m), bias=False)),
    }


def gdn_ops(x: Residual) -> tuple[LayerOp, ...]:
    """The two projections, and between them the convolution, the delta rule and the gated norm, of a rank's key heads.

    FLOPs of the convolution are those of its weight, which multiplies every token (`Facts.flops`).
    """
    share, n, e = x.share, x.tokens, x.share.element
    sizes, taps = DeltaSizes.of(x.model), x.model.linear_conv_kernel_dim
    groups, heads = sizes.groups // share.tp, sizes.groups // share.tp * sizes.heads
    projected, mixed, channels = groups * sum(sizes.parts), groups * sizes.mixed, heads * sizes.values
    own, numbers = SharedScan.of(share, sizes.groups, n), sizes.heads * sizes.keys  # rows of a group's states
    passed = taps, sizes.mixed, numbers * sizes.values, numbers * sizes.keys
    # The projection; what the convolution gives; in fp32 write strengths, decays, and these before and after the softplus;
    # what the delta rule gives.
    kept = n * ((projected + mixed + channels) * e + 4 * 4 * heads)
    kept += 2 * 4 * own.groups * sizes.heads  # decay rates, as the exponential and with their sign
    kept += own.kept(*passed)
    states = 4 * -(-own.length // CHUNK) * own.samples * own.groups * numbers * sizes.values
    blocks = 10 * 4 * own.samples * own.groups * sizes.heads * CHUNK**2
    of_norm, of_scan = 6 * 4 * n * channels, states + blocks + n * (4 * channels + (mixed + channels) * e)
    products = n * (6.0 * channels * sizes.keys + CHUNK * (3.0 * channels + 4.0 * groups * sizes.keys))
    if own.passes:  # the states that chunks leave, and their maps, which are states of as many values as keys
        wide = channels + heads * sizes.keys
        products += n * (4.0 * wide * sizes.keys + CHUNK * (wide + 2.0 * groups * sizes.keys))
    scan = Scan(
        "gdn",
        kept=kept,
        given=n * projected * e,
        workspace=n * projected * e + max(of_norm, of_scan, 6 * 4 * n * mixed),
        moved=n * (2 * projected + 4 * mixed + 8 * channels),
        flops=6.0 * n * channels * sizes.keys,
        products=products,
        smallest=min(CHUNK, sizes.keys, sizes.values),
    )
    ops = own.exchanged(scan, n * projected * e, n * channels * e, *passed)
    fused = x.column("gdn", projected, again=(ATTENTION,), layer="gdn.in_proj")
    return *fused, *ops, *x.row("gdn", channels, again=(ATTENTION,), layer="gdn.out_proj")


def _shrunk(model: Model, small: Model, tp: int) -> dict:
    """Key heads as many as ranks divide them, two value heads in each if they have several; narrow heads; both kinds of
    layers if the model has both.
    """
    if not model.has_gdn:
        return {}
    groups, several = max(2, tp), model.linear_num_value_heads > model.linear_num_key_heads
    sizes = dict(
        linear_num_key_heads=groups,
        linear_num_value_heads=groups * (2 if several else 1),
        linear_key_head_dim=8,
        linear_value_head_dim=8,
    )
    if model.letters:
        return sizes
    linear = [model.is_linear(n) for n in range(model.num_layers)]
    softmax = not all(linear) and small.num_layers > 1
    return sizes | dict(linear_attention_freq=f"[1]*{small.num_layers - softmax}" + "+[0]" * softmax)


def settings_of(layers: Sequence[bool]) -> dict:
    """The settings of these layers, in the shortest words."""
    if not any(layers):
        return dict(experimental_attention_variant=None, linear_attention_freq=None)
    every = next((n for n in range(1, len(layers) + 1) if linear_layers(str(n), len(layers)) == tuple(layers)), None)
    words = str(every) if every else str([int(linear) for linear in layers]).replace(" ", "")
    return dict(experimental_attention_variant="gated_delta_net", linear_attention_freq=words)


def _has_shape(model: Model) -> bool:
    return not model.has_gdn or model.linear_num_value_heads % model.linear_num_key_heads == 0


KIND = Mixer(
    "gdn",
    "gdn",
    "megatron.model.kinds.gdn.module:GatedDeltaNet",
    weights=lambda facts, model, sequence_parallel: gdn(model, sequence_parallel),
    ops=lambda facts, x: gdn_ops(x),
    symbol=SYMBOL,
    place="attention",
    takes=lambda model, layer: model.is_linear(layer),
    chooses=settings_of,
    asked=lambda model: (
        f"--experimental-attention-variant {variant}" if (variant := model.experimental_attention_variant) else ""
    ),
    settings=GDNSettings,
    rules=RULES,
    mixes_tokens=True,
    recomputes=(CORE, ATTENTION),
    divided=lambda model: {"key heads of gated delta nets": model.linear_num_key_heads},
    heads=lambda model: model.linear_num_key_heads,
    scans=True,
    state=_state,
    has_shape=_has_shape,
    hf_matches="megatron.model.kinds.gdn.hf:matches",
    in_megatron="megatron.model.kinds.gdn.megatron:FORM",
    shrunk=_shrunk,
)
