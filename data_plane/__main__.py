"""`python -m data_plane`: one worker process."""

import sys

from data_plane.worker import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
