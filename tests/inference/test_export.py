# SPDX-License-Identifier: Apache-2.0
"""tools.export: four other programs compute the same as this suite, or nothing is written; and --load-exported."""

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.folder import Saver
from megatron.checkpoint.lineage import lineage
from megatron.checkpoint.store import Piece, share
from megatron.convert.export import gguf_file, programs, tracing
from megatron.convert.export.card import data_sets
from megatron.convert.export.llama_cpp import LlamaCpp
from megatron.convert.export.load_exported import load_exported
from megatron.convert.families import prompts_for
from megatron.convert.hf_files import about
from megatron.errors import CheckpointError, SettingsError, UsageError
from megatron.inference.agreement import LIMITS, agreement
from megatron.inference.answers import Asked, answered
from megatron.inference.generation import generate
from megatron.inference.load import load_model, open_tokenizer
from megatron.inference.sampling import GREEDY, Sampling, Search
from megatron.model.recipe import recipe_of
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placements
from megatron.settings import schema
from megatron.tools import checkpoint as checkpoint_tool
from megatron.tools import evaluate, export
from megatron.tools import generate as tool

pytestmark = pytest.mark.sampled(10)

S = 32
GPT2 = dict(num_layers=2, hidden_size=32, num_attention_heads=4, seq_length=S, max_position_embeddings=S)
LLAMA = dict(
    GPT2,
    position_embedding_type="rope",
    normalization="RMSNorm",
    swiglu=True,
    disable_bias_linear=True,
    untie_embeddings_and_output_weights=True,
    num_query_groups=2,
    group_query_attention=True,
    ffn_hidden_size=64,
    kv_channels=16,
    rotary_base=5e4,
    norm_epsilon=1e-6,
)
SHAPES = dict(gpt2=GPT2, llama=LLAMA)
PROGRAM = "--format torch-export --kind generation"
NEEDS = {
    "hf": ["transformers"],
    "gguf": ["gguf", "xllamacpp"],
    "onnx": ["onnxscript", "onnxruntime"],
    "torch-export": [],
}


@pytest.fixture(scope="session")
def trained(tmp_path_factory, vocabulary):
    """`trained(model, **groups)`: a folder of checkpoints of a model whose weights all matter, written by three ranks."""
    files = dict(vocab_file=str(vocabulary / "vocab.json"), merge_file=str(vocabulary / "merges.txt"))
    count = len(json.loads((vocabulary / "vocab.json").read_text(encoding="utf-8")))

    def make(model: dict, vocab_size=count, tokenizer="GPT2BPETokenizer", state=None, **groups) -> Path:
        record = dict(model=model, **groups)
        record |= dict(tokenizer=dict(tokenizer_type=tokenizer, **files)) if tokenizer else {}
        config = schema.from_record(record)
        if model.get("model_type", "GPT") != "GPT":
            from megatron.model.recipe import config_of

            config = config_of(record)
        built = recipe_of(config).build_model(config, Mesh(), vocab_size, dtype=torch.float32, device="meta")
        generator, pieces = torch.Generator().manual_seed(0), []
        for name, (_, placed) in placements(built).items():
            x = torch.randn(placed.shape, generator=generator) * 0.3
            pieces.append(Piece(name, placed.shape, Box.whole(placed.shape), x))
        folder = tmp_path_factory.mktemp("trained")
        with Saver(folder) as saver:
            content = dict(config=asdict(config), vocab_size=vocab_size, **(state or {}))
            saver.write(7, [share(pieces, n, 3) for n in range(3)], content)
        return folder

    return make


@pytest.fixture(scope="session")
def models(trained):
    return {name: trained(model) for name, model in SHAPES.items()}


@pytest.fixture(scope="session")
def exported_to(models, tmp_path_factory):
    """`exported_to(shape, words)`: a folder with this export, which is made once."""
    made = {}

    def folder(shape: str, words: str) -> Path:
        need(words.split()[1])
        if (shape, words) not in made:
            out = tmp_path_factory.mktemp("exports") / "out"
            made[shape, words] = export_to(out, models[shape], *words.split())
        return made[shape, words]

    return folder


def export_to(out: Path, load: Path, *words: str) -> Path:
    export.main(["--load", str(load), "--output", str(out), *words])
    return out


def need(form: str) -> None:
    for package in NEEDS[form]:
        pytest.importorskip(package, reason=f"--format {form} is tested where {package} is installed")


# ---- clients ---------------------------------------------------------------------------------------------------------


