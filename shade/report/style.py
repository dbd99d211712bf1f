"""The style sheet of ``report.html``: two sets of colours, light and dark, as the reader's system is set.

``c1`` … ``c7`` are the colours of series, by class, so that a chart (`shade.report.svg`) names none. They are told
apart in both sets, and by lightness too where somebody sees fewer colours. Fonts are the reader's own: nothing is
fetched.
"""

from __future__ import annotations

from typing import Final

STYLE: Final = """\
:root {
  color-scheme: light dark;
  --paper: #ffffff; --card: #f6f8fa; --ink: #1d2a35; --muted: #5d6b78; --grid: #e1e7ec;
  --c1: #2f6fb0; --c2: #d97f1f; --c3: #2f8a5d; --c4: #c24a33; --c5: #7d5aa6; --c6: #3f93b5; --c7: #94a1ad;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12181e; --card: #1b232b; --ink: #e6ecf1; --muted: #98a6b3; --grid: #2c3741;
    --c1: #6aa9e6; --c2: #f0a54f; --c3: #5fc394; --c4: #ea7b64; --c5: #b393dd; --c6: #74c1df; --c7: #7d8a96;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1240px; padding: 28px 20px 60px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif;
}
h1 { font-size: 24px; margin: 0; }
h2 { font-size: 17px; margin: 36px 0 10px; }
h3 { font-size: 14px; margin: 0 0 2px; }
li { margin: 3px 0; }
img { max-width: 100%; border-radius: 8px; }
pre { white-space: pre-wrap; color: var(--muted); font-size: 12.5px; }
.sub { margin: 2px 0 20px; overflow-wrap: anywhere; }
.sub, .none, figcaption, .legend, dt { color: var(--muted); }

.tiles, .charts { display: grid; gap: 14px; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
.charts { grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); }
.tile, figure { background: var(--card); border-radius: 10px; padding: 12px 14px; margin: 0; }
.tile b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; }
.tile span { color: var(--muted); font-size: 13px; }

figcaption, .legend { font-size: 13px; }
.legend i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin: 0 5px 0 12px; }
.legend i:first-child { margin-left: 0; }
.legend i { background: var(--c); }
svg { width: 100%; height: auto; display: block; }
.grid { stroke: var(--grid); }
.rule { stroke: var(--muted); stroke-dasharray: 5 4; }
.tick { fill: var(--muted); font-size: 11px; }
.line { fill: none; stroke: var(--c); stroke-width: 2; }
.bar, .mark { fill: var(--c); }
.c1 { --c: var(--c1); }
.c2 { --c: var(--c2); }
.c3 { --c: var(--c3); }
.c4 { --c: var(--c4); }
.c5 { --c: var(--c5); }
.c6 { --c: var(--c6); }
.c7 { --c: var(--c7); }

.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13px; width: 100%; }
th, td { padding: 5px 9px; text-align: right; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th { color: var(--muted); font-weight: 600; }
td.text, th.text { text-align: left; white-space: normal; overflow-wrap: anywhere; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; font-size: 13px; }
dd { margin: 0; overflow-wrap: anywhere; }
"""
