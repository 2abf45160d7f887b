"""Memory of a process as the system counts it: pages of files that it has mapped are in it while they are in use."""

import resource
import sys
from pathlib import Path


def process_memory(field: str) -> int:
    """Bytes of this process: VmRSS now, VmHWM at most so far. `getrusage` would count the parent's before exec."""
    status = Path("/proc/self/status")
    if not status.exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    line = next(line for line in status.read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024
