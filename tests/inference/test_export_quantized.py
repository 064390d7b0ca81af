# SPDX-License-Identifier: Apache-2.0
"""Exports of quantized models: transformers, llama.cpp and onnxruntime compute what `--quantize` computes here."""

import json
from functools import cache

import numpy as np
import pytest
import torch

from megatron.checkpoint.choose import choose
from megatron.checkpoint.reader import QUANTIZED, Reader
from megatron.convert.compressed_tensors import pack, unpack
from megatron.convert.export import tracing
from megatron.convert.export.load_exported import load_exported
from megatron.convert.export.onnx_quantized import OnnxProduct
from megatron.convert.export.source import ExportSource
from megatron.convert.huggingface import from_hf
from megatron.errors import CheckpointError, SettingsError
from megatron.inference.load import build_model, load_model
from megatron.inference.quantize import Int4, linear_layers
from megatron.inference.quantized import quantized_pieces
from megatron.model.quantization import QuantizeOptions
from megatron.mpu import collectives
from megatron.mpu.layers import linear_products
from megatron.mpu.mesh import Mesh
from megatron.tools import checkpoint
from tests.inference.test_export import export_to, models, need, trained  # noqa: F401
from tests.models.test_quantization import LINE

IDS = torch.randint(90, (3, 20), generator=torch.Generator().manual_seed(3))
INT4 = "--quantize int4 --quantize-group-size 32"
LLAMA = (
    "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear --ffn-hidden-size 64 "
    "--untie-embeddings-and-output-weights"
)
KINDS = {
    "int8": QuantizeOptions("int8"),
    "int8-dynamic": QuantizeOptions("int8-dynamic"),
    "int4": QuantizeOptions("int4", 32),
    "symmetric": QuantizeOptions("int4", 32, quantize_symmetric=True),
}


def words(kind: str) -> list[str]:
    how = KINDS[kind]
    flags = f"--quantize {how.quantize} --quantize-group-size 32" + " --quantize-symmetric" * how.quantize_symmetric
    return flags.split() if "int4" in flags else flags.split()[:2]


def ours(path, how=None, **more) -> torch.Tensor:
    """Logits [b, s, v]."""
    loaded = load_model(str(path), quantize=how or QuantizeOptions(), **more)
    return loaded.model.logits(IDS.t()).transpose(0, 1).detach()


def close(found, wanted, share: float) -> None:
    np.testing.assert_allclose(found, wanted, atol=share * wanted.abs().max().item(), rtol=0)


@pytest.fixture(scope="module")
def aware(tmp_path_factory):
    """A Llama of quantization aware training: type of its inputs -> folder."""
    import pretrain_gpt

    @cache
    def of(inputs: str):
        path = tmp_path_factory.mktemp("aware")
        flags = f"--quantization --activation-quantize-type {inputs}"
        pretrain_gpt.main(f"{LINE} {LLAMA} --lr 3e-2 {flags} --save {path}".split())
        return path

    return of


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_whole_numbers(kind, models, tmp_path):  # noqa: F811
    """With its own quantizer of compressed-tensors; and this suite reads the folder back, on several ranks, too."""
    pytest.importorskip("compressed_tensors")
    import transformers

    out = export_to(tmp_path / "out", models["llama"], *words(kind), "--quantize-skip", "blocks.0.mlp.up")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert {"lm_head", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"} < set(config["ignore"])
    more = dict(quantization_config=transformers.CompressedTensorsConfig(dequantize=True)) if kind == "int4" else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, **more)
    how = QuantizeOptions(**{**vars(KINDS[kind]), "quantize_skip": "blocks.0.mlp.up"})
    wanted = ours(models["llama"], how)
    with torch.no_grad():
        close(theirs(IDS).logits, wanted, 5e-2 if kind == "int8-dynamic" else 2e-5)
    close(load_exported(str(out)).model.logits(IDS.t()).transpose(0, 1).detach(), wanted, 1e-6)
    with pytest.raises(CheckpointError, match="holds weights in whole numbers .model.layers.0.mlp.down_proj.weight"):
        from_hf(out, tmp_path / "imported", {})


