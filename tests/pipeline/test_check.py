# SPDX-License-Identifier: Apache-2.0
import re
import subprocess
import sys

import pytest

from megatron.errors import DataError, SettingsError, StorageError
from megatron.pipeline.check import main
from megatron.pipeline.data_parallel_messages import passes_of
from megatron.pipeline.schedule import stage_map
from megatron.pipeline.simulate import make_rank_schedules, simulate
from megatron.pipeline.timeline import Timeline, read_timeline


def test_command_compares_schedules(capsys):
    main("--pp 4 --micro 8".split())
    out = capsys.readouterr().out
    assert "27.3%" in out and "zb-h1" in out and "v-half" in out and "rank  3 |" in out
    assert out.count("interleaved") == 2 and "1f1b" in out


def test_command_draws_svg(tmp_path, capsys):
    path = tmp_path / "plan.svg"
    main(["--pp", "2", "--micro", "3", "--schedule", "zb-v", "--no-diagram", "--svg", str(path)])
    assert path.read_text().count("<title>") == 2 * 3 * 6 and "rank  0" not in capsys.readouterr().out
    with pytest.raises(StorageError):
        main(["--svg", str(tmp_path / "no" / "plan.svg"), "--no-diagram"])


def drawn(path):
    """{title of a panel: [(op, left, width) of each block]}, the scale of its axis, and the legend, of a picture."""
    text, panels = path.read_text(), {}
    for line in text.splitlines():
        if title := re.search(r'class="title">(.*?)</text>', line):
            panels[title[1]] = own = []
        if block := re.search(r'<rect x="([\d.]+)" .*?width="([\d.]+)".*?<title>(\S+)</title>', line):
            own.append((block[3], float(block[1]), float(block[2])))
    marks = {
        float(word): float(x) for x, word in re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d.]+)<', text)
    }
    (a, left), *_, (b, right) = sorted(marks.items())
    return panels, left, (right - left) / (b - a), text


def test_the_picture_says_what_the_table_says(tmp_path, capsys):
    """Spans and bubbles of the table are those of the picture, on the scale of its own axis; chunks have their share."""
    main(["--pp", "4", "--micro", "8", "--no-diagram", "--svg", str(tmp_path / "all.svg")])
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    panels, zero, unit, _ = drawn(tmp_path / "all.svg")
    assert len(rows) == len(panels) == 6
    for (name, chunks, span, bubble, *_), (title, blocks) in zip(rows, panels.items(), strict=True):
        assert title.startswith(name) and title.endswith(f"bubble {bubble}")
        assert max(left + width for _, left, width in blocks) == pytest.approx(
            zero + float(span) * unit, abs=0.1 * unit
        )
        widths = [width for op, _, width in blocks if op.startswith("F")]
        assert widths == pytest.approx([unit / int(chunks)] * (4 * 8 * int(chunks)), abs=0.02)
        busy = sum(width for _, _, width in blocks)
        assert f"{1 - busy / (4 * unit * float(span)):.1%}" == bubble


def test_every_shade_of_a_picture_has_its_word(tmp_path):
    for flags in ("--schedule zb-v", "--schedule 1f1b", "--schedule interleaved --zero 3 --update 1", ""):
        main([*flags.split(), "--no-diagram", "--svg", str(tmp_path / "one.svg")])
        text = (tmp_path / "one.svg").read_text()
        legend = re.findall(r'height="16" (?:fill="(#\w+)"|class="idle")/>\n<text[^>]*>([^<]+)<', text)
        used = re.findall(r'fill="(#\w+)" stroke="#fff"', text)
        assert {"", *used} == {fill for fill, _ in legend} and ("", "waiting (bubble)") in legend
        for column in zip(*legend, strict=True):
            assert len(set(column)) == len(legend)  # no shade and no word stands for two things


def test_command_takes_costs():
    main("--cost 1,1,1,1 --no-diagram --schedule 1f1b".split())
    for cost in ("1,2,0,1", "1,2,nan,1", "1,2,inf,1"):
        with pytest.raises(SettingsError, match="four times"):
            main(["--cost", cost])
    for flags, words in (("--wire -1", "--wire -1 must"), ("--pp 0", "0 ranks"), ("--chunks 0", "0 model chunks each")):
        with pytest.raises(SettingsError, match=words):
            main(flags.split())


def _timeline(late=0.0, name="zb-h1", num_microbatches=3, hidden=None):
    plan, stages = make_rank_schedules(name, 2, num_microbatches), stage_map(name, 2)
    times = simulate(plan, stages, hidden=hidden)
    ranks = [
        [(op, 5 + times[rank, op][0] + late * rank, 5 + times[rank, op][1] + late * rank) for op in passes_of(ops)]
        for rank, ops in enumerate(plan)
    ]
    return Timeline(name, stages, ranks)


def test_a_timeline_survives_its_file_and_is_laid_over_the_simulation(tmp_path, capsys):
    path = tmp_path / "step.json"
    _timeline().write(str(path))
    assert read_timeline(str(path)) == _timeline()
    main(["--timeline", str(path), "--svg", str(tmp_path / "both.svg")])
    out = capsys.readouterr().out
    assert "ratio:     1.000" in out and "measured" in out and "W 1000.00 ms" in out
    assert (tmp_path / "both.svg").read_text().count("<title>") == 2 * 2 * 9
    _timeline(late=1.0).write(str(path))
    main(["--timeline", str(path)])
    assert "ratio:     1.100" in capsys.readouterr().out


