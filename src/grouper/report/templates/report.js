"use strict";
// Texts reach the document through textContent alone.
const data = JSON.parse(document.getElementById("data").textContent);
const rows = data.rows.map(row => Object.fromEntries(data.fields.map((name, i) => [name, row[i]])));
const PAGE = 20;
const TONES = {correct: "green", incorrect: "red", unparseable: "red", no_answer: "orange"};
const number = value => value === null || value === undefined ? "none" : String(+(+value).toPrecision(4));
const words = name => name.replace("_", " ");
const isWrong = row => row.verdict !== "correct";

function make(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

function options(select, entries) {
  select.replaceChildren(...entries.map(([value, textContent]) => make("option", {value, textContent})));
}

// Calls `read` with the place that a key moves to.
function arrows(node, count, read) {
  let at = -1;
  node.addEventListener("keydown", event => {
    const to = {ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: count - 1}[event.key];
    if (to === undefined) return;
    at = Math.max(0, Math.min(count - 1, to));
    read(at);
    event.preventDefault();
  });
}

document.getElementById("theme").onclick = () => {
  const root = document.documentElement.dataset;
  const dark = root.theme ? root.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.theme = dark ? "light" : "dark";
};

// --- charts

function nearest(steps, wanted) {
  return steps.reduce((best, step, i) => Math.abs(step - wanted) < Math.abs(steps[best] - wanted) ? i : best, 0);
}

// Phase -> what shows and hides the values of its charts: all of them speak of the same step.
const together = {};
for (const figure of document.querySelectorAll("figure")) {
  const {phase, span, lines} = data.charts[figure.dataset.chart], [left, right] = data.inner;
  const [plot, cursor, out] = [".plot", ".cursor", "output"].map(name => figure.querySelector(name));
  const values = figure.querySelectorAll(".legend b");
  const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
  const charts = together[phase] ||= [];
  charts.push({
    show(step) {
      out.textContent = `step ${step}`;
      lines.forEach((line, k) => {
        const i = nearest(line.steps, step), over = step > line.steps[line.steps.length - 1];
        const ends = line.bounds ? ` [${line.bounds.map(bound => number(bound[i])).join(", ")}]` : "";
        const other = line.bounds && line.steps[i] !== step ? ` at step ${line.steps[i]}` : "";
        values[k].textContent = over ? "" : number(line.values[i]) + ends + other;
      });
      cursor.hidden = step < span[0] || step > span[1];
      cursor.style.left = `${100 * (left + (step - span[0]) / (span[1] - span[0]) * (right - left))}%`;
    },
    hide() {
      cursor.hidden = true;
      [out, ...values].forEach(node => { node.textContent = ""; });
    },
  });
  const read = at => charts.forEach(chart => chart.show(steps[at]));
  const hide = () => charts.forEach(chart => chart.hide());
  plot.onpointermove = event => {
    const box = plot.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
    read(nearest(steps, span[0] + (share - left) / (right - left) * (span[1] - span[0])));
  };
  plot.onpointerleave = figure.onblur = hide;
  figure.onkeydown = event => { if (event.key === "Escape") hide(); };
  arrows(figure, steps.length, read);
}

// --- completions

function facts(row) {
  const parts = Object.entries(row.rewards || {}).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return make("dl", {}, ...Object.entries({
    "read as": row.extracted ?? "nothing", reference: row.answer, verdict: `${words(row.verdict)}: ${row.reason}`,
    reward: row.reward === null ? null : `${number(row.reward)} (${parts})`,
    advantage: row.advantage === null ? null : number(row.advantage),
    length: `${row.tokens} tokens, ${words(row.finish_reason)}`,
  }).filter(([, text]) => text !== null).flatMap(([name, text]) => [make("dt", {textContent: name}), make("dd", {textContent: text, dir: "auto"})]));
}

function tokens([texts, sampled, trained, entropies, clipped], advantage) {
  const kinds = {
    "Colour: -log-prob of the sampler": sampled.map(value => -value), "Colour: entropy": entropies,
    "Colour: |trainer - sampler|": trained && trained.map((value, i) => Math.abs(value - sampled[i])),
  };
  const choice = make("select", {ariaLabel: "Colour"}), readout = make("p", {className: "note", role: "status"});
  options(choice, Object.keys(kinds).filter(name => kinds[name]).map(name => [name, name]));
  const spans = texts.map((text, i) => make("span", {textContent: text, className: clipped.includes(i) ? "clipped" : ""}));
  const view = make("pre", {className: "tokens", tabIndex: 0, dir: "auto"}, ...spans);
  choice.onchange = () => {
    const top = Math.max(1e-9, ...kinds[choice.value]);
    spans.forEach((span, i) => span.style.setProperty("--heat", kinds[choice.value][i] / top));
    readout.textContent = `Darkest: ${number(top)} nats. Underlined: clipped. Point at a token, or use the arrow keys, to read it.`;
  };
  const read = at => {
    spans.forEach((span, i) => span.classList.toggle("now", i === at));
    readout.textContent = `Token ${at + 1} ${JSON.stringify(texts[at])}: log-prob of the sampler ${number(sampled[at])}, ` +
      `of the trainer ${trained ? number(trained[at]) : "none (not trained on)"}, entropy ${entropies ? number(entropies[at]) : "unknown"}, ` +
      `advantage ${number(advantage)}, ${clipped.includes(at) ? "clipped" : "not clipped"}`;
  };
  view.onpointerover = event => { if (event.target !== view) read(spans.indexOf(event.target)); };
  arrows(view, spans.length, read);
  choice.onchange();
  return [make("p", {}, choice), view, readout];
}

function card(row) {
  const node = make("details", {className: "card"}, make("summary", {},
    make("span", {className: `chip ${TONES[row.verdict] || "grey"}`, textContent: words(row.verdict)}),
    make("span", {textContent: data.sources[row.source].name}), make("bdi", {textContent: row.problem_id}),
    make("span", {textContent: row.reward === null ? "" : `reward ${number(row.reward)}`}),
    make("bdi", {textContent: row.completion.slice(0, 160), dir: "auto"})));
  node.ontoggle = () => {
    if (node.children.length > 1) return;
    const text = value => make("pre", {textContent: value, dir: "auto"});
    node.append(text(data.prompts[row.prompt]), ...(row.trace ? tokens(row.trace, row.advantage) : [text(row.completion)]), facts(row));
  };
  return node;
}

const filters = document.getElementById("filters"), cards = document.getElementById("cards"), more = document.getElementById("more");
let found = [], shown = 0;

function page() {
  cards.append(...found.slice(shown, shown + PAGE).map(card));
  shown = Math.min(found.length, shown + PAGE);
  more.hidden = shown >= found.length;
}

function filter() {
  const {source, verdict, order, least, most, text, traced} = filters.elements;
  const wanted = text.value.toLowerCase();
  found = rows.filter(row => [
    source.value === "" || row.source === +source.value,
    verdict.value === "" || row.verdict === verdict.value || (verdict.value === "wrong" && isWrong(row)),
    least.value === "" || (row.reward ?? NaN) >= +least.value,
    most.value === "" || (row.reward ?? NaN) <= +most.value,
    !traced.checked || row.trace,
    [row.problem_id, data.prompts[row.prompt], row.completion].some(part => part.toLowerCase().includes(wanted)),
  ].every(Boolean));
  const [key, sign] = order.value.split(" ");
  if (key) found.sort((a, b) => sign * ((a[key] ?? 0) - (b[key] ?? 0)));
  document.getElementById("count").textContent = `${found.length} of ${rows.length} completions in this file.`;
  cards.replaceChildren();
  shown = 0;
  page();
}

options(filters.elements.source, [["", "everything"], ...data.sources.map((source, i) => [i, source.name])]);
options(filters.elements.verdict, [["", "any"], ["wrong", "all but correct"],
  ...[...new Set(rows.map(row => row.verdict))].sort().map(verdict => [verdict, words(verdict)])]);
options(filters.elements.order, [["", "as recorded"], ["reward -1", "highest reward"], ["reward 1", "lowest reward"],
  ["tokens -1", "longest"], ["tokens 1", "shortest"]]);
filters.onsubmit = event => event.preventDefault();
filters.oninput = filter;
more.onclick = page;
document.onkeydown = event => {
  if (event.key !== "/" || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
  filters.elements.text.focus();
  event.preventDefault();
};
filter();

// --- the same problem before and after

const pairs = document.getElementById("pairs"), {change, back, next} = pairs.elements;
const problems = new Map();
for (const row of rows.filter(one => data.sources[one.source].compared && !one.sample)) {
  const key = `${data.sources[row.source].compared} ${row.problem_id}`;
  problems.set(key, [...(problems.get(key) || []), row]);
}
const kinds = {"wrong, then right": [], "right, then wrong": [], "wrong, then wrong": [], "right, then right": []};
const side = row => isWrong(row) ? "wrong" : "right";
for (const group of problems.values()) {
  if (group.length > 1) kinds[`${side(group[0])}, then ${side(group[group.length - 1])}`].push(group);
}
let place = 0;

function compare() {
  const groups = kinds[change.value];
  place = Math.max(0, Math.min(groups.length - 1, place));
  back.disabled = place === 0;
  next.disabled = place >= groups.length - 1;
  pairs.querySelector("[role=status]").textContent = groups.length ? `${place + 1} of ${groups.length}` : "there are none";
  document.getElementById("pair").replaceChildren(...(groups[place] || []).map(row => Object.assign(card(row), {open: true})));
}

options(change, Object.entries(kinds).map(([name, groups]) => [name, `${name} (${groups.length})`]));
change.value = Object.keys(kinds).find(name => kinds[name].length) || "wrong, then right";
pairs.onsubmit = event => event.preventDefault();
change.oninput = () => { place = 0; compare(); };
back.onclick = () => { place -= 1; compare(); };
next.onclick = () => { place += 1; compare(); };
compare();
