// A run: where to look, curves, cost, phases, findings and settings; several runs in the same charts, with paired differences.

import { curves, lanes, legend, stacked } from "./charts.js";
import {
  colourOf, distinct, el, faint, get, groupBy, imageAddress, interval, isExport, link, mean, messagesOf, number, oneLine, percent, replays, rewardNames, runs, said, seconds, short,
  signed, stepsOf,
} from "./core.js";
import { SORTS, fateChip, heads, rolloutLink, settingsTable, sorted, transcript, twinsOf } from "./lists.js";

const PHASES = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5"];

/** A point for each step: mean of a value of its rollouts, with an interval over groups, within the values that there are. */
function ofSteps(run, value) {
  const all = run.rollouts.map((one) => value(one) ?? NaN).filter(Number.isFinite);
  const lowest = all.reduce((least, one) => Math.min(least, one), Infinity);
  const highest = all.reduce((most, one) => Math.max(most, one), -Infinity);
  return stepsOf(run).map(([step, members]) => {
    const { mean: y, half, count } = interval(members.map((one) => value(one) ?? NaN), members.map((one) => one.cluster));
    return { x: step, y: count ? y : NaN, half, low: Math.max(y - half, lowest), high: Math.min(y + half, highest) };
  });
}
const shareOfGroups = (run, holds) =>
  stepsOf(run).map(([step, members]) => {
    const groups = [...groupBy(members, (one) => one.cluster).values()];
    return { x: step, y: groups.filter(holds).length / groups.length };
  });
const ofLogs = (run, name) => run.metrics.filter((one) => Number.isFinite(one[name])).map((one) => ({ x: one.step, y: one[name] }));
const either = (points, others) => (points.some((one) => Number.isFinite(one.y)) ? points : others);
const unlessZero = (points) => (points.some((one) => one.y) ? points : []);
const ownMetrics = (run) => (run.meanings ?? []).filter(([name, meaning]) => !meaning && !name.startsWith("eval_")).map(([name]) => name);
const trained = (members) => members.some((one) => one.fate === "trained");

const asTitle = (name) => { const words = name.replace(/[/_]/g, " "); return words[0].toUpperCase() + words.slice(1); };

/** Curves of every set that was evaluated: shares with their intervals, and rewards. */
function evaluations(run, others) {
  const all = [run, ...others];
  const keys = new Map(all.flatMap((one) => one.evaluations ?? []).map((curve) => [`${curve.set}/${curve.metric}`, curve]));
  if (!keys.size) return null;
  return el("section", {}, el("h2", {}, "Evaluations"), el("div", { class: "charts" }, [...keys].map(([key, { set, metric }]) => {
    const own = all.map((one) => ({ name: one.name, colour: colourOf(one.index),
        points: (one.evaluations ?? []).find((curve) => `${curve.set}/${curve.metric}` === key)?.points ?? [] }));
    const name = metric.replace(/^rewards\/(.*)\/mean$/, "$1").replace(/_reward$/, "").replaceAll("_", " ");
    return curves({ title: metric.includes("@") ? name : asTitle(name),
        note: [set, metric.includes("@") && "95% interval over prompts"].filter(Boolean).join(", "), zero: true,
        series: own.filter((one) => one.points.length) });
  })));
}