def read_on(rank: int, path: str):
    loaded = load_exported(path, mesh=Mesh(rank, tp=2))
    layers = linear_layers([loaded.model])
    return loaded.model.logits(IDS.t()).detach(), [name for name, layer in layers if layer.weight.numel() == 0]


@pytest.mark.full
def test_ranks_share_whole_numbers_of_a_folder(models, tmp_path, run_ranks):  # noqa: F811
    out = export_to(tmp_path / "out", models["llama"], "--quantize", "int8", "--no-check")
    wanted = ours(models["llama"], KINDS["int8"]).transpose(0, 1)
    for found, rounded in run_ranks(2, read_on, str(out)):
        close(found[..., : wanted.shape[-1]], wanted, 1e-5)
        assert len(rounded) == 8


@pytest.mark.parametrize(
    "form, inputs",
    [
        ("hf", "moving_average_abs_max"),
        pytest.param("hf", "token_wise_min_max", marks=pytest.mark.sampled(10)),
        pytest.param("onnx", "moving_average_abs_max", marks=pytest.mark.full),
        pytest.param("onnx", "token_wise_min_max", marks=pytest.mark.full),
        pytest.param("torch-export", "token_wise_min_max", marks=pytest.mark.full),
    ],
)
def test_other_programs_round_inputs_as_training_did(form, inputs, aware, tmp_path):
    """Of a model of quantization aware training."""
    aware = aware(inputs)
    if form == "torch-export":
        for flags in ((), ("--quantize", "int8")):  # the export compares logits
            out = export_to(tmp_path / f"out{len(flags)}", aware, "--format", "torch-export", *flags)
            agreed = json.loads((out / "export.json").read_text())["agreement"]
            assert agreed["difference"] < agreed["allowed"]
        return
    if form == "hf":
        pytest.importorskip("compressed_tensors")
        import transformers

        out = export_to(tmp_path / "out", aware)
        with torch.no_grad():
            found = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)(IDS).logits
        close(found, ours(aware), 5e-2)
        return
    need("onnx")
    out = export_to(tmp_path / "out", aware, "--format", "onnx", "--dtype", "fp32")
    close(by_onnxruntime(out), ours(aware), 1e-2)  # an input at a tie may fall to either side


@pytest.mark.sampled(10)
def test_a_program_that_forgets_to_round_its_inputs_is_refused(models, tmp_path, monkeypatch):  # noqa: F811
    """Rounding them changes a two-hundredth of the logits, or less: the limit is a part of that."""
    need("onnx")
    line = ["--format", "onnx", "--dtype", "fp32", "--quantize", "int8-dynamic"]
    agreed = json.loads((export_to(tmp_path / "right", models["llama"], *line) / "export.json").read_text())[
        "agreement"
    ]
    plain, rounded = (ours(models["llama"], KINDS[kind]) for kind in ("int8", "int8-dynamic"))
    effect = (plain - rounded).abs().max().item()
    assert agreed["difference"] < agreed["allowed"] < effect / 2
    forgets = lambda self, x, whole, scale: torch.nn.functional.linear(x, whole.float() * scale.float().view(-1, 1))
    monkeypatch.setattr(OnnxProduct, "_of_whole_numbers", forgets)
    with pytest.raises(CheckpointError, match="(?s)computes something else.*0.25 of what rounding inputs changes"):
        export_to(tmp_path / "wrong", models["llama"], *line)


