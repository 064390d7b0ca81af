# SPDX-License-Identifier: Apache-2.0
"""Mamba-2, Nemotron-H and Falcon-H1 of Hugging Face, with random weights, over more than two chunks of odd length: logits
over ranks, gradients, packed documents are transformers' own, and tensors come back; what cannot be read is refused.
"""

import json
import warnings

import pytest
import torch
import torch.nn.functional as F

import pretrain_hybrid
from megatron.convert.families import adapted, imported
from megatron.convert.hf_files import TensorFiles
from megatron.data.loader import MicroBatch
from megatron.errors import CheckpointError, Failure, SettingsError
from megatron.inference.generation import generate
from megatron.inference.load import load_model
from megatron.inference.sampling import Sampling
from megatron.model.gpt.facts import GPTFacts
from megatron.model.gpt.hf_hybrid import ANY_STEP
from megatron.model.gpt.hf_settings import our_settings
from megatron.mpu.mesh import Mesh
from megatron.settings.presets import preset, published_rows
from megatron.settings.schema import Model
from megatron.tools import checkpoint as tool
from tests.inference.test_convert import loaded
from tests.inference.test_families import gradients_by_name
from tests.models.test_scan_layouts import LINE

transformers = pytest.importorskip("transformers")

V, S, B = 96, 301, 2
COMMON = dict(vocab_size=V, hidden_size=32, bos_token_id=None, eos_token_id=None, pad_token_id=None)
FALCON = dict(
    num_hidden_layers=2,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=12,
    max_position_embeddings=512,
    mamba_d_ssm=48,
    mamba_n_heads=6,
    mamba_n_groups=2,
    mamba_d_state=10,
    mamba_norm_before_gate=False,
    rope_parameters=dict(rope_type="default", rope_theta=1e11),
)
MULTIPLIERS = dict(
    embedding_multiplier=5.65,
    lm_head_multiplier=0.3,
    key_multiplier=0.39,
    attention_in_multiplier=1.25,
    attention_out_multiplier=0.9375,
    ssm_in_multiplier=1.2,
    ssm_out_multiplier=0.35,
    mlp_multipliers=[0.88, 0.59],
    ssm_multipliers=[0.7, 0.5, 0.8, 1.5, 0.35],
)
CASES = {
    "mamba2": dict(num_hidden_layers=3, num_heads=16, head_dim=4, state_size=6, n_groups=2, tie_word_embeddings=True),
    "falcon_h1": FALCON | MULTIPLIERS,
    "falcon_h1 tied": FALCON | MULTIPLIERS | dict(tie_word_embeddings=True, mamba_rms_norm=True),
    "falcon_h1 plain": FALCON | dict(mamba_rms_norm=True, mamba_norm_before_gate=True),
    "nemotron_h": dict(
        n_groups=2,
        layers_block_type=["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        mamba_num_heads=6,
        mamba_head_dim=8,
        ssm_state_size=10,
        time_step_min=ANY_STEP,
    ),
}
NEMOTRON = CASES["nemotron_h"]
CASES["nemotron_h experts"] = NEMOTRON | dict(
    layers_block_type=["linear_attention", "moe", "full_attention", "moe"],
    n_routed_experts=8,
    num_experts_per_tok=3,
    moe_intermediate_size=20,
    moe_shared_expert_intermediate_size=28,
    moe_latent_size=12,
    routed_scaling_factor=2.5,
)
CASES["nemotron_h groups"] = CASES["nemotron_h experts"] | dict(moe_latent_size=None, n_group=4, topk_group=2)
LETTERS = {"mamba2": "MMM", "nemotron_h": "M-*M-"}
LETTERS |= dict.fromkeys(("nemotron_h experts", "nemotron_h groups"), "ME*E")
LETTERS |= dict.fromkeys((name for name in CASES if "falcon" in name), "P-P-")
MULTIPLIED = {name for name in CASES if "key_multiplier" in CASES[name]}
KINDS = pytest.mark.parametrize("kind", CASES)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """`family(kind)`: (transformers' model, its folder, the folder of our import)."""
    made = {}

    def make(kind):
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            config = transformers.AutoConfig.for_model(kind.split()[0], **COMMON, **CASES[kind])
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            generator = torch.Generator().manual_seed(7)
            with torch.no_grad():
                for name, parameter in theirs.named_parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    wide = parameter.dim() > 1 and "conv1d" not in name
                    parameter.copy_(0.15 * noise if wide else parameter + 0.2 * noise)
                for name, buffer in theirs.named_buffers():
                    if "correction_bias" in name:
                        buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))
            theirs.save_pretrained(folder / "theirs")
            tool.main(["from-hf", str(folder / "theirs"), str(folder / "ours")])
            made[kind] = theirs, folder / "theirs", folder / "ours"
        return made[kind]

    return make


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(V, (S, B), generator=torch.Generator().manual_seed(seed))


