"""``fastlayers bench``: one layer against its peers, a decoder layer and a whole model; servers are in bench/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fastlayers.errors import ArgumentError
from fastlayers.registry import LAYERS, registry
from fastlayers_server.bench import command as http_bench
from fastlayers_server.known_models import HELP
from fastlayers_server.option_values import counts_named, device_named, dtype_named

BATCHES = (1, 8, 32)


def layer_rows(
    layer: str,
    shape: str,
    against: Sequence[str],
    tokens: Sequence[int],
    context: int | None,
    place: Any,
    rounds: int | None,
) -> Iterator[dict[str, Any]]:
    """Yield the run's description, then the rows of each token count as they are measured."""
    from fastlayers.tuning.bench import describe_run, rows_of
    from fastlayers.tuning.clock import clock_for
    from fastlayers.tuning.search import Bench
    from fastlayers.tuning.sweep import case_at, parse_shape, tokens_of

    cfg = parse_shape(layer, shape)
    bench = Bench(layer, cfg, place, clock_for(place))
    cached = {} if context is None else {"context": context}
    yield describe_run(place) | {"layer": layer, "cfg": repr(cfg)} | cached
    for count in tokens or tokens_of(layer, cfg):
        yield from rows_of(bench, case_at(layer, cfg, count, context), count, against=against, rounds=rounds)
    for option, why in bench.failed.items():
        yield {"layer": layer, "backend": str(option), "failed": why}
    for backend in registry(layer).ranked:
        why_not = backend.why_not(cfg, bench.device)
        if why_not is not None and any(backend.name.startswith(wanted) for wanted in against):
            yield {"layer": layer, "backend": backend.name, "failed": f"cannot run here: {why_not}"}


def model_rows(
    name: str,
    batches: Sequence[int],
    context: int,
    layers: int | None,
    place: Any,
    dtype: Any,
    rounds: int,
    said: Callable[[str], None],
) -> Iterator[dict[str, Any]]:
    """Yield the run's description, then for each batch: the last decoder layer, a decode step, and time per token.

    ``said`` is told what is measured next.
    """
    import torch

    from fastlayers.tuning.bench import describe_run
    from fastlayers.tuning.clock import CudaClock, HostClock, clock_for
    from fastlayers_models.auto import family_of
    from fastlayers_server.known_models import config_of
    from fastlayers_server.random_models import random_model

    config = config_of(name)
    parsed: Any = family_of(config).config_class.from_hf(config)
    most = parsed.max_position_embeddings
    if context >= most:
        accepted = f"less than the model's max_position_embeddings, {most}: a decode step adds a token"
        raise ArgumentError("bench model", "--context", context, accepted)
    count = layers or parsed.num_hidden_layers
    if count > parsed.num_hidden_layers:
        raise ArgumentError("bench model", "--layers", layers, f"0 to {parsed.num_hidden_layers}, all that it has")
    yield describe_run(place) | {"model": name, "layers": count, "context": context, "dtype": str(dtype)}
    model = random_model(config, place, dtype=dtype, layers=layers)
    hot = CudaClock(place, cold=False) if torch.device(place).type == "cuda" else HostClock()
    with torch.inference_mode():
        for batch in batches:
            layer_call, model_call = decode_calls(model, batch, context)
            parts = (
                ("decoder layer", model.decoder.layers[-1], layer_call, clock_for(place)),
                ("model", model, model_call, hot),
            )
            for what, module, call, clock in parts:
                said(f"batch {batch}: {what}, {rounds} rounds …")
                timing = clock.measure({what: clock.prepare(call)}, rounds)[what]
                floor = decode_floor(module, batch, context)
                row = {"model": name, "what": what, "batch": batch, "context": context, "us": round(timing.us, 2)}
                row |= {"spread_us": round(timing.spread_us, 2), "floor_us": round(floor, 2)}
                yield row | {"of_floor": round(floor / timing.us, 4)}
            said(f"batch {batch}: generation …")
            yield {"model": name, "what": "generate", "batch": batch} | time_per_token(model, batch)


