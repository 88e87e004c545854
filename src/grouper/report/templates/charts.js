// --- charts

const axes = document.getElementById("axes");
// Pixels of a tick label's character, and of the space for the labels of the horizontal axis.
const CHARACTER = 6.7;
const BELOW = 36;
const ABOVE = 16;
const GAP = 14;
const RIGHT = 14;

// The value of a clock at a step: between two of its steps it is interpolated.
function clockValue(clock, step, axis) {
  if (axis === "steps") return step;
  const {steps} = clock;
  const values = clock[axis];
  const after = steps.findIndex(one => one >= step);
  if (after < 0) return values[values.length - 1];
  if (after === 0 || steps[after] === step) return values[after];
  const share = (step - steps[after - 1]) / (steps[after] - steps[after - 1]);
  return values[after - 1] + share * (values[after] - values[after - 1]);
}

// The running mean over a share of the values, narrower at both ends.
function smoothed(line, share) {
  const half = line.exact || line.bounds ? 0 : Math.floor(line.values.length * share / 2);
  return line.values.map((_, place) => {
    const near = line.values.slice(Math.max(0, place - half), place + half + 1).filter(value => value !== null);
    return near.length ? near.reduce((sum, value) => sum + value, 0) / near.length : null;
  });
}

// About `count` round numbers between two limits.
function ticks(low, high, count, isWhole = false) {
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  let size = [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999) * power;
  if (isWhole) size = Math.max(1, size);
  const places = [];
  for (let i = Math.ceil(low / size - 1e-9); i * size <= high + size * 1e-6; i += 1) places.push(i * size);
  return places;
}

// Labels of ticks, all in one way: plain, or with a power of ten where that is shorter.
function labels(places) {
  const top = Math.max(...places.map(Math.abs));
  if (top !== 0 && (top < 0.01 || top >= 1e5)) {
    return places.map(value => value === 0 ? "0" : shortPower(value));
  }
  return places.map(value => String(+value.toPrecision(6)));
}

function shortPower(value) {
  const [digits, power] = value.toExponential(2).split("e");
  return `${+digits}e${+power}`;
}

// The unit of an axis, what its values are divided by, and its name.
function axisUnit(axis, top) {
  if (axis === "seconds") {
    if (top >= 3 * 3600) return {size: 3600, name: "hours"};
    return top >= 180 ? {size: 60, name: "minutes"} : {size: 1, name: "seconds"};
  }
  if (axis === "tokens") {
    if (top >= 1e6) return {size: 1e6, name: "million tokens"};
    return top >= 1e4 ? {size: 1e3, name: "thousand tokens"} : {size: 1, name: "tokens"};
  }
  return {size: 1, name: "step"};
}

// What is drawn of a chart with these settings: positions and heights of every line.
function layout(chart, axis, share) {
  const facets = chart.facets.map(facet => {
    const lines = facet.lines.map(line => ({
      ...line,
      x: line.steps.map(step => clockValue(data.clocks[line.clock], step, axis)),
      smooth: smoothed(line, share),
    }));
    if (chart.stacked) stack(lines);
    const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b);
    const ends = facet.lines.map(line => {
      const clock = data.clocks[line.clock];
      return clockValue(clock, clock.steps[clock.steps.length - 1], axis);
    });
    // A model is measured at step 0, too; curves begin with the first step.
    const starts = axis === "steps" && !lines.some(line => line.bounds) ? lines.map(line => line.x[0]) : [0];
    const low = Math.min(...starts);
    const high = Math.max(...ends, ...lines.flatMap(line => line.x));
    return {...facet, lines, steps, low, high: high > low ? high : low + 1};
  });
  const values = facets.flatMap(facet => facet.lines.flatMap(line =>
    [...line.values, ...line.smooth, ...(line.bounds || []).flat(), ...(line.top || [])])).filter(value => value !== null);
  let low = Math.min(...values);
  let high = Math.max(...values);
  if (chart.stacked) high = Math.max(...facets.flatMap(facet => facet.lines.flatMap(line => line.top)));
  if (low >= 0) low = 0;
  if (low >= 0 && high <= 100 && chart.unit.endsWith("(%)")) high = 100;
  if (low === high) high = low + (Math.abs(low) || 1);
  else if (high !== 100) high += (high - low) * 0.04;
  return {facets, low, high};
}