def assert_near(found: torch.Tensor, want: torch.Tensor, name: str = ""):
    error = (found - want).abs().max() / want.abs().max()
    assert error < 2e-5, f"{name}: {error:.1e}"


@pytest.mark.sampled(10)
@KINDS
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 1), (2, 2)])
def test_logits_over_ranks(kind, tp, pp, family, run_ranks):
    theirs, _, ours = family(kind)
    with torch.no_grad():
        want = theirs(tokens().t()).logits.transpose(0, 1)
        assert want.abs().max() > 0.3
        run = lambda rank: load_model(str(ours), mesh=Mesh(rank, tp=tp, pp=pp)).model.logits(tokens())
        *_, found = run_ranks(tp * pp, run) if tp * pp > 1 else [run(0)]
    assert_near(found, want)


@pytest.mark.sampled(5)
@KINDS
def test_gradients(kind, family, tmp_path):
    """A weight that has a multiplier is that many times theirs, and its gradient so many times smaller."""
    theirs, folder, ours = family(kind)
    model = load_model(str(ours)).model.train()
    inputs, labels = tokens(), tokens(seed=2)
    theirs.zero_grad()
    F.cross_entropy(theirs(inputs.t()).logits.reshape(-1, V), labels.t().reshape(-1)).backward()
    sums = model(None, MicroBatch(inputs, labels, torch.arange(B)))[1]
    (sums["lm loss"] / sums["tokens"]).backward()
    found, wanted = dict(model.named_parameters()), gradients_by_name(theirs, tmp_path)
    matches = imported(json.loads((folder / "config.json").read_text())).matches
    assert {match.ours for match in matches} == set(found) | set(dict(model.named_buffers(remove_duplicate=False)))
    for match in [one for one in matches if one.ours in found]:
        want = [wanted.get(name) for name in match.theirs]
        want = match.to_ours(want) / match.to_ours([torch.ones_like(one) for one in want]).square()
        assert_near(found[match.ours].grad[: len(want)], want, match.ours)


@pytest.mark.sampled(2)
@KINDS
def test_packed_documents_are_each_alone(kind, family):
    """In training and in scores: no state, tap or key crosses a start."""
    theirs, _, ours = family(kind)
    model, begins, inputs = load_model(str(ours)).model, [0, 1, 3, 127, 128, 130, 256, 300], tokens()
    ids = torch.bucketize(torch.arange(S), torch.tensor(begins), right=True).unsqueeze(1).expand(S, B)
    with torch.no_grad():
        parts = inputs.tensor_split(begins[1:])
        want = torch.cat([theirs(part.t()).logits.transpose(0, 1) for part in parts])
        assert_near(model.logits(inputs, document_ids=ids), want)
        labels, count = tokens(seed=2), S * B
        batch = MicroBatch(inputs, labels, torch.arange(B), document_ids=ids)
        loss = model(None, batch)[1]["lm loss"] / count
        torch.testing.assert_close(loss, F.cross_entropy(want.reshape(-1, V), labels.reshape(-1)), rtol=1e-5, atol=0)


@pytest.mark.sampled(10)
@KINDS
@pytest.mark.parametrize("tp, pp", [(1, 1), (2, 2)])
def test_greedy_texts(kind, tp, pp, family, run_ranks):
    """Of prompts of different lengths, one longer than a chunk, with states of texts."""
    theirs, _, ours = family(kind)
    prompts = [tokens(seed=3)[:200, 0].tolist(), tokens(seed=4)[:7, 0].tolist()]

    def continued(rank):
        model = load_model(str(ours), mesh=Mesh(rank, tp=tp, pp=pp)).model
        more = dict(pp=model.pp) if pp > 1 else {}
        return generate(model, prompts, Sampling(20, greedy=True), longest=256, **more)

    texts = run_ranks(tp * pp, continued)[0] if tp * pp > 1 else continued(0)
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        want = theirs.generate(ids, max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(ids))
        assert text == want[0, len(prompt) :].tolist()


@pytest.mark.sampled(5)
@KINDS
def test_there_and_back(kind, family, tmp_path, capsys):
    """The same family with the same settings, and the same tensors."""
    theirs, folder, ours = family(kind)
    capsys.readouterr()
    tool.main(["to-hf", str(ours), str(tmp_path / "out"), "--dtype", "fp32"])
    assert "both models agree" in capsys.readouterr().out
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    before, after = theirs.state_dict(), again.state_dict()
    assert set(before) == set(after) and type(again) is type(theirs)
    if kind in MULTIPLIED:
        with torch.no_grad():
            assert_near(again(tokens().t()).logits, theirs(tokens().t()).logits)
    else:
        assert all(tensor.equal(after[name]) for name, tensor in before.items())
    old, new = (json.loads((place / "config.json").read_text()) for place in (folder, tmp_path / "out"))
    ignored = {"residual_in_fp32", "transformers_version", *MULTIPLIERS}
    assert kind not in MULTIPLIED or new["key_multiplier"] == 1.0
    assert {name for name in old if name in new and new[name] != old[name]} <= ignored
    assert our_settings(new)[1].letters == LETTERS[kind]
    tool.main(["from-hf", str(tmp_path / "out"), str(tmp_path / "back")])
    assert all(tensor.equal(loaded(ours)[name]) for name, tensor in loaded(tmp_path / "back").items())


