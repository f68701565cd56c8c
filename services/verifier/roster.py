"""Who waits, who runs, and who must give way when pages run out."""

from __future__ import annotations

from collections import deque

from services.verifier.paged_kv import PageList, PagePool
from services.verifier.request import Request


class Roster:
    """Requests of the engine. `running` is in order of admission, oldest first; the youngest gives way first."""

    def __init__(self, pool: PagePool, max_running: int) -> None:
        self.pool = pool
        self.max_running = max_running
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = 0
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

    def admit(self) -> list[Request]:
        """Moves waiting requests to running, first come first served, while seats and pages for their tokens last."""
        admitted = []
        promised = self.pool.used + sum(
            self.pool.pages_for(len(r.tokens) + 1) - len(r.pages.pages) for r in self.running
        )
        while self.waiting and len(self.running) < self.max_running:
            need = self.pool.pages_for(len(self.waiting[0].tokens) + 1)
            if promised + need > self.pool.num_pages and self.running:
                break
            promised += need
            request = self.waiting.popleft()
            request.pages = self.pool.open()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def reserve(self, request: Request, tokens: int) -> bool:
        """Room for `tokens` more tokens of a running request; pre-empts younger ones for it.

        Returns False if the request itself is the youngest and had to give way.
        """
        while not self.pool.reserve(request.pages, tokens):
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue without pages; its tokens stay, their KV is computed again later."""
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
