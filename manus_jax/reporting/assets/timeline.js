// Who worked when at the end of the run: spans of the learner, the engine and the weights, and the
// number of episodes in flight. trace.json has the whole timeline, for Perfetto.

function timelineCard(timeline) {
  const rows = Object.keys(timeline.tracks).concat("environments");
  const height = 34 * rows.length + 26, left = 92;
  const names = [...new Set(Object.values(timeline.tracks).flat().map((span) => span[0].replace(/ \d+$/, "")))];
  const place = (name) => names.indexOf(name.replace(/ \d+$/, ""));
  const totals = names.map(() => 0);
  for (const [name, from, to] of Object.values(timeline.tracks).flat()) totals[place(name)] += to - from;
  const legend = el("div", { class: "legend" }, ...names.map((name, i) =>
    el("button", { type: "button", tabindex: -1 }, swatch(i), name + " " + percent(totals[i] / timeline.seconds))));
  const drawing = svg("svg", { class: "chart", role: "img", "aria-label": "timeline of the end of the run" });
  const card = el("figure", { class: "card" },
    el("h3", {}, "Timeline of the last " + duration(timeline.seconds) + " (trace.json opens in Perfetto)"), legend, drawing);

  function draw() {
    const width = drawing.clientWidth;
    if (!width) return;
    const x = (seconds) => left + seconds / timeline.seconds * (width - left - 10);
    const parts = rows.map((name, row) =>
      svg("text", { x: left - 8, y: 34 * row + 22, "text-anchor": "end" }, name));
    rows.slice(0, -1).forEach((track, row) => {
      for (const [name, from, to] of timeline.tracks[track])
        parts.push(svg("rect", { x: x(from), y: 34 * row + 6, width: Math.max(0.5, x(to) - x(from)), height: 24, fill: colour(place(name)),
          onpointermove: (event) => showTip(event, track, [[place(name), name, number(to - from) + " s"]]), onpointerleave: hideTip }));
    });
    const most = Math.max(1, ...timeline.episodes), bottom = 34 * rows.length - 4;
    const wide = timeline.seconds / timeline.episodes.length;
    timeline.episodes.forEach((count, i) => parts.push(svg("rect", {
      x: x(i * wide), y: bottom - 26 * count / most, width: x(wide) - x(0), height: 26 * count / most, fill: colour(7),
      onpointermove: (event) => showTip(event, "environments", [[7, "episodes in flight", number(count)]]), onpointerleave: hideTip })));
    for (const second of ticks(0, timeline.seconds, Math.max(2, width / 110)))
      parts.push(svg("text", { x: x(second), y: height - 6, "text-anchor": "middle" }, number(second) + " s"));
    drawing.setAttribute("viewBox", "0 0 " + width + " " + height);
    drawing.replaceChildren(...parts);
  }
  drawAtWidth(card, drawing, height, draw);
  return card;
}
