"""Pages with tables between marks, ``<!-- name -->`` and ``<!-- /name -->``, that programs of this folder renew."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


def fill(text: str, page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """Return the text of ``page`` with every table renewed."""
    for name, table in tables.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if len(found := pattern.findall(text)) != 1:
            raise SystemExit(f"{page}: {len(found)} places marked {name}; expected one")
        made = table()
        text = pattern.sub(lambda match, made=made: f"{match[1]}{made}\n{match[2]}", text)  # type: ignore[misc]
    return text
