"""How a report looks, and what moves in it."""

from __future__ import annotations

from typing import Final

CSS: Final = """
:root { color-scheme: light dark;
  --ink: #1c1f23; --paper: #fff; --soft: #667; --rule: #d9dce1; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --paper: #16181b; --soft: #9aa0a6; --rule: #3a3f45; --card: #1f2226; }
}
body { margin: 0 auto; max-width: 1120px; padding: 24px; color: var(--ink); background: var(--paper);
  font: 15px/1.45 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
h1 { font-size: 24px; margin: 0 0 4px; }
h2 { font-size: 21px; margin: 40px 0 8px; padding-top: 16px; border-top: 2px solid var(--rule); }
h3 { font-size: 16px; margin: 26px 0 6px; }
p { margin: 6px 0; }
.soft, figcaption { color: var(--soft); }
.verdict { font-size: 17px; padding: 10px 14px; border-left: 4px solid #d95f02;
  background: var(--card); }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 14px 0; }
.card { background: var(--card); border-radius: 8px; padding: 8px 14px; min-width: 118px; }
.card b { display: block; font-size: 20px; }
.bar { display: flex; height: 26px; border-radius: 5px; overflow: hidden; margin: 8px 0 6px; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; margin: 4px 0 8px; }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 2px; margin-right: 5px; }
.row { display: flex; flex-wrap: wrap; gap: 16px; }
.row > figure { flex: 0 1 540px; }
figure { margin: 8px 0; position: relative; }
svg { max-width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, "DejaVu Sans", sans-serif; fill: var(--ink); }
svg .axis { fill: var(--soft); }
.grid line { stroke: var(--rule); }
.line { fill: none; stroke-width: 1.8; }
.cursor { stroke: var(--soft); stroke-dasharray: 3 3; }
.tip { position: absolute; pointer-events: none; display: none; z-index: 2; white-space: nowrap;
  background: var(--card); border: 1px solid var(--rule); border-radius: 5px; padding: 4px 8px;
  font-size: 12px; }
.map { max-height: 80vh; overflow: auto; border: 1px solid var(--rule); padding: 6px 0; }
.map svg { max-width: none; }
.map svg text { font-size: 11px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13.5px; margin: 6px 0; }
th, td { padding: 4px 10px; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--rule); }
th:first-child, td:first-child, .words { text-align: left; }
th { color: var(--soft); font-weight: 600; }
details { margin: 8px 0; }
summary { cursor: pointer; color: var(--soft); }
"""

SCRIPT: Final = """
for (const figure of document.querySelectorAll("figure.chart")) {
  const data = JSON.parse(figure.querySelector("script").textContent);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const tip = figure.appendChild(document.createElement("div"));
  tip.className = "tip";
  svg.addEventListener("mousemove", event => {
    const box = svg.getBoundingClientRect(), scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const at = data.low + (x - data.left) / (data.right - data.left) * (data.high - data.low);
    const rows = [];
    let nearest = null;
    for (const [name, points] of Object.entries(data.series)) {
      if (!points.length) continue;
      const best = points.reduce((a, b) => Math.abs(b[0] - at) < Math.abs(a[0] - at) ? b : a);
      if (nearest === null || Math.abs(best[0] - at) < Math.abs(nearest - at)) nearest = best[0];
      rows.push([name, best]);
    }
    if (nearest === null) return;
    const place = data.left + (nearest - data.low) / (data.high - data.low) * (data.right - data.left);
    cursor.setAttribute("x1", place);
    cursor.setAttribute("x2", place);
    tip.textContent = "";
    for (const [name, [step, value]] of rows) {
      const line = tip.appendChild(document.createElement("div"));
      line.textContent = `${name}: ${value} (at ${Math.round(step * 100) / 100})`;
    }
    tip.style.display = "block";
    const left = event.clientX - box.left + 14;
    tip.style.left = Math.min(left, box.width - tip.offsetWidth) + "px";
    tip.style.top = event.clientY - box.top + 14 + "px";
  });
  svg.addEventListener("mouseleave", () => {
    tip.style.display = "none";
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
  });
}
"""
