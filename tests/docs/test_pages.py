"""Pages: their code runs; every path, name and link exists; those for first readers are short.

Every Python block stands after one of two lines. ``<!-- run -->``: it is executed, alone and in an empty folder, so it
must be complete and quick; one that trains on several devices does so in that many ranks, and prints something.
``<!-- not run: why -->``: it is compiled only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import re
import shlex
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from hydra import compose, initialize_config_dir
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn, optim
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero import HeteroPipelineStrategy
from lightning_hetero.cli.report import comparison_table
from lightning_hetero.cli.train import check_groups
from tests.docs.kit import DOCS, FENCE, PAGES, REFERENCE, ROOT, THEORY, Block, blocks_of, name_of
from tests.ranks.harness import run_ranks

FOLDERS = "benchmarks|conf|docs|examples|lightning_hetero|scripts|tests"
def one_line(code: str) -> str:
    """Joins what a backslash continues in the next line."""
    return re.sub(r" *\\\n\s*", " ", code)


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]
PYTHON = [block for block in BLOCKS if block.info == "python"]
MARKED = [block for block in PYTHON if block.mark == "run"]


# ---- code ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_python_compiles(block: Block) -> None:
    compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")


@pytest.fixture
def fits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clears up after a fit in this process, where Lightning leaves its group and a variable."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def execute(block: Block) -> None:
    exec(compile("\n" * (block.line - 1) + block.code, str(block.page), "exec"), {"__name__": "__main__"})


def devices_of(block: Block) -> int:
    found = re.search(r"^[^#\n]*\bdevices=(\d+)", block.code, flags=re.M) if "trainer.fit(" in block.code else None
    return int(found[1]) if found else 1


def printed(rank: int, world_size: int, block: Block) -> str:
    """Runs a block as one of the ranks that Lightning would have started for it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as screen:
        patch.setenv("LOCAL_RANK", str(rank))
        execute(block)
    return screen.getvalue()


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize("block", MARKED, ids=str)
def test_marked_python_runs(block: Block) -> None:
    if (devices := devices_of(block)) > 1:
        first, *others = run_ranks(devices, printed, block)
        assert first.strip() and not any(others)
    else:
        execute(block)


@pytest.mark.parametrize("page", ["start", "reference/balanced", "reference/stale", "reference/pipeline"])
def test_what_first_pages_offer_to_paste_runs_on_several_devices(page: str) -> None:
    trained = [block for block in MARKED if block.page == DOCS / f"{page}.md" and "trainer.fit(" in block.code]
    assert trained and all(devices_of(block) > 1 and "sklearn" not in block.code for block in trained)


def test_every_python_block_has_a_mark_and_every_mark_a_block() -> None:
    assert not [str(block) for block in PYTHON if block.mark is None]
    lines = sum(len(re.findall(r"^ *<!-- (?:run|not run\b.*) -->$", page.read_text(), flags=re.M)) for page in PAGES)
    assert lines == len(PYTHON) > len(MARKED) > 0


def test_marks_are_found() -> None:
    text = "<!-- run -->\n```python\n1\n```\n\n<!-- not run: two GPUs -->\n```python\n2\n```\n\n```bash\nls\n```\n"
    found = [(block.info, block.mark, block.code) for block in blocks_of(PAGES[0], text)]
    assert found == [("python", "run", "1\n"), ("python", "not run: two GPUs", "2\n"), ("bash", None, "ls\n")]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.info == "yaml"], ids=str)
def test_yaml_parses_and_its_targets_exist(block: Block) -> None:
    assert yaml.safe_load(block.code)
    for name in re.findall(r"(?:_target_|class_path): ([\w.]+)", block.code):
        assert exists(name), name


COMMANDS = sorted(
    {
        tuple(word for word in shlex.split(found, comments=True) if word not in ("-m", "--cfg", "job"))
        for block in BLOCKS
        if block.info == "bash"
        for found in re.findall(r"lightning-hetero-train +(\S.*)$", one_line(block.code), flags=re.M)
        if not found.startswith("#") and "NAME" not in found
    }
)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_our_commands_compose(command: tuple[str, ...]) -> None:
    """Each of a sweep's choices by itself; what is chosen by the last words, with all that come before."""
    plain = [word for word in command if "," not in word or "[" in word]
    swept = [[f"{key}={choice}" for choice in choices.split(",")] for key, choices in
             (word.split("=", 1) for word in command if word not in plain)]  # fmt: skip
    with initialize_config_dir(version_base="1.3", config_dir=str(ROOT / "lightning_hetero/cli/conf")):
        for choice in product(*swept):
            cfg = compose("train", overrides=["paths.output_dir=out", *plain, *choice])
            check_groups(cfg, HeteroPipelineStrategy())
            assert cfg.strategy._target_


def test_the_commands_are_found() -> None:
    assert ("strategy=ddp,hetero_balanced,hetero_stale",) in COMMANDS and len(COMMANDS) > 10


def test_no_block_is_left_open() -> None:
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(), flags=re.M)
        assert len(fences) == 2 * sum(block.page == page for block in BLOCKS), page.name


def test_the_test_command_is_the_same_everywhere() -> None:
    (readme,) = [block.code for block in BLOCKS if block.page.name == "README.md" and "pytest" in block.code]
    (contributing,) = [b.code for b in BLOCKS if b.page.name == "CONTRIBUTING.md" and "pytest -n" in b.code]
    script = (ROOT / ".ci/run").read_text().partition('cd "$(dirname "$0")/.."\n\n')[2]
    assert readme == contributing == script


