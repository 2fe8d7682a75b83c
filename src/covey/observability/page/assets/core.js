// Elements, text that is safe to show, numbers, and the data of the runs.

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "path", "line", "rect", "circle", "g", "text", "polyline"]);

/** An element: attributes (on… are listeners, `class`, `style` as an object), then children; strings become text. */
export function el(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, one]) => node.style.setProperty(key, one));
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** Text that steps back. */
export const faint = (...children) => el("span", { class: "faint" }, ...children);

/** Pairs of a name and a value in a line; pairs that are false are left out. */
export const facts = (...pairs) =>
  el("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => el("div", {}, el("dt", {}, said(name)), el("dd", {}, value))));

// ---- text of models --------------------------------------------------------------------------------------------

const CONTROLS = "NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS GS RS US".split(" ");
const NAMES = {
  0x061c: "ALM", 0x200b: "ZWSP", 0x200c: "ZWNJ", 0x200d: "ZWJ", 0x200e: "LRM", 0x200f: "RLM", 0x2028: "LSEP",
  0x2029: "PSEP", 0x202a: "LRE", 0x202b: "RLE", 0x202c: "PDF", 0x202d: "LRO", 0x202e: "RLO", 0x2060: "WJ",
  0x2066: "LRI", 0x2067: "RLI", 0x2068: "FSI", 0x2069: "PDI", 0xfeff: "BOM", 0xad: "SHY", 0x7f: "DEL",
};
const UNSEEN = new RegExp(
  "[\\u0000-\\u0008\\u000b-\\u001f\\u007f-\\u009f\\u00ad\\u061c\\u200b\\u200e\\u200f\\u2028-\\u202e\\u2060-\\u206f" +
  "\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}]|[\\ud800-\\udbff](?![\\udc00-\\udfff])|(?<![\\ud800-\\udbff])[\\udc00-\\udfff]", "gu");

/** Text in which characters that act without being seen (escapes, marks of direction) have names. */
export function visible(text) {
  return String(text).replace(UNSEEN, (character) => {
    const code = character.codePointAt(0);
    return `⟨${CONTROLS[code] ?? NAMES[code] ?? "U+" + code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
  });
}

export const oneLine = (text, most = 160) => {
  const line = visible(text).replace(/\s+/g, " ").trim();
  return line.length > most ? line.slice(0, most - 1) + "…" : line;
};

/** Text of a model: isolated, so that its direction changes nothing around it. */
export const said = (text, attributes = {}) =>
  el("bdi", { ...attributes, class: `said ${attributes.class ?? ""}` }, visible(text));

const contentText = (content) =>
  Array.isArray(content)
    ? content.map((part) => (typeof part === "string" ? part : part?.text ?? `<${part?.type ?? "part"}>`)).join("")
    : content === null || content === undefined ? "" : typeof content === "string" ? content : JSON.stringify(content);

/** Messages as `{role, text, calls}`; a text is one message. */
export function messagesOf(value, role) {
  if (!Array.isArray(value)) return [{ role, text: contentText(value), calls: [] }];
  return value.map((message) => ({
    role: [message?.role ?? role, message?.name].filter(Boolean).join(" · "),
    text: [message?.reasoning_content, contentText(message?.content)].filter(Boolean).join("\n\n"),
    calls: (Array.isArray(message?.tool_calls) ? message.tool_calls : []).map((call) => call?.function ?? call),
  }));
}

export const plainText = (value) => messagesOf(value, "").map((one) => one.text).join("\n");

// ---- numbers ---------------------------------------------------------------------------------------------------

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value !== "number") return String(value);
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  const text = size === 0 ? "0"
    : Number.isInteger(value) && size < 1e15 ? size.toLocaleString("en")
    : size >= 1e5 || size < 1e-3 ? size.toExponential(Math.max(0, digits - 2))
    : String(Number(size.toPrecision(size >= 100 ? Math.max(digits, 4) : digits)));
  return (value < 0 ? "−" : "") + text;
}
export const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);
export const percent = (value) => (Number.isFinite(value) ? `${(100 * value).toFixed(value && value < 0.1 ? 1 : 0)}%` : "–");
export const short = (value) =>
  !Number.isFinite(value) ? "–" : value < 1e4 ? number(Math.round(value)) : value < 1e6 ? `${(value / 1e3).toFixed(1)}k`
    : value < 1e9 ? `${(value / 1e6).toFixed(1)}M` : `${(value / 1e9).toFixed(1)}G`;
export const seconds = (value) =>
  !Number.isFinite(value) ? "–" : value < 60 ? `${number(value, 2)} s` : value < 3600
    ? `${Math.floor(value / 60)} min ${Math.round(value % 60)} s` : `${Math.floor(value / 3600)} h ${Math.round((value % 3600) / 60)} min`;

export const mean = (values) => (values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : NaN);
export function deviation(values) {
  if (values.length < 2) return NaN;
  const centre = mean(values);
  return Math.sqrt(values.reduce((sum, value) => sum + (value - centre) ** 2, 0) / (values.length - 1));
}
/** Mean and half of a 95% interval over clusters: completions of a prompt are no independent samples. */
export function interval(values, clusters) {
  const known = values.map((value, i) => [value, clusters[i]]).filter(([value]) => Number.isFinite(value));
  const sums = new Map();
  const centre = mean(known.map(([value]) => value));
  for (const [value, cluster] of known) sums.set(cluster, (sums.get(cluster) ?? 0) + value - centre);
  const count = sums.size;
  const spread = [...sums.values()].reduce((sum, value) => sum + value ** 2, 0);
  const half = count > 1 ? (1.96 * Math.sqrt((spread * count) / (count - 1))) / known.length : NaN;
  return { mean: centre, half, count: known.length };
}

// ---- data ------------------------------------------------------------------------------------------------------

const embedded = document.getElementById("data");
const chunks = embedded ? JSON.parse(embedded.textContent) : null;
const opened = new Map();

function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  return bytes;
}
/** A column of tokens: little-endian numbers in base64. */
export const numbersOf = (base64, Kind) => new Kind(bytesOf(base64).buffer);

async function unpacked(key) {
  if (!opened.has(key)) {
    const stream = new Blob([bytesOf(chunks[key])]).stream().pipeThrough(new DecompressionStream("gzip"));
    opened.set(key, new Response(stream).json());
  }
  return opened.get(key);
}

/** The answer to a path of the server; in an exported page those that it holds. */
export async function get(path) {
  if (!chunks) {
    const response = await fetch(`api/${path}`);
    if (!response.ok) throw new Error((await response.text()) || response.statusText);
    return response.json();
  }
  if (path in chunks) return unpacked(path);
  const [kind, run, id] = path.split("/");
  const chunk = `rollouts/${run}/${(id ?? "").split(".").slice(0, 2).join(".")}`;
  if (kind === "rollout" && chunk in chunks) return (await unpacked(chunk))[Number(id.split(".")[2])];
  throw new Error(`This rollout is not in this file, which holds those of other steps. See it with: covey view ${runs[run]?.folder}`);
}
export const imageAddress = async (run, name) => (chunks ? get(`image/${run}/${name}`) : `api/image/${run}/${name}`);

/** Ids of the rollouts whose completion or prompt contains a text. */
export async function search(run, words) {
  if (!chunks) return new Set(await get(`search/${run}?q=${encodeURIComponent(words)}`));
  const found = new Set();
  for (const key of Object.keys(chunks).filter((name) => name.startsWith(`rollouts/${run}/`)))
    for (const one of await unpacked(key))
      if (`${plainText(one.prompt)}\n${plainText(one.completion)}`.toLowerCase().includes(words.toLowerCase())) found.add(one.id);
  return found;
}

export const runs = []; // {index, name, described, metrics, findings, live, blocks: Map, rollouts: []}
export const whole = { study: null }; // of which the runs are variants
export const isExport = chunks !== null;

/** Fetch what is new; returns true if anything was. */
export async function refresh(onProgress = () => {}) {
  const state = await get("state");
  let changed = JSON.stringify(state.study) !== JSON.stringify(whole.study);
  whole.study = state.study;
  for (const [index, now] of state.runs.entries()) {
    const run = (runs[index] ??= { index, blocks: new Map(), version: "", rollouts: [], metrics: [], described: {},
        groups: new Map(), steps: new Map() });
    Object.assign(run, { name: now.name, folder: now.folder, live: now.live, written: now.written, leftOut: now.left_out });
    if (run.version !== now.version) {
      Object.assign(run, await get(`run/${index}`), { version: now.version, pairs: null });
      changed = true;
    }
    const wanted = now.blocks.filter(([key, version]) => run.blocks.get(key)?.version !== version).reverse();
    let shown = performance.now();
    for (let first = 0; first < wanted.length; first += 32) {
      const keys = wanted.slice(first, first + 32).map(([key]) => key);
      const fetched = chunks ? Object.fromEntries(await Promise.all(keys.map(async (key) => [key, await get(`blocks/${index}/${key}`)])))
        : await get(`blocks/${index}?keys=${keys.join(",")}`);
      for (const key of keys) run.blocks.set(key, { ...fetched[key], version: wanted.find(([one]) => one === key)[1] });
      changed = true;
      if (first + 32 < wanted.length && performance.now() - shown < 2000) continue;
      run.rollouts = rolloutsOf(run);
      shown = performance.now();
      if (first + 32 < wanted.length) onProgress();
    }
    if (index + 1 < state.runs.length && changed) onProgress();
    for (const key of [...run.blocks.keys()].filter((one) => !now.blocks.some(([name]) => name === one))) {
      run.blocks.delete(key);
      run.rollouts = rolloutsOf(run);
    }
  }
  return changed;
}

/** One object for each rollout, in the order of sampling, with scores of how odd its reward is. */
function rolloutsOf(run) {
  const all = [];
  for (const [key, block] of run.blocks) {
    const names = Object.keys(block.columns);
    block.rollouts ??= block.columns.step.map((_, i) => {
      const one = { id: `${key}.${i}`, run: run.index };
      for (const name of names) one[name] = block.columns[name][i];
      one.rewards = Object.fromEntries(Object.entries(block.rewards).map(([name, values]) => [name, values[i]]));
      one.cluster = `${key}.${one.group}`;
      return one;
    });
    all.push(...block.rollouts);
  }
  all.sort((a, b) => a.generation - b.generation);
  const groups = Map.groupBy ? Map.groupBy(all, (one) => one.cluster) : groupBy(all, (one) => one.cluster);
  const scale = deviation(all.map((one) => one.reward).filter(Number.isFinite)) || 1;
  for (const members of groups.values())
    for (const one of members) {
      const others = members.filter((other) => other !== one && Number.isFinite(other.reward)).map((other) => other.reward);
      const twin = members.some((other) => other !== one && other.text === one.text && other.reward !== one.reward);
      const alone = Number.isFinite(one.reward) && others.length ? Math.abs(one.reward - mean(others)) : 0;
      one.odd = alone / ((deviation(others) || 0) + 0.1 * scale) + (twin ? 100 : 0);
      one.twin = twin;
    }
  run.groups = groups;
  run.steps = groupBy(all, (one) => one.step);
  return all;
}
export function groupBy(items, keyOf) {
  const found = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (found.has(key)) found.get(key).push(item);
    else found.set(key, [item]);
  }
  return found;
}

/** Prompt of a rollout's group, which only the first of its rollouts carries. */
export const promptOf = (rollout) => runs[rollout.run].groups.get(rollout.cluster)[0].prompt;

export const rewardNames = (run) => [...new Set([...run.blocks.values()].flatMap((block) => Object.keys(block.rewards)))];

/** Completions that differ from every other of their group, as a share of all. */
export function distinct(members) {
  const groups = [...groupBy(members, (one) => one.cluster).values()];
  return groups.reduce((sum, own) => sum + new Set(own.map((one) => one.text)).size, 0) / members.length;
}

/** A run that trains from another run's record: its samples are not of its own policy. */
export const replays = (run) => Boolean(run.described?.settings?.replay_from);

export const stepsOf = (run) => [...run.steps].sort(([a], [b]) => a - b);

export const colourOf = (run) => `var(--run-${run % 8})`;
export const link = (run, ...parts) => `#/${run}/${parts.join("/")}`;
