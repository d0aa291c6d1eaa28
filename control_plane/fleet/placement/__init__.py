"""Which worker runs which request: prices, isolation of poison requests, rebalancing, migration."""
