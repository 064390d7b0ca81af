# SPDX-License-Identifier: Apache-2.0
"""The page of the server in a real browser: the system's Chromium, by playwright."""

import math
import shutil
import time

import pytest

from megatron.inference.requests import Request
from megatron.inference.sampling import Sampling
from megatron.tokenizer.chat_template import find_template
from tests.serving.toy import EOD, ByteTokenizer, ToyEngine, alone, distribution, served

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (Debian: apt-get install chromium)")
FLAGS = """--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
    --disable-component-update --disable-sync""".split()


class Mirror(ToyEngine):
    """Answers as the toy does to the prompt in reverse: another model."""

    def add(self, request):
        from dataclasses import replace

        return super().add(replace(request, prompt=request.prompt[::-1]))


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS, timeout=60_000)
        yield running
        running.close()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    place = tmp_path_factory.mktemp("template")
    (place / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    template = find_template([place], ByteTokenizer())
    with served([ToyEngine(pause=0.01), Mirror(pause=0.01)], names=["base", "tuned"], template=template) as found:
        yield found


@pytest.fixture
def visit(browser):
    """`visit(url, width=..., scheme=...)`: a page; complaints of the browser fail the test, but those that are expected."""
    opened, complaints, expected = [], [], []

    def open_page(url, width=1200, scheme="light", allowed=()):
        expected.extend(allowed)
        page = browser.new_page(viewport=dict(width=width, height=800), color_scheme=scheme)
        page.set_default_timeout(30_000)
        page.on(
            "console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: complaints.append(error.stack or str(error)))
        page.goto(url)
        opened.append(page)
        return page

    yield open_page
    for page in opened:
        page.close()
    assert [words for words in complaints if not any(allowed in words for allowed in expected)] == []


def wait_for(page, expression: str) -> None:
    """Wait until an expression holds. (The page's policy refuses playwright's own function for this.)"""
    until = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < until, expression
        time.sleep(0.03)


def answer(prompt: str, length: int, seed: int) -> list[int]:
    return alone(Request(tuple(prompt.encode()), Sampling(tokens_to_generate=length, sampling_seed=seed), end=EOD))


def test_two_models_side_by_side(visit, two):
    page = visit(two.url)
    wait_for(page, "document.querySelector('#live').innerText.includes('base: iteration 7')")
    page.select_option("#mode", "text")
    page.fill("#prompt", "the <b>rain")
    page.fill("#max_tokens", "40")
    page.fill("#seed", "7")
    page.select_option("#model-1", "tuned")
    page.keyboard.press("Control+Enter")
    wait_for(page, "document.querySelectorAll('[data-model] .soft').length === 2")
    wait_for(
        page, "[...document.querySelectorAll('[data-model] .soft')].every((one) => one.innerText.includes('ended'))"
    )
    for model, prompt in (("base", "the <b>rain"), ("tuned", "niar>b< eht")):
        whole = ByteTokenizer().decode(answer(prompt, 40, 7))
        assert page.locator(f"[data-model={model}] .text").text_content() == "the <b>rain" + whole


def test_probabilities_on_hover_and_by_keyboard(visit, two):
    page = visit(two.url)
    wait_for(page, "document.querySelector('#model-0').value === 'base'")
    page.select_option("#mode", "text")
    page.fill("#prompt", "abc")
    page.fill("#seed", "11")
    page.fill("#max_tokens", "30")
    page.click("#go")
    wait_for(page, "document.querySelector('.head .soft')?.innerText.includes('ended')")
    new = answer("abc", 30, 11)
    at = next(at for at, token in enumerate(new) if token < 128)  # the first that is a whole character
    scores = distribution((*b"abc", *new[:at]))
    share = f"{100 * math.exp(scores[new[at]]):.1f} %"
    shown = (
        page.locator(".token").filter(has_text=chr(new[at])).first
        if chr(new[at]).strip()
        else page.locator(".token").nth(at)
    )
    shown.hover()
    assert share in page.locator("#tip .taken").inner_text() and page.locator("#tip tr").count() >= 5
    rows = page.locator("#tip td:first-child").all_inner_texts()
    assert len(set(rows)) == len(rows)
    page.mouse.move(5, 5)
    assert not page.locator("#tip").is_visible()
    page.locator(".text").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator("#tip").is_visible() and page.evaluate("document.activeElement.className") == "token"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("[...document.querySelectorAll('.token')].indexOf(document.activeElement)") == 1


def test_stop_dark_and_help_by_keyboard(visit, two):
    page = visit(two.url, allowed=["400 (Bad Request)"])
    wait_for(page, "document.querySelector('#model-0').value === 'base'")
    page.select_option("#mode", "text")
    page.fill("#prompt", "x" * 600)
    page.keyboard.press("Control+Enter")
    # The server's own words
    wait_for(page, "document.querySelector('.trouble')?.innerText.includes('context has 512')")
    page.fill("#max_tokens", "400")
    page.fill("#prompt", "endless")
    for seed in range(9):  # one whose text is long
        if len(answer("endless", 400, seed)) > 100:
            break
    page.fill("#seed", str(seed))
    page.keyboard.press("Control+Enter")
    wait_for(page, "document.querySelectorAll('.token').length > 3")
    page.keyboard.press("Escape")
    wait_for(page, "document.querySelector('.head .soft').innerText.includes('stopped')")
    until = time.monotonic() + 10
    while two.engines[0].busy and time.monotonic() < until:
        time.sleep(0.01)
    assert not two.engines[0].busy
    page.keyboard.press("Alt+d")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(3, 7, 18)"
    page.keyboard.press("Alt+k")
    assert page.locator("#keys").is_visible()
    page.keyboard.press("Escape")
    assert not page.locator("#keys").is_visible()
    before = page.input_value("#prompt")
    page.focus("#prompt")
    page.keyboard.press("?")  # in a text it is text
    assert page.input_value("#prompt") == before + "?" and not page.locator("#keys").is_visible()
    page.focus("#tint")
    page.keyboard.press("?")
    assert page.locator("#keys").is_visible()


@pytest.mark.sampled(5)
def test_a_chat_opens_as_a_chat_within_the_context_and_below_it_stands_the_prompt(visit, two):
    page = visit(two.url)
    wait_for(page, "document.querySelector('#model-0').value === 'base'")
    assert page.input_value("#mode") == "chat" and page.inner_text("#go") == "Send"
    assert page.input_value("#max_tokens") == page.input_value("#temperature") == ""  # to its end; the model's own
    place = lambda selector: page.locator(selector).bounding_box()
    long, seed = next(
        (text, seed) for seed in range(20) for text in ["y" * 400] if len(answer(f"<{text}>", 110, seed)) == 110
    )
    page.fill("#seed", str(seed))
    for asked in ("", "5000"):  # more than the context has room for: what there is
        page.fill("#max_tokens", asked)
        page.fill("#prompt", long)
        page.locator("#prompt").press("Enter")
        wait_for(page, "document.querySelector('.head .soft')?.innerText.includes('ended at the longest')")
        assert page.locator(".answer").text_content() == ByteTokenizer().decode(answer(f"<{long}>", 110, seed))
        assert page.input_value("#prompt") == "" and place("#form")["y"] > place(".answer")["y"]
        page.locator("#prompt").press("ArrowUp")
        assert page.input_value("#prompt") == long
        page.keyboard.press("Alt+n")
    page.fill("#max_tokens", "")
    page.select_option("#mode", "text")
    page.fill("#prompt", "one")
    page.fill("#max_tokens", "5000")
    page.click("#go")
    wait_for(page, "document.querySelector('.head .soft')?.innerText.includes('ended')")
    assert page.input_value("#prompt") == "" and page.inner_text(".given") == "one"
    assert page.locator(".trouble").count() == 0 and place("#form")["y"] < place(".text")["y"]


def test_a_model_without_a_template_opens_as_text_and_nothing_is_cut_at_1280(visit):
    names = ["base", "runs/a-model-with-a-long-name/checkpoints-v2"]
    with served([ToyEngine(), ToyEngine()], names=names) as toy:
        page = visit(toy.url, width=1280)
        wait_for(page, "document.querySelector('#model-0').value === 'base'")
        assert not page.locator("#mode").is_visible() and page.input_value("#max_tokens") == "64"
        page.select_option("#model-1", names[1])
        assert page.evaluate(CUT) == [] and page.evaluate("document.documentElement.scrollWidth") <= 1280


CUT = """[...document.querySelectorAll("#form :is(input, select)")].filter((field) => {
  if (!field.offsetParent || field.type === "checkbox") return false;
  const style = getComputedStyle(field), pen = document.createElement("canvas").getContext("2d");
  pen.font = style.font;
  const text = field.tagName === "SELECT" ? field.selectedOptions[0].text : field.value || field.placeholder;
  const arrow = field.tagName === "SELECT" ? 16 : 0;
  const needed = pen.measureText(text).width + parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) + arrow;
  return needed > field.clientWidth;
}).map((field) => field.id)"""  # fields with more text than room


@pytest.mark.sampled(5)
def test_a_conversation(visit, two):
    """Each model has the messages before, with its own answers; a stopped one stays, and a refused message does not."""
    page = visit(two.url, allowed=["400 (Bad Request)"])
    wait_for(page, "document.querySelector('#model-0').value === 'base'")
    page.fill("#seed", "3")
    page.fill("#max_tokens", "20")
    shown = lambda at: page.locator("[data-model=base] .answer").nth(at).text_content()

    def say(text: str, answers: int, key: str = "Control+Enter") -> None:
        page.fill("#prompt", text)
        page.keyboard.press(key)
        wait_for(
            page,
            f"document.querySelectorAll('.answer').length === {answers} && document.querySelector('#cancel').disabled",
        )

    say("one", 1)
    first = ByteTokenizer().decode(answer("<one>", 20, 3))
    assert shown(0) == first and page.input_value("#prompt") == ""
    page.keyboard.press("Control+Enter")  # nothing to say
    say("two", 2)
    assert shown(1) == ByteTokenizer().decode(answer(f"<one><{first}><two>", 20, 3))
    long = "x" * 600
    say(long, 3)
    wait_for(page, "document.querySelector('.trouble')?.innerText.includes('context has 512')")
    assert page.input_value("#prompt") == long and page.locator(".said").all_inner_texts() == ["one", "two", long]
    second = shown(1)
    say("four", 4)
    assert shown(3) == ByteTokenizer().decode(answer(f"<one><{first}><two><{second}><four>", 20, 3))
    page.click("#new")
    assert page.locator(".answer").count() == 0
    say("one", 1)
    assert shown(0) == first
    page.keyboard.press("Alt+n")
    seed = next(seed for seed in range(9) if len(answer("<endless>", 400, seed)) > 100)
    page.fill("#seed", str(seed))
    page.fill("#max_tokens", "400")
    page.fill("#prompt", "endless")
    page.keyboard.press("Control+Enter")
    wait_for(page, "document.querySelectorAll('.token').length > 3")
    page.keyboard.press("Escape")
    wait_for(page, "document.querySelector('#cancel').disabled")
    page.fill("#max_tokens", "20")
    stopped = shown(0)
    say("more", 2)
    assert shown(1) == ByteTokenizer().decode(answer(f"<endless><{stopped}><more>", 20, seed))
    page.fill("#seed", "3")
    page.select_option("#mode", "text")
    assert not page.locator("#new").is_visible()
    page.fill("#prompt", "one")
    page.click("#go")
    wait_for(page, "document.querySelectorAll('.answer').length === 0 && document.querySelector('#cancel').disabled")
    assert page.locator(".text").text_content() == "one" + ByteTokenizer().decode(answer("one", 20, 3))


def test_a_conversation_beside_a_model_that_refuses(visit, two):
    """A model without a template does not end the other's conversation."""
    tuned = two.service.models["tuned"]
    template, tuned.template = tuned.template, None
    try:
        page = visit(two.url, allowed=["400 (Bad Request)"])
        wait_for(page, "document.querySelector('#model-0').value === 'base'")
        page.select_option("#model-1", "tuned")
        page.fill("#seed", "3")
        page.fill("#max_tokens", "20")
        for text, count in (("one", 1), ("two", 2)):
            page.fill("#prompt", text)
            page.keyboard.press("Control+Enter")
            wait_for(
                page,
                f"document.querySelectorAll('.trouble').length === {count} && document.querySelector('#cancel').disabled",
            )
    finally:
        tuned.template = template
    first = ByteTokenizer().decode(answer("<one>", 20, 3))
    shown = page.locator("[data-model=base] .answer").all_text_contents()
    assert shown == [first, ByteTokenizer().decode(answer(f"<one><{first}><two>", 20, 3))]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_telephone(visit, two, scheme):
    page = visit(two.url, width=400, scheme=scheme)
    wait_for(page, "document.querySelector('#model-0').value === 'base'")
    assert not page.locator("#seed").is_visible() and page.locator("#form").bounding_box()["height"] < 200
    page.click("summary")
    page.select_option("#model-1", "tuned")
    page.fill("#prompt", "hello" * 30)
    page.fill("#seed", "3")
    page.fill("#max_tokens", "64")
    page.click("#go")
    wait_for(
        page,
        "[...document.querySelectorAll('[data-model] .soft')].filter((at) => at.innerText.includes('ended')).length > 1",
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 400
    whole = ByteTokenizer().decode(answer("<" + "hello" * 30 + ">", 64, 3))
    assert page.locator("[data-model=base] .answer").text_content() == whole
    assert (
        page.evaluate("getComputedStyle(document.body).backgroundColor")
        == dict(light="rgb(243, 244, 246)", dark="rgb(3, 7, 18)")[scheme]
    )
    page.locator(".token").last.hover()
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 400


@pytest.mark.sampled(2)
def test_a_key_is_asked_for(visit):
    with served(keys=["open sesame"]) as toy:
        page = visit(toy.url, allowed=["401 (Unauthorized)"])
        page.locator("#key").wait_for(state="visible")
        page.fill("#key", "open sesame")
        page.locator("#key").blur()
        wait_for(page, "document.querySelector('#live').innerText.includes('toy: iteration 7')")
        page.fill("#prompt", "x")
        page.click("#go")
        wait_for(page, "document.querySelector('.head .soft')?.innerText.includes('ended')")