def by_onnxruntime(out) -> torch.Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    return torch.from_numpy(session.run(None, dict(input_ids=IDS.numpy()))[0])


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_onnx_keeps_whole_numbers(kind, models, tmp_path):  # noqa: F811
    need("onnx")
    import onnx

    out = export_to(tmp_path / "out", models["llama"], "--format", "onnx", *words(kind))
    close(by_onnxruntime(out), ours(models["llama"], KINDS[kind]), 1e-4)
    graph = onnx.load(out / "model.onnx").graph
    matrices = [one for one in graph.initializer if len(one.dims) > 1]
    whole = [one for one in matrices if one.data_type in (onnx.TensorProto.INT8, onnx.TensorProto.UINT8)]
    assert len(whole) >= 8 and len(matrices) - len(whole) <= 3  # embedding and output


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", ["int8", "int4", "symmetric"])
def test_blocks_of_gguf_have_the_numbers(kind, models, tmp_path):  # noqa: F811
    """As the package gguf reads them."""
    gguf = pytest.importorskip("gguf")
    out = export_to(tmp_path / "out", models["llama"], "--format", "gguf", "--no-check", *words(kind))
    how = KINDS[kind]
    model = load_model(str(models["llama"]), quantize=how).model
    tensors = {one.name: one for one in gguf.GGUFReader(out / "model.gguf").tensors}
    kinds = {"int8": "Q8_0", "int4": "Q4_1", "symmetric": "Q4_0"}
    for name, layer in (("attn_output", model.blocks["1"].attention.output), ("ffn_down", model.blocks["1"].mlp.down)):
        found = tensors[f"blk.1.{name}.weight"]
        assert found.tensor_type.name == kinds[kind]
        values = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type))
        close(values, layer.product.codes().weight(), 1e-3)  # scales of fp16
    if kind != "int8":
        assert tensors["token_embd.weight"].tensor_type.name == "Q8_0"


@pytest.mark.full
@pytest.mark.parametrize(
    "flags", ["--quantize int8", INT4, f"{INT4} --quantize-symmetric", "--dtype q4_0", "--dtype q4_1"]
)
@pytest.mark.parametrize("shape", ["gpt2", "llama"])
def test_llama_cpp_computes_with_blocks(shape, flags, models, tmp_path):  # noqa: F811
    """The export compares log-probabilities, with the weights of the file here."""
    need("gguf")
    out = export_to(tmp_path / "out", models[shape], "--format", "gguf", *flags.split())
    agreed = json.loads((out / "export.json").read_text())["agreement"]
    assert agreed["difference"] < agreed["allowed"]


@pytest.mark.parametrize(
    "shape, flags, said",
    [
        ("gpt2", "--quantize int8", "GPT-2's layers in transformers are Conv1D"),
        ("llama", "--format onnx --quantize int4 --quantize-group-size 8", "onnxruntime has no groups of 8 inputs"),
        ("llama", "--format gguf --quantize int4 --quantize-group-size 16", "groups of 16 inputs are no blocks"),
        (
            "llama",
            "--format gguf --quantize int8 --dtype q4_0",
            "--dtype q4_0: the whole numbers of this model are q8_0",
        ),
        ("llama", "--dtype q4_0", "--format hf has no --dtype q4_0"),
    ],
)
def test_what_a_format_does_not_have_is_named(shape, flags, said, models, tmp_path):  # noqa: F811
    with pytest.raises(SettingsError, match=said):
        export_to(tmp_path / "out", models[shape], *flags.split(), "--no-check")
    assert not (tmp_path / "out").exists()