def by_client(form: str, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Scores [b, s, v] of a format's own library, which knows nothing of this suite."""
    if form == "hf":
        import transformers

        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(ids).logits.detach()
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
        return torch.from_numpy(session.run(None, dict(input_ids=ids.numpy()))[0])
    return torch.export.load(folder / "model.pt2").module()(input_ids=ids).detach()


def full(*case):
    return pytest.param(*case, marks=pytest.mark.full)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "shape, form",
    [
        ("gpt2", "hf"),
        full("llama", "hf"),
        ("llama", "onnx"),
        full("gpt2", "onnx"),
        ("llama", "torch-export"),
        full("gpt2", "torch-export"),
    ],
)
def test_clients_compute_the_same(models, exported_to, shape, form):
    """For batches and lengths other than those that the export compared, too."""
    folder = exported_to(shape, f"--format {form}")
    model = load_model(models[shape]).model
    for b, s in ((1, 1), (2, S), (5, 7)):
        ids = torch.randint(100, (b, s), generator=torch.Generator().manual_seed(s))
        with torch.no_grad():
            ours = model.logits(ids.t()).transpose(0, 1)
        np.testing.assert_allclose(by_client(form, folder, ids), ours, atol=2e-5 * ours.abs().max().item(), rtol=0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("shape", SHAPES)
def test_llama_cpp_writes_the_same_text(models, exported_to, shape):
    """Greedy, token for token, and from a text, so with the exported vocabulary."""
    folder = exported_to(shape, "--format gguf")
    client, loaded = LlamaCpp(folder / "model.gguf", S), load_model(models[shape])
    tokenizer = open_tokenizer(loaded)
    prompt = client.encode("the dog sat on the ")
    assert prompt == list(tokenizer.encode("the dog sat on the "))
    asked = dict(prompt=prompt, n_predict=12, temperature=0.0, n_probs=1, ignore_eos=True)
    answer = client.server.handle_completions(asked)["choices"][0]["logprobs"]["content"]
    [ours] = generate(loaded.model, [prompt], Sampling(12, greedy=True), longest=S)
    assert [one["id"] for one in answer] == ours


TWO_BASES = dict(full_attention=dict(rope_type="linear", rope_theta=5e4, factor=4.0))
TWO_BASES |= dict(sliding_attention=dict(rope_type="default", rope_theta=300.0))
FAMILIES = {  # of llama.cpp; the windows are shorter than the compared prompts
    "llama": dict(attention_bias=True, mlp_bias=True),
    "llama, as in 3.1": dict(
        rope_parameters=dict(
            rope_type="llama3",
            rope_theta=1e4,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        )
    ),
    "llama, yarn": dict(
        rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=16)
    ),
    "llama, linear": dict(rope_parameters=dict(rope_type="linear", rope_theta=1e4, factor=4.0)),
    "mistral": dict(sliding_window=64),
    "qwen2": dict(tie_word_embeddings=True),
    "qwen3": dict(head_dim=16),
    "phi3": dict(sliding_window=None),
    "olmo2": {},
    "gemma": dict(num_key_value_heads=1),
    "gemma2": dict(sliding_window=6, query_pre_attn_scalar=16),
    "gemma3_text": dict(
        sliding_window=6,
        sliding_window_pattern=6,
        query_pre_attn_scalar=16,
        rope_parameters=TWO_BASES,
        num_hidden_layers=6,
    ),
}


@pytest.mark.sampled(10)
@pytest.mark.parametrize("case", FAMILIES)
def test_families_of_hugging_face_in_llama_cpp(tmp_path, vocabulary, case, capsys):
    for form in ("hf", "gguf"):
        need(form)
    import transformers

    from megatron.tools import checkpoint

    count = len(json.loads((vocabulary / "vocab.json").read_text(encoding="utf-8")))
    heads = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    common = dict(
        vocab_size=count, hidden_size=64, intermediate_size=48, num_hidden_layers=2, max_position_embeddings=64
    )
    kind = case.split(",")[0]
    config = transformers.AutoConfig.for_model(kind, **heads | common | FAMILIES[case], pad_token_id=None)
    theirs, generator = transformers.AutoModelForCausalLM.from_config(config), torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in theirs.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * noise if parameter.dim() > 1 else parameter + 0.2 * noise)
    theirs.save_pretrained(tmp_path / "theirs")
    checkpoint.main(["from-hf", str(tmp_path / "theirs"), str(tmp_path / "ours"), "--unchecked"])
    files = ["--vocab-file", str(vocabulary / "vocab.json"), "--merge-file", str(vocabulary / "merges.txt")]
    files += ["--tokenizer-type", "GPT2BPETokenizer"]
    export_to(tmp_path / "out", tmp_path / "ours", "--format", "gguf", *files)
    assert "log-probabilities of llama.cpp differ by at most" in capsys.readouterr().out


