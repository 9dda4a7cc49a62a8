"""README.md and docs/: code compiles, marked code runs; every path, name, link, argument and metric exists.

A Python block after a line ``<!-- run -->`` is executed, alone and in an empty folder, so it must be complete
and quick (one device, or pure). All other Python blocks are compiled only.
"""

from __future__ import annotations

import ast
import gc
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import yaml
from lightning.pytorch import LightningModule, Trainer
from omegaconf import OmegaConf
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_hetero import (
    BalancePolicy,
    BoundedStalenessStrategy,
    HeteroPipelineStrategy,
    LoadBalancedStrategy,
    Scenario,
    StragglerMonitor,
)
from lightning_hetero.balanced.controller import ExchangeClock
from lightning_hetero.cli import train
from lightning_hetero.cli.summary import RankSummary
from lightning_hetero.predictors import Kalman
from lightning_hetero.stale.policy import _KNOWN, Asynchronous, by_name
from lightning_hetero.stale.report import engine_metrics
from lightning_hetero.types import SpeedSample

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FOLDERS = "benchmarks|conf|docs|examples|lightning_hetero|scripts|tests"
FENCE = re.compile(
    r"^(?P<marked><!-- run -->\n+)?(?P<indent> *)```(?P<info>\w*)\n(?P<code>.*?)^ *```$", re.M | re.S
)


class Block(NamedTuple):
    """One fenced block of a page."""

    page: Path
    line: int
    info: str
    marked: bool
    code: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def name_of(value: Any) -> str:
    return value.name if isinstance(value, Path) else str(value)


