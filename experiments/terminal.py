"""Records a command in a terminal as an animation, such as docs/terminal.gif.

    pip install pyte pillow
    python experiments/terminal.py docs/terminal.gif python -m recjax.train --config experiments/quickstart.yaml

The frames are evenly spaced from the command's first lines to its end; the last one stays for five seconds.
"""

import fcntl
import os
import pty
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pyte
from matplotlib import font_manager
from PIL import Image, ImageDraw, ImageFont

COLUMNS = 90
ROWS = 27
FRAMES = 17
FIRST_LINES = 8  # in the first frame
PIXELS = (720, 490)
LINE = 17.2  # pixels between two lines
MARGIN = 12
DARK = (28, 31, 36)
LIGHT = (230, 230, 230)


def recorded(command: list[str]) -> list[tuple[float, bytes]]:
    """The command's output in a terminal: seconds since the start, and what was written."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    start = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    output = []
    while True:
        try:
            written = os.read(ours, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            written = b""
        if not written:
            break
        output.append((time.monotonic() - start, written))
    if process.wait():
        raise ValueError(f"{shlex.join(command)} ended with status {process.returncode}")
    return output


def frame(screen: pyte.Screen, font: ImageFont.FreeTypeFont) -> Image.Image:
    """A picture of the screen."""
    image = Image.new("RGB", PIXELS, DARK)
    draw = ImageDraw.Draw(image)
    for number, line in enumerate(screen.display):
        draw.text((MARGIN, MARGIN + number * LINE), line, LIGHT, font)
    return image


def animation(command: list[str], output: list[tuple[float, bytes]]) -> list[Image.Image]:
    """Pictures of the terminal at evenly spaced times."""
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans Mono"), 13)
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.ByteStream(screen)
    home = str(Path.home()).encode()
    stream.feed(f"$ {shlex.join(command)}\r\n".encode())
    start = 0.0
    while output and sum(map(bool, map(str.strip, screen.display))) < FIRST_LINES:
        start, written = output.pop(0)
        stream.feed(written.replace(home, b"~"))
    end = output[-1][0] if output else start
    frames = []
    for number in range(FRAMES):
        until = start + (end - start) * number / (FRAMES - 1)
        while output and output[0][0] <= until:
            stream.feed(output.pop(0)[1].replace(home, b"~"))
        frames.append(frame(screen, font))
    return frames


def main(path: str, command: list[str]) -> None:
    """Runs the command and writes the animation."""
    frames = [image.quantize(16) for image in animation(command, recorded(command))]
    milliseconds = [500] * (FRAMES - 1) + [5000]
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=milliseconds, loop=0, optimize=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
