# SPDX-License-Identifier: Apache-2.0
"""Named shapes beside the config.json of the models, written down again here in Hugging Face's words, and their vocabulary
wherever a name is used: planning, printed commands, counts of parameters, runs.
"""

import re
import shlex
from dataclasses import fields

import pytest

from megatron.errors import UsageError
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.hf_settings import our_settings
from megatron.model.recipe import facts_of
from megatron.planner.target import vocabulary_of
from megatron.settings.decoder_shapes import DECODERS, ROWS
from megatron.settings.from_checkpoint import shape_of
from megatron.settings.parse import parse_pretrain
from megatron.settings.presets import NAMES, SHAPES, known, preset, published_rows
from megatron.settings.schema import Model
from megatron.tokenizer.embedding_rows import rows_of
from megatron.tools import plan
from megatron.training.datasets import build_vocabulary

SIZES = "vocab_size num_hidden_layers hidden_size num_attention_heads num_key_value_heads head_dim intermediate_size"
ROPE_3_1 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
LLAMA = dict(model_type="llama", rms_norm_eps=1e-5, rope_theta=10000.0, hidden_act="silu", tie_word_embeddings=False)
LLAMA_3 = dict(LLAMA, rope_theta=500000.0)
LLAMA_3_1 = dict(LLAMA_3, max_position_embeddings=131072, rope_scaling=ROPE_3_1)
LLAMA_3_2 = dict(LLAMA_3_1, rope_scaling=dict(ROPE_3_1, factor=32.0), tie_word_embeddings=True)
MISTRAL = dict(LLAMA, model_type="mistral", max_position_embeddings=32768)
QWEN_2 = dict(LLAMA, model_type="qwen2", rms_norm_eps=1e-6, rope_theta=1000000.0, use_sliding_window=False)
QWEN_3 = dict(QWEN_2, model_type="qwen3", max_position_embeddings=40960)
GEMMA_2 = dict(
    model_type="gemma2",
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    hidden_activation="gelu_pytorch_tanh",
    query_pre_attn_scalar=256,
    sliding_window=4096,
    attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
    max_position_embeddings=8192,
)
SHORT, LONG = dict(max_position_embeddings=32768), dict(max_position_embeddings=131072)
TIED, COARSE = dict(tie_word_embeddings=True), dict(rms_norm_eps=1e-5)

