# SPDX-License-Identifier: Apache-2.0
"""Load a trained model from a checkpoint of any layout: `loaded = load_model("runs/quickstart/checkpoints")`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from megatron.checkpoint.choose import choose
from megatron.checkpoint.folder import restore
from megatron.checkpoint.lineage import ancestors
from megatron.checkpoint.reader import QUANTIZED, Reader
from megatron.checkpoint.store import Piece
from megatron.data.blend import parse_blend
from megatron.data.formats import datasets_of
from megatron.data.vocabulary import identity_learned, other_ids, refuse_another_identity
from megatron.errors import CheckpointError, SettingsError, numbered
from megatron.inference.batch_invariant import make_invariant, refuse_uncovered
from megatron.inference.expert_ranks import refuse_experts
from megatron.inference.generation_config import ends_beside
from megatron.inference.gptq import quantize_model
from megatron.inference.quantize import free_weights, quantize_layers
from megatron.inference.quantized import quantized_pieces, refuse_twice
from megatron.inference.stages import DecoderStages, Halves, T5Stages, chunks_of, stages_of
from megatron.model.facts import Facts
from megatron.model.quantization import PLAIN, QuantizeOptions
from megatron.model.recipe import config_of, facts_of, recipe_of
from megatron.mpu import collectives
from megatron.mpu.initialize import DTYPES
from megatron.mpu.layers import place_buffers
from megatron.mpu.mesh import Mesh
from megatron.mpu.placement import placed_buffers
from megatron.optimizer.buffers import buffer_pieces, fill_buffers
from megatron.optimizer.ordered_rules import VOCABULARY
from megatron.optimizer.units import flat_memory, flat_units_of, materialise, owned_ranges, pieces_of
from megatron.settings import schema
from megatron.settings.from_checkpoint import FILES, located, refuse_lost
from megatron.settings.general_rules import violations
from megatron.settings.groups.tokenizer import idle_words
from megatron.settings.rank_env import print_notes, print_warnings
from megatron.settings.statements import NONE
from megatron.storage.urls import UrlPath, location


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, with the record of its checkpoint."""

    model: torch.nn.Module
    config: schema.Config  # of the training run
    record: dict[str, Any]  # state.json of the checkpoint
    vocab_size: int  # without padding
    iteration: int
    path: Path
    notices: tuple[str, ...]
    batch_invariant: bool = False  # it computes the bits of training

    @property
    def longest(self) -> int:
        """Tokens of a text that the model can look at: of an import, and of one tuned on shorter texts, the source's; in
        --batch-invariant-mode those of a sample.
        """
        if self.batch_invariant:
            return self.config.model.seq_length
        imported = any(one.imported for one in ancestors(self.record))
        return self.config.model.position_table if imported else self.config.model.context_length

    def window(self, asked: Optional[int], least: int = 1) -> int:
        """Tokens of a window: `asked` (--seq-length), or all that the model can look at.

        Raises SettingsError beyond, and below `least`.
        """
        if asked and not least <= asked <= self.longest:
            most = f"{self.longest} or less" if asked > self.longest else f"{least} or more"
            raise SettingsError(
                f"--seq-length {asked}: the model can look at {self.longest} tokens", do=f"give {most}, or leave it out"
            )
        return asked or self.longest

    @property
    def continues_texts(self) -> bool:
        """Whether the model predicts the next token of a text."""
        others = ("decode", "follows")  # of an encoder-decoder; of a bidirectional model
        return hasattr(self.model, "logits") and not any(hasattr(self.model, name) for name in others)

    @cached_property
    def facts(self) -> Facts:
        """The facts of the model, as it was trained."""
        return facts_of(self.config, self.vocab_size)

    @cached_property
    def tokenizer(self):
        """The tokenizer of the training run."""
        return open_tokenizer(self)

    @cached_property
    def ends(self) -> Optional[tuple[int, ...]]:
        """The tokens that end a text, by the generation_config.json beside the model; None: the end of document."""
        ends = ends_beside(self.path)
        return ends and tuple(end for end in ends if end < self.vocab_size)  # no model writes others

    def generate(self, texts: str | Sequence[str], **settings) -> list[str]:
        """The continuation of each text, or the answer of an encoder-decoder to it.

            loaded.generate(["Once upon a time"], tokens_to_generate=20, top_p=0.9, stop=["\\n"])

        settings: those of `inference.sampling.Sampling` and `Search`, and `samples`, `seeds` and `use_cache` of
        `inference.answers.Asked`; several samples of a text follow each other. Use one process.
        """
        from megatron.inference.answers import answers_to

        return [answer.text for answer in answers_to(self, [texts] if isinstance(texts, str) else texts, **settings)]

    def check_words(self) -> None:
        """See `refuse_head`."""
        refuse_head(self.config, self.vocab_size, self.path)


