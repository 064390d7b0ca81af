# SPDX-License-Identifier: Apache-2.0
"""Find all problems of a command before it is started, for --dry-run and --preflight."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Optional

from megatron.checkpoint.first_launch import may_begin
from megatron.errors import CheckpointError, DataError, Failure, SettingsError, numbered
from megatron.guard.changes import refuse_another_run
from megatron.model.recipe import facts_of
from megatron.pipeline import stages
from megatron.planner import memory, target
from megatron.planner.cluster import Cluster
from megatron.planner.layout import Job, Layout
from megatron.settings import batch, schema
from megatron.settings.declare import dashed
from megatron.settings.from_checkpoint import saved_record
from megatron.settings.rules import tokenizer_type
from megatron.storage.durable import Damaged
from megatron.storage.urls import UrlPath, location
from megatron.telemetry.figures import part_of, size
from megatron.telemetry.metrics import metrics_path
from megatron.telemetry.notify import event_problem
from megatron.telemetry.trackers import missing_tracker
from megatron.training import rules


@dataclass(frozen=True)
class Inspection:
    """The problems of a command, and its job and layout.

    settings:  invalid settings; files: named files that are missing or damaged
    memory:    the reason why the job does not fit into the device
    resolved:  the settings with derived values; None, like job and layout, if the settings do not describe a layout
    """

    settings: list[str]
    files: list[str]
    memory: list[str]
    resolved: Optional[schema.Config] = None
    job: Optional[Job] = None
    layout: Optional[Layout] = None
    remark: str = ""

    @property
    def problems(self) -> list[str]:
        return self.settings + self.files + self.memory


def inspect(config: schema.Config, cluster: Cluster) -> Inspection:
    """Check settings, files and memory; collects all problems instead of stopping at the first."""
    violations = rules.check(config, cluster.world_size)
    if _shapeless(config, cluster.world_size):
        return Inspection(violations, file_problems(config), [])
    resolved = rules.filled(config, cluster.world_size)
    try:
        layout = Layout.of(resolved, cluster.world_size)
        job, remark = target.job_of(resolved, cluster, layout.dp)
    except SettingsError as error:  # of a schedule file, or of a vocabulary
        words = str(error) if error.why or not error.do else f"{error.what}; {error.do}"
        # From --lora-target
        follows = violations and words.startswith("--train-only") and not config.given("train_only")
        return Inspection([*violations, *[words] * (not follows)], file_problems(config), [])
    return Inspection(
        violations + checkpoint_problems(resolved),
        file_problems(config),
        memory_problems(job, layout, cluster),
        resolved,
        job,
        layout,
        remark,
    )


def checkpoint_problems(resolved: schema.Config) -> list[str]:
    """The reasons why a run cannot resume from the checkpoint in --load, as far as the settings show them."""
    c = resolved.checkpoint
    try:
        record = saved_record(c.load, c.ckpt_step)[1] if c.load and not c.finetune else None
    except (Damaged, OSError):
        record = None  # a run that has not saved yet; or loading will report the error
    try:
        if record is not None:
            refuse_another_run(resolved, record["config"], same_words=True)
    except SettingsError as error:
        return [f"--load {c.load}: {error.what}: {' '.join(str(error.why).split())}"]
    return []


def refusal(problems: list[str]) -> SettingsError:
    """One error for all problems."""
    if len(problems) == 1:
        return SettingsError(problems[0])
    return SettingsError(f"{len(problems)} problems:{numbered(problems)}")


def _shapeless(config: schema.Config, world: int) -> bool:
    """Whether the settings describe no layout, so that its memory cannot be estimated."""
    m, p, b = config.model, config.parallel, config.batch
    tp, cp = p.tensor_model_parallel_size, p.context_parallel_size
    ranks = tp * p.pipeline_model_parallel_size * cp
    if min(tp, ranks, m.num_layers, m.hidden_size, m.seq_length, b.micro_batch_size) < 1:
        return True
    facts = facts_of(config, vocab_size=1)
    if not facts.has_shape:
        return True
    if world % ranks or cp > 1 and m.seq_length % (2 * cp):
        return True
    dp = world // ranks
    own = stages.problems(p, m.num_layers) + batch.problems(b, dp)
    try:
        _ = config.recompute.exempt_layers
    except ValueError:
        return True
    shard = p.sharding_degree or 1
    return bool(own or dp % shard or any(width % tp for width in facts.divisible_by_tp().values()))


# Files ----------------------------------------------------------------------------------------------------------------

VOCABULARIES = ("vocab_file", "merge_file", "tokenizer_model")


def named_files(config: schema.Config) -> Iterator[tuple[str, str]]:
    """List (flag, path) of every data and vocabulary file in the settings."""
    from megatron.data.formats import endings_of

    for flag, paths in blends(config.data):
        yield from ((flag, prefix + ending) for prefix in paths for ending in reversed(endings_of(prefix)))
    for name in VOCABULARIES:
        if path := getattr(_named(config.tokenizer), name):
            yield dashed(name), path


def _named(t: schema.TokenizerSettings) -> schema.TokenizerSettings:
    """The tokenizer with the files of its folder or name. `_vocabulary` reports missing ones."""
    from megatron.tokenizer import resolved

    try:
        return resolved(t) if t.tokenizer_model else t
    except DataError:
        return replace(t, tokenizer_model=None)


def blends(data: schema.Data) -> Iterator[tuple[str, list[str]]]:
    """List (flag, prefixes) of every blend of data."""
    for f in fields(schema.Data):
        if f.name.endswith("data_path"):
            yield dashed(f.name), prefixes(getattr(data, f.name) or [])


def prefixes(words: list[str]) -> list[str]:
    """The prefixes of a blend without their weights; empty for an invalid blend, which the rules report."""
    from megatron.data.blend import parse_blend  # imports numpy, which a search of layouts does not need
    from megatron.data.indexed import bare_prefix

    try:
        return [bare_prefix(prefix) for prefix in parse_blend(words, "").prefixes] if words else []
    except DataError:
        return []


def file_problems(config: schema.Config) -> list[str]:
    """Data, vocabulary and checkpoints of the settings that are missing, damaged or of another vocabulary."""
    from megatron.data.indexed import bare_prefix, why_missing  # imports numpy, which a search does not need

    lost = [(flag, path) for flag, path in named_files(config) if not location(path).exists()]
    problems, reported = [], set()
    for flag, path in lost:
        prefix = bare_prefix(path)
        if prefix == path:
            problems.append(f"{flag}: there is no {path}")
        elif prefix not in reported:
            lacking = " and no ".join(other for _, other in lost if bare_prefix(other) == prefix != other)
            why = f"there is no {lacking}; preprocess_data.py writes them"
            if prefix.endswith("/"):
                why = "; ".join(filter(None, why_missing(prefix)))
            problems.append(f"{flag}: {'; '.join(why_missing(prefix)) if location(prefix).is_file() else why}")
            reported.add(prefix)
    outputs = filter(None, (missing_tracker(config.logging), event_problem(config.logging)))
    return (
        problems
        + [_one_line(problem) for problem in outputs]
        + _damaged(config)
        + _vocabulary(config, bool(lost))
        + _folders(config.checkpoint, metrics_path(config.logging, config.checkpoint.save))
    )


def _damaged(config: schema.Config) -> list[str]:
    """Folders without token files, and token files that do not match their index."""
    from megatron.data.blend import without_folders
    from megatron.data.formats import endings_of, is_folder, open_tokens

    problems = []
    words = (
        word for f in fields(schema.Data) if f.name.endswith("data_path") for word in getattr(config.data, f.name) or ()
    )
    for folder in filter(is_folder, words):
        try:
            without_folders([folder])
        except (DataError, OSError) as error:
            problems.append(_one_line(error))
    for flag, prefix in dict.fromkeys((flag, prefix) for flag, prefixes in blends(config.data) for prefix in prefixes):
        if "://" in prefix or not all(Path(prefix + ending).exists() for ending in endings_of(prefix)):
            continue
        try:
            if not open_tokens(prefix).sequence_lengths.sum():
                problems.append(f"{flag}: {prefix} has no tokens")
        except (Failure, OSError, ValueError) as error:
            problems.append(f"{flag}: {_one_line(error)}")
    return problems


def _vocabulary(config: schema.Config, lost: bool) -> list[str]:
    """The problem of a vocabulary that cannot be read, or differs from the data's."""
    t = config.tokenizer
    if lost or not any(getattr(t, name) for name in VOCABULARIES):
        return []
    from megatron.data.vocabulary import refuse_other_vocabulary
    from megatron.tokenizer import build_tokenizer

    kind = t.tokenizer_type or tokenizer_type(t, config.data)
    paths = [prefix for _, blend in blends(config.data) for prefix in blend if "://" not in prefix]
    try:
        refuse_other_vocabulary(paths, build_tokenizer(replace(t, tokenizer_type=kind), lambda text: None))
    except (DataError, SettingsError) as error:
        return [_one_line(error)]
    return []


