"""The command ``fastlayers``: demo, doctor, backends, explain, generate, eval, convert, tune, bench, cache."""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

import fastlayers as fl
from fastlayers.comm.ranks import Ranks
from fastlayers.device import DESCRIBED
from fastlayers.errors import ArgumentError, FastlayersError
from fastlayers_server import bench_command, eval_command, tune_command, warmup_command
from fastlayers_server.option_values import check_text, checkpoint_named, device_named, dtype_named, expanded
from fastlayers_server.ranks import check_experts, check_heads, said_by_another, started_elsewhere

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False, rich_markup_mode=None)
# What is piped is read by programs, or searched: it is not wrapped.
_UNWRAPPED = 4096
# Square brackets are ours ("mla[decode]"), not rich's markup.
out = Console(markup=False, width=None if sys.stdout is None or sys.stdout.isatty() else _UNWRAPPED)
err = Console(stderr=True, markup=False, width=None if sys.stderr is None or sys.stderr.isatty() else _UNWRAPPED)

# What the extra "server" brings, as it is imported: the library, its models and their commands do without.
SERVERS = ("aiohttp", "httptools", "msgspec", "prometheus_client", "starlette", "uvicorn", "uvloop", "xgrammar", "zmq")
_ITS_OWN_FLAGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …; default: a GPU if there is one.")]
_CHECKPOINT = "Checkpoint directory, or a name on the Hugging Face hub; 'tiny' is the one that ships."
Checkpoint = Annotated[str, typer.Argument(help=_CHECKPOINT)]
_EXPERT_EXCHANGE = "How tokens get to the ranks of their experts: auto, gather, exchange."
_FP8_MATH = "DeepSeek with --kv-dtype e4m3: attention may round queries and softmax weights to e4m3, too."
_BF12 = "Keep bf16 weights in 12 bits, too: less time for each token, 0.75 of their memory more."


def _print_version(asked: bool) -> None:
    if asked:
        print(f"fastlayers {fl.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and warnings.")] = False,
) -> None:
    """Model layers for LLM inference: see what runs and why, compare, convert, generate, tune and time.

    Every command prints for people, or with --json for machines. Errors that we raise on purpose are one sentence.
    """


def main() -> None:
    """Run the command line; the exit code is 1 for our errors, 2 for wrong usage."""
    debug = "--debug" in sys.argv
    if debug:
        sys.argv.remove("--debug")
    else:
        warnings.filterwarnings("ignore")
    try:
        app()
    except FastlayersError as error:
        if debug:
            raise
        _fail(str(error), error)
    except ModuleNotFoundError as error:
        if debug or (error.name or "").partition(".")[0] not in SERVERS:
            raise
        needs = "which this command needs: pip install 'fastlayers[server]'"
        _fail(f"the package {error.name} is not installed, {needs}", error)
    except (OSError, ValueError, RuntimeError) as error:
        if debug:
            raise
        _fail(f"{type(error).__name__}: {error} (--debug shows where)", error)
    finally:
        _flush()


def _command_of(arguments: Sequence[str]) -> str:
    """Return which command a command line asks for: ``"bench model"``."""
    words, place = [], typer.main.get_command(app)
    for word in arguments:
        found = getattr(place, "commands", {}).get(word)
        if found is None:
            break
        words.append(word)
        place = found
    return " ".join(words)


def _fail(said: str, error: Exception) -> NoReturn:
    """Print an error with the command's name, of ranks that fail alike once, and end with 1."""
    name = _command_of(sys.argv[1:])
    known = tuple(f"{words}: " for words in (name, f"fastlayers {name}", name.partition(" ")[0]))
    if name and not said.startswith(known):
        said = f"{name}: {said}"
    if not said_by_another(said):
        err.print(f"error: {said}", highlight=False)
    raise SystemExit(1) from error


