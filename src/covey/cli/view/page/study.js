// Page of a study: sends commands, and shows the latest table every two seconds.
"use strict";

const form = document.querySelector("form");
const said = form.querySelector("[role=status]");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const { name, to, changes, fresh } = form.elements;
  const command = { kind: event.submitter.textContent, name: name.value.trim(), to: to.value.trim() };
  Object.assign(command, { changes: changes.value, fresh: fresh.checked });
  const headers = { "Content-Type": "application/json" };
  try {
    const answer = await fetch("command", { method: "POST", headers, body: JSON.stringify(command) });
    said.textContent = `${command.kind} ${command.name}: ${await answer.text()}`;
  } catch (error) {
    said.textContent = `${command.kind} ${command.name} was not sent: ${error.message}`;
  }
});

document.querySelector("#study").parentElement.addEventListener("click", (event) => {
  const cell = event.target.closest("tbody td:first-child");
  if (cell) form.elements.name.value = cell.textContent.trim();
});

setInterval(async () => {
  try {
    const page = new DOMParser().parseFromString(await (await fetch("")).text(), "text/html");
    const latest = page.querySelector("#study");
    const shown = document.querySelector("#study");
    if (latest && latest.innerHTML !== shown.innerHTML) shown.replaceWith(latest);
    document.querySelector("h1").textContent = page.querySelector("h1").textContent;
  } catch {
    document.querySelector("h1").textContent = "The page's program has ended";
  }
}, 2000);
