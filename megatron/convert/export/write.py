# SPDX-License-Identifier: Apache-2.0
"""Export a checkpoint of any layout as a folder for other programs: weights or a program, the tokenizer's files, a model
card, and `export.json` with what it is. The folder appears when it is complete and its client agrees with this suite.
"""

import contextlib
import copy
import importlib.util
import io
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Optional

import torch

from megatron.checkpoint.choose import newest
from megatron.checkpoint.reader import QUANTIZED, Reader
from megatron.convert import compressed_tensors, huggingface
from megatron.convert.export import gguf_file, gguf_vocabulary, llama_cpp, onnx_quantized, programs
from megatron.convert.export.card import model_card
from megatron.convert.export.source import ROUNDED_INPUTS, ExportSource, Wanted
from megatron.convert.export.tracing import program_of
from megatron.convert.hf_tokenizer import ExportedTokenizer
from megatron.convert.merged import for_export
from megatron.data.vocabulary import learned_vocabulary
from megatron.errors import CheckpointError, MissingPackage, SettingsError
from megatron.inference import generation_config
from megatron.inference.agreement import Agreement
from megatron.inference.quantized import refuse_twice
from megatron.model.bert.facts import BertFacts
from megatron.model.facts import Facts
from megatron.model.recipe import kind_of
from megatron.model.t5.facts import T5Facts
from megatron.mpu.initialize import DTYPES
from megatron.mpu.mesh import Mesh
from megatron.settings.from_checkpoint import FILES
from megatron.storage.new_folder import check_free, new_folder
from megatron.storage.urls import UrlPath, location
from megatron.tokenizer import build_tokenizer
from megatron.tokenizer.base import PROBES, Tokenizer
from megatron.tokenizer.embedding_rows import RowsTokenizer

RECORD = "export.json"
# Formats of weights that a file format has; the first one replaces what a run was trained in and the format lacks.
WEIGHTS = {
    "hf": ("fp32", "bf16", "fp16"),
    "gguf": ("fp32", "bf16", "fp16", "q8_0", "q4_0", "q4_1"),
    "onnx": ("fp32", "fp16"),
    "torch-export": ("fp32", "bf16", "fp16"),
}
MOST = 20  # special tokens whose ids are compared
OPTIMIZED = "onnxruntime's graph optimizations change logits on this machine (ORT_DISABLE_ALL leaves them)"
DEQUANTIZE = "CompressedTensorsConfig(dequantize=True)"
CLIENTS = {"hf": "transformers", "gguf": "llama.cpp", "onnx": "onnxruntime", "torch-export": "torch"}


def export(load: str, out: Path, wanted: Wanted, *, step: Optional[int] = None, given: Mapping[str, Any]) -> list[str]:
    """Export a checkpoint; returns notices for the user. given: tokenizer flags.

    Raises SettingsError for a model or a setting that the format does not have, CheckpointError if its client gives other
    results. Nothing is written then.
    """
    path = newest(location(load), step)
    if not isinstance(path, UrlPath) and out.resolve() in (path.resolve(), path.resolve().parent):
        raise SettingsError(f"{out} is where the checkpoint is", do="give another folder")
    check_free(out)
    with for_export(path, out, f"--format {wanted.form}") as merged:
        return _export(ExportSource(merged, path, given), out, wanted)


def _export(source: "ExportSource", out: Path, wanted: Wanted) -> list[str]:
    refuse_twice(source.path, source.record, wanted.quantize)
    wanted, notices = _complete(source, wanted)
    with new_folder(out) as folder:
        write = {"hf": _write_hf, "gguf": _write_gguf}.get(wanted.form, _write_programs)
        files, tokenizer, agreed, more = write(source, folder, out, wanted)
        if wanted.generation:
            generation_config.recommend(folder, wanted.generation)
            more = [*more, f"{generation_config.NAME} recommends {', '.join(wanted.generation)}"]
        record = dict(
            format=wanted.form,
            kind=wanted.kind,
            dtype=wanted.dtype,
            ranks=wanted.tp,
            files=files,
            iteration=source.iteration,
            vocab_size=source.vocab_size,
            longest=source.longest,
            end=tokenizer.end,
            **_vocabulary(source, tokenizer),
            agreement=None if agreed is None else dict(agreed._asdict(), allowed=agreed.allowed),
            config=_settings_of_model(source, tokenizer),
        )
        (folder / RECORD).write_text(json.dumps(record, indent=1))
        (folder / "README.md").write_text(_card(source, out, wanted, files, tokenizer, agreed), encoding="utf-8")
    compared = [] if agreed is None else [f"checked: {agreed.sentence}"]
    unchecked = [] if wanted.check else [f"{CLIENTS[wanted.form]} was not asked (--no-check)"]
    kind = f"{kind_of(source.facts)} of iteration {source.iteration}"
    return [f"{out}: {kind} in {', '.join(files)} ({source.format_of(wanted)})", *compared, *unchecked, *more, *notices]


