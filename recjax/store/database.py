"""Connects to a store's database, SQLite in a file or PostgreSQL, with time limits, and explains database errors."""

import contextlib
import os
import sqlite3
import time
import urllib.parse
from collections.abc import Generator
from pathlib import Path
from typing import Any, NamedTuple, cast

import sqlalchemy as sql

from recjax.errors import UserError
from recjax.runtime.passwords import has_password, without_password

LOCKED_SECONDS = 60  # A writer waits for another writer for at most this time.
_STATEMENT_SECONDS = 120  # PostgreSQL ends a statement after this time.
MAKE = "create one with python -m recjax.generate_experience or python -m recjax.import_experience"
RESTORE = "restore the store from a backup"
# Settings of PostgreSQL for each connection; the last four end the connections of a machine that is gone.
_LIMITS = {
    "lock_timeout": f"{LOCKED_SECONDS}s",
    "statement_timeout": f"{_STATEMENT_SECONDS}s",
    "idle_in_transaction_session_timeout": "300s",
    "tcp_keepalives_idle": "60",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "tcp_user_timeout": "90000",
}
# The same limits on this side of the connection.
_CONNECTING = {
    "connect_timeout": "10",
    "keepalives_idle": "60",
    "keepalives_interval": "10",
    "keepalives_count": "3",
    "tcp_user_timeout": "90000",
}
# Seconds to wait for a server that restarts, by a part of its error; a server that refuses connections may as well be
# the wrong one.
_RESTARTS = {"starting up": 20, "shutting down": 20, "recovery": 20, "closed the connection": 20, "refused": 3}


class Unavailable(UserError):
    """The database cannot be reached, or another process has locked it; the same call may succeed later."""


class _Escaped(sql.types.TypeDecorator):
    """Text in PostgreSQL, which has no NUL character; `escaped` writes this character as two others."""

    impl = sql.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Any) -> str | None:
        return escaped(value)

    def process_result_value(self, value: str | None, dialect: Any) -> str | None:
        if value is None or "\x1a" not in value:
            return value
        return value.replace("\x1a0", "\0").replace("\x1a1", "\x1a")


TEXT = sql.Text().with_variant(_Escaped(), "postgresql")


def escaped(value: Any) -> Any:
    """Text without NUL characters, which `TEXT` reads back; other values are unchanged."""
    if isinstance(value, str) and ("\0" in value or "\x1a" in value):
        return value.replace("\x1a", "\x1a1").replace("\0", "\x1a0")
    return value


class Database(NamedTuple):
    """An open database.

    name: file or URL, for messages.
    file: file of SQLite, without links; None for other databases and in memory.
    columns: names of the columns of each table in an SQLite file.
    """

    engine: sql.Engine
    name: str
    file: Path | None = None
    columns: dict[str, list[str]] = {}


def exists(place: str | Path) -> bool:
    """True for a URL, a folder, or a file that is not an empty database, in which a process is creating a store."""
    if "://" in str(place):
        return True
    path = _path_of(place)
    return path.exists() and (path.is_dir() or _columns_in(path) != {})


def store_name(place: str | Path) -> str:
    """The name of a store for messages: its file, or its URL without the password."""
    if "://" not in str(place):
        return str(place)
    return without_password(str(place))


def open_database(place: str | Path | None, create: bool, follows: bool) -> Database:
    """Opens the database of a store; `Store` describes the arguments.

    If the database is another program's, recjax does not change it.

    Raises:
        UserError: no such database, or another program's database.
    """
    if place is None:
        return Database(_sqlite(":memory:", sql.StaticPool), "a store in memory")
    name = store_name(place)
    if "://" in str(place):
        return Database(_postgresql(str(place), name), name)
    path = _path_of(place)
    if path.is_dir():
        raise UserError(name, "is a folder, and a store is a file", f"give a file, such as {path / 'experience.db'}")
    if not path.exists():
        if not create:
            raise UserError(name, "is not an experience store (no such file)", MAKE)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
        except OSError as error:
            raise UserError(name, f"cannot be written ({error.strerror})", "give another path") from error
        lasts_of(path).unlink(missing_ok=True)
    if not os.access(path, os.R_OK):
        raise UserError(name, "cannot be read (permission denied)", "ask its owner for permission to read it")
    access = _access(path, name, follows)
    columns = _columns_in(path)
    lasts = lasts_of(path)
    if not columns and lasts.is_file():
        # SQLite writes the tables of a new file into the file NAME-wal first.
        words = lasts.read_text(encoding="ascii", errors="replace").split()
        completions = words[1] if len(words) > 1 else ""
        raise UserError(
            name,
            f"the last {completions} completions are gone, perhaps with the file {path}-wal",
            f"restore the files from a backup, or delete {path} to accept the loss",
        )
    if columns and "version" not in columns.get("store", ()):
        remedy = "it is a database of another program; give another file" if create else MAKE
        raise UserError(name, "is not an experience store", remedy)
    return Database(_sqlite(_uri(path, access), sql.QueuePool), name, path, columns or {})


