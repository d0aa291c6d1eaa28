"""`python -m gateway`: see --help."""

import sys

from contract.process_log import quiet_grpc
from gateway import polling

quiet_grpc()  # gRPC reads both when it is imported
polling.choose()

from gateway.main import main  # noqa: E402

sys.exit(main(sys.argv[1:]))
