// Lists of rollouts and groups: the search over a run, a step, a group, and the same group of two runs.

import { rewardStrip } from "./charts.js";
import {
  colourOf, deviation, el, facts, faint, get, groupBy, interval, link, mean, messagesOf, number, numbersOf, oneLine, percent, plainText,
  promptOf, replays, runs, said, search, seconds, short, signed, stepsOf, visible,
} from "./core.js";

// ---- what every list shows ---------------------------------------------------------------------------------------

export const SORTS = {
  newest: ["Newest first", (one) => one.generation],
  gap: ["Largest gap", (one) => Math.abs(one.gap ?? NaN), (one) => signed(one.gap), "gap_at"],
  longest: ["Longest", (one) => one.length, (one) => `${number(one.length)} tokens`],
  clipped: ["Most clipped", (one) => (one.clipped ? one.clipped : NaN), (one) => `${number(one.clipped)} tokens`, "clipped_at"],
  odd: ["Odd reward", (one) => one.odd, (one) => `${number(one.reward)}${one.twin ? ", a twin got another" : ""}`],
  ratio: ["Largest ratio", (one) => Math.abs(one.log_ratio ?? NaN), (one) => `× ${number(Math.exp(one.log_ratio))}`, "log_ratio_at"],
  entropy: ["Highest entropy", (one) => one.entropy ?? NaN, (one) => `${number(one.entropy)} nats`],
  best: ["Highest reward", (one) => one.reward ?? NaN, (one) => number(one.reward)],
  worst: ["Lowest reward", (one) => -(one.reward ?? NaN), (one) => number(one.reward)],
  slowest: ["Slowest", (one) => one.seconds || NaN, (one) => seconds(one.seconds)],
};

export const sorted = (rollouts, name) => {
  const score = SORTS[name][1];
  const known = rollouts.filter((one) => !Number.isNaN(score(one)));
  return known.sort((a, b) => score(b) - score(a));
};

/** The rollout page, at the token that a sort is about. */
export function rolloutLink(one, sort) {
  const at = one[SORTS[sort]?.[3]];
  const column = { gap: "gap", clipped: "clipped", ratio: "log_ratios" }[sort];
  return link(one.run, "rollout", one.id, ...(at === undefined || at === null ? [] : ["t", at])) + (column ? `?by=${column}` : "");
}

export function fateChip(one) {
  const odd = one.finish !== "stop" ? one.finish.replace("_", " ") : null;
  const kind = { trained: "good", failed: "bad" }[one.fate] ?? "flat";
  return [el("span", { class: `chip ${kind}` }, one.fate), odd && odd !== "error" ? el("span", { class: "chip warn" }, odd) : null];
}
const advantage = (value) => el("span", { class: value > 0 ? "good" : value < 0 ? "bad" : "faint" }, signed(value, 2));

const textOf = (one) => said(oneLine(one.excerpt, 200));
const COLUMNS = [
  ["step", (one) => one.step, "num"],
  ["completion", (one) => [textOf(one), el("small", { class: "faint wide-only" }, said(oneLine(promptOf(one), 110)))],
      "text"],
  ["role", (one) => said(one.role), "", (one) => Boolean(one.role)],
  ["game", (one) => number(one.game), "num less", (one) => Boolean(one.role)],
  ["reward", (one) => number(one.reward), "num"],
  ["advantage", (one) => advantage(one.advantage), "num less"],
  ["tokens", (one) => number(one.length), "num less"],
  ["gap", (one) => signed(one.gap, 2), "num less", (one) => Number.isFinite(one.gap)],
  ["clipped", (one) => number(one.clipped), "num less", (one) => Number.isFinite(one.clipped)],
  ["entropy", (one) => number(one.entropy, 2), "num less", (one) => Number.isFinite(one.entropy)],
  ["fate", fateChip, ""],
];

