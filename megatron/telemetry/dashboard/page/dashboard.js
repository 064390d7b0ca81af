// SPDX-License-Identifier: Apache-2.0
// The page of the dashboard. The server sends the state of the runs when one changes (api/live); the page then asks for the
// curves that it shows (api/charts), which the server has thinned to its pixels. uPlot draws them. A report is this page
// with its data inside, which then answers instead of the server.
"use strict";

const COLOURS = [["#2563eb", "#60a5fa"], ["#ea580c", "#fb923c"], ["#059669", "#34d399"], ["#7c3aed", "#a78bfa"],
  ["#db2777", "#f472b6"], ["#0891b2", "#22d3ee"], ["#a16207", "#facc15"], ["#1f2937", "#e5e7eb"]]; // light, dark
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]]; // where there are more runs than colours
const THEME = { ink: ["#111827", "#e5e7eb"], soft: ["#5b6472", "#9ca3af"], line: ["#eceef1", "#1f2937"], card: ["#ffffff", "#111827"],
  info: ["#94a3b8", "#64748b"], warning: ["#d97706", "#fbbf24"], error: ["#dc2626", "#f87171"] };
const AXES = ["iteration", "samples", "tokens", "time"];
const AXIS_NAMES = { iteration: "iteration", samples: "samples", tokens: "tokens", time: "time in training steps" };
const MARKED = ["restart", "rollback"]; // events of level info that charts mark, too
const SMOOTHING = 4, SMOOTHEST = 12, OUTLIERS = 0.04; // steps of a mean, as powers of 2; share of a curve that is cut at each end
const MOST = 10; // runs that are shown at first
const HEIGHT = 230, HEAT_HEIGHT = 190, PAUSE = 1000; // pixels; milliseconds between two requests for the same curves
const $ = (id) => document.getElementById(id);

const view = { axis: "iteration", smoothing: SMOOTHING, clip: false, between: null, log: new Map(), hidden: new Set() };
let runs = [], charts = [], events = [], full = null; // full: [first, last] place of all curves, without zoom
const whole = new Map(); // run -> [first, last] place of its curves, without zoom
const cards = new Map(); // chart id -> Card

// -- small things ------------------------------------------------------------------------------------------------------