def without_model(config: schema.Config, record: dict[str, Any], path: Path) -> Loaded:
    """A checkpoint whose model is not built: for its tokenizer."""
    return Loaded(None, config, record, record["vocab_size"], int(record.get("iteration") or 0), path, ())


def refuse_head(config: schema.Config, vocab_size: int, path: Path) -> None:
    """Raise SettingsError if the model of the checkpoint `path` has a task head in place of its output layer."""
    if not getattr(facts_of(config, vocab_size), "word_head", True):
        raise SettingsError(
            f"{path} was fine-tuned with a head for a task, in the place of the output layer: it has no words",
            do="take the model that it was fine-tuned from, or one that was fine-tuned with --pet-pattern; "
            "finetune.py --load ... --skip-train --predictions FOLDER says what this one predicts",
        )


def load_model(
    folder: str,
    *,
    device="cpu",
    precision: Optional[str] = None,
    step: Optional[int] = None,
    mesh: Optional[Mesh] = None,
    halves: Halves = (None, None),
    quantize: QuantizeOptions = PLAIN,
    batch_invariant: bool = False,
) -> Loaded:
    """Load the weights of a checkpoint folder (or of one checkpoint in it), on one device or on those of a mesh.

    precision: fp32, bf16 or fp16; default: that of the training run, but fp32 instead of fp16 on a CPU.
    step: an iteration to load instead of the newest.
    mesh: ranks that all load the model; `tp` divides each matrix, `pp` the layers (default: this process has all of it).
        With several ranks of `pp` the model is an `inference.stages.Stages`, which can only generate and score.
    halves: numbers of `pp` ranks with encoder layers and with decoder layers (default: all have some of both).
    quantize: round the weights of linear layers after loading.
    batch_invariant: compute the bits of training in --batch-invariant-mode (`batch_invariant.py`).
    Raises CheckpointError if there is no valid checkpoint, SettingsError for ranks that cannot share the model, and for a
    format of `quantize` that does not suit it.
    """
    mesh = mesh or Mesh()
    record = _record(location(folder), step)
    refuse_twice(folder, record, quantize)
    config = config_of(located(record))
    asked = precision = precision or config.precision.precision
    if precision == "fp16" and torch.device(device).type == "cpu":
        precision = "fp32"
    how = dict(device=device, precision=precision, mesh=mesh, halves=halves)
    if batch_invariant:
        config = in_the_mode(config, mesh)
        laid_out = replace(config, precision=replace(config.precision, precision=asked))
        refuse_uncovered(replace(laid_out, parallel=parallel_of(mesh, True)), quantize, device, mesh.world_size)
    plan = build_model(config, record["vocab_size"], batch_invariant=batch_invariant, **how)
    everybody = partial(collectives.all_gather_object, axis=mesh.world)  # all load the same one
    pieces, chunks, stored = plan.pieces, chunks_of(plan.model), record.get(QUANTIZED)
    if stored:
        facts = facts_of(config, record["vocab_size"])
        pieces, layers = quantized_pieces(chunks, pieces, facts, stored, mesh.coordinates)
    restored = restore(location(folder), pieces, step=step, cast=True, rank=mesh.rank, all_gather_object=everybody)
    print_notes(restored.notices)
    print_warnings(restored.warnings)
    refuse_broken(pieces, restored.path)
    if stored:
        free_weights(chunks, layers)
    record = restored.state  # not that of `_record` if a damaged checkpoint was passed over, or mended
    found = record["iteration"], restored.path, ()
    if batch_invariant:
        make_invariant(chunks, config)
    whole = Loaded(plan.model.eval(), config, record, record["vocab_size"], *found, batch_invariant)
    return quantized(whole, quantize)


