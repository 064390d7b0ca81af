# SPDX-License-Identifier: Apache-2.0
"""Every setting, declared once.

A setting is one field of a frozen group. Its name is its attribute, its YAML key and (with dashes) its flag:
`tensor_model_parallel_size` is `--tensor-model-parallel-size`. Names, defaults and meanings are Megatron-LM's
wherever Megatron-LM has the setting. A bool that is true by default becomes `--no-...`.

    >>> Model(num_layers=2, hidden_size=8, num_attention_heads=2).ffn_size
    32

A new flag is a field here; a row of RULES in `rules.py` where it can be wrong; `python -m megatron.tools.flag_docs --output
docs/flags.md`; and in tests/settings/test_every_setting.py the name of the test that shows its effect. One that has an
effect in some combinations alone has a row in `effects.py`.

Nothing here imports torch, reads the command line or the environment: `parse.py` does.
"""

import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Optional

from megatron.settings.statements import SaidBy, Statement

# What happens when a run resumes from a checkpoint that had another value: it is another model, whose weights do not fit
# (refused with --finetune, too); refused unless --override names it, because the run would silently be a different one;
# the same where the run trains, and logged where it only evaluates (--skip-train); logged; or irrelevant to the result.
ON_RESUME = ("another model", "refused", "refused in training", "logged", "irrelevant")


def setting(help: str, default=MISSING, *alias: str, **metadata):
    """A field that is also a flag. `alias`: other spellings; `--other=value` is an alias that implies a value, and
    `--other~=value` one that gives way to any other spelling. `--other false` says that the value is not this one;
    `--other=value/off` that it is `off`, or with nothing after the slash the default; `--other~=value/off` is a switch,
    which decides wherever it stands: off, the other spellings have no effect. `also={"gpu": "cuda"}`: other words for a
    value.
    `on_resume`: one of ON_RESUME (default: as `guard/changes.py` says of the group)."""
    return field(default=default, metadata=dict(help=help, alias=alias, **metadata))


def window_numbers(text: str) -> tuple[int, int]:
    """(keys before, keys after) of --window-size. Raises ValueError.

    >>> window_numbers("(127, 0)")
    (127, 0)
    """
    left, right = text.strip(" ()[]").split(",")
    return int(left), int(right)


