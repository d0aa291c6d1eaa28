"""The largest worker that a Hello may describe: a worker's flags stay within, a control plane refuses more."""

from __future__ import annotations

MAX_BLOCKS = 1 << 24  # KV blocks
MAX_BLOCK_SIZE = 1 << 16  # tokens of a KV block
MAX_HOST_BLOCKS = 1 << 21  # KV blocks in host memory
MAX_ROWS = 1 << 16  # requests at once
MAX_STEP_TOKENS = 1 << 20  # tokens of a step
MAX_HIDDEN_WIDTH = 1 << 20  # values of a hidden state
MAX_SLOTS = 1 << 16  # adapters at once
MAX_REASON_BYTES = 200  # why a target module takes no adapters, printable ASCII