def _path_of(place: str | Path) -> Path:
    """The file to which a link points, because SQLite's other files and the server's lock lie next to it."""
    try:
        path = Path(place).expanduser().resolve()
        path.exists()
        return path
    except (OSError, RuntimeError) as error:
        problem = getattr(error, "strerror", None) or error
        raise UserError(f"{str(place)!r:.200}", f"is no path of a file ({problem})", "give another file") from error


def _access(path: Path, name: str, follows: bool) -> str:
    """SQLite's mode for a file: in a folder without write permission, SQLite has to know if the file can change."""
    if os.access(path.parent, os.W_OK):
        return "mode=rw"
    log = path.with_name(f"{path.name}-wal")
    index = path.with_name(f"{path.name}-shm")
    if log.exists() and index.exists():
        return "mode=ro"
    if log.exists() and log.stat().st_size:
        problem = f"its newest rows are in {log}, which SQLite cannot read in a folder without write permission"
        raise UserError(name, problem, "copy all files of the store to another folder, and give that copy")
    if follows:
        problem = "SQLite does not see changes in a folder without write permission unless a process writes the store"
        raise UserError(name, problem, "start the writer first, grant write permission, or use PostgreSQL")
    return "mode=ro&immutable=1"


def _uri(path: Path, mode: str) -> str:
    return f"file:{urllib.parse.quote(str(path))}?{mode}"


def _columns_in(path: Path) -> dict[str, list[str]] | None:
    """The columns of each table in a file of SQLite, without a change to it; None if SQLite cannot read the file.

    Views, virtual tables and tables with triggers, whose statements could run forever, have no columns.
    """
    columns: dict[str, list[str]] = {}
    # Without locks, SQLite adds no files next to another program's database, but does not read the log.
    for mode in ("mode=ro&immutable=1", "mode=ro"):
        try:
            with contextlib.closing(sqlite3.connect(_uri(path, mode), LOCKED_SECONDS, uri=True)) as database:
                database.execute("pragma trusted_schema=off")
                rows = database.execute(
                    "select type, tbl_name, sql from sqlite_master where type != 'index'"
                ).fetchall()
                hostile = {table for kind, table, text in rows if kind != "table" or " virtual " in text[:20].lower()}
                for table in {table for _, table, _ in rows}:
                    names = []
                    if table not in hostile:
                        # In a computed column, `hidden` is not 0.
                        plain = "select name from pragma_table_xinfo(?) where hidden = 0"
                        names = [name for (name,) in database.execute(plain, (table,))]
                    columns[table] = names
        except sqlite3.Error:
            if mode == "mode=ro":
                return None
        if columns:
            break
    return columns


def _sqlite(uri: str, pool: type[sql.Pool]) -> sql.Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(uri, LOCKED_SECONDS, isolation_level=None, check_same_thread=False, uri=True)
        with contextlib.suppress(Exception):  # A read-only file, or one that is no database, gives its error later.
            connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=full")
        connection.execute("pragma trusted_schema=off")
        connection.execute("pragma cell_size_check=on")
        return connection

    # Each thread has a connection of its own, so that it waits only for SQLite's lock.
    options = {"max_overflow": -1} if pool is sql.QueuePool else {}
    engine = sql.create_engine("sqlite://", creator=connect, poolclass=pool, hide_parameters=True, **options)

    @sql.event.listens_for(engine, "begin")
    def begin(connection: sql.Connection) -> None:
        writes = connection.get_execution_options().get("writes")
        connection.exec_driver_sql("begin immediate" if writes else "begin")

    return engine


