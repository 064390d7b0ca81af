# SPDX-License-Identifier: Apache-2.0
"""The doctor speaks of everything that the kernel table lists, as text and as JSON."""

import json

import torch

from megatron.fused_kernels import TABLE, cpu_ops
from megatron.tools import doctor


def test_text_names_every_kernel(capsys):
    doctor.main([])
    short = " ".join(capsys.readouterr().out.split())
    ready = lambda entry: not (entry.lacking or entry.probe())
    assert all(entry.name in short for entries in TABLE.values() for entry in entries if ready(entry))
    doctor.main(["--all"])
    text = capsys.readouterr().out
    assert len(text) > 2 * len(short)
    for entries in TABLE.values():
        for entry in entries:
            assert entry.name in text
            assert entry.lacking in text
    assert "bf16 instructions" in text and "GPUs" in text
    assert ("bfloat16" in text) == (torch.bfloat16 in cpu_ops.FORMATS)


def test_json(capsys):
    doctor.main(["--json"])
    facts = json.loads(capsys.readouterr().out)
    assert list(facts["kernels"]) == list(TABLE)
    assert facts["software"]["torch"]


def test_the_network(capsys, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    found = doctor._network()
    assert "a rank meets its store and sums" in found["gloo"] and "lo " in found["interfaces"]
    assert found["chosen by hand"] == "GLOO_SOCKET_IFNAME=lo"
    monkeypatch.setattr(doctor.socket, "gethostbyname", lambda host: "127.0.1.1")
    assert "only this machine reaches that" in doctor._address("laptop")


def test_a_host_without_an_address(monkeypatch):
    def unknown(host):
        raise OSError(-2, "Name or service not known")

    monkeypatch.setattr(doctor.socket, "gethostbyname", unknown)
    assert "add it to /etc/hosts" in doctor._address("laptop")


def test_a_network_that_does_not_work(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    assert doctor._collective("gloo", "cpu").startswith("FAILS: ")
