"""What is installed works: wheel and checkout both show our config groups to any Hydra app.

Nothing is downloaded: the wheel is built by hatchling in this interpreter and unpacked into a folder, which
stands on the search path of fresh interpreters, the checkout hidden.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lightning_hetero import __version__

ROOT = Path(__file__).resolve().parents[2]
FILES = ("pyproject.toml", "hatch_build.py", "LICENSE", "README.md", ".gitignore")
FOLDERS = ("lightning_hetero", "conf")

CHECKOUT = (ROOT, ROOT / "lightning_hetero" / "_hydra")  # what the editable install's .pth adds

BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"

# No site directory: neither an editable install's .pth nor a checkout on the path can help the wheel.
ISOLATED = """
import sys
sys.path[:0] = [{folders}]
sys.path[:] = [p for p in sys.path if p and p not in {hidden!r}]
"""

GROUPS = ("strategy", "cluster", "controller", "emulation")  # what other apps are offered

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


# Nothing is imported of ours; Lightning is, as in any app that trains with it.
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
"""


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
    hidden = [str(ROOT), str(ROOT / "lightning_hetero" / "_hydra")]
    hidden = [path for path in hidden if path not in map(str, paths)]
    folders = ", ".join(repr(str(path)) for path in paths)
    file.write_text(ISOLATED.format(folders=folders, hidden=hidden) + script)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(file), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel from a copy of the sources, so that nothing is written into the checkout."""
    copy, out = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("dist")
    for name in FILES:
        shutil.copy(ROOT / name, copy)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", BUILD, str(out)]
    result = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(out.glob("lightning_hetero-*.whl"))


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
    (tmp_path / "my_conf").mkdir()
    (tmp_path / "my_conf" / "main.yaml").write_text("defaults:\n  - _self_\n  - strategy: hetero_balanced\n")
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
    plugin = {"hydra_plugins/lightning_hetero/__init__.py", "hydra_plugins/lightning_hetero/search_path.py"}
    assert plugin <= names
    assert {"lightning_hetero/conf/__init__.py", "lightning_hetero/py.typed"} <= names
    assert "hydra_plugins/__init__.py" not in names
    top = {name.split("/")[0] for name in names}
    assert top == {"lightning_hetero", "hydra_plugins", info}
    assert not any(name.startswith("lightning_hetero/_hydra") for name in names)


def test_an_editable_install_adds_the_package_and_the_plugin_to_the_path(tmp_path: Path) -> None:
    """The two folders that a checkout is tried with below."""
    command = [sys.executable, "-c", BUILD.replace("build_wheel", "build_editable"), str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
    archive = zipfile.ZipFile(next(tmp_path.glob("lightning_hetero-*.whl")))
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
    overridden = python(stranger, STRANGER, "strategy=ddp", paths=paths)
    assert "LoadBalancedStrategy" not in overridden and "DDPStrategy" in overridden


def test_a_strangers_own_file_wins(stranger: Path, installed: Path) -> None:
    own = stranger / "my_conf" / "strategy"
    own.mkdir()
    (own / "hetero_balanced.yaml").write_text("mine: true\n")
    printed = python(stranger, STRANGER, paths=(installed,))
    assert printed.startswith("mine: true")


def test_a_strangers_app_is_offered_our_four_groups_and_nothing_else(stranger: Path, installed: Path) -> None:
    printed = python(stranger, STRANGER, "--help", paths=(installed,))
    listed = printed.partition("== Configuration groups ==")[2].partition("== Config ==")[0]
    assert {line.split(":")[0] for line in listed.splitlines() if ": " in line} == set(GROUPS)
    assert {path.name for path in (ROOT / "conf").iterdir() if path.is_dir()} == {*GROUPS}
    done = start(stranger, STRANGER, "--config-name=train", paths=(installed,))  # a file that the app has forgotten
    assert done.returncode != 0 and "Cannot find primary config 'train'" in done.stderr


def test_an_app_that_has_imported_lightning_may_name_our_strategies(stranger: Path, installed: Path) -> None:
    printed = python(stranger, NAMES, paths=(installed,))
    assert printed.splitlines() == [
        "imported ours: False",
        "LoadBalancedStrategy",
        "BoundedStalenessStrategy",
        "HeteroPipelineStrategy",
        "DDPStrategy",
    ]


def test_the_command_finds_its_configuration_in_a_wheel(tmp_path: Path, installed: Path) -> None:
    script = "from lightning_hetero.cli.train import main; main()"
    printed = python(tmp_path, script, "strategy=hetero_stale", "--cfg", "job", paths=(installed,))
    assert "BoundedStalenessStrategy" in printed and "lightning_hetero.demo.DigitsCNN" in printed