/** A table of rollouts that grows as one scrolls; those of one group need no prompt in each row. */
export function rolloutTable(rollouts, sort = "", caption = "Rollouts", oneGroup = false) {
  const columns = COLUMNS.filter(([, , , known]) => !known || rollouts.some(known)).map(([name, cell, ...rest]) =>
      [name === "gap" && replays(runs[rollouts[0].run]) ? "change" : name, name === "completion" && oneGroup ? textOf : cell, ...rest]);
  const body = el("tbody");
  const table = el("table", { class: "rows" }, el("caption", { class: "unseen" }, caption),
    el("thead", {}, el("tr", {}, columns.map(([name, , kind]) => el("th", { scope: "col", class: kind }, name)))), body);
  let shown = 0;
  const grow = () => {
    for (const one of rollouts.slice(shown, shown + 80)) {
      const address = rolloutLink(one, sort);
      const cells = columns.map(([name, cell, kind]) =>
        el("td", { class: kind }, name === "completion" ? el("a", { href: address }, cell(one)) : cell(one)));
      body.append(el("tr", { onclick: (event) => event.target.closest("a") || (location.hash = address) }, cells));
    }
    shown = Math.min(shown + 80, rollouts.length);
  };
  grow();
  if (shown < rollouts.length) {
    const more = el("button", { class: "more", onclick: () => grow() }, "Show more");
    new IntersectionObserver((seen) => {
      if (!seen[0].isIntersecting) return;
      grow();
      if (shown >= rollouts.length) more.remove();
    }).observe(more);
    return el("div", {}, table, more);
  }
  return table;
}

// ---- the rollouts of a run ---------------------------------------------------------------------------------------

export function listView(run, query) {
  const state = { sort: query.get("sort") ?? "newest", source: query.get("source") ?? "",
      fate: query.get("fate") ?? "", finish: query.get("finish") ?? "",
      role: query.get("role") ?? "", step: query.get("step") ?? "", low: query.get("low") ?? "", high: query.get("high") ?? "", q: query.get("q") ?? "" };
  const result = el("div", { "aria-live": "polite" });
  const kinds = (name) => [...new Set(run.rollouts.map((one) => one[name]))].sort();
  const choose = (name, title, options) =>
    el("label", {}, title, el("select", { onchange: (event) => set(name, event.target.value) },
      options.map(([value, text]) => el("option", { value, selected: value === state[name] }, text))));
  const type = (name, title, kind, width) =>
    el("label", {}, title, el("input", { type: kind, value: state[name], step: "any", style: { width }, onchange: (event) =>
        set(name, event.target.value) }));
  const set = (name, value) => {
    state[name] = value;
    const kept = Object.entries(state).filter(([, one]) => one);
    history.replaceState(null, "", link(run.index, "rollouts") + (kept.length ? `?${new URLSearchParams(kept)}` : ""));
    show();
  };
  const available = Object.entries(SORTS).filter(([name]) => name === "newest"
      || run.rollouts.some((one) => !Number.isNaN(SORTS[name][1](one))));
  async function show() {
    const found = state.q ? await search(run.index, state.q) : null;
    const reward = (one) => one.reward ?? NaN;
    const chosen = run.rollouts.filter((one) =>
      (!found || found.has(one.id)) && (!state.fate || one.fate === state.fate) && (!state.finish || one.finish === state.finish) &&
      (!state.role || one.role === state.role) &&
      (!state.source || one.source === state.source) &&
      (!state.step || one.step === Number(state.step)) && (state.low === "" || reward(one) >= Number(state.low)) &&
      (state.high === "" || reward(one) <= Number(state.high)));
    const list = sorted(chosen, state.sort);
    result.replaceChildren(el("p", { class: "faint" }, `${number(list.length)} of ${number(run.rollouts.length)} rollouts`),
      list.length ? rolloutTable(list, state.sort) : el("p", {}, "No rollout is like that."));
  }
  show();
  return [
    el("h1", {}, "Rollouts"),
    el("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
      el("label", { class: "grow" }, "Text", el("input", { type: "search", value: state.q, placeholder: "in prompts and completions",
          onchange: (event) => set("q", event.target.value) })),
      choose("sort", "Order", available.map(([name, [title]]) => [name, title])),
      run.rollouts.some((one) => one.source) ? choose("source", "Source", [["", "any"], ...kinds("source").map((one) => [one, one])]) : null,
      choose("fate", "Fate", [["", "any"], ...kinds("fate").map((one) => [one, one])]),
      choose("finish", "Ended by", [["", "any"], ...kinds("finish").map((one) => [one, one.replace("_", " ")])]),
      run.rollouts.some((one) => one.role) ? choose("role", "Role", [["", "any"], ...kinds("role").filter(Boolean).map((one) => [one, one])]) : null,
      type("step", "Step", "number", "4.5rem"), type("low", "Reward from", "number", "5rem"), type("high", "to", "number", "5rem")),
    result,
  ];
}

