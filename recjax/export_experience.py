"""Exports an experience store to a file that pandas, DuckDB and Hugging Face's datasets read.

    python -m recjax.export_experience --store STORE --output FILE.parquet

A file that ends with .jsonl is JSON Lines. recjax.import_experience makes an equal store from either file.
docs/store_format.md describes the columns.
"""

from pathlib import Path

from absl import flags

from recjax.errors import UserError
from recjax.runtime.console import command, start
from recjax.store.exchange import export_store
from recjax.store.store import Store

FLAGS = flags.FLAGS


@command
def main(argv: list[str]) -> None:
    """Writes the file and prints the number of completions."""
    if argv[1:]:
        raise UserError(f"{argv[1]!r}", "unknown argument", "give --store and --output")
    with Store(FLAGS.store) as store:
        print(f"{FLAGS.output}: {export_store(store, Path(FLAGS.output))} completions of {store.name}")


if __name__ == "__main__":
    flags.DEFINE_string("store", None, "File or URL of the store.", required=True)
    flags.DEFINE_string("output", None, "File to write: .parquet or .jsonl.", required=True)
    start(main)
