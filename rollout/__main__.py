"""``python -m rollout``, the same as the console script ``rollout``."""

from rollout.cli import main

if __name__ == "__main__":
    main(prog_name="rollout")
