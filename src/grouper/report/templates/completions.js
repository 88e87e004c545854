// --- completions

const PAGE = 12;
const filters = document.getElementById("filters");
const groupList = document.getElementById("groups");
const more = document.getElementById("more");
const {elements} = filters;
const outcomeName = outcome => data.outcomes[outcome] || outcome;
const mean = values => values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;

for (const group of data.groups) {
  group.correct = group.samples.filter(sample => sample.outcome === "correct").length;
  group.reward = mean(group.samples.map(sample => sample.reward).filter(value => value !== null));
  group.tokens = mean(group.samples.map(sample => sample.tokens || 0));
}

// The steps of a set, in order; empty for an evaluation.
function stepsOf(set) {
  const steps = data.groups.filter(group => group.set === set && group.step !== null).map(group => group.step);
  return [...new Set(steps)].sort((a, b) => a - b);
}

const currentSet = () => +elements.set.value;
const currentStep = () => stepsOf(currentSet())[+elements.step.value] ?? null;

// --- cards

function facts(group, sample) {
  const parts = Object.entries(sample.rewards || {}).map(([key, value]) => `${key} ${number(value)}`).join(", ");
  const entries = {
    "read as": sample.extracted ?? "nothing",
    reference: group.answer,
    verdict: `${outcomeName(sample.outcome)}${sample.reason ? `: ${sample.reason}` : ""}`,
    reward: sample.reward === null ? null : `${number(sample.reward)}${parts ? ` (${parts})` : ""}`,
    advantage: sample.advantage === null ? null : number(sample.advantage),
    length: `${sample.tokens} tokens, ended by ${(sample.finish_reason || "").replace("_", " ")}`,
  };
  const nodes = [];
  for (const [key, text] of Object.entries(entries)) {
    if (text !== null) nodes.push(make("dt", {textContent: key}), make("dd", {textContent: text, dir: "auto"}));
  }
  return make("dl", {}, ...nodes);
}

// The tokens of a sample, colored by one of their records.
function tokens([texts, sampled, trained, entropies, clipped, read], advantage) {
  const kinds = {
    "-log-prob of the sampler": sampled.map(value => -value),
    entropy: entropies,
    "|trainer - sampler|": trained && trained.map((value, i) => Math.abs(value - sampled[i])),
  };
  const choice = make("select", {ariaLabel: "Color"});
  const readout = make("p", {className: "note readout", role: "status"});
  options(choice, Object.keys(kinds).filter(key => kinds[key]).map(key => [key, `Color: ${key}`]));
  const kindOf = place => read.includes(place) ? "tool" : clipped.includes(place) ? "clipped" : "";
  const spans = texts.map((text, i) => make("span", {textContent: text, className: kindOf(i)}));
  const view = make("pre", {className: "tokens", tabIndex: 0, dir: "auto"}, ...spans);
  choice.onchange = () => {
    const top = Math.max(1e-9, ...kinds[choice.value]);
    spans.forEach((span, i) => span.style.setProperty("--heat", kinds[choice.value][i] / top));
    readout.textContent = `Darkest: ${number(top)} nats. Underlined: clipped.${read.length ? " Slanted: written by a tool." : ""} Point at a token, or use the arrow keys, to read it.`;
  };
  const show = place => {
    spans.forEach((span, i) => span.classList.toggle("now", i === place));
    if (read.includes(place)) {
      readout.textContent = `Token ${place + 1} ${JSON.stringify(texts[place])}: written by a tool, read and not trained`;
      return;
    }
    readout.textContent = `Token ${place + 1} ${JSON.stringify(texts[place])}: log-prob of the sampler ${number(sampled[place])}, ` +
      `of the trainer ${trained ? number(trained[place]) : "none (not trained on)"}, entropy ${entropies ? number(entropies[place]) : "unknown"}, ` +
      `advantage ${number(advantage)}, ${clipped.includes(place) ? "clipped" : "not clipped"}`;
  };
  view.onpointerover = event => { if (event.target !== view) show(spans.indexOf(event.target)); };
  arrows(view, () => spans.length, show);
  choice.onchange();
  return [choice, view, readout];
}

// A <details> whose content is made when it is opened first.
function onDemand(props, summary, content) {
  const node = make("details", props, summary);
  node.ontoggle = () => {
    if (node.open && node.children.length === 1) node.append(...content());
  };
  return node;
}

// Opens a card with its content at once: the event of the browser comes later, and moves the page.
function openCard(card) {
  card.open = true;
  card.ontoggle();
}

