"""``python -m offload``: the command line."""

from __future__ import annotations

from offload.cli import main

if __name__ == "__main__":
    main()
