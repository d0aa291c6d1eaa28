"""`client.adapters`: the adapter registry of a server, for the blocking and for the asyncio client."""