def test_a_quantized_checkpoint_is_exported_with_its_numbers(models, tmp_path):  # noqa: F811
    checkpoint.main(["quantize", str(models["llama"]), str(tmp_path / "int4"), *INT4.split()])
    out = export_to(tmp_path / "out", tmp_path / "int4", "--no-check")
    close(load_exported(str(out)).model.logits(IDS.t()).transpose(0, 1).detach(), ours(tmp_path / "int4"), 1e-6)
    assert "| quantized | int4 |" in (out / "README.md").read_text()


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=pytest.mark.full) for kind in KINDS])
def test_a_program_of_whole_numbers_for_each_of_two_ranks(kind, models, tmp_path, run_ranks):  # noqa: F811
    flags = "--format torch-export --tensor-model-parallel-size 2 --no-check".split()
    out = export_to(tmp_path / "out", models["llama"], *words(kind), *flags)
    logits = lambda rank: load_exported(str(out), mesh=Mesh(rank, tp=2)).model.logits(IDS.t()).detach().numpy()
    for found in run_ranks(2, logits):
        close(torch.from_numpy(found).transpose(0, 1), ours(models["llama"], KINDS[kind]), 1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_part_of_a_whole_layer_is_that_of_a_checkpoint(kind, models, tmp_path):  # noqa: F811
    """A rank's whole numbers, cut from the whole model, are those that it reads of a quantized checkpoint."""
    checkpoint.main(["quantize", str(models["llama"]), str(tmp_path / "rounded"), *words(kind)])
    path = choose(tmp_path / "rounded").paths[0]
    source = ExportSource(path, path, {})
    whole, how = source.quantized("fp32", QuantizeOptions()).model, source.how_quantized(QuantizeOptions())
    for rank in (0, 1):
        mesh = Mesh(rank, tp=2, create_groups=False)
        part = source.rounded_part("fp32", whole, how, mesh)
        built = build_model(source.config, source.vocab_size, device="cpu", precision="fp32", mesh=mesh)
        with Reader(path) as reader:
            stored = reader.state[QUANTIZED]
            pieces, layers = quantized_pieces([built.model], built.pieces, source.facts, stored, mesh.coordinates)
            reader.load(pieces, cast=True)
        found = {one.name: one.weight_operand(None) for one in linear_products([part])}
        assert len(found) == len(layers) == 8
        for name, layer in layers.items():
            for mine, read in zip(found[name], layer.product.weight_operand(None), strict=True):
                assert torch.equal(mine, read), name
        for name, parameter in built.model.named_parameters():
            if name.removesuffix(".weight") not in layers:
                assert torch.equal(parameter, part.get_parameter(name)), name


def test_recorded_collectives_change_their_argument():
    """Layers that round inputs reduce the largest value in place."""

    class Largest(torch.nn.Module):
        def forward(self, x):
            largest = x.abs().amax(0)
            collectives.all_reduce(largest, Mesh(0, tp=2, create_groups=False).tp, "max")
            return largest

    recorded = tracing.record(tracing.Program(Largest(), dict(x=torch.ones(2, 3)), dict(x={}), ("largest",)))
    [output] = recorded.graph.output_node().args[0]
    reduced = [node for node in recorded.graph.nodes if "all_reduce" in str(node.target)]
    sources, todo = set(), [output]
    while todo:
        node = todo.pop()
        sources.add(node)
        todo += node.all_input_nodes
    assert reduced and set(reduced) <= sources


@pytest.mark.parametrize("symmetric", [False, True])
def test_scales_and_zeros_of_groups_are_those_of_compressed_tensors(symmetric):
    """Its zeros are of signed numbers."""
    theirs = pytest.importorskip("compressed_tensors.quantization")
    rows = torch.randn(7, 8, generator=torch.Generator().manual_seed(1))
    rows[0] = rows[0].abs() + 1
    grid = Int4.__new__(Int4)
    grid.symmetric = symmetric
    scale, zero = grid.grid(rows)
    own = theirs.QuantizationArgs(num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=8)
    wanted = theirs.utils.calculate_qparams(rows.amin(1, keepdim=True), rows.amax(1, keepdim=True), own)
    torch.testing.assert_close(scale, wanted[0])
    assert (zero - 8).tolist() == wanted[1].tolist()


def test_numbers_are_packed_as_compressed_tensors_does():
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        values = torch.randint(-(1 << bits - 1), 1 << bits - 1, (5, 37), dtype=torch.int8)
        assert torch.equal(pack(values, bits), helpers.pack_to_int32(values, bits))
        assert torch.equal(unpack(pack(values, bits), bits, 37), values.int())
