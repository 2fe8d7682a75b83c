// A rollout: its tokens in rows of which only those in view exist, coloured by a column.

import { el, facts, faint, get, imageAddress, link, number, numbersOf, oneLine, said, seconds, signed } from "./core.js";
import { fateChip, partsOf, settingsTable, transcript } from "./lists.js";

const ROW = 24; // pixels of a row of tokens
const BUCKETS = 8; // shades of a scale on each side
const PLAIN = /^[\x20-\x7e]*$/; // text that has no direction but its own
const MOST_FOLDED = 400; // tokens of a prompt or tool result that are shown at once

/** Scale of a column: value -> class, and the values at its ends. */
function scaleOf({ values, scale }) {
  const known = values.filter(Number.isFinite).sort();
  const at = (q) => known[Math.round(q * (known.length - 1))] ?? 0;
  const shade = (kind, level) => `${kind} h${Math.min(BUCKETS, Math.max(0, Math.round(level * BUCKETS)))}`;
  if (scale === "each") {
    const kinds = [...new Set(known)];
    return { ends: [kinds[0] ?? 0, kinds.at(-1) ?? 0], of: (value) => (Number.isNaN(value) ? "" : `e e${kinds.indexOf(value) % 6}`) };
  }
  if (scale.startsWith("both")) {
    const centre = scale === "both1" ? 1 : 0;
    const largest = Math.max(Math.abs(at(0.002) - centre), Math.abs(at(0.998) - centre), 1e-12);
    const of = (value) => (Number.isNaN(value) ? "" : shade(value < centre ? "n" : "p", Math.abs(value - centre) / largest + 0.06));
    return { ends: [centre - largest, centre + largest], of };
  }
  const ends = scale === "low" ? [Math.max(at(0.99), 0), at(0.01)] : [Math.min(at(0.01), 0), at(0.99)];
  return { ends, of: (value) => (Number.isNaN(value) ? "" : shade("s", (value - ends[0]) / (ends[1] - ends[0] || 1))) };
}

/** Runs of tokens by who wrote them: the prompt, the policy's turns, and what came between these. */
function segmentsOf(sampled, promptLength, ends) {
  const found = [{ kind: "prompt", from: -promptLength, to: 0, folded: promptLength > MOST_FOLDED }];
  const breaks = new Set(ends);
  let turn = 0;
  for (let i = 0; i < sampled.length; ) {
    let to = i + 1;
    while (to < sampled.length && sampled[to] === sampled[i] && !(sampled[i] && breaks.has(to - 1))) to++;
    if (sampled[i]) found.push({ kind: "policy", turn: ++turn, from: i, to, folded: false });
    else found.push({ kind: "other", from: i, to, folded: to - i > MOST_FOLDED });
    i = to;
  }
  return found;
}