// Lays the lines on each other: each gets its lower and its upper edge.
function stack(lines) {
  let bottom = lines[0].values.map(() => 0);
  for (const line of lines) {
    line.bottom = bottom;
    line.top = line.smooth.map((value, place) => bottom[place] + (value ?? 0));
    bottom = line.top;
  }
}

const path = points => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

class Chart {
  constructor(figure, chart) {
    this.figure = figure;
    this.chart = chart;
    this.plot = figure.querySelector(".plot");
    this.output = figure.querySelector("output");
    const legend = figure.querySelector(".legend");
    const names = new Map();
    for (const line of chart.facets.flatMap(facet => facet.lines)) names.set(line.name, line);
    this.values = new Map();
    for (const [name, line] of names) {
      const value = make("b");
      legend.append(make("li", {className: line.color}, make("span", {textContent: name || "mean", title: name}), value));
      this.values.set(name, value);
    }
    const hasIntervals = [...names.values()].some(line => line.bounds);
    legend.classList.toggle("long", hasIntervals);
    this.place = null;
  }

  draw() {
    const width = this.plot.clientWidth;
    const height = this.plot.clientHeight;
    if (width < 60) return;
    const axis = axes.elements.axis.value;
    this.layout = layout(this.chart, axis, axes.elements.smoothing.value / 100);
    const {facets, low, high} = this.layout;
    const marks = ticks(low, high, height > 240 ? 6 : 4);
    const names = labels(marks);
    const left = Math.max(...names.map(name => name.length)) * CHARACTER + 10;
    const top = facets.length > 1 ? ABOVE + 8 : ABOVE / 2;
    const bottom = height - BELOW;
    const y = value => bottom - (value - low) / (high - low) * (bottom - top);
    const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-hidden": "true"});
    const room = width - left - RIGHT - GAP * (facets.length - 1);
    // The second phase is the one that is looked at most.
    const shares = facets.length > 1 ? [0.36, 0.64] : [1];
    let next = left;
    facets.forEach((facet, i) => {
      const start = next;
      const end = start + room * shares[i];
      facet.start = start;
      facet.end = end;
      const inset = this.chart.stacked ? 0 : 8;
      facet.at = value => start + inset + (value - facet.low) / (facet.high - facet.low) * (end - start - 2 * inset);
      for (const mark of marks) svg.append(shape("line", {class: "grid", x1: start, x2: end, y1: y(mark), y2: y(mark)}));
      next = end + GAP;
    });
    marks.forEach((mark, i) => svg.append(shape("text", {x: left - 6, y: y(mark) + 4, "text-anchor": "end"}, names[i])));
    for (const facet of facets) this.drawFacet(svg, facet, y, top, bottom, axis);
    this.plot.replaceChildren(svg);
    this.show(this.place);
  }

  drawFacet(svg, facet, y, top, bottom, axis) {
    const {start, end, at} = facet;
    svg.append(shape("line", {class: "axis", x1: start, x2: end, y1: bottom, y2: bottom}));
    const unit = axisUnit(axis, facet.high);
    const most = Math.max(1, Math.floor((end - start) / 62));
    const marks = ticks(facet.low / unit.size, facet.high / unit.size, Math.min(6, most), axis === "steps");
    const names = labels(marks);
    marks.forEach((mark, i) => {
      const x = at(mark * unit.size);
      const half = names[i].length * CHARACTER / 2;
      // The last label of one phase and the first of the next must not meet.
      const place = Math.max(start + half - 6, Math.min(end - half + 10, x));
      svg.append(shape("line", {class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4}));
      svg.append(shape("text", {x: place, y: bottom + 16, "text-anchor": "middle"}, names[i]));
    });
    const name = unit.name === "step" ? `${facet.name} step` : `${unit.name} of ${facet.name}`;
    facet.axisName = shape("text", {x: (start + end) / 2, y: bottom + 31, "text-anchor": "middle"}, name);
    facet.axisText = name;
    svg.append(facet.axisName);
    if (this.layout.facets.length > 1) {
      svg.append(shape("text", {class: "name", x: start + 2, y: 12}, facet.name));
    }
    facet.cursor = shape("line", {class: "cursor", y1: top, y2: bottom, visibility: "hidden"});
    // Measurements lie over curves.
    const measured = facet.lines.filter(line => line.bounds);
    for (const line of facet.lines.filter(one => !one.bounds)) this.drawCurve(svg, facet, line, y);
    measured.forEach((line, i) => this.drawMeasured(svg, facet, line, y, 5 * (i - (measured.length - 1) / 2)));
    svg.append(facet.cursor);
  }