const dark = () => {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const themed = (pair) => pair[dark() ? 1 : 0];
const place = (run) => runs.findIndex((other) => other.id === run);
const colour = (run) => themed(COLOURS[Math.max(0, place(run)) % COLOURS.length]);
const dash = (run) => DASHES[Math.floor(Math.max(0, place(run)) / COLOURS.length) % DASHES.length];
const nameOf = (run) => runs[place(run)]?.name ?? "";
const chosen = () => runs.filter((run) => !view.hidden.has(run.name));
const limited = (smoothing) => Math.min(SMOOTHEST, Math.max(0, smoothing));
const meanOf = (curve) => `mean of the last ${Math.min(curve.window ?? windowSteps(), curve.steps).toLocaleString("en")} steps`;
const windowSteps = () => (view.smoothing ? 2 ** view.smoothing : 1);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function count(value) {
  const size = Math.abs(value);
  if (size < 1e4) return value.toLocaleString("en", { maximumFractionDigits: size < 10 ? 2 : 1 });
  for (const [factor, unit] of [[1e3, "k"], [1e6, "M"], [1e9, "B"], [1e12, "T"]])
    if (size < 999.95 * factor) return `${+(value / factor).toPrecision(4)} ${unit}`;
  return value.toExponential(2);
}

function duration(seconds) {
  if (seconds < 60) return `${+seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]], at = parts.findIndex(([size]) => seconds >= size);
  const [size, unit] = parts[at], [next, small] = parts[at + 1] ?? [];
  const rest = next ? Math.floor((seconds % size) / next) : 0;
  return `${Math.floor(seconds / size)} ${unit}${rest ? ` ${rest} ${small}` : ""}`;
}

function written(value, unit) {
  if (value == null) return "-";
  if (unit === "%") return `${(100 * value).toFixed(1)} %`;
  if (unit === "bytes") return `${(value / 1e9).toFixed(2)} GB`;
  if (unit === "tokens/s") return `${count(value)}/s`;
  if (unit === "s") return value < 1 ? `${+(1000 * value).toPrecision(4)} ms` : `${+value.toPrecision(4)} s`;
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(3) : `${+value.toPrecision(5)}`;
}

const onAxis = (value) => (view.axis === "time" ? duration(value)
  : view.axis === "iteration" ? Math.round(value).toLocaleString("en") : count(value));

async function ask(path, parameters) {
  if (kept) return keptAnswer(path, new URLSearchParams(parameters));
  const answer = await fetch(`api/${path}?${new URLSearchParams(parameters)}`);
  if (!answer.ok) throw new Error(`${path}: ${answer.status}`);
  return answer.json();
}

// -- the data inside a report --------------------------------------------------------------------------------------------

const kept = $("kept") && JSON.parse($("kept").textContent);

function keptPlace(run, iteration, axis) {
  // The place of an iteration on an axis, on the straight line between the steps that were kept.
  const at = kept.axes[run].iteration, to = kept.axes[run][axis];
  if (iteration == null || axis === "iteration" || !at.length) return iteration;
  const found = at.findIndex((value) => value >= iteration), next = found < 0 ? at.length - 1 : found, before = Math.max(0, next - 1);
  const share = at[next] === at[before] ? 1 : (iteration - at[before]) / (at[next] - at[before]);
  return to[before] + Math.min(1, Math.max(0, share)) * (to[next] - to[before]);
}

function keptCurve(curve, axis, steps) {
  const window = Object.keys(curve.means ?? {}).map(Number).filter((own) => own <= steps).at(-1);
  return { ...curve, x: curve.x.map((x) => keptPlace(curve.run, x, axis)), smooth: curve.means?.[window], window };
}

function keptAnswer(path, query) {
  const ids = query.getAll("run"), axis = query.get("axis"), steps = Number(query.get("window"));
  const chosen = (list) => list.filter(({ run }) => ids.includes(run));
  if (path === "charts") return { charts: kept.charts.map((chart) => ({ ...chart, curves: chosen(chart.curves).map((curve) => keptCurve(curve, axis, steps)) })) };
  if (path === "events") return chosen(kept.events).map((event) => ({ ...event, at: keptPlace(event.run, event.at, axis) }));
  const found = kept[path][ids[0]];
  if (path === "pictures") return found;
  const heat = found.find(({ name }) => name === query.get("name")) ?? found[0];
  return { ...heat, x: heat.x.map((x) => keptPlace(ids[0], x, axis)) };
}

// -- charts ------------------------------------------------------------------------------------------------------------

const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400, 172800, 604800];

function timeTick(seconds) {
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([size]) => range()[1] >= 2 * size || size === 1);
  return `${+(seconds / size).toPrecision(4)} ${unit}`;
}

function xAxis() {
  const counts = (u, splits) => splits.map((value) => (Number.isInteger(value) ? count(value) : ""));
  const axis = { stroke: themed(THEME.soft), font: "12px system-ui, sans-serif", size: 30, space: 70, gap: 4,
    grid: { stroke: themed(THEME.line), width: 1 }, ticks: { show: false }, values: counts };
  return view.axis === "time" ? { ...axis, incrs: TIMES, values: (u, splits) => splits.map(timeTick) } : axis;
}

function ticks(values, unit) {
  // The labels of an axis: all with a power of ten if one is as small as 1e-3.
  const sizes = values.map(Math.abs).filter((size) => size > 0), small = Math.min(...sizes) <= 1e-3;
  return values.map((value) => tick(value, unit, small));
}

function tick(value, unit, power) {
  if (value == null) return "";
  if (unit === "%") return `${+(100 * value).toFixed(1)} %`;
  if (unit === "bytes") return `${+(value / 1e9).toPrecision(4)} GB`;
  const size = Math.abs(value);
  if (unit === "s") return `${+value.toPrecision(4)} s`;
  if (size && power) return (+value.toPrecision(5)).toExponential().replace("+", "");
  return size >= 1e4 ? count(value) : `${+value.toPrecision(6)}`;
}

class Card {
  // A chart with its head, and the values at the cursor below it.
  constructor(chart) {
    this.id = chart.id;
    this.log = element("button", { type: "button", textContent: "log", title: "Log scale (l)",
      onclick: () => setLog(this.id, !isLog(this.chart)) });
    this.title = element("h3");
    this.unit = element("span", { className: "soft" });
    this.at = element("span", { className: "soft" });
    this.plot = element("div", { className: "plot", tabIndex: 0 });
    this.plot.setAttribute("role", "group");
    this.plot.setAttribute("aria-roledescription", "chart");
    this.values = element("div", { className: "values" });
    this.card = element("article", { className: "card" }, element("div", { className: "head" }, this.title, this.unit,
      element("span", { className: "space" }), this.at, this.log), this.plot, this.values);
    this.card.dataset.chart = chart.id;
    this.plot.addEventListener("keydown", (event) => this.key(event));
    this.plot.addEventListener("blur", () => this.u && setCursor(this, null));
    new ResizeObserver(() => this.u && this.plot.clientWidth && this.u.setSize({ width: this.plot.clientWidth, height: HEIGHT }))
      .observe(this.plot);
  }

  show(chart) {
    this.chart = chart;
    this.title.textContent = chart.title;
    this.unit.textContent = { "bytes": "", "%": "", "s": "" }[chart.unit] ?? chart.unit;
    this.log.setAttribute("aria-pressed", isLog(chart));
    this.tables = chart.curves.filter((curve) => curve.x.length);
    const layout = JSON.stringify([this.tables.map((c) => [c.run, place(c.run), c.kind, !!c.smooth, c.x.length === 1]), view.axis, isLog(chart), dark()]);
    const data = this.data();
    if (layout !== this.layout || !this.u) {
      this.u?.destroy();
      this.layout = layout;
      this.u = new uPlot(this.options(), data, this.plot);
    } else {
      this.u.setData(data, false);
      this.u.batch(() => { this.u.setScale("x", { min: this.range()[0], max: this.range()[1] }); this.u.setScale("y", { min: 0, max: 0 }); });
    }
    this.plot.setAttribute("aria-label", this.spoken());
    this.values_(null);
  }

  data() {
    const positive = (values) => (isLog(this.chart) ? values.map((value) => (value > 0 ? value : null)) : values);
    const tables = this.tables.map((c) => [c.x, positive(c.y), ...(c.smooth ? [positive(c.smooth)] : [])]);
    return tables.length ? uPlot.join(tables) : [[]];
  }

  options() {
    const series = [{}];
    this.lines = []; // of each series but the first: its run and kind
    for (const curve of this.tables) {
      const stroke = colour(curve.run), one = curve.x.length === 1;
      if (curve.kind === "validation") {
        series.push({ stroke, width: 1, dash: [4, 4], points: { show: true, size: 6, width: 1.5, fill: themed(THEME.card) } });
        this.lines.push({ run: curve.run, kind: "validation" });
        continue;
      }
      series.push({ stroke: curve.smooth ? stroke + "40" : stroke, width: curve.smooth ? 1 : 1.4, dash: dash(curve.run), points: { show: one, size: 6 } });
      this.lines.push({ run: curve.run, kind: "step" });
      if (curve.smooth) {
        series.push({ stroke, width: 1.8, dash: dash(curve.run), points: { show: one } });
        this.lines.push({ run: curve.run, kind: "mean" });
      }
    }
    const unit = this.chart.unit;
    return {
      width: this.plot.clientWidth || 400, height: HEIGHT, legend: { show: false }, series, padding: [8, 22, 0, 0],
      scales: { x: { time: false, range: () => this.range() }, y: { distr: isLog(this.chart) ? 3 : 1, range: (u, low, high) => this.limits(low, high) } },
      axes: [xAxis(), { stroke: themed(THEME.soft), font: "12px system-ui, sans-serif", size: 62, space: 34, gap: 6,
        grid: { stroke: themed(THEME.line), width: 1 }, ticks: { show: false }, filter: (u, splits) => splits,
        ...(isLog(this.chart) ? { splits: logSplits } : {}),
        values: (u, splits) => ticks(splits, unit).map((text, at) => (isLog(this.chart) && !fits(u, splits[at]) ? "" : text)) }],
      cursor: { y: false, sync: { key: "runs", setSeries: false, scales: ["x", null] }, drag: { x: true, y: false, setScale: false },
        points: { size: 7 }, dataIdx: (u, number, index) => nearest(u.data[number], index), bind: { dblclick: () => () => (zoom(null), null) } },
      hooks: { setCursor: [(u) => this.values_(u.cursor.idx)], drawAxes: [(u) => drawEvents(u, new Set(this.tables.map((curve) => curve.run)))],
        setSelect: [(u) => { if (u.select.width > 3) { zoom([u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")]);
          u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false); } }] },
    };
  }

  range() {
    // The range of the x axis: of the runs that this chart shows, so that a short run's own metrics fill their charts.
    return view.between ?? around([...new Set(this.tables.map((curve) => curve.run))].map((run) => whole.get(run))) ?? full ?? [0, 1];
  }

  limits(low, high) {
    // The range of the y axis: of the visible points, clipped without the outermost ones of each curve.
    const [from, to] = this.range(), lows = [], highs = [];
    for (const curve of this.tables ?? []) {
      const y = (curve.smooth && view.clip ? curve.smooth : curve.y).filter((value, at) => value != null && curve.x[at] >= from && curve.x[at] <= to && (!isLog(this.chart) || value > 0));
      if (!y.length) continue;
      if (view.clip) y.sort((a, b) => a - b);
      const cut = view.clip ? Math.floor(OUTLIERS * y.length) : 0;
      lows.push(view.clip ? y[cut] : y.reduce((a, b) => Math.min(a, b)));
      highs.push(view.clip ? y[y.length - 1 - cut] : y.reduce((a, b) => Math.max(a, b)));
    }
    if (!lows.length) return [isLog(this.chart) ? 1 : 0, isLog(this.chart) ? 10 : 1];
    [low, high] = [Math.min(...lows), Math.max(...highs)];
    if (isLog(this.chart)) return low < high ? [low / (high / low) ** 0.05, high * (high / low) ** 0.05] : [low / 2, high * 2];
    if (["tokens/s", "bytes", "%", "s"].includes(this.chart.unit)) return [0, 1.12 * high || 1]; // sizes: from 0
    const room = 0.06 * (high - low) || Math.abs(high) * 0.1 || 1;
    return [low >= 0 && low < room ? 0 : low - room, high + room];
  }

  values_(index) {
    // The values at the cursor, or the last ones.
    if (!this.u || !this.lines) return;
    const parts = [], data = this.u.data, at = index == null ? null : data[0][index];
    this.at.textContent = at == null ? "" : `${AXIS_NAMES[view.axis]} ${onAxis(at)}`;
    const found = (line) => {
      const values = line && data[this.lines.indexOf(line) + 1];
      return values && (index == null ? last(values) : values[nearest(values, index)]);
    };
    for (const run of new Set(this.lines.map((line) => line.run))) {
      const own = this.lines.filter((line) => line.run === run), validation = found(own.find((line) => line.kind === "validation"));
      const mean = found(own.find((line) => line.kind === "mean")), value = mean ?? found(own.find((line) => line.kind === "step"));
      const which = mean != null ? meanOf(this.tables.find((curve) => curve.run === run && curve.smooth)) : index == null ? "last step" : "";
      const key = element("i", { className: "key" });
      key.style.setProperty("--key", colour(run));
      const part = element("span", { title: nameOf(run) }, key, element("em", { textContent: nameOf(run) }));
      if (value != null) part.append(element("b", { textContent: written(value, this.chart.unit) }), element("em", { textContent: which }));
      if (validation != null) part.append(element("em", { textContent: `validation ${written(validation, this.chart.unit)}` }));
      parts.push(part);
    }
    this.values.replaceChildren(...parts);
  }

  spoken() {
    const ends = this.tables.filter((c) => c.kind === "steps").map((c) => `${nameOf(c.run)} ${written(last(c.y), this.chart.unit)}`);
    return `${this.chart.title}, last values: ${ends.join("; ")}`;
  }

  key(event) {
    const { key, shiftKey } = event;
    if (event.ctrlKey || event.metaKey || event.altKey || !this.u) return;
    const xs = this.u.data[0], now = this.u.cursor.idx ?? xs.length - 1;
    if (key === "ArrowLeft" || key === "ArrowRight") {
      const far = Math.max(1, Math.round(xs.length / (shiftKey ? 10 : 100)));
      setCursor(this, Math.min(xs.length - 1, Math.max(0, now + (key === "ArrowRight" ? far : -far))));
      $("spoken").textContent = `${this.at.textContent}: ${this.values.innerText}`;
    } else if (key === "+" || key === "=" || key === "-") {
      const [low, high] = this.range(), middle = xs[now] ?? (low + high) / 2, share = key === "-" ? 2 : 0.5;
      zoom([middle - (middle - low) * share, middle + (high - middle) * share]);
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }
}

const last = (values) => values.findLast?.((value) => value != null);

function logSplits(u) {
  // One digit times a power of ten, or over many powers only these.
  const { min, max } = u.scales.y, digits = max / min < 1e4 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1], found = [];
  for (let power = Math.floor(Math.log10(min)); power <= Math.log10(max); power++)
    for (const digit of digits) found.push(Number(`${digit}e${power}`));
  return found.filter((value) => value >= min && value <= max);
}

function fits(u, value) {
  // Whether a log scale labels a value: powers of ten; over few powers also 2 and 5 times them; within one still more.
  const digits = value?.toPrecision(3).replace(/e.*|[.]|^[0.]+/g, "").replace(/0+$/, ""), reach = u.scales.y.max / u.scales.y.min;
  return digits === "1" || (reach < 1000 && "25".includes(digits)) || (reach < 12 && "2357".includes(digits));
}

function nearest(values, index) {
  // The place of the next value at or beside an index: curves have their points at different places.
  if (index == null || values[index] != null) return index;
  for (let away = 1; away < values.length; away++) {
    if (values[index - away] != null) return index - away;
    if (values[index + away] != null) return index + away;
  }
  return index;
}

function setCursor(card, index) {
  const left = index == null ? -10 : card.u.valToPos(card.u.data[0][index], "x");
  card.u.setCursor({ left, top: left < 0 ? -10 : HEIGHT / 3 });
}

function isLog(chart) {
  return view.log.get(chart.id) ?? chart.log;
}

function setLog(id, on) {
  view.log.set(id, on);
  keep();
  draw();
}

const range = () => view.between ?? full ?? [0, 1];

function drawEvents(u, runs) {
  // Dotted lines at restarts, warnings and errors of the runs that a chart shows.
  const { ctx } = u, { top, height, left, width } = u.bbox, ratio = devicePixelRatio, places = new Set();
  ctx.save();
  ctx.setLineDash([2 * ratio, 3 * ratio]);
  ctx.lineWidth = ratio;
  for (const event of events) {
    if ((event.level === "info" && !MARKED.includes(event.event)) || event.at == null || !runs.has(event.run)) continue;
    const x = Math.round(u.valToPos(event.at, "x", true));
    if (x < left || x > left + width || places.has(x)) continue;
    places.add(x);
    ctx.strokeStyle = themed(THEME[event.level] ?? THEME.info);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
  }
  ctx.restore();
}

function zoom(between) {
  if (between && full) {
    const least = (full[1] - full[0]) / 1e5;
    between = [Math.max(full[0], between[0]), Math.min(full[1], between[1])];
    if (between[1] - between[0] < least) return;
    if (between[0] <= full[0] && between[1] >= full[1]) between = null;
  }
  view.between = between;
  $("reset").hidden = !between;
  draw();
  refresh(true);
}

function draw() {
  // Show the charts that were last received.
  const shown = charts.filter((chart) => chart.curves.some((curve) => curve.x.length));
  for (const [id, card] of cards) if (!shown.some((chart) => chart.id === id)) { card.u?.destroy(); card.card.remove(); cards.delete(id); }
  shown.forEach((chart, at) => {
    if (!cards.has(chart.id)) cards.set(chart.id, new Card(chart));
    const card = cards.get(chart.id);
    if ($("charts").children[at] !== card.card) $("charts").insertBefore(card.card, $("charts").children[at] ?? null);
    card.show(chart);
  });
  const why = !runs.length ? "There are no runs yet." : !chosen().length ? "No run is chosen." : !shown.length ? "No step has ended yet." : "";
  $("empty").textContent = why;
  $("empty").hidden = !why;
  $("log").checked = shown.length > 0 && shown.every(isLog);
  $("log").indeterminate = !$("log").checked && shown.some(isLog);
}

// -- data ----------------------------------------------------------------------------------------------------------------

let asked = 0, waiting = null, busy = false, again = false;

function refresh(now = false) {
  // Ask for the curves, but not more often than every PAUSE, nor while the page is hidden.
  if (busy) { again = true; return; }
  if (document.hidden) return;
  clearTimeout(waiting);
  waiting = setTimeout(load, now ? 0 : Math.max(0, asked + PAUSE - Date.now()));
}

const complain = (error) => console.warn(`no answer: ${error.message}`);

async function load() {
  busy = true;
  asked = Date.now();
  try {
    const ids = chosen().map((run) => ["run", run.id]);
    const width = Math.max(300, ...[...cards.values()].map((card) => card.plot.clientWidth || 0));
    const zoomed = view.between ? [["from", view.between[0]], ["to", view.between[1]]] : [];
    const [answer, news] = await Promise.all([
      ask("charts", [...ids, ...zoomed, ["axis", view.axis], ["width", width], ["window", windowSteps()]]),
      ask("events", [...ids, ["axis", view.axis]]),
      loadHeats().catch(complain), loadPictures().catch(complain)]);
    charts = answer.charts;
    for (const chart of charts) chart.log = chart.id === "grad_norm" && spread(chart) > 10;
    if (!view.between) full = ends();
    events = news;
    draw();
    listEvents();
    drawHeats();
  } catch (error) {
    complain(error);
  } finally {
    busy = false;
    if (again) { again = false; refresh(); }
  }
}

function spread(chart) {
  const values = chart.curves.flatMap((curve) => curve.y).filter((value) => value > 0);
  return values.length ? values.reduce((a, b) => Math.max(a, b)) / values.reduce((a, b) => Math.min(a, b)) : 1;
}

function ends() {
  // Note the ends of each run's curves, and return those of all.
  whole.clear();
  for (const { run, x } of charts.flatMap((chart) => chart.curves)) if (x.length) whole.set(run, around([whole.get(run), [x[0], x.at(-1)]]));
  return around([...whole.values()]);
}

function around(ranges) {
  // The range that contains all of these; those that are not known are left out.
  const known = ranges.filter((one) => one);
  if (!known.length) return null;
  const [low, high] = [Math.min(...known.map((one) => one[0])), Math.max(...known.map((one) => one[1]))];
  return low < high ? [low, high] : [low - 1, high + 1];
}

// -- heat maps of ranks and of experts, as a series of uPlot that draws cells ---------------------------------------------

// key: of the elements in the page. able: whether a run has data. word: of a row. unit: of its values. stops: colours of
// ratios to the others. note: what the map shows. of: what a value is compared with.
const KINDS = [{
  key: "ranks", able: (run) => run.has_ranks, word: "rank", unit: "s", of: "times its peers",
  // Blue for shorter times than those of the peers, grey for equal ones, orange and red for longer ones.
  stops: [[0.6, [191, 219, 254], [37, 78, 133]], [1, [241, 243, 245], [31, 41, 55]], [1.3, [245, 158, 11], [217, 119, 6]], [1.8, [220, 38, 38], [239, 68, 68]]],
  note: (name, some) => `${name} of each rank in a step, compared with the other ranks of its pipeline stage${some}`,
}, {
  key: "experts", able: (run) => run.has_experts, word: "expert", unit: "", of: "times the mean",
  // Blue for fewer tokens than the mean: the strongest for none.
  stops: [[0, [37, 99, 235], [96, 165, 250]], [1, [241, 243, 245], [31, 41, 55]], [2, [245, 158, 11], [217, 119, 6]], [3, [220, 38, 38], [239, 68, 68]]],
  note: (name) => `tokens of each expert of ${name} in a step, compared with the mean (0: none)`,
}];
const heats = KINDS.map((kind) => ({ kind, plot: null, data: null }));

async function loadHeats() {
  await Promise.all(heats.map(loadHeat));
}

async function loadHeat(heat) {
  const { key, able } = heat.kind, runs = chosen().filter(able).sort((a, b) => b.written - a.written);
  $(key).hidden = !runs.length;
  if (!runs.length) return;
  choices($(`${key}-run`), runs.map((run) => [run.id, run.name]));
  heat.data = await ask(key, [["run", $(`${key}-run`).value], ["name", $(`${key}-name`).value], ["axis", view.axis]]);
  choices($(`${key}-name`), heat.data.names.map((name) => [name, name]));
  $(`${key}-name`).value = heat.data.name;
}

function choices(select, pairs) {
  const before = select.value, same = [...select.options].map((o) => o.value + o.text).join() === pairs.map((p) => p.join("")).join();
  if (!same) select.replaceChildren(...pairs.map(([value, text]) => element("option", { value, textContent: text })));
  if (pairs.some(([value]) => value === before)) select.value = before;
}

function heatColour(ratio, stops) {
  const at = Math.min(stops.length - 2, Math.max(0, stops.findLastIndex(([value]) => value <= ratio)));
  const colour = ([, light, night]) => (dark() ? night : light), from = colour(stops[at]), to = colour(stops[at + 1]);
  const share = Math.min(1, Math.max(0, (ratio - stops[at][0]) / (stops[at + 1][0] - stops[at][0])));
  return `rgb(${from.map((value, n) => Math.round(value + share * (to[n] - value))).join()})`;
}

function drawHeats() {
  heats.forEach(drawHeat);
}

// The colours with their values: a bar from the first stop to the last, and a number below each.
function drawScale({ key, stops, of }) {
  const [low, high] = [stops[0][0], stops.at(-1)[0]], place = (value) => `${(100 * (value - low)) / (high - low)}%`;
  const bar = element("i"), said = (value) => (value === high ? `${value} or more` : value === low && low ? `${value} or less` : `${value}`);
  bar.style.background = `linear-gradient(90deg, ${stops.map(([value]) => `${heatColour(value, stops)} ${place(value)}`).join(", ")})`;
  const numbers = stops.map(([value]) => {
    const number = element("b", { textContent: said(value) });
    number.style.left = place(value);
    return number;
  });
  $(`${key}-scale`).replaceChildren(element("span", { className: "colours" }, bar, ...numbers), element("span", { textContent: of }));
}

function drawHeat(heat) {
  const { key, word, stops } = heat.kind;
  if (!heat.data?.values.length || $(key).hidden) return;
  const { x, excess, rows } = heat.data, number = excess.length;
  heat.plot?.destroy();
  drawScale(heat.kind);
  const box = $(`${key}-heat`), first = x[0] - (x[1] - x[0] || x[0]);
  const cells = (u) => {
    const { ctx } = u, bottom = u.bbox.top + u.bbox.height, tall = u.bbox.height / number;
    ctx.save();
    ctx.beginPath(); ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height); ctx.clip();
    for (let t = 0; t < x.length; t++) {
      const left = Math.round(u.valToPos(t ? x[t - 1] : Math.max(0, first), "x", true)), right = Math.round(u.valToPos(x[t], "x", true));
      for (let row = 0; row < number; row++) {
        ctx.fillStyle = heatColour(1 + excess[row][t], stops);
        const top = Math.round(bottom - (row + 1) * tall), gap = tall > 6 ? 1 : 0;
        ctx.fillRect(left, top, right - left, Math.round(bottom - row * tall) - top - gap);
      }
    }
    ctx.restore();
    return null;
  };
  const every = Math.ceil(number / 8);
  heat.plot = new uPlot({
    width: box.clientWidth, height: HEAT_HEIGHT, legend: { show: false }, padding: [6, 22, 0, 0],
    scales: { x: { time: false, range: () => view.between ?? full ?? [Math.max(0, first), x.at(-1)] }, y: { range: () => [0, number] } },
    axes: [xAxis(), { stroke: themed(THEME.soft), font: "12px system-ui, sans-serif", size: 68, gap: 6, grid: { show: false }, ticks: { show: false },
      splits: () => Array.from({ length: Math.ceil(number / every) }, (_, n) => n * every + 0.5), values: (u, splits) => splits.map((value) => `${word} ${rows[Math.floor(value)]}`) }],
    series: [{}, { paths: cells, points: { show: false } }],
    cursor: { y: false, points: { show: false }, drag: { x: false, y: false }, sync: { key: "runs", setSeries: false, scales: ["x", null] } },
    hooks: { setCursor: [(u) => noteHeat(heat, u)] },
  }, [x, x.map(() => 0)], box);
  noteHeat(heat, null);
}

function noteHeat(heat, u) {
  const { x, values, excess, name, rows, all_rows: all } = heat.data, { key, word, unit, of, note } = heat.kind;
  const some = rows.length < all ? ` (${rows.length} of ${all} ${word}s: those that differ most)` : "", say = $(`${key}-note`);
  if (!x.length || u == null || u.cursor.idx == null || u.cursor.left < 0) { say.textContent = note(name, some); return; }
  const at = x.findIndex((value) => value >= u.posToVal(u.cursor.left, "x")), t = at < 0 ? x.length - 1 : at;
  const over = Math.floor(u.posToVal(u.cursor.top, "y")); // no number where the cursor is over another chart
  const most = excess.reduce((most, row, n) => (row[t] > excess[most][t] ? n : most), 0);
  const row = Number.isFinite(over) ? Math.min(excess.length - 1, Math.max(0, over)) : most;
  const what = unit ? `${name} ${written(values[row][t], unit)}` : `${written(values[row][t], unit)} tokens of ${name}`;
  say.textContent = `${word} ${rows[row]}, ${AXIS_NAMES[view.axis]} ${onAxis(x[t])}: ${what}, ${(1 + excess[row][t]).toFixed(2)} ${of}`;
}

for (const heat of heats) {
  const box = $(`${heat.kind.key}-heat`);
  new ResizeObserver(() => heat.plot && box.clientWidth && heat.plot.setSize({ width: box.clientWidth, height: HEAT_HEIGHT })).observe(box);
}

// -- pipeline ------------------------------------------------------------------------------------------------------------

const pictures = new Map(); // run id -> pictures, which change only with a launch

async function loadPictures() {
  for (const run of chosen()) {
    const key = `${run.id} ${run.restarts} ${run.read === 1} ${run.state}`;
    if (!pictures.has(key)) pictures.set(key, await ask("pictures", [["run", run.id]]));
    run.pictures = pictures.get(key);
  }
  const able = chosen().filter((run) => run.pictures?.length);
  $("pictures").hidden = !able.length;
  if (!able.length) return;
  choices($("pictures-run"), able.map((run) => [run.id, run.name]));
  const found = able.find((run) => run.id === $("pictures-run").value) ?? able[0], shown = JSON.stringify([found.id, found.pictures]);
  if ($("pictures-of").dataset.shown === shown) return;
  $("pictures-of").dataset.shown = shown;
  $("pictures-of").replaceChildren(...found.pictures.map(({ caption, url }) =>
    element("figure", {}, element("div", { className: "scroll", tabIndex: 0 }, element("img", { src: url, alt: caption })), element("figcaption", { textContent: caption }))));
}

// -- events --------------------------------------------------------------------------------------------------------------

function listEvents() {
  const level = $("urgent").value;
  const wanted = events.filter((event) => level === "all" || event.level !== "info" || (level === "most" && event.event !== "save")).slice(0, 300);
  $("events").hidden = !events.length;
  $("event-rows").replaceChildren(...wanted.map((event) => {
    const key = element("i", { className: "key", title: nameOf(event.run) });
    key.style.setProperty("--key", colour(event.run));
    const row = element("tr", { className: event.level });
    const when = new Date(event.time * 1000), named = event.rank == null || event.message.includes(`rank ${event.rank}`);
    const clock = when.toLocaleString("sv").slice(5, 16);
    for (const cell of [key, clock, event.iteration == null ? "" : event.iteration.toLocaleString("en"), event.event.replaceAll("_", " "), (named ? "" : `rank ${event.rank}: `) + event.message])
      row.append(element("td", {}, cell));
    return row;
  }));
  if (!wanted.length) $("event-rows").replaceChildren(element("tr", {}, element("td", { textContent: "None of these." })));
}

// -- the list of runs ------------------------------------------------------------------------------------------------------

const items = new Map(); // run id -> its parts of the page

function listRuns() {
  runs.forEach((run, at) => {
    if (!items.has(run.id)) {
      const box = element("input", { type: "checkbox", onchange: () => toggle(run.name) });
      const parts = { box, key: element("i", { className: "key" }), name: element("b"), more: element("span", { className: "more" }), bar: element("i") };
      const bar = element("div", { className: "bar" }, parts.bar);
      parts.item = element("li", {}, element("label", {}, box, parts.key, parts.name, parts.more), bar);
      parts.holder = bar;
      items.set(run.id, parts);
    }
    const parts = items.get(run.id), chosen = !view.hidden.has(run.name);
    if ($("runs").children[at] !== parts.item) $("runs").insertBefore(parts.item, $("runs").children[at] ?? null);
    parts.item.hidden = !run.name.toLowerCase().includes($("find").value.toLowerCase());
    parts.item.style.setProperty("--key", colour(run.id));
    parts.box.checked = chosen;
    parts.name.textContent = run.name;
    parts.name.title = `${run.place}\n${run.about}`;
    const share = run.iterations ? Math.min(1, run.iteration / run.iterations) : 0;
    parts.holder.hidden = !share;
    parts.bar.style.width = `${100 * share}%`;
    const told = [`${run.iteration.toLocaleString("en")}${run.iterations ? ` of ${run.iterations.toLocaleString("en")}` : ""}`];
    if (run.loss != null) told.push(`loss of the last step ${written(run.loss, "")}`);
    if (run.tokens_per_second) told.push(`${count(run.tokens_per_second)} tokens/s`);
    if (run.seconds_left) told.push(`${duration(run.seconds_left)} left`);
    for (const [number, what] of [[run.errors, "error"], [run.warnings, "warning"], [run.restarts, "restart"], [run.damaged_lines, "damaged line"]])
      if (number) told.push(`${number} ${what}${number > 1 ? "s" : ""}`);
    const state = run.state ? [element("span", { className: `state ${run.state}`, textContent: run.state, title: run.why }), " "] : [];
    const why = run.why && ["failed", "stalled", "stopped", "interrupted", "unreadable"].includes(run.state) ? ` \u00b7 ${run.why}` : "";
    parts.more.replaceChildren(...state, run.read < 1 ? `reading, ${Math.floor(100 * run.read)} %` : told.join(" \u00b7 ") + why);
    if (run.slow.length) parts.more.append(element("span", { className: "slow", textContent: ` \u00b7 ${run.slow.join(", ")}` }));
    if (run.error) parts.more.append(element("span", { className: "trouble", textContent: ` ${run.error}` }));
  });
  for (const [id, parts] of items) if (place(id) < 0) { parts.item.remove(); items.delete(id); }
  $("chosen").textContent = `${chosen().length} of ${runs.length}`;
  $("find").hidden = runs.length < 6;
}

function toggle(name) {
  view.hidden.has(name) ? view.hidden.delete(name) : view.hidden.add(name);
  changedChoice();
}

function chooseAll(on) {
  view.hidden = new Set(on ? [] : runs.map((run) => run.name));
  changedChoice();
}

function changedChoice() {
  keep();
  listRuns();
  const ids = new Set(chosen().map((run) => run.id)); // hide at once, ask for what is new
  charts = charts.map((chart) => ({ ...chart, curves: chart.curves.filter((curve) => ids.has(curve.run)) }));
  draw();
  refresh(true);
}

// -- settings of the page, kept in its address -------------------------------------------------------------------------------

function keep() {
  const parts = new URLSearchParams();
  if (view.axis !== "iteration") parts.set("axis", view.axis);
  if (view.smoothing !== SMOOTHING) parts.set("smoothing", view.smoothing);
  if (view.clip) parts.set("clip", 1);
  for (const [id, on] of view.log) parts.append(on ? "log" : "linear", id);
  for (const name of view.hidden) parts.append("hide", name);
  history.replaceState(null, "", parts.size ? `#${parts}` : location.pathname + location.search);
}

function restore() {
  const parts = new URLSearchParams(location.hash.slice(1));
  view.axis = AXES.includes(parts.get("axis")) ? parts.get("axis") : "iteration";
  view.smoothing = limited(parts.has("smoothing") ? Number(parts.get("smoothing")) || 0 : SMOOTHING);
  view.clip = parts.has("clip");
  view.log = new Map([...parts.getAll("log").map((id) => [id, true]), ...parts.getAll("linear").map((id) => [id, false])]);
  view.hidden = new Set(parts.getAll("hide"));
  showTools();
}

function showTools() {
  document.querySelector(`input[name="axis"][value="${view.axis}"]`).checked = true;
  $("smoothing").value = view.smoothing;
  $("window").textContent = view.smoothing ? `mean of ${windowSteps().toLocaleString("en")}` : "off";
  $("clip").checked = view.clip;
}

function set(changes, ask = true) {
  Object.assign(view, changes);
  keep();
  showTools();
  ask ? refresh(true) : draw();
}

function setAxis(axis) {
  view.between = null; // places on another axis
  $("reset").hidden = true;
  set({ axis });
}

function setAllLog(on) {
  for (const chart of charts) view.log.set(chart.id, on);
  keep();
  draw();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("theme", theme); } catch { /* private window: the choice lasts as long as the page */ }
  recolour();
}

