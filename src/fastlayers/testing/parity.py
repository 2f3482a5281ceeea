"""One parity function for every backend of every layer, in-tree or not: :mod:`fastlayers.tuning.parity`.

The tuner checks with it what it is about to recommend, so it is no part of this package alone.
"""

from fastlayers.tuning.parity import ParityError, check_capture, check_parity, compare, poisoned_memory, refuse_to_skip

__all__ = ["ParityError", "check_capture", "check_parity", "compare", "poisoned_memory", "refuse_to_skip"]
