// Shapes: a bar in parts with its legend, a line, parts over time. All text goes in as text, never as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, text = "", className = "") {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// parts: [{words, size, shown, colour}]. A part of nothing is in the legend and not in the bar.
export function drawParts(bar, legend, parts) {
  const total = parts.reduce((sum, part) => sum + part.size, 0);
  bar.replaceChildren(...parts.filter((part) => part.size > 0).map((part) => {
    const piece = element("span");
    piece.style.width = `${100 * part.size / total}%`;
    piece.style.background = part.colour;
    piece.title = `${part.words}: ${part.shown}`;
    return piece;
  }));
  bar.setAttribute("aria-label", parts.map((part) => `${part.words} ${part.shown}`).join(", "));
  legend.replaceChildren(...parts.map((part) => {
    const row = element("span");
    const mark = element("i");
    mark.style.background = part.colour;
    row.append(mark, `${part.words} ${part.shown}`);
    return row;
  }));
}

// A line over the numbers, nulls left out, from 0 to the largest of them.
export function drawLine(svg, numbers, slots) {
  const most = Math.max(...numbers.map((number) => number ?? 0), 1e-9);
  svg.setAttribute("viewBox", `0 0 ${slots - 1} 1`);
  svg.setAttribute("preserveAspectRatio", "none");
  const line = document.createElementNS(SVG, "polyline");
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
  svg.replaceChildren(...colours.map((colour, part) => {
    const area = document.createElementNS(SVG, "polygon");
    const above = tops.map((top, place) => `${first + place},${1 - top[part]}`);
    const below = tops.map((top, place) => `${first + place},${1 - (part ? top[part - 1] : 0)}`).reverse();
    area.setAttribute("points", [...above, ...below].join(" "));
    area.style.fill = colour;
    return area;
  }));
}
