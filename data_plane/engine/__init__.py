"""Executes decoded step plans: row state, model forward, sampling."""
