"""What both ends of the plan stream do in the same way."""
