"""``fastlayers eval``: accuracy, perplexity and distance from fp32, each way to run a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from fastlayers.errors import ArgumentError
from fastlayers_server.option_values import check_output, checkpoint_named, device_named

if TYPE_CHECKING:
    from fastlayers_server.evaluate import Score

COLUMNS = (
    "variant", "exact match", "hard", "perplexity", "KL mean", "may be", "KL p99", "may be", "top-1", "flips",
    "against", "s",
)  # fmt: skip


def register(app: typer.Typer, out: Console, err: Console, make_progress: Callable[[], Progress]) -> None:
    """Add the command to the command line."""

    @app.command("eval")
    def evaluate(
        checkpoint: Annotated[
            str, typer.Argument(help="Checkpoint directory, or a name on the Hugging Face hub; 'tiny': what ships.")
        ] = "tiny",
        variants: Annotated[
            str | None,
            typer.Option(
                help="Comma separated, or 'all'; a wrong name lists them. Default: what can be had of "
                "hf,patched,fastlayers."
            ),
        ] = None,
        limit: Annotated[int, typer.Option(min=1, max=1000, help="How many of the 1,000 held-out problems.")] = 1000,
        num_stories: Annotated[
            int, typer.Option("--stories", min=1, help="Stories for the perplexity and the divergence.")
        ] = 100,
        num_hard: Annotated[
            int, typer.Option("--hard", min=0, max=200, help="How many of the 200 hard conversations.")
        ] = 200,
        divergence: Annotated[
            bool,
            typer.Option(
                help="Compare with transformers in fp32; its logits are held: 4 bytes a token and vocabulary."
            ),
        ] = True,
        check: Annotated[
            bool, typer.Option("--check", help="Exit with 1 where a divergence is beyond its bound, or none has one.")
        ] = False,
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; default: a GPU if there is one.")] = "",
        result: Annotated[
            str | None, typer.Option("--out", help="Also write the scores and what they depend on to this file.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
    ) -> None:
        """Accuracy on held-out problems, perplexity and distance from fp32 on held-out text, for ways to run it.

        The divergence (KL, nats) is bounded by what the number format alone does to stock transformers in fp32.
        """
        from fastlayers_server.evaluate import as_json as scores_as_json
        from fastlayers_server.evaluate import evaluate as run
        from fastlayers_server.evaluate import run_facts
        from fastlayers_server.variants import VARIANTS, named_variants, usual_variants

        names = [] if variants is None else [name.strip() for name in variants.split(",")]
        named = None if names in ([], ["all"]) else named_variants(names)
        path, place = checkpoint_named("eval", checkpoint), device_named("eval", device)
        chosen = named or (list(VARIANTS.values()) if names else usual_variants(path, place))
        written_to = None if result is None else check_output("eval", "--out", result)
        if check and not divergence:
            raise ArgumentError("eval", "--check", "with --no-divergence, so there is no bound", "one of the two")
        lacking = {v.name: why for v in chosen if (why := v.why_not(path, place)) is not None}
        if lacking and named:
            name, why = next(iter(lacking.items()))
            raise ArgumentError("eval", "--variants", f"{name!r}, {why}", "'all' for those that apply, or their names")
        failed: dict[str, str] = {}
        with make_progress() as progress:
            tasks = {v.name: progress.add_task(v.name, total=limit) for v in chosen if v.name not in lacking}
            scores = run(
                path, [v for v in chosen if v.name not in lacking], place, limit=limit, num_stories=num_stories,
                num_hard=num_hard, measure_divergence=divergence,
                progress=lambda name, done, _: progress.update(tasks[name], completed=done),
                omit=lambda variant, error: failed.update({variant.name: f"{type(error).__name__}: {error}"}),
            )  # fmt: skip
        if as_json:
            print(json.dumps(scores_as_json(scores), indent=2, default=str))
        else:
            out.print(_table(f"{checkpoint} on {place}", scores))
        if written_to is not None:
            written = {"run": run_facts(place), "variants": scores_as_json(scores)}
            written_to.write_text(json.dumps(written, indent=2) + "\n")
        for name, why in lacking.items():
            err.print(f"{name}: not run, {why}", highlight=False)
        for name, why in failed.items():
            err.print(f"error: {name}: {why}", highlight=False)
        for score in scores:
            if score.kl_mean is not None and score.within is None and VARIANTS[score.variant].roundings is not None:
                err.print(f"{score.variant}: not judged, no bound counts what the checkpoint's format rounds")
        unjudged = check and all(score.within is None for score in scores)
        if unjudged:
            err.print("error: --check: no variant was judged, so nothing was checked", highlight=False)
        beyond = [score for score in scores if score.within is False]
        for score in beyond:
            err.print(f"{'error: ' if check else ''}{score.variant}: {_beyond(score)}", highlight=False)
        raise typer.Exit(1 if failed or unjudged or (check and beyond) else 0)


def _beyond(score: Score) -> str:
    return (
        f"KL from fp32 is {score.kl_mean:.3g} in the mean and {score.kl_p99:.3g} at the 99th percentile; its format "
        f"accounts for {score.kl_mean_bound:.3g} and {score.kl_p99_bound:.3g}"
    )


def _table(title: str, scores: Sequence[Score]) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for s in scores:
        table.add_row(
            s.description, f"{100 * s.exact_match:.1f}%", _shown(s.hard_exact_match, "{:.1%}"), f"{s.perplexity:.4f}",
            _shown(s.kl_mean, "{:.2e}"), _shown(s.kl_mean_bound, "{:.2e}"), _shown(s.kl_p99, "{:.2e}"),
            _shown(s.kl_p99_bound, "{:.2e}"), _shown(s.top1_agreement, "{:.2%}"), _shown(s.flips, "{}"),
            s.baseline or "", f"{s.seconds:.0f}",
        )  # fmt: skip
    return table


def _shown(value: float | int | None, format: str) -> str:
    return "" if value is None else format.format(value)
