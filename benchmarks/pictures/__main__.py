"""``python -m benchmarks.pictures``: writes docs/pictures from the results files."""

from __future__ import annotations

from benchmarks.pictures import FOLDER, files
from benchmarks.provenance import ROOT

if __name__ == "__main__":
    for _name, _text in files().items():
        (ROOT / FOLDER / _name).write_text(_text, encoding="utf-8")
