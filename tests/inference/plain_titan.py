# SPDX-License-Identifier: Apache-2.0
"""A Llama in plain PyTorch with torchtitan's names, its rotation of neighbouring channels and its checkpoints, trained by
FSDP2. Nothing of it is from `megatron`: what conversions of DCP are compared with.

fused: as since April 2026: queries, keys and values are one parameter, and three tensors in a checkpoint
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

V, H, HEADS, GROUPS, D, FFN, LAYERS, S, THETA, EPS = 50, 32, 4, 2, 8, 48, 2, 12, 5e4, 1e-6
LR, BETAS, ADAM_EPS, DECAY, BATCH = 1e-2, (0.9, 0.95), 1e-6, 0.1, 4
CONFIG = dict(  # of transformers, of the same model
    model_type="llama",
    architectures=["LlamaForCausalLM"],
    vocab_size=V,
    hidden_size=H,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=GROUPS,
    head_dim=D,
    intermediate_size=FFN,
    rope_theta=THETA,
    rms_norm_eps=EPS,
    max_position_embeddings=S,
    hidden_act="silu",
    tie_word_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
)


class Linears(nn.Module):
    """Layers without biases, by name: (outputs, inputs)."""

    def __init__(self, **shapes):
        super().__init__()
        for name, (outputs, inputs) in shapes.items():
            setattr(self, name, nn.Linear(inputs, outputs, bias=False))


class Block(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        self.fused, sizes = fused, (HEADS * D, GROUPS * D, GROUPS * D)
        split = dict(zip(("wq", "wk", "wv"), ((size, H) for size in sizes), strict=True))
        self.attention = Linears(wo=(H, HEADS * D), **({} if fused else split))
        if fused:
            self.attention.qkv_linear = Linears(wqkv=(sum(sizes), H))
        self.feed_forward = Linears(w1=(FFN, H), w2=(H, FFN), w3=(FFN, H))
        self.attention_norm, self.ffn_norm = nn.RMSNorm(H, eps=EPS), nn.RMSNorm(H, eps=EPS)

    def forward(self, x):
        a, f = self.attention, self.feed_forward
        y, (b, s, _) = self.attention_norm(x), x.shape
        if self.fused:  # each group has its queries, its key and its value
            qkv = a.qkv_linear.wqkv(y).view(b, s, GROUPS, -1, D)
            q, k, v = (part.reshape(b, s, -1, D) for part in qkv.split([HEADS // GROUPS, 1, 1], dim=3))
        else:
            q, k, v = (layer(y).view(b, s, -1, D) for layer in (a.wq, a.wk, a.wv))
        q, k, v = (part.transpose(1, 2) for part in (rotated(q), rotated(k), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + a.wo(y.transpose(1, 2).reshape(b, s, -1))
        y = self.ffn_norm(x)
        return x + f.w2(F.silu(f.w1(y)) * f.w3(y))


def rotated(x):
    """Channels 2i and 2i + 1 as a complex number, turned. x: [b, s, heads, D]"""
    turns = torch.outer(torch.arange(x.shape[1]), THETA ** -(torch.arange(0, D, 2) / D))
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], D // 2, 2))
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(turns), turns)[:, None]).flatten(-2)


class Titan(nn.Module):
    def __init__(self, fused: bool):
        super().__init__()
        torch.manual_seed(3)
        self.tok_embeddings = nn.Embedding(V, H)
        self.layers = nn.ModuleDict({str(n): Block(fused) for n in range(LAYERS)})
        self.norm = nn.RMSNorm(H, eps=EPS)
        self.head = "lm_head" if fused else "output"
        setattr(self, self.head, nn.Linear(H, V, bias=False))
        with torch.no_grad():
            for p in self.parameters():
                p.add_(0.1 * torch.randn(p.shape)) if p.dim() == 1 else p.mul_(0.5)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return getattr(self, self.head)(self.norm(x))


def rows(count: int) -> torch.Tensor:
    """Samples [count, S + 1] in their order."""
    return torch.randint(0, V, (count, S + 1), generator=torch.Generator().manual_seed(5))


class Trainer:
    """A rank of two."""

    def __init__(self, rank: int, model: nn.Module):
        self.rank, self.step = rank, 0
        self.model, mesh = model, init_device_mesh("cpu", (2,))
        layers = model.layers.values() if isinstance(model, Titan) else model.model.layers
        for block in layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        of_dims = lambda matrix: [p for p in self.model.parameters() if (p.dim() > 1) == matrix]
        groups = [dict(params=of_dims(True), weight_decay=DECAY), dict(params=of_dims(False), weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=ADAM_EPS)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1.0)

    def train(self, steps: int) -> list[tuple[float, float]]:
        """(loss, norm of the gradient) of each step, of all samples."""
        found = []
        for _ in range(steps):
            batch = rows(100)[self.step * BATCH : (self.step + 1) * BATCH][self.rank :: 2]
            logits = self.model(batch[:, :-1])
            logits = getattr(logits, "logits", logits)
            loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
            loss.backward()
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0).full_tensor()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.schedule.step()
            self.step += 1
            torch.distributed.all_reduce(mean := loss.detach() / 2)
            found.append((mean.item(), norm.item()))
        return found

    def state(self) -> dict:
        """What a checkpoint holds: everything that torchtitan asks for when it loads one, but `dataloader`."""
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            **self.weights(),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=options),
            "lr_scheduler": dict(last_epoch=self.schedule.last_epoch),
            "train_state": dict(step=self.step, ntokens_seen=self.step * BATCH * S),
        }

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's state; a fused layer as three tensors."""
        found = {}
        for name, x in self.model.state_dict().items():
            if not name.endswith("wqkv.weight"):
                found[name] = x
                continue
            whole = x.full_tensor().view(GROUPS, -1, D, H).split([HEADS // GROUPS, 1, 1], dim=1)
            for kind, part in zip("qkv", whole, strict=True):
                found[name.replace("wqkv", f"w{kind}")] = part.reshape(-1, H)
        return found

    def save(self, folder) -> None:
        loader = {"dp_rank_0": b"a pickle of the loader", "world_size": 2}
        dcp.save(self.state() | dict(dataloader=loader), checkpoint_id=folder / f"step-{self.step}")

    def load(self, folder) -> None:
        """Load as torchtitan does: every key that this state has must be there."""
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        for name, p in self.model.named_parameters():
            own = state.get(name)
            if own is None:
                names = [name.replace("wqkv", f"w{kind}") for kind in "qkv"]
                whole = torch.cat([state[one].view(GROUPS, -1, D, H) for one in names], dim=1).reshape(-1, H)
                own = distribute_tensor(whole, p.device_mesh, p.placements)
            p.data.copy_(own)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"], options=options)
        self.step, self.schedule.last_epoch = state["train_state"]["step"], state["lr_scheduler"]["last_epoch"]


class AutomodelTrainer(Trainer):
    """A Llama of transformers, which NeMo Automodel trains, with its folders."""

    def save(self, folder) -> None:
        place = folder / f"epoch_0_step_{self.step}"
        writer = dcp.HuggingFaceStorageWriter(place / "model", save_distributed=True)
        dcp.save(self.model.state_dict(), storage_writer=writer)
        dcp.save(self.of_optimizer(), checkpoint_id=place / "optim")

    def of_optimizer(self) -> dict:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return dict(optim=get_optimizer_state_dict(self.model, self.optimizer, options=options))

    def load(self, folder) -> None:
        state, optim = self.model.state_dict(), self.of_optimizer()
        dcp.load(state, storage_reader=dcp.HuggingFaceStorageReader(folder / "model"))
        self.model.load_state_dict(state)
        dcp.load(optim, checkpoint_id=folder / "optim")
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, optim["optim"], options=options)
        self.step = torch.load(folder / "step_scheduler.pt", weights_only=True)["step"]
