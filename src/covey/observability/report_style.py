"""The looks of the HTML report."""

CSS = """
:root { color-scheme: light dark; --ink: #1f2933; --faint: #66727f; --paper: #ffffff; --card: #f5f7f9;
  --line: #dfe4ea; --accent: #2563eb; --bad: #b42318; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e9ee; --faint: #93a0ad; --paper: #14181d; --card: #1d232a; --line: #303943;
    --accent: #7aa7ff; --bad: #ff8a7a; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 1.25rem; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .75rem; }
img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 8px; padding: .5rem; }
.advice { border-left: 4px solid #d97706; background: var(--card); padding: .7rem .9rem; margin: 0 0 .75rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .75rem; margin: 0; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem; }
.tile dt { color: var(--faint); font-size: .85rem; }
.tile dd { margin: 0; font-size: 1.35rem; font-weight: 600; overflow-wrap: anywhere;
  font-variant-numeric: tabular-nums; }
article { margin: 0 0 1.25rem; }
.prompt { color: var(--faint); white-space: pre-wrap; overflow-wrap: anywhere; font-size: .95rem; margin: 0 0 .4rem; }
.pair { display: grid; grid-template-columns: 1fr 1fr; gap: .75rem; }
@media (max-width: 44rem) { .pair { grid-template-columns: 1fr; } }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: .7rem .9rem;
  min-width: 0; }
.card.empty { background: none; border-style: dashed; }
.card header { display: flex; flex-wrap: wrap; gap: .75rem; font-size: .85rem; color: var(--faint);
  margin-bottom: .35rem; }
.when { font-weight: 600; color: var(--accent); }
.reward { font-variant-numeric: tabular-nums; color: var(--ink); }
.faint { color: var(--faint); }
pre { margin: 0; white-space: pre-wrap; overflow-wrap: anywhere; font: .9rem/1.45 ui-monospace, monospace; }
.shown { max-width: 8rem; max-height: 8rem; margin: 0 .5rem .3rem 0; vertical-align: top; }
.call { color: var(--accent); }
.result, .gap { color: var(--faint); }
.failure { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .88rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .7rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 500; }
thead th { color: var(--faint); }
tbody th { font-family: ui-monospace, monospace; font-size: .82rem; }
.metrics td { font-variant-numeric: tabular-nums; }
.metrics td:not(:last-child) { white-space: nowrap; }
.metrics td:last-child { color: var(--faint); min-width: 18rem; }
summary { cursor: pointer; font-weight: 600; margin-top: 2.5rem; }
"""