def test_numbers_of_the_scan_are_fp32_in_files(family, tmp_path):
    """Of an export in bf16, which loses nothing of the rates."""
    theirs, _, ours = family("nemotron_h")
    tool.main(["to-hf", str(ours), str(tmp_path / "out"), "--dtype", "bf16"])
    files = TensorFiles(tmp_path / "out")
    for name in ("A_log", "dt_bias", "D"):
        want = theirs.state_dict()[f"model.layers.0.mixer.{name}"]
        assert files.get(f"backbone.layers.0.mixer.{name}").equal(want), name
    assert files.get("backbone.layers.0.mixer.in_proj.weight").dtype == torch.bfloat16


OTHER = {
    "layers_block_type": (["linear_attention", "rnn"], "layers of rnn"),
    "use_conv_bias": (False, "use_conv_bias"),
    "conv_kernel": (3, "conv_kernel"),
    "mlp_hidden_act": ("silu", "mlp_hidden_act"),
    "time_step_limit": ([0.01, 0.1], "time_step_limit"),
}


@pytest.mark.parametrize("key", OTHER)
def test_what_cannot_be_expressed_is_refused(key, family):
    _, folder, _ = family("nemotron_h")
    value, said = OTHER[key]
    config = json.loads((folder / "config.json").read_text()) | {key: value}
    with pytest.raises(CheckpointError, match=said):
        our_settings(config)


def test_published_words_of_old_files():
    """Files of 2025 have a pattern, and name the width of heads otherwise."""
    config = COMMON | CASES["nemotron_h"] | dict(model_type="nemotron_h", hybrid_override_pattern="M-*M")
    config |= dict(attention_head_dim=12, conv_kernel=4)
    del config["layers_block_type"], config["head_dim"]
    model = our_settings(config)[1]
    assert (model.letters, model.kv_channels, model.num_layers) == ("M-*M", 12, 4)


def test_the_published_shape_has_the_parameters_of_transformers_class():
    """Nemotron-H 8B in the words of its config.json: 24 Mamba-2 layers, 24 MLPs, 4 of attention."""
    sizes = dict(hidden_size=4096, intermediate_size=21504, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    sizes |= dict(mamba_num_heads=128, mamba_head_dim=64, ssm_state_size=128, n_groups=8, vocab_size=131072)
    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    config = transformers.NemotronHConfig(**sizes, hybrid_override_pattern=pattern, max_position_embeddings=8192)
    with torch.device("meta"):
        theirs = transformers.NemotronHForCausalLM(config)
    ours = Model(**preset("nemotron-h-8b"))
    assert ours.letters == pattern and our_settings(json.loads(config.to_json_string()))[1].letters == pattern
    assert GPTFacts(ours, published_rows("nemotron-h-8b")).parameters == theirs.num_parameters()


def test_adapters_for_weights_without_multipliers_are_refused(family):
    _, _, ours = family("falcon_h1")
    with pytest.raises(SettingsError, match="adapters of a falcon_h1 are not converted"):
        adapted(load_model(str(ours)).config, V)


@pytest.mark.parametrize("name, value", [("key_multiplier", 0.0), ("ssm_multipliers", [1.0] * 4), ("mlp_bias", True)])
def test_what_no_weight_can_express_is_refused(name, value, family):
    _, folder, _ = family("falcon_h1")
    config = json.loads((folder / "config.json").read_text()) | {name: value}
    with pytest.raises(CheckpointError, match=f"{name} .* cannot be expressed here"):
        imported(config)


@pytest.mark.parametrize(
    "words, said",
    [
        ("P-", "(?s)with mixers beside each other is not exported.*-> .*to-hf"),
        ("M- --no-mamba-rms-norm", "with mamba_rms_norm is not"),
    ],
)
def test_megatron_lm_has_none_of_it(words, said, tmp_path):
    pretrain_hybrid.main(f"{LINE} --hybrid-layer-pattern {words} --save {tmp_path} --train-iters 1".split())
    with pytest.raises(Failure, match=said):
        tool.main(["to-megatron", str(tmp_path), str(tmp_path / "out")])


def test_other_patterns_are_refused_by_name(tmp_path):
    line = f"{LINE} --hybrid-layer-pattern M*- --save {tmp_path} --train-iters 1"
    pretrain_hybrid.main(line.split())
    said = r"(?s)--hybrid-layer-pattern M\*-: .*not Nemotron-H: .*no --squared-relu.*--untie-embeddings-and-output-wei"
    with pytest.raises(Failure, match=said):
        tool.main(["to-hf", str(tmp_path), str(tmp_path / "hf")])