def test_what_llama_cpp_cannot_use_is_not_written(tmp_path, models, monkeypatch):
    """It ends its own process, not this one."""
    need("gguf")
    import gguf

    monkeypatch.setattr(gguf.GGUFWriter, "add_head_count", lambda self, count: None)
    with pytest.raises(CheckpointError, match="llama.cpp cannot use the exported file: its process ended with"):
        export_to(tmp_path / "out", models["gpt2"], "--format", "gguf")
    assert nothing_in(tmp_path)


@pytest.mark.sampled(10)
def test_adapters_are_merged(tmp_path):
    """Of LoRA, into a program of the whole model."""
    import pretrain_gpt

    shape = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --mock-data --vocab-size 100"
    shape += " --device cpu --micro-batch-size 4 --eval-iters 0 --lr 3e-2"
    pretrain_gpt.main(f"{shape} --train-iters 1 --save {tmp_path / 'base'}".split())
    more = f"--lora-rank 4 --lora-alpha 64 --train-iters 4 --finetune --load {tmp_path / 'base'}"
    pretrain_gpt.main(f"{shape} {more} --save {tmp_path / 'adapted'}".split())
    folder = export_to(tmp_path / "out", tmp_path / "adapted", "--format", "torch-export")
    ids = torch.arange(10).unsqueeze(1)
    with torch.no_grad():
        base, adapted, found = (
            loaded.model.logits(ids)
            for loaded in (*(load_model(tmp_path / name) for name in ("base", "adapted")), load_exported(str(folder)))
        )
    assert (adapted - base).abs().max() > 0.01
    np.testing.assert_allclose(found, adapted, atol=1e-5, rtol=0)
    card = (folder / "README.md").read_text()
    assert "| started from | `base` |" in card and 'base_model: "base"\n' in card
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapted", "base", "out"]


def test_a_model_without_a_vocabulary_has_no_gguf(tmp_path, trained):
    need("gguf")
    with pytest.raises(SettingsError, match="llama.cpp's programs need a vocabulary that it knows"):
        export_to(tmp_path / "out", trained(GPT2, tokenizer=None, vocab_size=90), "--format", "gguf")
    assert nothing_in(tmp_path)


def test_a_program_with_a_cache(models, exported_to):
    """--kind generation: tokens in any portions give the scores of the whole."""
    folder = exported_to("llama", PROGRAM)
    program, model = torch.export.load(folder / "model.pt2").module(), load_model(models["llama"]).model
    ids = torch.randint(100, (3, 9), generator=torch.Generator().manual_seed(1))
    past = (torch.zeros(2, 3, 0, 2, 16), torch.zeros(2, 3, 0, 2, 16))
    with torch.no_grad():
        ours = model.logits(ids.t())
        for first, stop in ((0, 4), (4, 5), (5, 9)):
            logits, *past = program(input_ids=ids[:, first:stop], past_keys=past[0], past_values=past[1])
            np.testing.assert_allclose(logits, ours[stop - 1], atol=1e-4, rtol=0)
    assert past[0].shape == (2, 3, 9, 2, 16)


def test_a_program_moves_to_another_device(exported_to):
    """All of it, with the constants that it was recorded with."""
    run = programs.opened("torch-export", exported_to("llama", PROGRAM) / "model.pt2", "meta")
    inputs = dict(input_ids=torch.zeros(1, 3, dtype=torch.int64), past_keys=torch.zeros(2, 1, 0, 2, 16))
    found = run(**inputs, past_values=inputs["past_keys"])
    assert [(x.device.type, list(x.shape)) for x in found][1:] == [("meta", [2, 1, 3, 2, 16])] * 2


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "form, dtype", [key if key[0] == "gguf" else full(*key) for key in LIMITS if key[1] not in ("any", "fp32")]
)
def test_narrow_weights_stay_within_their_limits(tmp_path, models, form, dtype, capsys):
    need(form)
    folder = export_to(tmp_path / "out", models["llama"], "--format", form, "--dtype", dtype)
    record = json.loads((folder / "export.json").read_text())["agreement"]
    if form != "gguf":
        said_as_it_is(folder, models["llama"], form)
    assert 0 < record["difference"] < record["allowed"] / 2 and record["rounding"] > 2e-5 * record["largest"]
    assert f"of {record['client']} differ by at most {record['total']:.2e}" in capsys.readouterr().out


def said_as_it_is(folder: Path, load: Path, form: str) -> dict:
    """What an export says of its difference, which is that of its file from the checkpoint's model."""
    loaded, said = load_model(load, precision="fp32"), json.loads((folder / "export.json").read_text())["agreement"]
    ids = prompts_for(loaded.facts)
    with torch.no_grad():
        ours = loaded.model.logits(ids).transpose(0, 1)
    total = (by_client(form, folder, ids.t()).float() - ours).abs().max().item()
    assert said["total"] == pytest.approx(total, rel=1e-3)
    return said


