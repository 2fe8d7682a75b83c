// A study: its table, with a link to each variant's run and buttons for commands, the curves of all variants, and its history.

import { curves } from "./charts.js";
import { colourOf, el, faint, link, runs, said, whole } from "./core.js";

const status = (text) => (document.getElementById("status").textContent = text);
const goesOn = (cells) => /^(running|waiting)/.test(cells[1]);

/** Colour of a variant: that of its run, in whose pages it is the same. */
const colour = (name) => colourOf(Math.max(0, runs.findIndex((one) => one.name === name)));

async function send(command) {
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch("api/command", { method: "POST", headers, body: JSON.stringify(command) });
    return [response.ok, `${command.kind} ${command.name}: ${await response.text()}`];
  } catch (error) {
    return [false, `${command.kind} ${command.name}: not sent: ${error.message}`];
  }
}

/** Ask for what a command needs, then send it; `stop` needs nothing. */
async function ask(kind, name, notice) {
  const command = { kind, name, to: "", changes: "", fresh: false };
  const told = (text) => { notice.textContent = text; status(text); };
  if (kind === "stop") return told((await send(command))[1]);
  const problem = el("p", { role: "status" });
  const dialog = el("dialog", { "aria-label": `${kind} ${name}` });
  const to = el("input", { autocomplete: "off", required: true });
  const changes = el("textarea", { rows: 3, required: kind === "change" });
  const fresh = el("input", { type: "checkbox" });
  dialog.append(el("form", { onsubmit: async (event) => {
    event.preventDefault();
    Object.assign(command, { to: kind === "clone" ? to.value.trim() : "", changes: changes.value, fresh: fresh.checked });
    const [sent, text] = await send(command);
    if (!sent) return (problem.textContent = text);
    dialog.close();
    told(text);
  } }, el("h2", {}, `${kind} ${name}`),
    kind === "clone" ? el("label", {}, "Name of the clone", to) : null,
    el("label", {}, "Settings, a field=value in each line", changes),
    kind === "clone" ? el("label", { class: "inline" }, fresh, "Begin with a new optimizer") : null,
    problem, el("p", {}, el("button", {}, "Send"), " ", el("button", { type: "button", onclick: () => dialog.close() }, "Cancel"))));
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

export function studyView() {
  const { title, head, rows, curves: charts, history, takes_commands: takes, name } = whole.study;
  const notice = el("p", { class: "faint" }, rows.some(goesOn) ? "" : "The study has ended.");
  const row = (cells) => {
    const variant = cells[0].replaceAll("&nbsp;", "").trim();
    const depth = cells[0].split("&nbsp;").length - 1;
    const index = runs.findIndex((one) => one.name === variant);
    const kinds = !takes || !rows.some(goesOn) ? [] : [goesOn(cells) ? "stop" : "resume", "change", "clone"];
    return el("tr", {},
      el("th", { scope: "row", style: { "padding-left": `${0.6 + 0.45 * depth}rem` } }, index < 0 ? said(variant)
        : el("a", { href: link(index, "") }, el("i", { class: "dot", style: { background: colour(variant) } }), said(variant))),
      cells.slice(1).map((cell) => el("td", {}, said(cell))),
      kinds.length ? el("td", { class: "commands" }, kinds.map((kind) =>
        el("button", { "aria-label": `${kind} ${variant}`, onclick: () => ask(kind, variant, notice) }, kind))) : null);
  };
  const series = (points) => Object.entries(points).map(([variant, own]) => ({ name: variant, colour: colour(variant),
      points: own.map(([x, y]) => ({ x, y })) }));
  return [
    el("h1", {}, said(name), faint(title)),
    notice,
    el("div", { class: "scroll" }, el("table", { class: "study" },
      el("thead", {}, el("tr", {}, head.map((cell) => el("th", { scope: "col" }, said(cell))),
        takes && rows.some(goesOn) ? el("th", { scope: "col" }, "commands") : null)), el("tbody", {}, rows.map(row)))),
    charts.length ? el("section", {}, el("h2", {}, "Curves"), el("div", { class: "charts" }, charts.map((chart, i) =>
      curves({ title: chart.title, series: series(chart.series), zero: true, wide: i === 0 })))) : null,
    history.length ? el("section", {}, el("h2", {}, "Interventions"), el("ul", {}, history.map((line) => el("li", {}, said(line))))) : null,
  ];
}
