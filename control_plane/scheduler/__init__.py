"""Which tokens run in which step, with which blocks and slots. Pure: no I/O, no clock, no protobuf."""
