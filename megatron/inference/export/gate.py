# SPDX-License-Identifier: Apache-2.0
"""The comparison before an export appears: the program that will run it, and this suite's model, on fixed tokens."""

from typing import NamedTuple

import torch

from megatron.errors import CheckpointError

# Largest difference, as a share of the largest value; (format, format of weights) -> (share, why). Those of formats that
# compute in fewer bits are 4 to 10 times what random models of 2 and 24 layers show: trained ones have larger outliers.
_FP32 = (2e-5, "two fp32 implementations are within 1e-6 of it; another GeLU gives more than 5e-5")
_TIES = (1e-1, "an input between two whole numbers may fall to either side")
LIMITS = {
    ("hf", "any"): _FP32,  # transformers computes in fp32, whatever the weights are stored in
    ("hf with rounded inputs", "any"): (5e-2, "transformers rounds inputs to 256 values, this suite to 255"),
    ("onnx with rounded inputs", "any"): _TIES,
    ("torch-export with rounded inputs", "any"): _TIES,
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


class Agreement(NamedTuple):
    """The comparison of one export. what: logits, or log-probabilities."""

    client: str
    difference: float
    largest: float
    share: float  # of the largest that may differ
    what: str = "logits"

    @property
    def allowed(self) -> float:
        return self.share * self.largest

    @property
    def sentence(self) -> str:
        return (
            f"{self.what} of {self.client} differ by at most {self.difference:.2e} of {self.largest:.3g} "
            f"(allowed: {self.allowed:.2e})"
        )


def agreement(
    form: str, dtype: str, client: str, ours: torch.Tensor, theirs: torch.Tensor, what: str = "logits"
) -> Agreement:
    """Compare outputs. Raises CheckpointError if they differ by more than `LIMITS` allows, with the numbers."""
    share, why = next(
        LIMITS[key]
        for key in ((form, dtype), (form, "any"), (form.split()[0], dtype), (form.split()[0], "any"))
        if key in LIMITS
    )
    same = ours.shape == theirs.shape
    difference = (ours.double() - theirs.double()).abs().max().item() if same else float("nan")
    found = Agreement(client, difference, ours.abs().max().item(), share, what)
    if not difference <= found.allowed:
        shapes = "" if same else f"; shapes: {list(ours.shape)} and {list(theirs.shape)}"
        raise CheckpointError(
            f"the exported model computes something else: {found.sentence}{shapes}",
            f"the limit is {share:g} of the largest value: {why}",
            "nothing was written",
        )
    return found
