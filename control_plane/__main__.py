"""`python -m control_plane`: see --help."""

import sys

from control_plane.server import main

sys.exit(main(sys.argv[1:]))
