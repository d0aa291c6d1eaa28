"""The part of the engine that lives on the device between steps: the state of rows."""