def _folders(c: schema.Checkpoint, metrics: Optional[Path]) -> list[str]:
    """Problems of checkpoint folders that cannot be read or written. metrics: the run's metrics.jsonl."""
    problems = []
    if c.load and not any(location(c.load).glob("iter_*")):
        problems += _nothing_to_load(c, metrics)
    for flag, folder in (("--save", c.save), ("--save-mirror", c.save_mirror)):
        if not folder or isinstance(location(folder), UrlPath):
            continue
        existing = next((p for p in (Path(folder), *Path(folder).parents) if p.exists()), None)
        if existing and not existing.is_dir():
            problems.append(f"{flag} {folder}: {existing} is a file; give a folder")
    return problems


def _nothing_to_load(c: schema.Checkpoint, metrics: Optional[Path]) -> list[str]:
    """The problem of a `--load` folder without a checkpoint."""
    if any(location(c.load).glob("release")):
        from megatron.settings.from_checkpoint import megatron_format_problem  # needs packages that may be missing

        if problem := megatron_format_problem(location(c.load)):
            return [problem]
    try:
        if may_begin(c, metrics):
            return []
    except CheckpointError as error:
        return [_one_line(error)]
    new = "" if c.finetune else "; a new run has --save of the same folder, or --auto-resume"
    return [f"--load {c.load} holds no checkpoint; check the path{new}"]