@pytest.mark.sampled(10)
def test_the_difference_said_is_that_of_the_file(tmp_path, models, capsys):
    """And not that of a model with rounded weights, which is left after the share of rounding."""
    said = said_as_it_is(export_to(tmp_path / "out", models["llama"], "--dtype", "bf16"), models["llama"], "hf")
    assert said["difference"] < 1e-3 * said["rounding"]
    told = f"from the checkpoint's; the largest change by rounding to bf16 is {said['rounding']:.2e}, "
    assert told in capsys.readouterr().out


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind, form", [full("T5", "onnx"), ("T5", "torch-export"), ("BERT", "onnx"), ("T5", "hf")])
def test_encoder_decoders_and_encoders(tmp_path, trained, kind, form, capsys):
    need(form)
    plain = dict(position_embedding_type="relative", normalization="RMSNorm", disable_bias_linear=True)
    own, extra = (plain, {"encoder-decoder": dict(unscaled_attention=True)}) if kind == "T5" else ({}, {})
    load = trained(dict(GPT2, model_type=kind, **own), tokenizer=None, vocab_size=150, extra=extra)
    export_to(tmp_path / "out", load, "--format", form)
    assert "differ by at most" in capsys.readouterr().out
    with pytest.raises(SettingsError, match=f"--format gguf: a {kind} is not exported for llama.cpp"):
        need("gguf")
        export_to(tmp_path / "gguf", load, "--format", "gguf")
    if form != "hf":
        with pytest.raises(SettingsError, match=f"a program of a {kind}, and those of GPTs are run here"):
            load_exported(str(tmp_path / "out"))


PARALLEL = """
import pretrain_gpt
from megatron.model.branches import Branch
from megatron.model.gpt.facts import GPTFacts
from megatron.model.kinds.table import KINDS

class ParallelFacts(GPTFacts):
    def branches(self, layer):
        return (Branch("attention", (KINDS["attention"], KINDS["mlp"]), before="attention_norm"),)

def recipe():
    return pretrain_gpt.variant("parallel_gpt", facts=ParallelFacts)
"""
SAME = """
import pretrain_gpt

def recipe():
    return pretrain_gpt.variant("same_gpt", sums={"lm loss": 2.0})
"""


@pytest.mark.sampled(5)
@pytest.mark.parametrize("shape", [GPT2, LLAMA])
@pytest.mark.parametrize(
    "kind", ["parallel_gpt", "tests.models.gpt_variant", "tests.models.own_head", "tests.models.alibi"]
)
def test_models_of_a_user_are_no_models_of_others(tmp_path, trained, shape, kind, monkeypatch):
    """Whatever the names of their tensors are; nobody compares here. onnx and torch-export record what they compute."""
    need("gguf")
    (tmp_path / "parallel_gpt.py").write_text(PARALLEL)
    monkeypatch.syspath_prepend(tmp_path)
    if kind == "tests.models.alibi":
        shape = dict(shape, position_embedding_type="none")
    load, out = trained(dict(shape, model_type=kind)), tmp_path / "out"
    for command in (
        lambda: checkpoint_tool.main(["to-hf", str(load), str(out), "--unchecked"]),
        lambda: export_to(out, load, "--format", "hf", "--no-check"),
        lambda: export_to(out, load, "--format", "gguf", "--no-check"),
    ):
        with pytest.raises(SettingsError, match=f"^model type {kind}: other libraries have no such model") as refused:
            command()
        assert "--format onnx or torch-export" in refused.value.do and not out.exists()
    if kind != "tests.models.alibi":  # its biases are for one length
        assert (export_to(out, load, "--format", "torch-export") / "model.pt2").exists()


def test_a_recipe_that_trains_a_gpt_in_its_own_way_is_exported(tmp_path, trained, monkeypatch, capsys):
    need("hf")
    (tmp_path / "same_gpt.py").write_text(SAME)
    monkeypatch.syspath_prepend(tmp_path)
    for kind in ("same_gpt", "tests.models.own_collate"):
        checkpoint_tool.main(["to-hf", str(trained(dict(LLAMA, model_type=kind))), str(tmp_path / kind)])
        assert "both models agree" in (said := capsys.readouterr().out) or "checked: " in said


# ---- the gate --------------------------------------------------------------------------------------------------------


def nothing_in(folder: Path) -> bool:
    return not list(folder.iterdir())


def test_a_file_that_computes_something_else_is_not_written(tmp_path, models, monkeypatch):
    need("gguf")
    plain = gguf_file.ARCHITECTURES["llama"]._replace(fix=lambda name, x, config: x)  # rotates other channels
    monkeypatch.setitem(gguf_file.ARCHITECTURES, "llama", plain)
    with pytest.raises(
        CheckpointError, match=r"computes something else: log-probabilities of llama.cpp differ by"
    ) as no:
        export_to(tmp_path / "out", models["llama"], "--format", "gguf")
    assert "the limit is 2e-05 of the largest value" in str(no.value) and nothing_in(tmp_path)