def test_the_readmes_lines_are_short_and_its_table_is_the_commands() -> None:
    readme = [block for block in BLOCKS if block.page.name == "README.md"]
    for block in readme:
        assert block.info == "text" or max(map(len, block.code.splitlines())) <= 80, str(block)
    (printed,) = [block.code.splitlines() for block in readme if block.info == "text"]
    ranks = [{"share": 0.25, "compute_s": 1.0, "wait_s": 1.0}]
    result = {"fit_s": 1.0, "metric": {"name": "val_acc", "value": 0.9}, "ranks": ranks}
    head = re.split(r" {2,}", comparison_table([result]).splitlines()[0].strip())
    assert re.split(r" {2,}", printed[0].strip()) == head
    assert [line.split()[1] for line in printed[2:]] == ["ddp", "hetero_balanced", "hetero_stale"]


# ---- length ----------------------------------------------------------------------------------------

LONG = {THEORY, REFERENCE, ROOT}  # to look things up in; all others are read from top to bottom


def words(text: str) -> int:
    """Counts the words that somebody reads: not code, marks of a table, or what is generated of measurements."""
    text = re.sub(r"<!-- [\w ]+: python -m .*?<!-- end -->", "", FENCE.sub("", text), flags=re.S)
    return sum(any(map(str.isalnum, word)) for word in text.split())


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent not in LONG], ids=name_of)
def test_pages_for_first_readers_are_short(page: Path) -> None:
    assert words(page.read_text()) <= 1500


def test_no_table_stands_on_two_pages() -> None:
    places: dict[str, set[str]] = {}
    for page in PAGES:
        for table in re.findall(r"(?:^\|.*\n){3,}", FENCE.sub("", page.read_text()) + "\n", flags=re.M):
            places.setdefault(table, set()).add(name_of(page))
    assert not [pages for pages in places.values() if len(pages) > 1]


# ---- paths, names, links -------------------------------------------------------------------------


def exists(dotted: str) -> bool:
    """Tells whether a dotted name can be imported, or is an attribute of something that can."""
    parts = dotted.split(".")
    for n in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:n]))
        except ModuleNotFoundError:
            continue
        try:
            for part in parts[n:]:
                found = getattr(found, part)
        except AttributeError:
            return False
        return True
    return False


def test_what_exists_and_what_does_not() -> None:
    assert exists("lightning_hetero.types.Event.kind") and exists("hydra.utils.get_method")
    assert not exists("lightning_hetero.no_such") and not exists("no_such_package")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_dotted_names_exist(page: Path) -> None:
    # pkg://lightning_hetero.conf is a folder which only the installed wheel has.
    names = set(re.findall(r"(?<![\w./-])lightning_hetero(?:\.[A-Za-z_]\w*)+", page.read_text()))
    missing = [name for name in sorted(names) if not exists(name)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_paths_exist(page: Path) -> None:
    paths = set(re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./*<>-]*", page.read_text()))
    named = [path for path in sorted(paths) if not {"*", "<"} & set(path)]
    missing = [path for path in named if not (ROOT / path.rstrip(".")).exists()]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_tests_named_exist(page: Path) -> None:
    for path, name in re.findall(r"(tests/[\w/]+\.py)::(\w+)", page.read_text()):
        assert re.search(rf"^def {name}\(", (ROOT / path).read_text(), flags=re.M), f"{path}::{name}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_modules_run_by_python_m_exist(page: Path) -> None:
    for name in re.findall(r"python -m ((?:benchmarks|lightning_hetero)[\w.]*\w)", page.read_text()):
        assert importlib.util.find_spec(name) is not None, name  # pyright: ignore[reportAttributeAccessIssue]


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings as GitHub makes them."""
    text = FENCE.sub("", page.read_text())
    titles = re.findall(r"^#+ (.+)$", text, flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_internal_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", page.read_text()))
    for target in (link for link in links if not re.match(r"[a-z]+:", link)):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not anchor or anchor in anchors(file), target


# ---- what the text says and no other test shows --------------------------------------------------


class InOrder(LightningModule):
    """Notes the order it is trained in."""

    def __init__(self, sampled: bool) -> None:
        super().__init__()
        self.layer, self.sampled, self.seen = nn.Linear(1, 1), sampled, []

    def train_dataloader(self) -> DataLoader[Any]:
        data, trainer = TensorDataset(torch.arange(12), torch.randn(12, 1)), self.trainer
        sampler = DistributedSampler(data, trainer.world_size, trainer.global_rank, shuffle=False)
        return DataLoader(data, batch_size=4, shuffle=False, sampler=sampler if self.sampled else None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen += batch[0].tolist()
        return self.layer(batch[1]).mean()

    def configure_optimizers(self) -> optim.Optimizer:
        return optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize("strategy", ["ddp", "hetero_balanced", "hetero_stale"])
@pytest.mark.parametrize("sampled", [False, True])
def test_shuffle_off_is_shuffled_and_a_sampler_fixes_the_order(strategy: str, sampled: bool) -> None:
    module = InOrder(sampled)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module)
    assert sorted(module.seen) == list(range(12))
    assert (module.seen == list(range(12))) == sampled
