// The page: addresses, the bar at the top, keys, and following a run that continues.

import { NARROW } from "./charts.js";
import { colourOf, el, isExport, link, refresh, runs, said, whole } from "./core.js";
import { groupView, listView, pairView, stepView } from "./lists.js";
import { runView } from "./run.js";
import { studyView } from "./study.js";
import { rolloutView } from "./tokens.js";

const EVERY = 3000; // milliseconds between looks at the runs
const main = document.getElementById("main");
let turn = 0;

/** `#/run/view/...?query` in parts; without any it is the study, where there is one. */
function place() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const [run = "0", view = "", ...rest] = path.split("/").map(decodeURIComponent);
  const isStudy = !path && whole.study;
  return { run: isStudy ? null : runs[Number(run)], view: isStudy ? "study" : view, rest, query: new URLSearchParams(query) };
}

async function viewOf({ run, view, rest, query }) {
  if (view === "study") return studyView();
  if (view === "rollouts") return listView(run, query);
  if (view === "step") return stepView(run, Number(rest[0]));
  if (view === "group") return groupView(run, rest[0]);
  if (view === "pair") return pairView(run, rest[0], runs[Number(rest[1])]);
  if (view === "rollout") return rolloutView(run, rest[0], rest[1] === "t" ? Number(rest[2]) : null, query.get("by"));
  return runView(run);
}

async function render(keep = false) {
  const mine = ++turn;
  const here = place();
  if (!here.run && here.view !== "study") return main.replaceChildren(el("p", { class: "notice" }, "This run is being read, or there is none of this number."));
  const scroll = scrollY;
  let nodes;
  try {
    nodes = await viewOf(here);
  } catch (error) {
    nodes = [el("h1", {}, "This cannot be shown"), el("p", { class: "notice bad" }, said(error.message))];
  }
  if (mine !== turn) return;
  main.replaceChildren(...[nodes].flat(3).filter(Boolean));
  main.dataset.view = here.view || "run";
  bar(here);
  document.title = `${here.run ? here.run.name : whole.study.name}${here.run && here.view ? ` · ${here.view} ${here.rest[0] ?? ""}` : ""} · covey`;
  scrollTo(0, keep ? scroll : 0);
  if (!keep) main.focus({ preventScroll: true });
}

function bar({ run, view, rest }) {
  const rollout = view === "rollout" ? run.rollouts.find((one) => one.id === rest[0]) : null;
  const members = run?.groups?.get(rollout?.cluster ?? rest[0]);
  const step = view === "step" ? Number(rest[0]) : members?.[0].step;
  const crumbs = [
    whole.study ? ["#", "study"] : null,
    run ? [link(run.index, ""), whole.study ? run.name : "run"] : null,
    view === "rollouts" ? [null, "rollouts"] : null,
    run && step !== undefined && view ? [link(run.index, "step", step), `step ${step}`] : null,
    members ? [link(run.index, "group", members[0].cluster), `row ${members[0].row}`] : null,
    rollout ? [null, `rollout ${members.indexOf(rollout) + 1}`] : null,
  ].filter(Boolean);
  document.getElementById("bar").replaceChildren(
    ...[el("a", { class: "brand", href: whole.study ? "#" : link(0, "") }, "covey"),
    runs.length > 1 && (!whole.study || run)
      ? el("nav", { class: "runs", "aria-label": "Runs" },
          runs.map((one) => el("a", { href: link(one.index, ""), "aria-current": one === run ? "true" : null },
          el("i", { class: "dot", style: { background: colourOf(one.index) } }), said(one.name))))
      : null,
    el("nav", { class: "crumbs", "aria-label": "Place" },
        crumbs.map(([address, text], i) => [i ? el("span", { class: "faint", "aria-hidden": "true" }, " / ") : null,
        address && i < crumbs.length - 1 ? el("a", { href: address }, text) : el("span", { "aria-current": "page" }, text)])),
    !run ? null : el("form", { role: "search", onsubmit: (event) =>
        { event.preventDefault(); const words = new FormData(event.target).get("q"); location.hash = link(run.index, "rollouts")
        + (words ? `?${new URLSearchParams({ q: words })}` : ""); } },
      el("input", { type: "search", name: "q", placeholder: "Search completions", "aria-label": "Search completions",
          "aria-keyshortcuts": "/" })),
    el("button", { class: "plain", title: "Light or dark (t)", "aria-label": "Light or dark", onclick: theme }, "◐"),
    el("button", { class: "plain", title: "Keys (?)", "aria-label": "Keys", onclick: help }, "?")].filter(Boolean));
}

const stored = (value) => { try { return value === undefined ? localStorage.getItem("covey-theme") : localStorage.setItem("covey-theme",
    value); } catch { return null; } };
function theme() {
  const root = document.documentElement;
  const dark = (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  root.dataset.theme = dark ? "light" : "dark";
  stored(root.dataset.theme);
}

const KEYS = [["/", "search"], ["j, k", "next and previous rollout of a group"], ["g", "the group"], ["[, ]", "earlier and later step"],
    ["n, p", "next and previous token that stands out"], ["← →", "move through tokens"], ["u", "one level up"], ["t", "light or dark"],
    ["?", "this list"]];
function help() {
  const dialog = document.getElementById("help");
  dialog.replaceChildren(el("h2", {}, "Keys"),
      el("dl", { class: "keys" }, KEYS.map(([key, text]) => el("div", {}, el("dt", {}, el("kbd", {}, key)), el("dd", {}, text)))),
      el("form", { method: "dialog" }, el("button", {}, "Close")));
  dialog.showModal();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
  const own = document.querySelector(".reader")?.keys?.[event.key];
  const linked = [...document.querySelectorAll("a[aria-keyshortcuts]")].find((one) => one.getAttribute("aria-keyshortcuts") === event.key);
  if (own) own();
  else if (linked) linked.click();
  else if (event.key === "/") { event.preventDefault(); document.querySelector("#bar input").focus(); }
  else if (event.key === "u") [...document.querySelectorAll(".crumbs a")].at(-1)?.click();
  else if (event.key === "t") theme();
  else if (event.key === "?") help();
});

async function follow() {
  if (!document.hidden)
    try {
      const changed = await refresh();
      document.body.classList.remove("lost");
      const { view } = place();
      if (changed && (view === "" || view === "step" || view === "study") && !document.querySelector("dialog[open]")) await render(true);
    } catch {
      document.body.classList.add("lost");
    }
  setTimeout(follow, EVERY);
}

if (stored()) document.documentElement.dataset.theme = stored();
addEventListener("hashchange", () => render());
NARROW.addEventListener("change", () => render(true));
try {
  await refresh(() => render(true));
  await render();
} catch (error) {
  main.replaceChildren(el("p", { class: "notice bad" }, said(error.message)));
}
if (!isExport) setTimeout(follow, EVERY);
