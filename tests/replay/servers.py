"""Loopback stand-ins for the servers of W&B and SwanLab: what a client sends is kept exactly as it came.

They show what the clients do, not what the vendors' servers make of it. Trouble is injected by rules:

    with WandbServer() as server:
        server.trouble.append(Trouble("file_stream", status=500, times=2))
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import time
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar, Self

from tests.replay.readers import OWN, Rows, joined


@dataclass
class Trouble:
    """What happens to `times` requests whose path (or GraphQL operation) holds `where`, after a wait."""

    where: str
    status: int | None = None
    times: float = float("inf")
    seconds: float = 0.0


class Server:
    """An HTTP server on the loopback; subclasses answer."""

    def __init__(self) -> None:
        self.trouble: list[Trouble] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"server_of_test": self})
        self._http = _Http(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def met(self, what: str) -> Trouble | None:
        """Return the trouble that a request runs into, if any."""
        with self.lock:
            self.requests.append(what)
            for rule in self.trouble:
                if rule.where in what and rule.times > 0:
                    rule.times -= 1
                    return rule
        return None

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        """Return status and content."""
        raise NotImplementedError

    def what(self, method: str, path: str, body: bytes) -> str:
        """Return what rules are compared with."""
        del body
        return f"{method} {path}"


class _Http(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of clients that went away."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_of_test: ClassVar[Server]

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        server, path = self.server_of_test, self.path.split("?")[0]
        rule = server.met(server.what(self.command, path, body))
        if rule is not None:
            time.sleep(rule.seconds)
        if rule is not None and rule.status is not None:
            status, content = rule.status, {"error": "injected", "errors": [{"message": "injected"}]}
        else:
            with server.lock:
                status, content = server.answer(self.command, path, body)
        data = json.dumps(content).encode()
        try:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)
        except OSError:  # the client has given up
            self.close_connection = True

    do_GET = do_POST = do_PUT = do_PATCH = _serve  # noqa: N815


@dataclass
class WandbRun:
    """What was sent of one run: per file its lines by offset; the runs's config and what it was called."""

    files: dict[str, dict[int, str]] = field(default_factory=dict)
    config: str | None = None
    about: dict[str, Any] = field(default_factory=dict)
    exit_code: int | None = None

    @property
    def history(self) -> list[dict[str, Any]]:
        """The history's rows in the order of their offsets."""
        lines = self.files.get("wandb-history.jsonl", {})
        return [json.loads(lines[offset]) for offset in sorted(lines)]


class WandbServer(Server):
    """Enough of W&B for wandb 0.31: runs, resuming, the file stream, asking for a run."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: dict[str, WandbRun] = {}
        self.deleted: set[str] = set()

    def what(self, method: str, path: str, body: bytes) -> str:
        return f"{method} {path} {_operation(json.loads(body)) if path == '/graphql' else ''}"

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        if path == "/graphql":
            request = json.loads(body)
            name = (request.get("variables") or {}).get("name")
            if name in self.deleted and _operation(request) == "UpsertBucket":
                return 409, {"errors": [{"message": "run was previously created and deleted"}]}
            return 200, {"data": self._graphql(request)}
        if method == "POST" and (found := re.match(r"/files/[^/]+/[^/]+/([^/]+)/file_stream", path)):
            return self._stream(found[1], json.loads(body))
        return (200 if method == "PUT" else 404), {}

    def _stream(self, name: str, request: dict[str, Any]) -> tuple[int, Any]:
        if name not in self.runs:
            return 404, {"error": f"run {name} not found"}
        run = self.runs[name]
        for file, chunk in (request.get("files") or {}).items():
            lines = run.files.setdefault(file, {})
            lines.update({chunk["offset"] + at: line for at, line in enumerate(chunk["content"])})
        if request.get("complete"):
            run.exit_code = request.get("exitcode", 0)
        return 200, {"exitcode": None, "limits": {}}

    def _graphql(self, request: dict[str, Any]) -> dict[str, Any]:
        query, operation = request["query"], _operation(request)
        values = request.get("variables") or {}
        name, project = values.get("name") or values.get("run"), values.get("project") or "p"
        entity = values.get("entity") or "ent"
        if operation == "UpsertBucket":
            new = name not in self.runs
            run = self.runs.setdefault(name, WandbRun())
            run.config = values.get("config") or run.config
            run.about |= {
                key: value for key, value in values.items() if value is not None and key != "config"
            }
            return {"upsertBucket": {"bucket": self._bucket(name, project, entity), "inserted": new}}
        if operation == "RunResumeStatus":
            bucket = self._bucket(name, project, entity) if name in self.runs else None
            return {
                "model": {
                    "id": "p1",
                    "name": project,
                    "entity": {"id": "e1", "name": entity},
                    "bucket": bucket,
                }
            }
        if operation == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/upload/{file}"} for file in values["files"]]
            return {"createRunFiles": {"runID": name, "uploadHeaders": [], "files": files}}
        if "project(" in query and "run(" in query:
            run = self._bucket(name, project, entity) if name in self.runs else None
            return {"project": {"internalId": "1", "run": run}}
        return {
            "viewer": {
                "id": "v1", "entity": "ent", "username": "u", "name": "u", "email": "u@x", "flags": "{}",
                "admin": False, "teams": {"edges": []}, "apiKeys": {"edges": []}, "deletedAt": None,
            },
            "serverInfo": {
                "cliVersionInfo": {"max_cli_version": "0.31.0"}, "latestLocalVersionInfo": None,
                "features": [],
            },
        }  # fmt: skip

    def rows(self, name: str) -> Rows:
        """Return a run's rows as they were sent."""
        return [
            (row["_step"], {key: value for key, value in row.items() if key not in OWN}, row["_timestamp"])
            for row in self.runs[name].history
        ]

    def delete(self, name: str) -> None:
        """Delete a run as a person does; its id can never be used again."""
        with self.lock:
            del self.runs[name]
            self.deleted.add(name)

    def _bucket(self, name: str, project: str, entity: str) -> dict[str, Any]:
        run = self.runs[name]
        history = run.history
        summary = run.files.get("wandb-summary.json", {})
        last = history[-1]["_step"] if history else -1
        return {
            "id": f"storage-{name}", "name": name, "displayName": name, "description": None,
            "config": run.config or "{}", "sweepName": None,
            "project": {"id": "p1", "name": project, "entity": {"id": "e1", "name": entity}},
            "historyLineCount": len(history), "logLineCount": 0, "eventsLineCount": 0,
            "summaryMetrics": summary[max(summary)] if summary else "{}",
            "historyTail": json.dumps([json.dumps(row) for row in history[-1:]]), "eventsTail": "[]",
            "tags": [], "notes": None, "wandbConfig": json.dumps({"t": 1}), "stopped": False,
            "state": "running" if run.exit_code is None else "finished",
            "historyKeys": {"lastStep": last, "keys": {}, "sets": []}, "readOnly": False, "sweep": None,
            "user": {"name": "u", "username": "u"}, "createdAt": "2026-01-01T00:00:00",
            "heartbeatAt": "2026-01-01T00:00:00", "group": None, "jobType": None, "commit": None,
            "username": "u", "projectId": "1", "systemMetrics": "{}",
        }  # fmt: skip


