# SPDX-License-Identifier: Apache-2.0
"""Constants and tables beside what they were written from: formats of files, data sheets, papers, other suites' parsers.

A table that is only compared with itself may hold anything. Here are its numbers again, as the source has them.
"""

import importlib
import math
import struct
import unicodedata
from dataclasses import fields

import numpy as np
import pytest
import regex
import torch

from megatron.data import formats, indexed
from megatron.settings import schema

B = bytes.fromhex


def value_of(name: str):
    """`data.indexed:MAGIC` -> the value."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(f"megatron.{module}"), attribute)


FORMATS = {
    # Megatron-LM's index: 9 bytes, uint64 version, uint8 code, uint64 sequences, uint64 documents + 1
    "data.indexed:MAGIC": B("4d4d49444944580000"),
    "data.indexed:ENDINGS": (".bin", ".idx", "_ids.npy", "_idx.npz", "_ids.npz"),
    "data.formats:KNOWN": ("ids", "lens", "sents", "docs"),
    "data.formats:HEAD": 128,
    # First bytes: RFC 1952, RFC 8878, bzip2's and xz's documents
    "data.file_formats:COMPRESSIONS": {
        B("1f8b"): "gzip",
        B("28b52ffd"): "zstd",
        B("425a68"): "bzip2",
        B("fd377a585a00"): "xz",
    },
    "data.file_formats:OTHERS": {
        B("504b0304"): "a zip archive",
        B("50415231"): "Parquet",
        B("377abcaf271c"): "a 7z archive",
        B("526172211a07"): "a rar archive",
        B("04224d18"): "lz4",
        B("1f9d"): "compress (.Z)",
        B("4152524f5731"): "Arrow",
        B("ffffffff"): "an Arrow stream",
        B("89484446"): "HDF5",
        B("934e554d5059"): "a numpy array",
        B("53514c69746520666f726d61742033"): "SQLite",
        B("25504446"): "PDF",
        B("4d4d4944494458"): "a token index (.idx)",
    },
    "data.file_formats:SUFFIXES": {".gz": "gzip", ".zst": "zstd", ".bz2": "bzip2", ".xz": "xz"},
    "data.file_formats:TAR_SUFFIXES": {".tgz": ".tar.gz", ".tzst": ".tar.zst", ".tbz2": ".tar.bz2", ".txz": ".tar.xz"},
    "data.file_formats:HEAD": 512,
    "data.json_input:BYTE_ORDER_MARK": B("efbbbf"),
    # Files of this suite, which later versions read
    "storage.array_file:MAGIC": B("4d45474152524159"),
    "storage.array_file:ALIGN": 64,
    "checkpoint.store:FORMAT": "boxes in safetensors",
    "checkpoint.store:VERSIONS": (1, 2),
    "checkpoint.store:BLOCK": 4_194_304,
    "checkpoint.backends:INDEX": "index.json",
    "checkpoint.backends:TRACKER": "latest_checkpointed_iteration.txt",  # Megatron-LM's name
    "settings.from_checkpoint:RELEASE": "release",
    "convert.hf_files:FILE_BYTES": 5_000_000_000,
    # safetensors' names of types
    "checkpoint.store:DTYPES": {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    },
}
TOKENS = {
    "tokenizer.byte_level:END_OF_TEXT": "<|endoftext|>",
    "tokenizer.base:SENTINEL": "<extra_id_{}>",
    "tokenizer.base:INNER": "##",
    "tokenizer.base:SPECIAL": dict(
        cls=("[CLS]", "<CLS>", "<cls>"),
        sep=("[SEP]", "<SEP>", "<sep>"),
        mask=("[MASK]", "<MASK>", "<mask>"),
        pad=("[PAD]", "<PAD>", "<pad>"),
        bos=("[BOS]", "<BOS>", "<bos>", "<s>"),
        eos=("[EOS]", "<EOS>", "<eos>", "</s>"),
    ),
    "tokenizer.word_piece:UNKNOWN": "[UNK]",
    "tokenizer.word_piece:LOWER": {"BertWordPieceLowerCase": True, "BertWordPieceCase": False},
    "tokenizer.word_piece:ENDS": ("[BOS]", "[EOS]"),  # Megatron-LM adds them in this order
    "tokenizer.word_piece:LONGEST_WORD": 4,
    "tokenizer.huggingface:END_TOKENS": (
        *("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|endofdoc|>", "[SEP]"),
    ),
    "tools.train_tokenizer:SPECIAL": ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    "tools.train_tokenizer:ENDS": dict(pad_id=0, eos_id=1, unk_id=2, bos_id=3, pad_piece="<pad>"),
    "tools.train_tokenizer:SMALLEST": 258,
    # tiktoken's r50k_base, cl100k_base and o200k_base: n_vocab and <|endoftext|> of its registry
    "tokenizer.ranks:PUBLISHED": {
        50256: ("gpt2", 50256, 50257),
        100256: ("cl100k", 100257, 100277),
        199998: ("o200k", 199999, 200019),
    },
    "tokenizer.ranks:MEGATRON_SPECIAL_TOKENS": 1000,
    "tokenizer.ranks:MEGATRON_END": 2,
    "tokenizer.ranks:MEGATRON_VOCAB": 131_072,
    "settings.presets:GPT2_ROWS": 50257,
    "data.masked_dataset:SENTINELS": 100,
}
ARITHMETIC = {
    # Jordan et al., Muon; Megatron-LM's "quintic"; arXiv:2505.16932
    "optimizer.kinds:COEFFICIENTS": {
        "simple": ((3.4445, -4.775, 2.0315),),
        "quintic": (
            (4.0848, -6.8946, 2.927),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "polar_express": (
            (7.2086, -15.5131, 9.0178),
            (3.9623, -2.5813, 0.4542),
            (3.9466, -2.5765, 0.4544),
            (3.8991, -2.5671, 0.4566),
            (3.7186, -2.5308, 0.4653),
            (3.1390, -2.3073, 0.4733),
            (2.1715, -1.5246, 0.3885),
            (1.8648, -1.2224, 0.3577),
        ),
    },
    "optimizer.muon:EPSILON": 1e-7,
    "data.masking:GEOMETRIC": 0.2,  # SpanBERT, section 3.1
    "data.bert_dataset:MAX_NGRAM": 3,  # Megatron-LM's
    "data.t5_dataset:MAX_NGRAM": 10,
    "data.t5_dataset:DECODER": 128,
    "model.t5.settings:SHORT": 128,
    "data.sentence_samples:LONG_SENTENCE": 512,
    "data.index_maps:SEPARATE_BELOW": 0.8,  # Megatron-LM's threshold for a last epoch of its own
    "data.contamination:LONGEST": 13,  # Brown et al. 2020, appendix C
    "data.contamination:SHORTEST": 8,
    "data.sampler:HALF": 4_294_967_296,
    "mpu.cross_entropy:FP16_SCALE": 4096.0,
    "guard.spikes:ENOUGH": 32,
    "guard.spikes:FLOOR": 0.01,
    "model.quantization:ALPHA": 20.0,  # PaddleSlim's: the first bound of PACT, and the moving average
    "model.fake_quantize:DECAY": 0.9,
    "inference.gptq:DAMPING": 0.01,  # the authors' code: percdamp, blocksize
    "inference.gptq:COLUMNS": 128,
    "inference.quantize:LARGEST": 127,
    "inference.quantize:NIBBLE": 15,
    "model.kinds.experts.routing:TINY": 1e-20,  # Megatron-Core's, beside the sum of sigmoids
    "planner.arithmetic:CHECKPOINT": 4 + 8,
    "planner.arithmetic:TRAINING": 2 + 4 + 4 + 8,
    "planner.arithmetic:SHARDED": {0: 0, 1: 4 + 8, 2: 4 + 4 + 8, 3: 2 + 4 + 4 + 8},
    "planner.layout:ELEMENT": dict(fp32=4, bf16=2, fp16=2),
    "mpu.placement:BUFFER_BYTES": {
        **dict(float64=8, float32=4, bfloat16=2, float16=2, int64=8, int32=4, int16=2, int8=1, uint8=1, bool=1)
    },
    "pipeline.simulate:COST": dict(F=1.0, B=2.0, I=1.0, W=1.0),  # a backward pass is twice a forward pass
    "mpu.cpu_memory:_M_TRIM_THRESHOLD": -1,  # glibc's malloc.h
    "mpu.cpu_memory:_M_MMAP_MAX": -4,
    "storage.processes:_DEATH_SIGNAL": 1,  # Linux's sys/prctl.h
    "storage.processes:_SUBREAPER": 36,
    "optimizer.scratch:PAGE": 4096,
}
SIZES = {  # measured to be best: docs/proof/benchmarks.md
    "settings.kernel_sizes:CHUNK_BYTES": dict(cpu=4_194_304, cuda=838_860_800),
    "settings.kernel_sizes:BLOCK_BYTES": 134_217_728,
    "settings.kernel_sizes:JOINED": 256,
    "settings.kernel_sizes:NONCAUSAL_ROWS": 512,
    "fused_kernels:EXPLICIT_KEYS": 4096,
    "fused_kernels.explicit_attention:ALIGNED": 64,
    "fused_kernels.explicit_attention:FEW_SAMPLES": 16,
    "fused_kernels.gpu.launch:ELEMENTS": 4096,
    "fused_kernels.gpu.launch:EACH": 16,
    "fused_kernels.gpu.probe:TOLERANCE": 0.02,
    "model.packed_rows:WORTH": 0.95,
    "model.packed_rows:ROUND": 64,
    "optimizer.flat:ALIGN": 64,
    "mpu.collectives:LARGE": 2_097_152,
    "planner.reached_speed:LINEAR": dict(Ampere=0.885, Hopper=0.737),  # these: benchmarks/published.py --fit
    "planner.reached_speed:ATTENTION": dict(Ampere=0.522, Hopper=0.287),
    "planner.reached_speed:ATTENTION_TOKENS": 770.0,
    "planner.reached_speed:ATTENTION_BACKWARD": 4.94,
    "planner.reached_speed:UNFUSED": 1.52,
    "planner.reached_speed:EXPOSED": 0.71,
    "planner.reached_speed:ROWS": 64.0,
    "planner.device:GIB": 1_073_741_824,
    "planner.memory:FRAGMENTATION": dict(cuda=0.05, cpu=0.0),
}
WAITS = {  # seconds, and numbers of tries, that docs/proof/reliability.md and the design promise
    "storage.lease:LASTS": 60.0,
    "storage.lease:RENEWED": 15.0,
    "corpus.commit:STALE": 86_400.0,
    "corpus.agenda:MOST_ATTEMPTS": 4,
    "corpus.commit:RACY": 2_000_000_000,
    "storage.urls:TRIES": 5,
    "guard.watch:IN_A_ROW": 10,
    "telemetry.event_rules:WINDOW": 200,
    "telemetry.event_rules:ENOUGH": 32,
    "training.pace:CRAWLS": 3.0,
    "corpus.openwebtext.fetch:PASSING": (408, 425, 429, 500, 502, 503, 504),
    "tools.openwebtext.download:FAILURES_OF_A_HOST": 10,
    "guard.stopping:INTERRUPTED": 4_294_967_296.0,
}


@pytest.mark.parametrize(
    "name, wanted", [row for table in (FORMATS, TOKENS, ARITHMETIC, SIZES, WAITS) for row in table.items()]
)
def test_a_constant_is_what_its_source_says(name, wanted):
    found = value_of(name)
    assert found == wanted and type(found) is type(wanted)


# ---- formats, by what they do ----------------------------------------------------------------------------------------


def test_codes_of_types_are_megatrons():
    names = dict(enumerate("uint8 int8 int16 int32 int64 float64 float32 uint16".split(), 1))
    assert {code: dtype.name for code, dtype in indexed.DTYPES.items()} == names
    assert all(dtype.newbyteorder("<") == dtype for dtype in indexed.DTYPES.values())
    assert (indexed.LENGTH_TYPE, indexed.OFFSET_TYPE, indexed.MODE_TYPE) == (np.dtype("<i4"), np.dtype("<i8"), np.int8)
    assert indexed.HEADER.size == 34
    assert indexed.HEADER.pack(indexed.MAGIC, 1, 8, 2, 3) == (
        b"MMIDIDX\0\0" + struct.pack("<Q", 1) + b"\x08" + struct.pack("<Q", 2) + struct.pack("<Q", 3)
    )


@pytest.mark.parametrize("dtype_of, limit", [(indexed.token_dtype, 65500), (formats.paddle_dtype, 65535)])
def test_the_vocabulary_from_which_on_ids_have_four_bytes(dtype_of, limit):
    assert [dtype_of(size).name for size in (limit - 1, limit, None)] == ["uint16", "int32", "int32"]


def test_ends_of_sentences_are_unicodes():
    """`regex` has the property of a newer Unicode: of characters that Python knows, these have it only there."""
    ours = value_of("corpus.filters.fineweb:sentence_ends")()
    khmer = set("\u17d4\u17d5\u17d6\u17d9\u17da")
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x20000)]))
    theirs = set(regex.findall(r"\p{Sentence_Terminal}", every))
    differ = {character for character in ours ^ theirs if unicodedata.category(character) != "Cn"}
    assert len(ours) > 150 and differ <= khmer | set("\u2024\u2cf9\u2cfa\u2cfb\ufe12\ufe15\ufe16")


def test_the_numbers_of_gelu_are_those_of_tanh():
    """2 sqrt(2 / pi) and .044715 (Hendrycks and Gimpel 2016), which torch has too."""
    twice, cube = value_of("fused_kernels.gpu.activations:TWICE"), value_of("fused_kernels.gpu.activations:CUBE")
    numbers = [getattr(number, "value", number) for number in (twice, cube)]
    assert numbers == [pytest.approx(2 * math.sqrt(2 / math.pi), rel=1e-15), 0.044715]


# ---- hardware --------------------------------------------------------------------------------------------------------

# The vendors' data sheets, dense: TFLOP/s in bf16 (0: it has none) and fp16, and in fp32 without TF32.
PEAKS = """
    GB200 2500 2500 80, B200 2250 2250 75, GH200 989.4 989.4 66.9, H200 989.4 989.4 66.9, H100 PCIe 756.5 756.5 51.2,
    H100 NVL 835.5 835.5 60, H100 989.4 989.4 66.9, H800 989.4 989.4 66.9, H20 148 148 44, A100 312 312 19.5,
    A800 312 312 19.5, A40 149.7 149.7 37.4, A30 165 165 10.3, A10 125 125 31.2, RTX A6000 154.8 154.8 38.7,
    L40S 362 362 91.6, L40 181 181 90.5, L4 121 121 30.3, V100 0 125 15.7, T4 0 65 8.1, RTX 5090 209.5 209.5 104.8,
    RTX 4090 165.2 165.2 82.6, RTX 3090 71 71 35.6, MI300X 1307.4 1307.4 163.4"""
# GiB and GB/s of the data sheets, then what is reached of NVLink (PCIe) and of a network adapter
MEMORIES = """
    V100-16GB 16 900 130 10, V100-32GB 32 900 130 10, A100-40GB 40 1555 250 20, A100-80GB 80 2039 250 20,
    A800-80GB 80 2039 170 20, H100-80GB 80 3350 370 42, H800-80GB 80 3350 170 42, H200-141GB 141 4800 370 42,
    GH200-96GB 96 4000 370 42, B200-180GB 180 8000 740 42, H20-96GB 96 4000 370 42, A40-48GB 48 696 25 10,
    A30-24GB 24 933 25 10, A10-24GB 24 600 20 10, L40S-48GB 48 864 25 10, L4-24GB 24 300 20 5, T4-16GB 16 300 10 3,
    RTX 4090-24GB 24 1008 20 3, RTX 3090-24GB 24 936 20 3, RTX 5090-32GB 32 1792 40 3, MI300X-192GB 192 5300 300 42"""


def rows(text: str, numbers: int) -> list[tuple]:
    """Rows of a name and so many numbers, which commas part."""
    parted = [row.split() for row in text.split(",")]
    return [(" ".join(row[:-numbers]), *map(float, row[-numbers:])) for row in parted]


def test_figures_of_devices_are_those_of_their_data_sheets():
    found = value_of("telemetry.peak_flops:PEAK_TFLOPS").items()
    assert [(name, one.get("bf16", 0), one["fp16"], one["fp32"]) for name, one in found] == rows(PEAKS, 3)
    assert [(name, *one) for name, one in value_of("planner.device:TABLE").items()] == rows(MEMORIES, 4)


@pytest.mark.parametrize(
    "driver, peak",
    [
        ("NVIDIA H100 PCIe", 756.5e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA GH200 480GB", 989.4e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("Tesla V100-SXM2-32GB", None),  # no bf16
    ],
)
def test_a_device_has_the_peak_of_its_own_row(driver, peak):
    assert value_of("telemetry.peak_flops:peak_flops")(driver, "bf16") == peak


# ---- shapes ----------------------------------------------------------------------------------------------------------

# Layers, width and heads: Radford et al. 2019; Brown et al. 2020, table 2.1; arXiv:2205.05198, table 3; arXiv:2104.04473,
# table 1; Zhang et al. 2020. What the name says: billions of parameters.
SHAPES = """
    gpt2-small 12 768 12 .124, gpt2-medium 24 1024 16 .355, gpt2-large 36 1280 20 .774, gpt2-xl 48 1600 25 1.558,
    125M 12 768 12 .125, 345M 24 1024 16 .355, 350M 24 1024 16 .355, 760M 24 1536 16 .76, 1.3B 24 2048 16 1.3,
    2.7B 32 2560 32 2.7, 6.7B 32 4096 32 6.7, 13B 40 5120 40 13, 22B 48 6144 64 22, 39B 48 8192 64 39.1,
    76B 60 10240 80 76.1, 145B 80 12288 96 145.6, 170B 96 12288 96 174.6, 175B 96 12288 96 174.6, 310B 96 16384 128 310.1,
    530B 105 20480 128 529.6, 1T 128 25600 160 1008, cpm-large-cn 32 2560 32 2.6, cpm-small-cn-distill 12 768 12 .109"""


def test_named_shapes_are_those_of_the_papers():
    found = value_of("settings.presets:SHAPES")
    assert [(name, *shape[:3]) for name, shape in found.items()] == [row[:4] for row in rows(SHAPES, 4)]
    for name, layers, width, _, billions in rows(SHAPES, 4):
        vocabulary, positions = 30_000 if name.startswith("cpm") else 51_200, found[name][3]
        total = 12 * layers * width**2 + 13 * layers * width + (vocabulary + positions) * width
        assert total / 1e9 == pytest.approx(billions, rel=0.05), name
    lengths = {name: shape[3] for name, shape in found.items() if shape[3] != 1024}
    assert lengths == {"13B": 4096} | dict.fromkeys("22B 39B 76B 145B 170B 175B 310B 530B 1T".split(), 2048)


# ---- defaults --------------------------------------------------------------------------------------------------------

# Megatron-LM's parser (core 0.16.1); what is not among them is off, or has none.
MEGATRON = """
    position_embedding_type=learned_absolute rotary_base=10000 rotary_percent=1.0 rope_scaling_factor=8.0
    rotary_scaling_factor=1.0 mscale=1.0 mscale_all_dim=0.0 normalization=LayerNorm norm_epsilon=1e-05 hidden_dropout=0.1
    attention_dropout=0.1 init_method_std=0.02 make_vocab_size_divisible_by=128 tensor_model_parallel_size=1
    pipeline_model_parallel_size=1 context_parallel_size=1 distributed_timeout_minutes=10 vocab_extra_ids=0
    split=969,30,1 num_workers=2 eval_interval=1000 eval_iters=100 optimizer=adam min_lr=0.0 lr_decay_style=linear
    lr_warmup_iters=0 lr_warmup_samples=0 lr_warmup_init=0.0 lr_wsd_decay_style=exponential weight_decay=0.01
    weight_decay_incr_style=constant clip_grad=1.0 adam_beta1=0.9 adam_beta2=0.999 adam_eps=1e-08 sgd_momentum=0.9
    lion_beta1=0.95 lion_beta2=0.98 muon_scale_mode=spectral muon_extra_scale_factor=1.0 muon_num_ns_steps=5
    muon_coefficient_type=quintic muon_fp32_matmul_prec=medium optimizer_offload_fraction=1.0
    initial_loss_scale=4294967296 min_loss_scale=1.0 loss_scale_window=1000 hysteresis=2 log_interval=100
    timing_log_level=0 timing_log_option=minmax seed=1234 profile_step_start=10 profile_step_end=12
    untie_embeddings_and_output_weights=False apply_query_key_layer_scaling=False attention_softmax_in_fp32=False
    sequence_parallel=False reset_position_ids=False reset_attention_mask=False eod_mask_loss=False swiglu=False
    qk_layernorm=False overlap_grad_reduce=False overlap_param_gather=False finetune=False async_save=False
    exit_signal_handler=False deterministic_mode=False muon_nesterov=False save_interval=None loss_scale=None
    lr_decay_iters=None lr_warmup_fraction=None window_size=None recompute_granularity=None decoupled_lr=None""".split()
# Its publications: Llama 3.1 (8192 positions, 1 and 4), YaRN (arXiv:2309.00071: 32 and 1), Muon's author (.95).
PAPERS = """
    rope_scaling_low_freq_factor=1.0 rope_scaling_high_freq_factor=4.0 yarn_beta_fast=32.0 yarn_beta_slow=1.0
    rope_scaling_original_max_position_embeddings=8192 yarn_original_max_position_embeddings=4096
    muon_momentum=0.95""".split()


@pytest.mark.parametrize("word", [*MEGATRON, *PAPERS])
def test_defaults_are_megatrons(word):
    name, _, wanted = word.partition("=")
    [found] = [f.default for group in schema.GROUPS.values() for f in fields(group) if f.name == name]
    if isinstance(found, (int, float)) and not isinstance(found, bool):
        assert found == float(wanted)
    else:
        assert str(found) == wanted


# Their documentation: transformers' TrainingArguments, DeepSpeed's and Colossal-AI's pages, PaddleNLP's arguments.
THEIRS = {
    "settings.dialects.hf_trainer:HF_TRAINER": """--lr 5e-5, --weight-decay 0, --micro-batch-size 8,
        --log-interval 500, --save-interval 500, --seed 42, --eval-iters 0, --train-epochs 3, --dataloader-type cyclic""",
    "settings.dialects.deepspeed:DEEPSPEED": """--clip-grad 0, --weight-decay 0, --lr-warmup-iters 1000,
        --lr-warmup-iters 1000, --lr-warmup-iters 1000""",
    "settings.dialects.colossalai:COLOSSALAI": "--seed 1024, --clip-grad 0",
    "settings.dialects.commands:PADDLENLP": """--lr 1e-4, --min-lr 1e-5, --lr-decay-style cosine, --lr-decay-iters 360000,
        --lr-warmup-fraction 0.01, --weight-decay 0, --clip-grad 0, --micro-batch-size 8, --train-iters 500000,
        --log-interval 1, --eval-interval 500, --eval-iters 10, --test-iters 100, --save-interval 500, --split 949;50;1""",
}


@pytest.mark.parametrize("dialect", THEIRS)
def test_defaults_of_other_suites_are_theirs(dialect):
    wanted = [tuple(row.replace(";", ",").split()) for row in THEIRS[dialect].split(",")]
    assert [(one.flag, one.word) for one in value_of(dialect).defaults] == wanted


def test_exit_codes_are_those_of_the_documents():
    """docs/proof/reliability.md; and which of them a supervisor tries again."""
    actions = {code: value_of("guard.exits:judge")([code]).action.value for code in value_of("guard.exits:MEANINGS")}
    stop = dict.fromkeys((2, 3, 4, 5, 8, 10), "stop")
    others = {
        0: "done",
        1: "restart",
        6: "restart",
        7: "restart",
        9: "preempted",
        11: "replace",
        16: "restart",
        17: "replace",
        130: "preempted",
    }
    assert actions == others | stop
