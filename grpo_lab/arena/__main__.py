"""The arena in a terminal; see `grpo_lab.arena.cli`."""

from grpo_lab.arena.cli import main

if __name__ == "__main__":
    main()
