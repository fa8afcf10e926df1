// What lies under the pointer: the values of a chart's curves at the nearest step, or a heat map's cell.
"use strict";
const tip = document.getElementById("tip");

function show(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - box.width - 6);
  const top = event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18;
  tip.style.left = Math.max(4, left) + "px";
  tip.style.top = Math.max(4, top) + "px";
}

function hide() { tip.style.display = "none"; }

function nearest(points, step) {
  return points.reduce((best, point) => Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best);
}

for (const chart of document.querySelectorAll("svg.chart")) {
  const data = JSON.parse(chart.dataset.chart);
  const [low, high, start, end] = data.x;
  const cursor = chart.querySelector(".cursor");
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const across = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
    const wanted = low + (across - start) / (end - start) * (high - low);
    const step = nearest(data.series.flatMap((one) => one[1]), wanted)[0];
    const at = start + (step - low) / (high - low) * (end - start);
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.visibility = "visible";
    const reach = (high - low) / 60;
    const lines = ["step " + step];
    for (const [name, points] of data.series) {
      const [there, value] = nearest(points, step);
      if (Math.abs(there - step) <= reach) lines.push(name + "  " + value + (there === step ? "" : "  (step " + there + ")"));
    }
    for (const [there, text] of data.marks) if (Math.abs(there - step) <= reach) lines.push(text);
    show(event, lines.join("\n"));
  });
  chart.addEventListener("pointerleave", () => { hide(); cursor.style.visibility = "hidden"; });
}

for (const cells of document.querySelectorAll(".cells")) {
  const data = JSON.parse(cells.dataset.cells);
  cells.addEventListener("pointermove", (event) => {
    const box = cells.getBoundingClientRect();
    const pick = (names, share) => Math.max(0, Math.min(names.length - 1, Math.floor(share * names.length)));
    const row = pick(data.rows, (event.clientY - box.top) / box.height);
    const column = pick(data.columns, (event.clientX - box.left) / box.width);
    const value = data.values[row][column];
    show(event, data.rows[row] + "\n" + data.of + " " + data.columns[column] + "\n" + (value === null ? "-" : value));
  });
  cells.addEventListener("pointerleave", hide);
}
