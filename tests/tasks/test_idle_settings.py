# SPDX-License-Identifier: Apache-2.0
"""Every setting of pretraining is used by fine-tuning, refused, or named in a note: a walk over all of them."""

import re
from dataclasses import fields

import pytest

from megatron.data.epochs import in_samples
from megatron.model.command_line import parse_any
from megatron.settings.declare import declared
from megatron.settings.schema import GROUPS
from megatron.tasks.finetune import recipe
from megatron.training.rules import check, idle, remarks
from tests.tasks.classification import SIZE, Toy

# Settings of these groups are about how a model is trained, whatever its loss and its samples are.
ALIKE = "parallel tokenizer optimizer recompute precision checkpoint guard logging planner profiling".split()
USED = """
    hybrid_layer_pattern mtp_num_layers no_rope_freq hybrid_attention_ratio hybrid_mlp_ratio
    layer_settings heterogeneous_layers_config_path heterogeneous_layers_config_encoded_json
    experimental_attention_variant attention_output_gate
    num_layers num_experts hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size kv_channels
    group_query_attention num_query_groups multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim
    v_head_dim position_embedding_type normalization norm_epsilon norm_position qk_layernorm
    swiglu geglu quick_geglu scale_embedding query_pre_attn_scalar squared_relu attn_logit_softcapping disable_bias_linear
    softmax_type
    linear quantization sparsity lora_rank lora_alpha lora_dropout lora_target lora_split_fused use_rslora
    use_dora
    apply_query_key_layer_scaling hidden_dropout
    attention_dropout init_method_std make_vocab_size_divisible_by model_type model_name_or_path
    data_path mock_data full_validation dataloader_type collate_fn num_workers
    micro_batch_size global_batch_size local_batch_size gradient_accumulation_steps rampup_batch_size
    step_batch_size_schedule train_iters train_samples train_epochs eval_epoch exit_interval exit_duration_in_mins
    device torch_compile attention_backend flash_attention_version masked_softmax_fusion fuse_attn_qkv
    deterministic_mode manual_gc_interval
""".split()
# Refused when the data are opened (test_requests.py), or by themselves without a teacher when the command line is read
LATER = ["eval_requests", "kd_hidden_projections"]
REFUSED = {
    "label_smoothing": "--label-smoothing 0.2",
    "z_loss_coeff": "--z-loss-coeff 0.1",
    "eod_mask_loss": "--eod-mask-loss",
    "reset_position_ids": "--reset-position-ids",
    "reset_attention_mask": "--reset-attention-mask",
    "teacher_load": "--teacher-load d",
    "teacher_logits": "--teacher-logits d",
    "train_data_path": "--train-data-path d",
    "valid_data_path": "--valid-data-path d",
    "test_data_path": "--test-data-path d",
}
WORDS = "--pet-pattern {label}:{text} --pet-verbalizer v.json --pet-loss words"
NAMED = {  # name -> (flags that set it, flags that give it an effect; None: there are none)
    "split": ("--split 9,1,0", None),
    "dataset_type": ("--dataset-type webtext", None),
    "data_cache_path": ("--data-cache-path d", None),
    "verify_data": ("--verify-data", None),
    "object_storage_cache_path": ("--object-storage-cache-path d", None),
    "mmap_bin_files": ("--no-mmap-bin-files", None),
    "eval_iters": ("--eval-iters 3", None),
    "test_iters": ("--test-iters 3", None),
    "eval_same_samples": ("--eval-same-samples", None),
    "cross_entropy_chunk": ("--cross-entropy-chunk 4", WORDS),
    "cross_entropy_loss_fusion": ("--no-cross-entropy-loss-fusion --device cuda", WORDS),
    "final_logit_softcapping": ("--final-logit-softcapping 3", WORDS),
    "untie_embeddings_and_output_weights": ("--untie-embeddings-and-output-weights", WORDS),
    "patience": ("--patience 3 --eval-epoch 2", "--eval-interval 2"),
    "stop_at_loss": ("--stop-at-loss 1 --eval-epoch 2", "--eval-epoch 1"),
    "pet_loss": ("--pet-loss words", "--pet-pattern {label}:{text} --pet-verbalizer v.json"),
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Settings of finetune.py -> what they are."""
    toy = Toy(tmp_path_factory.mktemp("toy"))
    base = f"{SIZE} --task {toy.yaml} --data-path {toy.folder} --global-batch-size 8 --lr 1e-3"

    def made(flags: str):
        length = "" if "--train-iters" in flags else "--train-epochs 2"
        settings = parse_any(f"{base} {length} --then {flags}".split(), description="", recipe=recipe())
        return in_samples(settings, True, recipe().epoch_samples)

    return made


def test_every_setting_is_used_or_refused_or_named():
    conditions = {name for name, one in declared("needs", *GROUPS.values()).items() if not one.of_network}
    judged = [*USED, *LATER, *REFUSED, *conditions, *recipe().idle]
    wanting = {field.name for name, group in GROUPS.items() if name not in ALIKE for field in fields(group)}
    assert wanting <= set(judged), "say what each does in fine-tuning: tasks/finetune.py, or USED here"
    assert len(USED) + len(REFUSED) + len(NAMED) == len({*USED, *REFUSED, *NAMED})
    assert set(NAMED) <= set(recipe().idle) | conditions


@pytest.mark.parametrize("name", REFUSED)
def test_a_setting_that_a_task_cannot_have_is_refused(name, config):
    flag = REFUSED[name]
    assert [sentence for sentence in check(config(flag), 1) if sentence.startswith(flag.split()[0])]
    assert check(config(""), 1) == []
    if name in ("label_smoothing", "z_loss_coeff"):
        assert check(config(f"{flag} {WORDS}"), 1) == []


def test_files_beside_mock_data_are_refused(config):
    [said] = check(config("--mock-data --train-iters 2 --test-data test.tsv"), 1)
    assert re.search(
        r"--mock-data reads no files, and files are given \(--data-path \S+, --test-data test.tsv\); drop", said
    )


@pytest.mark.parametrize("name", NAMED)
def test_a_setting_without_effect_is_named(name, config):
    flags, enough = NAMED[name]
    assert idle(config(flags), 1)[name].startswith(f"{flags.split()[0]} ")
    assert name not in idle(config(""), 1)
    assert enough is None or name not in idle(config(f"{flags} {enough}"), 1)


@pytest.mark.parametrize(
    "flags, said",
    {
        "--eval-epoch 3": "--eval-epoch 3 is beyond --train-epochs 2: evaluation happens at the end alone",
        "--eval-epoch 3 --eval-interval 2": "--eval-epoch 3 is beyond --train-epochs 2: evaluation happens by "
        "--eval-interval and at the end alone",
        "--eval-interval 6": "--eval-interval 6 is beyond the 5 steps of this run: evaluation happens by --eval-epoch and "
        "at the end alone",
    }.items(),
)
def test_evaluations_beyond_the_end_are_named(flags, said, config):
    assert said in remarks(config(flags), 1)
    for unsaid in ("--eval-interval 5", "--train-iters 2"):
        assert not [words for words in remarks(config(unsaid), 1) if "beyond" in words]