  drawCurve(svg, facet, line, y) {
    const group = shape("g", {class: line.color});
    svg.append(group);
    const points = values => values.map((value, i) => [facet.at(line.x[i]), value]).filter(([, value]) => value !== null)
      .map(([x, value]) => [x, y(value)]);
    if (this.chart.stacked) {
      group.append(shape("path", {class: "area", d: `${path([...points(line.top), ...points(line.bottom).reverse()])}Z`}));
      return;
    }
    group.append(shape("path", {class: "raw", d: path(points(line.values))}));
    group.append(shape("path", {class: "line", d: path(points(line.smooth))}));
    if (line.values.length === 1) this.dot(group, points(line.values)[0]);
  }

  // Points with interval bars. Those of several sets at the same step are shifted beside each other.
  drawMeasured(svg, facet, line, y, shift) {
    const group = shape("g", {class: line.color});
    svg.append(group);
    const places = line.values.map((value, i) => [facet.at(line.x[i]) + shift, y(value)]);
    if (line.joined) group.append(shape("path", {class: "joint", d: path(places)}));
    places.forEach((place, i) => {
      const [low, high] = line.bounds.map(bound => y(bound[i]));
      group.append(shape("line", {class: "bar", x1: place[0], x2: place[0], y1: low, y2: high}));
      for (const end of [low, high]) group.append(shape("line", {class: "bar", x1: place[0] - 4, x2: place[0] + 4, y1: end, y2: end}));
      this.dot(group, place);
      if (line.labels) this.nameOf(group, facet, line.labels[i], place);
    });
  }

  dot(group, [x, y]) {
    group.append(shape("circle", {class: "dot", cx: x, cy: y, r: 4}));
  }

  nameOf(group, facet, text, [x, y]) {
    const isLate = x > (facet.start + facet.end) / 2;
    group.append(shape("text", {class: "name", x: x + (isLate ? -8 : 8), y: y - 6, "text-anchor": isLate ? "end" : "start"}, text));
  }

  // Shows the values at a place {phase, step}; those at the end where it is null.
  show(place) {
    if (!this.layout) return;
    this.place = place;
    this.output.textContent = place ? `${this.facetOf(place).name} step ${place.step}` : "";
    for (const value of this.values.values()) value.textContent = "";
    for (const facet of this.layout.facets) {
      const isShown = place !== null && facet.phase === place.phase;
      facet.cursor.setAttribute("visibility", isShown ? "visible" : "hidden");
      facet.axisName.setAttribute("class", isShown ? "now" : "");
      facet.axisName.textContent = isShown ? `${facet.name} step ${place.step}` : facet.axisText;
      if (isShown) {
        const clock = data.clocks[facet.lines[0].clock];
        const x = facet.at(clockValue(clock, place.step, axes.elements.axis.value));
        facet.cursor.setAttribute("x1", x);
        facet.cursor.setAttribute("x2", x);
      }
      if (isShown || place === null) for (const line of facet.lines) this.showValue(line, place);
    }
  }

  facetOf(place) {
    return this.chart.facets.find(facet => facet.phase === place.phase);
  }

  showValue(line, place) {
    const last = line.steps.length - 1;
    const i = place ? nearest(line.steps, place.step) : last;
    if (last < 0 || (place && !line.bounds && place.step > line.steps[last])) return;
    const ends = line.bounds ? ` [${line.bounds.map(bound => number(bound[i], 3)).join(", ")}]` : "";
    const other = place && line.steps[i] !== place.step ? `, step ${line.steps[i]}` : "";
    this.values.get(line.name).textContent = number(line.values[i], line.bounds ? 3 : 4) + ends + (line.bounds ? other : "");
  }

  // The place under a horizontal position of the pointer.
  placeAt(x) {
    const facet = this.layout.facets.find(one => x < one.end + GAP / 2) || this.layout.facets[this.layout.facets.length - 1];
    const clock = data.clocks[facet.lines[0].clock];
    const axis = axes.elements.axis.value;
    const positions = facet.steps.map(step => facet.at(clockValue(clock, step, axis)));
    return {phase: facet.phase, step: facet.steps[nearest(positions, x)]};
  }

  places() {
    return this.chart.facets.flatMap(facet => {
      const steps = [...new Set(facet.lines.flatMap(line => line.steps))].sort((a, b) => a - b);
      return steps.map(step => ({phase: facet.phase, step}));
    });
  }
}

