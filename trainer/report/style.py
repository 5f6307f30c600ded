"""The page's style: light and dark as the reader's system has it, from a phone's width to a wide screen's, and print.

The colours are those of the timeline pictures (`parallelisms.pipeline.picture_colours`), so that both go together;
those of the runs are hues of Okabe and Ito, which colour-blind readers can tell apart.
"""

_LIGHT = """
  --bg: #ffffff; --lane: #f5f6f8; --line: #e4e7eb; --ink: #1f2328; --mut: #636c76;
  --link: #1f6feb; --mark: #fff4d6; --bad: #b42318; --bad-bg: #fef3f2; --warn: #8a6100; --warn-bg: #fff8e6;
  --c0: #1f78b8; --c1: #d55e00; --c2: #009e73; --c3: #a8508b; --c4: #c08a00; --c5: #4b5a9e; --c6: #56a0c8;
  --c7: #7a7f87;
"""
_DARK = """
  --bg: #0d1117; --lane: #151b23; --line: #262c36; --ink: #e6edf3; --mut: #9198a1;
  --link: #6cb0ff; --mark: #3a3113; --bad: #ff8d80; --bad-bg: #2a1512; --warn: #e8c268; --warn-bg: #271f0c;
  --c0: #4ba3e3; --c1: #e8703a; --c2: #2db68c; --c3: #cf86b2; --c4: #e8ab30; --c5: #8f9fe6; --c6: #8fd0ee;
  --c7: #a3a9b2;
"""
_RUNS = "".join(f".c{index}{{--c:var(--c{index})}}" for index in range(8))

STYLE = (
    f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
{_RUNS}
"""
    + """
* { box-sizing: border-box; }
html { scroll-behavior: smooth; scroll-padding-top: 60px; -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; max-width: 1280px; padding: 0 clamp(14px, 3vw, 40px) 40px; background: var(--bg); color: var(--ink);
  font: 14px/1.5 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
    "DejaVu Sans", sans-serif;
  font-variant-numeric: tabular-nums; overflow-wrap: anywhere;
}
header { padding: 34px 0 10px; }
h1 { font-size: 27px; line-height: 1.25; letter-spacing: -0.01em; margin: 0; font-weight: 650; }
header p { margin: 4px 0 0; }
h2 { font-size: 18px; margin: 0 0 14px; font-weight: 650; letter-spacing: -0.005em; }
h3 { font-size: 14px; margin: 24px 0 6px; font-weight: 600; }
section { margin-top: 44px; }
.mut, .note, small { color: var(--mut); }
small { font-size: 12px; font-weight: 400; white-space: nowrap; }
.note { font-size: 12.5px; margin: 8px 0 0; }
nav {
  position: sticky; top: 0; z-index: 5; display: flex; gap: 20px; overflow-x: auto; padding: 11px 0;
  background: var(--bg); border-bottom: 1px solid var(--line); scrollbar-width: none;
}
nav a { color: var(--mut); text-decoration: none; font-size: 13px; white-space: nowrap; }
nav a:hover { color: var(--ink); }
footer { margin-top: 56px; padding-top: 12px; border-top: 1px solid var(--line); color: var(--mut); font-size: 12px; }

.box { border-radius: 8px; padding: 12px 16px; margin-top: 20px; border-left: 3px solid; }
.box p { margin: 3px 0 0; }
.box ul { margin: 5px 0 0; padding-left: 18px; }
.failed { border-color: var(--bad); background: var(--bad-bg); }
.failed strong { color: var(--bad); }
.unread { border-color: var(--warn); background: var(--warn-bg); font-size: 13px; }
.unread strong { color: var(--warn); }

dl { margin: 0; display: grid; grid-template-columns: minmax(120px, max-content) 1fr; gap: 5px 24px; }
dt { color: var(--mut); }
dd { margin: 0; }
.tiles {
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 150px), 1fr)); gap: 1px; overflow: hidden;
  border: 1px solid var(--line); border-radius: 10px;
}
.tile { padding: 12px 16px 13px; box-shadow: 0 0 0 1px var(--line); }
.tile dt { font-size: 12px; }
.tile dd { font-size: 19px; font-weight: 600; line-height: 1.35; }
.tile small { display: block; line-height: 1.4; }

.legend { display: flex; flex-wrap: wrap; align-items: center; gap: 6px 8px; margin: -4px 0 16px; font-size: 13px; }
.legend button {
  display: inline-flex; align-items: center; font: inherit; color: inherit; background: none; cursor: pointer;
  border: 1px solid var(--line); border-radius: 999px; padding: 2px 12px 2px 9px; text-align: left;
}
.legend button:hover { background: var(--lane); }
.legend button[aria-pressed="false"] { opacity: .45; text-decoration: line-through; }
.key { display: inline-flex; align-items: center; gap: 7px; color: var(--mut); padding: 0 6px; }
.chip {
  display: inline-block; flex: none; width: 11px; height: 11px; margin-right: 7px; border-radius: 3px;
  background: var(--c);
}
.chip.again { background: none; border: 3px solid var(--c); }

