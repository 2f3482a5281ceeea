"""Replace the layers of a Hugging Face model by fastlayers, in place and reversibly.

plan.py apply.py report.py     what a patch would do, doing and undoing it, what it did
families.py, a file a family   which class is replaced by what
matching.py structure.py       whether a module is what we think it is; hashes.py: code that is known
classes.py                     the swap of classes; `FastModule._fl_usable`: whether a call runs our code or steps aside
guard.py comparison.py         what a patched module must still be for that
norm.py mlp.py … mla.py        the layers themselves; packing.py: several linears of one input as one product
decode.py prefill.py step.py   `generate` as replays of captured graphs, over the pages of paged.py
capturable.py                  of which models, and why not
bf12.py head.py                weights in 12 bits for steps of one row, the head's too
"""

from fastlayers.patching.apply import patch, patched, unpatch
from fastlayers.patching.loading import from_pretrained
from fastlayers.patching.report import PatchEntry, PatchReport

__all__ = ["PatchEntry", "PatchReport", "from_pretrained", "patch", "patched", "unpatch"]