/** The tokens as rows; returns the element and functions to move through it. */
function tokenText(rollout, columns, onToken) {
  const { tokens } = rollout;
  const parts = partsOf(rollout);
  const prompt = partsOf({ tokens: { ...tokens, ids: tokens.prompt_ids } });
  const sampled = numbersOf(tokens.sampled, Uint8Array);
  const segments = segmentsOf(sampled, prompt.keys.length, rollout.turn_ends ?? []);
  const [view, inner] = [el("div", { class: "tokens", tabindex: 0, role: "group",
      "aria-label": `${sampled.length} tokens; arrows move between them` }), el("div", { class: "sheet" })];
  const map = el("canvas", { class: "map", "aria-hidden": "true" });
  const frame = el("div", { class: "frame" }, view, map);
  view.append(inner);
  const rows = []; // of {segment} for headings, or {from, to} indexes into the pieces below
  const pieceToken = [], pieceText = [];
  const tokenRow = new Int32Array(sampled.length);
  const live = new Map();
  let column = columns[0], scale = column ? scaleOf(column) : null, selected = null;
  const pen = document.createElement("canvas").getContext("2d");
  const widths = new Map();
  const textOf = (token) => {
    const text = token < 0 ? prompt.text(token + prompt.keys.length) : parts.text(token);
    return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥   ");
  };
  const widthOf = (text) => {
    if (!widths.has(text)) widths.set(text, pen.measureText(text).width + 1); // with its seam
    return widths.get(text);
  };

  /** Break the tokens into rows of the view's width. */
  function layout() {
    const style = getComputedStyle(view);
    pen.font = `${style.fontSize} ${style.fontFamily}`;
    widths.clear();
    const room = Math.max(view.clientWidth - 28, 120);
    rows.length = pieceToken.length = pieceText.length = 0;
    for (const [index, segment] of segments.entries()) {
      rows.push({ segment: index });
      if (segment.folded) {
        for (let token = Math.max(0, segment.from); token < segment.to; token++) tokenRow[token] = rows.length - 1;
        continue;
      }
      let [start, used] = [pieceToken.length, 0];
      const end = () => {
        if (pieceToken.length > start) rows.push({ from: start, to: pieceToken.length });
        [start, used] = [pieceToken.length, 0];
      };
      for (let token = segment.from; token < segment.to; token++) {
        let text = textOf(token);
        let width = widthOf(text);
        if (used + width > room && used) end();
        if (token >= 0) tokenRow[token] = rows.length;
        while (width > room && text.length > 1) {
          const most = Math.max(1, Math.floor((text.length * room) / width) - 1);
          pieceToken.push(token);
          pieceText.push(text.slice(0, most));
          end();
          text = text.slice(most);
          width = pen.measureText(text).width;
        }
        pieceToken.push(token);
        pieceText.push(text);
        used += width;
        if (text.endsWith("⏎")) end();
      }
      end();
    }
    inner.style.height = `${rows.length * ROW + 12}px`;
    frame.style.setProperty("--rows", `${Math.max(rows.length, 4) * ROW + 14}px`);
    for (const node of live.values()) node.remove();
    live.clear();
    draw();
    paintMap();
  }
  const title = (segment) => {
    const count = `${number(segment.to - segment.from)} tokens`;
    if (segment.kind === "prompt") return `prompt · ${count}`;
    return segment.kind === "policy" ? `turn ${segment.turn} · ${count}` : `not sampled: tool result or template · ${count}`;
  };
  const classOf = (token, text) => {
    const kind = `tok${sampled[token] ? "" : " given"}${PLAIN.test(text) ? "" : " isolated"}${token === selected ? " selected" : ""}`;
    return scale && token >= 0 ? `${kind} ${scale.of(column.values[token])}` : kind;
  };
  function rowNode(index) {
    const row = rows[index];
    const node = el("div", { class: "row", style: { transform: `translateY(${index * ROW + 6}px)` } });
    if (row.segment !== undefined) {
      const segment = segments[row.segment];
      node.append(el("button", { class: `fold ${segment.kind}`, "aria-expanded": String(!segment.folded),
          onclick: () => { segment.folded = !segment.folded; layout(); } },
        `${segment.folded ? "▸" : "▾"} ${title(segment)}`));
    } else
      for (let i = row.from; i < row.to; i++) {
        const span = document.createElement("span");
        span.className = classOf(pieceToken[i], pieceText[i]);
        span.dataset.token = pieceToken[i];
        span.textContent = pieceText[i];
        node.append(span);
      }
    return node;
  }
  function draw() {
    const first = Math.max(0, Math.floor(view.scrollTop / ROW) - 12);
    const last = Math.min(rows.length, Math.ceil((view.scrollTop + view.clientHeight) / ROW) + 12);
    for (const [index, node] of live) if (index < first || index >= last) { node.remove(); live.delete(index); }
    for (let index = first; index < last; index++)
      if (!live.has(index)) {
        live.set(index, rowNode(index));
        inner.append(live.get(index));
      }
  }
  const strength = (token) => {
    const value = column.values[token];
    return Number.isNaN(value) ? NaN : column.scale === "low" ? -value : Math.abs(value - (column.scale === "both1" ? 1 : 0));
  };
  function strongest(count) {
    if (!scale) return [];
    const found = [];
    for (let token = 0; token < sampled.length; token++) if (strength(token) > 0) found.push(token);
    return found.sort((a, b) => strength(b) - strength(a)).slice(0, count);
  }
  const recolour = () => {
    for (const span of inner.querySelectorAll(".tok")) span.className = classOf(Number(span.dataset.token), span.textContent);
  };
  /** The whole rollout at a glance: the strongest value of the tokens at each height. */
  function paintMap() {
    const ratio = devicePixelRatio || 1;
    const [width, height] = [map.clientWidth, map.clientHeight];
    if (!width || !height) return;
    [map.width, map.height] = [width * ratio, height * ratio];
    const context = map.getContext("2d");
    context.scale(ratio, ratio);
    context.clearRect(0, 0, width, height);
    if (!scale) return;
    const resolved = (name) => {
      map.style.color = `var(--${name})`; // a canvas knows no variables
      return getComputedStyle(map).color;
    };
    const colours = { s: resolved("heat"), p: resolved("good"), n: resolved("bad"), e: resolved("accent") };
    const best = new Map();
    const largest = sampled.reduce((most, _, token) => Math.max(most, strength(token) || 0), 1e-12);
    for (let token = 0; token < sampled.length; token++) {
      const y = Math.floor((tokenRow[token] / rows.length) * height);
      const size = column.scale === "each" ? 0.4 : Math.max(0, strength(token) / largest) ** 1.5 || 0;
      if (size > (best.get(y)?.size ?? 0)) best.set(y, { size, kind: scale.of(column.values[token])[0] ?? "s" });
    }
    for (const [y, { size, kind }] of best) {
      context.globalAlpha = 0.08 + 0.92 * size;
      context.fillStyle = colours[kind] ?? colours.s;
      context.fillRect(0, y, width, Math.max(1, height / rows.length));
    }
  }
  function reveal(token) {
    const segment = segments.find((one) => one.from <= token && token < one.to);
    if (segment?.folded) {
      segment.folded = false;
      layout();
    }
    const y = tokenRow[token] * ROW;
    if (y < view.scrollTop + ROW || y > view.scrollTop + view.clientHeight - 3 * ROW) view.scrollTop = y - view.clientHeight / 2;
    draw();
  }
  const at = (event) => {
    const token = Number(event.target.dataset?.token ?? -1);
    return token < 0 ? null : token;
  };
  const select = (token, moved = true) => {
    selected = token;
    if (moved) reveal(token);
    recolour();
    onToken(token, true);
  };
  let waiting = false;
  view.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  }, { passive: true });
  view.addEventListener("pointermove", (event) => event.pointerType !== "touch" && at(event) !== null && onToken(at(event), false));
  view.addEventListener("pointerleave", () => onToken(selected, true));
  view.addEventListener("click", (event) => at(event) !== null && select(at(event), false));
  view.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    select(Math.min(sampled.length - 1, Math.max(0, (selected ?? -by) + by)));
  });
  map.addEventListener("click", (event) => {
    view.scrollTop = (event.offsetY / map.clientHeight) * rows.length * ROW - view.clientHeight / 2;
  });
  let width = 0;
  new ResizeObserver(() => {
    if (!view.clientWidth || view.clientWidth === width) return;
    width = view.clientWidth;
    layout();
    if (selected !== null) reveal(selected);
  }).observe(view);
  return {
    frame, view, select, sampled, textOf, segments,
    get selected() { return selected; },
    fold(all) { segments.forEach((one) => { if (one.kind !== "policy") one.folded = all; }); layout(); },
    colour(chosen) { column = chosen; scale = chosen ? scaleOf(chosen) : null; recolour(); paintMap(); return scale; },
    strongest,
  };
}

