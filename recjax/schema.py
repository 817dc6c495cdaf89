"""Prints the JSON Schema of a run's YAML file, by which editors complete, explain and check keys.

    python -m recjax.schema > config.schema.json

A line `# yaml-language-server: $schema=config.schema.json` in a YAML file names it to editors with a YAML language
server, such as VS Code with the extension YAML.
"""

import json

from recjax.config.help import json_schema
from recjax.errors import UserError
from recjax.runtime.console import command, start


@command
def main(argv: list[str]) -> None:
    """Prints the schema."""
    if argv[1:]:
        raise UserError(f"{argv[1]!r}", "unknown argument", "this command takes none")
    print(json.dumps(json_schema(), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    start(main)
