"""Starts and ends testbeds (`scripts/testbed`): hosts on this machine with a slow network between them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TESTBED = ROOT / "scripts" / "testbed"
NOT_HERE = 3
GUARD_SECONDS = 60
SERVE = """
import socket, sys, time
with socket.create_server(("0.0.0.0", 5555)) as server:
    print("ready", flush=True)
    for _ in range(int(sys.argv[1])):
        connection, _ = server.accept()
        with connection:
            began, num_bytes = None, 0
            while block := connection.recv(1 << 20):
                began = began or time.perf_counter()
                num_bytes += len(block)
            print(num_bytes * 8 / (time.perf_counter() - began), flush=True)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 5555), timeout=float(sys.argv[3])) as connection:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 17)
    connection.settimeout(30)
    end = time.monotonic() + float(sys.argv[2])
    while time.monotonic() < end:
        connection.sendall(bytes(1 << 14))
"""


def call(*words: str | int, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script, from start to end."""
    command = [sys.executable, str(TESTBED), *map(str, words)]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=GUARD_SECONDS, check=False
    )


class Bed:
    """One testbed, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.started: list[subprocess.Popen[str]] = []

    def __call__(self, verb: str, *words: str | int) -> str:
        """A verb that is expected to succeed; skips where the machine lacks something."""
        done = call(verb, "--name", self.name, *words)
        if done.returncode == NOT_HERE and verb == "up":
            pytest.skip(done.stderr.strip())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def status(self) -> list[dict[str, Any]]:
        return list(json.loads(self("status", "--json")))

    def start(self, host: int, *words: str | int) -> subprocess.Popen[str]:
        """A command on a host, in the background."""
        command = [sys.executable, str(TESTBED), "exec", "--name", self.name, str(host), "--", *map(str, words)]
        self.started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return self.started[-1]

    def serve(self, host: int, num_connections: int) -> subprocess.Popen[str]:
        """A server that tells the bits per second of each connection."""
        server = self.start(host, sys.executable, "-c", SERVE, num_connections)
        assert server.stdout is not None
        assert server.stdout.readline() == "ready\n"
        return server

    def send(self, host: int, to: int, seconds: float, patience: float = 10.0) -> subprocess.Popen[str]:
        return self.start(host, sys.executable, "-c", SEND, f"10.77.0.{to + 1}", seconds, patience)

    def end(self) -> None:
        call("down", "--name", self.name)
        for process in self.started:
            process.communicate(timeout=GUARD_SECONDS)
