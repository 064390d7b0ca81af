# SPDX-License-Identifier: Apache-2.0
"""The state and the settings of each `--optimizer`, known before there is a model. Needs no torch.

`update.py` has their formulas.
"""

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple, Optional

from megatron.settings.schema import Optimizer


class Kind(NamedTuple):
    """The state and the settings of an optimizer.

    state:    settings -> names of the state tensors per weight, each as large as the weight, in the format of `format_of`
    settings: names of the settings that only this optimizer reads
    matrices: names of the state tensors of linear layers' matrices, if it updates these by another formula
              (`Placement.matrices`); None: all weights are treated alike
    update:   settings -> `update.UpdateRule`, for example a subclass; built-in optimizers have theirs in `update.py`
    group:    for a user-defined optimizer: a frozen dataclass of settings that it adds to `schema.Optimizer`
    """

    state: Callable[[Optimizer], tuple[str, ...]]
    settings: tuple[str, ...] = ()
    matrices: Optional[tuple[str, ...]] = None
    update: Optional[Callable[[Optimizer], Any]] = None
    group: Optional[type] = None

    @property
    def names(self) -> tuple[str, ...]:
        """The settings that only this optimizer reads."""
        return (*self.settings, *(field.name for field in fields(self.group))) if self.group else self.settings


_ADAM = Kind(lambda s: ("exp_avg", "exp_avg_sq"), ("adam_beta1", "adam_beta2", "adam_eps"))
KINDS = {
    "adam": _ADAM,
    "sgd": Kind(lambda s: ("momentum_buffer",) if s.sgd_momentum else (), ("sgd_momentum",)),
    "lion": Kind(lambda s: ("exp_avg",), ("lion_beta1", "lion_beta2")),
    "muon": Kind(
        _ADAM.state,
        (
            *("muon_momentum", "muon_nesterov", "muon_scale_mode", "muon_extra_scale_factor"),
            *("muon_num_ns_steps", "muon_coefficient_type", "muon_fp32_matmul_prec", *_ADAM.settings),
        ),
        matrices=("momentum_buffer",),
    ),
}

# (a, b, c) for each step of Muon's iteration: "simple" is its author's, "quintic" Megatron-LM's default, "polar_express"
# from arXiv:2505.16932.
COEFFICIENTS = {
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    "polar_express": (
        (7.2086, -15.5131, 9.0178),
        (3.9623, -2.5813, 0.4542),
        (3.9466, -2.5765, 0.4544),
        (3.8991, -2.5671, 0.4566),
        (3.7186, -2.5308, 0.4653),
        (3.1390, -2.3073, 0.4733),
        (2.1715, -1.5246, 0.3885),
        (1.8648, -1.2224, 0.3577),
    ),
}


def kinds_of(settings: Optimizer) -> dict[str, Kind]:
    """All values of `--optimizer`, including those of the recipe (`Recipe.optimizers`)."""
    return {**KINDS, **settings.own_optimizers}


def state_of(settings: Optimizer, matrix: bool = False) -> tuple[str, ...]:
    """Names of the state tensors that an optimizer keeps for weights, or for linear layers' matrices.

    >>> state_of(Optimizer(optimizer="lion")), state_of(Optimizer(optimizer="muon"), matrix=True)
    (('exp_avg',), ('momentum_buffer',))
    """
    kind = kinds_of(settings)[settings.rule]
    return kind.matrices if matrix and kind.matrices is not None else kind.state(settings)


ELEMENT = dict(fp32=4, bf16=2)  # bytes of a number
_FORMATS = dict(exp_avg="exp_avg_dtype", momentum_buffer="exp_avg_dtype", exp_avg_sq="exp_avg_sq_dtype")


def format_of(settings: Optimizer, name: str) -> str:
    """The number format of a state tensor. State of a user-defined optimizer is fp32, unless it has one of these names.

    >>> format_of(Optimizer(exp_avg_dtype="bf16"), "exp_avg"), format_of(Optimizer(exp_avg_dtype="bf16"), "square")
    ('bf16', 'fp32')
    """
    return getattr(settings, _FORMATS[name]) if name in _FORMATS else "fp32"


def formats_of(settings: Optimizer) -> set[str]:
    """Names of the settings for formats of state that this optimizer keeps."""
    names = {name for matrix in (False, True) for name in state_of(settings, matrix)}
    return {_FORMATS[name] for name in names & _FORMATS.keys()}


def state_bytes(settings: Optimizer, matrix: bool = False) -> tuple[int, ...]:
    """Bytes per weight of each state tensor, in the order of `state_of`."""
    return tuple(ELEMENT[format_of(settings, name)] for name in state_of(settings, matrix))


def gradient_bytes(settings: Optimizer, stage: int) -> tuple[int, int]:
    """Bytes of a gradient while it is accumulated and reduced, and in a rank's shard of the sum.

    The shard of ZeRO 2 and 3 adds the micro-batches in the format of --main-grads-dtype. With other stages the shard is the
    result of the reduction.

    >>> gradient_bytes(Optimizer(grad_reduce_in_bf16=True), 1), gradient_bytes(Optimizer(grad_reduce_in_bf16=True), 2)
    ((2, 2), (2, 4))
    """
    reduced = ELEMENT[settings.reduced_format]
    return reduced, ELEMENT[settings.main_grads_dtype] if stage >= 2 else reduced


def knows_matrices(settings: Optimizer) -> bool:
    """Whether an optimizer updates the matrices of linear layers by another formula."""
    return kinds_of(settings)[settings.rule].matrices is not None
