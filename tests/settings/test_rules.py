# SPDX-License-Identifier: Apache-2.0
"""Settings that cannot work together are found, all at once, with values that would work."""

import re
from dataclasses import dataclass
from typing import Optional

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.errors import SettingsError
from megatron.model.command_line import derivations, parse_any
from megatron.model.recipe import named_recipe
from megatron.settings.declare import Count, Share, setting
from megatron.settings.general_rules import RULES
from megatron.settings.parse import parse_pretrain
from megatron.settings.rules import record
from megatron.settings.schema import GROUPS, derived
from megatron.settings.spelling import spellings_of
from megatron.training.rules import DEFAULTS, check, remarks, resolve, rules_of

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --mock-data --vocab-size 100 "
    "--train-iters 10 --lr 1e-3"
)


def config(line: str = "", base: str = BASE):
    return parse_pretrain(f"{base} {line}".split())


FLAGS = set(spellings_of(GROUPS))
SELECTIVE = "--recompute-granularity selective --recompute-modules"


def flags_of(text: str) -> set[str]:
    """The flags that a text names, as whole words."""
    return set(re.findall(r"(?<![\w-])--[a-z](?:[a-z-]|\d+(?:\b|-))*", text))


def without(*flags: str) -> str:
    """BASE without some of its flags."""
    words = (" " + BASE).split(" --")[1:]
    return " ".join(f"--{word}" for word in words if "--" + word.split()[0] not in flags)


def test_a_working_run_is_filled_in():
    made = resolve(config("--micro-batch-size 2"), 4)
    assert (made.parallel.data_parallel_size, made.batch.global_batch_size) == (4, 8)
    assert (made.model.ffn_hidden_size, made.model.kv_channels, made.model.num_query_groups) == (256, 8, 8)
    assert (made.model.max_position_embeddings, made.optimizer.lr_decay_iters) == (32, 10)
    assert (made.tokenizer.tokenizer_type, made.parallel.sharding_degree) == ("NullTokenizer", 4)
    assert resolve(made, 4) == made


def values(config) -> dict:
    return {name: value for group in config.groups.values() for name, value in vars(group).items()}


@pytest.mark.parametrize(
    "line, wanted",
    [
        ("--quantization --sparsity 0.5 --sequence-parallel", "linear sequence_parallel"),
        ("--lora-rank 2 --optimizer cpu_adam", "linear train_only optimizer optimizer_cpu_offload"),
        ("--torch-compile auto --gradient-accumulation-fusion", "torch_compile sharding_degree lr_decay_iters"),
    ],
)
def test_derivations_write_what_they_name(line, wanted):
    steps = [(one, ()) for one in derivations(named_recipe("GPT"))] + [(one, (4, 4)) for one in DEFAULTS]
    config, written = parse_pretrain(f"{BASE} {line}".split()), set()
    for one, inputs in steps:
        before = values(config)
        config = derived(config, [one], *inputs)
        changed = {name for name, value in values(config).items() if value != before[name]}
        assert changed <= set(one.writes.split()) and {*one.reads.split(), *one.writes.split()} <= {*before, "*"}
        written |= changed
    assert set(wanted.split()) <= written and config == resolve(parse_any(f"{BASE} {line}".split()), 4)


def test_ranges_of_a_recipes_own_settings():
    @dataclass(frozen=True)
    class Holes:
        fim_rate: Share = setting("share of documents", 0.5)
        fim_spans: Optional[list[Count]] = setting("lengths", None)

    def violations(words: str) -> list[str]:
        return check(parse_pretrain(f"{BASE} {words}".split(), dict(holes=Holes)), 1)

    assert violations("--fim-rate 1 --fim-spans 1 2") == []
    assert violations("--fim-rate 1.7") == ["--fim-rate 1.7 must be at least 0 and at most 1"]
    assert violations("--fim-spans 3 0") == ["--fim-spans 3 0 must be at least 1"]