/** Heads of the columns of a list of groups, of which the first takes the room that is left. */
export const heads = (first, ...others) => el("div", { class: "heads faint", "aria-hidden": "true" }, el("span", { class: "what" }, first),
    others.map((name) => el("span", { class: name === "rewards" ? "strip" : name === "length" ? "num less" : "num" }, said(name))));

// ---- a step ------------------------------------------------------------------------------------------------------

const hasSignal = (members) => members.some((one) => one.fate === "trained");
const spread = (members) => deviation(members.map((one) => one.reward).filter(Number.isFinite)) || 0;

export function stepView(run, step) {
  const members = run.steps.get(step);
  if (!members) return [el("h1", {}, `Step ${step}`), el("p", {}, "Nothing is recorded of this step.")];
  const groups = [...groupBy(members, (one) => one.cluster).values()];
  const known = members.map((one) => one.reward).filter(Number.isFinite);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const best = run.rollouts.reduce((most, one) => Math.max(most, one.reward ?? -Infinity), -Infinity);
  const kinds = { "With signal": [], "No signal: all rewards are the highest": [], "No signal: all rewards are equal": [], "No signal": [],
      "Nothing to learn from": [] };
  for (const group of groups) {
    const rewards = new Set(group.map((one) => one.reward));
    const kind = hasSignal(group) ? "With signal"
      : group.every((one) => one.fate === "failed" || one.fate === "masked") ? "Nothing to learn from"
        : rewards.size > 1 ? "No signal" : [...rewards][0] === best ? "No signal: all rewards are the highest"
            : "No signal: all rewards are equal";
    kinds[kind].push(group);
  }
  const steps = stepsOf(run).map(([step]) => step);
  const place = steps.indexOf(step);
  const go = (to, text, key) => (to === undefined ? faint(text) : el("a", { href: link(run.index, "step", to),
      "aria-keyshortcuts": key }, text));
  const total = interval(members.map((one) => one.reward ?? NaN), members.map((one) => one.cluster));
  const sum = (name) => members.reduce((all, one) => all + one[name], 0);
  const line = run.metrics.filter((one) => one.step === step).reduce((all, one) => ({ ...all, ...one }), {});
  return [
    el("div", { class: "head" }, el("h1", {}, `Step ${step}`), el("nav", { class: "steps", "aria-label": "Steps" },
        go(steps[place - 1], "← earlier", "["), go(steps[place + 1], "later →", "]"))),
    facts(
      ["reward", `${number(total.mean)} ± ${number(total.half, 2)}`],
      ["rollouts", `${number(members.length)} in ${groups.length} groups`],
      ["groups with signal", `${kinds["With signal"].length} of ${groups.length}`],
      ["tokens", `${short(sum("sampled"))}, ${percent(sum("taught") / sum("sampled"))} taught`],
      ["cut off", percent(members.filter((one) => one.finish === "length").length / members.length)],
    ),
    Object.entries(kinds).filter(([, own]) => own.length).map(([title, own]) => el("section", {},
      el("h2", {}, title, el("span", { class: "faint count" }, ` ${own.length}`)),
      heads("prompt", "rewards", "mean", "spread", "length"),
      el("ul", { class: "groups" }, own.sort((a, b) => spread(b) - spread(a)).map((group) => el("li", {},
        el("a", { href: link(run.index, "group", group[0].cluster) },
          said(oneLine(group[0].prompt, 150), { class: "what" }),
          rewardStrip(group, low, high),
          el("span", { class: "num" }, number(mean(group.map((one) => one.reward).filter(Number.isFinite)), 3)),
          el("span", { class: "num faint" }, `± ${number(spread(group), 2)}`),
          el("span", { class: "num faint less" }, `${short(mean(group.map((one) => one.length)))} tokens`))))))),
    Object.keys(line).length ? el("details", {}, el("summary", {}, "Metrics of this step"), settingsTable(Object.entries(line).sort()))
        : null,
    el("details", {}, el("summary", {}, `All ${members.length} rollouts`), rolloutTable(members)),
  ];
}