function charts(run, others, open) {
  const all = [run, ...others];
  const series = (points) => all.map((one) => ({ name: one.name, colour: colourOf(one.index), points: points(one) })).filter((one) =>
      one.points.some((point) => Number.isFinite(point.y)));
  const names = rewardNames(run);
  const wanted = [
    ["Reward", "mean, 95% interval over prompts", (one) => ofSteps(one, (rollout) => rollout.reward), { wide: true }],
    ...(names.length > 1 ? names.map((name) => [name.replace(/_reward$/, "").replaceAll("_", " "), "",
        (one) => ofSteps(one, (rollout) => rollout.rewards[name])]) : []),
    ["Groups with signal", "share", (one) => shareOfGroups(one, trained), { zero: true }],
    ...labelled(run).map(([kind, label]) => [`Reward of ${label}`, `${kind === "roles" ? "role" : "source"}, mean`, (one) =>
        ofLogs(one, `${kind}/${label}/reward`)]),
    ["Completion length", "tokens", (one) => ofSteps(one, (rollout) => rollout.length), { zero: true }],
    ["Cut off", "share", (one) => ofSteps(one, (rollout) => Number(rollout.finish === "length")), { zero: true }],
    ["Entropy", "nats per token", (one) => either(ofSteps(one, (rollout) => rollout.entropy), ofLogs(one, "entropy"))],
    ["Distinct completions", "share, within a group", (one) => either(ofLogs(one, "completions/distinct"),
        stepsOf(one).map(([step, members]) => ({ x: step, y: distinct(members) }))), { zero: true }],
    ["Distinct answers to different prompts", "share", (one) => ofLogs(one, "completions/distinct_across_prompts"), { zero: true }],
    ["Most common answer", "share", (one) => ofLogs(one, "completions/most_common"), { zero: true }],
    ["Largest gap to the engine", "nats, of any token", (one) => (replays(one) ? [] : stepsOf(one)).map(([step, members]) =>
        ({ x: step, y: Math.max(...members.map((rollout) => Math.abs(rollout.gap ?? NaN)).filter(Number.isFinite),
        -Infinity) })).filter((point) => point.y > -Infinity), { zero: true }],
    ["Clipped tokens", "share", (one) => ofSteps(one, (rollout) => (Number.isFinite(rollout.clipped) ? rollout.clipped / Math.max(1,
        rollout.sampled) : NaN)), { zero: true }],
    ["Log-prob minus reference", "nats per token", (one) => ofSteps(one, (rollout) => rollout.drift)],
    ["KL to the reference", "nats per token", (one) => ofLogs(one, "kl"), { zero: true }],
    ["Clipped ratios", "share", (one) => unlessZero(ofLogs(one, "clip_ratio/region_mean")), { zero: true }],
    ["Turns", "per rollout", (one) => (one.rollouts.some((rollout) => rollout.turns > 1) ? ofSteps(one, (rollout) => rollout.turns) : []),
        { zero: true }],
    ["Tool calls", "per rollout", (one) => unlessZero(ofSteps(one, (rollout) => rollout.calls)), { zero: true }],
    ["Failed calls", "share", (one) => unlessZero(ofLogs(one, "tools/failure_frequency")), { zero: true }],
    ["Failed rollouts", "share", (one) => unlessZero(ofSteps(one, (rollout) => Number(rollout.fate === "failed"))), { zero: true }],
    ["Loss", "", (one) => ofLogs(one, "loss")],
    ["Gradient norm", "", (one) => ofLogs(one, "grad_norm"), { zero: true }],
    ["Learning rate", "", (one) => ofLogs(one, "learning_rate"), { zero: true }],
    ["Memory", "GB", (one) => ofLogs(one, "memory_gb"), { zero: true }],
    ...ownMetrics(run).map((name) => [name, "your own metric", (one) => ofLogs(one, name)]),
  ];
  return el("div", { class: "charts" }, wanted.map(([title, note, points, more = {}]) => {
    const drawn = series(points);
    return drawn.length ? curves({ title, note, series: drawn, onStep: open, ...more }) : null;
  }));
}

/** Kinds and names of labels, such as roles, that rewards are logged by. */
const labelled = (run) => [...new Set(run.metrics.flatMap((line) => Object.keys(line)))].map((name) =>
    name.match(/^(roles|sources)\/(.+)\/reward$/)?.slice(1)).filter(Boolean);

