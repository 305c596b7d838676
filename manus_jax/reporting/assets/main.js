// Builds the page from top to bottom.

const head = document.getElementById("head"), main = document.getElementById("main");

function facts() {
  const { run } = DATA;
  const last = (metric) => (DATA.series[metric] ? points(metric).values.slice(-1)[0] : null);
  const found = [];
  if (run.step !== null) found.push([whole(run.step) + (run.total_steps ? " / " + whole(run.total_steps) : ""), "steps"]);
  for (const row of DATA.environments.slice(-1)) found.push(
    [percent(row.last[1]), "validation success, " + (row.last[0] === row.first[0] ? "step " + whole(row.last[0]) : "from " + percent(row.first[1]))]);
  if (DATA.series["episode/success_rate"]) {
    const recent = points("episode/success_rate").values.slice(-10);
    found.push([percent(recent.reduce((a, b) => a + b) / recent.length), "training success, last " + recent.length + " steps"]);
  }
  if (last("val/loss") !== null) found.push([number(last("val/loss")), "validation loss"]);
  if (last("train/loss") !== null) found.push([number(last("train/loss")), "training loss"]);
  if (run.episodes) found.push([whole(run.episodes), "training episodes"]);
  if (run.seconds) found.push([duration(run.seconds), "of training"]);
  return el("div", { class: "facts" }, ...found.map(([value, label]) => el("div", { class: "fact" }, el("b", {}, value), el("span", {}, label))));
}

function environmentTable(rows) {
  const baselines = [...new Set(rows.flatMap((row) => Object.keys(row.baselines)))];
  const header = ["environment", "first", "latest", "change", "best", "score", "turns", ...baselines];
  const body = rows.map((row) => {
    const change = row.last[1] - row.first[1];
    const sign = change > 0 ? "+" : change < 0 ? MINUS : "";
    return el("tr", {}, el("td", {}, row.env), el("td", {}, percent(row.first[1])), el("td", {}, el("b", {}, percent(row.last[1]))),
      el("td", { class: change > 0 ? "up" : change < 0 ? "down" : "" }, sign + Math.abs(100 * change).toFixed(1)),
      el("td", {}, percent(row.best)), el("td", {}, number(row.score)), el("td", {}, number(row.turns)),
      ...baselines.map((name) => el("td", {}, percent(row.baselines[name]))));
  });
  const steps = rows[0];
  return el("div", { class: "card" }, el("h3", {}, "Success on the held-out tasks"),
    el("p", { class: "soft" }, "first at step " + whole(steps.first[0]) + ", latest at step " + whole(steps.last[0])),
    el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, ...header.map((name) => el("th", {}, name)))), el("tbody", {}, ...body))));
}

function chartsOf(name, height) {
  return DATA.charts.filter((chart) => chart.section === name).map((chart) => chartCard(chart, height));
}

function build() {
  const { run } = DATA;
  const written = new Date(run.written * 1000).toISOString().slice(0, 16).replace("T", " ") + " UTC";
  head.append(el("h1", {}, run.name),
    el("div", { class: "soft" }, [run.recipe, "metrics written " + written].filter(Boolean).join(DOT)), facts());
  for (const problem of run.problems) head.append(el("p", { class: "notice" }, problem));
  for (const { step, last, text } of DATA.findings) head.append(el("p", { class: "notice" },
    (step === last ? "Step " + whole(step) : "Steps " + whole(step) + " to " + whole(last)) + ": " + text));
  if (run.step === null) head.append(el("p", { class: "notice" }, "No step has finished yet, so there are no metrics."));

  if (DATA.charts.some((chart) => chart.section === "Learning")) {
    const smooth = el("input", { type: "checkbox", checked: true, onchange: () => {
      settings.smooth = smooth.checked;
      redraws.forEach((draw) => draw());
    } });
    main.append(section("Learning", el("div", { class: "controls" }, el("label", {}, smooth, "smooth long curves")),
      el("div", { class: "grid wide" }, ...chartsOf("Learning", 270))));
  }
  if (DATA.environments.length) main.append(section("Environments",
    el("div", { class: "grid wide" }, environmentTable(DATA.environments), ...chartsOf("Environments", 220))));
  if (DATA.episodes.files.length) main.append(episodesSection());
  for (const [name, title] of [["Update", "Updates"], ["Episodes", "Behaviour"]]) {
    const cards = chartsOf(name, 190);
    if (cards.length) main.append(section(title, el("div", { class: "grid" }, ...cards)));
  }
  if (DATA.phases.bars.length) main.append(section("Time", timeCard(DATA.phases), DATA.timeline ? timelineCard(DATA.timeline) : null,
    el("div", { class: "grid speed" }, ...chartsOf("Speed", 170))));
  if (Object.keys(DATA.series).length) main.append(section("Any metric", metricChooser()));
  if (DATA.config) main.append(section("Configuration",
    el("details", { class: "card" }, el("summary", {}, "config.gin"), el("pre", { class: "text" }, DATA.config))));
  main.append(el("footer", {}, "Created from the run directory by python -m manus_jax.report."));
  redraws.forEach((draw) => draw());  // immediately: the resize observer may report the first size late
  document.body.dataset.ready = "yes";
}

build();
