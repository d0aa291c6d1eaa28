"""Starts processes that have imported torch already: each is forked from one that did so once for a test process."""
