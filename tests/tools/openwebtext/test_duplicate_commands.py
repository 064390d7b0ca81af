# SPDX-License-Identifier: Apache-2.0
"""find_duplicates, group_duplicate_url, remove_group_duplicates: as documented, and against brute force in plain Python."""

import json
import random
import sys
from importlib.util import find_spec

import numpy as np
import pytest

from megatron.errors import DataError, Failure, SettingsError, UsageError
from megatron.tools.openwebtext import find_duplicates, group_duplicate_url, remove_group_duplicates

needs_rensa = pytest.mark.skipif(find_spec("rensa") is None, reason="the package rensa is missing")

# Each similar pair meets in a band: 1 - (1 - .5^2)^100
SURE = ["--num-bands", "100", "--num-seeds", "200"]


def write_lines(path, documents) -> str:
    path.write_text("".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents), "utf-8")
    return str(path)


def read_lines(path) -> list:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def corpus(seed: int, originals: int = 25) -> list[dict]:
    rng = random.Random(seed)
    letters = "abcdefghijklmnop \u4f60\u597d"
    documents = []
    for _ in range(originals):
        text = "".join(rng.choices(letters, k=rng.randrange(60, 300)))
        documents.append(dict(text=text))
        for _ in range(rng.randrange(4)):
            changed = list(text)
            for _ in range(rng.randrange(max(1, len(text) // 20))):
                changed[rng.randrange(len(changed))] = rng.choice(letters)
            documents.append(dict(text="".join(changed)))
    rng.shuffle(documents)
    return [dict(url=f"https://a.org/{n}", text=one["text"]) for n, one in enumerate(documents)]


def similarity(one: str, other: str, over: str = "union") -> float:
    a, b = ({text[at : at + 5] for at in range(len(text) - 4)} for text in (one, other))
    return len(a & b) / dict(union=len(a | b), min=min(len(a), len(b)), max=max(len(a), len(b)))[over]


def pairs_in(path) -> dict[tuple[str, str], float]:
    found = {}
    for line in read_lines(path):
        [(first, others)] = line.items()
        for [(other, value)] in map(dict.items, others):
            assert (first, other) not in found
            found[first, other] = value
    return found


@needs_rensa
@pytest.mark.parametrize("over", ["union", "min", "max"])
def test_all_pairs_of_brute_force_are_found(tmp_path, over):
    documents = corpus(seed=1)
    path = write_lines(tmp_path / "clean.json", documents)
    out = tmp_path / "stage_one.json"
    find_duplicates.main(["--inputs", path, "url", "--output", str(out), "--jaccard", over, *SURE])
    plain = {
        (one["url"], other["url"]): value
        for at, one in enumerate(documents)
        for other in documents[at + 1 :]
        if (value := similarity(one["text"], other["text"], over)) > 0.5
    }
    found = pairs_in(out)
    assert len(plain) > 20
    assert all(value == pytest.approx(plain[pair], abs=1e-6) for pair, value in found.items())  # precision
    # One round: what is similar to a bucket's first document has left it. Its group stays whole.
    assert group_of_pairs(found, 0.5) == group_of_pairs(plain, 0.5)


def group_of_pairs(pairs, threshold) -> set[frozenset]:
    groups: list[set] = []
    for pair, value in pairs.items():
        if value >= threshold:
            touched = [group for group in groups if group & set(pair)]
            groups = [group for group in groups if not group & set(pair)] + [set(pair).union(*touched)]
    return {frozenset(group) for group in groups}


@needs_rensa
def test_the_documented_three_steps(tmp_path, capsys):
    documents = corpus(seed=2)
    data = write_lines(tmp_path / "clean.json", documents)
    one, two, three = (tmp_path / name for name in ("process_stage_one.json", "process_stage_two.json", "dedup.json"))
    find_duplicates.main(["--inputs", data, "url", "--output", str(one), *SURE])
    expected = group_of_pairs(pairs_in(one), 0.7)
    for argv in ([], ["0.7"], ["--jaccard-threshold", "0.7"]):
        group_duplicate_url.main([str(one), str(two), *argv])
        lines = read_lines(two)
        assert [list(line) for line in lines] == [[str(number)] for number in range(len(lines))]
        assert {frozenset(names) for line in lines for names in line.values()} == expected
    remove_group_duplicates.main([str(two), data, str(three)])
    order = [document["url"] for document in documents]
    gone = {name for group in expected for name in sorted(group, key=order.index)[1:]}
    assert gone and three.read_bytes() == b"".join(
        line + b"\n"
        for line, document in zip((tmp_path / "clean.json").read_bytes().splitlines(), documents, strict=True)
        if document["url"] not in gone
    )
    assert f"removed: {len(gone)} " in capsys.readouterr().out


def test_the_first_of_the_file_stays_whatever_the_order_in_its_group(tmp_path, capsys):
    documents = [dict(id=number, url=name, text="x" * number) for number, name in enumerate("abcdefgb")]
    data, groups = (
        write_lines(tmp_path / "data.json", documents),
        [{"0": ["c", "a", "f"], "1": ["h"]}, {"2": ["g", "b"]}],
    )
    argv = [write_lines(tmp_path / "groups.json", groups), data, str(tmp_path / "out.json")]
    remove_group_duplicates.main(argv)
    gone = [2, 5, 6]  # c and f of the group of a; g of that of b, which stands there twice
    assert read_lines(tmp_path / "out.json") == [one for one in documents if one["id"] not in gone]
    assert capsys.readouterr().out == "written: 5, removed: 3 (characters: 13)\n"
    write_lines(tmp_path / "groups.json", [{"0": ["7", 3]}])  # documents named by numbers
    remove_group_duplicates.main([*argv, "--key", "id"])
    assert read_lines(tmp_path / "out.json") == documents[:7]


def test_a_threshold_divides_groups(tmp_path):
    lines = [{"a": [{"b": 0.95}, {"c": 0.6}]}, {"c": [{"d": 0.9}]}, {"e": [{"f": 0.69}]}]
    path, out = write_lines(tmp_path / "one.json", lines), tmp_path / "two.json"
    for threshold, groups in (("0.9", [["a", "b"], ["c", "d"]]), ("0.6", [["a", "b", "c", "d"], ["e", "f"]])):
        group_duplicate_url.main([path, str(out), threshold])
        assert [names for line in read_lines(out) for names in line.values()] == groups


@needs_rensa
def test_saved_and_loaded_is_as_at_once(tmp_path):
    documents = corpus(seed=3) + [dict(url="half", text="half of a pair: \ud800")]
    first, second = tmp_path / "cc.json", tmp_path / "news.json"
    first.write_text("".join(json.dumps(one) + "\n" for one in documents[:30]))
    second.write_text("".join(json.dumps(one | dict(news_id=one["url"])) + "\n" for one in documents[30:]))
    at_once = tmp_path / "at_once.json"
    find_duplicates.main(["--inputs", str(first), "url", str(second), "news_id", "--output", str(at_once)])
    saved = str(tmp_path / "cc.npz")
    find_duplicates.main(["--inputs", str(first), "url", "--save-fingerprints", saved])
    for name, argv in dict(
        extended=["--load-fingerprints", saved, "--inputs", str(second), "news_id", "--save-fingerprints", f"{saved}2"],
        loaded=["--load-fingerprints", f"{saved}2"],
        parallel=["--load-fingerprints", f"{saved}2", "--jaccard-parallel", "--workers", "2"],
    ).items():
        find_duplicates.main([*argv, "--output", str(tmp_path / name)])
        assert (tmp_path / name).read_bytes() == at_once.read_bytes()
    assert len(pairs_in(at_once)) > 10
    with pytest.raises(DataError, match="seed 1234 .now 5"):
        find_duplicates.main(["--load-fingerprints", saved, "--output", str(tmp_path / "x"), "--seed", "5"])


@needs_rensa
def test_more_rounds_find_what_leaves_a_bucket_early(tmp_path):
    """d is unlike the first of the bucket, and like the one after it."""
    base = "".join(random.Random(5).choices("abcdefghijklmnopqrstuvwxyz", k=400))
    documents = [dict(url="a", text=base[:250]), dict(url="b", text=base[100:]), dict(url="c", text=base[105:])]
    data, out = write_lines(tmp_path / "in.json", documents), tmp_path / "out.json"
    argv = ["--inputs", data, "url", "--output", str(out), "--num-bands", "1", "--num-seeds", "1", "--seed"]
    whole = {("b", "c")}
    for seed in range(40):  # until all three share their one number
        find_duplicates.main([*argv, str(seed), "--heuristic-iter", "-1"])
        every = set(pairs_in(out))
        find_duplicates.main([*argv, str(seed)])
        if every == whole and not pairs_in(out):
            return
    raise AssertionError("no seed puts all three into one bucket")


@needs_rensa
def test_odd_lines_are_told_of(tmp_path, capsys):
    text = "the same text, long enough to have shingles"
    rows = [
        "{broken",
        '{"url": "a"}',
        '{"text": "no name"}',
        "[1]",
        "",
        json.dumps(dict(url=7, text=text)),
        json.dumps(dict(url="b", text=text)),
        json.dumps(dict(url="b", text="another text under a name that was there")),
        json.dumps(dict(url="c", text="")),
        json.dumps(dict(url="d", text="")),
    ]
    (tmp_path / "in.json").write_text("\n".join(rows))
    out = tmp_path / "one.json"
    find_duplicates.main(["--inputs", str(tmp_path / "in.json"), "url", "--output", str(out)])
    assert read_lines(out) == [{"7": [{"b": 1.0}]}]
    told = capsys.readouterr().err
    for words in ("no JSON (", "no JSON object (", "no text (", "no url (", "have a name"):
        assert words in told
    group_duplicate_url.main([str(out), str(tmp_path / "two.json")])
    remove_group_duplicates.main([str(tmp_path / "two.json"), str(tmp_path / "in.json"), str(tmp_path / "three.json")])
    kept = (tmp_path / "three.json").read_text().splitlines()
    assert kept == [rows[1], rows[2], rows[5], *rows[8:]]
    assert "removed: 2 (" in capsys.readouterr().out


def test_a_missing_package_is_told_with_what_the_command_has(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "rensa", None)
    write_lines(tmp_path / "IN", [dict(url="a", text="some text of a page")])
    with pytest.raises(SettingsError, match="package rensa") as error:
        find_duplicates.main(["--inputs", str(tmp_path / "IN"), "url", "--output", str(tmp_path / "OUT")])
    assert error.value.do.split(";")[0] == "pip install '.[corpus]'" and "; in a recipe, kind" in error.value.do


F, G, R = find_duplicates.main, group_duplicate_url.main, remove_group_duplicates.main


@pytest.mark.parametrize(
    "main, argv, failure, words",
    [
        (F, [], UsageError, "nothing to compare"),
        (F, ["--inputs", "IN"], UsageError, "pairs of a file and a key"),
        (F, ["--inputs", "IN", "url"], UsageError, "nothing would be kept"),
        (F, ["--inputs", "none.json", "url", "--output", "OUT"], DataError, "none.json"),
        (F, ["--inputs", "IN", "id", "--output", "OUT"], DataError, "no document has both id and text"),
        (F, ["--inputs", "IN", "url", "--output", "OUT", "--num-bands", "7"], SettingsError, "multiple"),
        (F, ["--inputs", "IN", "url", "--output", "OUT", "--heuristic-iter", "0"], SettingsError, "-1"),
        (F, ["--inputs", "IN", "url", "--output", "OUT", "--jaccard", "mean"], UsageError, "union"),
        (F, ["--inputs", "IN", "url", "--output", "OUT", "--jaccard-threshold", "1"], SettingsError, "below 1"),
        (F, ["--load-fingerprints", "IN", "--output", "OUT"], DataError, "pickles"),
        (F, ["--load-fingerprints", "PICKLE", "--output", "OUT"], DataError, "pickles"),
        (F, ["--load-fingerprints", "NPZ", "--output", "OUT"], DataError, "pickles"),
        (G, ["IN"], UsageError, "IN OUT"),
        (G, ["IN", "OUT"], DataError, "find_duplicates"),
        (G, ["ONE", "OUT", "much"], UsageError, "no threshold"),
        (G, ["ONE", "OUT", "1.5"], SettingsError, "0 to 1"),
        (G, ["ONE", "OUT", "0.5", "--jaccard-threshold", "0.6"], UsageError, "twice"),
        (R, ["ONE", "IN", "OUT"], DataError, "group_duplicate_url"),
        (R, ["TWO", "none.json", "OUT"], DataError, "none.json"),
        (R, ["TWO", "IN", "OUT", "--key", "id"], DataError, "--key"),
        (R, ["TWO", "IN"], UsageError, "GROUPS DATA OUT"),
    ],
)
def test_wrong_calls(tmp_path, main, argv, failure, words):
    import pickle

    write_lines(tmp_path / "IN", [dict(url="a", text="some text")])
    write_lines(tmp_path / "ONE", [{"a": [{"b": 0.9}]}])
    write_lines(tmp_path / "TWO", [{"0": ["a", "b"]}])
    (tmp_path / "PICKLE").write_bytes(pickle.dumps(dict(a="text")))
    np.savez(tmp_path / "objects.npz", facts=np.array([{}], dtype=object))
    (tmp_path / "objects.npz").rename(tmp_path / "NPZ")
    argv = [str(tmp_path / word) if word.isupper() or word.endswith(".json") else word for word in argv]
    with pytest.raises(failure) as found:
        main(argv)
    assert words in str(found.value)
    assert isinstance(found.value, Failure) and not (tmp_path / "OUT").exists()
    assert not list(tmp_path.glob(".*"))
