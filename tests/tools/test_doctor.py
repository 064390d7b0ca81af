# SPDX-License-Identifier: Apache-2.0
"""The doctor speaks of everything that the kernel table lists, as text and as JSON."""

import json

from megatron.fused_kernels import TABLE
from megatron.tools import doctor


def test_text_names_every_kernel(capsys):
    doctor.main([])
    text = capsys.readouterr().out
    for entries in TABLE.values():
        for entry in entries:
            assert entry.name in text
            assert entry.lacking in text
    assert "bf16 instructions" in text and "GPUs" in text


def test_json(capsys):
    doctor.main(["--json"])
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["kernels"]) == list(TABLE)
    assert facts["software"]["torch"]
