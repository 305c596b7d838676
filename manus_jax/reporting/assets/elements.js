"use strict";
// All content is created here, as text nodes and attributes and never as markup.

const errors = document.getElementById("errors");
window.onerror = (message, source, line) => { errors.textContent += message + " (line " + line + ")\n"; };

const DATA = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const MINUS = "\u2212", DASH = "\u2013", DOT = " \u00b7 ";

function filled(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes, ...children) => filled(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function swatch(index) {
  const node = el("span", { class: "swatch" });
  node.style.background = colour(index);
  return node;
}
const colour = (index) => "var(--s" + (index % 8) + ")";

function number(x) {
  if (x === null || x === undefined) return DASH;
  const size = Math.abs(x);
  let text;
  if (x === 0) text = "0";
  else if (size >= 1e6 || size < 1e-3) text = x.toExponential(2).replace(/\.?0+e/, "e");
  else if (size >= 1000) text = Math.round(x).toLocaleString("en-US");
  else text = String(Number(x.toPrecision(3)));
  return text.replace(/-/g, MINUS);
}
const whole = (x) => Math.round(x).toLocaleString("en-US");
const counted = (count, noun) => whole(count) + " " + noun + (count === 1 ? "" : "s");
const percent = (x) => (x === null || x === undefined ? DASH : (100 * x).toFixed(1) + "%");

function duration(seconds) {
  if (seconds < 100) return number(seconds) + " s";
  const minutes = Math.round(seconds / 60);
  if (minutes < 100) return minutes + " min";
  return Math.floor(minutes / 60) + " h " + (minutes % 60) + " min";
}

// rows: [colour index or null, label, value]
function showTip(event, title, rows) {
  tip.replaceChildren(
    el("strong", {}, title),
    ...rows.map(([index, label, value]) =>
      el("div", {}, index === null ? null : swatch(index), el("span", {}, label), el("b", {}, value))),
  );
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 12 : event.clientX + 16;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + "px";
}
const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

function section(title, ...children) {
  return el("section", {}, el("h2", {}, title), ...children);
}

// A group of buttons, one of which is pressed.
function choice(options, chosen, onChoose) {
  const buttons = options.map(([value, label]) =>
    el("button", { type: "button", "aria-pressed": String(value === chosen), onclick: () => {
      buttons.forEach((b, i) => b.setAttribute("aria-pressed", String(options[i][0] === value)));
      onChoose(value);
    } }, label));
  return el("span", { class: "switch", role: "group" }, ...buttons);
}
