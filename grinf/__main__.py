"""The command `grinf`, also as `python -m grinf`: an interrupt while modules load is an interrupt, too."""

import sys


def main() -> int:
    """Run the command line; see `grinf.cli.app.main`."""
    try:
        from grinf.cli.app import main as run
    except KeyboardInterrupt:
        return 130
    return run()


if __name__ == "__main__":
    sys.exit(main())
