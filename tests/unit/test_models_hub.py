"""Fetching from a hub: a small server on this machine speaks the hub's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxbatch.errors import ModelError
from mlxbatch.models.hub import HubReference, choose_gguf

COMMIT = hashlib.sha1(b"commit").hexdigest()
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": os.urandom(300_000),
    "tokenizer.json": b"{}",
    "modeling_evil.py": b"raise SystemExit('code from a repository was run')",
    "pytorch_model.bin": b"pickle",
}
FETCH = """
import json, sys
from mlxbatch.errors import ModelError
from mlxbatch.models.source import resolve
reports = []
try:
    refresh = sys.argv[2:] == ["refresh"]
    local = resolve(sys.argv[1], refresh=refresh, progress=lambda *report: reports.append(report))
    print(json.dumps({"path": str(local.path), "reports": reports}))
except ModelError as error:
    print(json.dumps({"error": str(error)}))
"""


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that a download needs. `cut` ends the first transfer half-way."""

    served: list[tuple[str, str | None]] = []  # noqa: RUF012
    cut = False
    asked = 0

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, body: bytes, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        Hub.asked += 1
        if path.startswith("/api/models/tiny/llama/tree/"):
            tree = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in FILES.items()
            ]
            self.answer(json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/api/models/tiny/llama"):
            siblings = [{"rfilename": name} for name in FILES]
            info = {"id": "tiny/llama", "modelId": "tiny/llama", "sha": COMMIT, "siblings": siblings}
            self.answer(json.dumps(info).encode(), Content_Type="application/json")
        elif path.startswith("/tiny/llama/resolve/"):
            self.send_file(path.rpartition("/")[2])
        else:
            self.answer(b'{"error": "Repository not found"}', 404, X_Error_Code="RepoNotFound")

    def send_file(self, name: str) -> None:
        data = FILES[name]
        wanted = self.headers.get("Range")
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted else 0
        headers = {
            "ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes",
            "Content_Length": str(len(data) - start),
        }  # fmt: skip
        if wanted:
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if self.command == "GET":
            Hub.served.append((name, wanted))
        body = data[start:]
        if Hub.cut and name == "model.safetensors" and self.command == "GET":
            Hub.cut = False
            body = body[:200_000]
        self.answer(body, 206 if wanted else 200, **headers)


@pytest.fixture
def hub() -> Iterator[ThreadingHTTPServer]:
    Hub.served, Hub.cut = [], False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(reference: str, home: Path, port: int, *options: str, **extra: str) -> dict[str, object]:
    environment = {
        **os.environ,
        "HF_HOME": str(home),
        "HF_ENDPOINT": f"http://127.0.0.1:{port}",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        **extra,
    }
    done = subprocess.run(
        [sys.executable, "-c", FETCH, reference, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(answer, dict)
    return answer


def test_a_repository_is_fetched_once_with_progress_and_without_code(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    first = fetch("tiny/llama", tmp_path, hub.server_port)
    folder = Path(str(first["path"]))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    reports = first["reports"]
    assert isinstance(reports, list)
    total = sum(len(FILES[name]) for name in ("config.json", "model.safetensors", "tokenizer.json"))
    assert reports[-1] == ["downloading tiny/llama", total, total]
    served = len(Hub.served)
    assert fetch("tiny/llama", tmp_path, hub.server_port, "refresh")["path"] == first["path"]
    assert len(Hub.served) == served


def test_a_download_that_broke_off_leaves_nothing_half_and_goes_on_from_there(
    hub: ThreadingHTTPServer, tmp_path: Path
) -> None:
    Hub.cut = True
    broken = fetch("tiny/llama", tmp_path, hub.server_port)
    if "error" in broken:  # huggingface_hub may also try again by itself
        assert "trying again goes on from there" in str(broken["error"])
        assert not list(tmp_path.rglob("model.safetensors"))
        assert "error" in fetch("tiny/llama", tmp_path, hub.server_port, HF_HUB_OFFLINE="1")
    answer = fetch("tiny/llama", tmp_path, hub.server_port)
    assert (Path(str(answer["path"])) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert [name for name, _ in Hub.served].count("config.json") == 1


def test_what_is_in_the_cache_is_used_without_asking_the_hub(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    online = fetch("tiny/llama", tmp_path, hub.server_port)
    asked = Hub.asked
    assert fetch("tiny/llama", tmp_path, hub.server_port)["path"] == online["path"]
    assert Hub.asked == asked
    assert fetch("tiny/llama", tmp_path, hub.server_port, "refresh", HF_HUB_OFFLINE="1")["path"] == online["path"]
    (Path(str(online["path"])) / "model.safetensors").unlink()
    missing = fetch("tiny/llama", tmp_path, hub.server_port, HF_HUB_OFFLINE="1")
    assert "cannot be reached" in str(missing["error"])
    assert fetch("tiny/llama", tmp_path, hub.server_port)["path"] == online["path"]


def test_offline_and_without_a_copy_the_message_says_so(tmp_path: Path) -> None:
    answer = fetch("tiny/llama", tmp_path, 1, HF_HUB_OFFLINE="1")
    assert "tiny/llama" in str(answer["error"]) and "offline" in str(answer["error"]).lower()


def test_an_unknown_repository_says_what_to_do(hub: ThreadingHTTPServer, tmp_path: Path) -> None:
    answer = fetch("tiny/nothing", tmp_path, hub.server_port)
    assert "the hub has no model tiny/nothing" in str(answer["error"])
    assert "Traceback" not in str(answer["error"])


NAMES = ["README.md", "m-Q4_K_M.gguf", "m-Q4_0.gguf", "m-IQ4_XS.gguf", "mmproj-m-f16.gguf",
         "big-Q8_0-00001-of-00002.gguf", "big-Q8_0-00002-of-00002.gguf"]  # fmt: skip


@pytest.mark.parametrize(
    ("reference", "chosen"),
    [
        ("o/r", "m-Q4_K_M.gguf"),
        ("o/r:q4_0", "m-Q4_0.gguf"),
        ("o/r:IQ4_XS", "m-IQ4_XS.gguf"),
        ("o/r:Q8_0", "big-Q8_0-00001-of-00002.gguf"),
        ("o/r:m-Q4_0.gguf", "m-Q4_0.gguf"),
    ],
)
def test_one_quantisation_is_chosen_among_several(reference: str, chosen: str) -> None:
    parsed = HubReference.parse(reference)
    assert parsed is not None
    assert choose_gguf(parsed, NAMES) == chosen


def test_a_quantisation_that_is_not_there_lists_those_that_are() -> None:
    with pytest.raises(ModelError, match=r"no file for 'Q4'.*m-IQ4_XS.gguf, m-Q4_0.gguf"):
        choose_gguf(HubReference("o/r", "Q4"), NAMES)


@pytest.mark.parametrize("text", ["plain", "a/b/c", "../x", "/abs/path", "a/b:c:d", "a b/c"])
def test_what_is_no_reference(text: str) -> None:
    assert HubReference.parse(text) is None