/** Values of one token. */
function tokenPanel(rollout, columns, text) {
  const list = el("dl", { class: "values" });
  const head = el("p", { class: "piece" });
  const panel = el("aside", { class: "panel", "aria-label": "The token" }, head, list);
  const ids = numbersOf(rollout.tokens.ids, Int32Array);
  const order = columns.map((column) => Float32Array.from(column.values.filter(Number.isFinite)).sort());
  const rank = (i, value) => {
    let [low, high] = [0, order[i].length];
    while (low < high) {
      const middle = (low + high) >> 1;
      [low, high] = order[i][middle] < value ? [middle + 1, high] : [low, middle];
    }
    return order[i].length ? low / order[i].length : 0;
  };
  const show = (token, announced) => {
    if (token === null || token === undefined) {
      head.replaceChildren(faint("Point at a token, or choose one with a click or the arrow keys."));
      list.replaceChildren();
      return;
    }
    head.replaceChildren(said(text.textOf(token), { class: "big" }),
        faint(` token ${number(token)} · id ${ids[token]} · ${text.sampled[token] ? "sampled" : "not sampled"}`));
    list.replaceChildren(...columns.map((column, i) => {
      const value = column.values[token];
      return el("div", { title: column.meaning }, el("dt", {}, column.title),
        el("dd", {}, column.scale.startsWith("both") ? signed(value, 4) : number(value, 4)),
        el("i", { class: "rank", "aria-hidden": "true", style: { "--rank": Number.isFinite(value) ? rank(i, value) : 0 } }));
    }));
    const values = columns.map((column) => `${column.title} ${number(column.values[token])}`);
    if (announced) document.getElementById("status").textContent = `token ${token} ${oneLine(text.textOf(token))}: ${values.join(", ")}`;
  };
  show(null);
  return { panel, show };
}