def test_vocabulary_files_say_their_tokenizer():
    base = without("--mock-data", "--vocab-size") + " --data-path d --vocab-file v --merge-file m"
    assert resolve(config(base=base), 1).tokenizer.tokenizer_type == "GPT2BPETokenizer"


FILES = without("--mock-data") + " --tokenizer-type NullTokenizer"


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "line, world, words",
    [
        # ranks
        (
            "--tp 2 --pp 2",
            6,
            "6 ranks cannot be divided by tensor x pipeline x context parallel size 2 x 2 x 1 = 4; run on 4 or 8",
        ),
        (
            "--tp 2 --pp 2 --dry-run",
            1,
            "1 rank cannot be divided by tensor x pipeline x context parallel size 2 x 2 x 1 = 4; give the "
            "ranks of the job that is planned: --world-size 4",
        ),
        (
            "--data-parallel-size 3",
            4,
            "--data-parallel-size 3 is not what there is: 4 ranks / (1 x 1 x 1) = 4; leave the flag out or run on 3",
        ),
        ("--sharding-degree 3", 4, "--sharding-degree 3 does not divide the data parallel size 4; nearest: 2 or 4"),
        # pipelines
        (
            "--pp 3",
            3,
            "--num-layers 4 cannot be cut into 3 even stages (--pp 3); nearest: 3 or 6 "
            "layers, or --pipeline-model-parallel-size 1 or 2, or --pipeline-stage-layers 1,2,1",
        ),
        ("--pp 2 --virtual-pp-degree 4", 2, "8 even stages (--pp 2 x 4 model chunks a rank)"),
        ("--num-layers-per-virtual-pipeline-stage 1", 1, "need --pipeline-model-parallel-size of at least 2"),
        ("--pp 2 --pipeline-stage-layers 2,1", 2, "2,1 is 3 layers, and --num-layers is 4; 2,2 would work"),
        (
            "--pp 2 --pipeline-schedule zigzag",
            2,
            "choose from gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half (or FILE.txt)",
        ),
        ("--pp 2 --pipeline-schedule zb-h1 --virtual-pp-degree 2", 2, "zb-h1 has one model chunk a rank, not 2"),
        ("--pp 2 --pipeline-schedule own.txt --rampup-batch-size 2 2 8 --global-batch-size 8", 2, "drop one of them"),
        (
            "--pp 2 --pipeline-schedule own.txt --step-batch-size-schedule 0:8",
            2,
            "-schedule changes it; drop one of them",
        ),
        ("--pp 2 --decoder-first-pipeline-num-layers 0", 2, "--decoder-first-pipeline-num-layers 0 must be at least 1"),
        ("--tp 3", 3, "--num-attention-heads 8 is not a multiple of --tp 3; nearest: 6 or 9 heads"),
        (
            "--device cpu --distributed-backend nccl",
            2,
            "--distributed-backend nccl needs CUDA devices, and this run is on the CPU; leave",
        ),
        # not yet
        ("--tp 4 --num-query-groups 2", 4, "--num-query-groups 2 cannot be divided by --tp 4"),
        ("--tp 2 --ffn-hidden-size 33", 2, "--ffn-hidden-size 33 cannot be divided by --tp 2"),
        ("--tp 2 --sequence-parallel --seq-length 127", 2, "--seq-length 127 cannot be divided"),
        ("--cp 2 --seq-length 126", 2, "--seq-length 126 is not a multiple of 4, as --cp 2 needs"),
        ("--cp 2 --tp 4 --sequence-parallel --seq-length 124", 8, "is not a multiple of 8, as --cp 2"),
        ("--cp 6 --seq-length 120 --cp-comm-type a2a+p2p", 6, "is --cp 6, as 2 3"),
        (
            "--cp 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            2,
            "2 2 must be two numbers whose product is --cp 2, as 2 1",
        ),
        (
            "--cp 4 --tp 2 --num-query-groups 2 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            8,
            "divides the 1 key-value heads of each tensor parallel rank by the first of",
        ),
        ("--cp 2 --num-layers 4 --cp-comm-type a2a p2p", 2, "--cp-comm-type has 2 words; give one for all layers"),
        (
            "--cp 4 --tp 2 --num-query-groups 4 --cp-comm-type a2a",
            8,
            "a2a divides the 2 key-value heads of each tensor parallel rank",
        ),
        ("--use-distributed-optimizer --param-cpu-offload", 2, "--param-cpu-offload needs --sharding-stage 3"),
        ("--sharding-stage 3 --torch-compile", 2, "--torch-compile needs all parameters in place"),
        ("--nvme-offload-fraction 1.5 --nvme-offload-dir .", 1, "--nvme-offload-fraction 1.5 must be at least 0"),
        ("--nvme-offload-fraction 0.5", 1, "--nvme-offload-fraction 0.5 needs --nvme-offload-dir"),
        (
            "--nvme-offload-fraction 0.7 --nvme-offload-dir . --optimizer cpu_adam --optimizer-offload-fraction 0.4",
            1,
            "at most --optimizer-offload-fraction 0.3",
        ),
        ("--optimizer-offload-fraction 1.5", 1, "--optimizer-offload-fraction 1.5 must be at least 0 and at most 1"),
        # model
        (
            "--num-attention-heads 7",
            1,
            "--hidden-size 64 is not a multiple of --num-attention-heads 7; nearest: 63 or 70, or 4 or 8 heads",
        ),
        (
            "--num-query-groups 3",
            1,
            "--num-attention-heads 8 cannot be shared by --num-query-groups 3; nearest: 2 or 4",
        ),
        ("--group-query-attention", 1, "--group-query-attention needs --num-query-groups"),
        ("--squared-relu --swiglu", 1, "--squared-relu and --swiglu are two activations of the MLP; give one of them"),
        *(
            (f"--window-size {words}", 1, f"--window-size {words} must be the keys before and after its own")
            for words in ("4", "4,1", "4,x", "-2,0", "1,2,3")
        ),
        ("--window-size 4,0 --window-attn-skip-freq 0", 1, "--window-attn-skip-freq 0 must be at least 1"),
        (
            "--position-embedding-type rope --use-rope-scaling --rope-type yarn --rotary-scaling-factor 2",
            1,
            "--rotary-seq-len-interpolation-factor, --use-rope-scaling and --rope-type yarn scale the same frequencies; "
            "give one of them",
        ),
        (
            "--use-rope-scaling --rope-scaling-low-freq-factor 4",
            1,
            "--rope-scaling-low-freq-factor 4 must be below --rope-scaling-high-freq-factor 4, as 1 and 4 are",
        ),
        (
            "--rope-type yarn --yarn-beta-fast 0.5",
            1,
            "--yarn-beta-slow 1 must be at most --yarn-beta-fast 0.5, as 1 and 32 are",
        ),
        (
            "--rope-type yarn --rotary-base 1",
            1,
            "--rope-type yarn needs a --rotary-base above 1, as 10000 is; 1 is not",
        ),
        ("--rope-scaling-factor 0.5", 1, "--rope-scaling-factor 0.5 must be at least 1"),
        (
            "--attn-logit-softcapping 50 --attention-backend sdpa",
            1,
            "--attention-backend sdpa has no --attn-logit-softcapping; use auto, explicit, or flash",
        ),
        ("--attn-logit-softcapping 0", 1, "--attn-logit-softcapping 0.0 must be above 0"),
        ("--z-loss-coeff -1", 1, "--z-loss-coeff -1.0 must be at least 0"),
        ("--final-logit-softcapping -1", 1, "--final-logit-softcapping -1.0 must be above 0"),
        ("--max-position-embeddings 16", 1, "--seq-length 32 is longer than --max-position-embeddings 16"),
        (  # as in Megatron-LM, though rotary positions have no table
            "--max-position-embeddings 16 --position-embedding-type rope",
            1,
            "--seq-length 32 is longer than --max-position-embeddings 16; lower the one, or raise the other to 32",
        ),
        (
            "--position-embedding-type rope --rotary-percent 0.4",
            1,
            "3 of 8 (--rotary-percent 0.4 of the width of a head)",
        ),
        ("--num-layers 0", 1, "--num-layers 0 must be at least 1"),
        ("--hidden-dropout 1", 1, "--hidden-dropout 1.0 must be at least 0 and below 1"),
        ("--attention-dropout -0.1", 1, "--attention-dropout -0.1 must be"),
        ("--rotary-percent 1.5", 1, "--rotary-percent 1.5 must be above 0 and at most 1"),
        # vocabulary
        (
            "--tokenizer-type GPT2BPETokenizer",
            1,
            "--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file",
        ),
        ("--tokenizer-type HuggingFaceTokenizer", 1, "--tokenizer-type HuggingFaceTokenizer needs --tokenizer-model"),
        ("--vocab-size 0", 1, "--vocab-size 0 must be at least 1"),
        # data
        ("--data-path d", 1, "--mock-data reads no files, and files are given (--data-path)"),
        # batch and length
        ("--global-batch-size 10 --micro-batch-size 4", 1, "nearest: 8, 12"),
        ("--train-samples 100", 1, "--train-iters 10 and --train-samples 100"),
        ("--rampup-batch-size 1 1 10 --global-batch-size 4", 1, "needs --train-samples"),
        ("--train-iters -1", 1, "--train-iters -1 must be at least 0"),
        ("--eval-interval -1", 1, "--eval-interval -1 must be at least 0"),
        ("--micro-batch-size 0", 1, "--micro-batch-size 0 must be at least 1"),
        ("--exit-duration-in-mins 0", 1, "--exit-duration-in-mins 0.0 must be above 0"),
        # learning rate
        ("--min-lr 1", 1, "--min-lr 1 must lie between 0 and --lr 0.001"),
        ("--lr 0", 1, "--lr 0.0 must be above 0"),
        ("--decoupled-lr 0", 1, "--decoupled-lr 0.0 must be above 0"),
        ("--decoupled-lr 1e-4 --min-lr 2e-4", 1, "--min-lr 0.0002 must lie between 0 and --decoupled-lr 0.0001"),
        ("--decoupled-lr 1 --decoupled-min-lr 2", 1, "--decoupled-min-lr 2 must lie between 0 and --decoupled-lr 1"),
        ("--decoupled-min-lr 1e-5", 1, "--decoupled-min-lr 1e-05 needs --decoupled-lr"),
        ("--lr-warmup-iters 20", 1, "warm-up of 20 iters is not shorter than the decay length of 10 iters"),
        ("--lr-warmup-fraction 2", 1, "--lr-warmup-fraction 2.0 must be at least 0 and below 1"),
        ("--lr-decay-style WSD", 1, "--lr-wsd-decay-iters"),
        ("--lr-decay-samples 5", 1, "--lr-decay-samples does not go with --train-iters"),
        ("--adam-beta2 1", 1, "--adam-beta2 1.0 must be at least 0 and below 1"),
        ("--optimizer muon --optimizer-cpu-offload", 1, "--optimizer muon keeps its state on the device"),
        ("--optimizer muon --muon-num-ns-steps 4", 1, "--muon-num-ns-steps 4 must be a multiple of the 5 polynomials"),
        ("--optimizer muon --muon-num-ns-steps 0", 1, "--muon-num-ns-steps 0 must be at least 1"),
        ("--optimizer sgd --sgd-momentum 1", 1, "--sgd-momentum 1.0 must be at least 0 and below 1"),
        (
            "--optimizer sgd --sgd-momentum 0 --nvme-offload-fraction 1 --nvme-offload-dir .",
            1,
            "--nvme-offload-fraction has nothing to put into files",
        ),
        ("--fp16 --min-loss-scale 4 --initial-loss-scale 2", 1, "--min-loss-scale 4 is above --initial-loss-scale 2"),
        (
            "--bf16 --amp-level O1 --torch-compile",
            1,
            "--amp-level O1 casts op by op, which --torch-compile does not see",
        ),
        ("--label-smoothing 1", 1, "--label-smoothing 1.0 must be at least 0 and below 1"),
        # recomputation
        (
            "--recompute-num-layers 2",
            1,
            "--recompute-num-layers 2: goes with --recompute-granularity full alone, which",
        ),
        ("--recompute-activations --recompute-method block", 1, "not with core_attn; to spare layers"),
        ("--recompute-granularity full --recompute-method block", 1, "needs --recompute-num-layers"),
        ("--recompute-granularity full --recompute-num-layers 0", 1, "--recompute-num-layers 0 must be at least 1"),
        ("--recompute-modules mlp", 1, "mlp: goes with --recompute-granularity selective, which is not given"),
        ("--recompute-granularity full --recompute-modules mlp", 1, "--recompute-granularity selective, not with full"),
        (f"{SELECTIVE} mlp layernorm --torch-compile", 1, "--recompute-modules layernorm: --torch-compile itself"),
        (f"{SELECTIVE} layernorm --bf16 --amp-level O1", 1, "with --amp-level O1 products read and keep a copy"),
        (
            "--use-recompute --no-recompute-layers 1,4",
            1,
            "--no-recompute-layers 1,4 must be numbers of layers from 0 to 3",
        ),
        ("--use-recompute --no-recompute-layers one", 1, "--no-recompute-layers one must be numbers"),
        # checkpoints and logs
        ("--save-interval 5", 1, "--save-interval needs --save"),
        ("--finetune", 1, "--finetune needs --load"),
        ("--ckpt-step 5", 1, "--ckpt-step needs --load"),
        ("--auto-resume", 1, "--auto-resume needs --load"),
        ("--keep-last 0 --save x", 1, "--keep-last 0 must be at least 1"),
        ("--finetune --auto-resume --load x", 1, "drop one of them"),
        ("--on-spike rollback", 1, "--on-spike rollback needs --save and --save-interval"),
        ("--override seed", 1, "--override seed needs --load"),
        ("--spike-threshold 0", 1, "--spike-threshold 0.0 must be above 0"),
        ("--spike-window 31", 1, "--spike-window 31 must be at least 32"),
        ("--wandb-exp-name x", 1, "--wandb-exp-name needs --wandb-project"),
        ("--log-interval 0", 1, "--log-interval 0 must be at least 1"),
    ],
)
def test_one_violation_gives_one_sentence(line, world, words):
    found = check(config(line), world)
    assert any(words in text for text in found), found
    layouts = ("--tp", "--pp", "--rampup")
    assert len(found) == 1 or line.startswith(layouts), found
    with pytest.raises(SettingsError) as caught:
        resolve(config(line), world)
    assert caught.value.code == 3 and words in str(caught.value)


