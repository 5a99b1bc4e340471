"""``python -m benchmarks.adaptive``; see ``benchmarks.adaptive.sweep``."""

from __future__ import annotations

from benchmarks.adaptive.sweep import main

if __name__ == "__main__":
    main()