def test_a_program_that_computes_something_else_is_not_written(tmp_path, models, monkeypatch):
    right = tracing._attention
    monkeypatch.setattr(tracing, "_attention", lambda *args, causal, **more: right(*args, causal=False, **more))
    with pytest.raises(CheckpointError, match="logits of torch differ by at most .* \\(allowed"):
        export_to(tmp_path / "out", models["gpt2"], "--format", "torch-export")
    assert nothing_in(tmp_path)


def test_a_vocabulary_that_gives_other_ids_is_not_written(tmp_path, models, monkeypatch):
    need("gguf")
    import gguf

    right = gguf.GGUFWriter.add_token_merges
    monkeypatch.setattr(gguf.GGUFWriter, "add_token_merges", lambda self, merges: right(self, merges[:5]))
    with pytest.raises(CheckpointError, match="the exported tokenizer gives other ids for"):
        export_to(tmp_path / "out", models["gpt2"], "--format", "gguf")
    assert nothing_in(tmp_path)


def test_outputs_of_another_shape_or_without_values_do_not_agree():
    x = torch.ones(3)
    assert agreement("onnx", "fp32", "it", x, x + 1e-6).difference < 2e-6
    for other in (torch.ones(4), torch.full((3,), float("nan")), x + 1e-3):
        with pytest.raises(CheckpointError, match="computes something else"):
            agreement("onnx", "fp32", "it", x, other)
    for ours in (float("nan"), float("inf")):  # the weights overflow, and a share of infinity would allow anything
        with pytest.raises(CheckpointError, match="computes something else"):
            agreement("onnx", "fp32", "it", torch.tensor([1.0, ours, 1.0]), x)


@pytest.mark.parametrize("form, package", [("gguf", "xllamacpp"), ("gguf", "gguf"), ("onnx", "onnxruntime")])
def test_a_client_that_is_not_installed(tmp_path, models, monkeypatch, form, package):
    need(form)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SettingsError, match="pip install") as no:
        export_to(tmp_path / "out", models["gpt2"], "--format", form)
    assert package in str(no.value) and nothing_in(tmp_path)
    if package == "xllamacpp":
        assert "--no-check" in str(no.value)
        export_to(tmp_path / "out", models["gpt2"], "--format", form, "--no-check")
        assert json.loads((tmp_path / "out" / "export.json").read_text())["agreement"] is None
        assert "no (--no-check)" in (tmp_path / "out" / "README.md").read_text()


def test_nothing_is_overwritten(tmp_path, models):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    with pytest.raises(SettingsError, match="is there already") as no:
        export_to(tmp_path / "out", models["gpt2"])
    assert no.value.code == 3 and (tmp_path / "out" / "mine").read_text() == "kept"


@pytest.mark.parametrize(
    "words, said",
    [
        ("--dtype q8_0", "--format hf has no --dtype q8_0"),
        ("--format onnx --dtype bf16", "--format onnx has no --dtype bf16"),
        ("--format gguf --tensor-model-parallel-size 2", "a file of --format gguf has the whole model"),
        ("--format onnx --tp 2", "a file of --format onnx has the whole model"),
        ("--format torch-export --tp 3", r"4 \(heads\) cannot be divided by --tp 3"),
        ("--tp 0", "--tp 0: has to be at least 1"),
        ("--ckpt-step 9", "9"),
    ],
)
def test_what_a_format_does_not_have_is_refused(tmp_path, models, words, said):
    with pytest.raises((SettingsError, CheckpointError), match=said):
        export_to(tmp_path / "out", models["gpt2"], *words.split())
    assert nothing_in(tmp_path)


@pytest.mark.parametrize(
    "own, said",
    [
        (dict(bias_gelu_fusion=False), "llama.cpp computes gpt2 without activation gelu"),
        (dict(squared_relu=True), "llama.cpp computes gpt2 without activation relu2"),
        (dict(position_embedding_type="rope"), "Hugging Face has no model of this shape"),
    ],
)
def test_models_that_llama_cpp_computes_differently_are_refused(tmp_path, trained, own, said):
    need("gguf")
    with pytest.raises(SettingsError, match=said):
        export_to(tmp_path / "out", trained(dict(GPT2, **own)), "--format", "gguf", "--no-check")
    assert nothing_in(tmp_path)


# ---- --load-exported -------------------------------------------------------------------------------------------------

DRAWN, PROMPTS = Sampling(8, top_k=20, sampling_seed=3), ["the dog", "a cat and the", "hat"]


