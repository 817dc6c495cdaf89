"""Paths for Orbax whose folders may have brackets and stars in their names."""

import glob
from collections.abc import Iterator

from etils import epath


class LiteralPath(type(epath.Path())):
    """A path whose own name is never a pattern.

    Orbax finds the arrays of each process with a glob pattern that contains the folder. Brackets or stars in the
    folder's name would hide the arrays, and Orbax would write the checkpoint without them.
    """

    def glob(self, pattern: str) -> Iterator["LiteralPath"]:
        """Paths in this folder that match a pattern."""
        return map(LiteralPath, glob.iglob(f"{glob.escape(str(self))}/{pattern}"))