export async function rolloutView(run, id, token, by) {
  const brief = run.rollouts.find((one) => one.id === id);
  if (!brief) return [el("h1", {}, "Rollout"), el("p", {}, "This rollout is not in the record.")];
  const rollout = await get(`rollout/${run.index}/${id}`);
  const siblings = run.groups.get(brief.cluster);
  const place = siblings.indexOf(brief);
  const neighbour = (to, text, key) => (to ? el("a", { href: link(run.index, "rollout", to.id) + (by ? `?by=${by}` : ""),
      "aria-keyshortcuts": key }, text) : faint(text));
  const images = (rollout.image_files ?? []).map((name, i) => {
    const image = el("img", { alt: `image ${i + 1} that the model was shown`, loading: "lazy" });
    imageAddress(run.index, name).then((address) => (image.src = address)).catch(() => image.remove());
    return image;
  });
  const rewards = Object.entries(rollout.rewards);
  const weights = run.described?.settings?.reward_weights;
  const weightOf = (i) => (Array.isArray(weights) && weights.length === rewards.length ? weights[i] : 1);
  const head = [
    el("div", { class: "head" }, el("h1", {}, `Rollout ${place + 1} of ${siblings.length}`, faint(` row ${brief.row}, step ${brief.step}`)),
      el("nav", { class: "steps", "aria-label": "Rollouts of the group" }, neighbour(siblings[place - 1], "← previous", "k"),
          el("a", { href: link(run.index, "group", brief.cluster), "aria-keyshortcuts": "g" }, "group"),
          neighbour(siblings[place + 1], "next →", "j"))),
    facts(
      ...(rewards.length > 1 || weightOf(0) !== 1 ? [["reward", number(brief.reward)]] : []),
      ...rewards.map(([name, value], i) => [name.replace(/_reward$/, "").replaceAll("_", " "),
        weightOf(i) === 1 ? number(value) : [number(value), faint(` × ${number(weightOf(i))}`)]]),
      ["advantage", signed(brief.advantage, 3)],
      ["fate", fateChip(brief)],
      ["tokens", number(brief.length)],
      brief.turns > 1 && ["turns", brief.turns],
      brief.calls && ["tool calls", `${brief.calls}${brief.failed_calls ? `, ${brief.failed_calls} failed` : ""}`],
      rollout.seconds && ["time", seconds(rollout.seconds)],
      rollout.tool_seconds && ["of which tools", seconds(rollout.tool_seconds)],
      rollout.reused && ["taken from a draft", number(rollout.reused)],
    ),
    rollout.error ? el("p", { class: "notice bad" }, said(rollout.error)) : null,
    images.length ? el("div", { class: "images" }, images) : null,
  ];
  const folded = (title, entries) => entries.length > 0 && el("details", {}, el("summary", {}, title), settingsTable(entries));
  const steps = Object.entries(rollout.steps).map(([index, pairs]) =>
    [rewards[Number(index)]?.[0] ?? index, pairs.map(([end, reward]) => `${end}: ${number(reward)}`).join(", ")]);
  const rest = [
    el("details", { open: !rollout.tokens }, el("summary", {}, "As text"),
      transcript(rollout.prompt, "prompt"), transcript(rollout.completion, "assistant")),
    folded("Other columns of the row", Object.entries(rollout.data)),
    folded("Columns that rewards logged", Object.entries(rollout.columns)),
    folded("Rewards of steps, by their last token", steps),
  ];
  if (!rollout.tokens) return [...head,
      el("p", { class: "notice" }, 'Tokens are not on record. Train with record="tokens" to see each with its values.'), ...rest];
  const columns = rollout.tokens.columns.map((column) => ({ ...column, values: numbersOf(column.values, Float32Array) }));
  const shown = columns.filter((column) => column.scale !== "hidden" && column.values.some(Number.isFinite));
  let panel = null;
  const text = tokenText(rollout, shown, (at, announced) => panel.show(at ?? text.selected, announced));
  panel = tokenPanel(rollout, columns, text);
  const ends = el("span", { class: "ends" });
  const jumps = el("div", { class: "jumps", role: "group", "aria-label": "Tokens that stand out" });
  let strongest = [];
  const colour = (name) => {
    const chosen = shown.find((column) => column.name === name) ?? null;
    const scale = text.colour(chosen);
    const kind = !chosen ? "" : chosen.scale.startsWith("both") ? "both" : chosen.scale === "each" ? "each" : "one";
    ends.replaceChildren(...(scale ? [number(scale.ends[0], 2), el("i", { class: `ramp ${kind}` }), number(scale.ends.at(-1), 2)] : []));
    strongest = chosen && chosen.scale !== "each" ? text.strongest(200) : [];
    jumps.replaceChildren(...strongest.slice(0, 8).map((at) => el("button", { onclick: () => text.select(at) },
        said(oneLine(text.textOf(at), 18) || "␣"), " ", el("b", {}, chosen.scale.startsWith("both") ? signed(chosen.values[at], 2)
        : number(chosen.values[at], 2)))));
  };
  const step = (by) => {
    if (!strongest.length) return;
    const now = strongest.indexOf(text.selected);
    text.select(strongest[(now + by + strongest.length) % strongest.length]);
  };
  const first = by && shown.some((column) => column.name === by) ? by : shown.some((column) => column.name === "gap") && token !== null
      ? "gap" : "logprobs";
  const select = el("select", { onchange: (event) => colour(event.target.value) }, el("option", { value: "" }, "nothing"),
    shown.map((column) => el("option", { value: column.name, selected: column.name === first, title: column.meaning }, column.title)));
  queueMicrotask(() => {
    colour(first);
    if (token !== null && token < text.sampled.length)
      requestAnimationFrame(() => {
        text.select(token);
        if (innerWidth < 600) node.scrollIntoView();
      });
  });
  const folds = text.segments.filter((one) => one.kind === "other").length;
  const node = el("section", { class: "reader", "aria-label": "Tokens" },
    el("div", { class: "tools" }, el("label", {}, "Colour by", select), ends,
      folds ? [el("button", { onclick: () => text.fold(true) }, "Fold what tools wrote"), el("button", { onclick: () => text.fold(false) },
          "Unfold")] : null),
    jumps, el("div", { class: "columns" }, text.frame, panel.panel));
  node.keys = { n: () => step(1), p: () => step(-1) };
  return [...head, node, ...rest];
}
