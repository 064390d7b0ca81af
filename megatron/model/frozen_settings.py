# SPDX-License-Identifier: Apache-2.0
"""The settings of a frozen second model in a run (`training/frozen_model.py`), from its checkpoint. Needs no torch:
plans read them.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Optional

from megatron.errors import CheckpointError, SettingsError
from megatron.model.facts import PROJECTIONS
from megatron.model.recipe import config_of, recipe_of
from megatron.settings import schema
from megatron.settings.from_checkpoint import located, saved_record
from megatron.storage.durable import Damaged

TRAINED = f"{PROJECTIONS}.*"  # a pattern of --train-only


def frozen_record(flag: str, folder: str) -> dict[str, Any]:
    """state.json of the newest checkpoint in a folder, or of one checkpoint. Raises CheckpointError that names the flag."""
    try:
        record = saved_record(folder)[1]
    except (Damaged, OSError) as error:
        raise CheckpointError(f"{flag}: {error}", do="give a folder of checkpoints, or one of them") from None
    if "vocab_size" not in record:
        raise CheckpointError(f"{flag} {folder} does not say what model it is", "state.json has no vocab_size")
    return record


def frozen_settings(
    flag: str,
    folder: str,
    record: Mapping[str, Any],
    run: schema.Config,
    vocab_size: Optional[int] = None,
    vocabulary: Optional[str] = None,
) -> schema.Config:
    """The model's own shape, with the layout of the run, without stages, and its number formats and lengths of samples.

    record: of `frozen_record`; vocab_size, vocabulary: of the run, None: not known
    Raises SettingsError if the model cannot read the run's micro-batches, or predicts other tokens.
    """
    frozen, p = config_of(located(record)), run.parallel
    _check(f"{flag} {folder}", frozen, record, run, vocab_size, vocabulary)
    parallel = schema.Parallel(
        tensor_model_parallel_size=p.tensor_model_parallel_size,
        sequence_parallel=p.sequence_parallel,
        context_parallel_size=p.context_parallel_size,
        cp_comm_type=p.cp_comm_type if len(p.cp_comm_types) == 1 else None,
        hierarchical_context_parallel_sizes=p.hierarchical_context_parallel_sizes,
    )
    model = replace(
        frozen.model,
        seq_length=run.model.seq_length,
        max_position_embeddings=frozen.model.position_table,
        make_vocab_size_divisible_by=run.model.make_vocab_size_divisible_by,  # equal parts of both vocabularies
    )
    own = dict(recompute=schema.Recompute(), precision=run.precision, kernels=run.kernels)
    return replace(frozen, model=model, parallel=parallel, distillation=schema.Distillation(), **own)


def layer_pairs(run: schema.Config, teacher: schema.Config) -> dict[int, int]:
    """Layer of the student -> layer of its teacher, of --kd-hidden-layers. Raises SettingsError.

    teacher: of `frozen_settings`
    """
    text, student, layers = run.distillation.kd_hidden_layers, run.model.num_layers, teacher.model.num_layers
    if text is None:
        return {}
    flag = f"--kd-hidden-layers {text}"
    if recipe_of(run).arrays is not None:
        raise SettingsError(f"{flag}: --model-type {run.model.model_type} has no such loss", do="leave it out")
    if text == "even":
        return {
            n: (n + 1) * layers // student - 1 if layers >= student else n * layers // student for n in range(student)
        }
    try:
        given = [(int(a), int(b)) for a, b in (pair.split(":") for pair in text.replace(",", " ").split())]
    except ValueError:
        raise SettingsError(f"{flag}: give pairs of layers, student:teacher, as in 0:1,1:3, or even") from None
    pairs = dict(given)
    if len(pairs) < len(given):
        raise SettingsError(f"{flag}: a layer of the student learns from one layer of the teacher", do="name it once")
    for name, number, count in [("student", a, student) for a in pairs] + [
        ("teacher", b, layers) for b in pairs.values()
    ]:
        if not 0 <= number < count:
            raise SettingsError(f"{flag}: the {name} has layers 0 to {count - 1}, and no layer {number}")
    return pairs


def with_projections(run: schema.Config) -> schema.Config:
    """The settings with --kd-hidden-projections: of layers that are compared with wider or narrower ones of the teacher.

    With --train-only, as of adapters, projections are trained, too. Raises errors about the teacher.
    """
    settings, given = run.distillation, run.model.kd_hidden_projections
    found, flag = None, "--kd-hidden-layers"
    if settings.teacher_load and settings.kd_hidden_layers:
        where = "--teacher-load", settings.teacher_load
        teacher = frozen_settings(*where, frozen_record(*where), run)
        size = teacher.model.hidden_size
        pairs = layer_pairs(run, teacher) if size != run.model.hidden_size else ()
        found = ",".join(f"{layer}:{size}" for layer in sorted(pairs)) or None
    if found == given:
        return run
    if run.given("kd_hidden_projections") and given is not None:
        raise SettingsError(f"--kd-hidden-projections {given}: the teacher needs {found or 'none'}", do="leave it out")
    more, only = {}, run.optimizer.train_only
    if found and only and TRAINED not in only:
        more = dict(train_only=[*only, TRAINED])
    return run.derive(flag, kd_hidden_projections=found, **more)


def _check(
    where: str,
    frozen: schema.Config,
    record: Mapping[str, Any],
    run: schema.Config,
    vocab_size: Optional[int],
    vocabulary: Optional[str],
) -> None:
    rows, theirs = record["vocab_size"], record.get("vocabulary")
    own, other = recipe_of(run), recipe_of(frozen)
    if not getattr(other.facts(frozen, rows), "word_head", True):
        raise SettingsError(f"{where}: the model has a head for a task, and predicts no tokens")
    if own.arrays != other.arrays:
        raise SettingsError(
            f"{where}: the model is a {frozen.model.model_type}, and this run trains a {run.model.model_type}",
            "the two read different samples",
            "give a model of the same type",
        )
    if vocab_size not in (None, rows):
        raise SettingsError(
            f"{where}: the model has a vocabulary of {rows}, this run one of {vocab_size}",
            "both models predict the same tokens",
            "give a model with this run's vocabulary",
        )
    if None not in (vocabulary, theirs) and vocabulary != theirs:
        raise SettingsError(
            f"{where}: the model has learned another vocabulary than this run's: the same numbers mean other words",
            f"its files: {theirs[:8]}; this run's: {vocabulary[:8]} (fingerprints)",
            "give a model with this run's vocabulary",
        )
    longest = frozen.model.position_table
    if frozen.model.position_embedding_type == "learned_absolute" and longest < run.model.seq_length:
        raise SettingsError(
            f"{where}: the model has {longest} positions, and samples have {run.model.seq_length} tokens",
            do=f"give --seq-length {longest} at most, or a model for longer sequences",
        )
