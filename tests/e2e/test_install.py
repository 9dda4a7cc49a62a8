"""What is installed works: wheel and checkout both show our config groups to any Hydra app and change none of its.

Nothing is downloaded: the wheel is built by hatchling in this interpreter and unpacked into a folder, which
stands on the search path of fresh interpreters, the checkout hidden.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from lightning_hetero import __version__

ROOT = Path(__file__).resolve().parents[2]
CHECKOUT = (ROOT, ROOT / "lightning_hetero" / "_hydra")  # what the editable install's .pth adds

BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"

# No site directory: neither an editable install's .pth nor a checkout on the path can help the wheel.
ISOLATED = """
import sys
from os.path import isdir
sys.path[:0] = {kept!r}
sys.path[:] = [p for p in sys.path if p in {kept!r} or p and not any(isdir(p + f) for f in {ours!r})]
"""

GROUPS = tuple(f"hetero/{name}" for name in ("strategy", "cluster", "controller", "emulation"))  # for other apps

STRANGER = """
import hydra
from omegaconf import DictConfig, OmegaConf

@hydra.main(config_path="my_conf", config_name="main", version_base="1.3")
def main(cfg: DictConfig) -> None:
    print(OmegaConf.to_yaml(cfg.strategy))
    import sys
    print("imported ours:", "lightning_hetero" in sys.modules, "imported torch:", "torch" in sys.modules)

main()
"""


# Nothing is imported of ours; Lightning is, as in any app that trains with it. In the end our own command starts.
NAMES = """
import hydra
import lightning.pytorch
import sys
from omegaconf import DictConfig

@hydra.main(config_path="my_conf", config_name="main", version_base="1.3")
def main(cfg: DictConfig) -> None:
    print("imported ours:", "lightning_hetero" in sys.modules)
    for name in ("hetero_balanced", "hetero_stale_spawn", "hetero_pipeline_find_unused_parameters_true", "ddp"):
        trainer = lightning.pytorch.Trainer(accelerator="cpu", devices=2, strategy=name, logger=False)
        print(type(trainer.strategy).__name__)

main()
print("----")
sys.argv[1:] = ["strategy=hetero_stale", "--cfg", "job"]
from lightning_hetero.cli.train import main
main()
"""

# Somebody else's app, run with each line of arguments; how each ended is told.
ROBOT = """
import hydra
from omegaconf import DictConfig, OmegaConf

@hydra.main(config_path="my_conf", config_name="main", version_base="1.3")
def main(cfg: DictConfig) -> None:
    print(OmegaConf.to_yaml(cfg, resolve=True), flush=True)

for line in list(sys.argv[1:]):
    sys.argv[1:] = line.split()
    try:
        code = main() or 0
    except SystemExit as end:
        code = end.code
    print(f"@@{line}@@{code}", flush=True)
"""


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def python(folder: Path, script: str, *arguments: str, paths: tuple[Path, ...]) -> str:
    """Returns what a script prints that must end well, see `start`."""
    result = start(folder, script, *arguments, paths=paths)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def start(
    folder: Path, script: str, *arguments: str, paths: tuple[Path, ...]
) -> subprocess.CompletedProcess[str]:
    """Runs ``script`` in ``folder`` in a fresh interpreter with ``paths`` first and the checkout hidden."""
    file = folder / "app.py"
    kept = [str(path) for path in paths]
    ours = ["/lightning_hetero", "/hydra_plugins/lightning_hetero"]
    file.write_text(ISOLATED.format(kept=kept, ours=ours) + script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(file), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


def build(kind: str, sources: Path, out: Path) -> Path:
    """Returns the file that hatchling builds from ``sources``."""
    command = [sys.executable, "-c", BUILD.replace("build_wheel", f"build_{kind}"), str(out)]
    result = subprocess.run(command, cwd=sources, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    return out / result.stdout.split()[-1]


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="session")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked source distribution, as installers do."""
    folder = tmp_path_factory.mktemp("dist")
    shutil.unpack_archive(sources, folder, filter="data")
    return build("wheel", folder / sources.name.removesuffix(".tar.gz"), folder)


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's content and nothing else, as ``pip install --no-deps --target`` leaves it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture
def stranger(tmp_path: Path) -> Path:
    """Somebody else's Hydra app, which names our strategy group in its defaults."""
    write(tmp_path / "my_conf" / "main.yaml", "defaults: [_self_, {hetero/strategy@strategy: hetero_balanced}]\n")
    return tmp_path


def test_the_wheel_contains_every_config_the_plugin_the_licence_and_the_commands(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    names, info = set(archive.namelist()), f"lightning_hetero-{__version__}.dist-info"
    commands = archive.read(f"{info}/entry_points.txt").decode()
    places = {"train": "command:train", "plan": "command:plan", "doctor": "doctor:main", "report": "report:main"}
    for name, place in places.items():
        assert f"lightning-hetero-{name} = lightning_hetero.cli.{place}" in commands
    assert f"{info}/licenses/LICENSE" in names
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "conf").rglob("*.yaml")]
    configs = {f"lightning_hetero/{file}" for file in files}
    own = ROOT / "lightning_hetero" / "cli" / "conf"
    configs |= {path.relative_to(ROOT).as_posix() for path in own.rglob("*.yaml")}
    assert "lightning_hetero/cli/conf/train.yaml" in configs and configs <= names
    plugin = {f"hydra_plugins/lightning_hetero/{name}.py" for name in ("__init__", "search_path")}
    assert plugin <= names
    assert {"lightning_hetero/conf/__init__.py", "lightning_hetero/py.typed"} <= names
    assert "hydra_plugins/__init__.py" not in names
    top = {name.split("/")[0] for name in names}
    assert top == {"lightning_hetero", "hydra_plugins", info}
    assert not any(name.startswith("lightning_hetero/_hydra") for name in names)


