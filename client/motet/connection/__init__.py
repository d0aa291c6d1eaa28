"""The connection of one client: how its channel is set up, when another one is needed, whether the server responds."""
