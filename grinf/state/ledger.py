"""Who holds which ContextKV pages and which beam slot. Integers only: knows no tensor."""

from grinf.errors import CapacityError
from grinf.state.request import Lease


class Ledger:
    """Free lists of pages and beam slots; a lease is granted whole or not at all.

    A request's memory is known when it is admitted (its prompt's pages and one slot), so there is no growth,
    no preemption and no eviction.
    """

    def __init__(self, num_pages: int, page_size: int, num_slots: int) -> None:
        self.page_size = page_size
        self.num_pages, self.num_slots = num_pages, num_slots
        self._pages = list(range(num_pages - 1, -1, -1))
        self._slots = list(range(num_slots - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._pages)

    @property
    def free_slots(self) -> int:
        """Beam slots that nobody holds."""
        return len(self._slots)

    def pages_for(self, context_len: int) -> int:
        """Pages that a prompt of `context_len` tokens needs."""
        return -(-context_len // self.page_size)

    def lease(self, context_len: int) -> Lease | None:
        """Grant pages for a prompt and one beam slot; None where either is short for now.

        Raises:
            CapacityError: The prompt would not fit into an empty pool either.
        """
        needed = self.pages_for(context_len)
        if needed > self.num_pages:
            raise CapacityError(
                f"a prompt of {context_len} tokens needs {needed} pages, the pool has {self.num_pages}",
                fix="raise the memory fraction, or send shorter prompts",
            )
        if needed > len(self._pages) or not self._slots:
            return None
        pages = tuple(self._pages.pop() for _ in range(needed))
        return Lease(pages, self._slots.pop())

    def release(self, lease: Lease) -> None:
        """Take a lease back."""
        self._pages.extend(reversed(lease.pages))
        self._slots.append(lease.beam_slot)