@pytest.mark.parametrize(
    "line, words",
    [
        ("", "no data is given"),
        ("--data-path d --train-data-path t", "--data-path goes with --split, and --train-data-path without"),
        ("--valid-data-path t", "--valid-data-path without --train-data-path"),
        ("--data-path d --split 1,x", "--split 1,x must be up to three numbers"),
        ("--data-path d --split 1,2,3,4", "--split 1,2,3,4 must be up to three numbers"),
        ("--data-path d --split 0,1,1", "--split 0,1,1 leaves nothing to train on"),
        ("--data-path 0 a 1 b", "--data-path: weight 0 of a; weights are above zero"),
        ("--data-path 0.5 a x b", "--data-path: 'x' stands where a weight should"),
        ("--data-path 0.5 a 0.5", "--data-path 0.5 a 0.5: these are neither pairs of weight and prefix"),
        ("--data-path a 0.5", "--data-path a 0.5: these are neither pairs of weight and prefix nor prefixes alone"),
        ("--train-data-path nan a", "--train-data-path: weight nan of a"),
    ],
)
def test_data_paths(line, words):
    [found] = check(config(line, base=FILES), 1)
    assert words in found


def test_a_blend_in_quotes_is_recognised():
    settings = parse_pretrain(FILES.split() + ["--data-path", "0.5 a 0.5 b"])
    assert "leave out the quotes" in check(settings, 1)[0]


