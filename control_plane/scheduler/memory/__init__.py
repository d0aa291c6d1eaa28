"""What a worker has to give: KV blocks, host blocks, rows, adapter slots, and what the prefix cache keeps."""