/** Seconds of phases by step, and the latest rollout batch; what worked while another phase ran is told beside its phase. */
function phases(run) {
  const names = [...new Set(run.metrics.flatMap((line) => Object.keys(line)).filter((name) => name.startsWith("phase/")))];
  if (!names.length) return null;
  const columns = run.metrics.filter((line) => names.some((name) => name in line)).map((line) =>
      ({ x: line.step, parts: new Map(names.map((name) => [name, line[name] ?? 0])) }));
  const total = (name) => columns.reduce((sum, { parts }) => sum + parts.get(name), 0);
  const overlap = (name) => run.metrics.reduce((sum, line) => sum + (line[name.replace("phase/", "overlap/")] ?? 0), 0);
  names.sort((a, b) => total(b) - total(a));
  const all = names.reduce((sum, name) => sum + total(name), 0);
  const colours = (name) => `var(${PHASES[Math.max(names.indexOf(name), 0) % PHASES.length]})`;
  const every = Math.ceil(columns.length / 200);
  const few = columns.filter((_, i) => i % every === 0);
  return el("section", {}, el("h2", {}, "Time"),
    el("div", { class: "chart wide" }, stacked(few, names, colours),
      legend(names.map((name) => ({ name: name.replace("phase/", ""), colour: colours(name),
          value: `${seconds(total(name))}, ${percent(total(name) / all)}${overlap(name) ? `; ${seconds(overlap(name))} overlapped` : ""}` })))),
    run.timeline ? el("div", { class: "chart wide" }, el("h3", {}, "The latest rollout batch"),
      lanes(run.timeline, (name) => colours(`phase/${name}`))) : null);
}

/** Completions of the same prompts early and late, side by side; they are read once the page is there. */
function pairs(run) {
  const section = el("section", { class: "pairs" });
  const show = (found) => {
    if (!found.length) return;
    const both = found.some((pair) => pair.before);
    const side = (row) => row ? el("div", {}, el("p", {}, el("b", {}, `step ${row.step}`), faint(` reward ${number(row.reward)} `), fateChip(row)),
      (row.image_files ?? []).map((name, i) => {
        const image = el("img", { alt: `image ${i + 1} that the model was shown`, loading: "lazy" });
        imageAddress(run.index, name).then((address) => (image.src = address)).catch(() => image.remove());
        return image;
      }),
      transcript(row.completion, "assistant")) : null;
    section.replaceChildren(el("h2", {}, both ? "Before and after" : "Latest completions"), ...found.map((pair, i) => el("details", { open: i < 2 },
      el("summary", {}, said(oneLine(lastMessage(pair.prompt), 150))),
      el("div", { class: both ? "pair" : "" }, both ? side(pair.before) : null, side(pair.after)))));
  };
  if (run.pairs) show(run.pairs);
  else get(`pairs/${run.index}`).then((found) => show((run.pairs = found))).catch(() => {});
  return section;
}
const lastMessage = (prompt) => (Array.isArray(prompt) ? messagesOf(prompt.slice(-1), "user")[0]?.text ?? "" : String(prompt ?? ""));

/** All metrics with their meanings. */
function metrics(run) {
  const known = (run.meanings ?? []).map(([name, meaning]) => [name, meaning, ofLogs(run, name).map((one) => one.y)]).filter(([, , values]) => values.length);
  if (!known.length) return null;
  const zeros = known.filter(([, , values]) => !values.some(Boolean)).map(([name]) => name);
  const rows = known.filter(([, , values]) => values.some(Boolean)).map(([name, meaning, values]) => [name, number(values[0]), number(values.at(-1)),
    number(values.reduce((a, b) => Math.min(a, b))), number(values.reduce((a, b) => Math.max(a, b))), meaning]);
  return el("section", {}, el("h2", {}, "Metrics"), el("details", {}, el("summary", {}, `All ${known.length}, with what they mean`),
    settingsTable(rows, ["metric", "first", "last", "lowest", "highest", "meaning"]),
    zeros.length ? el("p", { class: "faint" }, `0 in all logs: ${zeros.join(", ")}.`) : null));
}

/** The change of an evaluation's value from its first to its last, with the interval of the last. */
function evaluated(tile, set, metric, points) {
  const [first, last] = [points[0], points.at(-1)];
  const value = metric.includes("@") ? percent : (one) => number(one, 2);
  const range = Number.isFinite(last.low) ? `${value(last.low)} to ${value(last.high)}` : "";
  return tile(`${metric.includes("@") ? metric : `Evaluated ${metric}`}${set ? ` of ${set}` : ""}`,
      points.length > 1 ? [value(first.y), faint(" → "), value(last.y)] : value(last.y),
      [range, `${points.length === 1 ? "once, at" : "up to"} step ${last.x}`].filter(Boolean).join(", "));
}

