// SVG line charts that fill the available width and show the values of the nearest step.

const settings = { smooth: true };
const redraws = [];

function points(metric) {
  const [axis, values] = DATA.series[metric];
  return { steps: DATA.axes[axis], values };
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step + 0);
  return found;
}

// Moving average; the window grows with the length of the curve.
function smoothed(values) {
  const reach = Math.max(1, Math.round(values.length / 40));
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const from = Math.max(0, i - reach), to = Math.min(values.length, i + reach + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] < step) low = middle; else high = middle;
  }
  return Math.abs(steps[low] - step) <= Math.abs(steps[high] - step) ? low : high;
}

function bounds(lines, range) {
  const curves = lines.filter((line) => !line.level);
  const steps = curves.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]);
  let low = Infinity, high = -Infinity;
  for (const line of lines) for (const value of line.range ? [...line.range.low, ...line.range.high] : line.values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (range) [low, high] = [Math.min(range[0], low), Math.max(range[1], high)];
  else if (low === high) [low, high] = [Math.min(0, 2 * low), Math.max(0, 2 * high) || (low < 0 ? 0 : 1)];
  else [low, high] = [low - (high - low) * 0.04, high + (high - low) * 0.04];
  const first = Math.min(...steps), last = Math.max(...steps);
  return { low, high, first: first === last ? first - 1 : first, last: first === last ? last + 1 : last };
}

function pathOf(line, values, x, y) {
  return values.map((value, i) => (i ? "L" : "M") + x(line.steps[i]).toFixed(1) + " " + y(value).toFixed(1)).join("");
}

function drawLine(line, frame) {
  const { x, y } = frame;
  const stroke = { stroke: colour(line.index) };
  if (line.level) {
    const at = y(line.values[0]).toFixed(1);
    return [svg("path", { class: "curve level", d: "M" + frame.left + " " + at + "H" + frame.right, ...stroke })];
  }
  const dense = line.values.length >= 30;
  const drawn = [];
  if (line.range) {
    const edge = (values) => values.map((value, i) => x(line.steps[i]).toFixed(1) + " " + y(value).toFixed(1));
    const around = [...edge(line.range.high), ...edge(line.range.low).reverse()];
    drawn.push(svg("path", { class: "band", d: "M" + around.join("L") + "Z", fill: colour(line.index) }));
  }
  if (dense && settings.smooth) {
    drawn.push(svg("path", { class: "curve raw", d: pathOf(line, line.values, x, y), ...stroke }));
    drawn.push(svg("path", { class: "curve", d: pathOf(line, smoothed(line.values), x, y), ...stroke }));
  } else {
    drawn.push(svg("path", { class: "curve", d: pathOf(line, line.values, x, y), ...stroke }));
  }
  if (!dense) line.steps.forEach((step, i) =>
    drawn.push(svg("circle", { cx: x(step).toFixed(1), cy: y(line.values[i]).toFixed(1), r: 2.4, fill: colour(line.index) })));
  return drawn;
}

function frameOf(width, height, box, formatY, formatX = whole) {
  const margin = { left: 50, right: 10, top: 8, bottom: 22 };
  const right = width - margin.right, bottom = height - margin.bottom;
  const x = (step) => margin.left + (step - box.first) / (box.last - box.first) * (right - margin.left);
  const y = (value) => bottom - (value - box.low) / (box.high - box.low) * (bottom - margin.top);
  const parts = ticks(box.low, box.high, 4).flatMap((value) => [
    svg("line", { class: "gridline", x1: margin.left, x2: right, y1: y(value), y2: y(value) }),
    svg("text", { x: margin.left - 7, y: y(value) + 4, "text-anchor": "end" }, formatY(value)),
  ]);
  for (const step of ticks(box.first, box.last, Math.max(2, width / 90)).filter(Number.isInteger))
    parts.push(svg("text", { x: x(step), y: height - 6, "text-anchor": "middle" }, formatX(step)));
  parts.push(svg("line", { class: "axis", x1: margin.left, x2: right, y1: bottom, y2: bottom }));
  const stepAt = (pixel) => box.first + (pixel - margin.left) / (right - margin.left) * (box.last - box.first);
  return { x, y, stepAt, parts, left: margin.left, right, top: margin.top, bottom };
}

