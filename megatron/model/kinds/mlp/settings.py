# SPDX-License-Identifier: Apache-2.0
"""The settings of the MLP. Needs no torch."""

from dataclasses import dataclass
from typing import Optional

from megatron.settings.declare import Count, Positive
from megatron.settings.network import Network, formula, shape

QUICK = 1.702  # x sigmoid(1.702 x) is close to GeLU (arXiv:1606.08415, section 2)


GELU = Network(
    "GeLU (no --swiglu, --squared-relu or --quick-geglu)", lambda s: not (s.swiglu or s.squared_relu or s.quick_geglu)
)
SIGMOID_GATE = Network("--swiglu or --quick-geglu", lambda s: s.swiglu or s.quick_geglu)


@dataclass(frozen=True)
class MLPSettings:
    """The width of the MLP, and its activation."""

    ffn_hidden_size: Optional[Count] = shape(
        "hidden size of the MLP (default: 4 x hidden size, 8/3 x with --swiglu or --geglu)", None, by_layer=int
    )
    swiglu: bool = shape("gated SiLU in the MLP instead of GeLU", False)
    geglu: bool = shape("gated GeLU in the MLP instead of GeLU", False)
    squared_relu: bool = shape("relu(x)^2 in the MLP instead of GeLU", False)
    quick_geglu: bool = shape("gated x sigmoid(1.702 x) in the MLP instead of GeLU, as in gpt-oss", False)
    activation_func_clamp_value: Optional[Positive] = formula(
        "with --swiglu or --quick-geglu: gates are at most this, and values between minus this and this",
        None,
        needs=SIGMOID_GATE,
    )
    glu_linear_offset: float = formula(
        "with --swiglu or --quick-geglu: any number, added to the values after the clamp", 0.0, needs=SIGMOID_GATE
    )
    bias_gelu_fusion: bool = formula("fuse the bias with tanh GeLU; off: erf GeLU", True, needs=GELU)

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP; a gate keeps the parameter count of 4h with 8/3 h, rounded down to 64 (Megatron)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        narrow = self.swiglu or self.geglu
        return max(64, self.hidden_size * 8 // 3 // 64 * 64) if narrow else 4 * self.hidden_size

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate."""
        return self.swiglu or self.geglu or self.quick_geglu

    @property
    def sigmoid_gate(self) -> Optional[tuple[float, Optional[float], float]]:
        """(alpha, limit, offset) of a gate with x sigmoid(alpha x), unless it is that of plain SwiGLU, or another one."""
        changed = self.activation_func_clamp_value is not None or self.glu_linear_offset != 0
        if not (self.quick_geglu or self.swiglu and changed):
            return None
        return QUICK if self.quick_geglu else 1.0, self.activation_func_clamp_value, self.glu_linear_offset
