"""Begins trainings from a process that has imported all they need: a tenth of a second each, instead of five.

`serve` forks; what is forked is armed by ckpt-chaos as an interpreter that begins would be, by its ``sitecustomize``.
Run as a program, this module is the command: it asks the server, passes on its output, and ends as the training does.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable

ADDRESS = "SHADE_OUTSIDE_SERVER"
"""Environment variable: the server's socket."""


def serve(listener: socket.socket, main: Callable[[list[str]], None], boot: str) -> None:
    """Forks for each command until it is killed.

    Args:
        listener: Where commands arrive.
        main: What they run, with their arguments.
        boot: The file that arms a process.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(_attend(connection, main, boot))
        connection.close()


def _attend(connection: socket.socket, main: Callable[[list[str]], None], boot: str) -> int:
    message, outputs, _, _ = socket.recv_fds(connection, 2**20, 2)
    training = os.fork()
    if training == 0:
        connection.close()
        os._exit(_train(*json.loads(message), outputs, main, boot))
    ended = os.pidfd_open(training)
    if ended not in select.select([ended, connection], [], [])[0]:
        os.kill(training, signal.SIGKILL)  # as the command was
    code = os.waitstatus_to_exitcode(os.waitpid(training, 0)[1])
    with contextlib.suppress(OSError):
        connection.send(str(code).encode())
    return 0


def _train(
    arguments: list[str],
    environment: dict[str, str],
    outputs: list[int],
    main: Callable[[list[str]], None],
    boot: str,
) -> int:
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
    os.environ.clear()
    os.environ.update(environment)
    try:
        with open(boot) as file:
            exec(compile(file.read(), boot, "exec"), {"__name__": "sitecustomize"})
        main(arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        code = 1 if isinstance(end.code, str) else end.code or 0
    except BaseException:  # noqa: BLE001 - said as an interpreter says it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    else:
        code = 0
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def ask() -> int:
    """Runs a command on the server; returns its exit code."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.connect(os.environ[ADDRESS])
        message = json.dumps([sys.argv[1:], dict(os.environ)]).encode()
        socket.send_fds(server, [message], [1, 2])
        code = int(server.recv(16) or b"1")
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(ask())
