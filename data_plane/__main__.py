"""`python -m data_plane`: one worker process."""

import sys

from contract.process_log import quiet_grpc

quiet_grpc()  # gRPC reads it when it is imported

from data_plane.worker import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