def _flush() -> None:
    """Let out what was printed; that a reader has enough, as ``head`` has, is nothing to complain of at the end."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _progress() -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    return Progress(*columns, console=err, transient=True)


@app.command()
def doctor(
    run: Annotated[
        bool, typer.Option("--run", help="Run each backend on a small case, against the reference.")
    ] = False,
    layer: Annotated[list[str] | None, typer.Option(help="With --run: only these layers. Repeatable.")] = None,
    as_json: Json = False,
) -> None:
    """Show Python, torch, GPU and optional packages: what works, what is disabled and why.

    The exit code is 1 if something that is installed cannot be used, or with --run computes something else.
    """
    from fastlayers_server.doctor import diagnose, trials

    if layer and not run:
        raise ArgumentError("doctor", "--layer", repr(layer[0]), "together with --run")
    report, place = diagnose(), str(device_named("doctor", ""))
    found = []
    for trial in trials(place, layer or []) if run else ():
        found.append(trial)
        if not as_json:
            verdict = "ok" if trial.ok else trial.reason
            text = f"{trial.layer}={trial.backend} on {trial.case}: {verdict} ({trial.seconds} s)"
            out.print(text, highlight=False)
    report["trials"] = [vars(trial) for trial in found]
    report["ok"] = report["ok"] and all(trial.ok for trial in found)
    if as_json:
        _print_json(report)
    else:
        table = _table(f"fastlayers {report['fastlayers']} on {report['device']}", "what", "version", "state", "why")
        for fact in report["facts"]:
            table.add_row(fact["name"], fact["version"] or "", fact["state"], fact["reason"] or "")
        out.print(table)
        layers = _table("layers", "layer", "works", "disabled")
        for name, row in report["layers"].items():
            disabled = "\n".join(f"{backend}: {reason}" for backend, reason in row["disabled"].items())
            layers.add_row(name, ", ".join(row["works"]), disabled)
        out.print(layers)
    raise typer.Exit(0 if report["ok"] else 1)


@app.command()
def backends(
    layer: Annotated[str | None, typer.Argument(help="A layer's name; without it: all layers.")] = None,
    device: Annotated[
        str, typer.Option(help=f"A described device ({', '.join(DESCRIBED)}) or one of this machine.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """List the backends of a layer on a device: would the hardware do, is the package here, refused because."""
    rows = [row for name in (fl.layers() if layer is None else [layer]) for row in fl.backends(name, device=device)]
    if as_json:
        _print_json([vars(row) for row in rows])
        return
    table = _table(f"backends on {device}", "layer", "backend", "hardware", "installed", "auto", "reason or note")
    for row in rows:
        yes = ["yes" if flag else "no" for flag in (row.hardware, row.installed)]
        table.add_row(row.layer, row.name, *yes, "yes" if row.automatic else "by name", row.reason)
    out.print(table)


@app.command()
def explain(
    target: Annotated[
        str, typer.Argument(help="A layer's name, 'tiny', a checkpoint directory or ORG/NAME on the hub.")
    ],
    dtype: Annotated[str, typer.Option(help="Of a model: bf16, fp16, fp32")] = "bf16",
    device: DeviceOption = "",
    as_json: Json = False,
) -> None:
    """Show what was chosen for a layer or every layer of a model, on which evidence, and what lost."""
    if target in fl.layers():
        with device_named("explain", device):
            found = fl.explain(target)
    elif not (target == "tiny" or Path(target).exists() or target.count("/") == 1):
        accepted = f"'tiny', a checkpoint directory, or a layer: {', '.join(fl.layers())}"
        raise ArgumentError("explain", "target", repr(target), accepted)
    else:
        from fastlayers_models.auto import AutoModel

        path, number = checkpoint_named("explain", target, "target"), dtype_named("explain", dtype)
        model = AutoModel.from_pretrained(path, dtype=number, device=device_named("explain", device))
        found = fl.explain(model)
    if as_json:
        _print_json([vars(row) for row in found])
        return
    table = _table(target, "module", "layer", "chosen", "evidence", "bytes", "not, because")
    for row, lost in zip(found, found.losers(), strict=True):
        table.add_row(row.module, row.place, row.chosen, row.evidence, f"{row.bytes:,}", "\n".join(lost))
    out.print(table)


@app.command()
def demo(
    checkpoint: Checkpoint = "tiny",
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Shortest prompt.")] = 2000,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32")] = "fp32",
    device: Annotated[
        str,
        typer.Option(help="On a GPU the tiny checkpoint is bound by kernel launches on both sides, and so no faster."),
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Generate with a Hugging Face model before and after fastlayers.patch: the same tokens, faster.

    The exit code is 1 if the tokens differ.
    """
    from fastlayers_server.demo import run_demo

    path, place = checkpoint_named("demo", checkpoint), device_named("demo", device)
    with _progress() as progress:
        task = progress.add_task("loading", total=None)
        seen = run_demo(
            path, place, dtype_named("demo", dtype), new_tokens=new_tokens, min_prompt_tokens=prompt_tokens,
            progress=lambda text: progress.update(task, description=text),
        )  # fmt: skip
    if as_json:
        sides = {"stock": seen.stock, "patched": seen.patched}
        _print_json(
            {
                "prompt_tokens": seen.prompt_tokens, "identical": seen.identical, "speedup": seen.speedup,
                "turns": seen.turns,
                **{n: vars(r) | {"tokens_per_second": r.tokens_per_second} for n, r in sides.items()},
                "report": json.loads(seen.report.to_json()), "hits": seen.hits,
            }
        )  # fmt: skip
    else:
        _print_demo(seen, str(place))
    raise typer.Exit(0 if seen.identical else 1)


