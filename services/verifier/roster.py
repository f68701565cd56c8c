"""Who waits, who runs, and who must give way when pages run out."""

from __future__ import annotations

from collections import deque

from services.verifier import prefix
from services.verifier.paged_kv import PageList, PagePool
from services.verifier.request import Request


class Roster:
    """Requests of the engine. `running` is in order of admission, oldest first; the youngest gives way first."""

    def __init__(self, pool: PagePool, max_running: int, prefix_caching: bool = False) -> None:
        self.pool = pool
        self.max_running = max_running
        self.prefix_caching = prefix_caching
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
        self.looked_up = 0  # tokens of admitted requests, each counted once
        self.reused = 0  # those of them whose KV was cached
        self._by_id: dict[str, Request] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, request_id: str) -> Request | None:
        """The request of that id, waiting or running."""
        return self._by_id.get(request_id)

    def add(self, request: Request) -> None:
        """Queues a request."""
        assert request.request_id not in self._by_id, "two requests of one id"
        self._by_id[request.request_id] = request
        self.waiting.append(request)

    def remove(self, request: Request) -> None:
        """Forgets a request and frees its pages."""
        del self._by_id[request.request_id]
        if request in self.running:
            self.running.remove(request)
            self.pool.free(request.pages)
        else:
            self.waiting.remove(request)

    def admit(self, rows: str = "") -> list[Request]:
        """Moves waiting requests to running, first come first served, while seats and pages for their tokens last.

        Each begins with the longest cached prefix of its tokens; `rows` is the fingerprint that feature rows of reused
        pages must have. One whose next page is just being computed by somebody's prefill waits for it, and lets others
        pass: so long as that prefill is running it would only do the same work again, and behind it.
        """
        admitted: list[Request] = []
        promised = self.pool.used + sum(self._growth(r) for r in self.running)
        coming = {address for r in self.running for address in self._coming(r)} if self.waiting else set()
        kept = 0  # seats of those who wait for a page
        for request in list(self.waiting):
            if len(self.running) + kept >= self.max_running:
                break
            wanted = self._wanted(request)
            found = self.pool.find(wanted, rows)
            if len(found) < len(wanted) and wanted[len(found)] in coming:
                kept += 1
                continue
            tokens, idle = len(request.tokens), self.pool.idle_among(found)
            need = self.pool.pages_for(tokens + 1) - len(found) + idle
            if promised + need > self.pool.num_pages and self.running:
                break
            self.waiting.remove(request)
            self._start(request, found)
            admitted.append(request)
            promised += idle + self._growth(request)
            coming.update(self._coming(request))
        return admitted

    def _wanted(self, request: Request) -> list[bytes]:
        """Addresses of the pages that it could begin with; one token at least is left to compute, for its logits."""
        if not self.prefix_caching:
            return []
        prefix.extend(request.addresses, request.tokens, self.pool.page_size)
        return request.addresses[: (len(request.tokens) - 1) // self.pool.page_size]

    def _coming(self, request: Request) -> list[bytes]:
        """Addresses of the pages that a running request's prefill still has to compute."""
        return [] if request.decoding else request.addresses[request.pages.committed // self.pool.page_size :]

    def _growth(self, request: Request) -> int:
        """Pages that a running request will want soon: for its tokens, and for a page's worth of new ones.

        Without that much room for who runs, a newcomer would be let in only to give way again.
        """
        soon = len(request.tokens) + 1 + self.pool.page_size
        most = request.prompt_length + request.sampling.max_tokens
        return self.pool.pages_for(min(soon, most)) - len(request.pages.pages)

    def _start(self, request: Request, found: list[int]) -> None:
        request.pages = self.pool.open()
        self.pool.adopt(request.pages, found)
        self.running.append(request)
        if request.cached_tokens is None:  # not one that gave way and finds what it computed itself
            request.cached_tokens = min(request.pages.committed, request.prompt_length)
            self.looked_up += len(request.tokens) if self.prefix_caching else 0
            self.reused += request.pages.committed

    def reserve(self, request: Request, tokens: int) -> int:
        """Room for up to `tokens` more tokens of a running request, as far as pages are free; returns for how many.

        Pre-empts younger ones only if there is no room for a single token; 0 if the request itself is the youngest
        and had to give way.
        """
        while not (room := self.pool.room(request.pages)):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return 0
        count = min(tokens, room)
        assert self.pool.reserve(request.pages, count), "no room where there is some"
        return count

    def commit(self, request: Request, tokens: int, rows: str = "") -> None:
        """The first `tokens` reserved tokens are valid, with feature rows made by `rows`; pages that they fill can be
        found by others from now on.
        """
        self.pool.commit(request.pages, tokens, rows)
        if self.prefix_caching:
            prefix.extend(request.addresses, request.tokens, self.pool.page_size)
            self.pool.publish(request.pages, request.addresses)

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue without pages; its tokens stay, their KV is computed or found again later."""
        assert len(self.running) > 1, "one request that does not fit alone was let in"
        self.running.remove(request)
        self.pool.free(request.pages)
        request.pages = PageList()
        self.waiting.appendleft(request)
        self.preemptions += 1

    @property
    def outstanding_tokens(self) -> int:
        """Tokens still to be computed for everybody: prompts without KV, and what may yet be produced."""
        return sum(r.pending + r.remaining for r in self._by_id.values())
