"""Pages of a paged cache, handed out and taken back on the host."""

from __future__ import annotations

from fastlayers.errors import (
    AllocatorOverflowError,
    ArgumentError,
    as_integers,
    check_kind,
    check_plain,
    check_positive,
)

# The page table is int32.
MAX_PAGES = 2**31


class PagePool:
    """Hands out pages ``1 … num_pages - 1``; page 0 is the dump for padded rows and belongs to nobody.

    Examples
    --------
    >>> import fastlayers as fl
    >>> pool = fl.PagePool(num_pages=4, page_size=16)
    >>> pages = pool.extend([], length=17, who="request 7")
    >>> pages, pool.free_pages
    ([1, 2], 1)
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        check_positive("PagePool", num_pages=num_pages, page_size=page_size)
        num_pages, page_size = as_integers(num_pages, page_size)
        if num_pages > MAX_PAGES:
            raise ArgumentError("PagePool", "num_pages", num_pages, f"at most {MAX_PAGES}: page tables are int32")
        self.num_pages, self.page_size = num_pages, page_size
        self._next = 1  # this page and those behind it have never been handed out
        self._free: list[int] = []  # taken back: the last one goes out first
        self._used: set[int] = set()

    @property
    def free_pages(self) -> int:
        """Pages that can still be handed out."""
        return len(self._free) + self.num_pages - self._next

    def extend(self, pages: list[int], length: int, who: str) -> list[int]:
        """Append pages to ``pages`` (in place, and returned) until they hold ``length`` tokens.

        Raises
        ------
        AllocatorOverflowError
            Not enough pages; the requester is named and nothing was handed out.
        ArgumentError
            ``pages`` is no list of pages handed out, or ``length`` no number of tokens.
        """
        if type(pages) is not list or type(length) is not int or length < 0:  # called for each request in each step
            check_kind("PagePool.extend", list, pages=pages)
            check_plain("PagePool.extend", "int >= 0", length=length)
            (length,) = as_integers(length)
        needed = -(-length // self.page_size) - len(pages)
        if needed <= 0:
            return pages
        if not ({*map(type, pages)} <= {int} and self._used.issuperset(pages)):
            self._check_used("PagePool.extend", pages)
        if needed > self.free_pages:
            raise AllocatorOverflowError(
                f"PagePool: {who} needs {needed} more pages for {length} tokens; {self.free_pages} of "
                f"{self.num_pages - 1} are free (page size {self.page_size})"
            )
        again = [self._free.pop() for _ in range(min(needed, len(self._free)))]
        first, self._next = self._next, self._next + needed - len(again)
        handed = (*again, *range(first, self._next))
        self._used.update(handed)
        pages.extend(handed)
        return pages

    def release(self, pages: list[int]) -> None:
        """Take pages back; ``pages`` is emptied.

        Raises
        ------
        ArgumentError
            A page was not handed out (released twice); nothing was taken back.
        """
        check_kind("PagePool.release", list, pages=pages)
        self._check_used("PagePool.release", pages)
        for page in reversed(pages):
            self._used.discard(page)
            self._free.append(page)
        pages.clear()

    def _check_used(self, who: str, pages: list[int]) -> None:
        """Raise :class:`ArgumentError` unless each of ``pages`` was handed out, and none is there twice."""
        check_plain(who, "tuple[int, ...]", pages=tuple(pages))
        wrong = [page for page in pages if page not in self._used]
        if wrong or len(set(pages)) != len(pages):
            raise ArgumentError(who, "pages", wrong or pages, "pages handed out and not yet released")
