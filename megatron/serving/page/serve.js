// SPDX-License-Identifier: Apache-2.0
// The page of the server. It asks the server's own OpenAI interface for a stream of text with log-probabilities, and shows
// each token with its probability; of one model, or of two side by side. In a chat, each model has the messages before
// with its own answers.
"use strict";

const LIKELY = 5; // tokens that are shown in the place of one
const $ = (id) => document.getElementById(id);
let models = [], panes = [], running = null; // running: AbortController of the texts that are generated
let over = Promise.resolve(); // when they have ended

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

const chance = (logprob) => (logprob == null ? "" : logprob > Math.log(0.0005) ? `${(100 * Math.exp(logprob)).toFixed(1)} %`
  : `${Math.exp(logprob).toExponential(1)}`);
const visible = (text) => text.replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5").replaceAll(" ", "\u2423") || "\u2205";

function headers() {
  const key = $("key").value;
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

class Refused extends Error {}

async function refusal(answer) {
  const body = await answer.json().catch(() => ({}));
  return new Refused(body.error?.message ?? `the server answered ${answer.status}`);
}

// -- models ------------------------------------------------------------------------------------------------------------

async function look() {
  try {
    const answer = await fetch("v1/models", { headers: headers() });
    $("keys-field").hidden = answer.status !== 401 && !$("key").value;
    if (!answer.ok) throw await refusal(answer);
    models = (await answer.json()).data;
    const before = $("model-0").value;
    for (const id of ["model-0", "model-1"]) {
      const chosen = $(id).value;
      const empty = id === "model-1" ? [element("option", { value: "", textContent: "nothing" })] : [];
      $(id).replaceChildren(...empty, ...models.map((model) => element("option", { value: model.id, textContent: model.id })));
      if (models.some((model) => model.id === chosen)) $(id).value = chosen;
    }
    $("beside").hidden = models.length < 2;
    $("modes").hidden = !models.some((model) => model.chat);
    if ($("model-0").value !== before) fit();
    choose();
    live("on", models.map((model) => `${model.id}: ${model.root}`).join(", "));
  } catch (error) {
    live("off", error instanceof Refused ? error.message : "the server does not answer");
  }
}

function live(state, text) {
  $("live").className = `live ${state}`;
  $("live").textContent = text;
}

// -- texts -------------------------------------------------------------------------------------------------------------

class Pane {
  // The text of one model, or its conversation.
  constructor(model) {
    this.model = model;
    this.messages = []; // of a conversation
    this.answer = null; // the element that tokens are added to
    this.about = element("span", { className: "soft" });
    this.text = element("div", { className: "text", tabIndex: 0 });
    this.text.setAttribute("aria-label", `Text of ${model}`);
    this.pane = element("article", { className: "card" },
      element("div", { className: "head" }, element("h2", { textContent: model }), this.about), this.text);
    this.pane.dataset.model = model;
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.tokens = 0;
  }

  async generate(asked, signal) {
    const chat = asked.mode === "chat", message = { role: "user", content: asked.prompt };
    this.answer = chat ? element("div", { className: "answer" }) : this.text;
    const below = atEnd();
    this.text.append(...(chat ? [element("p", { className: "said", textContent: asked.prompt }), this.answer]
      : [element("span", { className: "given", textContent: asked.prompt })]));
    if (chat) { if (below) toEnd(); } else this.answer.scrollIntoView({ block: "nearest" });
    this.tokens = 0;
    const given = chat ? { messages: [...this.messages, message] } : { prompt: asked.prompt };
    const scores = chat ? { logprobs: true, top_logprobs: LIKELY } : { logprobs: LIKELY };
    const began = performance.now();
    let first = null, why = "";
    try {
      const settings = await this.within(asked.settings, given, signal);
      const body = JSON.stringify({ model: this.model, stream: true, ...given, ...scores, ...settings });
      const answer = await fetch(chat ? "v1/chat/completions" : "v1/completions", { method: "POST", headers: headers(), body, signal });
      if (!answer.ok) throw await refusal(answer);
      for await (const event of events(answer)) {
        if (event.error) throw new Refused(event.error.message);
        const [choice] = event.choices;
        if (!choice) continue;
        const scores = chat ? choice.logprobs?.content ?? [] : scoresOf(choice.logprobs);
        this.add(chat ? choice.delta.content ?? "" : choice.text, scores);
        if (scores.length) first ??= performance.now();
        why = { length: "ended at the longest length", stop: "ended by itself" }[choice.finish_reason] ?? why;
        this.count(began, first, why);
      }
    } catch (error) {
      if (error.name === "AbortError") this.count(began, first, "stopped");
      else this.text.append(element("p", { className: "trouble", textContent: error instanceof Refused ? error.message : "the server has gone" }));
    }
    const said = this.answer.textContent; // also of an answer that was stopped
    if (chat && said) this.messages.push(message, { role: "assistant", content: said });
    return said !== "";
  }

  async within(settings, given, signal) {
    // The settings, with no more tokens than the model's context has room for behind the prompt.
    const about = models.find((model) => model.id === this.model);
    if (settings.max_tokens == null || !about) return settings;
    let room = about.max_answer_len;
    if (!about.encoder_decoder) {
      const body = JSON.stringify({ model: this.model, ...given });
      const answer = await fetch("tokenize", { method: "POST", headers: headers(), body, signal });
      if (!answer.ok) return settings; // the request itself says why
      const { count, max_model_len } = await answer.json();
      room = Math.min(room, max_model_len - count);
    }
    return room < 1 ? settings : { ...settings, max_tokens: Math.min(settings.max_tokens, room) };
  }

  count(began, first, why) {
    const seconds = (performance.now() - (first ?? began)) / 1000;
    const speed = this.tokens > 1 && seconds > 0 ? `, ${((this.tokens - 1) / seconds).toFixed(0)} tokens/s` : "";
    const wait = first == null ? "" : `, first after ${((first - began) / 1000).toFixed(2)} s`;
    this.about.textContent = `${this.tokens} tokens${wait}${speed}${why && `, ${why}`}`;
  }

  add(text, scores) {
    // Tokens whose texts together are the new text are shown one by one, others (halves of characters) as one.
    const alone = scores.map((score) => score.token).join("") === text;
    this.tokens += scores.length;
    const below = this.answer !== this.text && atEnd(); // of a conversation
    const parts = alone ? scores.map((score) => [score.token, [score]]) : text ? [[text, scores]] : [];
    for (const [shown, own] of parts) {
      const token = element("span", { className: "token", textContent: shown, tabIndex: -1 });
      const logprob = own.reduce((sum, score) => sum + score.logprob, 0);
      token.scores = own;
      token.style.setProperty("--surprise", own.length ? Math.round(Math.min(75, -9 * logprob)) : 0);
      token.setAttribute("aria-description", own.length ? `probability ${chance(logprob)}` : "");
      for (const kind of ["mouseenter", "focus"]) token.addEventListener(kind, () => explain(token));
      for (const kind of ["mouseleave", "blur"]) token.addEventListener(kind, () => ($("tip").hidden = true));
      this.answer.append(token);
    }
    if (below) toEnd();
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const tokens = [...this.text.querySelectorAll(".token")], at = tokens.indexOf(document.activeElement);
    const next = tokens[at < 0 ? (step > 0 ? 0 : tokens.length - 1) : Math.min(tokens.length - 1, Math.max(0, at + step))];
    next?.focus();
    event.preventDefault();
  }
}

function scoresOf(logprobs) {
  // The scores of a completion in the form of a chat's.
  return (logprobs?.tokens ?? []).map((token, at) => ({ token, logprob: logprobs.token_logprobs[at],
    top_logprobs: Object.entries(logprobs.top_logprobs[at] ?? {}).map(([other, logprob]) => ({ token: other, logprob })) }));
}

async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

function explain(token) {
  const rows = token.scores.flatMap((score) => {
    const others = score.top_logprobs.filter((one) => one.token !== score.token).slice(0, LIKELY);
    return [score, ...others].sort((a, b) => b.logprob - a.logprob).map((one) =>
      element("tr", { className: one === score ? "taken" : "" }, element("td", { textContent: visible(one.token) }),
        element("td", { textContent: chance(one.logprob) })));
  });
  if (!rows.length) return;
  $("tip").replaceChildren(element("table", {}, element("tbody", {}, ...rows)));
  $("tip").hidden = false;
  const place = token.getClientRects()[0], own = $("tip").getBoundingClientRect();
  const below = place.bottom + own.height + 8 < innerHeight;
  $("tip").style.left = `${scrollX + Math.max(8, Math.min(place.left, document.documentElement.clientWidth - own.width - 8))}px`;
  $("tip").style.top = `${scrollY + (below ? place.bottom + 4 : place.top - own.height - 4)}px`;
}

// -- the form ----------------------------------------------------------------------------------------------------------

const page = document.scrollingElement;
const atEnd = () => page.scrollHeight - innerHeight - scrollY < 60;
const toEnd = () => scrollTo(0, page.scrollHeight);

function asked() {
  const settings = {};
  for (const id of ["max_tokens", "temperature", "top_p", "top_k"]) if ($(id).value !== "") settings[id] = Number($(id).value);
  // The same for both models.
  settings.seed = $("seed").value === "" ? Math.floor(Math.random() * 2 ** 31) : Number($("seed").value);
  if ($("stop").value) settings.stop = [$("stop").value.replaceAll("\\n", "\n").replaceAll("\\t", "\t")];
  return { prompt: $("prompt").value || (mode() === "chat" ? "" : $("prompt").placeholder), mode: mode(), settings };
}

const mode = () => ($("modes").hidden ? "text" : $("mode").value);
const chosen = () => models.find((model) => model.id === $("model-0").value);
let last = ""; // the prompt that was sent last

function fit() {
  // Another model: one with a template of conversations opens in a chat.
  $("mode").value = chosen()?.chat ? "chat" : "text";
  if (!$("max_tokens").dataset.own) $("max_tokens").value = mode() === "chat" ? "" : Math.min(64, chosen()?.max_answer_len ?? 64);
}

function choose() {
  // What depends on the mode and the model. The prompt of a chat stands below the conversation.
  const chat = mode() === "chat", focused = document.activeElement;
  $("new").hidden = !chat;
  $("go").textContent = chat ? "Send" : "Generate";
  $("prompt-name").textContent = chat ? "Message" : "Prompt";
  $("prompt").placeholder = chat ? "A message" : "Once upon a time";
  document.body.classList.toggle("chat", chat);
  if (chat !== ($("panes").nextElementSibling === $("form"))) {
    if (chat) $("panes").after($("form")); else $("panes").before($("form"));
    if (focused !== document.body) focused.focus();
  }
  if (chosen()) $("max_tokens").title = `at most ${chosen().max_answer_len}; empty: ${chat ? "to the end of the answer" : "16"}`;
  $("max_tokens").placeholder = chat ? "to its end" : "16";
  for (const id of ["temperature", "top_p", "top_k"]) $(id).placeholder = "the model's";
}

function begin(made) {
  panes = made;
  $("panes").replaceChildren(...panes.map((pane) => pane.pane));
}

function restart() {
  running?.abort();
  begin([]);
  $("prompt").focus();
}

async function generate() {
  const words = asked();
  if (!$("form").reportValidity() || !words.prompt) return;
  running?.abort();
  const own = (running = new AbortController());
  await over; // what has been stopped belongs to the conversation
  const names = [$("model-0").value, $("model-1").value].filter((name, at) => name && (at === 0 || !$("beside").hidden));
  const same = panes.length === names.length && panes.every((pane, at) => pane.model === names[at])
    && panes.some((pane) => pane.messages.length); // the other model may have refused every message
  if (words.mode !== "chat" || !same) begin(names.map((name) => new Pane(name)));
  last = words.prompt;
  $("prompt").value = "";
  $("cancel").disabled = false;
  const answered = await (over = Promise.all(panes.map((pane) => pane.generate(words, own.signal))));
  if (!answered.some(Boolean)) $("prompt").value ||= words.prompt; // to be sent again
  if (running === own) {
    running = null;
    $("cancel").disabled = true;
    look();
  }
}

function theme() {
  const set = document.documentElement.dataset.theme;
  const dark = set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
}

const writes = (target) => !!target.closest?.("textarea, select, input:not([type=checkbox])"); // where a key is text
const keys = () => ($("keys").open ? $("keys").close() : $("keys").showModal());
$("form").addEventListener("submit", (event) => { event.preventDefault(); generate(); });
$("cancel").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", restart);
$("mode").addEventListener("change", () => { choose(); begin([]); });
$("max_tokens").addEventListener("input", () => ($("max_tokens").dataset.own = "yes"));
$("model-0").addEventListener("change", () => { fit(); choose(); });
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && mode() === "chat" && !event.shiftKey && !event.ctrlKey && !event.metaKey && !event.isComposing) {
    event.preventDefault();
    generate();
  } else if (event.key === "ArrowUp" && !$("prompt").value && last) {
    event.preventDefault();
    $("prompt").value = last;
  }
});
$("theme").addEventListener("click", theme);
$("help").addEventListener("click", keys);
$("key").addEventListener("change", look);
$("tint").addEventListener("change", () => $("panes").classList.toggle("tinted", $("tint").checked));
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); generate(); }
  else if (event.key === "Escape" && !$("keys").open) running?.abort();
  else if (event.altKey && event.code === "KeyN" && !$("new").hidden) { event.preventDefault(); restart(); }
  else if (event.altKey && event.code === "KeyD") { event.preventDefault(); theme(); }
  else if (event.altKey && event.code === "KeyK") { event.preventDefault(); keys(); }
  else if (event.key === "?" && !$("keys").open && !writes(event.target)) { event.preventDefault(); keys(); }
});
$("panes").classList.add("tinted");
$("settings").open = !matchMedia("(max-width: 640px)").matches; // folded on a phone
look();
