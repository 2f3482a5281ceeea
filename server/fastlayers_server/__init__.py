"""The command line and the OpenAI-compatible server, on top of `fastlayers_models`."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name not in ("LLM", "Params"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # Not at import: a front needs no torch.
    from fastlayers_server import llm

    return getattr(llm, name)
