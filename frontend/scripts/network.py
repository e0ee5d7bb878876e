"""A network that is not there: nobody waits for it.

Libraries that download ask again, several times and after longer and longer sleeps, for each of the files that
they look for. Where the name of a host is not found, minutes go by until the script comes to say so.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from echograph.frontend.scripts.adapter import patched


@contextmanager
def not_waited_for() -> Iterator[None]:
    """In the context, a host that is not found once is not looked for again, and who sleeps then does not."""
    lost: dict[Any, socket.gaierror] = {}
    here = threading.local()

    def looking(original: Callable[..., Any]) -> Callable[..., Any]:
        def look(host: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                if host in lost:
                    raise socket.gaierror(*lost[host].args)
                return original(host, *args, **kwargs)
            except socket.gaierror as error:
                lost[host], here.failed = error, True
                raise

        return look

    def sleeping(original: Callable[[float], None]) -> Callable[[float], None]:
        def sleep(seconds: float) -> None:
            failed, here.failed = getattr(here, "failed", False), False
            if not failed:
                original(seconds)

        return sleep

    with patched(socket, "getaddrinfo", looking), patched(time, "sleep", sleeping):
        yield
