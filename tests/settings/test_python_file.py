# SPDX-License-Identifier: Apache-2.0
"""`--config FILE.py`: what it says against the same words in YAML; and nothing of it is run."""

import pytest

from megatron.errors import UsageError
from megatron.settings.parse import parse_pretrain

PYTHON = '''"""A run."""
num_layers = 3
hidden_size = 64  # channels
lr = 1e-4
weight_decay = -0.0
model = dict(num_attention_heads=4, seq_length=16)
data = {"data_path": [0.3, "a", 0.7, "b"], "data-cache-path": "cache"}
swiglu = True
load = None
tokenizer_type = "NullTokenizer"
vocab_size = 2_000
'''
YAML = """num_layers: 3
hidden_size: 64
lr: 1e-4
weight_decay: -0.0
model: {num_attention_heads: 4, seq_length: 16}
data: {data_path: [0.3, a, 0.7, b], data-cache-path: cache}
swiglu: true
load: null
tokenizer_type: NullTokenizer
vocab_size: 2000
"""


def test_it_says_what_yaml_says(tmp_path):
    (tmp_path / "run.py").write_text(PYTHON)
    (tmp_path / "run.yaml").write_text(YAML)
    one, other = (parse_pretrain(["--config", str(tmp_path / name), "--lr", "3"]) for name in ("run.py", "run.yaml"))
    assert one.groups == other.groups and one.optimizer.lr == 3.0  # the command line comes last
    assert one.data.data_path == ["0.3", "a", "0.7", "b"] and one.model.swiglu and one.checkpoint.load is None


@pytest.mark.parametrize(
    "line, said",
    [
        ("from titans.model import gpt2_small", "run.py:2: `from titans.model import gpt2_small` would have to be run"),
        ("hidden_size = 9**9**9", "run.py:2: `9 ** 387420489` would have to be run"),
        ("hidden_size = max(1, 2)", "run.py:2: `max(1, 2)` would have to be run"),
        ("model = dict(num_layers=x)", "run.py:2: `x` would have to be run"),
        ("model = {3: 4}", "run.py:2: `{3: 4}` would have to be run"),
        ("data_path = [[1], [2]]", "run.py:2: `[[1], [2]]` would have to be run"),
        ("a = b = 3", "run.py:2: `a = b = 3` would have to be run"),
        ("if True: num_layers = 3", "run.py:2: `if True:` would have to be run"),
        ("open('ran', 'w')", "run.py:2: `open('ran', 'w')` would have to be run"),
        ("hidden_size = [open('ran', 'w'), 3]", "run.py:2: `[open('ran', 'w'), 3]` would have to be run"),
        ("num_layers = = 3", "run.py:2: not Python"),
        ("num_layer = 3", "run.py:2: "),
        ("num_layers = 4\nnum_layers = 5", "run.py:3: num_layers is given twice (also in line 2)"),
    ],
)
def test_what_would_have_to_be_run(tmp_path, monkeypatch, line, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.py").write_text(f"ffn_hidden_size = 8\n{line}\n")
    with pytest.raises(UsageError) as caught:
        parse_pretrain(["--config", "run.py"])
    assert said in str(caught.value) and not (tmp_path / "ran").exists()


def test_names_and_arithmetic_are_values(tmp_path):
    (tmp_path / "run.py").write_text(
        "width = 2**5\nnum_layers = 2\nhidden_size = 4 * width\nnum_attention_heads = num_layers\nlr = 1 / 4\n"
        "model = dict(seq_length=width - 1 + 2 % 4)\nmicro_batch_size: int = 7 // 2\n"
    )
    config = parse_pretrain(["--config", str(tmp_path / "run.py")])
    assert (config.model.hidden_size, config.model.num_attention_heads, config.model.seq_length) == (128, 2, 33)
    assert (config.optimizer.lr, config.batch.micro_batch_size) == (0.25, 3)
    (tmp_path / "run.py").write_text("num_layers = 2\nwidth = 3\nimport os\nx = os.y\n")
    with pytest.raises(UsageError, match=r"(?s)2 lines would have to be run.*run.py:4: `os.y`.*run.py:3: `import os`"):
        parse_pretrain(["--config", str(tmp_path / "run.py")])