def test_passes_in_turns_are_simulated_drawn_and_compared(tmp_path, capsys):
    flags = "--pp 2 --micro 6 --schedule 1f1b --overlap-moe-expert-parallel-comm --exchange 0.3"
    main([*flags.split(), "--svg", str(tmp_path / "one.svg")])
    out = capsys.readouterr().out
    # Each of (m + pp - 1) passes F and B, without the 0.6 that each of 5 pairs of the last rank saves.
    assert re.search(rf"1f1b & +1 +{(6 + 2 - 1) * 3 - 5 * 0.6:.1f} ", out)
    assert re.search(r"rank  1 \|  +F0-+F1&B0=+F2&B1=+F3&B2=+F4&B3=+F5&B4=+B5=+$", out, re.MULTILINE)
    picture = (tmp_path / "one.svg").read_text()
    assert (
        picture.count("<title>") == 2 * 2 * 6 and picture.count('height="10"') == 2 * (3 + 5) and "5&amp;4<" in picture
    )
    path = tmp_path / "step.json"
    own = dict(name="1f1b &", num_microbatches=6, hidden=lambda *_: 0.5)
    _timeline(**own).write(str(path))
    assert read_timeline(str(path)).plan == make_rank_schedules("1f1b &", 2, 6)
    main(["--timeline", str(path)])
    out = capsys.readouterr().out
    assert "ratio:     1.000" in out and "F & B 2500.00 ms" in out and "F 1000.00 ms" in out
    for more, words in (
        ("--exchange 1.5", "must be a part of the time"),
        ("--schedule gpipe", "no passes that could take"),
    ):
        with pytest.raises(SettingsError, match=words):
            main([*flags.split(), *more.split()])


HEAD = '{"schedule": "1f1b", "stages": [[0, 0]], "ranks": '


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"ranks": [[["X", 1, 2]]], "stages": []}',
        '{"ranks": [[1]]}',
        HEAD + "[]}",
        HEAD + "[[]]}",
        HEAD + '[[["F0", 0, 0], ["B0", 0, 0]]]}',
        HEAD + '[[["B0", 0, 1]]]}',
        HEAD + '[[["F0", 0, 1], ["B0", 1, 2]], [["F0", 0, 1], ["B0", 1, 2]]]}',
    ],
)
def test_what_is_no_timeline_is_told(text, tmp_path):
    (tmp_path / "step.json").write_text(text)
    with pytest.raises(DataError, match="is no timeline"):
        main(["--timeline", str(tmp_path / "step.json")])
    with pytest.raises(DataError, match="cannot read"):
        main(["--timeline", str(tmp_path / "other.json")])


def test_command_shows_a_schedule_of_ones_own(tmp_path, capsys):
    path = tmp_path / "own.txt"
    path.write_text("F0 F1 B0 B1\nF0 B0 F1 B1\n")
    main(["--schedule", str(path)])
    out = capsys.readouterr().out
    assert "2 ranks, 2 micro-batches" in out and "own.txt" in out and "rank  1 |" in out


def test_messages_of_data_parallelism_are_listed_as_a_file_has_them(tmp_path, capsys):
    """The lines that the command prints are a schedule file with the same times; moved, they give others."""
    flags = "--pp 2 --micro 4 --zero 3 --layers 2 --no-diagram".split()
    main([*flags, "--schedule", "1f1b", "--list-ops"])
    *_, first, second, numbers = capsys.readouterr().out.splitlines()
    assert first.startswith("G0:in g0:in F0:in G0:0 g0:0 F0:0 D0:0") and "r3:in" in first
    path = tmp_path / "own.txt"
    spans = []
    for text in (
        f"{first}\n{second}\n",
        f"{first.replace('G0:1 g0:1', 'g0:1').replace('F0:0', 'G0:1 F0:0')}\n{second}",
    ):
        path.write_text(text)
        main([*flags, "--schedule", str(path)])
        spans.append(float(capsys.readouterr().out.splitlines()[-1].split()[2]))
    assert spans[0] == float(numbers.split()[2]) > spans[1]
    main([*flags[:4], "--schedule", str(path), "--no-diagram"])  # the passes alone
    assert float(capsys.readouterr().out.splitlines()[-1].split()[2]) == 15.0
    path.write_text(f"{first.replace('E0:0', '')}\n{second}\n")
    with pytest.raises(SettingsError, match="rank 0 cannot run this list\n  G2:0 needs weights of chunk 0, layer 0"):
        main([*flags, "--schedule", str(path)])


def test_command_refuses_what_cannot_run():
    code = subprocess.run(
        [sys.executable, "-m", "megatron.pipeline.check", *"--pp 4 --micro 6 --chunks 2 --schedule zb-h1".split()],
        capture_output=True,
        text=True,
    )
    assert code.returncode == 3 and "one model chunk a rank" in code.stderr and "Traceback" not in code.stderr
