"""What both server sides read of a checkpoint in the same way."""