function text(value) {
  const parts = elements.latex.checked ? withFormulas(value) : [value];
  return make("pre", {dir: "auto"}, ...parts);
}

function chip(outcome) {
  return make("span", {className: `chip ${outcome}`, textContent: outcomeName(outcome)});
}

function sampleCard(group, sample) {
  const href = fragment({problem: group.problem, sample: sample.name});
  const link = make("a", {href, title: "Link to this sample"}, make("bdi", {textContent: sample.name}));
  const head = make("p", {}, link, chip(sample.outcome));
  if (sample.reward !== null) head.append(make("span", {textContent: `reward ${number(sample.reward)}`}));
  if (sample.advantage !== null) head.append(make("span", {textContent: `advantage ${number(sample.advantage, 3)}`}));
  head.append(make("span", {textContent: `${sample.tokens} tokens`}));
  if (sample.calls) head.append(make("span", {textContent: sample.calls === 1 ? "1 call of a tool" : `${sample.calls} calls of tools`}));
  const card = make("article", {className: "sample"}, head, text(sample.completion));
  card.dataset.sample = sample.name;
  card.append(onDemand({className: "facts"}, make("summary", {textContent: "Details"}), () => [facts(group, sample)]));
  if (sample.trace) {
    card.append(onDemand({className: "trace"}, make("summary", {textContent: "Token by token"}), () => tokens(sample.trace, sample.advantage)));
  }
  return card;
}

// The prompt once, then every completion; another prompt only where a sample had another one.
function groupBody(group) {
  const nodes = [];
  let prompt = null;
  let samples = null;
  for (const sample of group.samples) {
    if (sample.prompt !== prompt) {
      prompt = sample.prompt;
      const reference = samples === null ? `. Reference answer: ${group.answer}` : "";
      samples = make("div", {className: "samples"});
      nodes.push(make("p", {className: "kind", textContent: `Prompt${reference}`}), text(data.prompts[prompt]), samples);
    }
    samples.append(sampleCard(group, sample));
  }
  return nodes;
}

function groupCard(group) {
  const marks = make("span", {className: "marks", ariaHidden: "true"}, ...group.samples.map(sample => make("i", {className: sample.outcome})));
  const prompt = data.prompts[group.samples[0].prompt].replace(/\s+/g, " ").trim();
  const preview = prompt.length > 150 ? `... ${prompt.slice(-150)}` : prompt;
  const summary = make("summary", {},
    make("b", {textContent: `${group.correct} of ${group.samples.length} correct`}), marks,
    make("bdi", {textContent: group.problem}),
    make("span", {textContent: group.reward === null ? "" : `mean reward ${number(group.reward)}`}),
    make("bdi", {className: "preview", textContent: preview, dir: "auto"}));
  const card = onDemand({className: "group"}, summary, () => groupBody(group));
  card.dataset.problem = group.problem;
  return card;
}

// --- filters

let matching = [];
let shown = 0;

function showMore() {
  groupList.append(...matching.slice(shown, shown + PAGE).map(groupCard));
  shown = Math.min(matching.length, shown + PAGE);
  more.hidden = shown >= matching.length;
}

function matches(group, wanted, step) {
  if (group.set !== currentSet() || group.step !== step) return false;
  if (elements.change.value && group.change !== elements.change.value) return false;
  if (elements.traced.checked && !group.samples.some(sample => sample.trace)) return false;
  const outcome = elements.outcome.value;
  const hasOutcome = sample => outcome === "not-correct" ? sample.outcome !== "correct" : sample.outcome === outcome;
  if (outcome && !group.samples.some(hasOutcome)) return false;
  if (!wanted) return true;
  const texts = [group.problem, ...group.samples.flatMap(sample => [data.prompts[sample.prompt], sample.completion])];
  return texts.some(one => one.toLowerCase().includes(wanted));
}

// Shows the groups that match, the first one opened.
function filter() {
  const steps = stepsOf(currentSet());
  const step = currentStep();
  elements.step.max = Math.max(0, steps.length - 1);
  elements.back.disabled = +elements.step.value <= 0;
  elements.next.disabled = +elements.step.value >= steps.length - 1;
  filters.querySelector(".steps").classList.toggle("off", !steps.length);
  filters.querySelector(".change").classList.toggle("off", !changesOf(currentSet()).length);
  filters.querySelector(".steps output").textContent = steps.length
    ? `${step} (${+elements.step.value + 1} of ${steps.length} steps)` : "";
  const wanted = elements.text.value.toLowerCase();
  matching = data.groups.filter(group => matches(group, wanted, step));
  const [key, sign] = elements.order.value.split(" ");
  if (key) matching.sort((a, b) => sign * ((a[key] ?? 0) - (b[key] ?? 0)));
  const all = data.groups.filter(group => group.set === currentSet() && group.step === step);
  const count = matching.reduce((sum, group) => sum + group.samples.length, 0);
  document.getElementById("count").textContent =
    `${matching.length} of ${all.length} problems, with ${count} completions. A problem is here with all its completions if one of them matches.`;
  groupList.replaceChildren();
  shown = 0;
  showMore();
  if (groupList.firstChild) openCard(groupList.firstChild);
}

