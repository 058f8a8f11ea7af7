// Shapes: a bar in parts with its legend, a line, parts over time. All text goes in as text, never as HTML.

export const part = (id) => document.getElementById(id);
export const shape = (name) => document.createElementNS("http://www.w3.org/2000/svg", name);

export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// On a phone each row stands as a block of its own (style.css), so each cell carries the name of its column.
export function fillRows(body, rows) {
  const names = [...body.parentElement.tHead.rows[0].cells].map((cell) => cell.textContent);
  for (const row of rows) {
    [...row.cells].forEach((cell, place) => { if (cell.colSpan === 1) cell.dataset.name = names[place]; });
  }
  body.replaceChildren(...rows);
}

// parts: [{words, size, shown, colour}]. A part of nothing is in the legend and not in the bar.
export function drawParts(bar, legend, parts) {
  const total = parts.reduce((sum, {size}) => sum + size, 0);
  bar.replaceChildren(...parts.filter(({size}) => size > 0).map(({words, size, shown, colour}) => {
    const piece = element("span");
    piece.style.width = `${100 * size / total}%`;
    piece.style.background = colour;
    piece.title = `${words}: ${shown}`;
    return piece;
  }));
  bar.setAttribute("aria-label", parts.map(({words, shown}) => `${words} ${shown}`).join(", "));
  legend.replaceChildren(...parts.map(({words, shown, colour}) => {
    const row = element("span");
    const mark = element("i");
    mark.style.background = colour;
    row.append(mark, `${words} ${shown}`);
    return row;
  }));
}

// A line over the numbers, nulls left out, from 0 to the largest of them.
export function drawLine(svg, numbers, slots) {
  const most = Math.max(...numbers.map((number) => number ?? 0), 1e-9);
  svg.setAttribute("viewBox", `0 0 ${slots - 1} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  const line = shape("polyline");
  const first = slots - numbers.length;
  const points = numbers.map((number, place) => number === null ? "" : `${first + place},${1 - 0.95 * number / most}`);
  line.setAttribute("points", points.filter(Boolean).join(" "));
  svg.replaceChildren(line);
}

// rows: one array of sizes for each moment; each moment is a column, parts from the bottom up in the order of colours.
export function drawHistory(svg, rows, slots, colours) {
  svg.setAttribute("viewBox", `0 0 ${slots - 1} 1`);
  const first = slots - rows.length;
  const tops = rows.map((row) => {
    const total = row.reduce((sum, size) => sum + size, 0) || 1;
    let passed = 0;
    return row.map((size) => (passed += size) / total);
  });
  svg.replaceChildren(...colours.map((colour, nth) => {
    const area = shape("polygon");
    const above = tops.map((top, place) => `${first + place},${1 - top[nth]}`);
    const below = tops.map((top, place) => `${first + place},${1 - (nth ? top[nth - 1] : 0)}`).reverse();
    area.setAttribute("points", [...above, ...below].join(" "));
    area.style.fill = colour;
    return area;
  }));
}