/** A table of names and values; `columns` head it where there are several values. */
export const settingsTable = (entries, columns = null) =>
  el("div", { class: "scroll" }, el("table", { class: "settings" },
    columns ? el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col" }, said(name))))) : null,
    el("tbody", {}, entries.map(([name, ...values]) =>
    el("tr", {}, el("th", { scope: "row" }, name), values.map((value) =>
      el("td", {}, said(value === null || value === undefined ? "unset" : typeof value === "object" ? JSON.stringify(value)
          : typeof value === "number" ? number(value, 5) : value))))))));

// ---- a group -----------------------------------------------------------------------------------------------------

/** Messages as text, each foldable; what the policy is not shown at length is folded. */
export function transcript(value, role, open = true) {
  return el("div", { class: "transcript" }, messagesOf(value, role).map((message) => el("details", { class: "message",
      open: open && (message.text.length < 4000 || !message.role.startsWith("tool")) },
    el("summary", {}, said(message.role || "text"), faint(` ${number(message.text.length)} characters`)),
    message.text ? el("pre", {}, said(message.text)) : null,
    message.calls.map((call) => el("pre", { class: "call" }, "→ ",
        said(`${call?.name ?? "call"}(${typeof call?.arguments === "string" ? call.arguments : JSON.stringify(call?.arguments ?? {})})`))))));
}

/** Parts of a completion that are compared with others': tokens, or words where no tokens are on record. */
export function partsOf(rollout) {
  if (!rollout.tokens) {
    const words = plainText(rollout.completion).match(/\s*\S+|\s+/g) ?? [];
    return { keys: words, text: (i) => visible(words[i]) };
  }
  const ids = numbersOf(rollout.tokens.ids, Int32Array);
  const piece = (i) => rollout.tokens.pieces[ids[i]];
  const texts = new Map();
  const bytes = (one) => (Array.isArray(one) ? one : [...new TextEncoder().encode(one)]);
  return {
    keys: ids,
    text: (i) => {
      if (typeof piece(i) === "string") {
        if (!texts.has(ids[i])) texts.set(ids[i], visible(piece(i)));
        return texts.get(ids[i]);
      }
      let [first, last] = [i, i];
      while (first > 0 && Array.isArray(piece(first - 1)) && i - first < 4) first--;
      while (last < ids.length - 1 && Array.isArray(piece(last + 1)) && last - i < 4) last++;
      const whole = new TextDecoder().decode(new Uint8Array(Array.from({ length: last - first + 1 },
          (_, k) => bytes(piece(first + k))).flat()));
      return whole.includes("�") ? piece(i).map((byte) => `⟨${byte.toString(16).toUpperCase()}⟩`).join("") : i === last ? visible(whole)
          : "⋅";
    },
  };
}

const AFTER = 90; // parts shown after the one where a completion leaves the others

/** Completions in the order of their beginnings, each dim as far as it is the one above. */
async function aligned(members) {
  const whole = await Promise.all(members.map((one) => get(`rollout/${one.run}/${one.id}`)));
  const rows = members.map((one, i) => ({ one, ...partsOf(whole[i]) }));
  const compare = (a, b) => {
    for (let i = 0; i < Math.min(a.keys.length, b.keys.length); i++) if (a.keys[i] !== b.keys[i]) return a.keys[i] < b.keys[i] ? -1 : 1;
    return a.keys.length - b.keys.length;
  };
  const common = (a, b) => {
    let i = 0;
    while (i < a.keys.length && i < b.keys.length && a.keys[i] === b.keys[i]) i++;
    return i;
  };
  rows.sort(compare);
  const all = rows.length > 1 ? common(rows[0], rows.at(-1)) : 0;
  const list = el("ol", { class: "aligned" });
  const dense = (row, i) => row.text(i).replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  const joined = (row, from, to) => Array.from({ length: Math.max(0, to - from) }, (_, i) => dense(row, from + i)).join("");
  if (all) list.append(el("li", { class: "shared" }, faint(`all begin with ${all} equal ${whole[0].tokens ? "tokens" : "words"}: `),
      said(joined(rows[0], Math.max(0, all - 60), all))));
  rows.forEach((row, i) => {
    const leave = i ? Math.max(common(row, rows[i - 1]), all) : all;
    const same = i > 0 && leave === row.keys.length && leave === rows[i - 1].keys.length;
    const from = Math.max(all, leave - 14);
    const end = Math.min(row.keys.length, leave + AFTER);
    list.append(el("li", {},
      el("a", { href: link(row.one.run, "rollout", row.one.id, ...(leave < row.keys.length && whole[0].tokens ? ["t", leave] : [])) },
        el("span", { class: "side" }, el("b", {}, number(row.one.reward)), advantage(row.one.advantage)),
        el("span", { class: "line" },
          leave > all ? el("span", { class: "as-above" }, from > all ? `⋯${from - all} ` : null, said(joined(row, from, leave))) : null,
          same ? faint(" the same again") : null,
          leave < row.keys.length ? el("mark", {}, said(dense(row, leave))) : null,
          said(joined(row, leave + 1, end)),
          end < row.keys.length ? faint(` … ${number(row.keys.length - end)} more`) : null,
          row.one.finish !== "stop" ? el("span", { class: "chip warn" }, row.one.finish.replace("_", " ")) : null))));
  });
  return { list, whole };
}

