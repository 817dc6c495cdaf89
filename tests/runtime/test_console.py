"""What a command prints: its own lines, a bar or lines of progress, and libraries' messages only when asked for."""

import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from recjax.runtime import console, workers
from recjax.runtime.workers import cores
from tests import commands
from tests.commands import Command
from tests.training.tiny_run import TINY

ROOT = Path(__file__).parents[2]
# A library that logs as orbax does, through absl, and as others do; it lies in a folder called recjax.
CHATTY = """
import logging
import absl.logging
from tests.training.tiny_run import digit_share

absl.logging.info("absl's library speaks")
logging.getLogger("other").info("another library speaks")
"""

UNDER_WAY = ["evaluating the initial policy: 10 problems", "sampling the first batch, which compiles the sampler"]
UNDER_WAY += ["compiling the update"]


def printed_lines(folder, *arguments):
    """Lines of standard output and error of a tiny run that is started in a folder called recjax."""
    place = folder / "recjax"
    place.mkdir()
    (place / "chatty.py").write_text(CHATTY)
    (place / "tiny.yaml").write_text(TINY.replace("tests.training.tiny_run:", "chatty:"))
    command = ["-m", "recjax.train", "--config", "tiny.yaml", "output=run", "training.steps=4"]
    environment = os.environ | {"PYTHONPATH": f"{place}:{ROOT}", "COLUMNS": "120"}
    done = commands.run([*command, *arguments], cwd=place, env=environment, stderr=subprocess.STDOUT)
    assert done.returncode == 0 and "\r" not in done.stdout, done.stdout
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_run_without_a_terminal_prints_its_lines(tmp_path):
    lines = printed_lines(tmp_path)
    table = next(index for index, line in enumerate(lines) if "run: 4 steps" in line)
    last = lines[table - 1]
    assert last.startswith("rec_one_side_nois: step 4/4, ") and "reward=" in last and "accuracy=" in last
    # A slow machine adds a duration where work takes a second, and a state of the bar every ten seconds.
    slow = re.compile(
        rf"rec_one_side_nois: step \d/4, \d+ s|({'|'.join(UNDER_WAY)}|compiling evaluation and sampler): \d+ s$"
    )
    patterns = ["folder of compiled programs: ", "model.dtype = auto: ", "compiling the update at the same time"]
    if cores() > 2:
        patterns[2:2] = ["compiling evaluation and sampler while weights are read"]
        patterns += ["compiling evaluation and sampler …$"]
    patterns += [f"{work} …$" for work in UNDER_WAY]
    patterns += ["step 3: held-out accuracy ", "step 4: held-out accuracy "]
    said = [line for line in lines[:table] if not slow.match(line)]
    assert len(said) == len(patterns) and all(map(re.match, patterns, said)), said
    assert not [line for line in lines if "speaks" in line or ".py:" in line] and len(lines) - table < 14, lines


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["--verbosity=0"]])
def test_a_run_trains_on_when_its_reader_leaves(tmp_path, arguments, ended):
    (tmp_path / "tiny.yaml").write_text(TINY)
    command = ["-m", "recjax.train", "--config", "tiny.yaml", "output=run [/x]", "training.steps=4", *arguments]
    process = Command(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    ended.append(process)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert json.loads((tmp_path / "run [/x]" / "summary.json").read_text())["steps"] == 4


PRINTS = """
import logging, sys, threading
import absl.logging
from absl import app, flags
from rich.table import Table
from tqdm import tqdm
from recjax.runtime import console
from tests import commands
from tests.commands import Command

@console.command
def main(argv):
    sys.stdin.readline()
    for _ in range(3):
        print("a" * 10000)
        logging.getLogger("recjax").warning("b")
        absl.logging.error("c")
        print("d", file=sys.stderr, flush=True)
        table = Table("e")
        table.add_row("f" * 1000)
        console.plain_console().print(table)
        console.plain_console(stderr=True).print(table)
        with console.progress_bar("g", 2, unit="step") as bar, tqdm(total=2) as other:
            bar.write("h")
            bar.update()
            other.update()
    open("done", "w").close()

app.run(main)
"""


@pytest.mark.parametrize("closed", [["stdout"], ["stderr"], ["stdout", "stderr"]])
def test_printing_to_a_closed_pipe_ends_nothing(tmp_path, closed):
    (tmp_path / "prints.py").write_text(PRINTS)
    options = {"cwd": tmp_path, "env": os.environ | {"PYTHONPATH": str(ROOT)}, "stdin": subprocess.PIPE, "text": True}
    pipes = {name: subprocess.PIPE if name in closed else subprocess.DEVNULL for name in ("stdout", "stderr")}
    with subprocess.Popen([sys.executable, "prints.py"], **options, **pipes) as process:
        for name in closed:
            getattr(process, name).close()
        process.stdin.write("go\n")
        process.stdin.close()
        assert process.wait(timeout=120) == 0
    assert (tmp_path / "done").exists()


def test_streams_that_were_closed_at_the_start_end_nothing(tmp_path):
    (tmp_path / "prints.py").write_text(PRINTS)
    line = f"{sys.executable} prints.py </dev/null >&- 2>&-"
    done = subprocess.run(line, shell=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120)
    assert done.returncode == 0 and (tmp_path / "done").exists()


def test_a_full_disk_is_no_closed_pipe(monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stdout", Full())
    console.outlast_readers()
    with pytest.raises(OSError, match="No space left"):
        print("x")


def test_unusable_files_are_errors_of_one_line(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "x", tmp_path / "none" / "x", tmp_path):

        def main(argv, path=path):
            path.write_text("x")

        with pytest.raises(SystemExit) as ended:
            console.command(main)([])
        assert re.match(f"error: {path}: .*; name another path", ended.value.code)
        logging.disable(logging.NOTSET)


def test_a_wrong_flag_is_an_error_with_the_usage(tmp_path):
    for arguments, problem in {
        "train my.yaml": "--config is missing; the command is python -m recjax.train --config ",
        "train --config my.yaml --steps 5": "Unknown command line flag 'steps'; the command is python -m recjax.train ",
        "export runs/one models/one": "--output is missing; the command is python -m recjax.export --run runs/NAME --o",
        "serve --port 99999": "flag --port=99999: 99999 is not an integer in the range [0, 65535]; the command is ",
    }.items():
        done = commands.run(["-m", *f"recjax.{arguments}".split()], cwd=tmp_path)
        assert done.returncode == 1 and done.stderr.startswith(f"error: {problem}"), done.stderr
        assert done.stderr.endswith("; --help shows all flags\n") and done.stderr.count("\n") == 1


def test_no_table_reads_markup_in_what_it_shows(capsys):
    from rich.table import Table

    text = "runs/[/x] [red]a[/red] :smile:"
    table = Table(text, title=text)
    table.add_row(text)
    console.plain_console(width=200).print(table)
    console.plain_console(width=200).print(text)
    assert capsys.readouterr().out.count(text) == 4
    direct = [path for path in ROOT.glob("recjax/**/*.py") if re.search(r"(?<!\w)Console\(", path.read_text())]
    assert [path.name for path in direct] == ["console.py"]


@pytest.mark.slow
def test_verbosity_shows_what_libraries_log(tmp_path):
    lines = printed_lines(tmp_path, "--verbosity=0")
    said = [line for line in lines if "speaks" in line]
    assert len(said) == 2 and "absl's library" in said[0] and all("chatty.py:" in line for line in said)
    assert len([line for line in lines if "folder of compiled programs: " in line]) == 1


class Stream(io.StringIO):
    """A standard error that keeps what it gets, and says that it is a terminal or not."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


def test_messages_are_plain_and_warnings_begin_with_the_word(package_logger, capsys):
    console.configure_logging()
    package_logger.getChild("somewhere").info("%d problems", 3)
    package_logger.getChild("somewhere").warning("%d problems", 4)
    assert capsys.readouterr().err == "3 problems\nwarning: 4 problems\n"
    package_logger.getChild("somewhere").debug("%d problems", 5)
    assert capsys.readouterr().err == ""


def test_terminal_messages_stand_above_the_bar(package_logger, monkeypatch):
    terminal = Stream(True)
    monkeypatch.setattr(sys, "stderr", terminal)
    console.configure_logging()
    with console.progress_bar("grpo", 200, unit="step") as bar:
        package_logger.info("something happened")
        bar.update()
    before, after = terminal.getvalue().split("something happened\n")
    assert before.endswith("\r") and after.startswith("\rgrpo   0%|")


def test_a_long_description_leaves_two_fields_visible(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr("sys.stderr", Terminal())
    with console.progress_bar("rec_one_side_nois", 1200, unit="step") as bar:
        bar.ncols = 80
        bar.set_postfix({"reward": "0.92", "tok/s": "5000", "stale": "19"}, refresh=False)
        shown = str(bar)
    assert shown.startswith("rec_one_s…") and shown.count("=") == 2 and len(shown) <= 80


@pytest.mark.parametrize(("columns", "fields"), [(60, 1), (80, 3), (130, 5)])
def test_bar_fits_the_terminal_and_ignores_the_first_unit(monkeypatch, columns, fields):
    terminal, clock = Stream(True), [0.0]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    monkeypatch.setenv("COLUMNS", str(columns))
    with console.progress_bar("grpo", 1200, unit="step") as bar:
        bar.ncols = columns
        for step in range(3):
            clock[0] += 60.0 if step == 0 else 0.5
            values = {"reward": 0.52, "tok/s": 1234, "stale": 19, "ratio": "0.95–1.05", "clip": "0.25"}
            bar.set_postfix(values, refresh=False)
            bar.update()
    states = [state for state in terminal.getvalue().split("\r") if "step" not in state and "%" in state]
    assert "01:00<?" in next(state for state in states if "| 1/1200 [" in state)
    last = next(state for state in states if "| 3/1200 [" in state).rstrip()
    assert "01:01<09:58" in last and last.count("=") == fields and len(last) <= columns
    assert len(last.split("|")[1]) >= 10


def test_a_bar_without_a_terminal_is_occasional_lines(capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("tqdm.std.time", lambda: clock[0])
    with console.progress_bar("grpo", 200, initial=20, unit="step") as bar:
        for step in range(21, 51):
            clock[0] += 0.7
            bar.set_postfix({"reward": f"{step / 100:.2f}"}, refresh=False)
            bar.update()
    assert capsys.readouterr().err.splitlines() == [
        "grpo: step 20/200, 0 s",
        "grpo: step 35/200, 10 s, reward=0.35",
        "grpo: step 50/200, 21 s, reward=0.50",
    ]


@pytest.mark.parametrize("isatty", [True, False])
def test_a_bar_that_is_not_shown_prints_nothing(monkeypatch, isatty):
    stream = Stream(isatty)
    monkeypatch.setattr(sys, "stderr", stream)
    with console.progress_bar("grpo", 2, unit="step", shown=False) as bar:
        bar.update(2)
    assert stream.getvalue() == ""


def test_only_user_errors_are_lines(monkeypatch):
    monkeypatch.setattr(console, "configure_logging", lambda: None)
    monkeypatch.setattr(logging, "disable", lambda: None)
    monkeypatch.setattr(workers.Workers, "loading", True)
    with pytest.raises(SystemExit, match="^error: recjax.run: cannot start in a module"):
        console.command(lambda _: workers.refuse_while_loading("recjax.run"))([])

    def broken(_):
        raise RuntimeError("of another package")

    with pytest.raises(RuntimeError, match="of another package") as raised:
        console.command(broken)([])
    assert raised.value.__notes__ == [console.FAULT]
