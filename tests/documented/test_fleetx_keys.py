# SPDX-License-Identifier: Apache-2.0
"""PaddleFleetX's YAML, key by key: another value is another run, or the key is named in what is told."""

from pathlib import Path

import pytest
import yaml

from megatron.errors import UsageError
from megatron.settings.dialects import fleetx
from megatron.settings.dialects.fleetx_files import SECTIONS, read
from megatron.settings.parse import parse, parse_pretrain
from megatron.tools.evaluate import EvaluateOptions
from megatron.tools.generate import GenerateOptions, Sampling

FILE = Path(__file__).parent / "E_config.yaml"
# Keys that the rows of the audit name beside those of the file, with a value that asks for something.
ROWS = """
Engine.run_mode=epoch Engine.mix_precision.use_fp16_guard=True
Model.vocab_size_divisible_unit=64 Model.virtual_pp_degree=2 Model.scale_qk_by_layer_num=True Model.use_flash_attn=True
Model.fused_softmax_with_triangular=False Model.use_memory_attn=True Model.pretrained=weights
Data.Train.collate_fn=own_collate Data.Train.sample_split=2 Data.Train.sampler.batch_size=32
Data.Eval.dataset.input_dir=elsewhere Data.Eval.dataset.split=[8,1,1] Data.Eval.dataset.max_seq_len=99
Data.Eval.dataset.name=LM_Eval_Dataset Data.Eval.sampler.shuffle=True Data.Eval.sampler.drop_last=False
Data.Eval.sampler.batch_size=4 Data.Eval.loader.num_workers=9 Data.Eval.loader.collate_fn=own Data.Eval.sample_split=3
Data.Test.dataset.input_dir=elsewhere Data.Test.sampler.drop_last=True
Distributed.dp_degree=2 Distributed.mp_degree=2 Distributed.pp_degree=2 Distributed.pp_recompute_interval=2
Distributed.sharding.sharding_degree=2 Distributed.sharding.sharding_offload=True
Distributed.sharding.comm_overlap=True Distributed.sharding.reduce_overlap=True
Distributed.sharding.broadcast_overlap=True Distributed.schedule_mode=gpipe
Distributed.fuse_sequence_parallel_allreduce=True
Optimizer.multi_precision=True Optimizer.lr.use_increments=True Optimizer.lr.warmup=0.2 Optimizer.lr.learning_rate=3e-5
FusedPasses.enable=True FusedPasses.fused_passes_list=[x] Fused.tensor_fusion=True
Offline_Eval.eval_path=x Offline_Eval.cloze_eval=True Offline_Eval.overlapping_eval=32 Offline_Eval.batch_size=8
Offline_Eval.max_seq_len=1024 Offline_Eval.logging_freq=10
Generation.top_k=50 Generation.top_p=0.75 Generation.temperature=1.0 Generation.min_dec_len=1
Generation.max_dec_len=200 Generation.num_return_sequences=1 Generation.decode_strategy=sampling
Inference.model_dir=x Inference.mp_degree=2 Tuning.enable=True Tuning.profile_start_step=1 Profiler.enable=True
Quantization.enable=True Compress.Prune.enable=True Compress.Quantization.enable=True Compress.pretrained=x
""".split()
# Of the file: key -> another value, where a word or a number alone would be refused as unreadable.
OTHERS = {
    "Engine.mix_precision.dtype": "bfloat16",
    "Engine.mix_precision.level": "O1",
    "Model.use_recompute": "False",
    "Model.recompute_granularity": "core_attn",
    "Data.Train.dataset.split": "[8,1,1]",
    "Engine.num_train_epochs": "3",
}


def run(*overrides: str, capsys):
    """(settings, or the words of a refusal; what was told) of the file with overrides."""
    words = [word for one in overrides for word in ("-o", one)]
    try:
        config = parse_pretrain(["-c", str(FILE), *words])
    except UsageError as error:
        config = str(error)
    return config, capsys.readouterr().err


def leaves(mapping: dict, prefix: str = "") -> dict[str, object]:
    found = {}
    for key, value in mapping.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


KEYS = leaves(yaml.safe_load(FILE.read_text()))


def another(key: str) -> str:
    value = KEYS[key]
    if key in OTHERS:
        return OTHERS[key]
    if isinstance(value, bool):
        return str(not value)
    if isinstance(value, (int, float)):
        return str(value * 2)
    return "7" if value is None else "another"


def differs_or_is_named(key: str, value: str, capsys) -> bool:
    plain, changed = run(capsys=capsys), run(f"{key}={value}", capsys=capsys)
    named = key in changed[1] or isinstance(changed[0], str) and key in changed[0]
    return named or changed[0] != plain[0]


def test_the_file_is_read_whole(capsys):
    config, told = run(capsys=capsys)
    assert not isinstance(config, str), config
    assert len(KEYS) == 63
    m, b, o, p = config.model, config.batch, config.optimizer, config.precision
    shape = (m.num_layers, m.hidden_size, m.num_attention_heads, m.seq_length, m.init_method_std)
    lengths = (b.train_iters, b.local_batch_size, b.micro_batch_size, b.eval_interval, b.eval_iters)
    curve = (o.lr, o.min_lr, o.lr_decay_style, o.lr_decay_iters, o.lr_warmup_fraction)
    assert shape == (24, 1024, 16, 1024, 0.02) and lengths == (500000, 1, 1, 500, 10)
    assert curve == (5e-5, 1e-5, "cosine", 360000, 0.01)
    assert (p.precision, p.amp_level, p.initial_loss_scale) == ("fp16", "O2", 32768)
    assert (config.checkpoint.save, config.checkpoint.save_interval, config.logging.seed) == ("./output", 1000, 1024)
    assert (config.data.data_path, config.data.split) == (["./data/"], "949,50,1")
    for name in ("custom_black_list", "custom_white_list"):
        assert f"Engine.mix_precision.{name}" in told
    assert "Model.type_vocab_size" in told and "Engine.save_load.save_epoch" in told


