"""Builds the C++ part with torch's own headers, once for each version of torch and of the sources."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from contextlib import suppress
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent / "native"
CONSTRAINTS = Path(__file__).resolve().parents[3] / "constraints.txt"
SOURCES = ("device.cpp", "tensors.cpp")
OPTIONS = ("-fPIC", "-O1", "-std=c++20")


class NotBuilt(RuntimeError):
    """The compiler said no; the message has its words."""


def torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise NotBuilt("torch is not installed")
    return Path(spec.origin).parent


def why_not() -> str:
    """Returns why there can be no simulation here; empty: there can."""
    wanted = re.search(r"^torch==(\S+)", CONSTRAINTS.read_text(), re.MULTILINE)
    found = version("torch").partition("+")[0]
    if wanted is None or found != wanted[1]:
        return f"simulated GPUs stand on torch {wanted and wanted[1]} (constraints.txt), this is {found}"
    if shutil.which("g++") is None:
        return "simulated GPUs need a C++ compiler (g++)"
    return ""


def library() -> Path:
    """Returns the file to load; builds it (half a minute) if there is none.

    Raises:
        NotBuilt: it does not compile.
    """
    texts = [(HERE / name).read_bytes() for name in (*SOURCES, "memory.h")]
    key = hashlib.sha256(b"\0".join([*texts, version("torch").encode(), repr(OPTIONS).encode()])).hexdigest()[:16]
    cache = _cache()
    found = cache / f"simgpu-{key}.so"
    if not found.exists():
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = _compile(Path(folder))
            os.replace(built, found)  # whoever builds at the same time builds the same
    return found


def _cache() -> Path:
    """Returns the folder of what is built; in the temporary one where the user's cannot be written."""
    users = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    for parent in (users, Path(tempfile.gettempdir())):
        folder = parent / "lightning-hetero-simgpu"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    raise NotBuilt(f"neither {users} nor {tempfile.gettempdir()} can be written")


def _compile(folder: Path) -> Path:
    include = torch_folder() / "include"
    paths = [f"-I{include}", f"-I{include}/torch/csrc/api/include"]
    objects = [folder / f"{name}.o" for name in SOURCES]
    running = [
        subprocess.Popen(["g++", "-c", *OPTIONS, *paths, str(HERE / name), "-o", str(made)],
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for name, made in zip(SOURCES, objects, strict=True)
    ]  # fmt: skip
    said = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise NotBuilt("simulated GPUs do not compile:\n" + "\n".join(said)[-4000:])
    built = folder / "simgpu.so"
    subprocess.run(["g++", "-shared", *map(str, objects), "-o", str(built)], check=True)
    return built
