"""What is set in our environment variables and has no effect: ``fastlayers doctor`` lists it, the log has it once."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from fastlayers import env
from fastlayers.device import OPTIONAL_PACKAGES

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NoEffect:
    """A variable, or a name in one, that changes nothing; ``broken``: it certainly was meant to."""

    variable: str
    state: str
    reason: str
    broken: bool


def without_effect() -> list[NoEffect]:
    """Return each variable that begins like ours, and each name in one, that nothing here knows."""
    known = ", ".join(env.KNOWN)
    found = [NoEffect(name, "broken", f"is no variable; known: {known}", True) for name in env.unknown_variables()]
    for name in sorted(env.disabled_packages().difference(OPTIONAL_PACKAGES)):
        reason = f"{name!r} is no package that a backend here takes: {', '.join(OPTIONAL_PACKAGES)}"
        found.append(NoEffect(env.DISABLE, "unknown name", reason, False))
    folder = env.tuned_dir()
    if folder and not Path(folder).is_dir():
        reason = f"{folder} is not a directory; its tables are not used"
        found.append(NoEffect(env.TUNED_DIR, "broken", reason, True))
    return found


def warn() -> None:
    """Log what has no effect; called once a process, before the first backend is chosen."""
    for each in without_effect():
        log.warning("%s: %s", each.variable, each.reason)
