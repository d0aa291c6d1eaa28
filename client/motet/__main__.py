"""`python -m motet`: the same as the `motet` command."""

import sys

from motet.cli.main import main

sys.exit(main())
