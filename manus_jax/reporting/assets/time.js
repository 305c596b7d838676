// Time per step as stacked bars of phases, one bar per step or per interval of steps.

function timeCard(phases) {
  const height = 240;
  const order = phases.names.map((_, i) => i).sort((a, b) => phases.totals[b] - phases.totals[a]);
  const place = new Map(order.map((phase, index) => [phase, index]));
  const all = phases.totals.reduce((a, b) => a + b, 0);
  const legend = el("div", { class: "legend" }, ...order.map((phase) =>
    el("button", { type: "button", tabindex: -1 }, swatch(place.get(phase)),
      phases.names[phase] + " " + percent(phases.totals[phase] / all))));
  const drawing = svg("svg", { class: "chart", role: "img", "aria-label": "seconds per step by phase" });
  const title = phases.per_bar > 1 ? "Seconds per step (means over " + phases.per_bar + " steps)" : "Seconds per step";
  const card = el("figure", { class: "card" }, el("h3", {}, title), legend, drawing);
  const sums = phases.bars.map((bar) => bar.seconds.reduce((a, b) => a + b, 0));

  function draw() {
    const width = drawing.clientWidth;
    if (!width) return;
    const count = phases.bars.length;
    const box = { low: 0, high: Math.max(...sums) * 1.04 || 1, first: -0.5, last: count - 0.5 };
    const frame = frameOf(width, height, box, number, (i) => {
      const bar = phases.bars[i];
      return bar ? whole(bar.steps[0]) : "";
    });
    const wide = (frame.right - frame.left) / count;
    const gap = wide > 6 ? 2 : wide > 3 ? 1 : 0;
    const bars = phases.bars.map((bar, i) => {
      let under = 0;
      const parts = order.map((phase) => {
        const from = frame.y(under), to = frame.y(under += bar.seconds[phase]);
        return svg("rect", { x: frame.x(i) - wide / 2 + gap / 2, y: to, width: wide - gap, height: from - to, fill: colour(place.get(phase)) });
      });
      const steps = bar.steps[0] === bar.steps[1] ? "step " + whole(bar.steps[0]) : "steps " + whole(bar.steps[0]) + DASH + whole(bar.steps[1]);
      return svg("g", { class: "bar",
        onpointermove: (event) => showTip(event, steps + DOT + duration(sums[i]), order.filter((p) => bar.seconds[p] > 0).map((phase) =>
          [place.get(phase), phases.names[phase], number(bar.seconds[phase]) + " s" + DOT + percent(bar.seconds[phase] / sums[i])])),
        onpointerleave: hideTip },
      svg("rect", { x: frame.x(i) - wide / 2, y: frame.top, width: wide, height: frame.bottom - frame.top, fill: "transparent" }), ...parts);
    });
    drawing.setAttribute("viewBox", "0 0 " + width + " " + height);
    drawing.replaceChildren(...frame.parts, ...bars);
  }
  drawAtWidth(card, drawing, height, draw);
  return card;
}