def _one_line(error: Exception) -> str:
    return " ".join(line.strip() for line in str(error).splitlines())


# Memory ---------------------------------------------------------------------------------------------------------------


def _of(needed: float, capacity: float) -> str:
    """Both in one unit, unless they are far apart."""
    return part_of(needed, capacity) if needed < 1000 * capacity else f"{size(needed)} of {size(capacity)}"


def memory_problems(job: Job, layout: Layout, cluster: Cluster) -> list[str]:
    """One sentence if a pipeline rank needs more memory than the device has, with remedies; else none."""
    needed, capacity = memory.peaks(job, layout, cluster.device), cluster.device.usable_bytes
    over = [rank for rank, bytes in enumerate(needed) if bytes > capacity]
    if not over:
        return []
    rank = max(over, key=needed.__getitem__)
    others = f" (and on {len(over) - 1} more)" if len(over) > 1 else ""
    return [
        f"out of memory by {size(needed[rank] - capacity)} on pipeline rank {rank}{others}: "
        f"{_of(needed[rank], capacity)} that a layout may use; "
        + remedies(
            job,
            layout,
            lambda other: max(memory.peaks(job, other, cluster.device)),
            capacity,
            _unscaled(job, layout, cluster),
        )
    ]


def _unscaled(job: Job, layout: Layout, cluster: Cluster) -> tuple[str, ...]:
    """The remedy for scores in fp16 that are divided by the layer's number, which no kernel does without storing them: none
    if it does not help.
    """
    model = job.facts.settings
    if job.precision != "fp16" or not model.apply_query_key_layer_scaling:
        return ()
    plain = replace(model, apply_query_key_layer_scaling=False)
    most = max(memory.peaks(replace(job, facts=replace(job.facts, settings=plain)), layout, cluster.device))
    fits = most <= cluster.device.usable_bytes
    return (f"--no-apply-query-key-layer-scaling ({most / 1e9:.1f} GB)",) * fits


def remedies(
    job: Job,
    layout: Layout,
    needed: Callable[[Layout], int],
    capacity: float,
    others: tuple[str, ...] = (),
    most: int = 2,
) -> str:
    """Changes of one setting after which it fits, the cheapest `most`. needed: bytes of a layout; others: more remedies."""
    full = schema.Recompute(recompute_granularity="full")
    tries = {
        "--recompute-granularity core_attn": replace(layout, recompute=schema.Recompute("core_attn")),
        "--micro-batch-size 1": replace(layout, micro_batch_size=1),
        "--use-distributed-optimizer": replace(layout, zero=1, shard=layout.weight_ranks, parallel=None),
        "--recompute-granularity full": replace(layout, recompute=full),
        "--sharding-stage 3": replace(layout, zero=3, shard=layout.weight_ranks, parallel=None),
        "--optimizer-cpu-offload": replace(layout, offload=1.0, disk=0.0),
        "--micro-batch-size 1 --recompute-granularity full": replace(layout, micro_batch_size=1, recompute=full),
        "--recompute-granularity full --optimizer-cpu-offload": replace(layout, recompute=full, offload=1.0, disk=0.0),
    }
    if layout.recompute.recompute_granularity:
        del tries["--recompute-granularity core_attn"]
    if layout.weight_ranks == 1 or layout.zero:
        del tries["--use-distributed-optimizer"], tries["--sharding-stage 3"]
    if job.matrix_moments is not None:  # orthogonalized on the device
        tries = {words: other for words, other in tries.items() if not other.offload}
    good, met = [], [layout]
    for words, other in tries.items():
        if other not in met and (size := needed(other)) <= capacity:
            good.append(f"{words} ({size / 1e9:.1f} GB)")
        met.append(other)
    search = "python -m megatron.tools.plan with the same flags searches a layout that fits"
    less = "more ranks for --pipeline-model-parallel-size, or a smaller --hidden-size or --num-layers"
    good = [*good[:most], *others]
    return f"{' or '.join(good)} would fit" if good else f"{less}; {search}"
