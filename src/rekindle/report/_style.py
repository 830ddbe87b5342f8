"""Define the style sheet of a report.

Every CSS rule applies only inside an element of class `rekindle`. So a report does not change the
style of the notebook that contains it.
"""

from __future__ import annotations

STYLE = """
.rekindle { --ink: #1c1e21; --dim: #5f6670; --line: #d9dde2; --card: #f4f6f8; --paper: #fff;
  --bar: #0072b2; box-sizing: border-box; max-width: 1080px; margin: 0 auto; padding: 20px;
  color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif; }
.rekindle * { box-sizing: border-box; }
.rekindle h1 { font-size: 24px; margin: 4px 0 16px; }
.rekindle h2 { font-size: 17px; margin: 32px 0 10px; }
.rekindle p { color: var(--dim); margin: 8px 0; overflow-wrap: anywhere; }
.rekindle .figures { display: grid; gap: 10px; margin: 0;
  grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); }
.rekindle .figures > div { background: var(--card); border-radius: 8px; padding: 10px 12px; }
.rekindle dt { color: var(--dim); font-size: 13px; }
.rekindle dd { margin: 0; font-size: 19px; font-weight: 600; font-variant-numeric: tabular-nums; }
.rekindle dd small { display: block; font-size: 12px; font-weight: 400; color: var(--dim); }
.rekindle .advice { background: var(--card); border-left: 4px solid #e69f00; margin: 16px 0 0;
  padding: 10px 12px 10px 30px; border-radius: 4px; }
.rekindle .chart { display: grid; grid-template-columns: 76px 1fr;
  grid-template-rows: minmax(0, 1fr) 24px; height: 300px; font-size: 12px; color: var(--dim); }
.rekindle .strip { height: 34px; grid-template-rows: minmax(0, 1fr) 0; margin-top: 4px; }
.rekindle .chart b { position: absolute; font-weight: 400; white-space: nowrap; }
.rekindle .chart .y { position: relative; }
.rekindle .chart .y b { right: 8px; transform: translateY(50%); }
.rekindle .chart .x { position: relative; grid-column: 2; }
.rekindle .chart .x b { top: 5px; transform: translateX(-50%); }
.rekindle .chart .x .last { transform: translateX(-100%); }
.rekindle .chart .plot { position: relative; border-bottom: 1px solid var(--dim);
  border-left: 1px solid var(--dim); }
.rekindle .chart .plot i { position: absolute; left: 0; right: 0;
  border-top: 1px solid var(--line); }
.rekindle .strip .plot i { display: none; }
.rekindle svg { position: absolute; width: 100%; height: 100%; display: block; }
.rekindle polyline, .rekindle .level { vector-effect: non-scaling-stroke; }
.rekindle .level { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 5 4; }
.rekindle .shaded { fill: var(--dim); opacity: 0.18; }
.rekindle .legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; }
.rekindle .legend i { display: inline-block; width: 11px; height: 11px; border-radius: 2px;
  margin-right: 6px; }
.rekindle .legend .dash { height: 0; width: 18px; border-top: 2px dashed var(--ink);
  border-radius: 0; vertical-align: 4px; }
.rekindle table { border-collapse: collapse; width: 100%; font-size: 14px; margin: 0;
  font-variant-numeric: tabular-nums; color: inherit; background: none; }
.rekindle tr { background: none; }
.rekindle th { text-align: left; font-weight: 400; padding: 3px 12px 3px 0;
  overflow-wrap: anywhere; vertical-align: top; }
.rekindle td { text-align: right; white-space: nowrap; padding: 3px 0 3px 12px;
  vertical-align: top; }
.rekindle .bars th { width: 38%; }
.rekindle .bars .bar { width: 40%; padding: 7px 0 0; text-align: left; }
.rekindle .bar i { display: block; height: 11px; border-radius: 2px; background: var(--bar);
  min-width: 1px; }
.rekindle .rest, .rekindle thead { color: var(--dim); }
.rekindle .list tr + tr, .rekindle tbody tr { border-top: 1px solid var(--line); }
.rekindle summary { cursor: pointer; color: var(--dim); margin: 8px 0; }
@media (max-width: 560px) {
  .rekindle { padding: 12px; font-size: 14px; }
  .rekindle .bars .bar { display: none; }
  .rekindle .bars th { width: auto; }
  .rekindle .chart { grid-template-columns: 68px 1fr; height: 230px; }
  .rekindle .strip { height: 30px; font-size: 11px; }
  .rekindle .chart .y b { right: 5px; }
  .rekindle table { font-size: 13px; }
  .rekindle td { padding-left: 8px; }
}
@media (prefers-color-scheme: dark) {
  .rekindle { --ink: #e6e8ea; --dim: #9aa3ad; --line: #343a41; --card: #22262b; --paper: #16181b;
    --bar: #56b4e9; }
}
"""

PAGE = """
body { margin: 0; background: #fff; }
@media (prefers-color-scheme: dark) { body { background: #16181b; } }
"""
"""Additional style for an HTML page that contains only a report (not for notebooks)."""
