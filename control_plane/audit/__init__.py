"""The audit log: one line for each change, each refusal and each generation, in a chain that shows later changes."""