// The height is set before drawing, so that drawing does not resize the element and trigger a redraw.
function drawAtWidth(card, drawing, height, draw) {
  drawing.setAttribute("height", height);
  let width = 0;
  new ResizeObserver(() => {
    if (drawing.clientWidth === width) return;
    width = drawing.clientWidth;
    requestAnimationFrame(draw);
  }).observe(card);
  redraws.push(draw);
}

// chart: {title, lines: [{metric, label, level, range: {low, high}}], range}; the range of a line is drawn as a band
function chartCard(chart, height) {
  const lines = chart.lines.map((line, index) => ({ ...line, ...points(line.metric), index, shown: true }));
  const drawing = svg("svg", { class: "chart", role: "img", "aria-label": chart.title });
  const legend = el("div", { class: "legend" });
  const named = lines.filter((line) => line.label);
  for (const line of named) {
    const button = el("button", { type: "button", title: line.metric, onclick: () => {
      line.shown = !line.shown;
      button.classList.toggle("off", !line.shown);
      draw();
    } }, swatch(line.index), line.label);
    legend.append(button);
  }
  const card = el("figure", { class: "card" }, el("h3", {}, chart.title), legend, drawing);
  let frame = null;
  const cross = svg("g", {});

  function draw() {
    const width = drawing.clientWidth;
    const visible = lines.filter((line) => line.shown);
    if (!width || !visible.some((line) => !line.level)) { drawing.replaceChildren(); frame = null; return; }
    frame = frameOf(width, height, bounds(visible, chart.range), chart.range ? percentTick : number);
    drawing.setAttribute("viewBox", "0 0 " + width + " " + height);
    drawing.replaceChildren(...frame.parts,
      ...visible.slice().reverse().flatMap((line) => drawLine(line, frame)), cross);
  }

  function readOut(event) {
    if (!frame) return;
    const pixel = event.clientX - drawing.getBoundingClientRect().left;
    const visible = lines.filter((line) => line.shown);
    const wanted = frame.stepAt(pixel);
    const step = visible.filter((line) => !line.level)
      .map((line) => line.steps[nearest(line.steps, wanted)])
      .reduce((best, s) => (Math.abs(s - wanted) < Math.abs(best - wanted) ? s : best));
    const rows = [];
    const marks = [svg("line", { class: "cross", x1: frame.x(step), x2: frame.x(step), y1: frame.top, y2: frame.bottom })];
    for (const line of visible) {
      const at = line.level ? 0 : nearest(line.steps, step);
      if (!line.level && line.steps[at] !== step) continue;
      rows.push([line.index, line.label || chart.title, chart.range ? percent(line.values[at]) : number(line.values[at])]);
      if (!line.level) marks.push(svg("circle", { cx: frame.x(step), cy: frame.y(line.values[at]), r: 3.5, fill: colour(line.index) }));
    }
    cross.replaceChildren(...marks);
    showTip(event, "step " + whole(step), rows);
  }
  drawing.addEventListener("pointermove", readOut);
  drawing.addEventListener("pointerleave", () => { cross.replaceChildren(); hideTip(); });
  drawAtWidth(card, drawing, height, draw);
  return card;
}
const percentTick = (value) => Math.round(value * 100) + "%";

// Selects any metric by name, including those without a chart.
function metricChooser() {
  const names = Object.keys(DATA.series).sort();
  const host = el("div", {});
  const show = (name) => host.replaceChildren(chartCard({ title: name, lines: [{ metric: name, label: "" }] }, 230));
  const select = el("select", { "aria-label": "metric", onchange: () => show(select.value) },
    ...names.map((name) => el("option", { value: name }, name)));
  show(names[0]);
  return el("div", {}, el("div", { class: "controls" }, el("label", {}, "metric", select),
    el("span", { class: "soft" }, names.length + " metrics")), host);
}