LATENT = dict(LLAMA, rms_norm_eps=1e-6, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, kv_lora_rank=512)
YARN = dict(type="yarn", beta_fast=32, beta_slow=1, original_max_position_embeddings=4096)
V2_LITE = dict(
    LATENT,
    model_type="deepseek_v2",
    q_lora_rank=None,
    max_position_embeddings=163840,
    rope_scaling=dict(YARN, factor=40, mscale=0.707, mscale_all_dim=0.707),
    **dict(n_routed_experts=64, n_shared_experts=2, num_experts_per_tok=6, moe_intermediate_size=1408),
    **dict(first_k_dense_replace=1, topk_method="greedy", scoring_func="softmax", routed_scaling_factor=1.0),
)
V3 = dict(
    LATENT,
    model_type="deepseek_v3",
    q_lora_rank=1536,
    max_position_embeddings=163840,
    rope_scaling=dict(YARN, factor=40, mscale=1.0, mscale_all_dim=1.0),
    **dict(n_routed_experts=256, n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048),
    **dict(first_k_dense_replace=3, topk_method="noaux_tc", scoring_func="sigmoid", routed_scaling_factor=2.5),
    **dict(n_group=8, topk_group=4, norm_topk_prob=True),
)
KIMI_K2 = V3 | dict(
    model_type="kimi_k2",
    max_position_embeddings=131072,
    rope_theta=50000.0,
    rope_scaling=dict(YARN, factor=32.0, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0),
    **dict(n_routed_experts=384, first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.827),
)
GEMMA_3 = GEMMA_2 | dict(
    model_type="gemma3_text",
    rope_theta=1000000.0,
    rope_local_base_freq=10000,
    sliding_window_pattern=6,
    attn_logit_softcapping=None,
    final_logit_softcapping=None,
)
GEMMA_3_SHORT = GEMMA_3 | dict(sliding_window=512, max_position_embeddings=32768)
GEMMA_3_LONG = GEMMA_3 | dict(
    sliding_window=1024, max_position_embeddings=131072, rope_scaling=dict(rope_type="linear", factor=8.0)
)
NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"
NEMOTRON_3 = dict(
    model_type="nemotron_h",
    hybrid_override_pattern=NANO,
    max_position_embeddings=262144,
    tie_word_embeddings=False,
    **dict(mamba_num_heads=64, mamba_head_dim=64, ssm_state_size=128, n_groups=8, layer_norm_epsilon=1e-5),
    **dict(n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, norm_topk_prob=True),
    **dict(moe_shared_expert_intermediate_size=3712, n_shared_experts=1, routed_scaling_factor=2.5),
    **dict(n_group=1, topk_group=1, mlp_hidden_act="relu2", residual_in_fp32=False, rope_theta=10000),
)
FALCON_H1 = dict(
    model_type="falcon_h1",
    max_position_embeddings=16384,
    rope_theta=1e11,
    tie_word_embeddings=False,
    **dict(mamba_d_ssm=1536, mamba_n_heads=24, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1),
    **dict(mamba_rms_norm=False, mamba_norm_before_gate=False, mamba_chunk_size=128, mamba_use_mlp=True),
    **dict(embedding_multiplier=5.656854249492381, lm_head_multiplier=0.0390625, key_multiplier=0.39062499999999994),
    **dict(attention_in_multiplier=1.0, attention_out_multiplier=0.9375, ssm_in_multiplier=1.25),
    ssm_out_multiplier=0.23570226039551587,
    mlp_multipliers=[0.8838834764831844, 0.5859375],
    ssm_multipliers=[0.3535533905932738, 0.25, 0.3535533905932738, 0.5, 0.3535533905932738],
)

