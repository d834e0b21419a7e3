"""The HTML around the report's pictures. Everything is in the file; nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
:root { color-scheme: light dark;
  --page: #f6f7f9; --card: #ffffff; --ink: #1a1f26; --muted: #5d6773; --line: #e2e6eb;
  --axis: #aab2bc; --good: #1b7f4b; --bad: #c62f3b; --warn: #9a5b00; --warn-page: #fff3da;
  --track: #e8ecf1; --memory: #8a97a8;
  --c0: #2b6cdf; --c1: #d9730d; --c2: #12897a; --c3: #8b4fd0; --c4: #c63b6c; --c5: #6f7a12; }
@media (prefers-color-scheme: dark) { :root {
  --page: #12161b; --card: #1a1f26; --ink: #e7ebf0; --muted: #9aa5b1; --line: #2c343d;
  --axis: #566170; --good: #4cc38a; --bad: #ff7078; --warn: #ffc46b; --warn-page: #3a2c10;
  --track: #2a323c; --memory: #7b8a9d;
  --c0: #74a5ff; --c1: #ffa04d; --c2: #3fc7b2; --c3: #bf93f7; --c4: #ff86ab; --c5: #c3cb55; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; }
main { max-width: 1020px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 24px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 0 0 10px; }
header { display: flex; flex-wrap: wrap; gap: 10px; align-items: center; margin-bottom: 4px; }
.sub { color: var(--muted); margin: 0 0 20px; overflow-wrap: anywhere; }
.badge { font-size: 12px; font-weight: 700; letter-spacing: .05em; padding: 3px 10px;
  border-radius: 99px; border: 1.5px solid currentColor; }
.badge.done { color: var(--good); } .badge.failed { color: var(--bad); }
.badge.running, .badge.preempted { color: var(--c0); }
.badge.emulated { color: var(--warn); background: var(--warn-page); }
.banner { background: var(--warn-page); border-left: 4px solid var(--warn); padding: 10px 14px;
  border-radius: 6px; margin: 0 0 18px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 18px 20px; margin: 0 0 18px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(172px, 1fr)); gap: 12px;
  margin: 0 0 18px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 12px 14px; display: flex; flex-direction: column; }
.tile .name { color: var(--muted); font-size: 13px; }
.tile .figure { font-size: 23px; font-weight: 650; font-variant-numeric: tabular-nums; }
.tile .note, .key.note, .empty { color: var(--muted); font-size: 12.5px; }
.empty { margin: 4px 0; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 0 0 4px; font-size: 13px; }
.key { display: inline-flex; align-items: center; gap: 6px; }
.key i { width: 20px; border-top: 2.5px solid var(--color); }
.key i.dashed { border-top-style: dashed; }
.key i.dots { height: 8px; width: 8px; border: 0; border-radius: 50%; background: var(--color); }
.key b { font-size: 14px; }
b.good, code.good { color: var(--good); } b.bad, code.bad { color: var(--bad); }
b.back { color: var(--c3); }
.swatch { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 7px;
  background: var(--color); }
.picture, .scroll { overflow-x: auto; }
svg { display: block; width: 100%; min-width: 620px; height: auto; }
svg text { fill: var(--ink); font-size: 12px; font-variant-numeric: tabular-nums; }
svg .tick, svg .axis-label, svg .lane-label { fill: var(--muted); }
svg .middle { text-anchor: middle; } svg .end { text-anchor: end; }
svg .row-label { font-weight: 600; white-space: pre; }
.axis { stroke: var(--axis); } .grid { stroke: var(--line); }
polyline { fill: none; stroke: var(--color); stroke-width: 1.8; stroke-linejoin: round; }
polyline.dashed { stroke-dasharray: 5 4; stroke-width: 1.5; }
.band { fill: var(--color); opacity: .18; }
.dot { fill: var(--color); stroke: var(--card); }
.marker { fill: var(--color); stroke: var(--color); stroke-width: 2; stroke-linecap: round; }
.failure { stroke: var(--bad); stroke-dasharray: 2 4; opacity: .7; }
.pause { stroke: var(--axis); stroke-dasharray: 6 3; stroke-width: 2; }
.attempt { fill: var(--c0); opacity: .8; } .attempt.failed { fill: var(--bad); }
svg .on-bar { fill: var(--card); font-weight: 700; }
.track { fill: var(--track); } .memory { fill: var(--memory); }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; color: var(--muted); font-weight: 600;
  border-bottom: 1px solid var(--line); }
th, td { padding: 5px 10px 5px 0; vertical-align: top; }
td { border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
tbody tr:last-child td { border-bottom: 0; }
.number { text-align: right; padding-right: 16px; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
code, pre { font: 12.5px/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, monospace; }
code, td:not(:last-child), th { white-space: nowrap; }
pre { overflow-x: auto; margin: 12px 0 0; }
summary { cursor: pointer; color: var(--muted); margin-top: 12px; font-size: 13px; }
ul { margin: 12px 0 0; padding-left: 20px; font-size: 13.5px; }
"""


def page(*, title: str, badges: str, subtitle: str, body: Sequence[str]) -> str:
    """The whole file. `badges` and `body` are HTML, the rest is escaped."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(title)}</h1>{badges}</header>\n"
        f'<p class="sub">{escape(subtitle)}</p>\n'
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def section(heading: str, content: str) -> str:
    """A card with a heading; `content` is HTML."""
    return f"<section><h2>{escape(heading)}</h2>{content}</section>"


def badge(label: str) -> str:
    """A small label, coloured by what it says."""
    return f'<span class="badge {escape(label.lower())}">{escape(label)}</span>'