function tiles(run) {
  const { reward, seconds: time, core_seconds: cores } = run.totals ?? {};
  const sampled = run.rollouts.reduce((sum, one) => sum + one.sampled, 0);
  const taught = run.rollouts.reduce((sum, one) => sum + one.taught, 0);
  const groups = [...run.groups.values()];
  const tile = (name, value, note) => el("div", {}, el("dt", {}, name), el("dd", {}, value), note ? el("small", {}, note) : null);
  return el("dl", { class: "tiles" },
    reward ? tile("Reward", [number(reward[0], 2), faint(" → "), number(reward[1], 2)], "first and last tenth of the logs") : null,
    (run.evaluations ?? []).filter(({ metric }, i, all) => metric.includes("@")
        || (metric === "reward" && !all.some((one) => one.metric.includes("@")))).slice(0, 2)
      .map(({ set, metric, points }) => evaluated(tile, set, metric, points)),
    tile("Tokens sampled", short(sampled), `${percent(taught / sampled)} taught something`),
    tile("Groups with signal", percent(groups.filter(trained).length / groups.length),
        `${number(groups.filter(trained).length)} of ${number(groups.length)}`),
    Number.isFinite(time) ? tile("Time", seconds(time), `since the first log, without pauses; ${number(Math.round(cores))} core-seconds`)
        : null,
    memory(run, tile),
    tile("Rollouts", number(run.rollouts.length),
        `${number(run.rollouts.filter((one) => one.finish === "length").length)} cut off, ${number(run.rollouts.filter((one) => one.fate === "failed").length)} failed`));
}

/** Memory as it was measured, next to what was planned, and the time of the first step. */
function memory({ measured, metrics }, tile) {
  const logged = metrics.reduce((most, line) => Math.max(most, line.memory_gb ?? 0), 0);
  const most = Math.max(logged, (measured?.peak_bytes ?? 0) / 1e9);
  if (!most) return null;
  return tile("Memory at most", `${number(most, 2)} GB`, [measured?.planned_bytes && `${number(measured.planned_bytes / 1e9, 2)} GB were planned`,
    measured && `first step ${seconds(measured.seconds)}`].filter(Boolean).join("; "));
}

/** Links to what one looks for first; the largest gap is one click away. */
function lookAt(run) {
  const sorts = ["gap", "clipped", "ratio", "odd", "longest", "entropy"].filter((sort) => sort !== "gap" || !replays(run));
  const found = sorts.map((sort) => [sort, sorted(run.rollouts, sort)[0]]).filter(([sort,
      one]) => one && (sort !== "odd" || one.odd > 0.5));
  return el("nav", { class: "look", "aria-label": "Where to look" },
    found.map(([sort, one]) => el("a", { href: rolloutLink(one, sort) }, el("small", {}, SORTS[sort][0]), el("b", {}, SORTS[sort][2](one)),
        faint(`step ${one.step}`))),
    el("a", { href: link(run.index, "rollouts"), class: "all" }, el("small", {}, "All rollouts"), el("b", {}, number(run.rollouts.length)),
        faint("search, filter, sort")));
}

function findings(run) {
  const list = Array.isArray(run.findings) ? run.findings : run.findings?.findings ?? [];
  if (!list.length) return el("p", {}, faint("No findings on record. "), el("code", {}, `covey doctor ${run.folder}`), faint(" looks for them."));
  return el("section", { "aria-label": "Findings" }, el("h2", {}, "Findings"), el("ul", { class: "findings" },
      list.map((one) => el("li", { class: ["error", "warning"].find((level) => level === one.level) },
    el("p", {}, el("span", { class: `chip ${one.level === "error" ? "bad" : one.level === "warning" ? "warn" : "flat"}` },
        String(one.level ?? "note")), el("b", {}, said(one.title ?? one.cause ?? "")),
        el("code", { class: "faint" }, String(one.code ?? ""))),
    ["evidence", "fix", "proof"].filter((name) => one[name]).map((name) => el("p", {}, faint(`${name[0].toUpperCase()}${name.slice(1)}: `),
        said(typeof one[name] === "string" ? one[name] : JSON.stringify(one[name]))))))));
}