@pytest.mark.parametrize(
    "line",
    [
        "--data-path d",
        "--data-path 0.5 a 0.5 b",
        "--data-path a b c",
        "--data-path a b",
        "--train-data-path a",
        "--data-path d --split 100,0,0",
        "--data-path d --split 8/2",
    ],
)
def test_data_paths_that_work(line):
    assert check(config(line, base=FILES), 1) == []


def test_what_is_missing_is_named():
    assert "no vocabulary is given; --vocab-file vocab.json" in check(config(base=without("--vocab-size")), 1)[0]
    assert "the length of training is missing" in check(config(base=without("--train-iters")), 1)[0]
    assert "--lr is missing" in check(config(base=without("--lr")), 1)[0]


def test_all_violations_come_at_once():
    line = "--num-attention-heads 7 --hidden-dropout 2 --save-interval 5 --global-batch-size 3 --micro-batch-size 2"
    with pytest.raises(SettingsError, match="4 settings cannot work") as caught:
        resolve(config(line), 1)
    named = flags_of(str(caught.value))
    assert {"--hidden-size", "--hidden-dropout", "--save", "--global-batch-size"} <= named <= FLAGS


def test_every_rule_speaks_in_flags():
    """Each sentence of a rule names a flag, and none fails on the settings of a plain run."""
    plain = config("")
    s = record(
        config("--num-query-groups 2 --data-parallel-size 1 --dp-degree 1 --sharding-degree 1 --profile-ranks 0"), 1
    )
    rules = [*RULES, *rules_of(plain)]
    assert len(rules) > len(RULES) > 0
    for rule in rules:
        assert not rule.broken(s)
        said = rule.message(s).partition("; start them: ")[0]  # "" where it lists what is wrong, and nothing is
        assert flags_of(said) <= FLAGS and (flags_of(said) or not said), said


