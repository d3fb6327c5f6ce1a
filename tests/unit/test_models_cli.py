"""`mlxbatch models`, and the catalog behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_gguf
import tiny_models
from gguf import GGMLQuantizationType

from mlxbatch.cli.main import main
from mlxbatch.models.catalog import DEFAULT_MODEL, HubSource, WheelSource, load_catalog
from mlxbatch.models.hub import HubReference
from mlxbatch.models.progress import showing


@pytest.fixture(autouse=True)
def empty_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxbatch.models.fetch.user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)


def test_the_catalog_suits_macs_of_every_size() -> None:
    catalog = load_catalog()
    default = catalog[DEFAULT_MODEL].source
    assert isinstance(default, WheelSource)
    assert default.sha256 == "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    for memory in (16, 64, 192):
        fitting = [entry for entry in catalog.values() if memory / 4 < entry.memory_gb <= memory]
        assert any(entry.architecture.startswith("dense") for entry in fitting), memory
        assert any(entry.architecture.startswith("mixture") for entry in fitting), memory
    for name, entry in catalog.items():
        assert name == entry.name and "/" not in name
        if isinstance(entry.source, HubSource):
            assert HubReference.parse(entry.source.repo) is not None


def test_the_list_names_every_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "list"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in load_catalog())
    assert main(["models", "list", "--json"]) == 0
    items = json.loads(capsys.readouterr().out)
    assert [item["name"] for item in items] == list(load_catalog())
    assert {item["nbytes"] for item in items} == {0}


def test_show_describes_a_directory_and_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.write_dir("qwen3", tmp_path / "tiny")
    assert main(["models", "show", str(folder), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["model_type"], shown["layers"], shown["kv_heads"], shown["context"]) == ("qwen3", 3, 2, 2048)
    assert shown["weight_bytes"] == (folder / "model.safetensors").stat().st_size
    config = tiny_gguf.config_of("llama")
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path, "llama", tiny_gguf.build(config), config, GGMLQuantizationType.Q8_0)
    assert main(["models", "show", str(path)]) == 0
    text = capsys.readouterr().out
    assert "Q8_0" in text and "2048 tokens" in text and "GGUF" in text
    assert main(["models", "show", str(path), "--template"]) == 0
    assert capsys.readouterr().out.strip() == tiny_models.CHAT_TEMPLATE.strip()


def test_pull_of_a_local_model_prints_its_path(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_models.write_dir("llama", tmp_path / "tiny")
    assert main(["models", "pull", str(folder)]) == 0
    assert capsys.readouterr().out.strip() == str(folder)


def fetched_default() -> Path:
    from mlxbatch.models.fetch import cached_path

    source = load_catalog()[DEFAULT_MODEL].source
    assert isinstance(source, WheelSource)
    path = cached_path(source)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(1000))
    return path


def test_rm_asks_and_deletes_what_was_fetched(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = fetched_default()
    assert main(["models", "rm", DEFAULT_MODEL]) == 2
    assert "say -y" in capsys.readouterr().err and path.exists()
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda prompt: "n")
    assert main(["models", "rm", DEFAULT_MODEL]) == 0
    assert path.exists()
    assert main(["models", "rm", DEFAULT_MODEL, "-y"]) == 0
    assert "freed 1.00 KB" in capsys.readouterr().out and not path.exists()
    assert main(["models", "rm", DEFAULT_MODEL, "-y"]) == 3
    assert "not among the fetched models" in capsys.readouterr().err


def test_rm_never_touches_the_users_own_files(tmp_path: Path) -> None:
    folder = tiny_models.write_dir("llama", tmp_path / "tiny")
    assert main(["models", "rm", str(folder), "-y"]) == 3
    assert (folder / "model.safetensors").exists()


def cached_repository(root: Path, repo: str) -> None:
    """A complete snapshot as huggingface_hub lays it out."""
    folder = root / ("models--" + repo.replace("/", "--"))
    snapshot = folder / "snapshots" / ("0" * 40)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    tiny_models.write_dir("llama", snapshot)


def test_what_the_hub_cache_holds_is_listed_shown_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cached_repository(tmp_path / "hub", "someone/else")
    environment = {
        **os.environ,
        "HF_HOME": str(tmp_path),
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "mlxbatch.cli.main", "models"]

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=120)

    assert "someone/else" in run("list").stdout
    removed = run("rm", "someone/else", "-y")
    assert removed.returncode == 0 and "freed" in removed.stdout, removed.stderr
    assert "someone/else" not in run("list").stdout


def test_progress_off_a_terminal_is_one_line_for_each_piece_of_work(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as stream, showing(stream) as progress:
        for done in range(5):
            progress("downloading x", done, 5)
        progress("unpacking", 1, 1)
    assert (tmp_path / "log").read_text() == "downloading x\nunpacking\n"


def test_no_command_loads_mlx() -> None:
    code = (
        "import sys; from mlxbatch.cli.main import main; main(['models', 'list', '--json']);"
        "print([name for name in ('mlx.core', 'transformers') if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stderr.splitlines()[-1] == "[]", done.stderr
