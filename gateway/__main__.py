"""`python -m gateway`: see --help."""

import sys

from contract.process_log import quiet_grpc

quiet_grpc()  # gRPC reads it when it is imported

from gateway.main import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