# Name: sizes (`SIZES`), parameters as the repository on the hub counts them, the rest of config.json
PUBLISHED = {
    "llama-2-7b": (32000, 32, 4096, 32, 32, 128, 11008, 6_738_415_616, LLAMA | dict(max_position_embeddings=4096)),
    "llama-2-13b": (32000, 40, 5120, 40, 40, 128, 13824, 13_015_864_320, LLAMA | dict(max_position_embeddings=4096)),
    "llama-2-70b": (32000, 80, 8192, 64, 8, 128, 28672, 68_976_648_192, LLAMA | dict(max_position_embeddings=4096)),
    "llama-3-8b": (128256, 32, 4096, 32, 8, 128, 14336, 8_030_261_248, LLAMA_3 | dict(max_position_embeddings=8192)),
    "llama-3-70b": (128256, 80, 8192, 64, 8, 128, 28672, 70_553_706_496, LLAMA_3 | dict(max_position_embeddings=8192)),
    "llama-3.1-8b": (128256, 32, 4096, 32, 8, 128, 14336, 8_030_261_248, LLAMA_3_1),
    "llama-3.1-70b": (128256, 80, 8192, 64, 8, 128, 28672, 70_553_706_496, LLAMA_3_1),
    "llama-3.1-405b": (128256, 126, 16384, 128, 8, 128, 53248, 405_853_388_800, LLAMA_3_1),
    "llama-3.2-1b": (128256, 16, 2048, 32, 8, 64, 8192, 1_235_814_400, LLAMA_3_2),
    "llama-3.2-3b": (128256, 28, 3072, 24, 8, 128, 8192, 3_212_749_824, LLAMA_3_2),
    "llama-3.3-70b": (128256, 80, 8192, 64, 8, 128, 28672, 70_553_706_496, LLAMA_3_1),
    "mistral-7b-v0.1": (32000, 32, 4096, 32, 8, 128, 14336, 7_241_732_096, MISTRAL | dict(sliding_window=4096)),
    "mistral-7b-v0.3": (
        *(32768, 32, 4096, 32, 8, 128, 14336, 7_248_023_552),
        MISTRAL | dict(sliding_window=None, rope_theta=1000000.0),
    ),
    "qwen2.5-0.5b": (151936, 24, 896, 14, 2, 64, 4864, 494_032_768, QWEN_2 | SHORT | TIED),
    "qwen2.5-1.5b": (151936, 28, 1536, 12, 2, 128, 8960, 1_543_714_304, QWEN_2 | LONG | TIED),
    "qwen2.5-3b": (151936, 36, 2048, 16, 2, 128, 11008, 3_085_938_688, QWEN_2 | SHORT | TIED),
    "qwen2.5-7b": (152064, 28, 3584, 28, 4, 128, 18944, 7_615_616_512, QWEN_2 | LONG),
    "qwen2.5-14b": (152064, 48, 5120, 40, 8, 128, 13824, 14_770_033_664, QWEN_2 | LONG | COARSE),
    "qwen2.5-32b": (152064, 64, 5120, 40, 8, 128, 27648, 32_763_876_352, QWEN_2 | LONG | COARSE),
    "qwen2.5-72b": (152064, 80, 8192, 64, 8, 128, 29568, 72_706_203_648, QWEN_2 | LONG | COARSE),
    "qwen3-0.6b": (151936, 28, 1024, 16, 8, 128, 3072, 596_049_920, QWEN_3 | TIED),
    "qwen3-1.7b": (151936, 28, 2048, 16, 8, 128, 6144, 1_720_574_976, QWEN_3 | TIED),
    "qwen3-4b": (151936, 36, 2560, 32, 8, 128, 9728, 4_022_468_096, QWEN_3 | TIED),
    "qwen3-8b": (151936, 36, 4096, 32, 8, 128, 12288, 8_190_735_360, QWEN_3),
    "qwen3-14b": (151936, 40, 5120, 40, 8, 128, 17408, 14_768_307_200, QWEN_3),
    "qwen3-32b": (151936, 64, 5120, 64, 8, 128, 25600, 32_762_123_264, QWEN_3),
    "gemma-2-2b": (256000, 26, 2304, 8, 4, 256, 9216, 2_614_341_888, GEMMA_2),
    "gemma-2-9b": (256000, 42, 3584, 16, 8, 256, 14336, 9_241_705_984, GEMMA_2),
    "gemma-2-27b": (*(256000, 46, 4608, 32, 16, 128, 36864, 27_227_128_320), GEMMA_2 | dict(query_pre_attn_scalar=144)),
    "deepseek-v2-lite": (102400, 27, 2048, 16, 16, 64, 10944, 15_706_484_224, V2_LITE),
    # Without the layer of its files that predicts a second token; the biases of experts are no parameters here.
    "deepseek-v3": (129280, 61, 7168, 128, 128, 64, 18432, 671_026_404_352, V3),
    # Those of Gemma 3 without vision towers: embedding and others as in arXiv:2503.19786, table 1.
    "gemma-3-270m": (262144, 18, 640, 4, 1, 256, 2048, 268_098_176, GEMMA_3_SHORT),
    "gemma-3-1b": (262144, 26, 1152, 4, 1, 256, 6912, 999_885_952, GEMMA_3_SHORT),
    "gemma-3-4b": (262208, 34, 2560, 8, 4, 256, 10240, 3_880_263_168, GEMMA_3_LONG),
    "gemma-3-12b": (262208, 48, 3840, 16, 8, 256, 15360, 11_766_034_176, GEMMA_3_LONG),
    "gemma-3-27b": (
        *(262208, 62, 5376, 32, 16, 128, 21504, 27_009_346_304),
        GEMMA_3_LONG | dict(query_pre_attn_scalar=168),
    ),
    "nemotron-3-nano-30b-a3b": (131072, 52, 2688, 32, 2, 128, 1856, 31_577_937_344, NEMOTRON_3),
    "falcon-h1-0.5b": (32784, 36, 1024, 8, 2, 64, 2048, 521_411_104, FALCON_H1),
    "kimi-k2": (163840, 61, 7168, 64, 64, 64, 18432, 1_026_408_209_408, KIMI_K2),
}
FREE = {"model_name_or_path", "init_method_std", "num_query_groups"}  # the last has an effect as `query_groups`


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_setting_is_that_of_config_json(name):
    *sizes, parameters, rest = PUBLISHED[name]
    _, theirs, rows = our_settings(dict(zip(SIZES.split(), sizes, strict=True)) | rest)
    ours = Model(**preset(name.upper()))
    names = {field.name for field in fields(Model)} - FREE | {"query_groups"}
    other = [one for one in names if getattr(ours, one) != getattr(theirs, one)]
    assert not other and rows == published_rows(name) == ROWS[name]
    assert GPTFacts(ours, rows).parameters == parameters


