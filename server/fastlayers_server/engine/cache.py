"""Pages and the prefix cache: who holds which page, and which prompts are remembered.

    block    lcm(page_size, 16) tokens, so 16 pages of one token or one page of 64
    Node     one block in the trie; its key is the block's token ids as bytes, compared exactly
    page     free | private (one request's) | locked (a node's, users > 0) | evictable (a node's, users = 0)

Page 0 is the dump for padded rows and belongs to nobody. Pages may be handed out again at once: whoever writes next is
enqueued behind whoever read last, as there is one stream. What a row in flight still writes there is harmless, even
NaN: attention reads no cell behind a request's last one (tests/attention/test_stale_cells.py).
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections.abc import Iterator, Sequence
from itertools import count

WIDTH = array("i").itemsize  # bytes of a token id in a key


class Node:
    """A block of tokens under its parent; ``users`` are the live requests whose tokens begin with this path.

    Roots have neither pages nor a parent, and a namespace as their key.
    """

    __slots__ = ("children", "key", "order", "pages", "parent", "queued", "users")

    def __init__(self, parent: Node | None, key: bytes, pages: tuple[int, ...]) -> None:
        self.parent, self.key, self.pages = parent, key, pages
        self.children: dict[bytes, Node] = {}
        self.users = 0
        self.order = 0  # when it was last used; -1: it left the trie, and its pages are freed by its last user
        self.queued = False  # among those that may be evicted


class PrefixCache:
    """All pages of the device's cache.

    Parameters
    ----------
    num_pages : int
        Page 0 included.
    page_size : int
    enabled : bool
        False: nothing is remembered, every page is free or private.
    """

    def __init__(self, num_pages: int, page_size: int, enabled: bool = True) -> None:
        self.num_pages, self.page_size, self.enabled = num_pages, page_size, enabled
        self.block = math.lcm(page_size, 16)
        self.pages_per_block = self.block // page_size
        self._free = list(range(num_pages - 1, 0, -1))
        self._roots: dict[bytes, Node] = {}
        self._heap: list[tuple[int, int, Node]] = []  # (last used, as far as was known then; tie; node), each once
        self._clock = count(1)
        self.evictable = self.locked = 0
        self.evicted_pages = 0

    @property
    def free(self) -> int:
        """Pages that are nobody's."""
        return len(self._free)

    @property
    def available(self) -> int:
        """Pages that :meth:`take` can give."""
        return len(self._free) + self.evictable

    @property
    def private(self) -> int:
        """Pages of requests that are in no node."""
        return self.num_pages - 1 - len(self._free) - self.evictable - self.locked

    def pages_for(self, tokens: int) -> int:
        """Return how many pages hold so many tokens."""
        return -(-tokens // self.page_size)

    def take(self, count: int) -> list[int]:
        """Hand out pages, evicting what was used longest ago; the caller knows that they are available."""
        while len(self._free) < count:
            self._evict()
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken

    def give_back(self, pages: Sequence[int]) -> None:
        """Take private pages back."""
        self._free.extend(pages)

    def match(self, namespace: bytes, tokens: Sequence[int], limit: int, packed: bytes = b"") -> list[Node]:
        """Return the path of remembered blocks that ``tokens`` begin with, of at most ``limit`` tokens.

        ``packed``: the first of them as they came, by :func:`fastlayers_server.engine.protocol.pack_ids`. To pack a
        long prompt again takes longer than to look it up.
        """
        node, path = self._roots.get(namespace), []
        if node is None:
            return []
        for key in self._keys(tokens, 0, limit // self.block, packed):
            node = node.children.get(key)
            if node is None:
                break
            path.append(node)
        return path

    def evictable_in(self, path: Sequence[Node]) -> int:
        """Return how many evictable pages a path has: pages that locking it would take away."""
        return sum(len(node.pages) for node in path if not node.users)

    def lock(self, path: Sequence[Node]) -> None:
        """Become a user of these nodes."""
        for node in path:
            if not node.users:
                self.evictable -= len(node.pages)
                self.locked += len(node.pages)
            node.users += 1

    def publish(
        self, namespace: bytes, path: list[Node], tokens: Sequence[int], pages: list[int], blocks: int
    ) -> list[int]:
        """Remember a request's blocks up to ``blocks``; ``path``, those it uses already, grows in place.

        Where an equal block is remembered already, the request uses that one's pages from now on, and its own are free:
        ``pages`` changes in place. Returns the columns that changed.
        """
        if not self.enabled or (path and path[-1].order < 0):
            return []
        parent = path[-1] if path else self._roots.setdefault(namespace, Node(None, namespace, ()))
        changed: list[int] = []
        for key in self._keys(tokens, len(path), blocks):
            first = len(path) * self.pages_per_block
            columns = range(first, first + self.pages_per_block)
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = Node(parent, key, tuple(pages[first : columns.stop]))
                node.users = 1
                self.locked += len(node.pages)
            else:
                self.lock((node,))
                self._free.extend(pages[first : columns.stop])
                pages[first : columns.stop] = node.pages
                changed.extend(columns)
            path.append(node)
            parent = node
        return changed

    def release(self, path: list[Node], pages: list[int], forget: bool = False) -> list[int]:
        """End a request's use of its nodes and pages; both lists are emptied. Returns the pages that became free.

        ``forget``: what only this request uses is not remembered, because its contents are in doubt.
        """
        now, before = next(self._clock), len(self._free)
        self._free.extend(reversed(pages[len(path) * self.pages_per_block :]))
        for node in reversed(path):
            node.users -= 1
            gone = node.order < 0
            if not gone:
                node.order = now
            if node.users:
                continue
            self.locked -= len(node.pages)
            if gone:
                self._free.extend(node.pages)
                continue
            self.evictable += len(node.pages)
            if not node.children:
                (self._remove if forget else self._push)(node)
        path.clear()
        pages.clear()
        return self._free[before:]

    def flush(self) -> int:
        """Forget everything; what is in use goes when it is released. Returns how many pages became free now."""
        before = len(self._free)
        while self.evictable:
            self._evict()
        for node in list(self.nodes()):
            node.parent.children.pop(node.key, None)  # type: ignore[union-attr]
            node.order = -1
        self._roots.clear()
        self._heap.clear()
        return len(self._free) - before

    def nodes(self) -> Iterator[Node]:
        """Yield the nodes of the trie, parents first (tests, flush)."""
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                yield node

    def _keys(self, tokens: Sequence[int], first: int, last: int, packed: bytes = b"") -> Iterator[bytes]:
        size, width = self.block, self.block * WIDTH
        there = max(first, min(last, len(packed) // width))
        for index in range(first, there):
            yield packed[index * width : (index + 1) * width]
        for index in range(there, last):
            yield array("i", tokens[index * size : (index + 1) * size]).tobytes()

    def _push(self, node: Node) -> None:
        if not node.queued:
            node.queued = True
            heapq.heappush(self._heap, (node.order, next(self._clock), node))

    def _evict(self) -> None:
        while True:
            order, _, node = heapq.heappop(self._heap)
            node.queued = False
            # Entries are not taken out of the heap when a node is used again, gets children, or leaves the trie.
            if node.users or node.children or node.order < 0:
                continue
            if node.order > order:
                self._push(node)
                continue
            self.evicted_pages += len(node.pages)
            self._remove(node)
            return

    def _remove(self, node: Node) -> None:
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        node.order = -1
        self.evictable -= len(node.pages)
        self._free.extend(reversed(node.pages))
        if not parent.children and parent.parent is None:
            del self._roots[parent.key]  # clients choose among as many namespaces as they like
        elif not parent.children and not parent.users:
            self._push(parent)
