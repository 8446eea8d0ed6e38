"""The arena in a terminal; see `grpo_lab.arena.cli`."""

import sys

from grpo_lab.arena.cli import main

if __name__ == "__main__":
    sys.exit(main())