def texts(loaded, sampling=DRAWN, search=GREEDY) -> list[list[int]]:
    """Tokens, as tools.generate has them."""
    found = answered(loaded, open_tokenizer(loaded), Asked(PROMPTS, sampling, search))
    return [answer.tokens for answer in found.answers]


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "shape, words",
    [
        ("llama", "--format hf"),
        ("gpt2", "--format hf"),
        ("gpt2", "--format onnx"),
        ("llama", "--format onnx --kind generation"),
        ("gpt2", "--format torch-export"),
        ("llama", PROGRAM),
    ],
)
def test_an_export_writes_the_checkpoints_texts(models, exported_to, shape, words):
    folder = exported_to(shape, words)
    loaded, whole = load_exported(str(folder)), load_model(models[shape])
    assert texts(loaded) == texts(whole)
    greedy = Sampling(6, greedy=True)
    assert texts(loaded, greedy, Search(num_beams=3)) == texts(whole, greedy, Search(num_beams=3))
    assert (loaded.iteration, loaded.longest) == (7, S)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("kind", ["generation", full("lm")])
def test_a_program_for_each_of_two_ranks(tmp_path, models, kind, run_ranks):
    words = f"--format torch-export --tensor-model-parallel-size 2 --kind {kind}".split()
    folder, whole = export_to(tmp_path / "out", models["llama"], *words), texts(load_model(models["llama"]))
    assert len(list(folder.glob("model-rank-*-of-2.pt2"))) == 2
    found = run_ranks(2, lambda rank: texts(load_exported(str(folder), mesh=Mesh(rank, tp=2))))
    assert found == [whole, whole]
    with pytest.raises(SettingsError, match="a program for tensor 2 x pipeline 1 ranks; here are 1 x 1"):
        load_exported(str(folder))


@pytest.mark.sampled(10)
@pytest.mark.parametrize("sizes", [dict(tp=2), dict(pp=2)])
def test_weights_of_hugging_face_on_ranks(models, exported_to, sizes, run_ranks):
    """Each rank reads its part of the same files."""
    folder, ids = exported_to("llama", "--format hf --tp 2"), torch.arange(10).unsqueeze(1)
    with torch.no_grad():
        whole = load_model(models["llama"]).model.logits(ids)

    def of_rank(rank: int):
        with torch.no_grad():
            return load_exported(str(folder), mesh=Mesh(rank, **sizes)).model.logits(ids)

    found = [x for x in run_ranks(2, of_rank) if x is not None]
    assert found
    for x in found:
        np.testing.assert_allclose(x, whole, atol=1e-4, rtol=0)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("words", ["--format hf", "--format torch-export"])
def test_evaluation_of_an_export(tmp_path, models, exported_to, words, capsys):
    from megatron.data.indexed import write_index

    prefix, tokens = tmp_path / "held_out", np.random.RandomState(0).randint(0, 100, 90).astype(np.uint16)
    (tmp_path / "held_out.bin").write_bytes(tokens.tobytes())
    write_index(f"{prefix}.idx", np.dtype("uint16"), np.array([len(tokens)], np.int32), np.arange(2))
    folder, found = exported_to("llama", words), []
    capsys.readouterr()
    for flag, place in (("--load", models["llama"]), ("--load-exported", folder), ("--load", folder)):
        evaluate.main([flag, str(place), "--data-path", str(prefix), "--device", "cpu"])
        found += [line for line in capsys.readouterr().out.splitlines() if "validation results" in line]
    assert len(found) == 3 and found[1:] == found[:-1]


def test_a_program_of_the_next_token_is_not_evaluated(exported_to):
    folder = exported_to("llama", PROGRAM)
    with pytest.raises(SettingsError, match="scores of the next token only") as no:
        load_exported(str(folder)).model.logits(torch.zeros(4, 1, dtype=torch.int64))
    assert "--kind lm" in str(no.value)


