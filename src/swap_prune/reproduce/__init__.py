"""The paper's tables run anew: `swap-prune reproduce TABLE`."""

import argparse
from typing import Any

from swap_prune.reproduce import noise_tables, table1
from swap_prune.reproduce.common import Table

TABLES: tuple[Table[Any], ...] = (table1.TABLE, *noise_tables.TABLES)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Give the command `reproduce` its tables and their options."""
    tables = parser.add_subparsers(required=True, metavar="TABLE")
    for table in TABLES:
        command = tables.add_parser(table.name, help=table.help)
        table.add_options(command)
        command.set_defaults(command=table.run)
