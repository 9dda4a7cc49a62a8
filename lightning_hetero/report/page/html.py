"""The page around the views: no script, no font, no address; light and dark by the reader's preference (layer P)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_hetero.report.page.views import View
from lightning_hetero.report.verdict import Verdict

__all__ = ["page"]

_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2126;--mute:#5d6770;--grid:#e3e7ea;--cell:#f3f5f6;--work:#2f78b7;
--exchange:#e0a030;--idle:#b9c2c9;--hot:#c8371b;--cool:#2f78b7;--mark:#8a949c;--bound:#c8371b;--good:#2c8a57;
--fair:#b7791f;--poor:#c8371b;--inside:#fff;--r0:#0072b2;--r1:#d55e00;--r2:#009e73;--r3:#b0579a;--r4:#8a6d00;
--r5:#3a9bc8;--r6:#6b6b6b;--r7:#7a3ea8}
@media (prefers-color-scheme:dark){:root{--paper:#14181b;--ink:#e8ecef;--mute:#9aa5ad;--grid:#2b3238;--cell:#20262b;
--work:#5aa3de;--exchange:#e8b458;--idle:#4a545c;--hot:#f0684a;--cool:#5aa3de;--mark:#76818a;--bound:#f0684a;
--good:#5cc08a;--fair:#e0aa52;--poor:#f0684a;--inside:#0d1113;--r0:#4fa8dc;--r1:#f08a45;--r2:#3fc79b;--r3:#d98ac6;
--r4:#d0b040;--r5:#8cd0f0;--r6:#a8b0b6;--r7:#b48be0}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere}
main{max-width:720px;margin:0 auto;padding:16px}
h1{font-size:1.3rem;margin:.2em 0}h2{font-size:1.15rem;margin:0}
p{margin:.5em 0}.mute,.question{color:var(--mute)}.question{font-style:italic;margin:0}.answer{font-weight:600}
.verdict{border-left:6px solid var(--fair);padding:.2em 0 .2em .9em;margin:1em 0}
.verdict.good{border-color:var(--good)}.verdict.poor{border-color:var(--poor)}
.verdict .waited{font-size:1.25rem;font-weight:700;margin:0}
section{border-top:1px solid var(--grid);padding:1.2em 0}
nav{display:flex;flex-wrap:wrap;gap:.2em .9em;font-size:.9rem}a{color:var(--work)}
svg{display:block;width:100%;max-width:560px;height:auto;margin:.4em 0;font:12px system-ui,sans-serif}
svg text{fill:var(--ink)}svg text.mute{fill:var(--mute);font-size:11px}
svg text.inside{fill:var(--inside);font-size:11px}
.grid,.axis{stroke:var(--grid);stroke-width:1}.axis{stroke:var(--mute)}
.mark{stroke:var(--mark);stroke-width:1;stroke-dasharray:2 3}
.bound{stroke:var(--bound);stroke-width:1.5;stroke-dasharray:6 3}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.dashed{stroke-dasharray:5 4}
.cell{fill:var(--cell);background:var(--cell)}
.work{fill:var(--work);background:var(--work)}.exchange{fill:var(--exchange);background:var(--exchange)}
.idle{fill:var(--idle);background:var(--idle)}.hot{fill:var(--hot)}.cool{fill:var(--cool)}
RANKS
.legend{display:flex;flex-wrap:wrap;gap:.1em 1em;font-size:.9rem;margin:.4em 0}
.key i{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}
.scroll{overflow-x:auto;max-width:100%}
table{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}
th,td{text-align:left;padding:.25em .7em .25em 0;border-bottom:1px solid var(--grid);vertical-align:top}
th{color:var(--mute);font-weight:600}
@media print{section{break-inside:avoid}}
"""

_RANKS = "\n".join(
    f".r{i}{{fill:var(--r{i});background:var(--r{i});stroke:var(--r{i})}}"
    f"rect.r{i}{{stroke:none}}.line.r{i}{{fill:none;background:none}}"
    for i in range(8)
)


def page(
    title: str, facts: Sequence[str], verdict: Verdict, views: Sequence[View], *, notes: Sequence[str] = ()
) -> str:
    """Returns the page.

    Args:
        title: of the run.
        facts: on it, in a few words each.
        verdict: what it opens with.
        views: those without a body are named in a list at the end.
        notes: what to know about the numbers.
    """
    shown = [view for view in views if view.body]
    absent = [view for view in views if not view.body]
    nav = "".join(f'<a href="#{view.name}">{escape(view.title)}</a>' for view in shown)
    said = "".join(f"<p>{escape(text)}</p>" for text in (verdict.cause, verdict.next_step, verdict.gain) if text)
    sections = "".join(
        f'<section id="{view.name}"><h2>{escape(view.title)}</h2><p class="question">{escape(view.question)}</p>'
        f'<p class="answer">{escape(view.answer)}</p>{view.body}</section>\n'
        for view in shown
    )
    left_out = "".join(f"<li><b>{escape(view.title)}</b>: {escape(view.answer)}</li>" for view in absent)
    last = f'<section id="left-out"><h2>Left out</h2><ul>{left_out}</ul></section>\n' if absent else ""
    told = "".join(f"<li>{escape(note)}</li>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE.replace("RANKS", _RANKS)}</style></head>
<body><main>
<header><h1>{escape(title)}</h1><p class="mute">{escape(" · ".join(facts))}</p></header>
<div class="verdict {verdict.level}" id="verdict"><p class="waited">{escape(verdict.waited)}</p>{said}</div>
<nav>{nav}</nav>
{sections}{last}<section id="notes"><h2>How it was counted</h2><ul>{told}</ul></section>
</main></body></html>
"""