def _postgresql(place: str, name: str) -> sql.Engine:
    problem = has_password(place)
    if problem:
        raise UserError(name, problem)
    if not place.startswith("postgresql://"):
        raise UserError(name, "recjax knows no such database", "give a file, or postgresql://user@host/name")
    try:
        import psycopg

        url = sql.make_url(place).set(drivername="postgresql+psycopg")
    except ModuleNotFoundError as error:
        raise UserError(name, f"needs the package {error.name}", "pip install 'psycopg[binary]'") from error
    except (ValueError, sql.exc.ArgumentError):
        raise UserError(name, "is no URL of a database", "give postgresql://user@host/name") from None

    class Connection(psycopg.Connection):
        """A connection that does not wait for ever for a server that has stopped without closing it."""

        def wait(self, generator: Generator, *arguments: Any, **options: Any) -> Any:
            try:
                return super().wait(cast(Any, _limited(generator)), *arguments, **options)
            except TimeoutError:
                self.pgconn.finish()
                raise psycopg.OperationalError("the server does not answer") from None

    given = str(url.query.get("options", ""))
    limits = [f"set {key} = '{value}'" for key, value in _LIMITS.items() if key not in given]
    options = {key: value for key, value in _CONNECTING.items() if key not in url.query}
    engine = sql.create_engine(
        url, connect_args=options, pool_pre_ping=True, pool_timeout=LOCKED_SECONDS, hide_parameters=True
    )

    @sql.event.listens_for(engine, "do_connect")
    def connect(_: Any, __: Any, arguments: list, options: dict) -> Connection:
        began = time.monotonic()
        while True:
            try:
                connection = Connection.connect(*arguments, **options)
                with connection.transaction():
                    limit: Any = "; ".join(limits) or "select 1"
                    connection.execute(limit)
                return connection
            except psycopg.OperationalError as error:
                waits = [seconds for words, seconds in _RESTARTS.items() if words in str(error)]
                wait = waits[0] if waits else 0
                if time.monotonic() - began > wait:
                    raise
                time.sleep(0.1)

    return engine


def _limited(generator: Generator) -> Generator:
    """The steps of a statement of psycopg, which asks again and again whether the server has answered.

    Raises:
        TimeoutError: no answer for somewhat longer than the server's own limit.
    """
    end = time.monotonic() + 1.1 * _STATEMENT_SECONDS
    ready = None
    while True:
        try:
            wanted = generator.send(ready)
        except StopIteration as done:
            return done.value
        ready = yield wanted
        if not ready and time.monotonic() > end:
            raise TimeoutError


def is_unavailable(error: Exception) -> bool:
    """True if the same statement may succeed later: the server is gone or stops, or other processes lock its rows."""
    original = getattr(error, "orig", None)
    if isinstance(error, sql.exc.TimeoutError):
        return True  # All connections are in use.
    if not isinstance(error, sql.exc.OperationalError) or isinstance(original, sqlite3.Error):
        return "locked" in str(original)
    assert original is not None
    # Without a connection, the error has no state.
    return not original.sqlstate or str(original.sqlstate)[:2] in ("08", "53", "55", "57")


def explained(error: Exception, name: str) -> str:
    """The first line of a database's error message, with a remedy."""
    message = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
    remedies = {
        "locked": f"another process writes for more than {LOCKED_SECONDS} seconds; end it, or try again later",
        "lock timeout": f"another process writes for more than {LOCKED_SECONDS} seconds; end it, or try again later",
        "QueuePool": "too many threads use the store; try again later",
        "not a database": f"it is not an experience store; {MAKE}",
        "malformed": f"the file is damaged; {RESTORE}",
        "full": "free disk space, and run the same command again to continue",
        "disk I/O": "free disk space, check the disk, and run the same command again to continue",
        "readonly": "grant write permission, and run the same command again to continue",
        "unable to open": "grant permission to read and write the file and its folder",
        "password": "set the environment variable PGPASSWORD, or write the password to ~/.pgpass",
        "index": f"an index is damaged; run python -m recjax.inspect_experience {name} --rebuild",
    }
    for words, remedy in remedies.items():
        if words in message:
            return f"{message}; {remedy}"
    if "://" in name:
        return f"{message}; correct the URL, or try again"
    return f"{message}; the file is damaged; {RESTORE}"


def lasts_of(file: Path) -> Path:
    """The file next to SQLite's files that contains the numbers of the last rows."""
    return file.with_name(f"{file.name}-last")