def _operation(request: dict[str, Any]) -> str:
    found = re.search(r"(?:query|mutation)\s+(\w+)", request["query"])
    return request.get("operationName") or (found[1] if found else "?")


@dataclass
class SwanlabExperiment:
    """What was sent of one experiment: every scalar row in order, columns, how it was described and ended."""

    created: str
    scalars: list[dict[str, Any]] = field(default_factory=list)
    about: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[Any] = field(default_factory=list)
    state: Any = None


class SwanlabServer(Server):
    """Enough of SwanLab's server for swanlab 0.10: login, projects, experiments, metrics, summaries."""

    def __init__(self) -> None:
        super().__init__()
        self.projects: set[str] = set()
        self.experiments: dict[str, SwanlabExperiment] = {}

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        del method
        content = json.loads(body) if body[:1] in (b"{", b"[") else {}
        path = path.removeprefix("/api")
        if path == "/login/api_key":
            user = {"username": "u", "name": "u"}
            expires = "2099-01-01T00:00:00.000Z"
            return 200, {"sid": "s", "expiredAt": expires, "userInfo": user, "webHost": "http://x"}
        if found := re.fullmatch(r"/project/([^/]+)/([^/]+)", path):
            return self._project(found[1], found[2])
        if re.fullmatch(r"/projects/[^/]+", path):
            self.projects.add(content["name"])
            return 201, {}
        if re.fullmatch(r"/project/[^/]+/[^/]+/experiment", path):
            return self._experiment(content)
        if found := re.fullmatch(r"/project/[^/]+/[^/]+/runs/([^/]+)(/\w+)?", path):
            return self._run(found[1], found[2], content)
        if found := re.fullmatch(r"/house/metrics/summaries/[^/]+/([^/]+)", path):
            last: dict[str, int] = {}
            for row in self.experiments[found[1]].scalars:
                last[row["key"]] = max(row["index"], last.get(row["key"], -1))
            return 200, {"scalar": [{"key": k, "step": s} for k, s in last.items()], "media": [], "log": []}
        if path == "/house/metrics":
            if content["experimentId"] not in self.experiments:
                return 404, {"code": "404", "message": "Not Found"}
            if content["type"] == "scalar":
                self.experiments[content["experimentId"]].scalars += content["metrics"]
        return 200, {}

    def rows(self, name: str) -> Rows:
        """Return an experiment's rows as they were sent; a key sent twice at a step fails."""
        return joined(
            (p["index"], datetime.fromisoformat(p["create_time"]).timestamp(), p["key"], float(p["data"]))
            for p in self.experiments[name].scalars
        )

    def _project(self, user: str, name: str) -> tuple[int, Any]:
        if name not in self.projects:
            return 404, {"code": "404", "message": "Not Found"}
        counts = {"experiments": len(self.experiments), "contributors": 1, "collaborators": 1, "clones": 0}
        about = {"cuid": f"p-{name}", "name": name, "path": f"/{user}/{name}", "version": 1}
        return 200, {**about, "group": {"username": user}, "_count": counts}

    def _experiment(self, content: dict[str, Any]) -> tuple[int, Any]:
        name = content["cuid"]
        new = name not in self.experiments
        made = self.experiments.setdefault(name, SwanlabExperiment(content["createdAt"]))
        made.about.append(content)
        answer = {"cuid": name, "slug": name, "name": content.get("name") or name, "createdAt": made.created}
        return 201 if new else 200, answer

    def _run(self, name: str, what: str | None, content: Any) -> tuple[int, Any]:
        if name not in self.experiments:
            return 404, {"code": "404", "message": "Not Found"}
        made = self.experiments[name]
        if what == "/state":
            made.state = content
        if what == "/profile":
            made.profiles.append(content)
        told = [profile["config"] for profile in made.profiles if "config" in profile]
        return 200, {"cuid": name, "createdAt": made.created, "profile": {"config": told[-1]} if told else {}}
