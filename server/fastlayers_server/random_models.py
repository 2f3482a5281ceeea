"""Models of real dimensions with random weights, made on the device: what is benchmarked without a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from fastlayers.device import import_seconds
from fastlayers.layer import finalize


def random_model(
    config: Mapping[str, Any],
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    layers: int | None = None,
    seed: int = 0,
    said: Callable[[str], None] = lambda part: None,
    **options: Any,
) -> Any:
    """Return the model of a parsed ``config.json`` with random weights, finalised.

    Parameters
    ----------
    config : mapping
    device, dtype
    layers : int, optional
        Decoder layers to keep; default: all.
    seed : int
    said : callable
        Told what was just done.
    **options
        As for the family's constructor.
    """
    from fastlayers_models.auto import family_of

    changes = dict(config)
    if layers is not None:
        changes["num_hidden_layers"] = layers
        for name in ("layer_types", "mlp_only_layers"):
            if config.get(name):
                changes[name] = config[name][:layers]
    # The draft layer is no part of decoding.
    changes["num_nextn_predict_layers"] = 0
    family: Any = family_of(changes)
    said("code of the model's family")
    torch.zeros(1, device=device)  # the first tensor waits for the device's context, whoever makes it
    said("device opened")
    before = dict(import_seconds)
    model = family(family.config_class.from_hf(changes), device=device, dtype=dtype, **options).eval()
    imported = (f"{name} {seconds:.2f}" for name, seconds in import_seconds.items() if name not in before)
    said("layers built, backends chosen, packages imported: " + (", ".join(imported) or "none"))
    fill_random(model, seed)
    said("weights drawn")
    return finalize(model)


@torch.no_grad()
def fill_random(model: nn.Module, seed: int = 0) -> None:
    """Give every parameter values that keep activations of ordinary size, in place and without large temporaries."""
    first = next(model.parameters(), None)
    generator = torch.Generator(first.device if first is not None else "cpu").manual_seed(seed)
    parallel = getattr(model, "parallel", None)
    for name, parameter in model.named_parameters():
        last = name.rsplit(".", 1)[-1]
        if parallel is not None and parallel.tp.size > 1:  # what all ranks hold is equal, whatever lies before it
            generator.manual_seed((seed << 32) + zlib.crc32(name.encode()))
        if parameter.dtype == torch.float8_e4m3fn:
            # Any byte but those with the highest exponent bit: values below 2, no NaN.
            parameter.data.view(torch.uint8).random_(0, 256, generator=generator).bitwise_and_(0xBF)
        elif parameter.dtype == torch.int8:
            parameter.data.random_(-64, 65, generator=generator)
        elif parameter.dtype == torch.uint8:
            # MXFP4: scales are exponents with a bias of 127, codes are any.
            if "scale" in last:
                parameter.data.fill_(127 - 7)
            else:
                parameter.data.random_(0, 256, generator=generator)
        elif "scale" in last:
            parameter.data.fill_(0.02)
        elif parameter.dim() == 1:
            parameter.data.fill_(1.0 if last == "weight" else 0.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
