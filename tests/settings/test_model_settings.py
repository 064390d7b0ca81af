# SPDX-License-Identifier: Apache-2.0
"""The settings of the network: every one of them against a transformer written down plainly, at other values."""

import math

import pytest
import torch
import torch.nn.functional as F

import pretrain_gpt
from megatron.errors import SettingsError, UsageError
from megatron.model.context import ForwardContext
from megatron.model.kinds.attention.module import scaled_dot_product_attention
from megatron.model.recipe import named_recipe
from megatron.settings.parse import parse_pretrain
from megatron.settings.schema import Model
from megatron.training.loss import make_loss_func

FP16 = torch.float16
V, S, B = 101, 16, 3  # 100 numbers, and the end of document that NullTokenizer adds


# ---- the plain transformer -------------------------------------------------------------------------------------------


def shapes(
    layers=2,
    h=32,
    heads=4,
    d=None,
    groups=None,
    ffn=None,
    norm="LayerNorm",
    bias=True,
    gated=False,
    qk_norm=False,
    positions=S,
    tied=True,
    rows=128,
    across=False,
    qkv_bias=False,
    before=True,
    after=False,
    sink="",
    gate=False,
):
    """Name -> shape of every weight that a GPT of these sizes has."""
    groups, d, ffn = groups or heads, d or h // heads, ffn or 4 * h
    found = {"embedding.word.weight": (rows, h)}
    norms = {"final_norm": h}
    if positions:
        found["embedding.position.weight"] = (positions, h)
    if not tied:
        found["output.weight"] = (rows, h)
    for n in range(layers):
        block = f"blocks.{n}"
        if before:
            norms |= {f"{block}.attention_norm": h, f"{block}.mlp_norm": h}
        if after:
            norms |= {f"{block}.post_attention_norm": h, f"{block}.post_mlp_norm": h}
        if across:
            found[f"{block}.attention.q_norm.weight"] = (groups, heads // groups, d)
            found[f"{block}.attention.k_norm.weight"] = (groups, 1, d)
        elif qk_norm:
            norms |= {f"{block}.attention.q_norm": d, f"{block}.attention.k_norm": d}
        linears = {
            "attention.qkv": ((groups, heads // groups * (1 + gate) + 2, d), h),
            "attention.output": ((h,), heads * d),
            "mlp.up": ((2, ffn) if gated else (ffn,), h),
            "mlp.down": ((h,), ffn),
        }
        for name, (outputs, inputs) in linears.items():
            found[f"{block}.{name}.weight"] = (*outputs, inputs)
            if bias or qkv_bias and name == "attention.qkv":
                found[f"{block}.{name}.bias"] = outputs
    for name, width in norms.items():
        found[f"{name}.weight"] = (width,)
        if norm == "LayerNorm":
            found[f"{name}.bias"] = (width,)
    offsets = {f"blocks.{n}.attention.softmax_offset": (groups, heads // groups) for n in range(layers)}
    return found | (offsets if sink == "learnable" else {})


def normed(w, name, x, norm, epsilon):
    if norm == "RMSNorm":
        return x / (x.pow(2).mean(-1, keepdim=True) + epsilon).sqrt() * w[f"{name}.weight"]
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]


def rotated(x, base, share):
    """x [s, b, d] with pairs of channels (i, i + n/2) of the first n turned by position x base^(-2i/n)."""
    n, turned = int(x.shape[-1] * share), x.clone()
    for i in range(n // 2):
        angle = torch.arange(len(x)).float()[:, None] * base ** (-2 * i / n)
        a, b = x[..., i], x[..., i + n // 2]
        turned[..., i], turned[..., i + n // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return turned


def capped(x, cap):
    return x if cap is None else cap * torch.tanh(x / cap)


def linear(w, name, x):
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    y = x @ weight.reshape(-1, weight.shape[-1]).t()
    return y if bias is None else y + bias.flatten()


def attention(
    w,
    name,
    x,
    heads,
    groups,
    norm,
    epsilon,
    qk_norm,
    position,
    base,
    share,
    cap=None,
    window=None,
    across=False,
    over=None,
    sink="",
):
    """Head by head, each query head with the key-value head of its group. over: scores are divided by its root. sink: a
    further score without a value, "learnable" or 0.
    """
    d = w[f"{name}.qkv.weight"].shape[2]
    # Queries, their gates if they have some, key, value
    qkv = linear(w, f"{name}.qkv", x).view(*x.shape[:2], groups, -1, d)
    gated = qkv.shape[3] > heads // groups + 2
    if across:  # all heads of a token have one root of the mean square
        parts = []
        for which, part in (("q", qkv[:, :, :, :-2]), ("k", qkv[:, :, :, -2:-1])):
            root = (part.pow(2).mean((2, 3, 4), keepdim=True) + epsilon).sqrt()
            parts.append(part / root * w[f"{name}.{which}_norm.weight"])
        qkv = torch.cat((*parts, qkv[:, :, :, -1:]), 3)
    mask = torch.full((len(x), len(x)), -math.inf).triu(1)
    for i in range(len(x)) if window is not None else ():
        mask[i, : max(0, i - window)] = -math.inf
    outputs = []
    for head in range(heads):
        group, place = divmod(head, heads // groups)
        q, k, v = qkv[:, :, group, place], qkv[:, :, group, -2], qkv[:, :, group, -1]  # [s, b, d]
        if qk_norm:
            q, k = normed(w, f"{name}.q_norm", q, norm, epsilon), normed(w, f"{name}.k_norm", k, norm, epsilon)
        if position == "rope":
            q, k = rotated(q, base, share), rotated(k, base, share)
        scores = capped(torch.einsum("ibd,jbd->bij", q, k) / math.sqrt(over or d), cap) + mask
        further = torch.zeros(scores.shape[:2] + (0,))
        if sink:
            own = w[f"{name}.softmax_offset"][group, place] if sink == "learnable" else torch.zeros(())
            further = own.expand(*scores.shape[:2], 1)
        weights = torch.cat((scores, further), -1).softmax(-1)[:, :, : len(x)]
        outputs.append(torch.einsum("bij,jbd->ibd", weights, v))
        if gated:
            outputs[-1] = outputs[-1] / (1 + torch.exp(-qkv[:, :, group, heads // groups + place]))
    return linear(w, f"{name}.output", torch.cat(outputs, -1))


def plain(
    w,
    tokens,
    layers=2,
    heads=4,
    groups=None,
    norm="LayerNorm",
    epsilon=1e-5,
    qk_norm=False,
    gated=False,
    erf=False,
    squared=False,
    position="learned_absolute",
    base=1e4,
    share=1.0,
    tied=True,
    score_cap=None,
    cap=None,
    windows=(None,) * 3,
    across=False,
    before=True,
    after=False,
    gelu_gate=False,
    scaled=False,
    over=None,
    local=None,
    sink="",
    plain=(),
    alpha=None,
    limit=math.inf,
    offset=0.0,
    **_,
):
    """Logits [s, b, V] of a GPT with weights `w` (our names and shapes)."""
    x = w["embedding.word.weight"][tokens]
    if scaled:
        x = x * math.sqrt(x.shape[-1])
    of = lambda wanted, name, x: normed(w, name, x, norm, epsilon) if wanted else x
    gelu = lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    if position == "learned_absolute":
        x = x + w["embedding.position.weight"][: len(tokens), None]
    for n in range(layers):
        block = f"blocks.{n}"
        inside = of(before, f"{block}.attention_norm", x)
        attended = attention(
            w,
            f"{block}.attention",
            inside,
            heads,
            groups or heads,
            norm,
            epsilon,
            qk_norm,
            "none" if n in plain else position,
            base if local is None or windows[n] is None else local,
            share,
            score_cap,
            windows[n],
            across,
            over,
            sink,
        )
        x = x + of(after, f"{block}.post_attention_norm", attended)
        up = linear(w, f"{block}.mlp.up", of(before, f"{block}.mlp_norm", x))
        if gated:
            gate, value = up.chunk(2, -1)
            gate, value = gate.clamp(max=limit), value.clamp(-limit, limit) + offset
            up = (gelu(gate) if gelu_gate else gate * torch.sigmoid((alpha or 1.0) * gate)) * value
        elif squared:
            up = up * up * (up > 0)
        elif erf:
            up = up * 0.5 * (1 + torch.erf(up / math.sqrt(2)))
        else:
            up = gelu(up)
        x = x + of(after, f"{block}.post_mlp_norm", linear(w, f"{block}.mlp.down", up))
    x = normed(w, "final_norm", x, norm, epsilon)
    return capped(x @ w["embedding.word.weight" if tied else "output.weight"][:V].t(), cap)


# Of what is told, that changes no weight's shape
NO_SHAPE = (
    "erf",
    "squared",
    "position",
    "base",
    "share",
    "epsilon",
    "cap",
    "score_cap",
    "windows",
    "plain",
    "gelu_gate",
    "scaled",
    "over",
    "local",
    "alpha",
    "limit",
    "offset",
)
ROPE = "--position-embedding-type rope"
CASES = [  # flags, what the plain transformer is then told, and what would give other logits with the same weights
    ("", {}, dict(erf=True)),
    ("--num-layers 3", dict(layers=3), dict(layers=2)),
    ("--hidden-size 48", dict(h=48), None),
    ("--num-attention-heads 8", dict(heads=8), None),
    ("--seq-length 24", dict(positions=24), None),
    ("--max-position-embeddings 40", dict(positions=40), None),
    ("--ffn-hidden-size 40", dict(ffn=40), None),
    ("--kv-channels 12", dict(d=12), None),
    ("--group-query-attention --num-query-groups 2", dict(groups=2), None),
    ("--num-query-groups 1", dict(groups=1), None),
    ("--position-embedding-type none", dict(positions=0, position="none"), None),
    (ROPE, dict(positions=0, position="rope"), dict(position="none")),
    (f"{ROPE} --rotary-base 100", dict(positions=0, position="rope", base=100.0), dict(base=1e4)),
    (f"{ROPE} --rotary-percent 0.25", dict(positions=0, position="rope", share=0.25), dict(share=1.0)),
    (f"{ROPE} --rotary-percent 0.5", dict(positions=0, position="rope", share=0.5), dict(share=0.25)),
    (
        f"{ROPE} --no-rope-freq 2 --num-layers 4",
        dict(positions=0, position="rope", layers=4, plain=(1, 3), windows=(None,) * 4),
        dict(plain=(0, 2)),
    ),
    (
        f"{ROPE} --no-rope-freq [1]+[0]*2 --num-layers 3",
        dict(positions=0, position="rope", layers=3, plain=(0,)),
        dict(plain=(2,)),
    ),
    ("--normalization RMSNorm", dict(norm="RMSNorm"), None),
    ("--norm-epsilon 0.3", dict(epsilon=0.3), dict(epsilon=1e-5)),
    ("--norm-epsilon 0.3 --normalization RMSNorm", dict(epsilon=0.3, norm="RMSNorm"), dict(epsilon=1e-5)),
    ("--qk-layernorm", dict(qk_norm=True), dict(qk_norm=False)),
    (
        "--qk-layernorm --normalization RMSNorm --norm-epsilon 0.3",
        dict(qk_norm=True, norm="RMSNorm", epsilon=0.3),
        None,
    ),
    ("--swiglu", dict(gated=True, ffn=64), None),  # 8/3 of 32, rounded down to 64 and at least that
    ("--squared-relu", dict(squared=True), dict(squared=False)),
    ("--no-bias-gelu-fusion", dict(erf=True), dict(erf=False)),
    ("--attn-logit-softcapping 0.3", dict(score_cap=0.3), dict(score_cap=None)),
    ("--final-logit-softcapping 1.5", dict(cap=1.5), dict(cap=None)),
    ("--window-size 4,0", dict(windows=(4, 4)), dict(windows=(5, 5))),
    ("--window-size 0,-1 --kv-channels 12", dict(windows=(0, 0), d=12), dict(windows=(1, 1))),
    ("--window-size -1,0", {}, dict(windows=(9, 9))),
    (
        "--window-size 4,0 --window-attn-skip-freq 2 --num-layers 3",
        dict(windows=(4, None, 4), layers=3),
        dict(windows=(4, 4, 4)),
    ),
    ("--disable-bias-linear", dict(bias=False), None),
    ("--disable-bias-linear --add-qkv-bias", dict(bias=False, qkv_bias=True), None),
    ("--norm-position post", dict(before=False, after=True), None),
    ("--norm-position sandwich --normalization RMSNorm", dict(after=True, norm="RMSNorm"), None),
    (
        "--qk-layernorm --qk-layernorm-across-heads --normalization RMSNorm --num-query-groups 2",
        dict(qk_norm=True, across=True, norm="RMSNorm", groups=2) | dict(qk_norm=False),
        dict(across=False),
    ),
    ("--geglu", dict(gated=True, gelu_gate=True, ffn=64), dict(gelu_gate=False)),
    ("--quick-geglu", dict(gated=True, alpha=1.702), dict(alpha=1.0)),  # width 4 x hidden size, as in Megatron-LM
    (
        "--quick-geglu --activation-func-clamp-value 0.4 --glu-linear-offset 1",
        dict(gated=True, alpha=1.702, limit=0.4, offset=1.0),
        dict(limit=0.5),
    ),
    ("--swiglu --activation-func-clamp-value 0.4", dict(gated=True, ffn=64, limit=0.4), dict(limit=math.inf)),
    ("--swiglu --glu-linear-offset 0.3", dict(gated=True, ffn=64, offset=0.3), dict(offset=0.0)),
    ("--softmax-type off-by-one", dict(sink="zero"), dict(sink="")),
    (
        "--softmax-type learnable --num-query-groups 2 --window-size 4,0",
        dict(sink="learnable", groups=2, windows=(4, 4)),
        dict(sink="zero"),
    ),
    ("--attention-output-gate", dict(gate=True), None),
    ("--attention-output-gate --num-query-groups 2 --kv-channels 12", dict(gate=True, groups=2, d=12), None),
    ("--scale-embedding", dict(scaled=True), dict(scaled=False)),
    ("--query-pre-attn-scalar 3", dict(over=3), dict(over=8)),
    (
        f"{ROPE} --rope-local-base-freq 20 --window-size 7,0 --window-attn-skip-freq 2",
        dict(positions=0, position="rope", local=20.0, windows=(7, None)),
        dict(local=None),
    ),
    ("--untie-embeddings-and-output-weights", dict(tied=False), dict(tied=True)),
    ("--make-vocab-size-divisible-by 24", dict(rows=120), None),
    ("--apply-query-key-layer-scaling", {}, None),
    ("--attention-softmax-in-fp32", {}, None),
]


def randomise(model, seed=5):
    """Weights at which everything matters, biases and norms, too; returns them by name."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
            if name.endswith("norm.weight"):
                parameter.add_(1.0)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "flags, told, unlike", CASES, ids=[flags.replace("--", "") or "default" for flags, *_ in CASES]
)
def test_a_network_is_the_plain_one(flags, told, unlike, build):
    run = build(flags)
    (model,) = run.stages
    weights = randomise(model)
    assert {name: tuple(w.shape) for name, w in weights.items()} == shapes(
        **{name: value for name, value in told.items() if name not in NO_SHAPE}
    )
    [micro] = run.loaders.train.step(0, 1)
    assert micro.tokens.shape == (run.config.model.seq_length, 2)
    want = plain(weights, micro.tokens, **told)
    torch.testing.assert_close(model.eval().logits(micro.tokens), want, rtol=1e-4, atol=1e-4)
    loss, count = model.train()(None, micro)[1].values()
    torch.testing.assert_close(loss / count, F.cross_entropy(want.flatten(0, 1), micro.labels.flatten()))
    if unlike:
        assert (plain(weights, micro.tokens, **{**told, **unlike}) - want).abs().max() > 5e-4


def test_seq_length_is_that_of_the_samples(build):
    assert build("--seq-length 24").loaders.train.step(0, 1)[0].tokens.shape == (24, 2)


def test_groups_need_a_number():
    """--group-query-attention alone says nothing: it asks for --num-query-groups."""
    from megatron.training.rules import check

    line = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --mock-data --vocab-size 9 --train-iters 1 --lr 1"
    found = check(parse_pretrain([*line.split(), "--group-query-attention"]), 1)
    assert len(found) == 1 and "--group-query-attention needs --num-query-groups" in found[0]


def test_a_named_shape_has_the_published_sizes():
    """GPT-2 medium (Radford et al. 2019, table 2), of which a flag changes what it says."""
    line = "--micro-batch-size 1 --model-name-or-path gpt2-medium --num-layers 3".split()
    found = parse_pretrain(line).model
    assert (found.num_layers, found.hidden_size, found.num_attention_heads) == (3, 1024, 16)
    assert parse_pretrain(line[:-2]).model.num_layers == 24 and found.seq_length == 1024


@pytest.mark.parametrize(
    "name, billions", {"39B": 39.1, "76B": 76.1, "145B": 145.6, "310B": 310.1, "530B": 529.6, "1T": 1008.0}.items()
)
def test_named_shapes_have_the_published_parameters(name, billions):
    """Table 1 of arXiv:2104.04473, and its equation 2 for parameters: 12 l h^2 (1 + 13 / 12h + (V + s) / 12lh)."""
    found = parse_pretrain(f"--micro-batch-size 1 --model-name-or-path gpt3-{name}".split()).model
    layers, hidden, length = found.num_layers, found.hidden_size, found.seq_length
    counted = 12 * layers * hidden**2 * (1 + 13 / (12 * hidden) + (51200 + length) / (12 * layers * hidden))
    assert round(counted / 1e9, 1) == billions


# ---- initial weights, dropout, labels --------------------------------------------------------------------------------


@pytest.mark.parametrize("more", ["", "--swiglu --untie-embeddings-and-output-weights --qk-layernorm --num-layers 8"])
def test_initial_weights_have_their_standard_deviation(more, build):
    """std everywhere, std / sqrt(2 x layers) in what writes to the residual stream; biases 0, norms 1."""
    run = build(f"--init-method-std 0.05 --hidden-size 64 --vocab-size 1024 --seq-length 64 {more}")
    seen = set()
    for name, weight in run.stages[0].named_parameters():
        kind = name.split(".", 2)[-1] if name.startswith("blocks") else name
        seen.add(kind)
        if "norm" in name or name.endswith("bias"):
            assert (weight == (1.0 if name.endswith("norm.weight") else 0.0)).all(), name
            continue
        writes = kind in ("attention.output.weight", "mlp.down.weight")
        want = 0.05 / math.sqrt(2 * run.config.model.num_layers) if writes else 0.05
        weight = weight[: run.vocab_size] if "word" in name or name == "output.weight" else weight
        error = 5 / math.sqrt(2 * weight.numel())  # five standard deviations of an estimated standard deviation
        assert weight.std().item() == pytest.approx(want, rel=error), name
        assert abs(weight.mean().item()) < 5 * want / math.sqrt(weight.numel()), name
    assert {"attention.qkv.weight", "mlp.up.weight", "mlp.down.weight", "embedding.position.weight"} < seen


def assert_dropped(x, y, p):
    """y is x after dropout: a share p is 0, the rest is x / (1 - p)."""
    dropped, considered = (y == 0) & (x != 0), (x != 0).sum().item()
    share = dropped.sum().item() / considered
    assert abs(share - p) < 5 * math.sqrt(p * (1 - p) / considered), (share, p)
    torch.testing.assert_close(y[~dropped], x[~dropped] / (1 - p), rtol=1e-4, atol=1e-6)
    return dropped


def test_hidden_dropout_is_at_its_three_sites(build):
    """After the embedding, after attention and after the MLP of each layer, each with a mask of its own."""
    run = build("--hidden-dropout 0.3 --attention-dropout 0.1 --hidden-size 64 --seq-length 64")
    (model,), [micro] = run.stages, run.loaders.train.step(0, 1)
    sites = ["embedding.dropout", *(f"blocks.{n}.{half}_dropout" for n in (0, 1) for half in ("attention", "mlp"))]
    seen = {}
    note = lambda _, inputs, output: seen.update({sites[0]: (inputs[0].detach(), output.detach())})
    model.get_submodule(sites[0]).register_forward_hook(note)
    for name in sites[1:]:  # with the addition behind it
        module = model.get_submodule(name)

        def add(residual, x, samples, name=name, drop=module.add):
            seen[name] = x.detach(), (dropped := drop(torch.zeros_like(residual), x, samples)).detach()
            return residual + dropped

        module.add = add
    streams = []
    model.final_norm.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0].detach()))
    model(None, micro)
    assert list(seen) == sites
    masks = [assert_dropped(*seen[name], 0.3) for name in sites]
    assert not any(torch.equal(a, b) for n, a in enumerate(masks) for b in masks[:n])
    # What reaches the end is their sum
    torch.testing.assert_close(streams[0], sum(output for _, output in seen.values()))


def test_attention_dropout_drops_attention_weights(build):
    """With unit vectors as values, attention's output is its weights: a share of them is 0, another one than of hidden."""
    run = build("--hidden-dropout 0.1 --attention-dropout 0.4 --seq-length 32 --kv-channels 32")
    layer = run.stages[0].blocks["1"].attention
    assert layer.training
    generator = torch.Generator().manual_seed(1)
    query, key = (torch.randn(32, B, 4, n, 32, generator=generator) for n in (1, 1))
    key, value = key.squeeze(3), torch.eye(32)[:, None, None].expand(32, B, 4, 32)
    samples = ForwardContext(samples=torch.arange(B))
    dropped = scaled_dot_product_attention(query, key, value, layer, samples)
    whole = scaled_dot_product_attention(query, key, value, layer.eval(), samples)
    scores = torch.einsum("ibgd,jbgd->bgij", query.squeeze(3), key) / math.sqrt(32)
    want = (scores + torch.full((32, 32), -math.inf).triu(1)).softmax(-1).permute(2, 0, 1, 3).reshape(32, B, 128)
    torch.testing.assert_close(whole, want, rtol=1e-4, atol=1e-6)
    assert_dropped(whole, dropped, 0.4)


def test_label_smoothing_is_torchs_in_training_alone(build):
    run = build("--label-smoothing 0.3")
    (model,), [micro] = run.stages, run.loaders.train.step(0, 1)
    randomise(model)
    logits = model.eval().logits(micro.tokens).flatten(0, 1)
    for training, smoothing in ((True, 0.3), (False, 0.0)):
        loss, count = model.train(training)(None, micro)[1].values()
        want = F.cross_entropy(logits, micro.labels.flatten(), label_smoothing=smoothing)
        torch.testing.assert_close(loss / count, want, rtol=1e-5, atol=1e-5)


def test_z_loss_is_added_to_the_loss(build, train):
    """In training: its gradient goes into every weight's. It is logged beside the loss, which stays the cross-entropy."""
    run = build("--z-loss-coeff 0.05 --untie-embeddings-and-output-weights")
    (model,), [micro] = run.stages, run.loaders.train.step(0, 1)
    weights = {name: weight.clone().requires_grad_() for name, weight in randomise(model).items()}
    logits = plain(weights, micro.tokens, tied=False).flatten(0, 1)
    loss, z = F.cross_entropy(logits, micro.labels.flatten()), logits.logsumexp(-1).square().mean()
    (loss + 0.05 * z).backward()
    sums, tokens = model(None, micro)[1], micro.tokens.numel()
    assert set(sums) == {"lm loss", "tokens", "z loss"}
    torch.testing.assert_close(sums["lm loss"] / tokens, loss)
    torch.testing.assert_close(sums["z loss"] / tokens, z)
    minimised = make_loss_func(run.config, run.losses.sums, 1.0, 2, 1)[0](sums, micro)
    torch.testing.assert_close(minimised, loss + 0.05 * z)
    gradients = torch.autograd.grad(minimised, list(model.parameters()))
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        torch.testing.assert_close(gradient, weight.grad, rtol=1e-3, atol=1e-5, msg=name)
    [step] = train("--z-loss-coeff 0.05 --train-iters 1 --log-interval 1").steps
    [bare] = train("--train-iters 1 --log-interval 1", "bare").steps
    assert step["lm loss"] == bare["lm loss"] and "z loss" not in bare
    assert step["z loss"] == pytest.approx(math.log(V) ** 2, rel=0.05)  # of a fresh model all tokens are alike
    assert step["grad_norm"] != bare["grad_norm"]


# ---- number formats of attention -------------------------------------------------------------------------------------


def attended(run, dtype, size, layer=1):
    """Attention of one layer over scores up to about `size`, and the plain one in fp64 over the same numbers."""
    generator = torch.Generator().manual_seed(2)
    query, key, value = (torch.randn(S, B, 4, 8, generator=generator).to(dtype) for _ in range(3))
    query, key = query * size**0.5, key * size**0.5
    got = scaled_dot_product_attention(
        query.unsqueeze(3), key, value, run.stages[0].blocks[str(layer)].attention, ForwardContext()
    )
    scores = torch.einsum("ibgd,jbgd->bgij", query.double(), key.double()) / math.sqrt(8)
    weights = (scores + torch.full((S, S), -math.inf).triu(1)).softmax(-1)
    return got, torch.einsum("bgij,jbgd->ibgd", weights, value.double()).reshape(S, B, 32)


def test_query_key_layer_scaling_keeps_scores_in_the_range_of_fp16(build):
    """Scores of 1e5 do not fit fp16. Divided by the layer's number they do, and the softmax puts the number back."""
    run = build("--num-layers 4 --apply-query-key-layer-scaling --fp16")
    scaled, want = attended(run, FP16, 4e4, layer=3)
    assert scaled.isfinite().all()
    assert ((scaled - want).abs() > 2e-3).float().mean() < 0.01  # but for a tie of two scores that rounding decides
    moderate, want = attended(run, FP16, 2.0, layer=3)  # at which all keys matter
    torch.testing.assert_close(moderate.double(), want, rtol=1e-2, atol=1e-2)
    unscaled, _ = attended(build("--num-layers 4 --fp16"), FP16, 4e4, layer=3)
    assert not unscaled.isfinite().all()


@pytest.mark.parametrize("flag", ["--attention-softmax-in-fp32", "--apply-query-key-layer-scaling"])
def test_softmax_in_fp32_is_that_of_the_rounded_scores(flag, build):
    """The weights are those of a softmax in fp32 over bf16 scores, rounded once."""
    run = build(f"--bf16 --kv-channels 16 {flag}")
    generator = torch.Generator().manual_seed(3)
    query, key = (torch.randn(S, B, 4, 16, generator=generator).to(torch.bfloat16) * 2 for _ in range(2))
    value = torch.eye(16, dtype=torch.bfloat16)[:, None, None].expand(16, B, 4, 16)
    got = scaled_dot_product_attention(
        query.unsqueeze(3), key, value, run.stages[0].blocks["0"].attention, ForwardContext(samples=torch.arange(B))
    )
    scores = torch.einsum("ibgd,jbgd->bgij", query.float(), key.float()) / 4
    scores = (scores.bfloat16().float() + torch.full((16, 16), -math.inf).triu(1)).softmax(-1)
    want = scores.bfloat16().permute(2, 0, 1, 3).reshape(16, B, 64)
    assert (got != want).float().mean() < 0.02  # where the product was rounded the other way
    torch.testing.assert_close(got, want, rtol=0.02, atol=1e-3)


def test_defaults_that_follow_from_others():
    """The widths that are said to follow when they are not given."""
    model = Model(num_layers=1, hidden_size=96, num_attention_heads=6, seq_length=7)
    assert (model.ffn_size, model.head_dim, model.query_groups, model.position_table) == (384, 16, 6, 7)


def test_a_script_trains_its_own_model_type(command):
    with pytest.raises(UsageError, match="--model-type NoSuchModel: this command trains GPT"):
        pretrain_gpt.main(command("--model-type NoSuchModel"))


@pytest.mark.parametrize("name", ["NoSuchModel", "json"])  # of no module, and of one that is no recipe
def test_a_model_type_that_there_is_not_is_refused(name):
    with pytest.raises(SettingsError, match=f"--model-type {name}: there is no such model") as refused:
        named_recipe(name)
    assert ("PYTHONPATH" in str(refused.value)) == (name == "NoSuchModel")