def refuse_broken(pieces: Sequence[Piece], path: object) -> None:
    """Raise CheckpointError for weights that are not finite: scores would be nan, and texts empty.

    A sum shows it in one pass, and only a sum that is not finite is looked at element by element.
    """
    broken = [
        piece.name
        for piece in pieces
        if piece.tensor.is_floating_point()
        and not piece.tensor.is_meta
        and not piece.tensor.sum(dtype=torch.float32).isfinite()
        and not piece.tensor.isfinite().all()
    ]
    if broken:
        more = f" and {len(broken) - 1} more" * (len(broken) > 1)
        raise CheckpointError(
            f"{path}: NaN or infinity in {broken[0]}{more}: the model cannot compute",
            do="damaged? take a checkpoint from before, or get the files again",
        )


def in_the_mode(config: schema.Config, mesh: Mesh) -> schema.Config:
    """Settings of a model whose vocabulary is padded as in --batch-invariant-mode."""
    multiple = VOCABULARY // mesh.tp.size
    return replace(config, model=replace(config.model, make_vocab_size_divisible_by=multiple))


def parallel_of(mesh: Mesh, batch_invariant: bool) -> schema.Parallel:
    """The layout of ranks that share a model."""
    return schema.Parallel(
        tensor_model_parallel_size=mesh.tp.size,
        pipeline_model_parallel_size=mesh.pp.size,
        expert_model_parallel_size=mesh.ep.size,
        expert_tensor_parallel_size=mesh.etp.size,
        batch_invariant_mode=batch_invariant,
    )


def quantized(loaded: Loaded, how: QuantizeOptions) -> Loaded:
    """The model with its linear layers quantized, if a format is given."""
    if not how.quantize:
        return loaded
    if how.quantize_method == "gptq":
        refuse_other_tokens(loaded, how.calibration_data or (), "--calibration-data")
        notice = quantize_model(loaded.model, loaded.facts, how, loaded.longest)
        return replace(loaded, notices=(*loaded.notices, notice))
    quantize_layers(chunks_of(loaded.model), loaded.facts, how)
    return loaded


class Built(NamedTuple):
    """A model whose weights are allocated, and not set; weights: those in the model's format in one tensor, so without
    exact ones; pieces: for `restore`.
    """

    model: torch.nn.Module
    weights: torch.Tensor
    pieces: list


def build_model(
    config: schema.Config,
    vocab_size: int,
    *,
    device,
    precision: str,
    mesh: Mesh,
    halves: Halves = (None, None),
    batch_invariant: bool = False,
) -> Built:
    """The model of some settings, for generation: see `load_model`."""
    dtype, parallel = DTYPES[precision], parallel_of(mesh, batch_invariant)
    plain = replace(config, parallel=parallel, recompute=schema.Recompute(), precision=schema.Precision(precision))
    recipe = recipe_of(config)
    refuse_sizes(plain, mesh, recipe.rules)
    build = partial(recipe.build_model, plain, mesh, vocab_size, dtype=dtype, device="meta")
    facts = recipe.facts(plain, vocab_size)
    refuse_experts(facts.experts, mesh)
    if mesh.pp.size > 1 or halves != (None, None):
        pipeline = stages_of(facts, mesh.pp.size, halves)
        kind = DecoderStages if facts.encoder_layers is None else T5Stages
        model = kind(build, facts, pipeline, mesh)
        chunks = list(model.chunks)
    else:
        model = build()
        chunks = [model]
    return allocated(model, chunks, mesh, dtype=dtype, device=device)


def allocated(model: torch.nn.Module, chunks: list[torch.nn.Module], mesh: Mesh, *, dtype, device) -> Built:
    """Allocate the weights of a model on the meta device, outside of any optimizer. chunks: its parts on this rank."""
    fill_buffers(chunks, mesh.coordinates)
    for chunk in chunks:
        place_buffers(chunk, device)
    axis_of = partial(getattr, mesh)
    units = flat_units_of(chunks, axis_of)
    buffers, flats = flat_memory([(unit, unit.size) for unit in units], dtype=dtype, device=device)
    pieces = []
    for own in owned_ranges(units, axis_of):
        materialise(own.unit, flats[own.unit.name])
        pieces += pieces_of(own, own.part(flats[own.unit.name]), mesh.coordinates)
    for name, buffer in placed_buffers(chunks).items():
        pieces += buffer_pieces(name, buffer, mesh.coordinates)
    return Built(model, buffers[dtype], pieces)