def decode_calls(model: Any, batch: int, context: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return two calls of a decode step of ``batch`` requests with ``context`` tokens: the last layer, the model."""
    import torch

    import fastlayers as fl
    from fastlayers.attention.meta import AttentionBatch, AttentionState, whole_pages
    from fastlayers.comm.layouts import Hidden

    pages = whole_pages([context + 1] * batch, model.page_size)
    width = len(pages[0])
    total = 1 + batch * width
    caches = fl.kv_cache_spec(model, page_size=model.page_size, dtype=model.kv_dtype).allocate(total, model.device)
    state = AttentionState(batch, batch, width, model.page_size, model.device)
    meta = state.plan(AttentionBatch((1,) * batch, (context,) * batch, pages), bucket=batch, num_pages=total)
    ids = torch.randint(model.config.vocab_size, (batch,), device=model.device)
    step = model.single_step(meta)
    hidden = model.embed(model.decoder.embed_tokens, ids, step)
    # Twice through the same tensors: a layer must find what the layer before it leaves behind.
    before = Hidden.start(hidden)
    last = model.decoder.layers[-1]

    def layer_call() -> Any:
        return last(before, meta, caches[-1], step, None)

    def model_call() -> Any:
        return model.compute_logits(model(ids, meta, caches)).argmax(-1)

    return layer_call, model_call


def decode_floor(module: Any, batch: int, context: int) -> float:
    """Return the microseconds below which a decode step of these modules cannot go: the sum of its layers' floors."""
    from fastlayers.registry.spec import spec_of
    from fastlayers.tuning.probe import choices_of
    from fastlayers.tuning.sweep import case_at, peak_flops

    total = 0.0
    for each in module.modules():
        # An attention core has ladders for several contexts, and one of them runs.
        usual = {c.layer: c for c in reversed(list(choices_of(each))) if getattr(c.cfg, "phase", "") in ("", "decode")}
        for choice in usual.values():
            spec = spec_of(choice.layer)
            if spec.heavy:
                cost = spec.cost(case_at(choice.layer, choice.cfg, batch, context))
                flops = peak_flops(choice.layer, choice.cfg, choice.device)
                total += max(cost.floors(choice.device.bandwidth, flops))
    return total * 1e6


def time_per_token(model: Any, batch: int, prompt: int = 128, few: int = 8, many: int = 40) -> dict[str, Any]:
    """Return what ``Generator`` takes a token: the time of many tokens less the time of few, host work included."""
    import time

    import torch

    from fastlayers_models.generate import Generator

    generator = Generator(model, max_batch=batch, max_length=prompt + many, prefill_tokens=max(2048, prompt))
    rows = torch.randint(model.config.vocab_size, (batch, prompt)).tolist()

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        generator.generate(rows, max_new_tokens=tokens, eos_ids=())
        return time.perf_counter() - begin

    seconds(few)
    runs = [(seconds(few), seconds(many)) for _ in range(3)]
    each = sorted((long - short) / (many - few) for short, long in runs)
    return {"tpot_ms": round(each[1] * 1e3, 3), "first_tokens_ms": round(min(s for s, _ in runs) * 1e3, 2)}


def _show_layer(rows: Sequence[dict[str, Any]], out: Console) -> None:
    head = rows[0]
    table = Table(title=f"{head['layer']} on {head['device']}", title_justify="left")
    # What a configuration calls its context is the entry of the tables; how much is cached is said by itself.
    cached = f", measured with {head['context']} cached tokens a request" if "context" in head else ""
    out.print(head["cfg"] + cached, markup=False, highlight=False)
    columns = ("tokens", "backend", "µs", "±", "TFLOP/s", "GB/s", "of arithmetic", "of memory", "error")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 1 else "right")
    before = None
    for row in rows[1:]:
        if "failed" in row:
            out.print(f"{row['backend']}: {row['failed']}", markup=False, highlight=False)
            continue
        if before not in (None, row["tokens"]):
            table.add_section()
        before = row["tokens"]
        name = row["backend"] + "".join(f" {k}={v}" for k, v in row["config"].items())
        table.add_row(
            str(row["tokens"]), name + " ← auto" * row["auto"], f"{row['us']:.2f}", f"{row['spread_us']:.2f}",
            f"{row['tflops']:.1f}", f"{row['gb_per_s']:.0f}", f"{row['of_arithmetic']:.0%}", f"{row['of_memory']:.0%}",
            f"{row['error']:.2g}",
        )  # fmt: skip
    out.print(table)


def _show_model(rows: Sequence[dict[str, Any]], out: Console) -> None:
    head = rows[0]
    table = Table(
        "batch", "what", "ms", "floor ms", "of floor",
        title=f"{head['model']}, {head['layers']} layers, {head['context']} tokens of context, on {head['device']}",
        title_justify="left",
    )  # fmt: skip
    for row in rows[1:]:
        if row["what"] == "generate":
            table.add_row(str(row["batch"]), "a token, host included", f"{row['tpot_ms']:.2f}", "", "")
            table.add_section()
        else:
            figures = (f"{row['us'] / 1e3:.3f}", f"{row['floor_us'] / 1e3:.3f}", f"{row['of_floor']:.0%}")
            table.add_row(str(row["batch"]), row["what"], *figures)
    out.print(table)


def _with_noise(row: dict[str, Any]) -> str:
    """Return a ratio, what captures of one way differ by, and whether that leaves anything of it."""
    from fastlayers_server.ablation import undecided

    told, noise = f"{row['ratio']:.3f}", row.get("noise", 0.0)
    told += f" ± {noise:.1%}" if noise else ""
    return f"{told}, decides nothing" if undecided(row["ratio"], noise) else told