.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); gap: 26px 34px; }
.chart { margin: 0; min-width: 0; outline-offset: 6px; border-radius: 4px; }
.chart:focus { outline: none; }
.chart:focus-visible { outline: 2px solid var(--link); }
.chart > .note { margin: 2px 0 0 52px; font-size: 11.5px; }
figcaption { display: flex; gap: 7px; align-items: baseline; margin-bottom: 9px; }
figcaption strong { font-weight: 600; }
figcaption .mut { font-size: 12px; }
.latest { margin-left: auto; font-size: 13px; font-weight: 600; }
.frame { display: grid; grid-template: 216px 22px / 52px 1fr; }
.plot { position: relative; border-bottom: 1px solid var(--mut); touch-action: pan-y; cursor: crosshair; }
.plot svg { position: absolute; inset: 0; width: 100%; height: 100%; overflow: visible; }
.ylabels, .xlabels { position: relative; font-size: 11px; line-height: 1; color: var(--mut); }
.ylabels span { position: absolute; right: 9px; transform: translateY(-50%); white-space: nowrap; }
.xlabels { grid-column: 2; }
.xlabels span { position: absolute; top: 8px; transform: translateX(-50%); white-space: nowrap; }
.grid { stroke: var(--line); stroke-width: 1; fill: none; vector-effect: non-scaling-stroke; }
.line {
  fill: none; stroke: var(--c, var(--mut)); stroke-width: 1.75; stroke-linejoin: round; stroke-linecap: round;
  vector-effect: non-scaling-stroke;
}
.line.pale { stroke-width: 1; opacity: .3; }
.line.median { stroke-width: 2; }
.line.dotted { stroke-dasharray: 1 5; }
.line.points { stroke-width: 6; }
.line.again { stroke-dasharray: 7 4; }
.cursor { position: absolute; top: 0; bottom: 0; width: 1px; background: var(--mut); opacity: .55; }
.dot {
  position: absolute; width: 9px; height: 9px; margin: -4.5px; border-radius: 50%; background: var(--c);
  border: 2px solid var(--bg);
}
.tip {
  position: absolute; top: 4px; z-index: 4; margin: 0 12px; padding: 7px 11px; pointer-events: none;
  background: var(--bg); border: 1px solid var(--line); border-radius: 7px; box-shadow: 0 3px 14px rgb(0 0 0 / .13);
  font-size: 12px; max-width: 320px;
}
.tip .head { color: var(--mut); margin-bottom: 2px; }
.row { display: flex; align-items: center; white-space: nowrap; }
.row .name { overflow: hidden; text-overflow: ellipsis; }
.row b { margin-left: auto; padding-left: 14px; font-weight: 600; }
.row small { margin-left: 7px; font-size: 11px; }
.cursor, .dots, .tip { display: none; }
.pointed .cursor, .pointed .dots, .here .tip { display: block; }

.scroll { overflow-x: auto; max-width: 100%; }
.picture { border: 1px solid var(--line); border-radius: 10px; margin-top: 8px; }
.picture svg, .picture img { display: block; width: 100%; height: auto; }
.picture img { width: auto; }

table { border-collapse: collapse; font-size: 13px; }
th, td {
  padding: 5px 22px 5px 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line);
  overflow-wrap: normal;
}
td { max-width: 460px; overflow-wrap: break-word; }
thead th { color: var(--mut); font-weight: 500; font-size: 12px; white-space: nowrap; }
.n { text-align: right; white-space: nowrap; }
tbody tr:last-child > * { border-bottom: none; }
.compare { min-width: min(100%, 640px); }
.compare thead td { padding-left: 8px; font-size: 12px; vertical-align: bottom; }
.compare thead th { color: var(--ink); font-weight: 600; font-size: 13px; }
.compare tbody th { font-weight: 400; color: var(--mut); padding-left: 8px; white-space: nowrap; }
.compare td { min-width: 120px; }
#plan .differs > *, details .differs > * { background: var(--mark); }
#configuration .compare tbody th, code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, monospace; }
#configuration .compare tbody th, code { font-size: 12.5px; }
pre { font-size: 12px; line-height: 1.5; padding: 12px 14px; margin: 8px 0; background: var(--lane); border-radius: 8px;
  overflow: auto; max-height: 460px; overflow-wrap: normal; }
details { margin-top: 12px; }
summary { cursor: pointer; color: var(--mut); font-size: 13px; width: max-content; max-width: 100%; }
summary:hover { color: var(--ink); }
details > .scroll:not(.picture) { margin-top: 8px; }

@media (max-width: 640px) {
  header { padding-top: 22px; }
  h1 { font-size: 22px; }
  section { margin-top: 34px; }
  .tiles { grid-template-columns: 1fr 1fr; }
  .tile { padding: 9px 12px; }
  .tile dd { font-size: 16px; }
  .frame { grid-template-rows: 190px 22px; }
  dl:not(.tiles) { grid-template-columns: 1fr; gap: 0; }
  dl:not(.tiles) dd { margin-bottom: 9px; }
  th, td { padding-right: 16px; }
}
@media print {
  nav { display: none; }
  section, figure { break-inside: avoid; }
}
"""
)
