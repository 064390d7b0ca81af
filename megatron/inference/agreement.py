# SPDX-License-Identifier: Apache-2.0
"""The comparison before an export or an import appears: the program that runs the files, and this suite's model, on fixed
tokens.

Files may have rounded weights. So there are three models: the files', ours with the weights of the files, and that of the
checkpoint. The first two have to agree; how far the files are from the checkpoint is said.
"""

import math
from typing import NamedTuple, Optional

import torch

from megatron.errors import CheckpointError

# Largest difference, as a share of the largest value; (format, format of weights) -> (share, why). Those of formats that
# compute in fewer bits are 4 to 10 times what random models of 2 and 24 layers show: trained ones have larger outliers.
_FP32 = (2e-5, "two fp32 implementations are within 1e-6 of it; another GeLU gives more than 5e-5")
LIMITS = {
    ("hf", "any"): _FP32,  # transformers computes in fp32, whatever the weights are stored in
    ("hf with states", "any"): (
        2e-4,
        "norms of what states say magnify the rounding of two fp32 implementations up to 5e-5",
    ),
    ("hf with rounded inputs", "any"): (5e-2, "transformers rounds inputs to 256 values, this suite to 255"),
    ("onnx", "fp32"): _FP32,
    ("onnx", "fp16"): (1e-2, "onnxruntime computes in fp16, this suite in fp32 with the same weights"),
    ("torch-export", "fp32"): _FP32,
    ("torch-export", "bf16"): (1e-1, "the program computes in bf16, this suite in fp32 with the same weights"),
    ("torch-export", "fp16"): (1e-2, "the program computes in fp16, this suite in fp32 with the same weights"),
    ("gguf", "fp32"): _FP32,
    ("gguf with GeLU", "fp32"): (1e-3, "llama.cpp looks GeLU up in a table of fp16 values"),
    ("gguf", "fp16"): (2e-3, "llama.cpp rounds the inputs of products to fp16"),
    ("gguf", "bf16"): (2e-2, "llama.cpp rounds the inputs of products to bf16"),
    ("gguf", "q8_0"): (5e-2, "llama.cpp rounds the inputs of products to integers of 8 bits"),
    ("gguf", "q4_0"): (5e-2, "llama.cpp rounds the inputs of products to integers of 8 bits"),
    ("gguf", "q4_1"): (5e-2, "llama.cpp rounds the inputs of products to integers of 8 bits"),
}
# Where a program rounds inputs of products, one between two whole numbers may fall to either side. In fp32 few do, which
# has a small part of the effect of rounding; a program that does not round differs by all of it. In half precision many do.
# So a limit has this share of the effect of rounding inputs, too.
TIES = dict(fp32=0.25, fp16=1.5, bf16=1.5)


class Agreement(NamedTuple):
    """The comparison of one export or import. what: logits, or log-probabilities.

    difference: of the client from our model with the weights of the files
    rounding:   of that model from the checkpoint's, whose weights were rounded `to` the files' format
    total:      of the client from the checkpoint's model
    """

    client: str
    difference: float
    largest: float
    share: float  # of the largest that `difference` may be
    what: str = "logits"
    rounding: float = 0.0
    total: float = 0.0
    to: str = ""

    @property
    def allowed(self) -> float:
        return self.share * self.largest

    @property
    def rounded(self) -> bool:
        """Whether rounded weights show: by more than the order of fp32's sums."""
        return self.rounding > _FP32[0] * self.largest

    @property
    def sentence(self) -> str:
        parts = (
            f"; the largest change by rounding to {self.to} is {self.rounding:.2e}, the largest by {self.client} itself "
            f"{self.difference:.2e}"
        )
        return (
            f"{self.what} of {self.client} differ by at most {self.total:.2e} of {self.largest:.3g} from the checkpoint's"
            f"{parts if self.rounded else ''} (allowed: {self.allowed:.2e})"
        )


def agreement(
    form: str,
    dtype: str,
    client: str,
    ours: torch.Tensor,
    theirs: torch.Tensor,
    what: str = "logits",
    checkpoint: Optional[torch.Tensor] = None,
    to: Optional[str] = None,
    plain: Optional[torch.Tensor] = None,
) -> Agreement:
    """Compare outputs. ours: with the weights of the files; checkpoint: with those of the checkpoint, if they are others.

    to: the format of the files' weights, in words; default: dtype. plain: as `ours`, without rounding inputs of products
    Raises CheckpointError if `ours` and `theirs` differ by more than `LIMITS` allows, with the numbers.
    """
    share, why = next(
        LIMITS[key]
        for key in ((form, dtype), (form, "any"), (form.split()[0], dtype), (form.split()[0], "any"))
        if key in LIMITS
    )
    checkpoint = ours if checkpoint is None else checkpoint
    between = (ours, theirs), (checkpoint, ours), (checkpoint, theirs)
    difference, rounding, total = (_largest(a, b) for a, b in between)
    largest = ours.abs().max().item()
    if plain is not None:
        share += TIES[dtype] * _largest(plain, ours) / largest
        why += f"; and {TIES[dtype]:g} of what rounding inputs changes, since one may fall to either side"
    found = Agreement(client, difference, largest, share, what, rounding, total, to or dtype)
    if not difference <= found.allowed < math.inf:  # of infinite outputs any other is within a share
        shapes = "" if ours.shape == theirs.shape else f"; shapes: {list(ours.shape)} and {list(theirs.shape)}"
        raise CheckpointError(
            f"the converted model computes something else: {found.sentence}{shapes}",
            f"the limit is {share:g} of the largest value: {why}",
            "nothing was written",
        )
    return found


def _largest(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of two outputs; NaN for other shapes."""
    return (a.double() - b.double()).abs().max().item() if a.shape == b.shape else float("nan")