def refuse_sizes(config: schema.Config, mesh: Mesh, rules: tuple) -> None:
    """Raise SettingsError if the tensor parallel size does not fit the model. Batch settings of training are not checked,
    because the ranks differ, nor is the vocabulary, which imported models may lack.
    """
    numbers = schema.TokenizerSettings("NullTokenizer", vocab_size=1)
    config = replace(config, batch=schema.Batch(micro_batch_size=1, train_iters=1), tokenizer=numbers)
    if mesh.tp.size > 1 and (found := violations(config, mesh.world_size, rules)[0]):
        raise SettingsError(found[0] if len(found) == 1 else f"{len(found)} settings cannot work:{numbered(found)}")


def _record(folder: Path | UrlPath, step: Optional[int]) -> dict[str, Any]:
    """The content of state.json in the newest valid checkpoint."""
    with Reader(choose(folder, step=step).paths[0]) as reader:
        record = reader.state
    if "config" not in record or "vocab_size" not in record:
        raise CheckpointError(f"{folder} does not say what model it is", "state.json has no config or vocab_size")
    return record


def tokenizer_settings(loaded: Loaded, given: Mapping[str, Any] = NONE) -> schema.TokenizerSettings:
    """The tokenizer settings of the training run, overridden by `given` (setting -> value, see `given_values`).

    Raises DataError if its files are gone, SettingsError if it had no tokenizer (mock data).
    """
    from megatron.tokenizer import resolved

    settings = loaded.config.tokenizer.overridden(given)
    if not (settings.tokenizer_type or settings.vocab_file or settings.tokenizer_model):
        raise SettingsError(f"{loaded.path} was trained without a tokenizer", do="give one: --vocab-file, --merge-file")
    refuse_lost(loaded.record, "tokenizer", set(given))
    return resolved(settings)


def text_tokenizer(loaded: Loaded, given: Mapping[str, Any] = NONE):
    """The tokenizer of `open_tokenizer`; None for a run whose tokens are numbers, if `given` names no vocabulary."""
    return open_tokenizer(loaded, given) if loaded.config.tokenizer.overridden(given).of_texts else None


def refuse_other_tokens(loaded: Loaded, words: Sequence[str], flag: str) -> None:
    """Raise DataError for token files with another vocabulary than the model has learned. Needs no files of it.

    words: prefixes or folders, and weights between them, of `flag`
    """
    if words and (learned := identity_learned(loaded.record)):
        prefixes = [prefix for word in parse_blend(words, flag).prefixes for prefix in datasets_of(word)]
        refuse_another_identity(prefixes, learned)


def open_tokenizer(loaded: Loaded, given: Mapping[str, Any] = NONE):
    """Build the tokenizer of `tokenizer_settings`, for the model: see `check_vocabulary`. Prints notes."""
    from megatron.tokenizer import build_tokenizer

    settings = tokenizer_settings(loaded, given)
    print_notes(idle_words(settings, given))
    log = lambda note: print_notes([note])
    return check_vocabulary(build_tokenizer(settings, log), loaded, settings, given, log)


def check_vocabulary(
    tokenizer,
    loaded: Loaded,
    settings: schema.TokenizerSettings,
    given: Mapping[str, Any] = NONE,
    log=lambda text: None,
):
    """The tokenizer for a model: `tokenizer.rows.within` its rows. given: the user's of its settings

    Raises SettingsError for another vocabulary than the model's, because all scores would be wrong.
    """
    from megatron.tokenizer.embedding_rows import has_learned, is_own, within

    learned = loaded.record.get("vocabulary")
    if has_learned(loaded.record, tokenizer) is False:
        raise SettingsError(
            f"this is not the vocabulary that {loaded.path} has learned: the same numbers mean other words",
            f"its files: {learned[:8]}; {tokenizer.name} now: {tokenizer.fingerprint[:8]} (fingerprints)",
            "give the files of the training run: --vocab-file, --merge-file, or --tokenizer-model",
        )
    own = is_own(loaded.record, tokenizer, settings.vocab_extra_ids, any(map(given.get, ("tokenizer_type", *FILES))))
    if tokenizer.vocab_size > loaded.vocab_size and not own:
        raise SettingsError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {loaded.vocab_size}",
            do="give the tokenizer that the model was trained with",
        )
    asked = given.get("vocab_size")
    if asked and tokenizer.name != "NullTokenizer" and asked not in (tokenizer.vocab_size, loaded.vocab_size):
        raise SettingsError(
            f"--vocab-size {asked}: the vocabulary has {tokenizer.vocab_size} tokens, the model {loaded.vocab_size}",
            do="leave it out",
        )
    for note in other_ids(tokenizer, str(loaded.path), learned):
        log(note)
    return within(tokenizer, loaded.vocab_size)