const groupFacts = (members) => facts(
  ["reward", `${number(mean(members.map((one) => one.reward).filter(Number.isFinite)))} ± ${number(spread(members), 2)}`],
  ["rollouts", members.length],
  ["mean length", `${short(mean(members.map((one) => one.length)))} tokens`],
  ["fates", [...groupBy(members, (one) => one.fate)].map(([fate, own]) => `${own.length} ${fate}`).join(", ")],
);

/** The seats of each game side by side: whom a rollout played with. */
function games(members, whole) {
  if (!members.some((one) => one.role)) return null;
  const seats = members.map((one, i) => ({ one, completion: whole[i].completion }));
  const seat = ({ one, completion }) => el("div", {}, el("p", {}, el("b", {}, said(one.role || "no role")), faint(` reward ${number(one.reward)} `),
    fateChip(one), " ", el("a", { href: link(one.run, "rollout", one.id) }, "tokens")), transcript(completion, "assistant"));
  return el("section", { class: "pairs" }, el("h2", {}, "Games"), [...groupBy(seats, ({ one }) => one.game)].sort(([a], [b]) => a - b)
    .map(([game, own], i) => el("details", { open: i < 2 }, el("summary", {}, `Game ${game}`,
      faint(` ${own.map(({ one }) => `${one.role} ${number(one.reward)}`).join(", ")}`)), el("div", { class: "pair" }, own.map(seat)))));
}

export async function groupView(run, cluster) {
  const members = run.groups.get(cluster);
  if (!members) return [el("h1", {}, "Group"), el("p", {}, "This group is not in the record.")];
  const { list, whole } = await aligned(members);
  const first = whole[0];
  const same = runs.filter((other) => other !== run && twinsOf(other, members).length);
  return [
    el("h1", {}, `Group of row ${members[0].row}`, faint(said(oneLine(members[0].prompt, 120)))),
    groupFacts(members),
    same.map((other) => el("p", {}, el("a", { href: link(run.index, "pair", cluster, other.index) },
        `Beside the same prompt's completions in ${other.name} →`))),
    el("section", {}, el("h2", {}, "Prompt"), transcript(first.prompt, "prompt")),
    Object.keys(first.data).length ? el("details", {}, el("summary", {}, "Other columns of the row"),
        settingsTable(Object.entries(first.data))) : null,
    games(members, whole),
    el("section", {}, el("h2", {}, "Completions, up to where they part"), list),
    el("section", {}, el("h2", {}, "One by one"), rolloutTable(members, "", "Rollouts of the group", true)),
  ];
}

/** Rollouts of another run at the same step and row, if any. */
export const twinsOf = (other, members) =>
  (other.steps?.get(members[0].step) ?? []).filter((one) => one.row === members[0].row);

export async function pairView(run, cluster, other) {
  const members = run.groups.get(cluster);
  const sides = await Promise.all([members, twinsOf(other, members)].map(aligned));
  return [
    el("h1", {}, `Row ${members[0].row} in two runs`),
    el("section", {}, transcript(sides[0].whole[0].prompt, "prompt")),
    el("div", { class: "pair" }, [[run, members], [other, twinsOf(other, members)]].map(([one, own], i) => el("section", {},
      el("h2", {}, el("i", { class: "dot", style: { background: colourOf(one.index) } }), one.name), groupFacts(own), sides[i].list))),
  ];
}