def _print_demo(seen: Any, place: str) -> None:
    table = _table(f"{seen.prompt_tokens} prompt tokens, greedy, {place}", "", "prefill s", "decode tok/s")
    sides = (("Hugging Face", seen.stock), ("patched", seen.patched))
    for name, run in sides:
        table.add_row(name, f"{run.prefill_seconds:.2f}", f"{run.tokens_per_second:.1f}")
    out.print(table)
    # Not in the table, which would be as wide as they are long where nothing is wrapped.
    for name, run in sides:
        out.print(f"tokens, {name}: {' '.join(map(str, run.tokens))}", highlight=False)
    out.print(f"text: {seen.patched.text!r}")
    out.print(seen.report.summary(), highlight=False)
    out.print(f"fast paths ran {sum(seen.hits.values())} times in {sum(1 for n in seen.hits.values() if n)} modules")
    verdict = "identical tokens" if seen.identical else "THE TOKENS DIFFER"
    out.print(f"{verdict}; decode {seen.speedup:.1f} × as fast")
    turns = "; ".join(f"{name} " + ", ".join(f"{t:.1f}" for t in found) for name, found in seen.turns.items())
    out.print(f"tok/s of each turn: {turns} (turns that differ a lot mean that the machine is busy)")


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What the user says.")],
    checkpoint: Annotated[str, typer.Option(help=_CHECKPOINT)] = "tiny",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 64,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.")] = 0.0,
    top_k: Annotated[int, typer.Option(min=0, help="0: off.")] = 0,
    top_p: Annotated[float, typer.Option(min=0.0, max=1.0, help="1: off.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sampler, where the temperature is not 0.")] = 0,
    dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32")] = "bf16",
    kv_dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32, e4m3; default: dtype")] = "",
    fp8_math: Annotated[bool, typer.Option("--fp8-math", help=_FP8_MATH)] = False,
    bf12: Annotated[bool, typer.Option("--bf12", help=_BF12)] = False,
    device: DeviceOption = "",
    tp: Annotated[int, typer.Option(min=1, help="Ranks that split each attention layer.")] = 1,
    dp: Annotated[int, typer.Option(min=1, help="Attention groups; the MLPs are split over tp × dp ranks.")] = 1,
    ep: Annotated[int, typer.Option(min=1, help="Groups over which whole experts are dealt out.")] = 1,
    expert_exchange: Annotated[str, typer.Option(help=_EXPERT_EXCHANGE)] = "auto",
    as_json: Json = False,
) -> None:
    """Answer one prompt with a model of fastlayers_models, streaming."""
    from fastlayers.sampler.layer import SamplingParams
    from fastlayers_models.auto import AutoModel, family_of
    from fastlayers_models.checkpoint import read_json
    from fastlayers_server.generate_command import on_engine, on_ranks
    from fastlayers_server.hugging_face import chat_ids, tokenizer_of

    # What is wrong is said before a process is started, or anything is read.
    check_text("generate", "prompt", prompt)
    place, number = device_named("generate", device), dtype_named("generate", dtype)
    cache = dtype_named("generate", kv_dtype, "--kv-dtype") if kv_dtype else None
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    check_experts("generate", ep, tp * dp, "--tp × --dp")
    ranks = Ranks(tp, dp, ep, expert_exchange=expert_exchange)
    if tp > 1:
        check_heads("generate", tp, read_json(checkpoint_named("generate", checkpoint, "--checkpoint") / "config.json"))
    if started_elsewhere("generate", ranks):
        return
    path = checkpoint_named("generate", checkpoint, "--checkpoint")
    config = read_json(path / "config.json")
    family_of(config, where=path).config_class.from_hf(config)  # before transformers reads it with the tokenizer
    tokenizer = tokenizer_of(path)
    ids = chat_ids(tokenizer, prompt)
    more: dict[str, Any] = {"fp8_math": True} if fp8_math else {}
    model = AutoModel.from_pretrained(path, dtype=number, device=place, kv_dtype=cache, parallel=ranks, **more)
    if bf12:
        from fastlayers_server.engine.startup import keep_bf12

        stored = keep_bf12(model, "generate").summary
        if model.parallel.tp.rank == 0:
            err.print(stored, highlight=False)
    stream = on_ranks if ranks.processes > 1 else on_engine
    tokens: list[int] = []
    shown, finished, first = "", None, model.parallel.tp.rank == 0  # the other ranks compute, and say nothing
    for token, reason in stream(model, path, ids, params, max_new_tokens):
        tokens.append(token)
        finished = reason
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        if first and not as_json and not text.endswith("\ufffd"):
            print(text[len(shown) :], end="", flush=True)
            shown = text
    if ranks.processes > 1:
        ranks.leave()
    if not first:
        return
    if as_json:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        _print_json({"text": text, "tokens": tokens, "prompt_tokens": len(ids), "finished": finished})
    else:
        print()


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help=_CHECKPOINT)],
    target: Annotated[str, typer.Argument(help="Directory to make; an interrupted run is taken up.")],
    format: Annotated[
        str,
        typer.Option(
            help="fp8-block, int8 (for our loader only: stock transformers misreads it), or bf16 (multiply a quantised "
            "one out: FP8, int8, MXFP4, AWQ, GPTQ)"
        ),
    ] = "fp8-block",
    ragged: Annotated[
        bool, typer.Option("--ragged", help="fp8-block: ragged matrices too, for our loader only.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make a quantised checkpoint from a bf16 one of any family, or the reverse, holding about one shard in memory.

    Quantised are linear layers and experts that are stored one by one. GPT-OSS stores all experts of a layer in one
    tensor, for which neither format has a spelling: they stay as they are.
    """
    from fastlayers_server.convert_command import run_convert, summary

    path = checkpoint_named("convert", source, "source")
    done = run_convert(path, expanded("convert", "target", target), format, ragged, err)
    if as_json:
        _print_json(done)
    else:
        out.print(summary(done), highlight=False)


@app.command("serve", context_settings=_ITS_OWN_FLAGS, add_help_option=False)
def serve(context: typer.Context) -> None:
    """Serve a model over HTTP, with OpenAI's API; without a model: the tiny one that ships."""
    from fastlayers_server.serve_command import serve as run

    raise typer.Exit(run(context.args))


cache = typer.Typer(help="Compiled kernels as one archive.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(cache, name="cache")


@cache.command("export")
def cache_export(archive: Annotated[str, typer.Argument(help="The .tar.gz to write.")], as_json: Json = False) -> None:
    """Write all kernels compiled so far into one archive."""
    from fastlayers.runtime.kernel_cache import export_cache, versions

    path = export_cache(archive)
    size = path.stat().st_size
    facts = {"archive": str(path), "bytes": size, "versions": versions()}
    if as_json:
        _print_json(facts)
    else:
        out.print(f"{path}: {size / 2**20:.1f} MiB", highlight=False, soft_wrap=True)


@cache.command("import")
def cache_import(
    archive: Annotated[str, typer.Argument(help="An archive of `export`.")], as_json: Json = False
) -> None:
    """Take the kernels of an archive; those of packages in other versions are left out, said with a warning."""
    from fastlayers.runtime.kernel_cache import import_cache

    taken = import_cache(archive)
    if as_json:
        _print_json({"archive": archive, "taken": taken})
    else:
        out.print(f"taken: {', '.join(taken) or 'nothing'}", highlight=False)


eval_command.register(app, out, err, _progress)
tune_command.register(app, out, err, _print_json)
bench_command.register(app, out, err)
warmup_command.register(app, out)


if __name__ == "__main__":
    main()
