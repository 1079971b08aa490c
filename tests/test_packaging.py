"""What a user installs: built from a copy of the tree, and imported far away from it."""

import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LINKS = ("agent", "k8s", "master", "proto", "trainer")

# One worker builds once for all of these.
pytestmark = pytest.mark.xdist_group("packaging")

IMPORT_ALL = """
import importlib, importlib.metadata, pkgutil, sys
import elastic

extras = {"jinja2", "kubernetes", "prometheus_client", "starlette", "uvicorn"}
for module in pkgutil.walk_packages(elastic.__path__, "elastic."):
    if module.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in extras:
            raise
    else:
        print(module.name, sys.modules[module.name].__file__)
for script in importlib.metadata.distribution("elastic-runtime").entry_points:
    assert callable(script.load()), script
"""


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False
    )


def tracked(folder: Path) -> Iterator[Path]:
    """Yield what a clone would hold of `folder`, the links as links, relative to ROOT."""
    listing = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in run(*listing, str(folder), cwd=ROOT).stdout.split("\0"):
        if name and (ROOT / name).exists():
            yield Path(name)


def copy_tree(target: Path) -> Path:
    """Copy what a build reads to `target`, and return it."""
    folders = [Path("elastic"), *map(Path, LINKS)]
    tops = map(Path, ("pyproject.toml", "setup.py", "README.md", "LICENSE"))
    for path in [*tops, *(path for folder in folders for path in tracked(folder))]:
        if (ROOT / path).exists():
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / path, target / path, follow_symlinks=False)
    return target


def build(tree: Path, out: Path, *kinds: str) -> subprocess.CompletedProcess[str]:
    """Build in this environment: its setuptools is pinned, and nothing is fetched."""
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *kinds)
    return run(*command, cwd=tree)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel made from the sdist, as an index would serve it."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    built = build(copy_tree(tree), out)
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = out.glob("*.whl")
    return path


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def test_one_name_is_installed(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in names(wheel)}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"elastic"}


def test_wheel_holds_every_file(wheel: Path) -> None:
    """Data files too, which setuptools drops silently unless they are listed."""
    files = {path for folder in ("elastic", *LINKS) for path in tracked(Path(folder))}
    under = {p for p in files if not (ROOT / p).is_symlink()}
    expected = {str(p if p.parts[0] == "elastic" else Path("elastic", p)) for p in under}
    assert "elastic/py.typed" in expected
    assert expected <= names(wheel)


def test_commands_are_entry_points(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt"))
    parser = ConfigParser()
    parser.read_string(archive.read(name).decode())
    assert dict(parser["console_scripts"]) == {
        "elastic-run": "elastic.run:main",
        "elasticctl": "elastic.ctl:main",
    }


def test_installed_wheel_imports(wheel: Path, tmp_path: Path) -> None:
    """Every module is imported from the wheel, its dependencies from this environment."""
    home = tmp_path / "venv"
    venv.create(home)
    python = home / "bin" / "python"
    install = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps")
    installed = run(*install, "--no-index", wheel, cwd=tmp_path)
    assert installed.returncode == 0, installed.stderr
    (site,) = home.glob("lib/python*/site-packages")
    # A path in a .pth file is searched last, and .pth files found there (the editable install of
    # this checkout) are not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")

    imported = run(python, "-I", "-c", IMPORT_ALL, cwd=tmp_path)
    assert imported.returncode == 0, imported.stderr
    where = dict(line.split(" ", 1) for line in imported.stdout.splitlines())
    assert {f"elastic.{name}" for name in LINKS} <= set(where)
    assert all(Path(path).is_relative_to(site) for path in where.values()), where
    for command in ("elastic-run", "elasticctl"):
        assert (home / "bin" / command).exists()


def test_build_refuses_a_link_that_became_a_file(tmp_path: Path) -> None:
    tree = copy_tree(tmp_path / "tree")
    link = tree / "elastic" / "proto"
    link.unlink()
    link.write_text("../proto")  # what a clone without core.symlinks leaves
    built = build(tree, tmp_path / "dist", "--wheel")
    assert built.returncode != 0
    assert "elastic/proto is no folder" in built.stdout + built.stderr
    assert not list((tmp_path / "dist").glob("*"))
