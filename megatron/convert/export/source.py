# SPDX-License-Identifier: Apache-2.0
"""The checkpoint that is exported, and what is wanted of it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Optional

import torch

from megatron.checkpoint.lineage import model_name
from megatron.checkpoint.reader import QUANTIZED, Reader
from megatron.convert.export import gguf_file
from megatron.convert.families import Family, exported, prompts_for
from megatron.convert.hf_tokenizer import ExportedTokenizer, write_tokenizer
from megatron.errors import SettingsError
from megatron.inference.agreement import Agreement, agreement
from megatron.inference.load import Loaded, build_model, load_model, refuse_head, without_model
from megatron.inference.quantize import Rounded, attach, free_weights
from megatron.inference.quantized import cut_from, stored_options
from megatron.model.facts import Facts
from megatron.model.linear_kinds import choices
from megatron.model.quantization import KIND as FAKE_QUANTIZE
from megatron.model.quantization import PLAIN, QuantizeOptions
from megatron.model.recipe import config_of, facts_of
from megatron.mpu.initialize import DTYPES
from megatron.mpu.layers import linear_products
from megatron.mpu.mesh import Mesh
from megatron.settings.from_checkpoint import located
from megatron.settings.schema import Config
from megatron.storage.urls import UrlPath

Form = Literal["hf", "gguf", "onnx", "torch-export"]


@dataclass(frozen=True)
class Wanted:
    """An export as requested.

    dtype: of the weights; None: as trained. kind: of a program. tp: ranks that share the model. quantize: of linear layers
    generation: settings that generation_config.json recommends
    """

    form: Form
    dtype: Optional[str] = None
    kind: Literal["lm", "generation"] = "lm"
    tp: int = 1
    check: bool = True
    quantize: QuantizeOptions = PLAIN
    generation: Optional[Mapping[str, Any]] = None


class ExportSource:
    """A checkpoint to export. Raises SettingsError if it holds no model with an output layer."""

    def __init__(self, path: Path | UrlPath, trained: Path | UrlPath, given: Mapping[str, Any]):
        """path: the checkpoint; trained: the one that the run wrote, if adapters were merged for `path`"""
        self.path, self.trained, self.given = path, trained, given
        self._quantized: dict[tuple[str, str], Loaded] = {}  # by the format of other weights, and how it is quantized
        with Reader(self.path) as reader:
            reader.needed("config")
            self.record, self.vocab_size = dict(reader.state), reader.needed("vocab_size")
        self.config: Config = config_of(located(self.record))
        refuse_head(self.config, self.vocab_size, self.path)
        self.facts: Facts = facts_of(self.config, self.vocab_size)
        self.iteration = int(self.record.get("iteration") or 0)

    @property
    def name(self) -> str:
        """The name of the model."""
        return model_name(self.record, self.trained)

    @property
    def longest(self) -> int:
        """The context length."""
        return self.config.model.context_length

    @cached_property
    def family(self) -> Family:
        """The model of other libraries. Raises SettingsError if they have none."""
        return exported(self.config, self.vocab_size)

    def write_tokenizer(self, folder: Path) -> ExportedTokenizer:
        """Write the tokenizer's files, the chat template and generation_config.json, as transformers has them."""
        run = without_model(self.config, self.record, self.path)
        return write_tokenizer(folder, run, self.given, self.trained, self._their_ids)

    def _their_ids(self, end: Optional[int]) -> dict[str, Any]:
        """The special ids of their config.json."""
        try:
            return self.family.theirs(end, "float32")
        except SettingsError:  # a model that they do not have
            return dict(bos_token_id=end, eos_token_id=end)

    def model(self, dtype: str, mesh: Optional[Mesh] = None, computes_in: str = "fp32") -> torch.nn.Module:
        """The model of one rank, with weights that were rounded to `dtype`."""
        built = build_model(self.config, self.vocab_size, device="cpu", precision="fp32", mesh=mesh or Mesh())
        with Reader(self.path) as reader:
            reader.load(built.pieces, cast=True)
        model = built.model.eval()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(DTYPES[dtype]).float()
        if computes_in != "fp32":
            model = model.to(DTYPES[computes_in])
            model.dtype = DTYPES[computes_in]
        return model

    @property
    def trained_to_round(self) -> bool:
        """Whether linear layers are those of quantization aware training."""
        return any(choice.kind == FAKE_QUANTIZE for choice in choices(self.config.model.linear or ""))

    @cached_property
    def is_quantized(self) -> bool:
        """Whether the checkpoint is a quantized one."""
        return QUANTIZED in self.record

    def quantized(self, dtype: str, how: QuantizeOptions) -> Loaded:
        """The model with quantized linear layers and other weights that were rounded to `dtype`, which computes in fp32.

        how: without a format, that of the checkpoint, or int8 for a model of quantization aware training
        """
        dtype = dtype if dtype in DTYPES else "fp32"
        key = dtype, repr(how)
        if key in self._quantized:
            return self._quantized[key]
        how = how if self.is_quantized else self.how_quantized(how)
        loaded = load_model(str(self.path), precision="bf16" if dtype == "bf16" else "fp32", quantize=how)
        for parameter in loaded.model.parameters():
            parameter.data = parameter.data.to(DTYPES[dtype]).float()
        loaded.model.dtype = torch.float32
        self._quantized[key] = loaded
        return loaded

    def how_quantized(self, how: QuantizeOptions) -> QuantizeOptions:
        """The format of linear layers, see `quantized`."""
        if self.is_quantized:
            return stored_options(self.record[QUANTIZED])
        return how if how.quantize else replace(how, quantize="int8")

    def rounded_part(self, dtype: str, whole: torch.nn.Module, how: QuantizeOptions, mesh: Mesh) -> torch.nn.Module:
        """A rank's part of a quantized model, which computes in fp32. No rank is started, so that it is cut from the whole.

        how: of `how_quantized`
        """
        built = build_model(self.config, self.vocab_size, device="cpu", precision="fp32", mesh=mesh)
        chosen = attach([built.model], self.facts, how)
        rounded = {f"{name}.weight" for name in chosen}
        with Reader(self.path) as reader:
            reader.load([piece for piece in built.pieces if piece.name not in rounded], cast=True)
        products = {product.name: product for product in linear_products([whole])}
        for name, layer in chosen.items():
            cut_from(products[name], layer.product, mesh.coordinates)
        free_weights([built.model], chosen)
        for parameter in built.model.parameters():
            parameter.data = parameter.data.to(DTYPES[dtype]).float()
        return built.model.eval()

    def rounds(self, wanted: Wanted) -> bool:
        """Whether an export has quantized linear layers. torch-export records what quantization aware training computes."""
        trained = self.trained_to_round and wanted.form != "torch-export"
        return bool(wanted.quantize.quantize) or self.is_quantized or trained

    def products(self, wanted: Wanted) -> dict[str, Rounded]:
        """Layer -> its product, of an export with quantized layers."""
        if not self.rounds(wanted):
            return {}
        found = linear_products([self.quantized(wanted.dtype, wanted.quantize).model])
        return {product.name: product for product in found}

    def compared_as(self, wanted: Wanted) -> str:
        """The row of `agreement.LIMITS` for an export."""
        trained = self.trained_to_round and self.config.model.activation_quantize_type != "none"
        dynamic = "int8-dynamic" in (wanted.quantize.quantize, self.record.get(QUANTIZED, {}).get("quantize"))
        if trained or dynamic:
            return f"{wanted.form}{ROUNDED_INPUTS}"
        return "hf with states" if wanted.form == "hf" and self.facts.with_states else wanted.form

    def model_of(self, wanted: Wanted) -> torch.nn.Module:
        """The model that an export has to agree with, in fp32."""
        if wanted.form == "gguf":
            return _model_of_weights(self, wanted)
        if self.rounds(wanted):
            return self.quantized(wanted.dtype, wanted.quantize).model
        return self.model(wanted.dtype)

    def format_of(self, wanted: Wanted) -> str:
        """The format of an export's weights, in words: fp32, or `int4 and fp32` where layers are quantized."""
        stored = self.record.get(QUANTIZED, {}).get("quantize")
        whole = (wanted.quantize.quantize or stored or "int8") if self.rounds(wanted) else wanted.dtype
        return str(wanted.dtype) if whole == wanted.dtype else f"{whole} and {wanted.dtype}"

    @torch.no_grad()
    def compared(self, form: str, wanted: Wanted, theirs: torch.Tensor, outputs, **more) -> Agreement:
        """Compare what the client of an export computes with the model of the file, and with that of the checkpoint.

        form: the row of `agreement.LIMITS`; outputs: (a model) -> what `theirs` is to equal; more: client, what ...
        """
        ours = outputs(self.model_of(wanted))
        same = wanted.dtype == "fp32" and not self.rounds(wanted) and self.trained == self.path
        checkpoint = ours if same else outputs(load_model(str(self.trained), precision="fp32").model)
        if form.endswith(ROUNDED_INPUTS) and wanted.form != "hf":
            of_weights = replace(wanted, form="onnx")  # a program of torch records what training computes
            more["plain"] = outputs(_model_of_weights(self, of_weights))
        return agreement(
            form, wanted.dtype, theirs=theirs, ours=ours, checkpoint=checkpoint, to=self.format_of(wanted), **more
        )

    def prompts(self) -> torch.Tensor:
        """Fixed token ids [s, b]."""
        return prompts_for(self.facts)


ROUNDED_INPUTS = " with rounded inputs"  # of rows of `agreement.LIMITS`


def _model_of_weights(source: ExportSource, wanted: Wanted) -> torch.nn.Module:
    """The model with the weights of the files. It rounds no inputs."""
    products, settings = source.products(wanted), replace(source.config.model, linear=None, quantization=False)
    config = replace(source.config, model=settings)
    built = build_model(config, source.vocab_size, device="cpu", precision="fp32", mesh=Mesh())
    with Reader(source.path) as reader:
        reader.load([piece for piece in built.pieces if piece.name.removesuffix(".weight") not in products], cast=True)
    for name, parameter in built.model.named_parameters():
        if product := products.get(name.removesuffix(".weight")):
            parameter.data = product.codes().weight().view_as(parameter)
        elif wanted.dtype in DTYPES:
            parameter.data = parameter.data.to(DTYPES[wanted.dtype]).float()
        elif parameter.dim() > 1 and "position" not in name:
            parameter.data = gguf_file.rounded(
                parameter.data, "q8_0" if source.facts.weights[name].embedding_or_output else wanted.dtype
            )
    return built.model.eval()
