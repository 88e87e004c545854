"use strict";
// What the page is about; texts reach the document through textContent alone.
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows.map(row => Object.fromEntries(data.fields.map((name, i) => [name, row[i]])));
const PAGE = 20;
const TONES = {correct: "green", incorrect: "red", unparseable: "red", no_answer: "orange"};

function make(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

const number = value => value === null || value === undefined ? "none" : String(+(+value).toPrecision(4));
const sourceName = row => data.sources[row.source].name;
const isWrong = row => row.verdict !== "correct";

// --- theme

document.getElementById("theme").onclick = () => {
  const dark = getComputedStyle(document.documentElement).colorScheme === "dark" ||
    (!document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "light" : "dark";
};

// --- charts

function nearest(steps, wanted) {
  let best = 0;
  steps.forEach((step, i) => { if (Math.abs(step - wanted) < Math.abs(steps[best] - wanted)) best = i; });
  return best;
}

for (const figure of document.querySelectorAll("figure[data-chart]")) {
  const {span, lines} = data.charts[figure.dataset.chart];
  const [plot, cursor, out] = [".plot", ".cursor", "output"].map(name => figure.querySelector(name));
  const values = figure.querySelectorAll(".legend b");
  const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
  let at = -1;
  const show = i => {
    at = Math.max(0, Math.min(steps.length - 1, i));
    const step = steps[at];
    out.textContent = `step ${step}`;
    lines.forEach((line, k) => {
      const j = nearest(line.steps, step);
      const [low, high] = line.bounds ? line.bounds.map(bound => bound[j]) : [];
      values[k].textContent = number(line.values[j]) + (line.bounds ? ` [${number(low)}, ${number(high)}]` : "");
    });
    const share = (step - span[0]) / (span[1] - span[0]);
    cursor.hidden = false;
    cursor.style.left = `${100 * (data.inner[0] + share * (data.inner[1] - data.inner[0]))}%`;
  };
  const hide = () => {
    cursor.hidden = true;
    out.textContent = "";
    values.forEach(value => { value.textContent = ""; });
  };
  plot.onpointermove = event => {
    const box = plot.getBoundingClientRect();
    const share = ((event.clientX - box.left) / box.width - data.inner[0]) / (data.inner[1] - data.inner[0]);
    show(nearest(steps, span[0] + share * (span[1] - span[0])));
  };
  plot.onpointerleave = figure.onblur = hide;
  figure.onkeydown = event => {
    const move = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: steps.length - 1}[event.key];
    if (move !== undefined) { show(move); event.preventDefault(); }
    if (event.key === "Escape") hide();
  };
}

// --- completions

function facts(row) {
  const parts = Object.entries(row.rewards || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  const list = [
    ["read as", row.extracted ?? "nothing"], ["reference", row.answer], ["verdict", `${row.verdict.replace("_", " ")}: ${row.reason}`],
    ["reward", row.reward === null ? null : number(row.reward) + (parts && ` (${parts})`)],
    ["advantage", row.advantage === null ? null : number(row.advantage)],
    ["length", `${row.tokens} tokens, ${row.finish_reason.replace("_", " ")}`],
  ].filter(([, text]) => text !== null);
  return make("dl", {}, ...list.flatMap(([name, text]) => [make("dt", {textContent: name}), make("dd", {textContent: text, dir: "auto"})]));
}

function tokens(trace, advantage) {
  const [texts, sampled, trained, entropies, clipped] = trace;
  const gaps = trained && sampled.map((value, i) => trained[i] === null ? null : trained[i] - value);
  const kinds = {
    "surprise: -log-prob of the sampler": sampled.map(value => -value),
    "entropy": entropies, "trainer - sampler": gaps && gaps.map(value => value === null ? null : Math.abs(value)),
  };
  const known = Object.entries(kinds).filter(([, values]) => values);
  const choice = make("select", {ariaLabel: "What the colours show"}, ...known.map(([name]) => make("option", {textContent: name})));
  const readout = make("p", {className: "note", role: "status"});
  const spans = texts.map((text, i) => make("span", {textContent: text, className: clipped.includes(i) ? "clipped" : ""}));
  const view = make("pre", {className: "tokens purple", tabIndex: 0, dir: "auto", ariaLabel: "Tokens; the arrow keys read values"}, ...spans);
  let at = -1;
  const paint = () => {
    const values = kinds[choice.value], top = Math.max(1e-9, ...values.map(value => value ?? 0));
    spans.forEach((span, i) => span.style.setProperty("--heat", (values[i] ?? 0) / top));
    readout.textContent = `Darkest: ${number(top)} nats. Point at a token, or focus the text and use the arrow keys. Underlined: clipped.`;
  };
  const read = i => {
    spans[at]?.classList.remove("now");
    at = Math.max(0, Math.min(spans.length - 1, i));
    spans[at].classList.add("now");
    readout.textContent = `Token ${at + 1} ${JSON.stringify(texts[at])}: log-prob of the sampler ${number(sampled[at])}, of the trainer ` +
      `${trained ? number(trained[at]) : "none (no gradient)"}, entropy ${entropies ? number(entropies[at]) : "unknown"}, ` +
      `advantage ${number(advantage)}, ${clipped.includes(at) ? "clipped" : "not clipped"}`;
  };
  view.onpointerover = event => { const i = spans.indexOf(event.target); if (i >= 0) read(i); };
  view.onkeydown = event => {
    const move = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: spans.length - 1}[event.key];
    if (move !== undefined) { read(move); event.preventDefault(); }
  };
  choice.onchange = paint;
  paint();
  return [make("p", {}, choice), view, readout];
}

function card(row) {
  const summary = make("summary", {},
    make("span", {className: `chip ${TONES[row.verdict] || "grey"}`, textContent: row.verdict.replace("_", " ")}),
    make("bdi", {className: "id", textContent: row.problem_id}), make("span", {textContent: sourceName(row)}),
    make("span", {textContent: row.reward === null ? "" : `reward ${number(row.reward)}`}),
    make("bdi", {textContent: row.completion.slice(0, 160), dir: "auto"}));
  const node = make("details", {className: "card"}, summary);
  node.ontoggle = () => {
    if (node.children.length > 1) return;
    node.append(make("small", {textContent: "Prompt"}), make("pre", {textContent: data.prompts[row.prompt], dir: "auto"}),
      make("small", {textContent: "Completion"}));
    node.append(...(row.trace ? tokens(row.trace, row.advantage) : [make("pre", {textContent: row.completion, dir: "auto"})]), facts(row));
  };
  return node;
}

const filters = document.getElementById("filters"), cards = document.getElementById("cards"), more = document.getElementById("more");
let found = [], shown = 0;

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, text]) => make("option", {value, textContent: text})));
}

