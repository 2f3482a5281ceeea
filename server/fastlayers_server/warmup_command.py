"""``fastlayers warmup``: build and compile on this machine what a model needs, before the first request."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer
from rich.console import Console

from fastlayers.errors import ArgumentError
from fastlayers_server.known_models import HELP
from fastlayers_server.option_values import device_named, dtype_named


def kinds_of_layers(config: Mapping[str, Any], dtype: Any) -> int:
    """Return how many decoder layers hold one of each kind: models repeat a few."""
    from fastlayers.tuning.probe import choices_of
    from fastlayers_server.known_models import meta_model

    seen: set[tuple[str, str]] = set()
    most = 1
    model = meta_model({**config, "num_nextn_predict_layers": 0}, dtype=dtype)  # as random_model makes it
    for index, layer in enumerate(model.decoder.layers):
        own = {(choice.layer, repr(choice.cfg)) for module in layer.modules() for choice in choices_of(module)}
        if not own <= seen:
            seen |= own
            most = index + 1
    return most


def warm_up(
    name: str, max_tokens: int | None, max_batch: int, build: bool, device: Any, dtype: Any, progress: bool
) -> dict[str, Any]:
    """Warm up a model of random weights that has one layer of each kind, and return what was done as plain data."""
    import fastlayers as fl
    from fastlayers.runtime import builds
    from fastlayers_models.auto import family_of
    from fastlayers_server.known_models import config_of
    from fastlayers_server.random_models import random_model

    config = config_of(name)
    parsed: Any = family_of(config).config_class.from_hf(config)
    if max_tokens is not None and max_tokens > parsed.max_position_embeddings:
        accepted = f"at most the model's max_position_embeddings, {parsed.max_position_embeddings}"
        raise ArgumentError("warmup", "--max-tokens", max_tokens, accepted)
    layers = kinds_of_layers(config, dtype)
    model = random_model(config, device, dtype=dtype, layers=layers)
    report = fl.warmup(model, max_tokens=max_tokens, max_batch=max_batch, build=build, progress=progress)
    report.watch.close()
    return {
        "model": name, "device": str(device), "layers": layers, "seconds": round(report.seconds, 2),
        "kernels": report.kernels, "built": report.built, "left_out": report.left_out, "builds": builds.summary(),
    }  # fmt: skip


def register(app: typer.Typer, out: Console) -> None:
    """Add the command to the command line."""

    @app.command("warmup")
    def warmup(
        name: Annotated[str, typer.Argument(help=HELP)] = "tiny",
        max_tokens: Annotated[
            int, typer.Option(min=0, help="Tokens of the longest request; 0: as many as the model takes.")
        ] = 0,
        max_batch: Annotated[int, typer.Option(min=1, help="Requests of the widest decode step.")] = 256,
        build: Annotated[
            bool, typer.Option(help="Build what auto leaves out because it is not built yet (deep_gemm, FlashInfer).")
        ] = True,
        dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32")] = "bf16",
        device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; default: a GPU if there is one.")] = "",
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Build and compile what a model needs, so that no request waits for it; the caches keep it."""
        place, kind = device_named("warmup", device), dtype_named("warmup", dtype)
        found = warm_up(name, max_tokens or None, max_batch, build, place, kind, progress=not as_json)
        if as_json:
            print(json.dumps(found))
            return
        kernels = f"{found['kernels']} kernels compiled or loaded in {found['seconds']} s"
        out.print(f"{name} on {place}: {kernels}", markup=False, highlight=False)
        for line in found["built"]:
            out.print(f"  built: {line}", markup=False, highlight=False, soft_wrap=True)