function changesOf(set) {
  return [...new Set(data.groups.filter(group => group.set === set).map(group => group.change).filter(Boolean))];
}

function chooseSet() {
  const counts = change => data.groups.filter(group => group.set === currentSet() && group.change === change).length;
  options(elements.change, [["", "any"], ...changesOf(currentSet()).map(change => [change, `${change} (${counts(change)})`])]);
  elements.step.max = Math.max(0, stepsOf(currentSet()).length - 1);
  elements.step.value = elements.step.max;
}

// --- links: #completions?set=1&step=5&problem=train/3&sample=sample+2

const LINKED = ["outcome", "change", "text", "order"];

function fragment(additions = {}) {
  const values = {set: elements.set.value};
  if (currentStep() !== null) values.step = currentStep();
  for (const key of LINKED) if (elements[key].value) values[key] = elements[key].value;
  return `#completions?${new URLSearchParams({...values, ...additions})}`;
}

function follow() {
  if (!location.hash.startsWith("#completions?")) return;
  const wanted = new URLSearchParams(location.hash.slice("#completions?".length));
  if (wanted.has("set")) elements.set.value = wanted.get("set");
  if (elements.set.selectedIndex < 0) elements.set.selectedIndex = 0;
  chooseSet();
  const place = stepsOf(currentSet()).indexOf(+wanted.get("step"));
  if (place >= 0) elements.step.value = place;
  for (const key of LINKED) {
    elements[key].value = wanted.get(key) || "";
    if (elements[key].selectedIndex < 0) elements[key].selectedIndex = 0;
  }
  filter();
  const problem = wanted.get("problem");
  if (problem === null) {
    document.getElementById("completions").scrollIntoView();
    return;
  }
  while (shown < matching.length && !cardOf(problem)) showMore();
  const card = cardOf(problem);
  if (!card) return;
  openCard(card);
  const sample = [...card.querySelectorAll(".sample")].find(node => node.dataset.sample === wanted.get("sample"));
  if (sample) sample.classList.add("linked");
  (sample || card).scrollIntoView({block: "center"});
}

function cardOf(problem) {
  return [...groupList.children].find(card => card.dataset.problem === problem);
}

if (data.sets.length) {
  options(elements.set, data.sets.map((set, i) => [i, set.name]));
  const outcomes = [...new Set(data.groups.flatMap(group => group.samples.map(sample => sample.outcome)))];
  const known = Object.keys(data.outcomes).filter(outcome => outcomes.includes(outcome));
  options(elements.outcome, [["", "any"], ["not-correct", "all but correct"], ...known.map(outcome => [outcome, outcomeName(outcome)])]);
  options(elements.order, [["", "as recorded"], ["correct 1", "fewest correct"], ["correct -1", "most correct"],
    ["reward -1", "highest reward"], ["reward 1", "lowest reward"], ["tokens -1", "longest"], ["tokens 1", "shortest"]]);
  // Rollouts are what a run has most of.
  const rollouts = data.sets.findIndex(set => set.kind === "rollouts");
  elements.set.value = Math.max(0, rollouts);
  chooseSet();
  filters.onsubmit = event => event.preventDefault();
  filters.oninput = event => {
    if (event.target === elements.set) chooseSet();
    filter();
    history.replaceState(null, "", fragment());
  };
  const move = by => {
    elements.step.value = +elements.step.value + by;
    filters.oninput({target: elements.step});
  };
  elements.back.onclick = () => move(-1);
  elements.next.onclick = () => move(1);
  more.onclick = showMore;
  filter();
  follow();
  addEventListener("hashchange", follow);
} else {
  for (const node of [filters, more, document.getElementById("count")]) node.hidden = true;
}

document.addEventListener("keydown", event => {
  if (event.key !== "/" || ["INPUT", "SELECT"].includes(event.target.tagName)) return;
  elements.text.focus();
  event.preventDefault();
});
