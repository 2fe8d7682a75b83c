// Page of a study: buttons in each variant's row, which send commands, and the latest table and curves every few seconds.
"use strict";

const dialog = document.querySelector("dialog");
const form = dialog.querySelector("form");
const { to, changes, fresh } = form.elements;
const [status, problem] = document.querySelectorAll("[role=status]");
let command = {}; // the one that the dialog asks about
let shown = ""; // table and curves, as they were sent

async function send() {
  let sent = false, message = "";
  try {
    const headers = { "Content-Type": "application/json" };
    const response = await fetch("command", { method: "POST", headers, body: JSON.stringify(command) });
    [sent, message] = [response.ok, await response.text()];
  } catch (error) {
    message = `not sent: ${error.message}`;
  }
  (dialog.open && !sent ? problem : status).textContent = `${command.kind} ${command.name}: ${message}`;
  if (sent) dialog.close();
}

function ask(kind, name) {
  command = { kind, name, to: "", changes: "", fresh: false };
  if (kind === "stop") return send();
  form.reset();
  problem.textContent = "";
  dialog.querySelector("h2").textContent = `${kind} ${name}`;
  for (const field of [to, fresh]) field.closest("label").hidden = kind !== "clone";
  to.required = kind === "clone";
  changes.required = kind === "change";
  dialog.showModal();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  Object.assign(command, { to: to.value.trim(), changes: changes.value, fresh: fresh.checked });
  send();
});
form.querySelector("[type=button]").addEventListener("click", () => dialog.close());

/** Lead from each variant to its run, and give it the buttons of what can be done with it; none in an ended study. */
function equip(study) {
  const runs = JSON.parse(study.dataset.runs), rows = [...study.querySelectorAll("tbody tr")];
  const goesOn = ({ cells }) => /^(running|waiting)/.test(cells[1].textContent);
  const ended = !rows.some(goesOn);
  if (ended) status.textContent = "The study has ended.";
  for (const { cells } of rows) {
    const name = cells[0].textContent.trim();
    if (runs.includes(name)) {
      const link = Object.assign(document.createElement("a"), { href: `runs/#/${runs.indexOf(name)}`, textContent: name });
      cells[0].replaceChildren(cells[0].textContent.slice(0, -name.length), link);
    }
    if (ended) continue;
    const buttons = document.createElement("p");
    for (const kind of [goesOn({ cells }) ? "stop" : "resume", "change", "clone"]) {
      const button = Object.assign(document.createElement("button"), { textContent: kind, ariaLabel: `${kind} ${name}` });
      button.addEventListener("click", () => ask(kind, name));
      buttons.append(button, " ");
    }
    cells[cells.length - 1].append(buttons);
  }
}

function show(page) {
  const [now, latest] = [document, page].map((one) => one.querySelector("#study"));
  document.querySelector("h1").textContent = page.querySelector("h1").textContent;
  if (latest.outerHTML === shown) return;
  shown = latest.outerHTML;
  const focused = now.contains(document.activeElement) && document.activeElement.ariaLabel;
  equip(latest);
  now.replaceWith(latest);
  if (focused) [...latest.querySelectorAll("button")].find((one) => one.ariaLabel === focused)?.focus();
}

async function poll() {
  const begun = Date.now();
  try {
    show(new DOMParser().parseFromString(await (await fetch("")).text(), "text/html"));
  } catch {
    document.querySelector("h1").textContent = "The page's program has ended";
  }
  setTimeout(poll, Math.max(2000, 4 * (Date.now() - begun))); // drawing the curves takes time from training
}

show(document.cloneNode(true));
setTimeout(poll, 2000);