@pytest.mark.parametrize("main", [tool.main, evaluate.main])
@pytest.mark.parametrize(
    "words, kind, said",
    [
        ("", UsageError, "missing: --load"),
        ("--load a --load-exported b", UsageError, "--load a and --load-exported b: one of them is the model"),
        ("--load-exported b --ckpt-step 3", UsageError, "--ckpt-step 3: an export has one step"),
        ("--load-exported nowhere", CheckpointError, "--load-exported nowhere holds no export"),
    ],
)
def test_which_model(main, words, kind, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.bin").touch()
    with pytest.raises(kind, match=said):
        main([*words.split(), *(["--prompt", "x"] if main is tool.main else ["--data-path", "t"])])


@pytest.mark.parametrize(
    "change, said",
    [
        (dict(format="tensorrt"), "format: 'tensorrt'"),
        (dict(ranks="2"), "ranks: '2'"),
        (dict(config=None), "config: None"),
        (dict(dtype="int3"), "dtype: 'int3'"),
    ],
)
def test_a_record_that_is_damaged(tmp_path, change, said):
    good = dict(format="onnx", kind="lm", dtype="fp32", ranks=1, vocab_size=9, iteration=1, files=[], config={})
    (tmp_path / "export.json").write_text(json.dumps(good | change))
    with pytest.raises(CheckpointError, match="export.json is not what tools.export writes") as no:
        load_exported(str(tmp_path))
    assert said in str(no.value)


@pytest.mark.sampled(10)
def test_files_of_a_program_that_are_damaged(tmp_path, exported_to):
    shutil.copytree(exported_to("llama", PROGRAM), tmp_path / "out")
    (tmp_path / "out" / "model.pt2").write_bytes(b"PK" + bytes(99))
    with pytest.raises(CheckpointError, match="torch.export cannot load"):
        load_exported(str(tmp_path / "out"))
    (tmp_path / "out" / "model.pt2").unlink()
    with pytest.raises(CheckpointError, match="has no model.pt2"):
        load_exported(str(tmp_path / "out"))


def test_a_gguf_file_is_run_by_llama_cpp(tmp_path):
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SettingsError, match="a GGUF file is run by llama.cpp, not here"):
        load_exported(str(tmp_path))


@pytest.mark.sampled(10)
def test_paddlenlps_export_and_end(tmp_path, models, monkeypatch, capsys):
    """Its flag exports, and its command for the result generates."""
    monkeypatch.chdir(tmp_path)
    tool.main(["--load", str(models["gpt2"]), "--save_inference_model_then_exist", "true"])
    assert json.loads(Path("inference_model_pp1mp1/export.json").read_text())["kind"] == "generation"
    capsys.readouterr()
    tool.main(["--load", "inference_model_pp1mp1", "--prompt", "the dog", "--greedy", "--max_dec_len", "5"])
    exported = capsys.readouterr().out
    tool.main(["--load", str(models["gpt2"]), "--prompt", "the dog", "--greedy", "--max_dec_len", "5"])
    assert exported == capsys.readouterr().out
    Path("inference_model_pp1mp1/mine.txt").write_text("kept")
    again = ["--load", str(models["llama"]), "--save_inference_model_then_exist", "true"]
    tool.main(again)  # a second time, and of another model
    assert "replaces an earlier export (--output names another folder); mine.txt are in" in capsys.readouterr().err
    assert json.loads(Path("inference_model_pp1mp1/export.json").read_text())["config"]["model"]["swiglu"]
    assert Path("inference_model_pp1mp1.old/mine.txt").read_text() == "kept"
    tool.main([*again, "--output", "named"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("inference_model_pp1mp1", "inference_model_pp1mp1.old", "named")
    ]


def test_what_a_program_does_not_have_is_named(tmp_path, monkeypatch, capsys):
    """--chat, prompts and sampling are of texts; what is exported is the same without them."""
    wanted = []
    monkeypatch.setattr(export, "main", wanted.append)
    line = f"--load x --save_inference_model_then_exist true --ckpt-step 3 --output {tmp_path / 'out'}"
    tool.main(line.split())
    assert not capsys.readouterr().err
    tool.main([*line.split(), "--chat", "--prompt", "Who is it?", "--top-p", "0.9", "--quantize", "int8"])
    [note] = capsys.readouterr().err.splitlines()
    for words in ("--chat", "--prompt", "--top-p 0.9", "--quantize int8"):
        assert words in note, words
    assert "--ckpt-step" not in note and "have no effect with --save-inference-model-then-exist" in note
    assert wanted[0] == wanted[1]


def test_an_earlier_export_comes_back_after_an_error(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "export.json").touch()
    with pytest.raises(ValueError), tool.earlier_export_aside(tmp_path / "out"):
        raise ValueError
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "export.json"]


# ---- what else is in the folder --------------------------------------------------------------------------------------