@pytest.mark.parametrize(
    "name, cls, others",
    [
        ("llama-2-7b", "LlamaConfig", {}),
        ("mistral-7b-v0.1", "MistralConfig", {}),
        ("gemma-2-2b", "Gemma2Config", {}),
        ("phi-3-mini-4k", "Phi3Config", {}),
        ("mixtral-8x7b", "MixtralConfig", {}),
        ("gpt-oss-120b", "GptOssConfig", {}),
        ("olmoe-1b-7b", "OlmoeConfig", dict(intermediate_size=1024)),
        ("qwen3-30b-a3b", "Qwen3MoeConfig", dict(num_hidden_layers=48)),
        ("olmo-2-7b", "Olmo2Config", dict(vocab_size=100352)),
        ("gpt2-small", "GPT2Config", {}),
    ],
)
def test_sizes_are_those_of_transformers_classes(name, cls, others):
    """Their defaults are a published model. others: where the class has another model's."""
    transformers = pytest.importorskip("transformers")
    c = getattr(transformers, cls)().to_dict() | others
    theirs = dict(
        num_layers=c.get("num_hidden_layers", c.get("n_layer")),
        hidden_size=c.get("hidden_size", c.get("n_embd")),
        num_attention_heads=c.get("num_attention_heads", c.get("n_head")),
        query_groups=c.get("num_key_value_heads") or c["n_head"],
        ffn_size=c.get("intermediate_size") or 4 * c["n_embd"],
        moe_router_topk=c.get("num_experts_per_tok", 2),
    )
    ours = Model(**preset(name))
    assert {size: getattr(ours, size) for size in theirs} == theirs
    assert published_rows(name) == c["vocab_size"]


def test_every_name_has_a_vocabulary():
    assert all(published_rows(name) for name in NAMES) and not published_rows("gpt5") and not published_rows(None)
    assert set(ROWS) == set(DECODERS)
    of_gpt = {published_rows(name) for name in SHAPES}
    assert of_gpt == {50257, 51200, 30000} and published_rows("gpt3-175B") == 50257 and published_rows("1T") == 51200


def test_short_names():
    """7B is the 6.7B of GPT-3; what may be several models is none, and the message has them."""
    assert known("7B") == known("gpt3-7B") == known("6.7b") == "6.7B" and known("Mistral-7B") == "mistral-7b-v0.1"
    for name, near in {"70B": "llama-2-70b, llama-3-70b", "llama-3-7b": "llama-3-70b", "32b": "qwen2.5-32b"}.items():
        with pytest.raises(UsageError, match=f"{name}: neither a folder nor a known shape; did you mean {near}"):
            parse_pretrain(f"--model-name-or-path {name} --mock-data".split())


# ---- wherever a name is used -----------------------------------------------------------------------------------------

RUN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3"


@pytest.mark.sampled(5)
@pytest.mark.parametrize("words", ["--mock-data", "", "--tokenizer-type NullTokenizer", "--data-path x"])
@pytest.mark.parametrize("name", ["qwen2.5-7b", "llama-3-8b", "gpt2", "22B", "gpt-cpm-large-cn"])
def test_a_name_has_its_vocabulary(name, words):
    config = parse_pretrain(f"--model-name-or-path {name} {words} {RUN}".split())
    rows = published_rows(name)
    assert vocabulary_of(config) == (rows, "")
    assert facts_of(config, rows).parameters == GPTFacts(Model(**preset(name)), rows).parameters