@given(
    st.fixed_dictionaries(
        {},
        optional={
            flag: st.integers(0 if flag == "--micro-batch-size" else -1, 9)  # whose -1 is refused before
            for flag in (
                "--num-layers",
                "--hidden-size",
                "--num-attention-heads",
                "--num-query-groups",
                "--seq-length",
                "--tp",
                "--pp",
                "--cp",
                "--micro-batch-size",
                "--global-batch-size",
                "--train-iters",
                "--lr-warmup-iters",
                "--max-position-embeddings",
                "--sharding-degree",
                "--data-parallel-size",
                "--kv-channels",
                "--clip-grad",
            )
        },
    ),
    st.integers(1, 9),
)
def test_any_numbers_are_answered_or_work(values, world):
    """No combination of sizes makes the rules themselves fail, and what passes can be filled in."""
    settings = config(" ".join(f"{flag} {value}" for flag, value in values.items()))
    if not check(settings, world):
        made = resolve(settings, world)
        assert made.batch.global_batch_size % (made.batch.micro_batch_size * made.parallel.data_parallel_size) == 0
        assert check(made, world) == []


@pytest.mark.parametrize("flags, named", [("--train-iters 1", True), ("--train-iters 10", False), ("", False)])
def test_an_exit_interval_beyond_the_end_is_named(flags, named):
    told = remarks(config(f"--save x --eval-iters 0 --exit-interval 10 {flags}"), 1)
    assert ("--exit-interval 10 is beyond --train-iters 1: the run ends first" in told) == bool(named)
    assert any("--exit-interval" in remark for remark in told) == named


