"""MLA cores for sm_100, which this project has not been run on: rows with guards, no kernels.

Constructing one outside sm_100 cannot happen through the registry, which refuses first; done by hand it raises.
"""

from __future__ import annotations

from fastlayers.attention.mla.core import MLAConfig
from fastlayers.errors import NoBackendError


class _NotRun:
    name = ""

    def __init__(self, cfg: MLAConfig) -> None:
        reason = "this backend has a registry row only; it has never been run on sm_100 hardware"
        raise NoBackendError("mla", cfg, "sm_100", self.name, {self.name: reason})


class TrtllmGenMLA(_NotRun):
    """flashinfer's trtllm-gen MLA decode (items 4 and 5)."""

    name = "trtllm_gen"


class CutlassMLA(_NotRun):
    """sgl_kernel's CUTLASS MLA decode (item 6): page 128, heads padded to 128."""

    name = "cutlass"
