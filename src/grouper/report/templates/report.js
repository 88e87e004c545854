"use strict";
// Texts reach the document through textContent and text nodes alone.
const data = JSON.parse(document.getElementById("data").textContent);
const MATHML = "http://www.w3.org/1998/Math/MathML";
const SVG = "http://www.w3.org/2000/svg";

function make(tag, props, ...children) {
  const node = Object.assign(document.createElement(tag), props);
  node.append(...children);
  return node;
}

function shape(tag, attributes, text = "") {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.textContent = text;
  return node;
}

function options(select, entries) {
  const nodes = entries.map(([value, textContent]) => make("option", {value, textContent}));
  select.replaceChildren(...nodes);
}

function number(value, digits = 4) {
  if (value === null || value === undefined) return "none";
  return String(+(+value).toPrecision(digits));
}

// Calls `read` with the place that a key moves to.
function arrows(node, count, read) {
  let place = -1;
  node.addEventListener("keydown", event => {
    const target = {ArrowLeft: place - 1, ArrowRight: place + 1, Home: 0, End: count() - 1}[event.key];
    if (target === undefined || event.target !== node) return;
    place = Math.max(0, Math.min(count() - 1, target));
    read(place);
    event.preventDefault();
  });
}

document.getElementById("theme").onclick = () => {
  const root = document.documentElement.dataset;
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)").matches;
  const isDark = root.theme ? root.theme === "dark" : systemIsDark;
  root.theme = isDark ? "light" : "dark";
};

// --- LaTeX

// An element of a tree [name, attributes, text or children ...], see report/formulas.py.
function formula([name, ...parts]) {
  const node = document.createElementNS(MATHML, name);
  for (const part of parts) {
    if (typeof part === "string") node.append(part);
    else if (Array.isArray(part)) node.append(formula(part));
    else for (const [key, value] of Object.entries(part)) node.setAttribute(key, value);
  }
  return node;
}

// The nodes of a text, with its formulas drawn; a formula that could not be converted stays text.
function withFormulas(text) {
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(new RegExp(data.formula, "g"))) {
    if (!Object.hasOwn(data.formulas, match[0])) continue;
    const node = formula(data.formulas[match[0]]);
    node.setAttribute("title", match[0]);
    nodes.push(text.slice(end, match.index), node);
    end = match.index + match[0].length;
  }
  nodes.push(text.slice(end));
  return nodes;
}