def test_remarks():
    assert remarks(config("--save x --eval-interval 5"), 1) == []
    alone = "the only checkpoints are those at the end and at Ctrl-C; --save-interval auto"
    told = lambda flags: any(alone in remark for remark in remarks(config(flags), 1))
    assert told("--save x --train-iters 5000") and not told("--save x --train-iters 500")
    assert not told("--save x --train-iters 5000 --save-interval 9") and not told("--train-iters 5000")
    of_groups = lambda flags: sum("in Megatron-LM it has no effect" in remark for remark in remarks(config(flags), 1))
    heads = "--num-attention-heads 4 --num-query-groups"
    assert [of_groups(f"{heads} {more}") for more in ("2", "4", "2 --group-query-attention")] == [1, 0, 0]
    assert of_groups("--num-attention-heads 4 --num-key-value-heads 2") == 0  # a word of others, who mean it
    schedule = lambda flags, ranks: [words for words in remarks(config(flags), ranks) if "--pipeline-schedule" in words]
    for name in ("gpipe", "zb-h1", "zb-v", "v-half"):
        assert len(schedule(f"--pipeline-schedule {name}", 1)) == 1
        assert schedule(f"--pipeline-schedule {name} --pipeline-model-parallel-size 2", 2) == []
    layers = "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage"
    [said] = schedule(f"--pipeline-schedule 1f1b {layers} 1", 2)
    assert said.startswith("--pipeline-schedule 1f1b with 2 model chunks a rank is the interleaved schedule")
    for plain in (f"--pipeline-schedule 1f1b {layers} 2", f"{layers} 1", f"--pipeline-schedule interleaved {layers} 1"):
        assert schedule(plain, 2) == []
    assert schedule("--pipeline-schedule 1f1b", 1) == [] == schedule("--pipeline-schedule own.txt", 1)
    full = "--num-layers 4 --recompute-granularity full --recompute-num-layers"
    of_layers = lambda flags: [words for words in remarks(config(f"{full} {flags}"), 1) if "--recompute-num" in words]
    assert of_layers("4") == [] == of_layers("4 --recompute-method block")
    assert of_layers("5") == [
        "--recompute-num-layers 5: the model has 4 layers, and all layers of a stage are recomputed together, from one "
        "saved input"
    ]
    assert of_layers("5 --recompute-method block")[0].endswith("all layers of a stage are recomputed")
    cut = "--num-layers 2 --pipeline-model-parallel-size 2 --position-embedding-type rope --pipeline-model-parallel-layout"
    ahead = lambda flags: [words for words in remarks(config(f"{cut} {flags}"), 2) if "-layout" in words]
    assert ahead("Et|tL") == [] == ahead("Et|tmL --mtp-num-layers 1")
    [said] = ahead("Et|tL --mtp-num-layers 1")
    assert "has no m: 1 depth of multi-token prediction (--mtp-num-layers) is on the last stage" in said
    assert "nothing of this training will be kept" in "\n".join(remarks(config("--device cpu"), 1))
    rises = lambda flags: [
        words for words in remarks(config(f"{flags} --global-batch-size 8 --lr 1e-3"), 1) if "warm-up" in words
    ]
    assert rises("--train-iters 36 --lr-decay-iters 360 --lr-warmup-fraction 0.1") == []
    [short] = rises("--train-iters 4 --lr-decay-iters 360 --lr-warmup-fraction 0.1")  # step 4 has 3 / 36 of the rate
    assert short.startswith("--lr-warmup-fraction 0.1 is a warm-up of 36 steps, beyond --train-iters 4: ")
    assert short.endswith("only comes to 8.3e-05, and not to --lr 0.001")