def test_the_source_distribution_is_small_and_has_no_tests_or_results(sources: Path) -> None:
    assert sources.stat().st_size < 1e6
    with tarfile.open(sources) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"lightning_hetero", "conf", "examples"}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "CITATION.cff", "hatch_build.py", "pyproject.toml"} <= names


def test_an_editable_install_adds_the_package_and_the_plugin_to_the_path(tmp_path: Path) -> None:
    """The two folders that a checkout is tried with below."""
    archive = zipfile.ZipFile(build("editable", ROOT, tmp_path))
    (path_file,) = [name for name in archive.namelist() if name.endswith(".pth")]
    assert archive.read(path_file).decode().splitlines() == [str(path) for path in CHECKOUT]
    assert not any(name.endswith((".py", ".yaml")) for name in archive.namelist())


@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_a_strangers_app_finds_our_strategy_by_name(
    kind: str, stranger: Path, request: pytest.FixtureRequest
) -> None:
    if kind == "wheel":
        paths = (request.getfixturevalue("installed"),)
    else:
        paths = CHECKOUT
    printed = python(stranger, STRANGER, paths=paths)
    assert "_target_: lightning_hetero." in printed
    assert "LoadBalancedStrategy" in printed
    assert "imported ours: False imported torch: False" in printed  # the plugin costs a stranger nothing
    overridden = python(stranger, STRANGER, "hetero/strategy@strategy=ddp", paths=paths)
    assert "LoadBalancedStrategy" not in overridden and "DDPStrategy" in overridden


def test_a_strangers_own_file_wins(stranger: Path, installed: Path) -> None:
    own = stranger / "my_conf" / "hetero" / "strategy"
    own.mkdir(parents=True)
    (own / "hetero_balanced.yaml").write_text("mine: true\n")
    printed = python(stranger, STRANGER, paths=(installed,))
    assert printed.startswith("mine: true")


def test_a_strangers_app_is_offered_our_four_groups_and_nothing_else(stranger: Path, installed: Path) -> None:
    printed = python(stranger, STRANGER, "--help", paths=(installed,))
    listed = printed.partition("== Configuration groups ==")[2].partition("== Config ==")[0]
    assert {line.split(":")[0] for line in listed.splitlines() if ": " in line} == set(GROUPS)
    assert {f"hetero/{path.name}" for path in (ROOT / "conf" / "hetero").iterdir() if path.is_dir()} == {*GROUPS}
    done = start(stranger, STRANGER, "--config-name=train", paths=(installed,))  # a file that the app has forgotten
    assert done.returncode != 0 and "Cannot find primary config 'train'" in done.stderr


def ends(folder: Path, *lines: str, paths: tuple[Path, ...], before: str = "") -> dict[str, tuple[str, str]]:
    """Returns for each line of arguments what `ROBOT` printed, errors and warnings included, and its exit code."""
    printed = python(folder, f"import sys; sys.stderr = sys.stdout\n{before}\n{ROBOT}", *lines, paths=paths)
    parts = re.split(r"^@@(.*)@@(.*)\n", printed, flags=re.M)
    return {line: (text, code) for text, line, code in zip(parts[0::3], parts[1::3], parts[2::3], strict=False)}


def test_an_app_with_groups_of_these_names_is_as_without_us(tmp_path: Path, installed: Path) -> None:
    """Wherever it has them: beside its main file, on a search path of its own, in Hydra's store."""
    for file in ("my_conf/controller/pid", "my_conf/cluster/lab", "more/strategy/greedy"):
        write(tmp_path / f"{file}.yaml", "gain: 1\n")
    store = "from hydra.core.config_store import ConfigStore\nConfigStore.instance().store("
    store += "'storm', {'wind': 1}, 'emulation')"
    defaults = "[_self_, {controller: pid}, {cluster: lab}, {strategy: greedy}, {emulation: storm}]"
    searched = f"hydra: {{searchpath: ['file://{tmp_path / 'more'}']}}"
    write(tmp_path / "my_conf" / "main.yaml", f"defaults: {defaults}\n{searched}\n")
    good = ["--help", "controller=pid"]
    bad = ["strategy=ddp", "emulation=none", "+cluster=islands", "+strategy@trainer.strategy=hetero_balanced"]
    bad += [f"controller={option}" for option in ("none", "auto", "lyapunov")]
    without, with_us = (ends(tmp_path, *good, *bad, paths=paths, before=store) for paths in ((), (installed,)))
    assert {line: code for line, (_, code) in without.items()} == dict.fromkeys(good, "0") | dict.fromkeys(bad, "1")
    for line, (text, code) in with_us.items():
        kept = [row for row in text.splitlines() if "lightning-hetero" not in row and not row.startswith("hetero/")]
        assert (kept, code) == (without[line][0].splitlines(), without[line][1])


def test_an_app_that_has_imported_lightning_may_name_our_strategies_and_the_command_finds_its_configuration(
    stranger: Path, installed: Path
) -> None:
    names, _, job = python(stranger, NAMES, paths=(installed,)).partition("----\n")
    assert names.splitlines() == [
        "imported ours: False",
        "LoadBalancedStrategy",
        "BoundedStalenessStrategy",
        "HeteroPipelineStrategy",
        "DDPStrategy",
    ]
    assert "BoundedStalenessStrategy" in job and "lightning_hetero.demo.DigitsCNN" in job