def _complete(source: ExportSource, wanted: Wanted) -> tuple[Wanted, list[str]]:
    """The request with its dtype. Raises SettingsError for what the format does not have. Returns notices, too."""
    form, notices, known = wanted.form, [], WEIGHTS[wanted.form]
    if form not in ("hf", "gguf") and getattr(source.config.model, "mixture", False):
        raise SettingsError(
            f"--format {form}: a model with experts is not recorded as a program",
            "the sizes of its products depend on the tokens",
            "--format hf",
        )
    dtype = wanted.dtype or source.config.precision.precision
    if form == "gguf" and (products := source.products(replace(wanted, dtype="fp32"))):
        blocks = gguf_file.format_for(next(iter(products.values())))
        if wanted.dtype not in (None, blocks, *DTYPES):
            raise SettingsError(
                f"--dtype {wanted.dtype}: the whole numbers of this model are {blocks}", do="leave it out"
            )
        dtype = wanted.dtype or blocks
    if dtype not in known:
        if wanted.dtype is not None:
            raise SettingsError(f"--format {form} has no --dtype {dtype}", do=f"--dtype {', '.join(known)}")
        notices.append(f"trained in {dtype}, and --format {form} has none: {known[0]}")
        dtype = known[0]
    if wanted.kind == "generation":
        if form in ("hf", "gguf"):
            notices.append(f"--kind generation has no effect: the weights of --format {form} are for both kinds")
        elif isinstance(source.facts, (T5Facts, BertFacts)) or not hasattr(source.facts.settings, "query_groups"):
            raise SettingsError(
                f"--kind generation is of GPTs, and {source.path} holds a {source.config.model.model_type}",
                do="--kind lm",
            )
        elif not source.facts.caches_heads:
            raise SettingsError(
                "--kind generation: a program's cache has keys and values of each head, and layers of this model cache "
                "something else",
                do="--kind lm",
            )
    if wanted.tp > 1:
        notices += _refuse_ranks(source, wanted)
    return replace(wanted, dtype=dtype), notices


def _refuse_ranks(source: ExportSource, wanted: Wanted) -> list[str]:
    """Raise SettingsError for ranks that cannot share the model or the format; returns notices."""
    for what, size in source.facts.divisible_by_tp().items():
        if size % wanted.tp:
            raise SettingsError(f"{size} ({what}) cannot be divided by --tensor-model-parallel-size {wanted.tp}")
    ranks = f"--tensor-model-parallel-size {wanted.tp}"
    if wanted.form == "hf":
        return [f"{ranks}: these files are whole, and each of {wanted.tp} ranks reads its part of them"]
    if wanted.form != "torch-export":
        raise SettingsError(
            f"{ranks}: a file of --format {wanted.form} has the whole model",
            do="leave it out, or --format torch-export: a program for each rank",
        )
    return []


# ---- each format: (files, tokenizer, agreement or None, notices) ------------------------------------------------------

Written = tuple[list[str], ExportedTokenizer, Optional[Agreement], list[str]]


