"""Join tables that were run apart, by several processes or machines, with the repository's own.

    python -m benchmarks.join table1 here/table1.json there/table1.json

Finished cells of the files take the place of the same cells in benchmarks/results/TABLE.json.
docs/TABLE.md is written anew, but for what stands in it from "Added by hand" on.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.readme import RESULTS, ROOT
from swap_prune.reproduce import TABLES
from swap_prune.reproduce.common import Table

BY_HAND = "\nAdded by hand"


def main() -> None:
    """Write the joined table's files."""
    tables = {table.name: table for table in TABLES}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", choices=tables)
    parser.add_argument("files", nargs="+", type=Path, help="as `swap-prune reproduce` wrote them")
    arguments = parser.parse_args()
    table = tables[arguments.table]
    own = RESULTS / f"{table.name}.json"
    contents = joined(table, [json.loads(path.read_text()) for path in (own, *arguments.files)])
    for name, text in table.files(contents).items():
        if name.endswith(".md"):
            path = ROOT / "docs" / name
            path.write_text(text + "".join(path.read_text().partition(BY_HAND)[1:]))
        else:
            (RESULTS / name).write_text(text)


def joined(table: Table[Any], parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The contents of one table from those of several: of the same cell, the last finished run."""
    records: dict[Any, Mapping[str, Any]] = {}
    commands: list[str] = []
    machine = None
    for part in parts:
        commands += part["commands"]
        machine = part["machine"]
        for record in part["cells"]:
            ended = record["seconds"] is not None or record.get("diverged")
            if ended or table.cell_of(record) not in records:
                records[table.cell_of(record)] = record
    ordered = [records[cell] for cell in sorted(records, key=table.order)]
    return {**table.contents(ordered, commands), "machine": machine}


if __name__ == "__main__":
    main()
