# SPDX-License-Identifier: Apache-2.0
"""Settings from a YAML file of PaddleFleetX: sections, `_base_`, and `-o Section.key=value`, as flags of this suite.

    read("pretrain_gpt_345M.yaml") -> {"Model.hidden_size": Entry(["1024"], "pretrain_gpt_345M.yaml:12"), ...}
    translate(entries) -> Translated(flags=[("--hidden-size", ["1024"], "pretrain_gpt_345M.yaml:12"), ...], ...)

A key means one flag, or together with others one (batch sizes, precision, sharding, recomputation), or nothing here, or
it is refused with a way out; a key that nobody knows is an error.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.errors import UsageError

SECTIONS = """Global Engine Model Data Distributed Optimizer Profiler Fused FusedPasses Inference Offline_Eval Generation
    Compress Quantization Prune Distillation Tuning""".split()
BASE = "_base_"


class Entry(NamedTuple):
    """A value as words, None for an empty one, and where it stands: `run.yaml:12`, or `-o Model.hidden_size`."""

    words: Optional[list[str]]
    origin: str


@dataclass
class Translated:
    """flags: (flag, words, origin) of training; tool_flags: of generating and evaluating. notes: (sentence, origin and key)
    of what has no effect. problems: sentences."""

    flags: list[tuple[str, list[str], str]] = field(default_factory=list)
    tool_flags: list[tuple[str, list[str], str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


# path, flag
PLAIN = """
Global.device --device
Global.seed --seed
Global.global_batch_size --global-batch-size
Global.local_batch_size --local-batch-size
Global.micro_batch_size --micro-batch-size
Engine.max_steps --train-iters
Engine.logging_freq --log-interval
Engine.eval_freq --eval-interval
Engine.eval_iters --eval-iters
Engine.accumulate_steps --gradient-accumulation-steps
Engine.save_load.save_steps --save-interval
Engine.save_load.output_dir --save
Engine.save_load.ckpt_dir --load
Model.vocab_size --vocab-size
Model.vocab_size_divisible_unit --make-vocab-size-divisible-by
Model.hidden_size --hidden-size
Model.num_layers --num-layers
Model.num_attention_heads --num-attention-heads
Model.ffn_hidden_size --ffn-hidden-size
Model.hidden_dropout_prob --hidden-dropout
Model.attention_probs_dropout_prob --attention-dropout
Model.max_position_embeddings --max-position-embeddings
Model.initializer_range --init-method-std
Model.sequence_parallel --sequence-parallel
Model.virtual_pp_degree --virtual-pp-degree
Model.scale_qk_by_layer_num --apply-query-key-layer-scaling
Model.use_flash_attn --use-flash-attn
Model.fused_linear --fused-linear
Model.fuse_attn_qkv --fuse-attn-qkv
Model.fused_softmax_with_triangular --masked-softmax-fusion
Data.Train.dataset.input_dir --data-path
Data.Train.dataset.split --split
Data.Train.dataset.max_seq_len --seq-length
Data.Train.loader.num_workers --num-workers
Distributed.mp_degree --tensor-model-parallel-size
Distributed.pp_degree --pipeline-model-parallel-size
Distributed.schedule_mode --pipeline-schedule
Distributed.sharding.sharding_offload --optimizer-cpu-offload
Distributed.sharding.comm_overlap --overlap-grad-reduce
Distributed.sharding.reduce_overlap --overlap-grad-reduce
Distributed.sharding.broadcast_overlap --overlap-param-gather
Optimizer.weight_decay --weight-decay
Optimizer.beta1 --adam-beta1
Optimizer.beta2 --adam-beta2
Optimizer.epsilon --adam-eps
Optimizer.lr.decay_steps --lr-decay-iters
Optimizer.lr.warmup_rate --lr-warmup-fraction
Optimizer.lr.warmup --lr-warmup-fraction
Optimizer.lr.max_lr --lr
Optimizer.lr.learning_rate --lr
Optimizer.lr.min_lr --min-lr
Optimizer.grad_clip.clip_norm --clip-grad
"""
FLAGS = dict(line.split() for line in PLAIN.strip().splitlines())

# for megatron.tools.generate and megatron.tools.evaluate; a value after = is meant where the file says this word
TOOLS = """
Generation.top_k --top-k
Generation.top_p --top-p
Generation.temperature --temperature
Generation.max_dec_len --tokens-to-generate
Generation.min_dec_len --min-tokens-to-generate
Generation.num_return_sequences --num-samples
Generation.decode_strategy=greedy_search --greedy
Inference.model_dir --load
Offline_Eval.eval_path --valid-data
Offline_Eval.cloze_eval=true --task LAMBADA
Offline_Eval.cloze_eval=false --task WIKITEXT103
Offline_Eval.overlapping_eval --overlapping-eval
Offline_Eval.batch_size --micro-batch-size
Offline_Eval.max_seq_len --seq-length
"""
TOOLS_OF = dict(Generation=["generate"], Inference=["generate", "evaluate"], Offline_Eval=["evaluate"])
TOOL_FLAGS = {line.split()[0]: line.split()[1:] for line in TOOLS.strip().splitlines()}

# path -> {value: (flag, word)}; None: what is done anyway
NAMED = {
    "Model.module": dict(gptmodule=None, gptmoduleauto=None),
    "Model.name": dict(gpt=None),
    "Engine.run_mode": dict(step=None),
    "Data.Train.dataset.name": dict(gptdataset=None),
    "Data.Train.sampler.name": dict(gptbatchsampler=None, distributedbatchsampler=None),
    "Data.Train.sampler.shuffle": dict(false=None, true=("--dataloader-type", "cyclic")),
    "Data.Train.sampler.drop_last": dict(true=None, false=("", "")),
    "Data.Train.loader.collate_fn": dict(gpt_collate_fn=None),
    "Data.Train.collate_fn": dict(gpt_collate_fn=None),
    "Distributed.pp_recompute_interval": {"1": None},
    "Optimizer.name": dict(adamw=("--optimizer", "adam"), fusedadamw=("--optimizer", "adam")),
    "Optimizer.lr.name": dict(
        cosineannealingwithwarmupdecay=("--lr-decay-style", "cosine"),
        lineardecaywithwarmup=("--lr-decay-style", "linear"),
    ),
    "Optimizer.grad_clip.name": dict(clipgradbyglobalnorm=None),
}

# What to say of other values of these keys than those above.
ELSEWHERE = {
    "Model.module": {
        "gptgeneration": "text is generated by python -m megatron.tools.generate --load DIR -c FILE",
        "gpteval": "a trained model is evaluated by python -m megatron.tools.evaluate --load DIR -c FILE",
        "gptfinetune": "fine-tuning on labelled texts is not part of this suite",
    },
    "Data.Train.loader.collate_fn": {"": "samples are put together by the model's recipe (docs/extending.md)"},
    "Data.Train.collate_fn": {"": "samples are put together by the model's recipe (docs/extending.md)"},
    "Engine.run_mode": {"epoch": "training is as long as Engine.max_steps says"},
}

# read together, further down
JOINT = """Engine.mix_precision.enable Engine.mix_precision.use_pure_fp16 Engine.mix_precision.dtype
    Engine.mix_precision.level Engine.mix_precision.scale_loss Engine.mix_precision.custom_black_list
    Engine.mix_precision.custom_white_list Engine.num_train_epochs
    Engine.save_load.save_epoch Engine.use_recompute Model.use_recompute Model.recompute_granularity
    Model.no_recompute_layers Distributed.dp_degree Distributed.sharding.sharding_degree
    Distributed.sharding.sharding_stage Data.Eval.*
    Profiler.enable Profiler.scheduler Profiler.profiler_log Profiler.detailed""".split()

# sentence: keys without effect
IDLE = {
    "samples are counted so that every batch is full": "Data.Train.sampler.drop_last",
    "--micro-batch-size and --global-batch-size say how many samples a batch has": "Data.Train.sampler.batch_size",
    "weights and ops have the format of the level": "Engine.mix_precision.use_fp16_guard",
    "the tables are always those of operators, communication and memory": """Profiler.record_shapes
        Profiler.profile_memory Profiler.summary.*""",
    "batches are tensors, made by the ranks that need them": "Data.*.loader.return_list Data.*.sample_split",
    "training and validation take their parts of the files of Data.Train, by its split": "Data.Test.*",
    "the optimizer's own weights and moments are fp32": "Optimizer.multi_precision",
    "schedules always count samples: steps x the batch of each": "Optimizer.lr.use_increments",
    "sums over tensor parallel ranks are joined where that is faster": "Distributed.fuse_sequence_parallel_allreduce",
    "this belongs to text generation: python -m megatron.tools.generate --load DIR -c FILE": "Generation.* Inference.*",
    "this belongs to evaluation: python -m megatron.tools.evaluate --load DIR -c FILE": "Offline_Eval.*",
    "the search for a layout is --auto-parallel, with --tune-steps": "Tuning.*",
    "a GPT has no token types": "Model.type_vocab_size",
    "kernels are chosen by what is installed; fused or not, the result is the same": """Fused.* FusedPasses.*
        Optimizer.tensor_fusion Model.use_memory_attn""",
}

# sentence: keys that are refused, unless their value asks for nothing
REFUSED = {
    "a test runs behind training, over --test-iters batches": "Engine.test_iters",
    "compression is not part of pretraining": "Compress.* Quantization.* Prune.* Distillation.*",
    "give weights to start from as --load DIR --finetune": "Model.pretrained",
}
ALONE = (
    "Engine.test_iters",
    "Model.pretrained",
    "Compress.pretrained",
)  # of others, the section's `enable` says whether they are meant
NOTHING = ("false", "none", "-1", "0")


def is_fleetx(root) -> bool:
    """Whether a YAML mapping (a node of PyYAML) has the sections of PaddleFleetX, or builds on such a file."""
    import yaml

    return any(
        key.value == BASE or key.value in SECTIONS and isinstance(node, yaml.MappingNode) for key, node in root.value
    )


def read(path: str, compose, above: tuple[Path, ...] = ()) -> dict[str, Entry]:
    """The entries of a file and of those it builds on, by dotted key. compose: path -> root node, or None if empty."""
    file = Path(path)
    if file.resolve() in above:
        raise UsageError(f"{path}: builds on itself ({BASE})")
    root = compose(path)
    found: dict[str, Entry] = {}
    for key, node in root.value if root is not None else ():
        if key.value == BASE:
            found = read(str(file.parent / node.value), compose, (*above, file.resolve()))
    return found | _flat(root, path, "") if root is not None else found


def _flat(mapping, path: str, prefix: str) -> dict[str, Entry]:
    import yaml

    found: dict[str, Entry] = {}
    for key_node, node in mapping.value:
        key, origin = f"{prefix}{key_node.value}", f"{path}:{key_node.start_mark.line + 1}"
        if key in found:
            raise UsageError(f"{origin}: {key} is given twice (also in {found[key].origin})")
        if isinstance(node, yaml.MappingNode):
            found |= _flat(node, path, f"{key}.")
        elif isinstance(node, yaml.SequenceNode):
            found[key] = Entry([str(item.value) for item in node.value] or None, origin)
        elif key != BASE:
            found[key] = entry(node.value, origin)
    return found


def entry(text: str, origin: str) -> Entry:
    """A value as it stands behind `key:` or `-o key=`."""
    words = [word.strip(" '\"") for word in text.strip("[] ").split(",")]
    return Entry(None if words in ([""], ["null"], ["~"], ["None"]) else words, origin)


def translate(entries: dict[str, Entry], purpose: str = "train") -> Translated:
    """What the entries mean here. purpose: of the command that reads them: train, generate, evaluate, or none of these."""
    out = Translated()
    given = {key: value for key, value in entries.items() if value.words is not None}
    for key, (words, origin) in given.items():
        value, sentence = " ".join(words).lower(), _sentence(REFUSED, key)
        if purpose != "train" and key == "Data.Train.dataset.input_dir":
            out.notes.append(("these are the data of training", _at(key, origin)))
        elif key in FLAGS:
            if not (key in UNLIMITED and value.startswith("-")):
                out.flags.append((FLAGS[key], [word.lower() for word in words] if key in LOWER else words, origin))
        elif key in NAMED:
            _named(out, key, value, origin)
        elif key in TOOL_FLAGS or f"{key}={value}" in TOOL_FLAGS:
            flag, *meant = TOOL_FLAGS.get(key) or TOOL_FLAGS[f"{key}={value}"]
            found = (flag, words if key in TOOL_FLAGS else meant, origin)
            out.tool_flags.append(found)
            if purpose in TOOLS_OF[key.partition(".")[0]]:
                out.flags.append(found)
            else:
                _idle(out, key, value, origin)
        elif any(fnmatchcase(key, pattern) for pattern in JOINT):
            continue
        elif sentence is not None:
            asked = key.endswith(".enable") or key in ALONE
            if asked and value not in NOTHING:
                out.problems.append(f"{_at(key, origin)} is not supported: {sentence}")
        else:
            _idle(out, key, value, origin)
    for joint in (_precision, _recompute, _sharding, _profiler, _evaluation, _epochs):
        joint(given, out)
    return out


UNLIMITED = ("Engine.max_steps", "Engine.save_load.save_steps")  # -1: no such number
LOWER = ("Distributed.schedule_mode", "Global.device")


def _named(out: Translated, key: str, value: str, origin: str) -> None:
    if value not in NAMED[key]:
        ways = [way for begin, way in ELSEWHERE.get(key, {}).items() if value.startswith(begin)]
        way = ways[0] if ways else f"there is: {', '.join(NAMED[key])}"
        out.problems.append(f"{_at(key, origin)}: '{value}' is not supported; {way}")
    elif NAMED[key][value]:
        flag, word = NAMED[key][value]
        if flag:
            out.flags.append((flag, [word], origin))
        else:
            _idle(out, key, "", origin)


def _idle(out: Translated, key: str, value: str, origin: str) -> None:
    sentence = _sentence(IDLE, key)
    if sentence is None:
        import difflib

        known = [*FLAGS, *NAMED, *(name for name in JOINT if "*" not in name)]
        near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
        out.problems.append(f"{_at(key, origin)} is no known key" + (f"; did you mean {near[0]}?" if near else ""))
    elif sentence and value not in NOTHING:
        out.notes.append((sentence, _at(key, origin)))


def _at(key: str, origin: str) -> str:
    return origin if origin.startswith("-o ") else f"{origin}: {key}"


def _sentence(table: dict[str, str], key: str) -> Optional[str]:
    for sentence, patterns in table.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return sentence
    return None


# Keys that mean something together ------------------------------------------------------------------------------------


def _word(given: dict[str, Entry], key: str, default: str = "") -> str:
    return " ".join(given[key].words).lower() if key in given else default


def _precision(given: dict[str, Entry], out: Translated) -> None:
    """`enable` or, earlier, `use_pure_fp16`; without: fp32, and the other keys say nothing."""
    at = "Engine.mix_precision."
    switch = next((at + name for name in ("enable", "use_pure_fp16") if _word(given, at + name) == "true"), None)
    if switch is None:
        return
    half = {"float16": "fp16", "bfloat16": "bf16"}.get(dtype := _word(given, at + "dtype", "float16"), dtype)
    level = _word(given, at + "level", "o2").upper()
    out.flags += [("--precision", [half], given[switch].origin), ("--amp-level", [level], given[switch].origin)]
    if half == "fp16" and at + "scale_loss" in given:
        out.flags.append(("--initial-loss-scale", *given[at + "scale_loss"]))
    for name, flag in (
        ("custom_black_list", "--amp-custom-black-list"),
        ("custom_white_list", "--amp-custom-white-list"),
    ):
        if at + name in given and level == "O1":
            out.flags.append((flag, *given[at + name]))
        elif at + name in given:
            sentence = f"at level {level} formats are not chosen op by op; the lists belong to O1"
            out.notes.append((sentence, _at(at + name, given[at + name].origin)))


def _recompute(given: dict[str, Entry], out: Translated) -> None:
    switch = next((key for key in ("Model.use_recompute", "Engine.use_recompute") if _word(given, key) == "true"), None)
    if switch is None:
        return
    granularity = given.get("Model.recompute_granularity", Entry(["full"], given[switch].origin))
    out.flags.append(("--recompute-granularity", *granularity))
    if "Model.no_recompute_layers" in given:
        words, origin = given["Model.no_recompute_layers"]
        out.flags.append(("--no-recompute-layers", [",".join(words)], origin))


def _sharding(given: dict[str, Entry], out: Translated) -> None:
    """A degree of 1 shards nothing, whatever the stage. Their data parallelism is outside of sharding."""
    at, dp = "Distributed.sharding.sharding_", "Distributed.dp_degree"
    degree = _word(given, at + "degree", "1")
    if degree != "1":
        words, origin = given[at + "degree"]
        out.flags.append(("--sharding-degree", words, origin))
        out.flags.append(("--sharding-stage", *given.get(at + "stage", Entry(["1"], origin))))
    if dp in given:
        out.flags.append(("--dp-degree", *given[dp]))


def _profiler(given: dict[str, Entry], out: Translated) -> None:
    if _word(given, "Profiler.enable") != "true":
        return
    out.flags.append(("--profile", *given["Profiler.enable"]))
    for name, flag in (("profiler_log", "--profile-dir"), ("detailed", "--profile-detailed")):
        if f"Profiler.{name}" in given:
            out.flags.append((flag, *given[f"Profiler.{name}"]))
    if "Profiler.scheduler" in given:
        words, origin = given["Profiler.scheduler"]
        for flag, word in zip(("--profile-step-start", "--profile-step-end"), words):
            out.flags.append((flag, [word], origin))


def _evaluation(given: dict[str, Entry], out: Translated) -> None:
    """Validation takes its part of the training files, as a section that says the same of them does there."""
    for key, (words, origin) in given.items():
        if not key.startswith("Data.Eval."):
            continue
        train = given.get(key.replace("Data.Eval.", "Data.Train."))
        value = " ".join(words).lower()
        same = train is not None and " ".join(train.words).lower() == value
        if same or key.endswith(".shuffle") and value == "false" or key.endswith(".drop_last") and value == "true":
            continue
        sentence = "validation is of Data.Train's files by its split, in order, in full batches of the same samples"
        out.notes.append((sentence, _at(key, origin)))


def _epochs(given: dict[str, Entry], out: Translated) -> None:
    """Epochs count where no number of steps is given: samples are drawn for all steps at once."""
    steps, counted = _word(given, "Engine.max_steps", "-1"), "Engine.num_train_epochs" in given
    for key, flag, sentence in (
        ("Engine.num_train_epochs", "--train-epochs", "training is as long as Engine.max_steps says"),
        ("Engine.save_load.save_epoch", "--save-epoch", "training is counted in steps, not in epochs"),
    ):
        if _word(given, key, "-1").startswith("-"):
            continue
        if counted and steps.startswith("-"):
            out.flags.append((flag, *given[key]))
        elif (key, _word(given, key)) != ("Engine.num_train_epochs", "1"):
            out.notes.append((sentence, _at(key, given[key].origin)))
