"""One engine of the GPU run, from its start to its end: what its log says of what it did."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from integration.engine import EngineFailed, RealEngine


@dataclass
class Watched:
    """How one engine fared.

    Attributes:
        cache_lines: what it logs at its start of each cache.
        decode_steps, graph_steps: batches that were decoded or verified, and how many of these in
            captured graphs.
        error: set if it did not get to the end.
        seconds: from start to end.
    """

    cache_lines: list[str] = field(default_factory=list)
    decode_steps: int = 0
    graph_steps: int = 0
    log: str = ""
    error: str = ""
    seconds: float = 0.0


def watch(
    seen: Watched,
    options: Mapping[str, object],
    ask: Callable[[RealEngine], None],
    first_port: int,
    env: Mapping[str, str] | None = None,
) -> None:
    """Start an engine, have it asked, and note in ``seen`` how it fared; raises nothing.

    Args:
        first_port: engines that start together must not look for free ports in the same range: 200
            from here on are this one's.
        env: of `RealEngine`.
    """
    start = time.monotonic()
    ports = {"port": first_port, "nccl_port": first_port + 100}
    try:
        with RealEngine({**options, **ports}, env=env) as engine:
            try:
                ask(engine)
            finally:
                seen.log = engine.log
    except EngineFailed as error:
        seen.error = str(error)
        seen.log = seen.log or str(error)
    except Exception as error:
        seen.error = f"{type(error).__name__}: {error}"
    seen.seconds = time.monotonic() - start
    graphs = re.findall(r"Decode batch.*cuda graph: (True|False)", seen.log)
    seen.decode_steps, seen.graph_steps = len(graphs), graphs.count("True")
    lines = seen.log.splitlines()
    seen.cache_lines = [line.strip() for line in lines if "bytes per token" in line]
