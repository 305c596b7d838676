// The page that compares groups of runs: a table and one chart per metric.

function comparisonTable({ columns, rows }) {
  return el("div", { class: "card scroll" }, el("table", {},
    el("thead", {}, el("tr", {}, ...columns.map((name) => el("th", {}, name)))),
    el("tbody", {}, ...rows.map((row) => el("tr", {}, ...row.map((cell) => el("td", {}, cell)))))));
}

document.getElementById("head").append(el("h1", {}, DATA.run.name),
  el("div", { class: "soft" }, "Lines are means over the runs with the same configuration, bands the range from the lowest to the highest run."));
const body = document.getElementById("main");
for (const problem of DATA.run.problems) body.append(el("p", { class: "notice" }, problem));
body.append(section("Results", comparisonTable(DATA.table)));
for (const name of [...new Set(DATA.charts.map((chart) => chart.section))]) {
  const cards = DATA.charts.filter((chart) => chart.section === name).map((chart) => chartCard(chart, 230));
  body.append(section(name, el("div", { class: "grid wide" }, ...cards)));
}
body.append(el("footer", {}, "Created from run directories by python -m manus_jax.report --compare."));
redraws.forEach((draw) => draw());
document.body.dataset.ready = "yes";