function page() {
  cards.append(...found.slice(shown, shown + PAGE).map(card));
  shown = Math.min(found.length, shown + PAGE);
  more.hidden = shown >= found.length;
}

function filter() {
  const {source, verdict, order, least, most, text, traced} = filters.elements;
  const words = text.value.toLowerCase();
  found = rows.filter(row =>
    (source.value === "" || row.source === +source.value) &&
    (verdict.value === "" || row.verdict === verdict.value || (verdict.value === "wrong" && isWrong(row))) &&
    (least.value === "" || (row.reward !== null && row.reward >= +least.value)) &&
    (most.value === "" || (row.reward !== null && row.reward <= +most.value)) && (!traced.checked || row.trace) &&
    (!words || [row.problem_id, data.prompts[row.prompt], row.completion].some(part => part.toLowerCase().includes(words))));
  const key = order.value.replace("-", ""), sign = order.value.startsWith("-") ? -1 : 1;
  if (key) found.sort((a, b) => sign * ((a[key] ?? 0) - (b[key] ?? 0)));
  document.getElementById("count").textContent = `${found.length} of ${rows.length} completions in this file.`;
  cards.replaceChildren();
  shown = 0;
  page();
}

options(filters.elements.source, [["", "everything"], ...data.sources.map((source, i) => [i, source.name])]);
options(filters.elements.verdict, [["", "any"], ["wrong", "anything but correct"],
  ...[...new Set(rows.map(row => row.verdict))].sort().map(verdict => [verdict, verdict.replace("_", " ")])]);
filters.onsubmit = event => event.preventDefault();
filters.oninput = filter;
more.onclick = page;
document.onkeydown = event => {
  if (event.key === "/" && !["INPUT", "SELECT"].includes(event.target.tagName)) {
    filters.elements.text.focus();
    event.preventDefault();
  }
};
filter();

// --- the same problem before and after

const pairs = document.getElementById("pairs"), {change, back, next} = pairs.elements;
const problems = new Map();
for (const row of rows) {
  const source = data.sources[row.source];
  if (!source.compared || row.sample) continue;
  const key = `${source.compared} ${row.problem_id}`;
  problems.set(key, [...(problems.get(key) || []), row]);
}
const kinds = {"wrong, then right": [], "right, then wrong": [], "wrong both times": [], "right both times": []};
for (const group of problems.values()) {
  if (group.length < 2) continue;
  const [before, after] = [isWrong(group[0]), isWrong(group[group.length - 1])];
  kinds[before === after ? (before ? "wrong both times" : "right both times") : before ? "wrong, then right" : "right, then wrong"].push(group);
}
let place = 0;

function compare() {
  const groups = kinds[change.value] || [];
  place = Math.max(0, Math.min(groups.length - 1, place));
  back.disabled = place === 0;
  next.disabled = place >= groups.length - 1;
  pairs.querySelector("[role=status]").textContent = groups.length ? `${place + 1} of ${groups.length}: ${groups[place][0].problem_id}` : "there are none";
  document.getElementById("pair").replaceChildren(...(groups.length ? [
    make("pre", {textContent: data.prompts[groups[place][0].prompt], dir: "auto"}),
    ...groups[place].map(row => make("div", {}, make("b", {textContent: sourceName(row)}), " ",
      make("span", {className: `chip ${TONES[row.verdict] || "grey"}`, textContent: row.verdict.replace("_", " ")}),
      make("pre", {textContent: row.completion, dir: "auto"}), facts(row))),
  ] : []));
}

options(change, Object.entries(kinds).map(([name, groups]) => [name, `${name} (${groups.length})`]));
change.value = Object.keys(kinds).find(name => kinds[name].length) || "wrong, then right";
pairs.onsubmit = event => event.preventDefault();
change.oninput = () => { place = 0; compare(); };
back.onclick = () => { place -= 1; compare(); };
next.onclick = () => { place += 1; compare(); };
document.getElementById("same").hidden = problems.size === 0;
compare();