function settings(run) {
  const body = el("div");
  const parts = { provenance: "Where this run came from", parts: "Model, data and rewards", changed: "Settings that differ from their defaults",
      settings: "All settings", versions: "Versions", rewards: "Rewards", dataset: "Dataset", engine: "Engine", model: "Model" };
  const show = (words) => body.replaceChildren(...Object.entries(parts).map(([part, name]) => {
    const rows = Object.entries(run.described[part] ?? {}).filter(([, value]) => value !== null && String(value) !== "").sort().filter(([key]) => key.includes(words));
    return rows.length ? el("div", {}, el("h3", {}, name), settingsTable(rows)) : "";
  }));
  show("");
  const details = el("details", {}, el("summary", {}, "Show"), body);
  return el("section", {}, el("h2", {}, "Settings"),
    el("label", { class: "inline" }, "Find",
        el("input", { type: "search", oninput: (event) => { details.open = true; show(event.target.value.trim()); } })),
    details);
}

const PLACES = ["output_dir", "run_name", "logging_dir", "hub_model_id"]; // settings that differ in any two runs

/** What differs between runs, in front of everything else: a setting in each row. */
function differences(all) {
  const rows = ["settings", "model", "rewards", "dataset", "engine", "versions"].flatMap((part) => {
    const names = [...new Set(all.flatMap((one) => Object.keys(one.described[part] ?? {})))].filter((name) => !PLACES.includes(name)).sort();
    return names.map((name) => [part === "settings" ? name : `${part}: ${name}`, ...all.map((one) => one.described[part]?.[name])]);
  }).filter(([, ...values]) => new Set(values.map((value) => JSON.stringify(value))).size > 1);
  if (!rows.length) return el("p", { class: "notice" }, "No setting differs between these runs.");
  return el("section", { "aria-label": "What differs" }, el("h2", {}, "What differs"), settingsTable(rows, ["setting", ...all.map((one) => one.name)]));
}

/** True where rollouts have the same texts, rewards and lengths. */
const isEqual = (pairs) => pairs.every(([one, two]) => one.text === two.text && one.reward === two.reward && one.length === two.length);

