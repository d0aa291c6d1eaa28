"""What an operator does with a store beside the server: look at it, check it, carry it elsewhere, tidy it."""
