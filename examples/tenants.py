"""Sends requests of two tenants, waits where a quota is used up, and shows what each tenant used.

Start the server with --tenants examples/tenants.json. docs/operations.md explains weights and quotas.
Run: python examples/tenants.py "Once upon a time"
"""

import os
import sys
import time

from motet import Client, ResourceExhausted

prompt = sys.argv[1]
with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
    for tenant in ("interactive", "batch", "batch", "batch"):
        while True:
            try:
                client.generate(prompt, tenant=tenant, max_tokens=16, ignore_eos=True).result()
                print(f"{tenant}: done")
                break
            except ResourceExhausted as error:  # the message names tenant, quota and limit
                print(f"{tenant}: {error.reason}, quota {error.metadata['quota']}; the server says when to try again")
                time.sleep(error.retry_after_s or 1.0)
    for usage in client.status().tenants:
        print(f"{usage.tenant}: weight {usage.weight:g}, {usage.num_generated_tokens} tokens generated")