/** Differences between two runs over the rollouts of the same step, row and place in the group. */
function compared(run, other) {
  const values = { reward: (one) => one.reward, tokens: (one) => one.length, entropy: (one) => one.entropy, "cut off": (one) =>
      Number(one.finish === "length"), "log-prob": (one) => one.logprob };
  const pairs = [];
  const prompts = [];
  for (const members of run.groups.values()) {
    const there = new Map(twinsOf(other, members).map((one) => [one.sample, one]));
    const own = members.filter((one) => there.has(one.sample)).map((one) => [one, there.get(one.sample)]);
    if (!own.length) continue;
    pairs.push(...own);
    prompts.push({ members, by: mean(own.map(([one, two]) => (two.reward ?? NaN) - (one.reward ?? NaN)).filter(Number.isFinite)) });
  }
  if (!pairs.length) return el("p", { class: "notice" },
      `${other.name} has no rollouts of the same steps and rows, so there is nothing to pair.`);
  const there = [...other.rollouts].length - pairs.length;
  if (isEqual(pairs)) return el("p", { class: "notice" },
      `${run.name} and ${other.name} are equal: all ${number(pairs.length)} pairs of completions have the same text and reward`
      + (there ? `; ${number(there)} of ${other.name} have no counterpart.` : "."));
  const difference = (value, list) => interval(list.map(([one, two]) => (value(two) ?? NaN) - (value(one) ?? NaN)),
      list.map(([one]) => one.cluster));
  const byStep = [...groupBy(pairs, ([one]) => one.step)].sort(([a], [b]) => a - b);
  const rows = Object.entries(values).map(([name, value]) => [name, value, difference(value, pairs)]).filter(([, , found]) => found.count);
  const differ = prompts.filter(({ by }) => by).sort((a, b) => Math.abs(b.by) - Math.abs(a.by));
  return el("div", {},
    el("div", { class: "charts" }, curves({ title: `Reward: ${other.name} minus ${run.name}`, note: "paired, 95% interval over prompts",
        wide: true, zero: true,
        series: [{ name: "difference", colour: colourOf(other.index),
        points: byStep.map(([step, own]) => { const found = difference(values.reward, own); return { x: step, y: found.mean,
        half: found.half }; }) }] })),
    el("div", { class: "scroll" }, el("table", { class: "numbers" },
        el("thead", {}, el("tr", {}, ["", run.name, other.name, "difference", "pairs"].map((name) => el("th", { scope: "col" }, name)))),
      el("tbody", {}, rows.map(([name, value, found]) => el("tr", {}, el("th", { scope: "row" }, name),
        [0, 1].map((side) => el("td", { class: "num" }, number(mean(pairs.map((pair) => value(pair[side])).filter(Number.isFinite))))),
        el("td", { class: `num ${Math.abs(found.mean) > found.half ? "sure" : ""}` }, `${signed(found.mean)} ± ${number(found.half, 2)}`),
            el("td", { class: "num" }, number(found.count))))))),
    el("h3", {}, differ.length ? "Prompts whose rewards differ most" : "No prompt's reward differs"),
    differ.length ? heads("prompt", "step", `${other.name} − ${run.name}`) : null,
    el("ul", { class: "groups" }, differ.slice(0, 12).map(({ members, by }) => el("li", {},
        el("a", { href: link(run.index, "pair", members[0].cluster, other.index) },
      said(oneLine(members[0].prompt, 150), { class: "what" }), el("span", { class: "num faint" }, `step ${members[0].step}`),
          el("span", { class: `num ${by > 0 ? "good" : "bad"}` }, signed(by, 2)))))));
}

export function runView(run) {
  const others = runs.filter((other) => other !== run);
  const { settings: given = {}, model = {} } = run.described ?? {};
  if (!run.rollouts.length) return [el("h1", {}, run.name),
      el("p", { class: "notice" }, run.evaluations?.length || isExport ? "No step of training is on record."
        : "No step is on record yet. The page follows the run."), evaluations(run, others), pairs(run), settings(run)];
  const open = (step) => { if (run.steps.has(step)) location.hash = link(run.index, "step", step); };
  const about = [model.path?.split("/").at(-1), given.loss_type && `loss ${given.loss_type}`,
      `${number(run.rollouts.length)} rollouts of ${run.steps.size} steps`].filter(Boolean);
  return [
    el("h1", {}, said(others.length ? [run, ...others].map((one) => one.name).join(" and ") : run.name)),
    others.length ? differences([run, ...others]) : null,
    others.length ? el("section", {}, el("h2", {}, `Paired with ${run.name}`), others.map((other) => compared(run, other))) : null,
    others.length ? el("h2", {}, el("i", { class: "dot", style: { background: colourOf(run.index) } }), said(run.name)) : null,
    el("p", { class: "faint about" }, said(about.join(" · ")), " · ", el("span", { class: `live ${run.live}` },
        { running: "running", ended: "ended", stopped: "no news" }[run.live]),
        ` · last written ${new Date(run.written * 1000).toLocaleString()}`),
    run.leftOut ? el("p", { class: "notice" }, `Of this long run every few rollout batches are in this file, ${number(run.leftOut)} files are not; covey view `
        + `${run.folder} shows all. Curves of logs are of the whole run.`) : null,
    findings(run),
    lookAt(run),
    tiles(run),
    evaluations(run, others),
    pairs(run),
    el("section", {}, el("h2", {}, "Curves", el("span", { class: "faint count" }, " a click opens the step")), charts(run, others, open)),
    phases(run),
    metrics(run),
    el("section", {}, el("h2", {}, "Steps"), el("ul", { class: "chips" }, stepsOf(run).map(([step]) => step).map((step) =>
        el("li", {}, el("a", { href: link(run.index, "step", step) }, String(step)))))),
    settings(run),
  ];
}
