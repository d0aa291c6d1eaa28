"""What the server and the process that renders conversations send each other: frames over a socket."""

from __future__ import annotations

import struct

# Length of what follows in bytes; whether that is text (1) or an error message (0). Then the UTF-8.
FRAME_HEADER = struct.Struct("<IB")