def _write_hf(source: ExportSource, folder: Path, out: Path, wanted: Wanted) -> Written:
    transformers = huggingface._transformers() if wanted.check else None
    products = source.products(wanted)
    if products and wanted.check:
        _require_compressed_tensors()
    with Reader(source.path) as reader:
        _, files, tokenizer = huggingface.write_hf(
            reader, folder, DTYPES[wanted.dtype], source.given, source.trained, products=products
        )
    more = [*source.family.notices, *tokenizer.notices]
    agreed = None
    if wanted.check:
        outputs = lambda model: source.family.ours(model, source.prompts())
        theirs = _of_transformers(source, transformers, folder, products)
        agreed = source.compared(source.compared_as(wanted), wanted, theirs, outputs, client=CLIENTS["hf"])
        if tokenizer.by_transformers:
            more.append(huggingface.compare_ids(folder, tokenizer.own.whole))
    if any(map(compressed_tensors.has_zeros, products.values())):
        more.append(
            f"transformers loads it with quantization_config={DEQUANTIZE} (--quantize-symmetric needs no such word)"
        )
    return files, tokenizer, agreed, more


def _of_transformers(source: ExportSource, transformers, folder: Path, products) -> torch.Tensor:
    """What transformers computes with the folder."""
    if not products:
        return source.family.run(transformers, folder, source.prompts()).float()
    zeros = any(map(compressed_tensors.has_zeros, products.values()))
    more = dict(quantization_config=transformers.CompressedTensorsConfig(dequantize=True)) if zeros else {}
    with contextlib.redirect_stderr(io.StringIO()):  # bars of progress
        return source.family.run(transformers, folder, source.prompts(), **more).float()


def _require_compressed_tensors() -> None:
    """Raise SettingsError where the package is not installed."""
    if importlib.util.find_spec("compressed_tensors") is None:
        raise MissingPackage(
            "transformers needs the package compressed-tensors for quantized weights",
            do="pip install compressed-tensors, or --no-check to export without the comparison",
        )


def _write_gguf(source: ExportSource, folder: Path, out: Path, wanted: Wanted) -> Written:
    gguf_file.library()
    gguf_file.refuse_kind(source.facts)
    if source.config.model.linear is not None and not source.trained_to_round:
        raise SettingsError(
            f"{source.path} was trained with --linear {source.config.model.linear}, which llama.cpp does not have",
            "its layers would multiply with other weights there",
            "--format onnx or torch-export records what its layers compute",
        )
    gguf_file.refuse_other(source.family)
    if wanted.check:
        llama_cpp.require()
    tokenizer, path = source.write_tokenizer(folder), folder / "model.gguf"
    more = [*tokenizer.notices, *gguf_vocabulary.unexpressed(folder)]
    if tokenizer.there is None:
        raise SettingsError(
            "--format gguf: llama.cpp's programs need a vocabulary that it knows", more[-1], "--format hf needs none"
        )
    products = source.products(wanted)
    if any(map(compressed_tensors.rounds_inputs, products.values())):
        more.append("llama.cpp rounds the inputs of layers in its own way: the file has the weights alone")
    with Reader(source.path) as reader:
        huggingface.refuse_unknown(reader, source.family, products)
        gguf_file.write(path, reader, source.family, wanted.dtype, tokenizer, source.name, products)
    if isinstance(tokenizer.own, RowsTokenizer):
        more.append(f"{tokenizer.own.named}: tokens without a row in the embedding, which {path.name} does not have")
    agreed = _ask_llama_cpp(source, path, wanted, tokenizer.own) if wanted.check else None
    return [path.name], tokenizer, agreed, more


