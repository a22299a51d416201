"""`python -m grinf` is `grinf`."""

import sys

from grinf.cli.app import main

sys.exit(main())
