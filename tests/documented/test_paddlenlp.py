# SPDX-License-Identifier: Apache-2.0
"""System A's training command, word for word as it is printed."""

from megatron.settings.parse import parse_pretrain
from megatron.training.rules import check, resolve


def test_the_whole_training_command_is_read(calls, capsys, monkeypatch):
    monkeypatch.setenv("MEGATRON_CACHE", "/nowhere")
    [words] = calls("A_train.sh", task_name="gpt3")
    own = words[words.index("run_pretrain_static.py") + 1 :]
    assert {"4--mp_degree", "0.01--warmup_rate", "1--eval_freq"} <= set(own)  # lines end in a backslash without a blank
    [said] = check(parse_pretrain(own), 8)  # they know the vocabulary by the name gpt2-en
    assert said.startswith("no vocabulary is given; --vocab-file vocab.json --merge-file merges.txt")
    assert said.endswith("or put vocab.json and merges.txt into /nowhere/gpt2-en")
    capsys.readouterr()
    config = parse_pretrain([*own, "--vocab-file", "vocab.json", "--merge-file", "merges.txt"])
    p, b, o, k = config.parallel, config.batch, config.optimizer, config.checkpoint
    assert (p.sharding_degree, p.tensor_model_parallel_size, p.dp_degree, p.sharding_stage) == (4, 2, 1, 1)
    assert (b.micro_batch_size, b.global_batch_size, b.train_iters, b.eval_interval) == (8, 32, 500000, 10000)
    assert (o.lr, o.min_lr, o.lr_decay_iters, o.weight_decay, o.lr_warmup_fraction) == (15e-5, 1e-5, 320000, 0.01, 0.01)
    assert (o.clip_grad, config.logging.log_interval) == (1.0, 1)
    assert (k.save, k.save_interval, config.data.data_path) == ("output/gpt3", 100000, ["./data"])
    assert (config.model.num_layers, config.model.seq_length, config.model.model_type) == (12, 1024, "GPT")
    assert (config.precision.precision, config.precision.amp_level) == ("fp16", "O1")
    assert config.precision.initial_loss_scale == 32768
    assert config.recompute.recompute_granularity == "full"
    assert config.kernels.device == "cuda" and check(config, 8) == []
    assert resolve(config, 8).parallel.data_parallel_size == 4
    told = capsys.readouterr().err
    for first, second in (("4", "--mp_degree"), ("0.01", "--warmup_rate"), ("1", "--eval_freq")):
        assert "note: --decay-steps without --lr-decay-style: linear, as in Megatron-LM; PaddleNLP's is cosine" in told
        assert f"note: '{first}{second}' is read as {first} and {second}: the line before lacks a blank" in told
