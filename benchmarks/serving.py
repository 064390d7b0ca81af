# SPDX-License-Identifier: Apache-2.0
"""A server under load: many clients, of which some leave in mid-stream and some send nonsense. Every answer is checked.

    python benchmarks/serving.py --seconds 300 --clients 64
    python benchmarks/serving.py --seconds 60 --replicas 2 --kill-every 10      # kill -9 of a replica again and again
    python benchmarks/serving.py --seconds 60 --experts 8 --tp 4 --ep 2         # ranks that share a mixture of experts

Of each text the whole is known: the model made it alone, before. So a text that is wrong, that is mixed with another, or
that is lost is counted. Without --load the model is a small GPT with random weights, whose texts depend on every token.
Reported: answers, times to the first token and between tokens, the queue, and the memory of the server over time.
"""

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NONSENSE = (
    b"{", b"null", b'{"prompt": ""}', b'{"prompt": "a", "temperature": "hot"}', b'{"prompt": [[1], "a"]}', b"\xff\xfe",
    b'{"prompt": "1", "max_tokens": 99999999}', b'{"prompt": "1", "tokens": 3}', b'{"prompt": [-1]}', b"[" * 3000,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A request, and its text."""

    body: dict
    text: str


@dataclass
class Seen:
    """What the clients saw."""

    counts: Counter = field(default_factory=Counter)
    wrong: list = field(default_factory=list)
    first: list = field(default_factory=list)  # seconds to the first token
    between: list = field(default_factory=list)  # seconds between tokens
    tokens: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load", help="a checkpoint (default: a small model with random weights)")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--cases", type=int, default=128, help="different requests")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--experts", type=int, default=0, help="experts of the small model; 0: an MLP")
    for name, what in (("tp", "divide each matrix"), ("pp", "share the layers"), ("ep", "have different experts")):
        parser.add_argument(f"--{name}", type=int, default=1, help=f"ranks that {what}")
    parser.add_argument("--ray", action="store_true", help="replicas on Ray")
    parser.add_argument("--kill-every", type=float, default=0, help="seconds between two kill -9 of a replica; 0: none")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        load = asked.load or small_model(Path(folder), asked.experts)
        cases = cases_of(load, asked.cases)
        words = ["--max-batch", str(asked.max_batch), "--max-queue", str(max(64, 2 * asked.clients)), "--no-access-log"]
        words += ["--replicas", str(asked.replicas)] if asked.replicas > 1 else []
        words += ["--ray"] if asked.ray else []
        sizes = {"tensor-model": asked.tp, "pipeline-model": asked.pp, "expert-model": asked.ep}
        words += [word for name, size in sizes.items() if size > 1 for word in (f"--{name}-parallel-size", str(size))]
        server, port = start(load, words, asked.tp * asked.pp)
        try:
            seen, memory, queue = asyncio.run(measure(port, server.pid, cases, asked))
        finally:
            server.send_signal(signal.SIGTERM)
            code = server.wait(120)
    report(asked, seen, memory, queue, code)


def small_model(folder: Path, experts: int = 0) -> str:
    """Train a model for one step, on made-up data."""
    sizes = "--num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 256 --init-method-std 0.15"
    run = "--mock-data --tokenizer-type NullTokenizer --vocab-size 1000 --micro-batch-size 1 --train-iters 1 --lr 1e-9"
    run += f" --num-experts {experts} --moe-ffn-hidden-size 128" * (experts > 1)
    command = [
        sys.executable,
        "pretrain_gpt.py",
        *sizes.split(),
        *run.split(),
        "--save",
        str(folder),
        "--eval-interval",
        "1000",
    ]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


def cases_of(load: str, count: int) -> list[Case]:
    """Requests with random lengths, settings and seeds, some with a common beginning; their texts, made one at a time."""
    sys.path.insert(0, str(ROOT))
    import torch

    from megatron.inference.generation import generate
    from megatron.inference.load import load_model, open_tokenizer
    from megatron.inference.sampling import Sampling

    torch.set_num_threads(1)  # small products: threads would wait for each other
    loaded, chance = load_model(load), random.Random(1)
    tokenizer = open_tokenizer(loaded)
    common = [[chance.randrange(loaded.vocab_size - 1) for _ in range(40)] for _ in range(4)]
    cases = []
    for number in range(count):
        own = [chance.randrange(loaded.vocab_size - 1) for _ in range(chance.randrange(1, 60))]
        prompt = chance.choice(common)[: chance.randrange(41)] + own
        words = dict(tokens_to_generate=chance.randrange(1, 48), sampling_seed=number)
        words |= chance.choice((dict(), dict(top_p=0.9), dict(temperature=0.7, top_k=50), dict(temperature=0.0)))
        more = dict(longest=loaded.longest, end=tokenizer.eod)
        [new] = generate(loaded.model, [prompt], Sampling(**words), **more)
        names = dict(tokens_to_generate="max_tokens", sampling_seed="seed")
        body = dict(prompt=prompt) | {names.get(name, name): value for name, value in words.items()}
        before = tokenizer.decode(prompt)  # the text is what new tokens add to it
        cases.append(Case(body, tokenizer.decode([*prompt, *new])[len(before) :]))
    return cases


def start(load: str, words: list[str], ranks: int = 1) -> tuple[subprocess.Popen, int]:
    launch = ["-m", "megatron.tools.launch", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launch, "-m", "megatron.tools.serve", "--load", load, "--port", "0", *words]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    line = server.stdout.readline()
    found = re.search(r"http://127.0.0.1:(\d+)/v1", line)
    assert found, line
    return server, int(found[1])


async def measure(port: int, pid: int, cases: list[Case], asked) -> tuple[Seen, list[tuple[float, int]], list[float]]:
    seen, memory, queue = Seen(), [], []
    until = time.monotonic() + asked.seconds
    clients = [client(port, random.Random(number), cases, seen, until) for number in range(asked.clients)]
    watch = asyncio.create_task(watching(port, pid, memory, queue))
    killing = asyncio.create_task(kills(pid, asked.kill_every, seen)) if asked.kill_every else None
    await asyncio.gather(*clients)
    for task in filter(None, (watch, killing)):
        task.cancel()
    return seen, memory, queue


async def client(port: int, chance: random.Random, cases: list[Case], seen: Seen, until: float) -> None:
    while time.monotonic() < until:
        case, kind = chance.choice(cases), chance.random()
        try:
            if kind < 0.25:
                await stream(port, case, seen, leave=chance.randrange(0, 20))
            elif kind < 0.30:
                status, _ = await whole(port, chance.choice(NONSENSE))
                seen.counts["nonsense refused" if 400 <= status < 500 else "nonsense not refused"] += 1
            elif kind < 0.65:
                await stream(port, case, seen)
            else:
                status, raw = await whole(port, json.dumps(case.body).encode())
                if status == 429:
                    seen.counts["queue full"] += 1
                    await asyncio.sleep(0.2)
                else:
                    text = json.loads(raw)["choices"][0]["text"] if status == 200 else f"{status}: {raw[:200]!r}"
                    check(case, text, seen)
        except (OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, ValueError) as error:
            seen.counts["lost"] += 1
            seen.wrong.append(f"lost: {type(error).__name__} {error}")


def check(case: Case, text: str, seen: Seen, whole: bool = True) -> None:
    right = text == case.text if whole else case.text.startswith(text)
    seen.counts[("right" if whole else "right, until the client left") if right else "wrong"] += 1
    if not right:
        seen.wrong.append((case.text, text))


async def request(port: int, body: bytes):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nconnection: close\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    status = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 120)
    return reader, writer, int(status.split()[1]), b"chunked" in status.lower()


async def whole(port: int, body: bytes) -> tuple[int, bytes]:
    reader, writer, status, chunked = await request(port, body)
    raw = b"".join([part async for part in chunks(reader)]) if chunked else await asyncio.wait_for(reader.read(), 120)
    writer.close()
    return status, raw


async def chunks(reader):
    while size := int(await asyncio.wait_for(reader.readuntil(b"\r\n"), 120), 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def stream(port: int, case: Case, seen: Seen, leave: int | None = None) -> None:
    began = last = time.monotonic()
    reader, writer, status, _ = await request(port, json.dumps(case.body | dict(stream=True)).encode())
    if status == 429:
        seen.counts["queue full"] += 1
        writer.close()
        await asyncio.sleep(0.2)
        return
    text, done, count, rest = "", False, 0, b""
    async for part in chunks(reader):
        *events, rest = (rest + part).split(b"\n\n")
        for event in events:
            if event == b"data: [DONE]":
                done = True
                continue
            found = json.loads(event[6:])
            if "error" in found:
                seen.counts["lost"] += 1
                seen.wrong.append(found["error"]["message"])
                writer.close()
                return
            text += found["choices"][0]["text"]
            now = time.monotonic()
            (seen.between if count else seen.first).append(now - (last if count else began))
            last, count = now, count + 1
            seen.tokens += 1
        if leave is not None and count > leave:
            break
    writer.close()
    if done or leave is None:
        check(case, text if done else f"{text} (unfinished)", seen)
    else:
        check(case, text, seen, whole=False)


async def watching(port: int, pid: int, memory: list, queue: list) -> None:
    began = time.monotonic()
    while True:
        memory.append((time.monotonic() - began, resident(pid)))
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            found = re.findall(rb'what="waiting"\} ([0-9.]+)', await reader.read())
            queue.append(sum(map(float, found)))
            writer.close()
        except OSError:
            pass
        await asyncio.sleep(1)


def family(pid: int) -> list[int]:
    """A process and all below it."""
    found = [pid]
    for parent in found:
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            found += map(int, children.read_text().split())
    return found


def resident(pid: int) -> int:
    """Bytes in memory of a process and those below it."""
    sizes = []
    for one in family(pid):
        try:
            sizes.append(int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{one}/status").read_text())[1]) << 10)
        except (OSError, TypeError):
            continue
    return sum(sizes)


async def kills(pid: int, every: float, seen: Seen) -> None:
    chance = random.Random(5)
    while True:
        await asyncio.sleep(every)
        names = {one: Path(f"/proc/{one}/cmdline").read_bytes() for one in family(pid)[1:]}
        replicas = [one for one, name in names.items() if b"--replica-of" in name or b"ModelReplica" in name]
        if len(replicas) > 1:
            os.kill(chance.choice(replicas), signal.SIGKILL)
            seen.counts["replicas killed"] += 1


def report(asked, seen: Seen, memory: list, queue: list, code: int) -> None:
    for name, number in sorted(seen.counts.items()):
        print(f"{name:32} {number}")
    print(f"{'tokens in streams':32} {seen.tokens}, {seen.tokens / asked.seconds:.0f} a second")
    for name, values in (("seconds to the first token", seen.first), ("seconds between tokens", seen.between)):
        if len(values) > 1:
            cuts = statistics.quantiles(values, n=100)
            print(f"{name:32} median {cuts[49]:.3f}, p90 {cuts[89]:.3f}, p99 {cuts[98]:.3f}, most {max(values):.3f}")
    if queue:
        print(f"{'texts that wait':32} mean {statistics.mean(queue):.1f}, most {max(queue):.0f}")
    fifths = [[size for at, size in memory if part <= 5 * at / asked.seconds < part + 1] for part in range(5)]
    shown = ", ".join(f"{statistics.median(sizes) / 2**20:.0f}" for sizes in fifths if sizes)
    print(f"{'MiB of memory, in each fifth':32} {shown}")
    print(f"{'exit code of the server':32} {code}")
    for example in seen.wrong[:5]:
        print(f"wrong: {example}", file=sys.stderr)
    bad = seen.counts["wrong"] + seen.counts["lost"] + seen.counts["nonsense not refused"] + (code != 0)
    print("no answer was wrong, mixed or lost" if not bad else f"{bad} WRONG OR LOST")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
