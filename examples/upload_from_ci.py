"""Uploads an adapter at the end of a CI pipeline: check it, sample from it, keep it or go back to the last version.

The exit status is 0 if the new version is active, 1 if the server refused it or the sample has no text.
Run: python examples/upload_from_ci.py legal path/to/peft-adapter "The party of the first part" --label commit=abc123
"""

import argparse
import os
import sys

from motet import Client, InvalidArgument

parser = argparse.ArgumentParser()
parser.add_argument("name")
parser.add_argument("directory")
parser.add_argument("prompt", help="a prompt for a sample text")
parser.add_argument("--label", action="append", default=[], help="KEY=VALUE, kept with the adapter")
args = parser.parse_args()

with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
    try:
        client.adapters.register(args.name, args.directory, validate_only=True)  # the server stores nothing
    except InvalidArgument as error:
        sys.exit("\n".join(f"{violation.field}: {violation.description}" for violation in error.field_violations))

    labels = dict(label.split("=", 1) for label in args.label)
    adapter = client.adapters.register(args.name, args.directory, labels=labels)
    assert adapter.registration is not None and adapter.active_version is not None
    print(f"{adapter.registration.change}: version {adapter.active_version.number}, {adapter.active_version.digest}")

    text = client.generate(args.prompt, adapter=args.name, max_tokens=32).text()
    print(f"sample: {text!r}")
    if text.strip():
        sys.exit(0)
    previous = adapter.registration.previous_version
    if previous is not None:
        client.adapters.activate(args.name, previous.digest)
        print(f"rolled back to version {previous.number}")
    sys.exit(1)
