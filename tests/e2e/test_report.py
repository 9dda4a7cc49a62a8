"""The report in a real browser: it loads, draws, says nothing on the console, and fits a phone."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lightning_hetero.report.page.build import page_of
from lightning_hetero.report.page.facts import RunFacts
from tests.pure.report.kit import RUNS, SHOWN

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
PHONE = 390  # pixels

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium-headless-shell)"),
]

# Each page in a frame as wide as a phone; what is found in it becomes the text of <pre>.
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><title>harness</title><pre id="out"></pre><script>
const pages = PAGES, found = {};
for (const [name, text] of Object.entries(pages)) {
  const frame = document.createElement("iframe");
  frame.style = "width:WIDTHpx;height:900px;border:0";
  frame.onload = () => {
    const page = frame.contentDocument, root = page.documentElement, drawings = [...page.querySelectorAll("svg")];
    const drawn = (svg) => svg.getBoundingClientRect().width > 200 && svg.getBoundingClientRect().height > 20 &&
      [...svg.querySelectorAll("rect,polyline,circle")].some((mark) => mark.getBoundingClientRect().width > 2);
    const letters = [...page.querySelectorAll("svg text")].map((text) => text.getBoundingClientRect().height);
    const inside = [...page.querySelectorAll("svg text")].every((text) => {
      const box = text.getBoundingClientRect(), around = text.closest("svg").getBoundingClientRect();
      return box.left >= around.left - 2 && box.right <= around.right + 2;
    });
    const boxes = (svg) => [...svg.querySelectorAll("text")].map((text) => text.getBoundingClientRect());
    const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 3 && b.top < a.bottom - 3;
    const pairs = (all) => all.flatMap((a, i) => all.slice(i + 1).filter((b) => meet(a, b)));
    const overlaps = drawings.map((svg) => pairs(boxes(svg)));
    found[name] = {
      width: root.clientWidth, needed: root.scrollWidth, drawings: drawings.length,
      drawn: drawings.filter(drawn).length, sections: page.querySelectorAll("section").length,
      smallest: Math.min(...letters), inside: inside, overlaps: overlaps.flat().length,
      paper: getComputedStyle(page.body).backgroundColor, ink: getComputedStyle(page.body).color,
    };
    document.getElementById("out").textContent = JSON.stringify(found);
  };
  frame.srcdoc = text;
  document.body.append(frame);
}
</script>"""


def shown_in_browser(folder: Path, *, dark: bool) -> tuple[dict[str, dict[str, Any]], str]:
    """Returns what the browser found in each page, and what it said."""
    pages = {name: page_of(RunFacts(run)) for name, run in RUNS.items()}
    pages["all compared"] = page_of(*map(RunFacts, RUNS.values()))
    script = json.dumps(pages).replace("</", "<\\/")
    harness = folder / "harness.html"
    harness.write_text(HARNESS.replace("WIDTH", str(PHONE)).replace("PAGES", script))
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--virtual-time-budget=10000",
            f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--dump-dom", harness.as_uri(),
        ],
        capture_output=True, text=True, timeout=150,
    )  # fmt: skip
    out = re.search(r'<pre id="out">(.*?)</pre>', done.stdout, re.S)
    assert out is not None and out[1], done.stderr
    return json.loads(html.unescape(out[1])), done.stderr


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_loads_draws_and_fits_a_phone(tmp_path: Path, dark: bool) -> None:
    found, said = shown_in_browser(tmp_path, dark=dark)
    assert set(found) == {*RUNS, "all compared"}
    assert "CONSOLE" not in said, said
    for name, page in found.items():
        assert page["needed"] <= page["width"] == PHONE, (name, page)
        assert page["drawn"] == page["drawings"], (name, page)
        assert page["inside"] and not page["overlaps"], (name, page)
        if shown := SHOWN.get(name):
            assert page["drawings"] >= len(shown) and page["smallest"] > 8.0, (name, page)
        paper, ink = (sum(map(int, re.findall(r"\d+", page[what])[:3])) for what in ("paper", "ink"))
        assert (paper > ink) != dark, (name, page)
