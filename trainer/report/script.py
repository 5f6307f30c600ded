"""The page's script: the values under the pointer in all curves at once, and a legend that hides runs.

Without it the page shows the same, only without values at the pointer. It writes text, never HTML.
"""

SCRIPT = """
"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const hidden = new Set();
const charts = Array.from(document.querySelectorAll(".chart"), (figure) => ({
  ...data[figure.dataset.key], figure, plot: figure.querySelector(".plot"),
  cursor: figure.querySelector(".cursor"), dots: figure.querySelector(".dots"), tip: figure.querySelector(".tip"),
}));

function nearest(steps, step) {
  let low = 0, high = steps.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle; else high = middle;
  }
  return high > 0 && steps[high] - step < step - steps[low] ? high : low;
}

function shown(value) {
  if (value === null) return "not finite";
  const size = Math.abs(value);
  if (size >= 1000 && size < 1e9) return Math.round(value).toString().replace(/\\B(?=(\\d{3})+$)/g, ",");
  return String(Number(value.toPrecision(5)));
}

function make(name, kind, text) {
  const made = document.createElement(name);
  made.className = kind;
  if (text !== undefined) made.textContent = text;
  return made;
}

function clear() {
  for (const chart of charts) chart.figure.classList.remove("pointed", "here");
}

function point(step, here) {
  for (const chart of charts) {
    const [x0, x1] = chart.x, [y0, y1] = chart.y;
    const rows = [], dots = [];
    for (const line of chart.lines) {
      if (!line.steps.length || hidden.has(String(line.run))) continue;
      const index = nearest(line.steps, step), at = line.steps[index], value = line.values[index];
      // A line that ended long before, or has no point near, has nothing to say here.
      if (Math.abs(at - step) > Math.max(1, (x1 - x0) / 8)) continue;
      const row = make("div", "row");
      row.append(make("span", "chip c" + line.colour), make("span", "name", line.name || "step " + at),
        make("b", "", shown(value)));
      if (line.name && at !== step) row.append(make("small", "", "step " + at));
      rows.push(row);
      if (value === null) continue;
      const dot = make("i", "dot c" + line.colour);
      dot.style.left = 100 * (at - x0) / (x1 - x0) + "%";
      dot.style.top = 100 * Math.min(1, Math.max(0, 1 - (value - y0) / (y1 - y0))) + "%";
      dots.push(dot);
    }
    const place = (step - x0) / (x1 - x0);
    chart.cursor.style.left = 100 * place + "%";
    chart.dots.replaceChildren(...dots);
    chart.figure.classList.add("pointed");
    chart.figure.classList.toggle("here", chart === here && rows.length > 0);
    if (chart !== here) continue;
    const named = chart.lines.some((line) => line.name);
    chart.tip.replaceChildren(...(named ? [make("div", "head", "step " + step)] : []), ...rows);
    chart.tip.style.left = place < 0.5 ? 100 * place + "%" : "auto";
    chart.tip.style.right = place < 0.5 ? "auto" : 100 * (1 - place) + "%";
  }
}

function known(chart) {
  const steps = new Set();
  for (const line of chart.lines) if (!hidden.has(String(line.run))) line.steps.forEach((step) => steps.add(step));
  return Array.from(steps).sort((a, b) => a - b);
}

for (const chart of charts) {
  let current = null;
  const go = (step) => { current = step; point(step, chart); };
  chart.plot.addEventListener("pointermove", (event) => {
    const box = chart.plot.getBoundingClientRect(), steps = known(chart);
    const step = chart.x[0] + (event.clientX - box.left) / box.width * (chart.x[1] - chart.x[0]);
    if (steps.length) go(steps[nearest(steps, step)]);
  });
  chart.plot.addEventListener("pointerleave", clear);
  chart.figure.addEventListener("blur", clear);
  chart.figure.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key], steps = known(chart);
    if (!move || !steps.length) return;
    event.preventDefault();
    const from = current === null ? (move > 0 ? -1 : steps.length) : nearest(steps, current);
    go(steps[Math.min(steps.length - 1, Math.max(0, from + move))]);
  });
}

for (const button of document.querySelectorAll(".legend button")) {
  button.addEventListener("click", () => {
    const run = button.dataset.run, hide = !hidden.has(run);
    if (hide) hidden.add(run); else hidden.delete(run);
    button.setAttribute("aria-pressed", String(!hide));
    for (const path of document.querySelectorAll(".chart path")) {
      if (path.dataset.run === run) path.style.display = hide ? "none" : "";
    }
    clear();
  });
}
document.documentElement.dataset.ready = "yes";
"""