def _show_ablation(rows: Sequence[dict[str, Any]], out: Console) -> None:
    head = rows[0]
    table = Table(
        "batch", "items", "what", "off µs", "on µs", "off / on", "quoted",
        title=f"{head['model']}, {head['sizes']} sizes, {head['layers']} layers, {head['context']} tokens of context, "
        f"on {head['device']}",
        title_justify="left",
    )  # fmt: skip
    for row in rows[1:]:
        if "skipped" in row:
            figures = ("", "", row["skipped"])
        else:
            figures = (f"{row['off_us']:.1f}", f"{row['on_us']:.1f}", _with_noise(row))
        table.add_row(str(row["batch"]), row["items"], row["what"], *figures, row["quoted"])
    out.print(table)


def register(app: typer.Typer, out: Console, err: Console) -> None:
    """Add the commands to the command line."""
    bench = typer.Typer(help="Time layers and models.", no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(bench, name="bench")
    http_bench.register(bench)

    def shown(rows: Iterator[dict[str, Any]], as_json: bool, show: Callable[..., None]) -> None:
        kept = []
        for row in rows:
            kept.append(row)
            if as_json:
                print(json.dumps(row), flush=True)
        if not as_json:
            show(kept, out)

    @bench.command("layer")
    def bench_layer(
        name: Annotated[str, typer.Argument(help="A layer's name.")],
        shape: Annotated[str, typer.Option(help="N=2112,K=7168, field names, or a configuration's repr.")] = "",
        against: Annotated[
            list[str] | None, typer.Option(help="Only backends whose names begin so, and auto. Repeatable.")
        ] = None,
        tokens: Annotated[str, typer.Option(help="Token counts (attention: requests); default: 1 to 8192.")] = "",
        context: Annotated[int, typer.Option(min=0, help="Cached tokens a request, for attention; 0: 4096.")] = 0,
        rounds: Annotated[
            int | None, typer.Option(min=1, help="Runs of which the median is taken; default: 15 to 200.")
        ] = None,
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a row.")] = False,
    ) -> None:
        """Check and time every backend of a layer, interleaved in one process, with both floors."""
        if name not in LAYERS:
            raise ArgumentError("bench layer", "layer", repr(name), ", ".join(LAYERS))
        from fastlayers.registry.spec import spec_of

        if context and not hasattr(spec_of(name).cases[0].cfg, "phase"):
            raise ArgumentError("bench layer", "--context", context, f"attention (mla, gqa), not {name}")
        place, counts = device_named("bench layer", device), counts_named("bench layer", tokens)
        rows = layer_rows(name, shape, against or [], counts, context or None, place, rounds)
        shown(rows, as_json, _show_layer)

    @bench.command("model")
    def bench_model(
        name: Annotated[str, typer.Argument(help=HELP)],
        batch: Annotated[str, typer.Option(help="Requests of a decode step, comma separated.")] = "1,8,32",
        context: Annotated[int, typer.Option(min=1, help="Cached tokens a request.")] = 1024,
        layers: Annotated[int, typer.Option(min=0, help="Decoder layers to keep; 0: all.")] = 0,
        dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32")] = "bf16",
        rounds: Annotated[int, typer.Option(min=1, help="Runs of which the median is taken.")] = 11,
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a row.")] = False,
    ) -> None:
        """Time a decoder layer, a decode step and generation with random weights at real dimensions."""
        batches = counts_named("bench model", batch, "--batch") or BATCHES
        place, kind = device_named("bench model", device), dtype_named("bench model", dtype)

        def said(words: str) -> None:
            if not as_json:  # whose rows come one by one
                err.print(words, highlight=False)

        shown(model_rows(name, batches, context, layers or None, place, kind, rounds, said), as_json, _show_model)

    @bench.command("ablation")
    def bench_ablation(
        name: Annotated[
            str, typer.Argument(help="deepseek-ai/DeepSeek-V3, openai/gpt-oss-20b, or such a config.json.")
        ] = "deepseek-ai/DeepSeek-V3",
        batch: Annotated[str, typer.Option(help="Requests of a decode step, comma separated.")] = "1,32",
        context: Annotated[int, typer.Option(min=1, help="Cached tokens a request.")] = 1024,
        layers: Annotated[int, typer.Option(min=1, help="Decoder layers: one dense, the others with experts.")] = 2,
        dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32")] = "bf16",
        rounds: Annotated[int, typer.Option(min=1, help="Runs of which the median is taken.")] = 21,
        items: Annotated[str, typer.Option(help="Only of these items of docs/systems.md, comma separated.")] = "",
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line a row.")] = False,
    ) -> None:
        """Time a decode step with each optimisation off and on, one at a time; small layers on a CPU."""
        from fastlayers_server import ablation
        from fastlayers_server.known_models import config_of

        config = config_of(name)
        place, kind = device_named("bench ablation", device), dtype_named("bench ablation", dtype)
        batches, wanted = (counts_named("bench ablation", *each) for each in ((batch, "--batch"), (items, "--items")))
        if not ablation.ITEMS.issuperset(wanted):
            known = ", ".join(map(str, sorted(ablation.ITEMS)))
            raise ArgumentError("bench ablation", "--items", repr(items), f"of {known}")
        found = ablation.rows(name, config, batches or BATCHES, context, layers, place, kind, rounds, wanted)
        shown(found, as_json, _show_ablation)