def test_the_model_card(tmp_path, trained, vocabulary):
    """Data, steps and evaluation come from the run's records; those after the exported step are not in it."""
    load = trained(
        GPT2,
        data=dict(data_path=["data/own_text_document"], split="90,10,0"),
        batch=dict(micro_batch_size=2, train_iters=9, global_batch_size=4),
        state=dict(state=dict(iteration=7, consumed_samples=28)),
    )
    lines = [dict(kind="run", iteration=0, config={})]
    lines += [{"kind": "step", "iteration": n, "lm loss": 9.5 - n, "consumed_samples": 4 * n} for n in (6, 7, 8)]
    evals = ((5, 3.5), (7, 3.25), (9, 1.0))
    lines += [{"kind": "eval", "split": "validation", "iteration": n, "lm loss": loss} for n, loss in evals]
    (load / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (load / "evaluation.jsonl").write_text(
        "".join(json.dumps(dict(iteration=n, data="wiki.test", perplexity=20.0 + n)) + "\n" for n in (5, 7))
    )
    need("hf")
    card = (export_to(tmp_path / "mine", load) / "README.md").read_text()
    for words in (
        f"# {load.name}",
        "| data | `own_text_document` |",
        'datasets:\n- "own_text_document"\n',
        "| split | 90,10,0 |",
        "| steps | 7 |",
        "| samples | 28, 896 tokens |",
        "| last training loss | 2.5000 at step 7 |",
        "| validation lm loss | 3.2500, perplexity 25.79 at step 7 |",
        "| wiki.test, perplexity | 27 |",
        "| checked | logits of transformers differ by at most",
    ):
        assert words in card, words
    assert "data/own" not in card + (tmp_path / "mine" / "export.json").read_text()  # paths of this machine


def test_the_card_of_a_tuned_import_names_its_model_and_its_data(tmp_path, trained):
    """The imported model by its name on the hub, as the cache there has it; the run between; files of conversations."""
    hub = tmp_path / "models--org--Llama-9" / "snapshots" / "abc"
    hub.mkdir(parents=True)
    (hub / "README.md").write_text("---\nlanguage: en\nlicense: llama9\n---\n# Llama 9\n")
    imported = dict(origin=f"Hugging Face llama in {hub}", source=about(hub, {}), state=dict(iteration=0))
    between = dict(lineage(imported, str(tmp_path / "imported")), state=dict(iteration=5))
    state = dict(lineage(between, str(tmp_path / "more" / "checkpoints")), state=dict(iteration=7))
    state = dict(lineage(state, None), state=dict(iteration=7))  # resumed
    data = dict(train_data_path=["0.3", "a/talks", "0.7", "b/web"])
    load = trained(dict(GPT2, max_position_embeddings=2 * S), state=state, data=data)  # tuned on shorter samples
    card = (export_to(tmp_path / "out", load, "--format", "torch-export", "--no-check") / "README.md").read_text()
    head = 'license: llama9\nbase_model: "org/Llama-9"\ndatasets:\n- "talks"\n- "web"\n'
    assert card.startswith(f"---\n{head}") and "| started from | `more` < `org/Llama-9` |" in card
    assert f"| positions | learned_absolute, context of {2 * S} tokens |" in card
    assert "| data | `0.3 talks 0.7 web` |" in card and "states llama9" in card and str(tmp_path) not in card


def test_an_export_has_the_name_of_its_model_and_no_padding_among_its_tokens(tmp_path, trained):
    """In the card and as general.name: of an import, or of the run; not of the folder of the export."""
    need("gguf")
    import gguf

    named = dict(
        source=dict(name="org/Llama-9", license=None), origin="Hugging Face llama in x", state=dict(iteration=0)
    )
    for state, name in ((named, "Llama-9"), (dict(state=dict(iteration=7, consumed_samples=28)), None)):
        load = trained(GPT2, state=state)
        out = export_to(tmp_path / load.name / "gguf", load, "--format", "gguf", "--no-check")
        found = gguf.GGUFReader(out / "model.gguf").fields["general.name"].contents()
        assert found == (name or load.name) and f"\n# {found}\n" in (out / "README.md").read_text()
    tuned = trained(dict(GPT2, model_type="megatron.tasks.chat"), state=state, extra=dict(chat=dict(task="chat")))
    card = (export_to(tmp_path / "out", tuned, "--format", "torch-export", "--no-check") / "README.md").read_text()
    assert "| samples | 28 of at most 32 tokens |" in card


def test_the_data_of_tasks_has_names():
    task = dict(task="glue/SST2.yaml", task_data="/data/sst", train_data=["/data/more.tsv"])
    assert data_sets(dict(extra=dict(task=task))) == ["SST2", "more.tsv"]
    mixed = dict(task_mixture=["mlm=2:/data/wiki_text_sentence", "sst=1:/data/train.tsv", "own=1"])
    assert data_sets(dict(data=dict(data_path=["x/own"]), extra=dict(masked=mixed))) == [
        *("own", "wiki_text_sentence", "train.tsv")
    ]


def test_files_of_the_tokenizer(models, exported_to):
    from tokenizers import Tokenizer

    folder = exported_to("gpt2", "--format hf")
    read, own = Tokenizer.from_file(str(folder / "tokenizer.json")), open_tokenizer(load_model(models["gpt2"]))
    for text in ("the dog sat", " a hat<|endoftext|>", "  x\n"):
        assert read.encode(text).ids == list(own.encode(text)) or "<|" in text
    assert read.token_to_id("<|endoftext|>") == own.eod
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == own.eod
    assert (folder / "tokenizer.json").exists() and (folder / "config.json").exists()
