"""Write the ladders of the layers between ranks from committed results.

``python tools/rank_ladders.py [--check]``. Nothing is measured here: ``benchmarks/two_gpus.py rows`` did, and a ladder
is of one run, of those with the most points the last. Rungs count rows of one rank; a win within the tuner's noise is
none. Exchanges of rows are those of ``two_gpus_rows_h200.jsonl``, which were timed with as many programs as a model's
workspace has. Sums of rows that are spread are compared with NCCL's scatter and gather alone, without the norm.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from distributed_tables import Row, lines_of

from fastlayers.comm.ladders import NAME
from fastlayers.registry import registry
from fastlayers.tuning import SCHEMA, SHIPPED, write
from fastlayers.tuning.rungs import as_rows, best_times, choose_ladder
from fastlayers.tuning.samples import Option, Sample

# Where a row of a result does not say so: the benchmark's own.
HIDDEN = 7168


@dataclass(frozen=True)
class Figures:
    """Where a ladder's figures are: in ``two_gpus_<file>_h200.jsonl``, rows ``what``, under names that add up."""

    layer: str
    way: str
    file: str
    what: str
    ours: tuple[str, ...]
    nccl: tuple[str, ...]
    rows: str = "rows"
    of_all_ranks: bool = False


FIGURES = (
    Figures("all_reduce", "", "exchange", "sum_norm_time", ("sum_us",), ("nccl_sum_us",)),
    Figures("sum_norm", "", "exchange", "sum_norm_time", ("sum_norm_us",), ("nccl_norm_us",)),
    Figures("sum_norm", "spread", "rows", "exchange_time", ("scatter_norm_gather_us",),
            ("nccl_scatter_us", "nccl_gather_us"), of_all_ranks=True),
    Figures("gather_rows", "", "rows", "exchange_time", ("gather_us",), ("nccl_gather_us",), of_all_ranks=True),
    Figures("scatter_rows", "", "rows", "exchange_time", ("scatter_us",), ("nccl_scatter_us",), of_all_ranks=True),
    Figures("expert_exchange", "8 of 256", "exchange", "tokens", ("dispatch_us", "combine_us"),
            ("nccl_dispatch_us", "nccl_combine_us"), rows="tokens"),
)  # fmt: skip


def entries(figures: Figures) -> Iterator[dict[str, Any]]:
    """Yield a ladder for each hidden size that was measured, the largest first."""
    names = (*figures.ours, *figures.nccl)
    rows = [row for row in lines_of(figures.file) if row.get("what") == figures.what and set(names) <= set(row)]
    for hidden in sorted({row.get("hidden", HIDDEN) for row in rows}, reverse=True):
        runs: dict[str, list[Row]] = {}
        for row in rows:
            if row.get("hidden", HIDDEN) == hidden:
                runs.setdefault(json.dumps(row["head"], sort_keys=True), []).append(row)
        run = max(reversed(runs.values()), key=lambda each: len({row[figures.rows] for row in each}))
        head, points = run[0]["head"], {row[figures.rows]: row for row in run}
        ranks = head["ranks"]
        samples = [sample for count in sorted(points) for sample in timed(figures, points[count], ranks)]
        table = registry(figures.layer)
        layouts = {backend.name: backend.weight_layout for backend in table.ranked}
        yield {
            "layer": figures.layer, "way": figures.way, "ranks": ranks,
            "device": head["device"].removeprefix("NVIDIA "), "dtype": "bfloat16", "hidden_size": hidden,
            "ladder": as_rows(choose_ladder(samples, layouts, list(layouts))), **best_times(samples),
            "made": {name: head[name] for name in ("command", "commit", "torch", "nccl")},
        }  # fmt: skip


def timed(figures: Figures, row: Row, ranks: int) -> Iterator[Sample]:
    """Yield what each backend took for the rows of one result."""
    count = row[figures.rows] // (ranks if figures.of_all_ranks else 1)
    for name, parts in (("triton_symm_mem", figures.ours), ("nccl", figures.nccl)):
        yield Sample(count, Option(name), sum(row[part] for part in parts), 0.0)


def table() -> dict[str, Any]:
    """Return all ladders, as the file holds them."""
    return {"schema": SCHEMA, "ladders": [entry for figures in FIGURES for entry in entries(figures)]}


def main(given: Sequence[str] | None = None) -> None:
    """Write the file, or with ``--check`` fail if it is stale."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if the file is stale")
    path = SHIPPED / NAME
    if not parser.parse_args(given).check:
        write(path, table())
        return
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, NAME)
        write(made, table())
        stale = not path.is_file() or made.read_text() != path.read_text()
    raise SystemExit(f"{NAME} is stale; run: python tools/rank_ladders.py" if stale else 0)


if __name__ == "__main__":
    main()
