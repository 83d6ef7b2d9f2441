"""Public measured tables: times of kernels on six GPUs, from the user's own copy of aiconfigurator-core.

installed_tables          the tables, or None without the extra `tables`
Tables.price_many         launches -> costs, None where no table covers one
Tables.choice             which table is used, and why others are not
"""

from tessera.profile.tables.kinds import KINDS
from tessera.profile.tables.read import SYSTEMS, TableCache, TableFile, installed_root, table_files
from tessera.profile.tables.tables import TableChoice, Tables, installed_tables, missing_note

__all__ = [
    "KINDS", "SYSTEMS", "TableCache", "TableChoice", "TableFile", "Tables", "installed_root",
    "installed_tables", "missing_note", "table_files",
]  # fmt: skip
