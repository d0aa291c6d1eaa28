"""The files of a checkpoint: read and written tensor by tensor, and brought to floats where they are quantised."""
