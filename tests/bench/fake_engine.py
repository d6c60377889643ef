"""Stands in for the process of a measured engine: prints a result a shape, or fails."""

from __future__ import annotations

import json
import sys
import time

if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    if job.get("sleep"):
        time.sleep(60)
    for batch, context in job["shapes"]:
        result = {"batch": batch, "context": context, "us": 5.0, "ttft_ms": 1.0, "kv_tokens": 7}
        print(json.dumps(result), flush=True)
    if job["engine"].get("attention_backend") == "fa3":
        print("flash_ops is missing", file=sys.stderr)
        sys.exit(3)
