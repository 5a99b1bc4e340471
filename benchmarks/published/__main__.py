"""``python -m benchmarks.published``: see ``check``."""

import sys

from benchmarks.published.check import main

if __name__ == "__main__":
    sys.exit(main())
