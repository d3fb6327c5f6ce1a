"""What is installed: one import name, every package, every data file, from wherever the user stands."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import venv
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "mlxbatch"
LINKED = ("tui", "models", "metal_kernels")
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
IGNORED = ("__pycache__", ".DS_Store")


def folders() -> list[Path]:
    found = [Path(folder) for folder, _, _ in os.walk(PACKAGE, followlinks=True)]
    return [folder for folder in found if not set(folder.parts) & set(IGNORED)]


def package_name(folder: Path) -> str:
    return ".".join(folder.relative_to(ROOT).parts)


def test_the_package_list_is_that_of_the_folders() -> None:
    packages = {package_name(folder) for folder in folders() if (folder / "__init__.py").is_file()}
    assert packages == set(SETUPTOOLS["packages"])
    assert len(SETUPTOOLS["packages"]) == len(packages)


def test_every_python_file_is_in_a_package() -> None:
    stray = [folder for folder in folders() if list(folder.glob("*.py")) and not (folder / "__init__.py").is_file()]
    assert not stray


def data_files() -> set[str]:
    """Files beside the code, as they should lie in the wheel."""
    return {
        str((folder / name).relative_to(ROOT))
        for folder in folders()
        for name in os.listdir(folder)
        if (folder / name).is_file() and not name.endswith(".py") and name not in IGNORED
    }


def test_every_data_file_is_declared() -> None:
    globs = [
        "/".join([*package.split("."), pattern])
        for package, patterns in SETUPTOOLS["package-data"].items()
        for pattern in patterns
    ]
    undeclared = {name for name in data_files() if not any(fnmatch(name, pattern) for pattern in globs)}
    assert not undeclared


@pytest.mark.parametrize("name", LINKED)
def test_the_links_are_relative_and_committed(name: str) -> None:
    assert os.readlink(PACKAGE / name) == f"../{name}"
    if (ROOT / ".git").exists():
        listed = subprocess.run(
            ["git", "ls-files", "-s", f"mlxbatch/{name}"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert listed.stdout.startswith("120000 ")


@pytest.mark.parametrize("name", LINKED)
def test_a_second_identity_is_refused(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    assert f"import this package as mlxbatch.{name}" in done.stderr


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """Standard output of a command, in an environment without this checkout."""
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH" and not k.startswith("MLXBATCH_")}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from the source distribution of what git holds, so that both are proved whole."""
    folder = tmp_path_factory.mktemp("build")
    source, tools = folder / "source", folder / "setuptools"
    run("git", "checkout-index", "--all", f"--prefix={source}/", cwd=ROOT)
    requirement = PYPROJECT["build-system"]["requires"][0]
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", tools, requirement, cwd=folder)
    build = "import sys, setuptools.build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
    run(sys.executable, "-c", build, "build_sdist", folder, cwd=source, path=tools)
    (sdist,) = folder.glob("*.tar.gz")
    run("tar", "-xf", sdist, cwd=folder)
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    run(sys.executable, "-c", build, "build_wheel", folder, cwd=unpacked, path=tools)
    (built,) = folder.glob("*.whl")
    return built


def committed(names: set[str]) -> set[str]:
    """Of files under mlxbatch/, those that git knows; it knows the linked folders by their own place only."""
    tracked = set(run("git", "ls-files", cwd=ROOT).split())
    return {name for name in names if os.path.relpath((ROOT / name).resolve(), ROOT) in tracked}


def test_the_wheel_holds_every_file_and_nothing_else(wheel: Path) -> None:
    code = {str(path.relative_to(ROOT)) for folder in folders() for path in folder.glob("*.py")}
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        licenses = [name for name in archive.namelist() if name.endswith("/licenses/LICENSE")]
    assert names == committed(code | data_files())
    assert {name.split("/")[0] for name in names} == {"mlxbatch"}
    assert licenses


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a fresh environment that holds the wheel, and this environment's other packages."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel, cwd=folder)
    (site,) = folder.glob("lib/python*/site-packages")
    dependencies = {Path(entry) for entry in sys.path if entry.endswith("site-packages") and Path(entry).is_dir()}
    # Plain lines add folders without reading the .pth files in them, so not this checkout's editable install.
    (site / "dependencies.pth").write_text("".join(f"{entry}\n" for entry in sorted(dependencies)))
    return folder / "bin"


@pytest.fixture
def foreign(tmp_path: Path) -> Path:
    """A user's folder with packages of the same generic names."""
    for name in LINKED:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the user\\'s own package')\n")
    (tmp_path / "in.txt").write_text("hello\n")
    return tmp_path


def test_the_installed_command_runs_beside_folders_of_the_same_names(installed: Path, foreign: Path) -> None:
    assert run(installed / "mlxbatch", "--version", cwd=foreign).startswith("mlxbatch ")
    run(installed / "python", "-m", "mlxbatch.cli.main", "run", "-i", "in.txt", "--dry-run", "-q", cwd=foreign)


def test_installed_packages_are_found_under_their_one_name(installed: Path, foreign: Path) -> None:
    code = "import mlxbatch.{0} as m; print(m.__file__)"
    for name in LINKED:
        place = Path(run(installed / "python", "-c", code.format(name), cwd=foreign).strip())
        assert place.is_relative_to(installed.parent)


def test_installed_data_is_read_as_package_data(installed: Path, foreign: Path) -> None:
    code = (
        "from importlib.resources import files; import sys;"
        "print(len(files(sys.argv[1]).joinpath(sys.argv[2]).read_bytes()))"
    )
    for name in sorted(committed(data_files())):
        package, _, inside = name.removeprefix("mlxbatch/").partition("/")
        if package in LINKED:
            read = run(installed / "python", "-c", code, f"mlxbatch.{package}", inside, cwd=foreign)
            assert int(read) == (ROOT / name).stat().st_size
