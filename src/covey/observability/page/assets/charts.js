// Charts as SVG: curves with intervals, stacked bars, and strips of rewards.

import { el, faint, number, seconds } from "./core.js";

const WIDTH = 340, LEFT = 44, RIGHT = 8, TOP = 8, BOTTOM = 20;

/** True where two columns have no room: a wide chart is drawn narrow there, so that its labels stay readable. */
export const NARROW = matchMedia("(max-width: 40rem)");
const isNarrow = () => NARROW.matches;

/** Ends of a point's band: those given, or half of an interval on both sides. */
const lowOf = (one) => one.low ?? one.y - one.half;
const highOf = (one) => one.high ?? one.y + one.half;

function ticks(low, high, count = 4) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((one) => one >= raw);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-6; value += step) found.push(Math.abs(value) < step * 1e-6 ? 0
      : value);
  return found;
}

/**
 * Curves over steps. `series`: [{name, colour, points: [{x, y, half}]}]; a click leads to `onStep(x, index)`.
 */
export function curves({ title, note = "", series, height = 150, wide = false, zero = false, onStep = null }) {
  const width = wide && !isNarrow() ? 2 * WIDTH : WIDTH;
  const points = series.flatMap((one) => one.points).filter((one) => Number.isFinite(one.y));
  const figure = el("figure", { class: `chart ${wide ? "wide" : ""}` });
  const readout = el("span", { class: "readout" });
  figure.append(el("figcaption", {}, el("b", {}, title), note ? faint(` ${note}`) : null, readout));
  if (!points.length) return figure;
  const xs = points.map((one) => one.x);
  const [first, last] = [Math.min(...xs), Math.max(...xs)];
  const ends = points.flatMap((one) => [lowOf(one), highOf(one)].map((end) => (Number.isFinite(end) ? end : one.y)));
  let [low, high] = [Math.min(...ends, zero ? 0 : Infinity), Math.max(...ends, zero ? 0 : -Infinity)];
  if (zero && low === high) high = 1;
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) * 0.1, high + (Math.abs(high) || 1) * 0.1];
  const pad = (high - low) * 0.06;
  if (!(zero && low === 0)) low -= pad;
  high += pad;
  const X = (x) => LEFT + ((x - first) / (last - first || 1)) * (width - LEFT - RIGHT);
  const Y = (y) => TOP + ((high - y) / (high - low)) * (height - TOP - BOTTOM);
  const latest = series.map((one) => one.points.at(-1)).filter(Boolean);
  const label = `${title}: ${series.map((one, i) => `${one.name} from ${number(one.points[0]?.y)} to ${number(latest[i]?.y)}`).join("; ")}, steps ${first} to ${last}`;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const value of ticks(low, high))
    svg.append(el("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: Y(value), y2: Y(value) }),
      el("text", { class: "tick", x: LEFT - 6, y: Y(value) + 3.5, "text-anchor": "end" }, number(value, 2)));
  for (const value of ticks(first, last, wide ? 8 : 4).filter(Number.isInteger))
    svg.append(el("text", { class: "tick", x: X(value), y: height - 5, "text-anchor": "middle" }, String(value)));
  for (const { points: own, colour } of series) {
    const known = own.filter((one) => Number.isFinite(one.y));
    const band = known.filter((one) => Number.isFinite(lowOf(one)));
    if (band.length > 1)
      svg.append(el("path", {
        class: "band", style: { fill: colour },
        d: `M${band.map((one) => `${X(one.x)},${Y(highOf(one))}`).join("L")}L${[...band].reverse().map((one) => `${X(one.x)},${Y(lowOf(one))}`).join("L")}Z`,
      }));
    svg.append(el("polyline", { class: "curve", style: { stroke: colour },
        points: known.map((one) => `${X(one.x)},${Y(one.y)}`).join(" ") }));
    if (known.length === 1) svg.append(el("circle", { cx: X(known[0].x), cy: Y(known[0].y), r: 3, style: { fill: colour } }));
  }
  const cursor = el("line", { class: "cursor", y1: TOP, y2: height - BOTTOM, visibility: "hidden" });
  const dots = series.map(({ colour }) => el("circle", { r: 3.5, visibility: "hidden", style: { fill: colour } }));
  const place = (node, values) => Object.entries({ visibility: "visible", ...values }).forEach(([name, value]) => node.setAttribute(name,
      value));
  svg.append(cursor, ...dots);
  const every = [...new Set(xs)].sort((a, b) => a - b);
  const near = (event) => {
    const box = svg.getBoundingClientRect();
    const wanted = first + (((event.clientX - box.left) / box.width) * width - LEFT) / (width - LEFT - RIGHT) * (last - first || 1);
    return every.reduce((best, x) => (Math.abs(x - wanted) < Math.abs(best - wanted) ? x : best), every[0]);
  };
  svg.addEventListener("pointermove", (event) => {
    const x = near(event);
    place(cursor, { x1: X(x), x2: X(x) });
    const shown = series.map((one, i) => {
      const point = one.points.find((other) => other.x === x && Number.isFinite(other.y));
      place(dots[i], point ? { cx: X(x), cy: Y(point.y) } : { visibility: "hidden" });
      const range = point && Number.isFinite(point.half) ? ` ± ${number(point.half, 2)}`
        : point && Number.isFinite(point.low) ? ` (${number(point.low)} to ${number(point.high)})` : "";
      return point ? `${series.length > 1 ? one.name + " " : ""}${number(point.y)}${range}` : null;
    });
    readout.textContent = `step ${x}: ${shown.filter(Boolean).join(", ")}`;
  });
  svg.addEventListener("pointerleave", () => {
    [cursor, ...dots].forEach((node) => place(node, { visibility: "hidden" }));
    readout.textContent = "";
  });
  if (onStep) {
    svg.classList.add("open");
    svg.addEventListener("click", (event) => onStep(near(event)));
  }
  figure.append(svg);
  if (series.length > 1) figure.append(legend(series));
  return figure;
}

