"""A PostgreSQL server of the campaign, which can be restarted at any moment as if its machine had failed."""

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path


class Database:
    """A server with one database; a context that ends it.

    Attributes:
        url: URL of the database.
        restarts: number of restarts.
    """

    def __init__(self):
        """Starts the server, from Debian's package postgresql."""
        self._programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))[-1]
        self._options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": True}
        self._options |= {"user": "nobody"} if os.getuid() == 0 else {}  # the server refuses the superuser
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._folder = tempfile.mkdtemp(prefix="recjax-postgresql-")
        if os.getuid() == 0:
            shutil.chown(self._folder, "nobody")
        self._flags = ["-w", "-D", f"{self._folder}/data", "-o", f"-p {port} -k {self._folder}", "-l", "/dev/null"]
        self._run("initdb", "-D", f"{self._folder}/data", "-U", "me", "--auth=trust")
        self._run("pg_ctl", "start", *self._flags)
        self.url, self.restarts = f"postgresql://me@127.0.0.1:{port}/postgres", 0

    def __enter__(self) -> "Database":
        """The server."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the server and deletes its files."""
        self._run("pg_ctl", "stop", *self._flags[:3], "-m", "immediate")
        shutil.rmtree(self._folder)

    def restart(self) -> None:
        """Ends the server without a word to anybody, and starts it again."""
        self._run("pg_ctl", "restart", *self._flags, "-m", "immediate")
        self.restarts += 1

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run([self._programs / program, *arguments], **self._options)
