"""``python -m fedkin``: the command line."""

import sys

from fedkin.cli import main

sys.exit(main())