export const legend = (series) =>
  el("ul", { class: "legend" }, series.map(({ name, colour, value }) =>
    el("li", {}, el("i", { style: { background: colour } }), name, value === undefined ? null : el("span", { class: "faint" },
        ` ${value}`))));

/** Stacked bars: `columns`: [{x, parts: Map(name -> seconds)}]. */
export function stacked(columns, names, colours) {
  const width = isNarrow() ? WIDTH : 2 * WIDTH, height = 150;
  const totals = columns.map(({ parts }) => names.reduce((sum, name) => sum + (parts.get(name) ?? 0), 0));
  const highest = Math.max(...totals, 1e-9);
  const each = (width - LEFT - RIGHT) / columns.length;
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `Seconds of each phase by step, at most ${seconds(highest)}` });
  for (const value of ticks(0, highest))
    svg.append(el("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: height - BOTTOM - (value / highest) * (height - TOP - BOTTOM),
        y2: height - BOTTOM - (value / highest) * (height - TOP - BOTTOM) }),
      el("text", { class: "tick", x: LEFT - 6, y: height - BOTTOM + 3.5 - (value / highest) * (height - TOP - BOTTOM),
          "text-anchor": "end" }, number(value, 2)));
  columns.forEach(({ x, parts }, i) => {
    let y = height - BOTTOM;
    for (const name of names) {
      const size = ((parts.get(name) ?? 0) / highest) * (height - TOP - BOTTOM);
      y -= size;
      svg.append(el("rect", { x: LEFT + i * each + 0.08 * each, width: Math.max(each * 0.84, 0.5), y, height: size,
          style: { fill: colours(name) } }));
    }
    if (columns.length <= width / 34 || i % Math.ceil(columns.length / (width / 68)) === 0)
      svg.append(el("text", { class: "tick", x: LEFT + (i + 0.5) * each, y: height - 5, "text-anchor": "middle" }, String(x)));
  });
  return svg;
}

/**
 * The latest rollout batch over time: the trainer's phases, rollouts in flight and calls of reward functions, each in a lane.
 */
export function lanes({ seconds: length, parts, phases, rollouts, rewards }, colours) {
  const width = isNarrow() ? WIDTH : 2 * WIDTH, left = isNarrow() ? 72 : 110, row = 20;
  const names = ["trainer", ...(rollouts.length ? ["rollouts"] : []), ...Object.keys(rewards)];
  const heights = names.map((name, i) => (i && name === "rollouts" && rollouts.length ? 2 * row : row));
  const height = heights.reduce((sum, one) => sum + one + 6, 0) + 18;
  const X = (part) => left + (part / parts) * (width - left - RIGHT);
  const svg = el("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `The latest rollout batch, ${seconds(length)}` });
  let y = 0;
  names.forEach((name, i) => {
    const shown = name.replace(/_reward$/, "");
    svg.append(el("text", { class: "tick", x: left - 6, y: y + heights[i] / 2 + 3.5, "text-anchor": "end" },
      shown.length > left / 6 ? shown.slice(0, Math.floor(left / 6) - 1) + "…" : shown));
    const bar = (from, to, colour) => svg.append(el("rect", { x: X(from), width: Math.max(X(to) - X(from), 0.5), y, height: heights[i],
        style: { fill: colour } }));
    if (!i) for (const [phase, from, to] of phases) bar(from, to, colours(phase));
    else if (i === 1 && rollouts.length) {
      const most = Math.max(...rollouts, 1);
      const points = rollouts.map((count, part) => `${X(part)},${y + heights[i] * (1 - count / most)}`);
      svg.append(el("path", { class: "flight", d: `M${X(0)},${y + heights[i]}L${points.join("L")}L${X(parts)},${y + heights[i]}Z` }),
        el("text", { class: "tick", x: X(parts), y: y + 9, "text-anchor": "end" }, `at most ${number(most)}`));
    } else for (const [from, to] of rewards[name]) bar(from, to, colours("reward"));
    y += heights[i] + 6;
  });
  for (const value of ticks(0, length))
    if (value <= length) svg.append(el("text", { class: "tick", x: X((value / length) * parts), y: height - 4, "text-anchor": "middle" },
        `${number(value, 2)} s`));
  return svg;
}

/** Rewards of a group as dots on one line; equal ones stand above one another. */
export function rewardStrip(members, low, high) {
  const width = 150, height = 26;
  const svg = el("svg", { class: "strip", viewBox: `0 0 ${width} ${height}`, role: "img",
      "aria-label": `rewards ${members.map((one) => number(one.reward, 2)).join(", ")}` });
  svg.append(el("line", { class: "grid", x1: 4, x2: width - 4, y1: height - 4, y2: height - 4 }));
  const at = new Map();
  for (const one of members) {
    const x = 5 + (width - 10) * (high > low ? ((one.reward ?? low) - low) / (high - low) : 0.5);
    const key = Math.round(x / 5);
    const level = at.get(key) ?? 0;
    at.set(key, level + 1);
    const kind = !Number.isFinite(one.reward) ? "none" : one.advantage > 0 ? "good" : one.advantage < 0 ? "bad" : "flat";
    svg.append(el("circle", { class: kind, cx: x, cy: height - 4 - Math.min(level * 3.2, height - 8), r: 2.6 }));
  }
  return svg;
}
