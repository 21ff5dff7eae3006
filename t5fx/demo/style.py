"""The style sheet of the report; in Python, so that the page is made from the package alone."""

STYLE = """
:root { color-scheme: light; --ink: #0f172a; --soft: #475569; --line: #e2e8f0; --paper: #ffffff; }
* { box-sizing: border-box; }
body {
  margin: 0; background: #f1f5f9; color: var(--ink); font: 16px/1.55 system-ui, -apple-system, "Segoe UI",
  "DejaVu Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 40px 24px 56px; }
header {
  background: linear-gradient(120deg, #0f172a, #134e4a); color: #f8fafc; border-radius: 18px; padding:
  36px 40px;
}
h1 { margin: 0 0 8px; font-size: 34px; letter-spacing: -0.02em; line-height: 1.15; }
header p { margin: 0; max-width: 720px; color: #cbd5e1; }
header .warn { margin-top: 14px; color: #fbbf24; font-weight: 600; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(240px, 1fr)); gap: 14px; margin-top: 28px;
}
.tile {
  background: rgba(255, 255, 255, 0.08); border: 1px solid rgba(255, 255, 255, 0.14); border-radius: 12px;
  padding: 16px 18px;
}
.tile b { display: block; font-size: 25px; letter-spacing: -0.01em; }
.tile span { color: #cbd5e1; font-size: 13.5px; line-height: 1.4; display: block; margin-top: 2px; }
section {
  background: var(--paper); border: 1px solid var(--line); border-radius: 18px; padding: 30px 40px 34px;
  margin-top: 22px;
}
h2 { margin: 0 0 6px; font-size: 22px; letter-spacing: -0.01em; }
section p { margin: 0 0 16px; color: var(--soft); max-width: 860px; }
code { font-size: 0.92em; background: #f1f5f9; padding: 1px 5px; border-radius: 5px; }
table {
  width: 100%; border-collapse: collapse; margin: 6px 0 20px; font-variant-numeric: tabular-nums; font-
  size: 15px;
}
th {
  text-align: right; font-weight: 600; color: var(--soft); font-size: 13px; border-bottom: 2px solid
  var(--line); padding: 8px 10px; vertical-align: bottom;
}
td { text-align: right; border-bottom: 1px solid var(--line); padding: 8px 10px; }
th:first-child, td:first-child { text-align: left; padding-left: 2px; }
i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 8px; }
.chart { width: 100%; display: block; margin: 4px 0 18px; }
.chart:last-child { margin-bottom: 0; }
.key { margin-right: 22px; white-space: nowrap; }
.digits { display: grid; grid-template-columns: repeat(auto-fill, minmax(74px, 1fr)); gap: 9px; }
figure { margin: 0; }
.digit {
  border: 2px solid transparent; border-radius: 10px; padding: 7px 7px 3px; background: #f8fafc; text-
  align: center;
}
.digit img { width: 100%; image-rendering: pixelated; border-radius: 4px; display: block; }
.digit figcaption {
  font-weight: 700; font-size: 15px; display: flex; justify-content: space-around; padding-top: 2px;
}
.wrong { border-color: #dc2626; background: #fef2f2; }
.miss { text-decoration: line-through; text-decoration-color: #dc2626; text-decoration-thickness: 2px; }
.photos { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; margin-top: 14px; }
.photos img { width: 100%; aspect-ratio: 3 / 2; display: block; border-radius: 10px; }
.photos .map { image-rendering: pixelated; }
.photos figcaption { font-size: 13.5px; color: var(--soft); padding-top: 6px; }
footer { color: #64748b; font-size: 13px; margin-top: 22px; text-align: center; }
@media (max-width: 760px) {
  .photos { grid-template-columns: repeat(2, 1fr); }
  section, header { padding: 24px 20px; }
  table { font-size: 13px; }
}
"""
