# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: its rules, weights and ops. Needs no torch.

Legend: n tokens of a micro-batch (s x b), G groups of r heads of P channels, N channels of the state, W taps of the
convolution, e bytes per element.
"""

from typing import NamedTuple

from megatron.model.kinds.mamba.settings import BESIDE, PRESENT, SYMBOL, MambaSettings
from megatron.model.kinds.mixer import Mixer
from megatron.model.kinds.scan_ops import SharedScan
from megatron.model.layer_ops import ATTENTION, CORE, LayerOp, Residual, Scan
from megatron.model.weights import add_prefix, column, output_std, row
from megatron.mpu.placement import Constant, InverseSoftplus, LogOf, LogUniform, Placement, Uniform
from megatron.settings.rules import Rule, divisors, either, multiples
from megatron.settings.schema import Model


def _heads(s) -> int:
    return s.settings.model.mamba_heads


def _uneven(s) -> bool:
    """Whether no whole number of heads is the default."""
    return s.mamba_num_heads is None and 2 * s.hidden_size % s.mamba_head_dim != 0


def _words(s) -> str:
    return f"{_heads(s)} heads of a Mamba-2 layer" if s.mamba_num_heads is None else f"--mamba-num-heads {_heads(s)}"


RULES = (
    Rule(
        lambda s: PRESENT.met(s) and _uneven(s),
        lambda s: (
            f"--mamba-head-dim {s.mamba_head_dim} does not divide {2 * s.hidden_size}, twice --hidden-size; nearest: "
            f"{either(divisors(2 * s.hidden_size, s.mamba_head_dim))}, or give --mamba-num-heads"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and not _uneven(s) and _heads(s) % s.mamba_num_groups,
        lambda s: (
            f"{_words(s)} cannot be divided by --mamba-num-groups {s.mamba_num_groups}; nearest: "
            f"{either(divisors(_heads(s), s.mamba_num_groups))} groups"
        ),
    ),
    Rule(
        lambda s: PRESENT.met(s) and s.mamba_num_groups % s.tp,
        lambda s: (
            f"--mamba-num-groups {s.mamba_num_groups} cannot be divided by --tensor-model-parallel-size {s.tp}; nearest: "
            f"{either(multiples(s.mamba_num_groups, s.tp))}, or tensor parallel size "
            f"{either(divisors(s.mamba_num_groups, s.tp))}"
        ),
    ),
)


TAPS = 4
CHUNK = 128  # tokens of a chunk: `fused_kernels.ssd`
STEPS = LogUniform(0.001, 0.1, 1e-4)  # initial step sizes
RATES = Uniform(1.0, 16.0)  # initial decay rates


class ScanSizes(NamedTuple):
    """groups G, heads r of a group, channels P of a head, channels N of the state."""

    groups: int
    heads: int
    channels: int
    state: int

    @classmethod
    def of(cls, m: Model) -> "ScanSizes":
        groups = m.mamba_num_groups
        return cls(groups, m.mamba_heads // groups, m.mamba_head_dim, m.mamba_state_dim)

    @property
    def parts(self) -> tuple[int, ...]:
        """The rows of a group in the first projection: gate, x, B, C, step sizes."""
        inner = self.heads * self.channels
        return inner, inner, self.state, self.state, self.heads


def _state(model: Model, tp: int, element: int) -> int:
    """Bytes of the rows that the convolution needs, and of the states, which are fp32."""
    sizes, g = ScanSizes.of(model), model.mamba_num_groups // tp
    rows = (TAPS - 1) * g * sum(sizes.parts[1:4]) * element
    return rows + 4 * g * sizes.heads * sizes.channels * sizes.state


def mamba(model: Model, sequence_parallel: bool) -> dict[str, Placement]:
    """The weights of a Mamba-2 layer, in the order of groups: a rank of tensor parallelism has whole groups.

    The numbers that decide what states keep, `A_log`, `dt_bias` and `D`, are exact: bf16 has three digits.
    """
    sizes, std = ScanSizes.of(model), model.init_method_std
    g, inner, mixed = sizes.groups, sizes.parts[0], sum(sizes.parts[1:4])
    own = lambda shape, init, **more: Placement((g, *shape), init, cut={"tp": 0}, decay=len(shape) > 1, **more)
    of_heads = lambda init: own((sizes.heads,), init, exact=True)
    taps = Uniform(-(TAPS**-0.5), TAPS**-0.5)
    fused = column(model.hidden_size, (g, sum(sizes.parts)), std, bias=False, matrices=(1, sizes.parts))
    norm = {"norm_weight": own((inner,), Constant(1.0))} if model.mamba_rms_norm else {}
    return {
        **add_prefix("in_proj", fused),
        "conv_weight": own((mixed, TAPS), taps),
        "conv_bias": own((mixed,), taps),
        "dt_bias": of_heads(InverseSoftplus(STEPS)),
        "A_log": of_heads(LogOf(RATES)),
        "D": of_heads(Constant(1.0)),
        **norm,
        **add_prefix("out_proj", row(g * inner, model.hidden_size, output_std(model), bias=False)),
    }


def mamba_ops(x: Residual) -> tuple[LayerOp, ...]:
    """The two projections, and between them the convolution, the scan and the gated norm, of a rank's groups.

    FLOPs of the convolution are those of its weight, which multiplies every token (`Facts.flops`).
    """
    share, n, e = x.share, x.tokens, x.share.element
    sizes = ScanSizes.of(x.model)
    groups, (inner, mixed, heads) = sizes.groups // share.tp, (sizes.parts[0], sum(sizes.parts[1:4]), sizes.heads)
    projected, channels = groups * sum(sizes.parts), groups * inner
    own, passed = SharedScan.of(share, sizes.groups, n), (TAPS, mixed, inner * sizes.state, heads)
    # The projection; what the convolution gives; step sizes before and after their softplus, in fp32; what the scan gives.
    kept = n * (projected * e + groups * mixed * e + 2 * 4 * groups * heads + channels * e)
    kept += 2 * 4 * own.groups * heads  # decay rates, as the exponential and with their sign
    kept += own.kept(*passed)
    states = own.tokens // CHUNK * own.groups * inner * sizes.state * 4
    blocks = 6 * 4 * own.samples * own.groups * heads * CHUNK**2
    half = e < 4  # inputs are copied to fp32
    of_gate = 11 + 4 * half if x.model.mamba_rms_norm else 4 + 3 * half
    of_norm, of_scan = of_gate * 4 * n * channels, n * (channels + groups * mixed) * e + states + blocks
    of_conv = (5 + half) * 4 * n * groups * mixed
    once = 2.0 * inner * sizes.state  # of a state's update, which chunks whose states are passed on compute twice
    scan = Scan(
        "mamba",
        kept=kept,
        given=n * projected * e,
        workspace=max(of_norm, n * channels * e + max(of_scan, of_conv)),  # the gradient of gates waits
        moved=n * (2 * projected + 4 * groups * mixed + 8 * channels),
        flops=4.0 * n * channels * sizes.state,
        products=n * groups * ((2 + own.passes) * once + 2.0 * CHUNK * (inner + sizes.state)),
        smallest=min(CHUNK, sizes.channels, sizes.state),
    )
    ops = own.exchanged(scan, n * projected * e, n * channels * e, *passed)
    fused = x.column("mamba", projected, again=(ATTENTION,), layer="mamba.in_proj")
    return *fused, *ops, *x.row("mamba", channels, again=(ATTENTION,), layer="mamba.out_proj")


def _shrunk(model: Model, small: Model, tp: int) -> dict[str, int]:
    """Groups as many as ranks divide them, two heads in each if they have several; narrow heads and states."""
    groups, several = max(2, tp), model.mamba_heads > model.mamba_num_groups
    return dict(
        mamba_num_groups=groups,
        mamba_num_heads=groups * (2 if several else 1),
        mamba_head_dim=8,
        mamba_state_dim=min(model.mamba_state_dim, 16),
    )


KIND = Mixer(
    "mamba",
    "mamba",
    "megatron.model.kinds.mamba.module:Mamba",
    weights=lambda facts, model, sequence_parallel: mamba(model, sequence_parallel),
    ops=lambda facts, x: mamba_ops(x),
    symbol=SYMBOL,
    beside=((BESIDE, "attention"),),
    settings=MambaSettings,
    rules=RULES,
    hf_matches="megatron.model.kinds.mamba.hf:matches",
    in_megatron="megatron.model.kinds.mamba.megatron:FORM",
    mixes_tokens=True,
    recomputes=(CORE, ATTENTION),
    divided=lambda model: {"Mamba-2 groups": model.mamba_num_groups},
    heads=lambda model: model.mamba_num_groups,
    scans=True,
    state=_state,
    has_shape=lambda model: not model.has_mamba or model.mamba_heads % model.mamba_num_groups == 0,
    shrunk=_shrunk,
)
