"""Replace the layers of a Hugging Face model by fastlayers, in place and reversibly."""

from fastlayers.patching.apply import patch, patched, unpatch
from fastlayers.patching.loading import from_pretrained
from fastlayers.patching.report import PatchEntry, PatchReport

__all__ = ["PatchEntry", "PatchReport", "from_pretrained", "patch", "patched", "unpatch"]