function recolour() {
  listRuns();
  draw();
  listEvents();
  drawHeats();
}

$("tools").addEventListener("change", (event) => {
  if (event.target.name === "axis") setAxis(event.target.value);
  if (event.target.id === "log") setAllLog(event.target.checked);
  if (event.target.id === "clip") set({ clip: event.target.checked }, false);
});
$("tools").addEventListener("submit", (event) => event.preventDefault());
$("smoothing").addEventListener("input", (event) => set({ smoothing: Number(event.target.value) }));
$("reset").addEventListener("click", () => zoom(null));
$("all").addEventListener("click", () => chooseAll(true));
$("none").addEventListener("click", () => chooseAll(false));
$("find").addEventListener("input", listRuns);
$("urgent").addEventListener("change", listEvents);
$("theme").addEventListener("click", () => setTheme(dark() ? "light" : "dark"));
$("help").addEventListener("click", () => $("keys").showModal());
for (const id of ["ranks-run", "ranks-name", "experts-run", "experts-name", "pictures-run"]) $(id).addEventListener("change", () => refresh(true));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
document.addEventListener("visibilitychange", () => refresh());
window.addEventListener("hashchange", () => { restore(); listRuns(); refresh(true); });

document.addEventListener("keydown", (event) => {
  const { key, target } = event;
  if (event.ctrlKey || event.metaKey || event.altKey || $("keys").open || target.closest?.("select, input[type=search]")) return;
  const number = Number(key);
  if (number >= 1 && number <= 9) { if (runs[number - 1]) toggle(runs[number - 1].name); }
  else if (key === "a") chooseAll(view.hidden.size > 0);
  else if (key === "x") setAxis(AXES[(AXES.indexOf(view.axis) + 1) % AXES.length]);
  else if (key === "[" || key === "]") set({ smoothing: limited(view.smoothing + (key === "]" ? 1 : -1) * Number($("smoothing").step)) });
  else if (key === "l") {
    const card = [...cards.values()].find((one) => one.card.contains(document.activeElement));
    card ? setLog(card.id, !isLog(card.chart)) : setAllLog(!$("log").checked);
  } else if (key === "c") set({ clip: !view.clip }, false);
  else if (key === "d") setTheme(dark() ? "light" : "dark");
  else if (key === "Escape") zoom(null);
  else if (key === "?") $("keys").showModal();
  else return;
  event.preventDefault();
});

// -- live ------------------------------------------------------------------------------------------------------------------

function showRuns(found) {
  const first = !runs.length;
  runs = found;
  if (first && !kept && !location.hash.includes("hide=")) {
    const newest = runs.toSorted((a, b) => b.written - a.written).slice(0, MOST);
    view.hidden = new Set(runs.filter((run) => !newest.includes(run)).map((run) => run.name));
  }
  if (!kept) document.title = runs.length === 1 ? runs[0].name : `${runs.length} runs`;
  listRuns();
  refresh();
}

function live() {
  const source = new EventSource("api/live");
  const say = (state, text) => { $("live").className = `live ${state}`; $("live").textContent = text; };
  source.onopen = () => say("on", "live");
  source.onerror = () => say("off", "no connection, trying again");
  source.onmessage = (message) => showRuns(JSON.parse(message.data).runs);
}

try { const theme = localStorage.getItem("theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* none was kept */ }
if (matchMedia("(max-width: 860px)").matches) $("list").open = false;
if (kept) { $("live").hidden = true; $("smoothing").step = 2; }
restore();
kept ? showRuns(kept.runs) : live();
