// How is a series over time drawn? As SVG, by hand: lines over the last minutes, gaps where nothing was measured.

const NS = "http://www.w3.org/2000/svg";
const LEFT = 52, RIGHT = 8, TOP = 8, BOTTOM = 22;

function make(name, attributes, text) {
  const element = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** Values 1, 2 and 5 times powers of ten that enclose [least, most]. */
function steps(least, most) {
  const found = [];
  for (let power = Math.floor(Math.log10(least)); power <= Math.ceil(Math.log10(most)); power++)
    for (const digit of [1, 2, 5]) found.push(digit * 10 ** power);
  const from = Math.max(0, found.findLastIndex((value) => value <= least));
  const to = found.findIndex((value) => value >= most);
  return found.slice(from, to < 0 ? undefined : to + 1);
}

/** Draw `series` (name → values, null where there is none) into `place`. `log`: times, whose tails are what matters. */
export function plot(place, series, { slotSeconds, format, log }) {
  const width = Math.max(200, place.clientWidth), height = Math.max(100, place.clientHeight);
  const names = Object.keys(series);
  const all = names.flatMap((name) => series[name]).filter((value) => value !== null && (value > 0 || !log));
  const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
  const count = series[names[0]].length;
  const x = (index) => LEFT + ((width - LEFT - RIGHT) * (index + 0.5)) / count;
  if (!all.length) {
    svg.append(make("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing measured yet"));
    place.replaceChildren(svg);
    return;
  }
  let marks, y;
  if (log) {
    marks = steps(Math.min(...all), Math.max(...all));
    if (marks.length === 1) marks = [marks[0] / 2, marks[0] * 2];
    const low = Math.log(marks[0]), high = Math.log(marks.at(-1));
    y = (value) => TOP + (height - TOP - BOTTOM) * (1 - (Math.log(value) - low) / (high - low));
    while (marks.length > 5) marks = marks.filter((_, index) => index % 2 === 0 || index === marks.length - 1);
  } else {
    const most = steps(0.01, Math.max(0.1, ...all)).at(-1);
    marks = [0, most / 2, most];
    y = (value) => TOP + (height - TOP - BOTTOM) * (1 - value / most);
  }
  for (const mark of marks) {
    svg.append(make("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(mark), y2: y(mark) }));
    svg.append(make("text", { x: LEFT - 6, y: y(mark) + 4, "text-anchor": "end" }, format(mark)));
  }
  const minutes = Math.round((count * slotSeconds) / 60);
  const every = width < 420 ? 5 : 2;
  for (let ago = minutes; ago >= 0; ago -= every) {
    const at = LEFT + (width - LEFT - RIGHT) * (1 - ago / minutes);
    const anchor = ago === 0 ? "end" : ago === minutes ? "start" : "middle";
    svg.append(make("text", { x: at, y: height - 6, "text-anchor": anchor }, ago === 0 ? "now" : `−${ago} min`));
  }
  names.forEach((name, number) => {
    let path = "", alone = null;
    const values = series[name];
    values.forEach((value, index) => {
      if (value === null || (log && value <= 0)) return;
      const before = index > 0 && values[index - 1] !== null, after = index + 1 < count && values[index + 1] !== null;
      if (!before && !after) alone = svg.append(make("circle", { class: `s${number}`, cx: x(index), cy: y(value), r: 3 }));
      path += `${before ? "L" : "M"}${x(index).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    svg.append(make("path", { class: `series s${number}`, d: path }));
  });
  if (names.length > 1)
    names.forEach((name, number) => {
      const at = LEFT + 10 + number * 84;
      svg.append(make("line", { class: `series s${number}`, x1: at, x2: at + 22, y1: TOP + 6, y2: TOP + 6 }));
      svg.append(make("text", { x: at + 27, y: TOP + 10 }, name));
    });
  place.replaceChildren(svg);
}