function nearest(values, wanted) {
  return values.reduce((best, value, i) => Math.abs(value - wanted) < Math.abs(values[best] - wanted) ? i : best, 0);
}

const charts = [];
for (const figure of document.querySelectorAll("figure")) {
  const key = figure.dataset.chart;
  charts.push(new Chart(figure, key === "overview" ? data.overview : data.charts[key]));
}

// All charts of a phase speak of the same step.
function showPlace(place) {
  for (const chart of charts) chart.show(place && chart.facetOf(place) ? place : null);
}

for (const chart of charts) {
  const {figure, plot} = chart;
  plot.onpointermove = event => showPlace(chart.placeAt(event.clientX - plot.getBoundingClientRect().left));
  plot.onpointerleave = () => showPlace(null);
  figure.onblur = () => showPlace(null);
  figure.onkeydown = event => { if (event.key === "Escape") showPlace(null); };
  const places = chart.places();
  arrows(figure, () => places.length, i => showPlace(places[i]));
  for (const button of figure.querySelectorAll("[data-save]")) button.onclick = () => save(chart, button.dataset.save);
}

if (axes) {
  axes.onsubmit = event => event.preventDefault();
  axes.oninput = () => {
    axes.querySelector(".amount").textContent = `${axes.elements.smoothing.value} %`;
    for (const chart of charts) chart.draw();
  };
}

// --- download of a chart

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-size", "font-weight", "font-family", "paint-order", "visibility"];

// A copy of a chart that needs no style sheet, with its title above it and its legend below.
function standalone(chart) {
  const original = chart.plot.querySelector("svg");
  const {width, height} = original.viewBox.baseVal;
  const copy = original.cloneNode(true);
  const nodes = [...original.querySelectorAll("*")];
  [...copy.querySelectorAll("*")].forEach((node, i) => {
    const style = getComputedStyle(nodes[i]);
    for (const name of STYLES) node.setAttribute(name, style.getPropertyValue(name));
    node.removeAttribute("class");
  });
  const font = getComputedStyle(chart.figure);
  const entries = [...chart.figure.querySelectorAll(".legend li")];
  const total = height + 34 + 18 * entries.length;
  const picture = shape("svg", {xmlns: SVG, width, height: total, viewBox: `0 0 ${width} ${total}`, "font-family": font.fontFamily, "font-size": 12});
  picture.append(shape("rect", {width, height: total, fill: font.backgroundColor}));
  const unit = chart.chart.unit ? ` (${chart.chart.unit})` : "";
  picture.append(shape("text", {x: 8, y: 18, fill: font.color, "font-weight": 600}, chart.chart.title + unit));
  copy.setAttribute("y", 26);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  picture.append(copy);
  entries.forEach((entry, i) => {
    const y = height + 42 + 18 * i;
    const color = getComputedStyle(entry, "::before").backgroundColor;
    picture.append(shape("rect", {x: 8, y: y - 9, width: 9, height: 9, fill: color}));
    const [name, value] = entry.children;
    picture.append(shape("text", {x: 23, y, fill: font.color}, `${name.textContent} ${value.textContent}`));
  });
  return {text: new XMLSerializer().serializeToString(picture), width, height: total};
}

function download(blob, name) {
  const link = make("a", {href: URL.createObjectURL(blob), download: name});
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

function save(chart, format) {
  const {text, width, height} = standalone(chart);
  const title = `${document.title} ${chart.chart.title}`.toLowerCase().replace(/[^a-z0-9]+/g, "-").slice(0, 80);
  if (format === "svg") {
    download(new Blob([text], {type: "image/svg+xml"}), `${title}.svg`);
    return;
  }
  const image = new Image();
  image.onload = () => {
    const canvas = make("canvas", {width: 2 * width, height: 2 * height});
    const context = canvas.getContext("2d");
    context.scale(2, 2);
    context.drawImage(image, 0, 0);
    canvas.toBlob(blob => download(blob, `${title}.png`), "image/png");
  };
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
}

for (const chart of charts) chart.draw();
// Charts are drawn again where their width changes; their height never does.
const widths = new Map();
const resized = new ResizeObserver(entries => {
  for (const {target, contentRect} of entries) {
    if (widths.get(target) === contentRect.width) continue;
    widths.set(target, contentRect.width);
    charts.find(chart => chart.plot === target).draw();
  }
});
for (const chart of charts) {
  widths.set(chart.plot, chart.plot.clientWidth);
  resized.observe(chart.plot);
}
