"""Measuring and choosing: tuned tables, the ladders read from them, and (imported by name) the tuner and its clock.

table.py        a table's file: where it is, what it holds, how it is checked
ladder.py       which ladder serves a shape: its own, the nearest one's, or a kin device's
staleness.py    what a table's times depend on; sources.py the code of it; provenance.py
search.py       the tuner; samples.py its journal; sweep.py its operands; clock.py its clock; rungs.py times to a ladder
probe.py        the short check of a table at warm-up; probe_shapes.py the tables of shapes that have none
bench.py        timing a layer's backends side by side
"""

from fastlayers.tuning.ladder import (
    Found,
    Tuned,
    borrowed_loss,
    borrowed_ratios,
    fitted,
    ladder_for,
    ladder_of,
    lent_rungs,
    lookup,
    rung_at,
    times_of,
)
from fastlayers.tuning.staleness import (
    changes,
    kernel_hash,
    metadata,
    packages_of,
    removable_packages,
    rules,
    version_of,
)
from fastlayers.tuning.table import (
    KEPT_WITHIN,
    SCHEMA,
    SHIPPED,
    TunedTableError,
    directories,
    distance,
    find,
    key_of,
    kin,
    neighbours,
    path_of,
    probed_dir,
    read,
    read_whole,
    shape_text,
    tables,
    write,
)

__all__ = [
    "KEPT_WITHIN", "SCHEMA", "SHIPPED", "Found", "Tuned", "TunedTableError", "borrowed_loss", "borrowed_ratios",
    "changes", "directories", "distance", "find", "fitted", "kernel_hash", "key_of", "kin", "ladder_for", "ladder_of",
    "lent_rungs", "lookup", "metadata", "neighbours", "packages_of", "path_of", "probed_dir", "read", "read_whole",
    "removable_packages", "rules", "rung_at", "shape_text", "tables", "times_of", "version_of", "write",
]  # fmt: skip
