"""The page around the views: no script, no font, no address; light and dark by the reader's preference (layer P)."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from lightning_hetero.report.page.style import DARK, LIGHT, MARKS, variables
from lightning_hetero.report.page.views import View
from lightning_hetero.report.verdict import Verdict

__all__ = ["page"]

_STYLE = f"""
:root{{color-scheme:light dark;{variables(LIGHT)}}}
@media (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--paper);color:var(--ink);font:16px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;
overflow-wrap:anywhere}}
main{{max-width:720px;margin:0 auto;padding:16px}}
h1{{font-size:1.3rem;margin:.2em 0}}h2{{font-size:1.15rem;margin:0}}
p{{margin:.5em 0}}.mute,.question{{color:var(--mute)}}.question{{font-style:italic;margin:0}}.answer{{font-weight:600}}
.verdict{{border-left:6px solid var(--fair);padding:.2em 0 .2em .9em;margin:1em 0}}
.verdict.good{{border-color:var(--good)}}.verdict.poor{{border-color:var(--poor)}}
.verdict .waited{{font-size:1.25rem;font-weight:700;margin:0}}
section{{border-top:1px solid var(--grid);padding:1.2em 0}}
nav{{display:flex;flex-wrap:wrap;gap:.2em .9em;font-size:.9rem}}a{{color:var(--work)}}
svg{{display:block;width:100%;max-width:560px;height:auto;margin:.4em 0;font:12px system-ui,sans-serif}}
{MARKS}.legend{{display:flex;flex-wrap:wrap;gap:.1em 1em;font-size:.9rem;margin:.4em 0}}
.key i{{display:inline-block;width:.8em;height:.8em;margin-right:.4em;border-radius:2px}}
.key .hot{{background:var(--hot)}}.key .cool{{background:var(--cool)}}
.scroll{{overflow-x:auto;max-width:100%}}
table{{border-collapse:collapse;font-size:.88rem;overflow-wrap:normal}}
th,td{{text-align:left;padding:.25em .7em .25em 0;border-bottom:1px solid var(--grid);vertical-align:top}}
th{{color:var(--mute);font-weight:600}}
@media print{{section{{break-inside:avoid}}}}
"""


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
<title>{escape(title)}</title><link rel="icon" href="data:,"><style>{_STYLE}</style></head>
<body><main>
<header><h1>{escape(title)}</h1><p class="mute">{escape(" · ".join(facts))}</p></header>
<div class="verdict {verdict.level}" id="verdict"><p class="waited">{escape(verdict.waited)}</p>{said}</div>
<nav>{nav}</nav>
{sections}{last}<section id="notes"><h2>How it was counted</h2><ul>{told}</ul></section>
</main></body></html>
"""
