# SPDX-License-Identifier: Apache-2.0
"""Each stage and filter that a recipe can name, through the commands, on documents of many kinds.

What stands in the registry is tried without being named here; one that needs options has them in NEEDS. Looked at is what
really stands in the shards: the counts of the receipts, the verdicts of `explain`, and the summary have to agree with it.
"""

import json
import pydoc_data.topics
import random
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import zstandard

from megatron.corpus import explain, registry
from megatron.corpus import report as corpus_page
from megatron.corpus.counts import summary
from megatron.corpus.driver import counts_by_phase
from megatron.corpus.plan import load_plan
from megatron.data.contamination import NgramIndex
from megatron.data.indexed import IndexedDataset
from megatron.tools import corpus
from tests.corpus.test_filters import ARPA, fasttext_model

CHINESE = "\u4eca\u5929\u5929\u6c14\u5f88\u597d\uff0c\u6211\u4eec\u53bb\u516c\u56ed\u6563\u6b65\u3002" * 9
BLACKLIST = "site1.org\nlisted.net/page\n.jpg\n"
STAGES = [name for name in registry.STAGES if name != "tokenize"] + ["tokenize"]


def documents() -> list[dict]:
    """Prose, duplicates of several kinds, other languages, junk, pages, and what is hard to read or write."""
    chance = random.Random(7)
    prose = [" ".join(text.split(".. ")[0].split(" ")[:400]) for text in list(pydoc_data.topics.topics.values())[:60:6]]
    words = prose[3].split(" ")
    near = " ".join("another" if chance.random() < 0.01 else word for word in words)
    texts = [
        *prose,
        prose[0],
        prose[4],
        near,
        f"{prose[5][:200]} {' '.join(prose[6].split(' ')[20:180])} {prose[7][:99]}",
    ]
    texts += [CHINESE, CHINESE[:40], "El tiempo es muy bueno hoy y vamos a pasear por el parque de la ciudad. " * 12]
    texts += ["\0\x01\ufffd" * 80, "der der", "", " \n", "a\n" * 300, "Lorem ipsum dolor. " * 40, "{ code } " * 60]
    texts += ["sch\u00c3\u00b6n und gut, \u201cquoted\u201d. " * 30, f"half \ud800 a pair. {prose[8][:500]}", "7 8 9"]
    texts += [
        " ".join(prose[6].split(" ")[40:120]),
        f"{'Some words stay here. ' * 3}{EXAM}. {'Others follow it there. ' * 3}",
    ]
    texts += [f"{prose[1]} {EXAM} {prose[9]}", f"{EXAM} End.", f"{prose[2][:300]} {EXAM} {prose[5][:30]}"]
    made = [dict(id=f"d{n}", url=f"https://www.site{n % 5}.org/{n}", text=text) for n, text in enumerate(texts)]
    for number, url in enumerate(["", "no address", "http://listed.net/page/2", "http://a.org/x.jpg", 7], 2):
        made[number]["url"] = url
    del made[9]["url"]
    page = "<html><body><nav>menu</nav><main><p>{}</p></main></body></html>"
    for number in (0, 6, 11):
        made[number]["html"] = page.format("<p>".join(made[number]["text"].split(". ")))
    made[1]["more"] = dict(nested=[1, None, 2**70], nan=float("nan"))
    made[12]["meta"] = "\ud800"  # what only the standard parser reads
    return made