@dataclass(frozen=True)
class Model:
    """The shape and the arithmetic of the network."""

    # Of a recipe: name of a kind of linear layer -> `mpu.linear_product.LinearProduct` (`own_choices.model_group`).
    own_linears: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    num_layers: int = setting("transformer layers", on_resume="another model")
    hidden_size: int = setting("width of the residual stream", on_resume="another model")
    num_attention_heads: int = setting("query heads of each layer", on_resume="another model")
    seq_length: int = setting(
        "tokens of a training sample", 1024, "--max-seq-len", "--encoder-seq-length", on_resume="refused"
    )
    max_position_embeddings: Optional[int] = setting(
        "longest position that can be learned (default: --seq-length)", None, on_resume="refused"
    )
    ffn_hidden_size: Optional[int] = setting(
        "width inside the MLP (default: 4 x hidden size, 8/3 x with --swiglu)", None, on_resume="another model"
    )
    kv_channels: Optional[int] = setting(
        "width of a head (default: hidden size / heads)", None, on_resume="another model"
    )
    group_query_attention: bool = setting("share keys and values between query heads (see --num-query-groups)", False)
    num_query_groups: Optional[int] = setting(
        "key-value heads (default: one per query head)", None, "--num-key-value-heads", on_resume="another model"
    )
    position_embedding_type: Literal["learned_absolute", "rope", "none", "relative"] = setting(
        "how positions enter (relative: of encoder-decoders alone)",
        "learned_absolute",
        "--use-rotary-position-embeddings=rope",
        "--no-position-embedding~=none",
        on_resume="another model",
    )
    rotary_base: float = setting(
        "base of the rotary frequencies",
        10000.0,
        "--rope-theta",
        "--rotary-position-embeddings-theta",
        on_resume="refused",
    )
    rotary_percent: float = setting("share of each head that is rotated", 1.0, on_resume="refused")
    rotary_seq_len_interpolation_factor: Optional[float] = setting(
        "rotary positions are divided by this: linear scaling of RoPE", None, on_resume="refused"
    )
    use_rope_scaling: bool = setting("scale the slow rotary frequencies as Llama 3.1 does", False, on_resume="refused")
    rope_scaling_factor: float = setting(
        "--use-rope-scaling: what frequencies of long waves are divided by", 8.0, on_resume="refused"
    )
    rope_scaling_low_freq_factor: float = setting(
        "--use-rope-scaling: waves longer than the original length / this are scaled", 1.0, on_resume="refused"
    )
    rope_scaling_high_freq_factor: float = setting(
        "--use-rope-scaling: waves shorter than the original length / this are not", 4.0, on_resume="refused"
    )
    rope_scaling_original_max_position_embeddings: int = setting(
        "--use-rope-scaling: the length that the frequencies were made for", 8192, on_resume="refused"
    )
    rope_type: Literal["rope", "yarn"] = setting(
        "yarn: frequencies scaled by how often they turn in the original length (arXiv:2309.00071)",
        "rope",
        on_resume="refused",
    )
    rotary_scaling_factor: float = setting(
        "--rope-type yarn: how many times longer than the original length sequences may be", 1.0, on_resume="refused"
    )
    yarn_original_max_position_embeddings: int = setting(
        "--rope-type yarn: the length that the frequencies were made for", 4096, on_resume="refused"
    )
    yarn_beta_fast: float = setting(
        "--rope-type yarn: frequencies that turn more often than this are kept", 32.0, on_resume="refused"
    )
    yarn_beta_slow: float = setting(
        "--rope-type yarn: frequencies that turn less often than this are divided by the factor",
        1.0,
        on_resume="refused",
    )
    yarn_correction_range_round_to_int: bool = setting(
        "--rope-type yarn: the two limits are whole channels", True, on_resume="refused"
    )
    mscale: float = setting(
        "--rope-type yarn: rotations also stretch, by 0.1 x this x ln(factor) + 1; 0: they do not",
        1.0,
        on_resume="refused",
    )
    mscale_all_dim: float = setting(
        "--rope-type yarn: the stretch is divided by that of this --mscale", 0.0, on_resume="refused"
    )
    normalization: Literal["LayerNorm", "RMSNorm"] = setting("kind of norm", "LayerNorm", on_resume="another model")
    norm_epsilon: float = setting("epsilon of the norms", 1e-5, "--layernorm-epsilon", on_resume="refused")
    qk_layernorm: bool = setting("normalise queries and keys of each head", False, on_resume="another model")
    swiglu: bool = setting("gated SiLU in the MLP instead of GeLU", False, on_resume="another model")
    squared_relu: bool = setting("relu(x)^2 in the MLP instead of GeLU", False, on_resume="another model")
    bias_gelu_fusion: bool = setting("tanh GeLU fused with its bias; off: erf GeLU", True, on_resume="refused")
    disable_bias_linear: bool = setting(
        "linear layers without bias", False, "--add-bias-linear=false", on_resume="another model"
    )
    linear: Optional[str] = setting(
        "PATTERN=KIND, ...: linear layers whose products are made in another way, such as mlp.*=mask; kinds are the "
        "recipe's own, and plain",
        None,
        on_resume="refused",
    )
    untie_embeddings_and_output_weights: bool = setting(
        "output layer with a weight of its own", False, on_resume="another model"
    )
    apply_query_key_layer_scaling: bool = setting(
        "scale scores by 1/layer, softmax in fp32 (for fp16)",
        False,
        "--no-query-key-layer-scaling=false",
        "--scale-qk-by-layer-num",
    )
    attention_softmax_in_fp32: bool = setting("softmax of attention in fp32", False)
    window_size: Optional[str] = setting(
        "sliding window: keys before and after its own that a token sees, as 4095,0 (default, and -1: all before)",
        None,
        on_resume="refused",
    )
    window_attn_skip_freq: Optional[int] = setting(
        "with --window-size: each such layer sees everything, 4: the 4th, the 8th ...", None, on_resume="refused"
    )
    attn_logit_softcapping: Optional[float] = setting(
        "attention scores become cap x tanh(score / cap), as in Gemma 2",
        None,
        "--attention-logit-softcapping",
        on_resume="refused",
    )
    final_logit_softcapping: Optional[float] = setting(
        "logits become cap x tanh(logit / cap), as in Gemma 2", None, "--output-logit-softcapping", on_resume="refused"
    )
    hidden_dropout: float = setting(
        "dropout after embedding, attention and MLP; 0: none", 0.1, "--check-accuracy~=0", "--hidden-dropout-prob"
    )
    attention_dropout: float = setting("dropout of attention weights; 0: none", 0.1, "--attention-probs-dropout-prob")
    label_smoothing: float = setting("share of each target that is spread over the vocabulary, in training", 0.0)
    z_loss_coeff: float = setting(
        "added to the loss: this x the square of log sum exp of each token's logits, which keeps them from drifting",
        0.0,
        "--z-loss-coef",
        "--z-loss-weight",
    )
    init_method_std: float = setting("standard deviation of initial weights", 0.02)
    make_vocab_size_divisible_by: int = setting(
        "pad the vocabulary to a multiple of this x tensor parallel size", 128, "--vocab-size-divisible-unit"
    )
    model_type: str = setting(
        "which model: GPT, or a module that has a function recipe()",
        "GPT",
        on_resume="another model",
        also={"gpt": "GPT", "gpt-cn": "GPT"},
    )
    model_name_or_path: Optional[str] = setting(
        "a known shape (gpt2-medium, gpt3-6.7B ...; other flags win over it), or a folder to --load", None, "--preset"
    )

    @property
    def ffn_size(self) -> int:
        """Width inside the MLP; SwiGLU keeps the parameter count of 4h with 8/3 h, rounded down to 64 (Megatron)."""
        if self.ffn_hidden_size is not None:
            return self.ffn_hidden_size
        return max(64, self.hidden_size * 8 // 3 // 64 * 64) if self.swiglu else 4 * self.hidden_size

    @property
    def head_dim(self) -> int:
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads

    @property
    def window(self) -> Optional[int]:
        """Keys before its own that a token sees in layers with a window; None: all of them."""
        left = -1 if self.window_size is None else window_numbers(self.window_size)[0]
        return None if left < 0 else left

    def window_of(self, layer: int) -> Optional[int]:
        """`window` of layer number `layer`, from 0."""
        skipped = self.window_attn_skip_freq is not None and (layer + 1) % self.window_attn_skip_freq == 0
        return None if skipped else self.window

    @property
    def yarn_stretch(self) -> float:
        """What YaRN multiplies rotated queries and keys by, its attention factor."""
        stretch = lambda mscale: 0.1 * mscale * math.log(self.rotary_scaling_factor) + 1.0
        return stretch(self.mscale) / stretch(self.mscale_all_dim) if self.rotary_scaling_factor > 1 else 1.0

    @property
    def position_table(self) -> int:
        """Rows of the learned position embedding."""
        return self.max_position_embeddings or self.seq_length


@dataclass(frozen=True)
class Parallel:
    """How ranks share the work. The grid of ranks is tp (fastest), cp, dp, pp."""

    tensor_model_parallel_size: int = setting(
        "ranks that split each matrix", 1, "--tp", "--mp-degree", "--model-parallel-size"
    )
    pipeline_model_parallel_size: int = setting("ranks that split the layers", 1, "--pp", "--pp-degree")
    context_parallel_size: int = setting("ranks that split each sequence", 1, "--cp")
    cp_comm_type: Optional[list[Literal["p2p", "a2a", "allgather", "a2a+p2p"]]] = setting(
        "how they share attention, one word or one for each layer: p2p and allgather gather keys and values, a2a exchanges "
        "tokens for heads (default: p2p)",
        None,
    )
    expert_model_parallel_size: int = setting(
        "ranks of a pipeline stage that hold different experts of a layer", 1, "--ep", "--moe-expert-parallel-size"
    )
    expert_tensor_parallel_size: Optional[int] = setting(
        "ranks that split each expert (default: --tensor-model-parallel-size)", None, "--etp"
    )
    data_parallel_size: Optional[int] = setting("asserted, not set: world / (tp x pp x cp)", None)
    dp_degree: Optional[int] = setting(
        "asserted, not set: replicas outside sharding, as PaddlePaddle counts: world / (mp x pp x --sharding-degree)",
        None,
    )
    sequence_parallel: bool = setting("split norms and dropouts over the sequence inside tensor parallel groups", False)
    pipeline_schedule: str = setting(
        "order of passes: gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half, or a FILE.txt with a line of ops a rank",
        "1f1b",
    )
    num_layers_per_virtual_pipeline_stage: Optional[int] = setting(
        "layers of a model chunk (interleaved schedule)", None
    )
    num_virtual_stages_per_pipeline_rank: Optional[int] = setting(
        "model chunks of a rank (interleaved schedule)", None, "--virtual-pp-degree"
    )
    pipeline_stage_layers: Optional[str] = setting("layers of each stage, uneven ones too: 2,1,1,1", None)
    decoder_first_pipeline_num_layers: Optional[int] = setting("layers of the first pipeline rank", None)
    decoder_last_pipeline_num_layers: Optional[int] = setting("layers of the last pipeline rank", None)
    account_for_embedding_in_pipeline_split: bool = setting("the embedding counts as a layer of the first stage", False)
    account_for_loss_in_pipeline_split: bool = setting(
        "output layer and loss count as a layer of the last stage", False
    )
    pipeline_timeline: Optional[str] = setting("file to record a step's passes in, for megatron.pipeline.check", None)
    sharding_stage: Literal[0, 1, 2, 3] = setting(
        "ZeRO stage: shard optimizer state (1), gradients (2), parameters (3)",
        0,
        "--use-distributed-optimizer~=1/0",
        "--use-sharding~=1/0",
        "--zero-stage",
        "--data-parallel-sharding-strategy",
        also=dict(no_shard=0, optim=1, optim_grads=2, optim_grads_params=3),
    )
    sharding_degree: Optional[int] = setting("ranks that share one set of shards (default: all of data parallel)", None)
    overlap_grad_reduce: bool = setting(
        "reduce a layer's gradients while the backward pass goes on", False, "--reduce-overlap"
    )
    overlap_param_gather: bool = setting(
        "gather a layer's parameters while the layers before it compute", False, "--broadcast-overlap"
    )
    print_topology: bool = setting("print the ranks of every group and stop", False)
    distributed_backend: Optional[Literal["gloo", "nccl"]] = setting(
        "default: nccl on CUDA, gloo on CPU", None, "--backend"
    )
    distributed_timeout_minutes: float = setting("a silent peer is given up after this long", 10.0)

    @property
    def asserted_data_parallel(self) -> Optional[int]:
        """Data parallel ranks as `--data-parallel-size` or `--dp-degree` say them; None: neither was given."""
        if self.data_parallel_size or not self.dp_degree:
            return self.data_parallel_size
        return self.dp_degree * (self.sharding_degree or 1)

    @property
    def cp_comm_types(self) -> tuple[str, ...]:
        """`cp_comm_type`, one word for all layers or one for each."""
        return tuple(self.cp_comm_type or ["p2p"])


WORD_PIECE = ("BertWordPieceLowerCase", "BertWordPieceCase", "BertTokenizer", "ErnieTokenizer", "ElectraTokenizer")


@dataclass(frozen=True)
class TokenizerSettings:
    """Text to ids and back."""

    tokenizer_type: Optional[
        Literal[
            "GPT2BPETokenizer",
            "HuggingFaceTokenizer",
            "SentencePieceTokenizer",
            "GPTSentencePieceTokenizer",
            "GPTChineseTokenizer",
            "TikTokenizer",
            "BertWordPieceLowerCase",
            "BertWordPieceCase",
            "BertTokenizer",
            "ErnieTokenizer",
            "ElectraTokenizer",
            "NullTokenizer",
        ]
    ] = setting(
        "which kind of vocabulary (NullTokenizer: numbers, no text)",
        None,
        "--tokenizer-name",
        also=dict(GPTTokenizer="GPT2BPETokenizer"),
        on_resume="refused",
    )
    vocab_file: Optional[str] = setting(
        "vocab.json of a byte-level BPE, or vocab.txt of WordPiece", None, on_resume="refused"
    )
    merge_file: Optional[str] = setting("merges.txt of a byte-level BPE", None, on_resume="refused")
    tokenizer_model: Optional[str] = setting(
        "tokenizer.json, SentencePiece model, tiktoken ranks; or a vocabulary's folder, or its name in $MEGATRON_CACHE",
        None,
        "--tokenizer-name-or-path",
        on_resume="refused",
    )
    vocab_size: Optional[int] = setting("size of the vocabulary when no tokenizer says it", None, on_resume="refused")
    vocab_extra_ids: int = setting(
        "sentinels <extra_id_0> ... behind the vocabulary, which T5 puts for what is masked; with them come those of the "
        "tokens [CLS], [SEP], [MASK], [PAD], [BOS], [EOS] that it lacks",
        0,
        on_resume="refused",
    )
    tiktoken_pattern: Optional[str] = setting(
        "gpt2, cl100k, o200k, v1, v2 or a pattern (default: by the ranks)", None, on_resume="refused"
    )


@dataclass(frozen=True)
class Data:
    """Where tokens come from, and in what order."""

    data_path: Optional[list[str]] = setting(
        "prefix (a path or an s3:// URL), or weight prefix weight prefix ...; a folder is all datasets in it, by size",
        None,
        "--input-dir",
        on_resume="refused",
    )
    train_data_path: Optional[list[str]] = setting("blend for training alone", None, on_resume="refused")
    valid_data_path: Optional[list[str]] = setting("blend for validation alone", None)
    test_data_path: Optional[list[str]] = setting("blend for testing alone", None)
    split: str = setting("parts of each dataset for train,valid,test", "969,30,1", on_resume="refused")
    data_cache_path: Optional[str] = setting(
        "folder for index maps (default: beside the data), and for what is fetched of data that lie in an object store",
        None,
        on_resume="irrelevant",
    )
    verify_data: bool = setting("before training, compare every byte of the token files with their checksums", False)
    mock_data: bool = setting("deterministic synthetic samples, no files", False, on_resume="refused")
    full_validation: bool = setting(
        "a validation goes over the whole validation set, each sample once, instead of --eval-iters batches", False
    )
    dataset_type: Literal["gpt", "webtext"] = setting(
        "what a sample is. gpt: --seq-length tokens of documents end to end; webtext: one document, cut off, or filled up "
        "with the end-of-document token, which has no loss there",
        "gpt",
        also=dict(WebtextDataset="webtext"),
        on_resume="refused",
    )
    dataloader_type: Literal["single", "cyclic"] = setting(
        "single: in index order; cyclic: shuffled each epoch",
        "single",
        "--dataloader-shuffle~=cyclic/single",
        on_resume="refused",
    )
    collate_fn: Optional[str] = setting(
        "function of your own that makes samples of what a dataset gives, a micro-batch at a time: MODULE:FUNCTION "
        "(docs/extending.md)",
        None,
        on_resume="logged",
    )
    num_workers: int = setting(
        "threads that prepare batches ahead; 0 prepares them in the loop", 2, on_resume="irrelevant"
    )
    reset_position_ids: bool = setting("positions start again after each end of document", False, on_resume="refused")
    reset_attention_mask: bool = setting("no attention across documents", False, on_resume="refused")
    eod_mask_loss: bool = setting("no loss where the input is end of document", False, on_resume="refused")

    @property
    def files(self) -> bool:
        """Whether token files are named."""
        return any((self.data_path, self.train_data_path, self.valid_data_path, self.test_data_path))


AUTO = -1  # --micro-batch-size auto, --save-interval auto


@dataclass(frozen=True)
class Batch:
    """How much data a step sees, and how long training lasts."""

    micro_batch_size: int = setting(
        "samples of one forward pass on one rank; auto: the planner chooses", 1, "--batch-size", also=dict(auto=AUTO)
    )
    global_batch_size: Optional[int] = setting("samples of one step (default: micro batch x data parallel)", None)
    local_batch_size: Optional[int] = setting("--global-batch-size / data parallel size, instead of or beside it", None)
    gradient_accumulation_steps: Optional[int] = setting(
        "micro-batches of one step, instead of or beside --global-batch-size", None, "--accumulate-steps"
    )
    rampup_batch_size: Optional[list[int]] = setting(
        "start increment samples: grow the batch up to the global size", None
    )
    train_iters: Optional[int] = setting("steps to train; 0 with --skip-train alone", None, "--max-steps")
    train_samples: Optional[int] = setting("samples to train, instead of steps", None)
    train_epochs: Optional[int] = setting(
        "times to go through the training samples, instead of steps: lengths of the schedule are in either then",
        None,
        "--num-train-epochs",
        "--num-epochs",
        "--epochs",
    )
    eval_interval: int = setting("steps between evaluations", 1000, "--eval-freq")
    eval_epoch: Optional[int] = setting("epochs between evaluations (--train-epochs), beside --eval-interval", None)
    eval_iters: int = setting("batches of an evaluation; 0: there is none", 100)
    test_iters: Optional[int] = setting(
        "batches of the evaluation on test data, after training; 0: there is none (default: --eval-iters)", None
    )
    eval_same_samples: bool = setting(
        "every validation takes the first --eval-iters batches; otherwise each goes on behind the one before", False
    )
    eval_requests: Optional[str] = setting(
        "file of requests (JSON lines: context, continuations, gold): how often the likeliest is the right one, at each "
        "evaluation",
        None,
    )
    stop_at_loss: Optional[float] = setting(
        "training ends when the loss of a validation, the first that the log has, is at most this, any number",
        None,
        on_resume="logged",
    )
    skip_train: bool = setting(
        "no training: --eval-iters batches of validation and test data, in the layout that is given",
        False,
        on_resume="irrelevant",
    )
    exit_interval: Optional[int] = setting("save and stop at a multiple of this step", None, on_resume="irrelevant")
    exit_duration_in_mins: Optional[float] = setting(
        "save and stop after this many minutes", None, on_resume="irrelevant"
    )

    @property
    def tested_batches(self) -> int:
        """Batches of the evaluation on test data."""
        return self.eval_iters if self.test_iters is None else self.test_iters


@dataclass(frozen=True)
class Precision:
    """Number formats, and fp16's loss scale."""

    precision: Literal["auto", "fp32", "bf16", "fp16"] = setting(
        "format of weights and activations; auto: bf16 where it is fast",
        "fp32",
        "--bf16=bf16",
        "--fp16=fp16",
        "--use-amp~=fp16/fp32",
        "--use-pure-fp16=fp16",
    )
    amp_level: Literal["O1", "O2"] = setting(
        "O2: weights in bf16 or fp16, with fp32 ones beside them; O1: weights in fp32, and formats chosen op by op",
        "O2",
    )
    amp_custom_black_list: Optional[list[str]] = setting(
        "O1: ops to compute in fp32, by torch's or Paddle's names", None
    )
    amp_custom_white_list: Optional[list[str]] = setting("O1: ops to compute in half precision", None)
    loss_scale: Optional[float] = setting("fixed loss scale for fp16 (default: dynamic)", None)
    initial_loss_scale: float = setting("first dynamic loss scale", 2.0**32, "--scale-loss")
    min_loss_scale: float = setting("lowest dynamic loss scale", 1.0)
    loss_scale_window: int = setting("good steps before the scale doubles", 1000)
    hysteresis: int = setting("overflows before the scale halves", 2)


@dataclass(frozen=True)
class Kernels:
    """Which device and which implementations, and when Python's memory is tidied."""

    device: Literal["auto", "cpu", "cuda"] = setting("auto: CUDA where there is one", "auto", also=dict(gpu="cuda"))
    torch_compile: bool = setting("compile the layers with torch.compile", False)
    dump_graph: Optional[str] = setting(
        "folder for the code of the graphs that --torch-compile makes, in a folder for each rank",
        None,
        on_resume="irrelevant",
    )
    attention_backend: Literal["auto", "explicit", "sdpa", "flash"] = setting(
        "how attention is computed",
        "auto",
        "--use-flash-attn=flash",
        "--use-flash-attn-v2=flash",
        also=dict(fused="sdpa", unfused="explicit", local="explicit"),
    )
    flash_attention_version: Literal[2, 3, 4] = setting(
        "release of FlashAttention behind torch's attention on CUDA; 3 and 4 need their package", 2
    )
    cross_entropy_chunk: Optional[int] = setting("rows of logits that exist at a time (default: chosen)", None)
    # Choices of speed: off, torch's ops come one after the other. On CPUs most have no fused form.
    masked_softmax_fusion: bool = setting("explicit attention in blocks; off: all its scores at once", True)
    bias_dropout_fusion: bool = setting("dropout and the addition behind it in one kernel", True)
    bias_swiglu_fusion: bool = setting("the gated activation of --swiglu in one kernel", True)
    rope_fusion: bool = setting("rotary positions in one kernel", True, "--apply-rope-fusion~=true")
    persist_layer_norm: bool = setting("norms in the suite's own kernels; off: apex's or torch's", True)
    cross_entropy_loss_fusion: bool = setting("softmax, loss and its gradient in one kernel", True)
    fused_linear: bool = setting("products add their bias themselves", True)
    fuse_attn_qkv: bool = setting("queries, keys and values by one product", True)
    deterministic_mode: bool = setting(
        "on CUDA: kernels that repeat bit by bit, and an error where torch has none (CPUs repeat anyway)", False
    )
    manual_gc_interval: int = setting(
        "steps between collections of reference cycles, of all ranks together; 0: whenever Python likes", 100
    )


@dataclass(frozen=True)
class Recompute:
    """What the backward pass computes again, so that the forward pass need not keep it."""

    recompute_granularity: Optional[Literal["full", "full_attn", "core_attn"]] = setting(
        "what of a layer is computed again in the backward pass instead of kept: all, its attention half, softmax(q k) v",
        None,
        "--recompute-activations=core_attn/",
        "--use-recompute~=full/",
        "--checkpoint-activations~=full/",
        also=dict(selective="core_attn"),
    )
    recompute_method: Optional[Literal["uniform", "block"]] = setting(
        "uniform (the default): of each --recompute-num-layers layers only the first one's input is kept; block: the first "
        "--recompute-num-layers layers of each stage are computed again, the others kept",
        None,
        "--activations-checkpoint-method",
    )
    recompute_num_layers: Optional[int] = setting(
        "see --recompute-method", None, "--checkpoint-num-layers", "--activations-checkpoint-num-layers"
    )
    no_recompute_layers: Optional[str] = setting("layers that are kept all the same, from 0: 0,1,5", None)

    @property
    def exempt_layers(self) -> frozenset[int]:
        """--no-recompute-layers as numbers. Raises ValueError where they are none."""
        # In brackets, as files of other suites write lists, too.
        words = (self.no_recompute_layers or "").strip("[] ").split(",")
        return frozenset(int(word) for word in words if word.strip())


@dataclass(frozen=True)
class Checkpoint:
    """Where state is kept."""

    save: Optional[str] = setting(
        "folder to save into, or the URL of one in an object store (s3://bucket/run)", None, "--output-dir"
    )
    load: Optional[str] = setting("folder or URL to resume from", None)
    save_interval: Optional[int] = setting(
        "steps between checkpoints; auto: from what a save costs (see --mean-time-to-interruption)",
        None,
        "--save-steps",
        "--persistent-save-interval",
        also=dict(auto=AUTO),
    )
    save_epoch: Optional[int] = setting("epochs between checkpoints (--train-epochs), beside --save-interval", None)
    mean_time_to_interruption: float = setting("hours between failures of the job, for --save-interval auto", 24.0)
    keep_last: Optional[int] = setting("delete all but this many newest checkpoints", None)
    save_retain_interval: Optional[int] = setting(
        "keep the checkpoints at multiples of this step, beside --keep-last (default: 1) newest", None
    )
    async_save: bool = setting("copy the state to CPU memory and write it while training goes on", False)
    save_retries: int = setting("a save that failed is tried again this often; 0: never", 2)
    save_mirror: Optional[str] = setting(
        "folder or URL for checkpoints that --save does not take, after all retries", None
    )
    save_copy: Optional[str] = setting(
        "folder or URL for a copy of each checkpoint, or a command that takes it there, with {} for its path", None
    )
    max_failed_saves: int = setting("training ends when this many saves in a row have failed", 3)
    ckpt_step: Optional[int] = setting(
        "resume from this step instead of the newest; 0: of a model that was imported", None
    )
    auto_resume: bool = setting(
        "with --load: start anew when the folder holds no checkpoint; a folder that is --save too and new needs it not",
        False,
    )
    exit_on_missing_checkpoint: bool = setting(
        "a --load without a checkpoint is an error also where it is --save and new", False
    )
    resume_schedule: Optional[Literal["checkpoint", "command"]] = setting(
        "whose learning rates and weight decay a run follows that goes on: the checkpoint's, or those of this command (the "
        "default, with a warning where a length has changed that nobody gave)",
        None,
        "--use-checkpoint-opt-param-scheduler=checkpoint",
        "--use-checkpoint-lr-scheduler=checkpoint",
        "--override-opt-param-scheduler=command",
        "--override-lr-scheduler=command",
    )
    finetune: bool = setting("load weights alone and start counting anew", False)
    use_checkpoint_args: bool = setting(
        "take the shape of the model and the tokenizer from the checkpoint at --load, where no flag says them (--finetune "
        "does, where no flag says a shape)",
        False,
        on_resume="irrelevant",
    )
    load_strictness: Literal["strict", "warn-missing", "warn-extra", "warn-all"] = setting(
        "tensors that the checkpoint or the model does not have: an error, or (which of them) a warning",
        "strict",
        "--dist-ckpt-strictness",
        also=dict(
            raise_all="strict",
            raise_unexpected="warn-extra",
            assume_ok_unexpected="warn-extra",
            log_unexpected="warn-all",
            log_all="warn-all",
            ignore_all="warn-all",
        ),
    )
    no_load_optim: bool = setting("do not load optimizer state", False)
    no_save_optim: bool = setting("do not save optimizer state", False)


@dataclass(frozen=True)
class Guard:
    """What is watched while a run goes on, and what happens then."""

    check_replicas_interval: Optional[int] = setting(
        "steps between comparisons of the parameters that several ranks hold, bit by bit",
        None,
        "--check-weight-hash-across-dp-replicas-interval",
    )
    exit_signal_handler: bool = setting(
        "on SIGTERM or SIGUSR1: save after this step and exit with code 9", False, on_resume="irrelevant"
    )
    kill_switch_file: Optional[str] = setting(
        "save and stop when this file appears", None, "--kill-switch-path", on_resume="irrelevant"
    )
    heartbeat_dir: Optional[str] = setting(
        "folder where each rank says what it is doing (megatron.tools.supervise sets and reads it)",
        None,
        on_resume="irrelevant",
    )
    on_nan: Literal["stop", "skip"] = setting(
        "at a loss or gradient that is not finite: stop before the update, or skip the step and count it",
        "stop",
        "--check-for-nan-in-loss-and-grad=stop/skip",
        "--no-check-for-nan-in-loss-and-grad=skip/stop",
    )
    on_spike: Literal["continue", "skip", "rollback"] = setting(
        "at a spike of loss or gradient norm: tell, skip the update, or go back to an earlier checkpoint and leave out "
        "the steps before the spike",
        "continue",
    )
    spike_window: int = setting("steps that a step is compared with, at least 32", 128)
    spike_threshold: float = setting("deviations above the median of the window that make a spike", 10.0)
    spike_skip_steps: int = setting("steps up to a spike that a rollback leaves out", 8)
    max_rollbacks: int = setting("rollbacks of a run; a further spike stops it (0: the first one)", 3)
    iterations_to_skip: Optional[list[int]] = setting("steps whose samples are passed over without training", None)
    override: Optional[str] = setting(
        "settings (names with commas) that may differ from those of the checkpoint although results depend on them",
        None,
        on_resume="irrelevant",
    )


@dataclass(frozen=True)
class Optimizer:
    """The update rule, its learning rate and its weight decay."""

    # Of a recipe: name of a choice -> what it stands for (`own_choices.optimizer_group`).
    own_schedules: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    own_optimizers: ClassVar[Mapping[str, Any]] = MappingProxyType({})

    optimizer: Literal["adam", "cpu_adam", "sgd", "lion", "muon"] = setting(
        "adam is AdamW, as in Megatron-LM, for each part of the state where that lies; cpu_adam: with "
        "--optimizer-cpu-offload; docs/optimizers.md has the others",
        "adam",
        also=dict(adamw="adam", fused_adam="adam", hybrid_adam="adam", dist_muon="muon"),
    )
    freeze: Optional[list[str]] = setting(
        "parameters that are not trained, by patterns of their names: 'embedding.*' 'blocks.[01].*' "
        "(docs/finetuning.md#frozen-parameters)",
        None,
        on_resume="refused",
    )
    train_only: Optional[list[str]] = setting(
        "the parameters that are trained, by such patterns; all others are frozen", None, on_resume="refused"
    )
    lr: Optional[float] = setting("highest learning rate", None, "--max-lr", "--learning-rate")
    min_lr: float = setting("lowest learning rate", 0.0)
    decoupled_lr: Optional[float] = setting(
        "highest learning rate of input and output embeddings, on the same curve (default: --lr)", None
    )
    decoupled_min_lr: Optional[float] = setting("lowest learning rate of these (default: --min-lr)", None)
    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = setting(
        "curve after warm-up", "linear", also=dict(none="constant")
    )
    lr_step_unit: Literal["iter", "sample", "epoch"] = setting(
        "when the rate changes: with each step, which is each batch of samples, or at the start of an epoch alone",
        "iter",
    )
    lr_decay_iters: Optional[int] = setting("steps until --min-lr (default: all)", None, "--decay-steps")
    lr_decay_samples: Optional[int] = setting("the same in samples", None)
    lr_warmup_iters: int = setting("steps of linear warm-up", 0)
    lr_warmup_samples: int = setting("the same in samples", 0)
    lr_warmup_fraction: Optional[float] = setting(
        "the same as a share of the decay length; 0: none", None, "--warmup-rate", "--warmup"
    )
    lr_warmup_init: float = setting("learning rate where warm-up starts", 0.0)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = setting(
        "how WSD anneals", "exponential"
    )
    lr_wsd_decay_iters: Optional[int] = setting("steps of WSD's annealing", None)
    lr_wsd_decay_samples: Optional[int] = setting("the same in samples", None)
    weight_decay: float = setting("decoupled weight decay of matrices; 0: none", 0.01)
    start_weight_decay: Optional[float] = setting("weight decay at the start (with --weight-decay-incr-style)", None)
    end_weight_decay: Optional[float] = setting("weight decay at the end", None)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = setting("curve between the two", "constant")
    clip_grad: float = setting("largest global gradient norm; 0 is off", 1.0, "--grad-clip")
    adam_beta1: float = setting("first moment's decay; 0: the gradient itself", 0.9)
    adam_beta2: float = setting("second moment's decay; 0: the gradient's square itself", 0.999)
    adam_eps: float = setting("epsilon of Adam", 1e-8, "--adam-epsilon")
    sgd_momentum: float = setting("momentum of --optimizer sgd; 0 keeps no state", 0.9)
    lion_beta1: float = setting(
        "share of the mean in the direction that --optimizer lion takes; 0: the gradient alone", 0.95
    )
    lion_beta2: float = setting("decay of Lion's mean; 0: the gradient itself", 0.98)
    muon_momentum: float = setting(
        "decay of the mean of gradients that --optimizer muon orthogonalises; 0: the gradient itself", 0.95
    )
    muon_nesterov: bool = setting("orthogonalise that mean one gradient ahead", False, "--muon-use-nesterov")
    muon_scale_mode: Literal["spectral", "unit_rms_norm", "shape_scaling"] = setting(
        "an orthogonal matrix of r rows and c columns is multiplied by the root of max(r, c), r/c, or max(1, r/c)",
        "spectral",
    )
    muon_extra_scale_factor: float = setting("and by this; 0.2 with spectral: steps as large as AdamW's", 1.0)
    muon_num_ns_steps: int = setting("steps of the Newton-Schulz iteration", 5)
    muon_coefficient_type: Literal["quintic", "simple", "polar_express"] = setting(
        "its polynomials: five in turn, the same one in each step, or eight in turn", "quintic"
    )
    muon_fp32_matmul_prec: Literal["medium", "high", "highest"] = setting(
        "products of the iteration: in bf16; in TF32 where the device has it; in fp32",
        "medium",
        also=dict(low="medium"),
    )
    optimizer_cpu_offload: bool = setting(
        "keep optimizer state in the host's memory and update there", False, "--sharding-offload"
    )
    optimizer_offload_fraction: float = setting(
        "share of the state that --optimizer-cpu-offload moves; 0: none; 1: all that is not on disk", 1.0
    )
    nvme_offload_fraction: float = setting(
        "share of the state that lies in files and passes through memory at each step, updated by the host", 0.0
    )
    nvme_offload_dir: Optional[str] = setting("folder for these files, on a fast disk of the node", None)
    param_cpu_offload: bool = setting("keep the shards of --sharding-stage 3 in the host's memory", False)
    gradient_accumulation_fusion: bool = setting(
        "products for weight gradients add to the fp32 buffer by themselves (CPU: slower; W passes do without)", False
    )
    loss_averaging: Literal["token", "micro-batch"] = setting(
        "token: mean over all unmasked tokens of the global batch; micro-batch: Megatron-LM's mean of means",
        "token",
        "--calculate-per-token-loss=token/micro-batch",
    )

    @property
    def rule(self) -> str:
        """What updates weights: --optimizer without where it does."""
        return "adam" if self.optimizer == "cpu_adam" else self.optimizer

    @property
    def host_share(self) -> float:
        """Share of the optimizer's state that lies in the host's memory."""
        if not (self.optimizer_cpu_offload or self.optimizer == "cpu_adam"):
            return 0.0
        share = self.optimizer_offload_fraction
        return 1 - self.nvme_offload_fraction if share == 1 else share


@dataclass(frozen=True)
class Planner:
    """Looking before launching: the layout is searched, or everything is shown and nothing trained."""

    auto_parallel: bool = setting("search the layout for the ranks there are, say why, and train in it", False)
    max_global_batch_size: Optional[int] = setting("let the search choose the global batch, up to this size", None)
    tune_steps: int = setting(
        "with --auto-parallel or --micro-batch-size auto: time the best three for so many steps each first", 0
    )
    parallel_plan: Optional[str] = setting(
        "file of megatron.tools.plan --emit PLAN.json: train in its best layout", None
    )
    dry_run: bool = setting("show settings, layout, memory, time and every problem; no device, no training", False)
    wide: bool = setting("tables and sentences of plan and --dry-run as wide as they are, not of 80 columns", False)
    preflight: bool = setting(
        "check settings, every rank's shapes, a shrunk job of the job and the machines; train nothing", False
    )
    allow_memory_overcommit: bool = setting("train also where there is less memory free than is predicted", False)
    world_size: Optional[int] = setting("ranks to plan for (default: those of this job)", None, "--num-gpus")
    local_world_size: Optional[int] = setting(
        "ranks of a node (default: this job's, else all of up to 8, or 8)", None, "--gpus-per-node"
    )
    device_name: Optional[str] = setting("device to plan for, such as A100-80GB (default: what is here)", None)
    device_memory_gb: Optional[float] = setting(
        "GB (10^9 bytes) of a device (default: DEVICE_MEMORY_GB, or its own)", None
    )
    calibration: Optional[str] = setting(
        "file that megatron.tools.plan --calibrate wrote: speeds are those measured", None
    )


@dataclass(frozen=True)
class Profiling:
    """Where the time and memory of some steps go: a Chrome trace and tables, by torch.profiler."""

    profile: bool = setting("profile some steps on some ranks", False, "--use-pytorch-profiler")
    profile_step_start: int = setting("first iteration to profile", 10)
    profile_step_end: int = setting("iteration before which profiling ends", 12)
    profile_ranks: Optional[list[int]] = setting("ranks that profile (default: 0)", None)
    profile_dir: Optional[str] = setting("folder for traces and tables (default: profile under --save)", None)
    profile_detailed: bool = setting(
        "record shapes, too: slower, and larger files", False, "--pytorch-profiler-collect-shapes"
    )


@dataclass(frozen=True)
class Logging:
    """What is said, and where."""

    log_ranks: Optional[list[int]] = setting(
        "ranks whose log goes to stdout, each line with its rank (default: 0, without); files are those of rank 0",
        None,
        on_resume="irrelevant",
    )
    log_interval: int = setting("steps between log lines; the last step always has one", 100, "--logging-freq")
    timing_log_level: Literal[0, 1, 2] = setting(
        "timers in the log: 0 none but the time of a step, 1 its main parts, 2 what is in them, too", 0
    )
    timing_log_option: Literal["minmax", "max", "all"] = setting(
        "what is said of the ranks' times: the least and greatest, the greatest, or every rank's", "minmax"
    )
    barrier_with_level_1_timing: bool = setting("timers of level 1 let all ranks begin together", True)
    log_timers_to_tensorboard: bool = setting("timers go to TensorBoard and Weights & Biases, too", False)
    console: Literal["auto", "short", "megatron"] = setting(
        "what stdout gets: short lines, or Megatron-LM's; auto: short ones where it is a terminal", "auto"
    )
    log_file: Optional[str] = setting(
        "file for the log with Megatron-LM's lines, appended to (default: train.log under --save)", None
    )
    progress_bar: bool = setting("a bar at the bottom of a terminal", True)
    log_progress: bool = setting(
        "progress.txt under --save, as Megatron-LM writes it: starts and saves, with operations and tokens", False
    )
    log_throughput: bool = setting(
        "TFLOP/s of a rank behind the time of a step, where Megatron-LM's line has it (else at the line's end), samples, "
        "steps and a data rank's tokens per second, and the means of all at the end of training",
        False,
    )
    throughput_ignore_steps: int = setting(
        "first steps of a start that the mean throughput at the end of training leaves out (--log-throughput)", 0
    )
    log_epoch: bool = setting(
        "a line at the end of each epoch (--train-epochs), with the mean losses of its steps", False
    )
    log_memory_interval: Optional[int] = setting(
        "steps between lines about memory: what the fullest rank has, has had, and was planned to have", None
    )
    log_params_norm: bool = setting("the norm of all parameters in the log, every --log-interval steps", False)
    log_num_zeros_in_grad: bool = setting("how many elements of the gradient are 0, every --log-interval steps", False)
    metrics_file: Optional[str] = setting("JSON lines, one per logged step (default: metrics.jsonl under --save)", None)
    tensorboard_dir: Optional[str] = setting("folder for TensorBoard", None)
    visualdl_dir: Optional[str] = setting("folder for VisualDL, PaddlePaddle's TensorBoard", None)
    wandb_project: Optional[str] = setting("project name for Weights & Biases", None)
    wandb_exp_name: Optional[str] = setting("run name for Weights & Biases", None)
    peak_tflops: Optional[float] = setting(
        "peak TFLOP/s of one rank's device for MFU (default: table; of a CPU nothing, and no MFU)", None
    )
    hooks: Optional[list[str]] = setting(
        "code of your own that is called at named places of the loop: MODULE:CLASS ... (docs/extending.md)",
        None,
        on_resume="irrelevant",
    )
    seed: int = setting("seed of weights, data order and dropout, from 0 on", 1234, on_resume="refused")
    debug: bool = setting("tracebacks with error messages", False)


GROUPS = dict(
    model=Model,
    parallel=Parallel,
    tokenizer=TokenizerSettings,
    data=Data,
    batch=Batch,
    optimizer=Optimizer,
    recompute=Recompute,
    precision=Precision,
    kernels=Kernels,
    checkpoint=Checkpoint,
    guard=Guard,
    logging=Logging,
    planner=Planner,
    profiling=Profiling,
)


@dataclass(frozen=True)
class Config:
    """All groups of a pretraining run."""

    model: Model
    parallel: Parallel
    tokenizer: TokenizerSettings
    data: Data
    batch: Batch
    optimizer: Optimizer
    recompute: Recompute
    precision: Precision
    kernels: Kernels
    checkpoint: Checkpoint
    guard: Guard
    logging: Logging
    planner: Planner = Planner()
    profiling: Profiling = Profiling()
    extra: dict = field(default_factory=dict, hash=False)  # a recipe's own groups, by name
    # Who said what of each setting that is not at its default for want of a word: the record that `said` asks.
    statements: Mapping[str, Statement] = field(default_factory=dict, hash=False, compare=False)

    @property
    def groups(self) -> dict[str, object]:
        """All groups by name, a recipe's own after the others."""
        return {name: getattr(self, name) for name in GROUPS} | self.extra

    def said(self, name: str) -> Optional[Statement]:
        """What gave a setting its value; None where that is the default and nobody said anything.

        >>> shape = Model(num_layers=2, hidden_size=8, num_attention_heads=2)
        >>> config = from_record(dict(model=vars(shape))).derive("--auto-parallel", micro_batch_size=4)
        >>> config.said("micro_batch_size").words, config.said("seed")
        ('--auto-parallel', None)
        """
        return self.statements.get(name)

    def given(self, name: str) -> Optional[Statement]:
        """What somebody said of a setting on the command line or in a file, whatever was derived from it; None: nothing."""
        statement = self.said(name)
        while statement is not None and statement.source == SaidBy.DERIVED:
            statement = statement.earlier
        return statement if statement is not None and statement.is_given else None

    @property
    def given_words(self) -> dict[str, str]:
        """Setting -> the words of whoever gave it: `--max-steps 0`."""
        return {name: one.words for name in self.statements if (one := self.given(name))}

    def derive(self, by: str, **values) -> "Config":
        """The settings with these values in place of what they had, and the record of it. by: what derives them."""
        statements, groups = dict(self.statements), {}
        for name, group in self.groups.items():
            own = {one.name: values[one.name] for one in fields(group) if one.name in values}
            changed = {key: value for key, value in own.items() if value != getattr(group, key)}
            if changed:
                groups[name] = replace(group, **changed)
            for key, value in changed.items():
                statements[key] = Statement(key, value, SaidBy.DERIVED, words=by, earlier=statements.get(key))
        extra = {name: groups.pop(name, group) for name, group in self.extra.items()}
        return replace(self, **groups, extra=extra, statements=statements)

    def to_record(self) -> dict[str, Any]:
        """All settings as JSON has them, for checkpoints and logs; `given`: in the words of whoever gave them."""
        groups = {name: asdict(group) for name, group in self.groups.items() if name not in self.extra}
        return groups | dict(extra={name: asdict(group) for name, group in self.extra.items()}, given=self.given_words)


def from_record(record: dict, own_groups: Mapping[str, type] = MappingProxyType({})) -> Config:
    """The settings that a checkpoint's state holds. Settings that it does not know keep their defaults.

    own_groups: of the recipe (`model.recipe.config_of` knows them).

    >>> from_record(dict(model=dict(num_layers=2, hidden_size=8, num_attention_heads=2, gone=1))).model.num_layers
    2
    """

    def made(group: type, values: dict):
        known = {f.name for f in fields(group)}
        return group(**{key: value for key, value in values.items() if key in known})

    extra = record.get("extra", {})
    return Config(
        **{name: made(own_groups.get(name, group), record.get(name, {})) for name, group in GROUPS.items()},
        extra={name: made(group, extra.get(name, {})) for name, group in own_groups.items() if name not in GROUPS},
    )
