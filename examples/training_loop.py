"""Pushes a new version of an adapter after every round of training, and samples from it while training goes on.

Streams that are running keep the version that they started with. Needs torch, transformers and peft.
Run: python examples/training_loop.py path/to/checkpoint my-adapter corpus.txt --rounds 5
"""

import argparse
import os
import tempfile

import torch
from motet import Client
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("model", help="checkpoint directory that the server serves")
parser.add_argument("name", help="name of the adapter on the server")
parser.add_argument("corpus", type=argparse.FileType(encoding="utf-8"), help="text file to train on")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--steps", type=int, default=10, help="training steps of a round")
args = parser.parse_args()

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.model)
lora = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
model = get_peft_model(AutoModelForCausalLM.from_pretrained(args.model), lora)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
with args.corpus as corpus:
    tokens = torch.tensor(tokenizer(corpus.read())["input_ids"])

with Client(os.environ.get("MOTET_SERVER", "127.0.0.1:50051")) as client:
    for number in range(1, args.rounds + 1):
        losses = []
        for _ in range(args.steps):
            start = int(torch.randint(max(len(tokens) - 64, 1), ()))
            batch = tokens[None, start : start + 64]
            loss = model(input_ids=batch, labels=batch).loss
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        with tempfile.TemporaryDirectory() as directory:
            model.save_pretrained(directory)
            adapter = client.adapters.register(args.name, directory, labels={"round": str(number)})
        version = adapter.active_version
        assert version is not None
        sample = client.generate("The ", adapter=args.name, adapter_digest=version.digest, max_tokens=16).text()
        mean_loss = sum(losses) / len(losses)
        print(f"round {number}: loss {mean_loss:.3f}, version {version.number} {version.digest[:12]}, {sample!r}")