def blocks_of(page: Path, text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        line = text[: match.start("code")].count("\n") + 1
        code = inspect.cleandoc(match["code"]) if match["indent"] else match["code"]
        yield Block(page, line, match["info"], match["marked"] is not None, code)


BLOCKS = [block for page in PAGES for block in blocks_of(page, page.read_text())]
PYTHON = [block for block in BLOCKS if block.info == "python"]
MARKED = [block for block in PYTHON if block.marked]


def section(page: Path, title: str) -> str:
    """Returns a page's text below a heading, up to the next of the same level."""
    parts = re.split(rf"^## {re.escape(title)}$", page.read_text(), flags=re.M)
    assert len(parts) == 2, f"{page.name} has no section {title!r}"
    return re.split(r"^## ", parts[1], flags=re.M)[0]


def rows(text: str) -> list[list[str]]:
    """Returns the cells of all tables in ``text``, without heads and rules."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = [i - 1 for i, line in enumerate(lines) if set(line) <= set("|-: ")]
    dropped = {*heads, *(i + 1 for i in heads)}
    kept = [line for i, line in enumerate(lines) if i not in dropped]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in kept]


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


@pytest.mark.usefixtures("fits")
@pytest.mark.parametrize("block", MARKED, ids=str)
def test_marked_python_runs(block: Block) -> None:
    code = compile("\n" * (block.line - 1) + block.code, str(block.page), "exec")
    exec(code, {"__name__": "__main__"})


def test_every_mark_stands_before_python() -> None:
    marks = sum(page.read_text().count("<!-- run -->") for page in PAGES)
    assert marks == len(MARKED) > 0
    text = "<!-- run -->\n```python\n1\n```\n\n```bash\nls\n```\n"
    assert [(b.info, b.marked, b.code) for b in blocks_of(PAGES[0], text)] == [
        ("python", True, "1\n"),
        ("bash", False, "ls\n"),
    ]


@pytest.mark.parametrize("block", [b for b in BLOCKS if b.info == "yaml"], ids=str)
def test_yaml_parses_and_its_targets_exist(block: Block) -> None:
    assert yaml.safe_load(block.code)
    for name in re.findall(r"(?:_target_|class_path): ([\w.]+)", block.code):
        assert exists(name), name


def test_no_block_is_left_open() -> None:
    for page in PAGES:
        fences = re.findall(r"^ *```", page.read_text(), flags=re.M)
        assert len(fences) == 2 * sum(block.page == page for block in BLOCKS), page.name


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
    paths = set(re.findall(rf"(?<![\w./-])(?:{FOLDERS})/[\w./-]*", page.read_text()))
    missing = [path for path in sorted(paths) if not (ROOT / path.rstrip(".")).exists()]
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


# ---- the strategy's arguments --------------------------------------------------------------------


class Engine(NamedTuple):
    """An engine and where it is described."""

    strategy: type
    page: Path
    group: Path

    def __str__(self) -> str:
        return self.page.stem

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        named = inspect.signature(self.strategy.__init__).parameters
        return {name: parameter for name, parameter in named.items() if name != "self"}


ENGINES = [
    Engine(LoadBalancedStrategy, DOCS / "balanced.md", ROOT / "conf/strategy/hetero_balanced.yaml"),
    Engine(BoundedStalenessStrategy, DOCS / "stale.md", ROOT / "conf/strategy/hetero_stale.yaml"),
    Engine(HeteroPipelineStrategy, DOCS / "pipeline.md", ROOT / "conf/strategy/hetero_pipeline.yaml"),
]


def test_every_engine_is_among_these() -> None:
    shipped = {path for path in (ROOT / "conf/strategy").glob("hetero_*.yaml")}
    assert shipped == {engine.group for engine in ENGINES}
    for engine in ENGINES:
        target = yaml.safe_load(engine.group.read_text())["_target_"]
        assert target == f"lightning_hetero.{engine.strategy.__name__}"


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_argument_is_in_the_table_with_its_default(engine: Engine) -> None:
    table = rows(section(engine.page, "Arguments"))
    documented = {name: row for row in table for name in re.findall(r"`\**(\w+)`", row[0].split("(")[0])}
    assert set(documented) == set(engine.parameters)
    for name, row in documented.items():
        if "DDPStrategy" not in row[1] and row[1] != "as there":
            default = row[1].split(":")[0].strip("`")
            assert ast.literal_eval(default) == engine.parameters[name].default, name


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_argument_is_in_the_group_file_or_listed_as_not(engine: Engine) -> None:
    paragraphs = re.split(r"\n\n", section(engine.page, "Arguments"))
    paragraph = next(p for p in paragraphs if "**Not in the group file**" in p)
    omitted = set(re.findall(r"`(\w+)`", paragraph.partition("**Not in the group file**")[2]))
    group = set(yaml.safe_load(engine.group.read_text())) - {"_target_"}
    assert omitted <= set(engine.parameters)
    assert omitted.isdisjoint(group)
    assert omitted | group >= set(engine.parameters)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_the_group_file_keeps_the_defaults(engine: Engine) -> None:
    """Choosing the option in Hydra is choosing the name in Python."""
    alone = OmegaConf.create({"strategy": OmegaConf.load(engine.group)})  # without other groups
    group = OmegaConf.to_container(alone, resolve=True)["strategy"]  # type: ignore[index,call-overload]
    ddp = inspect.signature(DistributedDataParallel).parameters
    for name, value in group.items():
        if name != "_target_":
            assert value == {**ddp, **engine.parameters}[name].default, name


def test_policies_are_documented_with_their_defaults() -> None:
    table = {row[0].strip("`"): row for row in rows(section(DOCS / "stale.md", "The policies"))}
    assert table.keys() == _KNOWN.keys()
    for name, row in table.items():
        said = dict(re.findall(r"`(\w+)` \(([\d.]+)\)", " ".join(row)))
        known = by_name(name).settings()
        assert {argument: float(value) for argument, value in said.items()} == {a: known[a] for a in said}, name
        waits = {"never": "never", "grace": "at most `grace`"}.get(_KNOWN[name].holds)
        assert row[1].startswith(waits) if waits else row[1] != "never", name
        assert ("worth n/B" in row[3]) == issubclass(_KNOWN[name], Asynchronous), name


def test_numbers_among_the_formulas_are_the_defaults() -> None:
    """``name (number)`` in the text is what the code has."""
    text = section(DOCS / "balanced.md", "Formulas")
    found = {name: float(number) for name, number in re.findall(r"\b([a-z_]+) \(([\d.]+)\)", text)}
    owners = (BalancePolicy, Kalman, ExchangeClock)
    known = {name: p.default for owner in owners for name, p in inspect.signature(owner).parameters.items()}
    assert found == {name: known[name] for name in found}
    assert {"drift", "gate", "dead_band", "noise_guard", "surprise", "period_s"} <= set(found)


# ---- metrics and results -------------------------------------------------------------------------


MEASURES: dict[str, Any] = {
    "updates": 1, "staleness": {"0": 6, "1": 2}, "stale_fraction": 0.25, "version_gap": 0, "discarded": {},
    "reissued": {}, "hold_s": {"0": 0.1}, "apply_s": 0.1, "longest_queue": 1, "samples": {"0": 4, "1": 4},
}  # fmt: skip


class Log:
    """Stands in for a LightningModule that collects the names it is given."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def log(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.names.add(name)

    def log_dict(self, values: dict[str, Any], **kwargs: Any) -> None:
        self.names |= set(values)


def logged_names(engine_metrics: dict[str, float]) -> set[str]:
    """What `StragglerMonitor` logs for two ranks of an engine with such metrics, with ``{r}`` for the rank."""
    monitor, log = StragglerMonitor(every_n_steps=1), Log()
    records = [SpeedSample(rank=r, step=0, samples=4, compute_s=0.1, wait_s=0.1) for r in range(2)]
    report = SimpleNamespace(records=records, predicted_s=(0.1, 0.1))
    strategy = SimpleNamespace(step_report=lambda: report, engine_metrics=lambda: engine_metrics)
    trainer: Any = SimpleNamespace(global_step=1, is_last_batch=False, strategy=strategy, loggers=[None])
    module: Any = log
    monitor.on_train_batch_end(trainer, module, None, None, 0)
    return {re.sub(r"rank\d+", "rank{r}", name) for name in log.names}


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_every_logged_metric_is_documented_and_no_other(engine: Engine) -> None:
    table = rows(section(engine.page, "Callbacks and metrics"))
    names = {name for row in table for name in re.findall(r"`(hetero/[^`]+)`", row[0])}
    listed = next(row[2] for row in table if "{name}" in row[0])
    columns = {name.split("/")[1] for name in names if name.endswith("/rank{r}")} & set(re.findall(r"\w+", listed))
    spread = {name.replace("{name}", column) for name in names if "{name}" in name for column in columns}
    own = engine_metrics(MEASURES, 2) if hasattr(engine.strategy, "engine_metrics") else {}
    assert {name for name in names if "{name}" not in name} | spread == logged_names(own)


def test_every_key_of_result_json_is_documented() -> None:
    tree = ast.parse(inspect.getsource(train.collect_result))
    result = next(node.value for node in ast.walk(tree) if isinstance(node, ast.Return))
    keys = {key.value for key in getattr(result, "keys", ()) if isinstance(key, ast.Constant)}
    keys |= {"fit_s", "steps", "batches"}  # what FitClock has written
    table = rows(section(DOCS / "configuration.md", "result.json"))
    assert {name for row in table for name in re.findall(r"`(\w+)`", row[0])} == keys
    ranks = next(row[2] for row in table if row[0] == "`ranks`")
    assert {field.name for field in fields(RankSummary)} == set(re.findall(r"`(\w+)`", ranks))


def test_every_argument_of_a_scenario_is_documented() -> None:
    names = {row[0].strip("`") for row in rows(section(DOCS / "emulation.md", "Scenario"))}
    assert names == {field.name for field in fields(Scenario)}


def test_every_option_of_every_group_is_documented() -> None:
    table = {row[0].strip("`"): row[1] for row in rows(section(DOCS / "configuration.md", "The command"))}
    folders = {path.name: path for path in (ROOT / "conf").iterdir() if any(path.glob("*.yaml"))}
    assert set(table) == set(folders)
    for group, folder in folders.items():
        named = set(re.findall(r"`(\w+)`", table[group]))
        options = {path.stem for path in folder.glob("*.yaml")}
        assert named <= options if "..." in table[group] else named == options, group
    emulation = {row[0].strip("`") for row in rows(section(DOCS / "emulation.md", "Scenarios that ship"))}
    assert emulation == {path.stem for path in folders["emulation"].glob("*.yaml")}


# ---- error messages ------------------------------------------------------------------------------


def strings_in(node: ast.AST) -> list[str]:
    """Returns the texts inside a piece of code, cut where an f-string inserts a value."""
    constants = (c.value for c in ast.walk(node) if isinstance(c, ast.Constant))
    return [value for value in constants if isinstance(value, str) and value.strip()]


TELLS = {"rank_zero_warn", "warn_once", "notify", "fail", "warning"}  # functions whose text somebody reads


@cache
def messages() -> dict[str, list[str]]:
    """Texts of each raise and warning of the package, by place and class of the error."""
    found: dict[str, list[str]] = {}
    for file in sorted((ROOT / "lightning_hetero").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            kind = ""
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                kind = ast.unparse(node.exc.func)
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
                kind = name if name in TELLS else ""
            if kind and (texts := strings_in(node)):
                found[f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)} {kind}"] = texts
    return found


def troubles() -> set[str]:
    """Pieces of messages that the troubleshooting tables answer."""
    pages = ("balanced.md", "stale.md", "pipeline.md", "emulation.md")
    cells = [row[0] for page in pages for row in rows(section(DOCS / page, "Troubleshooting"))]
    return {piece for cell in cells if cell.startswith("`") for piece in re.findall(r"`([^`]+)`", cell)}


def test_every_message_in_troubleshooting_is_one_of_ours() -> None:
    source = [text for texts in messages().values() for text in texts]
    # These files also word what others raise or show.
    for file in ("glue/checks.py", "stale/report.py", "stale/strategy.py"):
        source += strings_in(ast.parse((ROOT / "lightning_hetero" / file).read_text()))
    strange = {piece for piece in troubles() if not any(piece in text for text in source)}
    assert not strange


ENGINE_FOLDERS = ("balanced", "stale", "pipeline", "transport", "glue", "data", "callbacks")
# What is raised here answers a wrong call or message from inside the package; the server says it "makes no sense".
PROTOCOL = {
    *(f"stale/{name}" for name in (
        "agreement", "codec", "coordinator", "epoch", "intake", "ledger", "replica", "server", "simulated_speeds",
        "simulator", "spans", "trace", "worker",
    )),
    *(f"transport/{name}" for name in (
        "areas", "base", "frames", "in_process", "listeners", "pairs", "rendezvous", "shared_memory", "sockets",
    )),
    *(f"pipeline/{name}" for name in (
        "arrival", "carriers", "cut", "footprint", "gradients", "outside", "plan_times", "profile", "resumable",
        "runtime", "sharing", "schedule/check", "schedule/generate", "schedule/policy", "schedule/replay",
        "schedule/text", "schedule/times",
    )),
}  # fmt: skip
WRONG_CALLS = (  # in other files, likewise
    "an area must be uint8", "keep has ", "members=", "rank=", "divide_by=", " optimizers, but the parameters of ",
    "optimizer_parameters names ", "call FlatLayout.adopt first", "its memory is damaged", "address=", "bytes [",
    "no parameters were published yet", " came instead of ", "unreachable",
    " must be whole numbers >= 1 that sum up to sample", "the head stands on the leader", "not its LoaderSpec",
    "a plan without groups", "StepLogs.publish()", " increasing numbers from 0 to ", "no rank has values for ",
)  # fmt: skip


def concerns_users(place: str, texts: list[str]) -> bool:
    file, kind = re.fullmatch(r"lightning_hetero/(.+)\.py:\d+ (.+)", place).groups()  # type: ignore[union-attr]
    internal = file in PROTOCOL or any(call in text for call in WRONG_CALLS for text in texts)
    return kind in TELLS | {"DisagreementError"} or not internal


def test_every_error_of_the_engines_is_in_troubleshooting() -> None:
    ours = tuple(f"lightning_hetero/{folder}/" for folder in ENGINE_FOLDERS)
    unanswered = {
        place: texts
        for place, texts in messages().items()
        if place.startswith(ours)
        and concerns_users(place, texts)
        and not any(piece in text for piece in troubles() for text in texts)
    }
    assert not unanswered


def test_exemptions_are_used() -> None:
    """A rule that matches nothing any more hides the next message that it matches by accident."""
    everything = messages()
    raising = {place.partition(".py:")[0].removeprefix("lightning_hetero/") for place in everything}
    assert raising >= PROTOCOL
    for call in WRONG_CALLS:
        assert any(call in text for texts in everything.values() for text in texts), call


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