def test_the_users_vocabulary_counts():
    config = parse_pretrain(f"--model-name-or-path qwen2.5-7b --vocab-size 999 --mock-data {RUN}".split())
    assert vocabulary_of(config) == (1000, "vocabulary 1000: --vocab-size 999, and the end of documents")
    lost = parse_pretrain(f"--model-name-or-path qwen2.5-7b --tokenizer-model gone.json {RUN}".split())
    assert vocabulary_of(lost) == (152064, "gone.json is not here: qwen2.5-7b's 152064 tokens are assumed")


PLAN = (
    "--world-size 8 --device-name H100 --model-name-or-path qwen2.5-7b --seq-length 4096 --bf16 --global-batch-size 64 "
    "--tp 1 --sharding-stage 1 --micro-batch-size 1"
)


@pytest.mark.parametrize("words", ["--mock-data", "", "--tokenizer-model gone.json"])
def test_a_plan_and_its_command_are_for_this_vocabulary(words, capsys):
    """Its settings are read again as they were planned, and a tokenizer may be added."""
    plan.main(f"{PLAN} --top 1 {words}".split())
    shown = capsys.readouterr().out
    assert "7.6 B parameters" in shown and "vocabulary 152064" in " ".join(shown.split())
    command = re.search(r"^torchrun .*?pretrain_gpt.py(.*?)\n\n|^torchrun .*?pretrain_gpt.py(.*)\Z", shown, re.S | re.M)
    flags = shlex.split((command[1] or command[2]).replace("\\\n", " "))
    again, asked = parse_pretrain(flags), parse_pretrain(f"{PLAN} {words}".split())
    assert vocabulary_of(again)[0] == 152064 and again.model == asked.model
    if not words:
        of_texts = parse_pretrain([*flags, "--tokenizer-model", "gone.json", "--data-path", "x"])
        assert vocabulary_of(of_texts)[0] == 152064


def test_another_vocabulary_is_another_plan(capsys):
    """As --vocab-size says it, and not with the tokens of GPT-2."""
    layouts = []
    for words in ("", "--vocab-size 152063", "--vocab-size 50256"):
        plan.main(f"{PLAN} --top 1 {words}".split())
        layouts.append(re.search(r"layout: (.*)", capsys.readouterr().out)[1])
    assert layouts[0] == layouts[1] != layouts[2]


# ---- a run with a tokenizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, rows, said",
    [
        (152064, 152064, ""),
        (151665, 152064, "the tokenizer has 151665 tokens, and the embedding has the 152064 rows of qwen2.5-7b"),
        (143120, 152064, "and the embedding has the 152064 rows"),  # a sixteenth may be padding; one row more may not
        (
            143119,
            143119,
            "the tokenizer has 143119 tokens, and so has the embedding; that of qwen2.5-7b has 152064 rows",
        ),
        (152065, 152065, "and so has the embedding"),
        (8192, 8192, "and so has the embedding"),
    ],
)
def test_a_run_says_if_the_tokenizer_differs(tokens, rows, said):
    settings = parse_pretrain(f"--model-name-or-path qwen2.5-7b --tokenizer-model x.json {RUN}".split())
    found, note = rows_of(settings.tokenizer, tokens, shape=settings.model.published_shape)
    assert found == rows and said in note and bool(said) == bool(note)


def test_a_run_logs_it_and_a_checkpoint_knows_its_rows(tmp_path):
    """A run that takes its shape and tokenizer from a checkpoint has as many rows as the one that wrote it."""
    (tmp_path / "vocab.txt").write_text("[UNK]\n" + "".join(f"w{n}\n" for n in range(49_999)))
    words = f"--model-name-or-path gpt2 --tokenizer-type BertTokenizer --vocab-file {tmp_path}/vocab.txt {RUN}"
    config, lines = parse_pretrain([*words.split(), "--data-path", "x"]), []
    assert build_vocabulary(config, lines.append)[1] == 50257
    assert "note: the tokenizer has 50000 tokens, and the embedding has the 50257 rows of gpt2" in lines
    shape = shape_of(dict(config=config.to_record(), vocab_size=50257), {}, set())
    later = Model(**{name: value for name, value in shape.items() if name in Model.__dataclass_fields__})
    assert later.published_shape == "gpt2" and rows_of(config.tokenizer, 50000, shape=later.published_shape)[0] == 50257