EXAM = "Which of the seven bridges of the old town did the mathematician cross only once before the war began"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Documents in a file, and what options name."""
    made = tmp_path_factory.mktemp("every")
    lines = [json.dumps(document) for document in documents()]
    assert len({json.loads(line)["id"] for line in lines}) == len(lines)
    (made / "in.jsonl").write_text("\n".join([*lines[:5], '{"text": broken', "", *lines[5:]]) + "\n")
    NgramIndex.empty(13, 8).with_set("EXAM", [[EXAM]]).save(made / "exam.ngrams")
    (made / "list.txt").write_text(BLACKLIST)
    (made / "tiny.arpa").write_text(ARPA)
    weights = {"the": [4.0, -4.0], "der": [-4.0, 4.0]}
    fasttext_model(made / "tiny.bin", list(weights), ["en", "de"], weights)
    make_tokenizer(made / "tokenizer.json")
    return made


def make_tokenizer(path: Path) -> None:
    """A token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({character: number for number, character in enumerate(alphabet)}, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.save(str(path))


NEEDS = {  # options without which a stage or filter cannot be, and such as make it drop something of these documents
    "decontaminate": "{index: exam.ngrams, least: 20, side: 5}",
    "exact-substrings": "{length: 30}",
    "tokenize": "{tokenizer-type: HuggingFaceTokenizer, tokenizer-model: tokenizer.json}",
    "url": "{blacklist: [list.txt], domains: [site2.org]}",
    "fasttext": "{model: tiny.bin, drop: {de: 0.4}}",
    "perplexity": "{model: tiny.arpa, most: 40}",
    "tasks": "{tasks: [ftfy_fix_text, remove_512, general_cleaning]}",
    "gopher": "{min-alphabetic-words: 0.6}",
    "language": "{keep: [en, zh], min-score: 0.6}",
}


def written(name: str) -> str:
    return f"{{{name}: {NEEDS[name]}}}" if name in NEEDS else name


def run(folder: Path, stages: str, output: str, *flags: str):
    """The plan of a recipe that was run by the command."""
    head = "input: in.jsonl\nshard-mb: 0.015\nsamples: 2\nstages:\n"
    (folder / "recipe.yaml").write_text(head + stages)
    corpus.main(["run", "recipe.yaml", "--output", output, *(flags or ("--workers", "1"))])
    return load_plan(folder / output)


# ------------------------------------------------------------------------------------------- what stands in the shards


def read(base: Path, shard: str) -> list[dict]:
    data = zstandard.ZstdDecompressor().stream_reader((base / shard).read_bytes(), read_across_frames=True).read()
    return [json.loads(line) for line in data.decode().splitlines()]


def size(documents: list[dict]) -> int:
    return sum(len(one["text"].encode("utf-8", "surrogatepass")) for one in documents)


def check_counts(made, output: Path) -> None:
    """The counts of all stages are those of the shards that they read and make."""
    counts = counts_by_phase(made, output)
    first = counts["00-shards"]
    shards = {shard: read(output / "tasks", shard) for stage in made.stages for shard in stage.makes if "/doc" in shard}
    assert first["lines"] == first["blank"] + first["documents"] + sum(first["rejected"].values())
    for stage in made.stages:
        told = counts[[*stage.phases][-1]]
        came, goes = ([one for shard in which for one in shards.get(shard, ())] for which in (stage.reads, stage.makes))
        if stage.reads:
            tokens = "tokens" in told
            assert told["documents"] == (len(came) if tokens else len(goes)), stage.name
            if tokens:
                continue
            assert (told["documents_in"], told["bytes_in"]) == (len(came), size(came)), stage.name
        assert (told["documents"], told["bytes"]) == (len(goes), size(goes)), stage.name
        dropped = told.get("dropped", {}).values()
        left = len(came) - sum(one["documents"] for one in dropped) if stage.reads else len(goes)
        assert left + told.get("pieces", 0) - told.get("cut", 0) * ("pieces" in told) == len(goes), stage.name
        less = sum(one["bytes"] for one in dropped)
        if stage.reads and not told.get("changed"):
            assert size(came) - less - told.get("bytes_cut", 0) == size(goes), stage.name
            assert bool(told.get("cut")) == bool(told.get("passages")) == bool(told.get("bytes_cut")), stage.name


def number(word: str) -> int:
    return int(word.replace(",", ""))


def check_summary(lines: list[str]) -> None:
    """Documents that were read, less those dropped, and more where several were made of one, are those in the end."""
    text = "\n".join(lines)
    [read], [final] = re.findall(r"^read: ([\d,]+) doc", text, re.M), re.findall(r"^final: ([\d,]+) doc", text, re.M)
    dropped = sum(map(number, re.findall(r" dropped ([\d,]+)$", text, re.M)))
    cut = re.findall(r"out of ([\d,]+) documents, which became ([\d,]+)$", text, re.M)
    more = sum(number(pieces) - number(whole) for whole, pieces in cut)
    assert number(read) - dropped + more == number(final) and dropped and more > 0, text
    assert len(re.findall(r": cut [\d,]+ passages \([\d,]+ bytes\) out of", text)) == 2, text
    assert not re.search("(exact_substring|contaminated) dropped 0", text)


def check_page(text: str) -> None:
    """No share is above the whole, and the rows of the stages add up."""
    assert all(float(share) <= 100 for share in re.findall(r"([\d.]+) ?%", text)), text
    [table] = re.findall(r"<th>more, by cutting</th>.*?</table>", text, re.S)
    rows = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(.*?)</tr>", table, re.S) if "<td>" in row]
    before = number(rows[0][3])
    for _, lost, more, documents, *_ in rows:
        assert before - number(lost) + number(more) == number(documents)
        before = number(documents)
    assert "<th>passages</th>" in text


def check_explained(made, folder: Path, output: Path) -> dict[str, Counter]:
    """What `explain` says of each document is what stands in the shards. Returns stage -> fates."""
    base = output / "tasks"
    told = {}
    for number, line in enumerate((folder / "in.jsonl").read_text().splitlines(), 1):
        [history] = explain.explain(made, output, f"in.jsonl:{number}")
        if history.document is None:
            assert history.fate == "set aside" and (not line or "broken" in line or "half" in line)
        else:
            told[history.document["id"]] = history
    counts, fates = counts_by_phase(made, output), {}
    for stage in made.stages[1:]:
        if any("tokens" in counts[phase] for phase in stage.phases):
            check_tokens(stage, base, output / "final", told)
            continue
        places = {
            one["id"]: (f"shard {shard}, document {row}", one)
            for shard, name in enumerate(stage.makes)
            for row, one in enumerate(read(base, name))
        }
        rules, all_told = Counter(), True
        for document in (one for shard in stage.reads for one in read(base, shard)):
            history = told.get(document["id"].removesuffix("-1"))
            all_told &= history is not None
            if history is None:  # the second piece of a document
                continue
            said = [one for one in history.said if one.stage in (stage.name, *said_by(stage, made))]
            fate = next((one.fate for kind in ("dropped", "changed") for one in said if one.fate == kind), "kept")
            fates.setdefault(stage.name, Counter())[fate] += 1
            pieces = [places[name] for name in (document["id"], f"{document['id']}-1") if name in places]
            assert said and len(pieces) == (fate != "dropped"), (stage.name, document["id"], said)
            if fate == "dropped":
                last = next(one for one in said if one.fate == fate)
                rule = f"{last.stage.partition(': ')[2]}." if ": " in last.stage else ""
                rules[f"{rule}{last.reason}".removesuffix(".")] += 1
                assert last.reason
            else:
                [(place, found)] = pieces
                assert (encoded(found) == encoded(document)) == (fate == "kept"), (stage.name, document["id"])
                assert said[-1].place in ("", place)
        dropped = counts[[*stage.phases][-1]].get("dropped", {})
        if all_told:
            assert rules == {rule: one["documents"] for rule, one in dropped.items() if one["documents"]}, stage.name
    return fates


def encoded(document: dict) -> str:
    return json.dumps(document, sort_keys=True)  # NaN is not equal to itself


def said_by(stage, made) -> list[str]:
    """The names under which `explain` speaks of a row of filters."""
    if stage.name != "filter":
        return []
    [(phase, folders)] = stage.phases.items()
    return [f"{phase}: {name}" for name, *_ in made.tasks[folders[0]].options["filters"]]


def check_tokens(stage, base: Path, final: Path, told: dict) -> None:
    """Documents of the token files, a token a byte, are those of the shards where `explain` says that they are."""
    dataset = IndexedDataset(str(final / "text_document"))
    alphabet = sorted_alphabet()
    texts = [one for shard in stage.reads for one in read(base, shard)]
    assert dataset.num_documents == len(texts)
    for document in texts:
        history = told.get(document["id"].removesuffix("-1"))
        if history is not None:
            number = int(re.fullmatch(r"document (\d+), from 0", history.said[-1].place)[1])
            wanted = document["text"].encode("utf-8", "replace")
            first, end = dataset.document_indices[number : number + 2].tolist()  # no sequence: an empty text
            tokens = [token for sequence in range(first, end) for token in dataset.get(sequence).tolist()]
            assert bytes(alphabet[token] for token in tokens) == wanted, document["id"]


def sorted_alphabet() -> list[int]:
    """The byte of each token: byte-level vocabularies write bytes that are no visible characters as others."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in visible]
    names = {chr(byte): byte for byte in visible} | {chr(256 + number): byte for number, byte in enumerate(hidden)}
    return [names[character] for character in sorted(names)]


def files_of(output: Path) -> dict[str, bytes]:
    """All that tasks have made, and the corpus; receipts name the seconds that they took."""
    names = [path for path in output.rglob("*") if path.is_file() and path.name != "receipt.json"]
    names = [path for path in names if path.relative_to(output).parts[0] in ("tasks", "final")]
    return {path.relative_to(output).as_posix(): path.read_bytes() for path in names}


# ---------------------------------------------------------------------------------------------------------------- tests


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", registry.FILTERS)
def test_every_filter(name, folder, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(folder)
    output = tmp_path / "out"
    made = run(folder, f"  - filter: [{written(name)}]\n", str(output))
    said = capsys.readouterr().out
    check_counts(made, output)
    fates = check_explained(made, folder, output)["filter"]
    assert f"final: {fates['kept'] + fates['changed']} documents" in said
    assert len(fates) > 1, f"{name} does the same to all documents: give it options in NEEDS, or documents"


@pytest.mark.sampled(5)
def test_all_stages_one_behind_the_other(folder, monkeypatch, tmp_path, capsys):
    """By one worker and by two with other memory: the same bytes. All commands speak of a run, and of a part of one."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(corpus_page, "HISTOGRAMS", 1)
    row = ", ".join(map(written, ("gate", "ftfy")))
    stages = f"  - filter: [{row}]\n" + "".join(f"  - {written(name)}\n" for name in STAGES)
    output = tmp_path / "one"
    made = run(folder, stages, str(output))
    printed = capsys.readouterr().out
    check_counts(made, output)
    fates = check_explained(made, folder, output)
    assert set(fates) == {"filter", *STAGES[:-1]}
    assert all(len(seen) > 1 for name, seen in fates.items() if name != "shuffle"), fates
    assert all("changed" in fates[name] for name in ("exact-substrings", "decontaminate")), fates
    final = read(output / "tasks", made.stages[-2].makes[0])
    total = sum(len(read(output / "tasks", shard)) for shard in made.stages[-1].reads)
    assert f"final: {total} documents" in printed and final

    def said(*words: str) -> str:
        corpus.main([*words, "--output", str(output)])
        return capsys.readouterr().out

    assert f"plan {made.id}: {len(made.tasks)} tasks" in said("plan", "recipe.yaml")
    assert said("status").startswith("done") and said("check").startswith(f"{len(made.tasks)} tasks: every file")
    assert all(done == of for done, of in json.loads(said("status", "--json"))["phases"].values())
    for document in documents()[:3]:
        assert [one["fate"] for one in json.loads(said("explain", document["id"], "--json"))]
        assert said("explain", document["id"]).startswith(str(document["url"] or document["id"]))
    said("report")
    page = (output / "report.html").read_text()
    assert all(name in page for name in STAGES)
    check_page(page)
    check_summary(printed.splitlines())
    assert "0 folders" in said("clean")

    before = output.rename(tmp_path / "before")  # `.origin` names shards by their paths
    assert run(folder, stages, str(output), "--workers", "2", "--memory-gb", "3").id == made.id
    assert files_of(output) == files_of(before)
    for stage in reversed(made.stages):  # a run that has not come so far
        for folder_of_task in {one for folders in stage.phases.values() for one in folders}:
            shutil.rmtree(output / "tasks" / folder_of_task)
        counts = counts_by_phase(made, output)
        assert corpus_page.funnel_of(made, counts) and summary(counts)
        [history] = explain.explain(made, output, "d0") if stage is not made.stages[0] else [None]
        assert history is None or history.fate in ("kept", "dropped", "changed", "unknown")
    assert "report.html" in said("report")
