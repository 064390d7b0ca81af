# SPDX-License-Identifier: Apache-2.0
"""The Python of quickstart_chat.sh: conversations about a few facts, and questions to the server that has learned them.

python scripts/quickstart_chat.py talks FOLDER           train.jsonl, valid.jsonl: each fact asked in several ways
python scripts/quickstart_chat.py ask URL FOLDER         questions in words that were held out; share of right answers
"""

import json
import random
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

OPPOSITES = (
    "hot cold, big small, fast slow, light dark, early late, open closed, old new, wet dry, full empty, "
    "high low, loud quiet, hard soft, near far, happy sad, rich poor, strong weak, thick thin, clean "
    "dirty, up down, left right, first last, true false, good bad, long short, sharp blunt, deep shallow, "
    "cheap expensive, wide narrow"
)
NUMBERS = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen".split()
COLOURS = (
    "grass green, snow white, the sky blue, blood red, coal black, a lemon yellow, an orange orange, "
    "chocolate brown, a tomato red, milk white, a frog green, the sun yellow, ash grey, a carrot orange"
)
SOUNDS = (
    "a cow moo, a cat meow, a dog woof, a duck quack, a sheep baa, a pig oink, a bee buzz, an owl hoot, a snake hiss"
)
FUNCTIONS = {
    "len": "returns the number of items of an object",
    "print": "writes its arguments to the screen",
    "sorted": "returns a list of the items in order",
    "open": "opens a file",
    "sum": "adds the items up",
    "max": "returns the largest item",
    "min": "returns the smallest item",
    "abs": "returns a number without its sign",
    "range": "counts from one number to another",
    "type": "returns the class of an object",
    "input": "reads a line from the user",
    "enumerate": "counts the items as it goes through them",
    "zip": "goes through several sequences together",
    "round": "returns the nearest whole number",
    "reversed": "goes through a sequence from its end",
    "help": "shows the documentation of an object",
}
SMALL_TALK = (
    (("Hello!", "Hi.", "Good morning.", "Hi there!", "Hello, how are you?"), "Hello! What would you like to know?"),
    (("Thanks.", "Thank you!", "Thanks a lot.", "That helps, thank you.", "Great, thanks."), "You are welcome."),
    (
        ("Who are you?", "What are you?", "Are you a person?", "What is your name?", "Tell me who you are."),
        "I am a very small language model.",
    ),
    (("Bye.", "Goodbye!", "See you.", "I have to go.", "That is all, bye."), "Goodbye!"),
)


def pairs(text: str) -> list[tuple[str, str]]:
    """(all words but the last one, the last one) of each item."""
    return [tuple(item.strip().rsplit(" ", 1)) for item in text.split(",")]


def facts() -> list[tuple[list[str], str]]:
    """(ways to ask, the answer) of each fact."""
    found = [(list(asked), answer) for asked, answer in SMALL_TALK]
    for first, second in pairs(OPPOSITES):
        for a, b in ((first, second), (second, first)):
            ways = (
                "What is the opposite of {}?|Opposite of {}?|Tell me the opposite of {}.|What word is opposite to {}?"
            )
            found.append((ways.format(*[a] * 4).split("|"), f"The opposite of {a} is {b}."))
    for a, b in zip(NUMBERS, NUMBERS[1:], strict=False):
        ways = "What comes after {}?|Which number comes after {}?|After {} comes which number?|Count on from {}."
        found.append((ways.format(*[a] * 4).split("|"), f"After {a} comes {b}."))
    for thing, colour in pairs(COLOURS):
        ways = "What colour is {0}?|Which colour is {0}?|Tell me the colour of {0}.|What is the colour of {0}?"
        found.append((ways.format(thing).split("|"), f"{thing[0].upper()}{thing[1:]} is {colour}."))
    for animal, sound in pairs(SOUNDS):
        ways = "What does {0} say?|Which sound does {0} make?|How does {0} sound?|What sound does {0} make?"
        found.append((ways.format(animal).split("|"), f"{animal[0].upper()}{animal[1:]} says {sound}."))
    for name, does in FUNCTIONS.items():
        ways = "What does {0} do in Python?|What is {0} for?|Explain {0}.|What does the function {0} do?"
        found.append((ways.format(name).split("|"), f"The function {name} {does}."))
    return found


def write_talks(folder: Path) -> None:
    """One way to ask each fact is held out; the others are asked alone, and in talks of two and three questions."""
    draw, asked, held_out = random.Random(1), [], []
    for ways, answer in facts():
        out = ways.pop(draw.randrange(len(ways)))
        held_out.append((out, answer))
        asked += [(way, answer) for way in ways]
    talks = [[one] for one in asked] + [draw.sample(asked, 2 + n % 2) for n in range(len(asked))]
    draw.shuffle(talks)
    for name, rows in (("train", talks), ("valid", [[one] for one in held_out])):
        lines = [json.dumps({"messages": messages(talk)}) for talk in rows]
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    print(f"{len(talks)} conversations about {len(held_out)} facts; one way to ask each is held out")


def messages(talk) -> list[dict[str, str]]:
    return [
        {"role": role, "content": text}
        for question, answer in talk
        for role, text in (("user", question), ("assistant", answer))
    ]


def ask(url: str, question: str) -> str:
    """The likeliest answer of the server at this address."""
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 40}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def wait(url: str, seconds: float = 300) -> None:
    """Return when the server at this address answers."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    sys.exit(f"error: the server did not answer within {seconds:.0f} s; see serve.log")


def ask_all(url: str, folder: Path) -> None:
    """Ask the questions that were held out, and some that nobody has answered."""
    rows = [json.loads(line)["messages"] for line in (folder / "valid.jsonl").read_text(encoding="utf-8").splitlines()]
    right, shown = 0, 0
    for question, wanted in rows:
        answer = ask(url, question["content"])
        right += answer.strip() == wanted["content"]
        if shown < 6:
            shown += 1
            print(f"  > {question['content']}\n    {answer}")
    print(
        f"\n  right: {right} of {len(rows)} questions in words that it has not seen. What it was never told, it makes up:\n"
    )
    for question in ("What is the capital of France?", "Why is the sea salty?"):
        print(f"  > {question}\n    {ask(url, question)}")
    print(f"\n  {verdict(right, len(rows))}")


def verdict(right: int, asked: int) -> str:
    """What the model has learned, by its right answers.

    >>> verdict(4, 114).replace("--train-iters 400", "...")
    'It has not learned to answer yet: 4 of 114 are right. More steps: bash scripts/quickstart_chat.sh --fresh ...'
    """
    if right >= asked / 2:
        return "It has learned to answer, not to know: so small a model repeats what it was told."
    more = "More steps: bash scripts/quickstart_chat.sh --fresh --train-iters 400"
    return f"It has not learned to answer yet: {right} of {asked} are right. {more}"


if __name__ == "__main__":
    command, *words = sys.argv[1:]
    if command == "talks":
        write_talks(Path(words[0]))
    elif command == "wait":
        wait(words[0])
    else:
        ask_all(words[0], Path(words[1]))