@pytest.mark.sampled(5)
@pytest.mark.parametrize("key", KEYS)
def test_each_key_of_the_file(key, capsys):
    assert differs_or_is_named(key, another(key), capsys)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("row", ROWS)
def test_each_key_of_the_rows(row, capsys):
    key, _, value = row.partition("=")
    if key == "Distributed.fuse_sequence_parallel_allreduce":
        assert "tensor parallel ranks" in run(row, capsys=capsys)[1]
    assert differs_or_is_named(key, value, capsys)


def test_what_is_done_anyway_is_not_told(capsys):
    """The words of a file that asks for what happens here: nobody wants to read of them."""
    idle = [
        "Data.Eval.dataset.input_dir=./data/",
        "Data.Eval.sampler.shuffle=False",
        "Data.Eval.sampler.drop_last=True",
    ]
    idle += ["Compress.Quantization.enable=False", "Data.Train.loader.return_list=False", "Tuning.enable=False"]
    assert run(*idle, capsys=capsys) == run(capsys=capsys)


def test_the_earlier_name_of_the_switch(capsys):
    half = "Engine.mix_precision.enable=False", "Engine.mix_precision.use_pure_fp16=True"
    assert run(half[0], capsys=capsys)[0].precision.precision == "fp32"
    assert run(*half, capsys=capsys)[0].precision == run(capsys=capsys)[0].precision


def test_epochs_count_where_steps_do_not(capsys):
    config, told = run("Engine.num_train_epochs=3", capsys=capsys)
    assert config.batch.train_iters == 500000 and "Engine.num_train_epochs has no effect" in told
    config, _ = run("Engine.num_train_epochs=3", "Engine.max_steps=-1", capsys=capsys)
    assert config.batch.train_epochs == 3 and config.batch.train_iters is None and config.checkpoint.save_epoch == 1


def test_unknown_keys_are_errors_in_every_section(capsys):
    for key in (
        "Engine.mix_precision.levle",
        "Profiler.enabel",
        "Data.Train.sampler.shufle",
        "Engine.save_load.step",
        "Compress.X.enabl",
    ):
        assert f"-o {key} is no known key" in run(f"{key}=1", capsys=capsys)[0]


def test_generation_and_evaluation_read_their_sections(tmp_path):
    """The commands that these sections are for take their values, and nothing of the training data."""
    (tmp_path / "g.yaml").write_text(
        f"_base_: {FILE}\nGeneration: {{top_k: 50, top_p: 0.75, temperature: 0.5, max_dec_len: 200, "
        "num_return_sequences: 3, decode_strategy: greedy_search, min_dec_len: 1}\n"
        "Offline_Eval: {eval_path: l.jsonl, cloze_eval: True, overlapping_eval: 16, batch_size: 4, max_seq_len: 512}\n"
    )
    given = ["-c", str(tmp_path / "g.yaml"), "--load", "x"]
    made = parse(given, dict(generate=GenerateOptions, sampling=Sampling))
    sampling = made["sampling"]
    assert (sampling.top_k, sampling.top_p, sampling.temperature, sampling.greedy) == (50, 0.75, 0.5, True)
    assert (sampling.tokens_to_generate, made["generate"].num_samples) == (200, 3)
    assert sampling.min_tokens_to_generate == 1
    e = parse(given, dict(evaluate=EvaluateOptions))["evaluate"]
    assert (e.valid_data, e.task, e.overlapping_eval) == ("l.jsonl", "LAMBADA", 16)
    assert (e.micro_batch_size, e.seq_length) == (4, 512)
    assert e.data_path is None


def test_data_of_an_evaluation_that_are_missing_are_named_by_their_key(tmp_path):
    from megatron.errors import DataError
    from megatron.settings.parse import parse_with_record
    from megatron.tools import evaluate

    (tmp_path / "g.yaml").write_text("Offline_Eval: {eval_path: no.jsonl, cloze_eval: True}\n")
    made, said = parse_with_record(["-c", str(tmp_path / "g.yaml"), "--load", "x"], dict(evaluate=EvaluateOptions))
    with pytest.raises(DataError, match="g.yaml:1: Offline_Eval.eval_path.: no such file"):
        evaluate.check(made["evaluate"], said)


def test_every_table_names_keys_of_known_sections():
    assert all(key.split(".")[0] in SECTIONS for key in fleetx.KNOWN)
    assert set(read(str(FILE))) == set(KEYS)


def test_data_of_the_command_line_take_the_place_of_the_files(capsys):
    config = parse_pretrain(["-c", str(FILE), "--mock-data"])
    assert config.data.data_path is None and config.data.mock_data
    assert f"{FILE}:51" in (told := capsys.readouterr().err) and "gives way to the data of the command line" in told
    assert parse_pretrain(["-c", str(FILE), "--data-path", "mine"]).data.data_path == ["mine"]