@torch.no_grad()
def _ask_llama_cpp(source: ExportSource, path: Path, wanted: Wanted, tokenizer: Tokenizer) -> Agreement:
    """Compare log-probabilities of the likeliest tokens after prompts of several lengths, and ids of texts."""
    prompts = source.prompts()
    lengths = sorted({1, 2, 5, len(prompts) // 2, len(prompts) - 1} - {0})
    places = [(length, row) for row in range(prompts.shape[1]) for length in lengths if length < len(prompts)]
    texts = _texts_for_llama_cpp(tokenizer, path.parent)
    found, ids = llama_cpp.asked(
        path,
        context=min(source.longest, 256),
        plain=_plain_token(tokenizer),
        threads=torch.get_num_threads(),
        prompts=[prompts[:length, row].tolist() for length, row in places],
        count=min(20, source.vocab_size),
        texts=texts,
    )
    _refuse_other_ids(texts, ids, tokenizer, path.parent)
    at = [(length - 1, row, token) for (length, row), likeliest in zip(places, found) for token, _ in likeliest]
    theirs = torch.tensor([value for likeliest in found for _, value in likeliest])
    outputs = lambda model: model.logits(prompts).log_softmax(-1)[tuple(map(list, zip(*at)))]  # of [s, b, v]
    form = "gguf" if source.facts.settings.swiglu else "gguf with GeLU"
    return source.compared(form, wanted, theirs, outputs, client=CLIENTS["gguf"], what="log-probabilities")


def _plain_token(tokenizer: Tokenizer) -> int:
    """A token whose text is ASCII."""
    texts = ((n, tokenizer.decode([n])) for n in range(tokenizer.vocab_size))
    return next((n for n, text in texts if text.isascii() and text.isalnum()), 0)


def _write_programs(source: ExportSource, folder: Path, out: Path, wanted: Wanted) -> Written:
    form = wanted.form
    if form == "onnx":
        programs.require_onnx()
        if wanted.check:
            programs.onnxruntime()
    names = []
    for rank, mesh in _ranks(wanted.tp):
        model = _model_of_program(source, wanted, mesh)
        if not hasattr(model, "logits"):
            raise SettingsError(
                f"{source.path} holds a model of type {source.config.model.model_type}, which has no method logits",
                do="give its module one (docs/extending.md)",
            )
        names.append(programs.file_name(form, rank, wanted.tp))
        programs.write(form, program_of(model, source.facts, wanted.kind, source.longest), folder / names[-1])
    tokenizer = source.write_tokenizer(folder)
    agreed, optimized = _ask_program(source, folder, wanted) if wanted.check else (None, [])
    return names, tokenizer, agreed, [*tokenizer.notices, *optimized]


def _model_of_program(source: ExportSource, wanted: Wanted, mesh: Mesh) -> torch.nn.Module:
    """The model of one rank, in the format that the program computes in."""
    if not source.rounds(wanted):
        return source.model(wanted.dtype, mesh, computes_in=wanted.dtype)
    whole = source.quantized(wanted.dtype, wanted.quantize).model
    if wanted.tp > 1:
        model = source.rounded_part(wanted.dtype, whole, source.how_quantized(wanted.quantize), mesh)
    else:
        model = copy.deepcopy(whole)
    model = model.to(DTYPES[wanted.dtype])
    model.dtype = DTYPES[wanted.dtype]
    if wanted.form == "onnx":
        onnx_quantized.attach(model)
    return model


def _ranks(tp: int) -> Iterator[tuple[int, Mesh]]:
    """The ranks that share a model, none of which is started."""
    return ((rank, Mesh(rank, tp=tp, create_groups=False)) for rank in range(tp))


@torch.no_grad()
def _ask_program(source: ExportSource, folder: Path, wanted: Wanted) -> tuple[Agreement, list[str]]:
    """Compare logits of the program with the model's; with several ranks, on so many processes. Returns notices, too.

    Where onnxruntime rounds inputs, it runs the program as it is: its optimizations have kernels that compute in fewer bits
    on some CPUs.
    """
    prompts = source.prompts()
    ends = [cut.stop - 1 for cut in _cuts(len(prompts))] if wanted.kind == "generation" else slice(None)
    outputs = lambda model: _own_answer(model, source.facts, prompts)[ends]
    form, row, name = wanted.form, source.compared_as(wanted), CLIENTS[wanted.form]
    if wanted.tp == 1:
        path, exact = folder / programs.file_name(form), form == "onnx" and row.endswith(ROUNDED_INPUTS)
        answer = lambda **how: answer_of(programs.opened(form, path, **how), source, wanted, prompts)
        theirs = answer(optimize=not exact)
        agreed = source.compared(row, wanted, theirs, outputs, client=name)
        more = (answer() - theirs).abs().max().item() if exact else 0.0
        return agreed, [f"{OPTIMIZED}: {more:.2e} of {agreed.largest:.3g}"] if more > agreed.allowed else []

    from megatron.mpu.forked import run_ranks

    def of_rank(rank: int):
        mesh = Mesh(rank, tp=wanted.tp)
        run = programs.opened(form, folder / programs.file_name(form, rank, wanted.tp), tp=mesh.tp)
        return answer_of(run, source, wanted, prompts).numpy()

    theirs = torch.stack([torch.from_numpy(x) for x in run_ranks(wanted.tp, of_rank, timeout=600)])
    of_ranks = lambda model: outputs(model).expand_as(theirs)
    return source.compared(row, wanted, theirs, of_ranks, client=f"{name} on {wanted.tp} ranks"), []


def _own_answer(model: torch.nn.Module, facts: Facts, prompts: torch.Tensor) -> torch.Tensor:
    """What `answer_of` has of a program, from a model."""
    if isinstance(facts, T5Facts):
        cut = 2 * len(prompts) // 3
        return model.logits(prompts[:cut], prompts[cut:])
    if not isinstance(facts, BertFacts):
        return model.logits(prompts)
    types = _types(prompts.t()).t()
    words = model.logits(prompts, types=types)
    if not facts.own.bert_binary_head:
        return words
    return torch.cat((words.transpose(0, 1).flatten(), model.follows(prompts, types=types).flatten()))


def _types(ids: torch.Tensor) -> torch.Tensor:
    """Token types [b, s]: the second half is another sentence."""
    return (torch.arange(ids.shape[1]) >= ids.shape[1] // 2).long().expand_as(ids).contiguous()


def answer_of(run: programs.Run, source: ExportSource, wanted: Wanted, prompts: torch.Tensor) -> torch.Tensor:
    """A program's outputs for prompts [s, b], in one tensor."""
    ids = prompts.t().contiguous()
    if isinstance(source.facts, T5Facts):
        cut = 2 * ids.shape[1] // 3
        [logits] = run(input_ids=ids[:, :cut].contiguous(), decoder_input_ids=ids[:, cut:].contiguous())
        return logits.float().transpose(0, 1)
    if isinstance(source.facts, BertFacts):
        types = _types(ids)
        words, *second = run(input_ids=ids, token_type_ids=types)
        words = words.float()
        return torch.cat((words.flatten(), second[0].float().flatten())) if second else words.transpose(0, 1)
    if wanted.kind == "lm":
        return run(input_ids=ids)[0].float().transpose(0, 1)
    past, scores = empty_past(source.facts, len(ids), wanted.dtype, wanted.tp), []
    for cut in _cuts(ids.shape[1]):
        logits, *past = run(input_ids=ids[:, cut].contiguous(), past_keys=past[0], past_values=past[1])
        scores.append(logits.float())
    return torch.stack(scores)


def _cuts(length: int) -> list[slice]:
    """How a comparison passes tokens to a program with a cache: one, several, then one at a time."""
    return [slice(0, 1), slice(1, min(4, length)), *(slice(n, n + 1) for n in range(4, length))]


def empty_past(facts: Facts, batch: int, dtype: str, tp: int) -> list[torch.Tensor]:
    """The cache of a program for generation, before the first token."""
    model = facts.settings
    shape = (model.num_layers, batch, 0, model.query_groups // tp, model.head_dim)
    return [torch.zeros(shape, dtype=DTYPES[dtype]), torch.zeros(shape, dtype=DTYPES[dtype])]


def _texts_for_llama_cpp(tokenizer: Tokenizer, folder: Path) -> list[tuple[str, bool]]:
    """(text, whether as a prompt) to compare ids of. llama.cpp's SentencePiece has a space after special tokens, which no
    comparison shows.
    """
    known = [name for name, id in tokenizer.special_tokens.items() if id < tokenizer.vocab_size]
    names = [] if gguf_vocabulary.is_of_pieces(folder) else known[:MOST]
    plain = [
        text for text in (*huggingface.PROBES, *PROBES) if not any(name in text for name in tokenizer.special_tokens)
    ]
    plain = [text for text in plain if "\0" not in text and gguf_vocabulary.is_expressed(folder, text)]
    named = [text for name in names for text in (f"a{name}b", f"{name} a {name}{name}")]
    return [*((text, False) for text in plain), *((text, True) for text in (*plain, *named))]


def _refuse_other_ids(texts: list[tuple[str, bool]], found: list[list[int]], own: Tokenizer, folder: Path) -> None:
    """Raise CheckpointError if llama.cpp gives other ids than the run's tokenizer."""
    for (text, prompt), theirs in zip(texts, found, strict=True):
        ours = (own.encode_prompt if prompt else own.encode)(text)
        if theirs != ours:
            place = next(
                (n for n, pair in enumerate(zip(theirs, ours)) if pair[0] != pair[1]), min(len(theirs), len(ours))
            )
            raise CheckpointError(
                f"the exported tokenizer gives other ids for the {'prompt' if prompt else 'text'} {text!r}",
                "\n  ".join(
                    [
                        f"id {place}: llama.cpp has {theirs[place : place + 4]}, here are {ours[place : place + 4]}",
                        *gguf_vocabulary.unexpressed(folder),
                    ]
                ),
                "nothing was written; --no-check writes the file, and --format hf keeps the tokenizer",
            )


# ---- what all formats have -------------------------------------------------------------------------------------------


def _vocabulary(source: ExportSource, tokenizer: ExportedTokenizer) -> dict[str, Any]:
    """The entries of the record on the vocabulary: of the files in the folder, else those of the run."""
    if tokenizer.there is None:
        return {name: source.record.get(name) for name in ("vocabulary", "tokenizer")}
    return learned_vocabulary(build_tokenizer(tokenizer.there))


def _settings_of_model(source: ExportSource, tokenizer: ExportedTokenizer) -> dict[str, Any]:
    """The settings that describe the model, without those of its training and paths of this machine."""
    config, recorded = asdict(source.config), source.record["config"]
    words = {
        name: value for name, value in asdict(tokenizer.there or source.config.tokenizer).items() if name not in FILES
    }
    own = {name: recorded[name] for name in ("extra",) if name in recorded}
    return dict(model=config["model"], tokenizer=words, precision=dict(precision="fp32"), **own)


def _card(
    source: ExportSource,
    out: Path,
    wanted: Wanted,
    files: list[str],
    tokenizer: ExportedTokenizer,
    agreed: Optional[Agreement],
) -> str:
    task = "translation" if isinstance(source.facts, T5Facts) else "text-generation"
    task = "fill-mask" if isinstance(source.facts, BertFacts) else task
    quantized = (source.record.get(QUANTIZED) or {}).get("quantize") or wanted.quantize.quantize
    how = [
        ("format", wanted.form + (f", {wanted.kind}" if wanted.form in ("onnx", "torch-export") else "")),
        ("files", ", ".join(f"`{name}`" for name in files)),
        ("weights", str(wanted.dtype)),
        *([("quantized", quantized)] if quantized else []),
        *([("ranks", str(wanted.tp))] if wanted.tp > 1 else []),
        ("checked", agreed.sentence if agreed else "no (--no-check)"),
        ("Python, torch", f"{sys.version.split()[0]}, {torch.__version__}"),
    ]
    name, words = out.resolve().name, tokenizer.own and tokenizer.own.name
    use, tags = _use(source, wanted, name), [task, "megatron"]
    return model_card(source.name, source.record, source.facts, source.trained, how, use, tags, words)


def _use(source: ExportSource, wanted: Wanted, name: str) -> str:
    """A few lines that run the export."""
    here = f"python -m megatron.tools.generate --load-exported {name} --prompt ..."
    if wanted.tp > 1:
        here = here.replace("python ", f"python -m megatron.tools.launch --nproc-per-node {wanted.tp} ", 1)
        here += f" --tensor-model-parallel-size {wanted.tp}"
    if isinstance(source.facts, BertFacts):
        kind = "AutoModelForMaskedLM"
    else:
        kind = "AutoModelForSeq2SeqLM" if isinstance(source.facts, T5Facts) else "AutoModelForCausalLM"
    return {
        "hf": f"from transformers import {kind}, AutoTokenizer\n\n"
        f'model, tokenizer = {kind}.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")',
        "gguf": f'llama-cli -m {name}/model.gguf -p "..."',
        "onnx": f'import onnxruntime\n\nsession = onnxruntime.InferenceSession("{name}/model.onnx")\n'
        "print([(x.name, x.shape) for x in session.get_inputs()])",
        "torch-export": here
        if wanted.tp > 1
        else f'import torch\n\nprogram = torch.export.load("{name}/model.pt2")\nprint(program.graph_signature)',
    }[wanted.form]
